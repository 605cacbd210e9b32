//! Available, current and peak memory of this process.

mod cgroup;

use std::path::Path;

use crate::error::{Error, Result};

/// Memory that can still be allocated, under one of the limits of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bound {
    /// The machine or control group whose processes have this memory in common; `None`: it is the process's alone.
    pub shared: Option<String>,
    /// Bytes.
    pub available: u64,
}

/// Returns the bytes that this process can still allocate without swapping, which is the least of its [`bounds`].
/// `None` if the system does not report it.
pub fn available() -> Option<u64> {
    bounds().into_iter().map(|bound| bound.available).min()
}

/// Returns what bounds the memory of this process: the free memory of the machine, of its control groups, and what
/// the limits of the process (`ulimit -v`, `ulimit -d`) leave.
pub fn bounds() -> Vec<Bound> {
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let below = |limit: &str, used: &str| {
        Some(soft_limit(&limits, limit)?.saturating_sub(field("/proc/self/status", used).unwrap_or(0)))
    };
    let boot = boot_id();
    let of_machine = field("/proc/meminfo", "MemAvailable:").map(|free| (boot.clone(), free));
    let groups = cgroup::limits(Path::new("/")).into_iter();
    let of_groups = groups.map(|((device, folder), left)| (format!("{boot} {device}:{folder}"), left));
    let shared = of_machine
        .into_iter()
        .chain(of_groups)
        .map(|(shared, available)| Bound { shared: Some(shared), available });
    let own = [below("Max address space", "VmSize:"), below("Max data size", "VmData:")];
    shared.chain(own.into_iter().flatten().map(|available| Bound { shared: None, available })).collect()
}

/// Returns the identity of this machine since it was started, also inside a container; empty if the system has none.
pub fn boot_id() -> String {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    id.map(|id| id.trim().to_string()).unwrap_or_default()
}

/// Returns the resident memory of this process in bytes.
pub fn current() -> Option<u64> {
    field("/proc/self/status", "VmRSS:")
}

/// Returns the peak resident memory of this process in bytes.
pub fn peak() -> Option<u64> {
    field("/proc/self/status", "VmHWM:")
}

/// Returns the resident memory of this process in bytes, and with it the pages of the executable that are
/// not resident yet: code is read when it first runs.
pub fn with_all_code() -> Option<u64> {
    let executable = std::env::current_exe().ok()?;
    let maps = std::fs::read_to_string("/proc/self/smaps").ok()?;
    Some(current()? + unread_bytes(&maps, executable.to_str()?))
}

/// Sums the bytes of the mappings of a file, in the format of /proc/self/smaps, that are not resident.
fn unread_bytes(maps: &str, file: &str) -> u64 {
    let (mut of_file, mut size, mut resident) = (false, 0, 0);
    for line in maps.lines() {
        match line.split_once(':') {
            Some(("Size", value)) if of_file => size += kilobytes(value).unwrap_or(0),
            Some(("Rss", value)) if of_file => resident += kilobytes(value).unwrap_or(0),
            // The first line of a mapping ends with its path; its colon is that of a device number.
            Some((range, _)) if range.contains('-') => of_file = line.ends_with(file),
            _ => {}
        }
    }
    size.saturating_sub(resident)
}

/// Size from which freed buffers go back to the system: with such buffers, the holes between kept ones were 7 % of
/// the memory of a step (131,072 tokens).
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const RETURNED: libc::c_int = 128 << 20;

/// Makes the allocator keep freed memory instead of returning it to the system, except for very large buffers:
/// every step frees and allocates the same buffers, and fresh pages cost time. It affects the whole process, so
/// programs call it at their start, not libraries. No effect unless the allocator is glibc's.
pub fn keep_freed() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: mallopt sets numbers inside the allocator, under its own lock.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, RETURNED);
        libc::mallopt(libc::M_TRIM_THRESHOLD, i32::MAX);
    }
}

/// Returns freed memory to the system, once: after the end of large objects that are not made again, such as
/// the f32 weights of a model that was cast. No effect unless the allocator is glibc's.
pub fn release_freed() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: malloc_trim returns unused pages of the allocator, under its own locks.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Fails if `needed` bytes for `what` are not available.
pub fn check(what: &str, needed: u64) -> Result {
    match available() {
        Some(available) if needed > available => Err(Error::Memory { what: what.into(), needed, available }),
        _ => Ok(()),
    }
}

/// Returns a limit in bytes from the text of /proc/self/limits: name, soft limit, hard limit, unit. `None` if there is
/// none.
fn soft_limit(limits: &str, name: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Reads a field in kB from a file in /proc, and returns bytes.
fn field(file: &str, name: &str) -> Option<u64> {
    let text = std::fs::read_to_string(file).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    kilobytes(line)
}

/// Parses "12 kB" and returns bytes.
fn kilobytes(value: &str) -> Option<u64> {
    Some(value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kept_pages_can_be_allocated_again_and_zeroed() {
        keep_freed();
        for size in [1 << 20, 40 << 20, 3] {
            let mut buffer = vec![0u8; size];
            buffer.fill(7);
            assert!(buffer.iter().all(|byte| *byte == 7));
            drop(buffer);
            assert!(vec![0u8; size].iter().all(|byte| *byte == 0), "zeros are zeros, on used pages too");
        }
    }

    #[test]
    fn code_that_did_not_run_yet_is_counted() {
        let maps = "55d0-55d8 r--p 00000000 08:01 12 /opt/a/ballast\nSize: 40 kB\nKernelPageSize: 4 kB\nRss: 12 kB\n\
                    55d8-55e8 r-xp 00008000 08:01 12 /opt/a/ballast\nSize: 60 kB\nRss: 20 kB\nVmFlags: rd ex\n\
                    7f00-7f08 r-xp 00000000 08:01 13 /usr/lib/libc.so.6\nSize: 500 kB\nRss: 100 kB\n";
        assert_eq!(unread_bytes(maps, "/opt/a/ballast"), 68 << 10);
        assert_eq!(unread_bytes(maps, "/opt/other"), 0);
        if let (Some(now), Some(all)) = (current(), with_all_code()) {
            assert!(all + (1 << 20) > now);
        }
    }

    #[test]
    fn limits_of_the_process_are_read_and_unlimited_is_none() {
        let limits = "Limit                     Soft Limit           Hard Limit           Units     \n\
                      Max data size             unlimited            unlimited            bytes     \n\
                      Max address space         268435456            unlimited            bytes     \n";
        assert_eq!(soft_limit(limits, "Max address space"), Some(256 << 20));
        assert_eq!(soft_limit(limits, "Max data size"), None);
        assert_eq!(soft_limit("", "Max data size"), None);
    }

    #[test]
    fn the_free_memory_of_the_machine_is_shared_by_its_processes() {
        let Some(free) = field("/proc/meminfo", "MemAvailable:") else { return };
        let bounds = bounds();
        let of_machine = bounds.iter().find(|bound| bound.shared.as_deref() == Some(&boot_id())).unwrap();
        // Other processes take and free memory meanwhile.
        assert!(of_machine.available > free / 2 && of_machine.available < 2 * free);
        assert!(available().is_some_and(|available| available < 2 * free));
    }

    #[test]
    fn an_allocation_that_cannot_fit_is_refused_with_both_figures() {
        if available().is_none() {
            return;
        }
        assert!(check("nothing", 0).is_ok());
        let error = check("the model", u64::MAX).unwrap_err().to_string();
        assert!(error.contains("not enough memory for the model: 16777216.0 TiB needed, "), "{error}");
        assert!(peak().is_some_and(|bytes| bytes > 1 << 20));
    }
}
