//! Available, current and peak memory of this process.

mod cgroup;

use std::path::Path;

use crate::error::{Error, Result};

/// Returns the bytes that this process can still allocate without swapping: the free memory of the machine,
/// or of its control group if that is less. `None` if the system does not report it.
pub fn available() -> Option<u64> {
    [field("/proc/meminfo", "MemAvailable:"), cgroup::available(Path::new("/"))].into_iter().flatten().min()
}

/// Returns the resident memory of this process in bytes.
pub fn current() -> Option<u64> {
    field("/proc/self/status", "VmRSS:")
}

/// Returns the peak resident memory of this process in bytes.
pub fn peak() -> Option<u64> {
    field("/proc/self/status", "VmHWM:")
}

/// Makes the allocator keep freed memory instead of returning it to the system: every step frees and
/// allocates the same large buffers, and fresh pages cost time. It affects the whole process, so programs
/// call it at their start, not libraries. No effect unless the allocator is glibc's.
pub fn keep_freed() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: mallopt sets numbers inside the allocator, under its own lock.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 1 << 30);
        libc::mallopt(libc::M_TRIM_THRESHOLD, i32::MAX);
    }
}

/// Fails if `needed` bytes for `what` are not available.
pub fn check(what: &str, needed: u64) -> Result {
    match available() {
        Some(available) if needed > available => Err(Error::Memory { what: what.into(), needed, available }),
        _ => Ok(()),
    }
}

/// Reads a field in kB from a file in /proc, and returns bytes.
fn field(file: &str, name: &str) -> Option<u64> {
    let text = std::fs::read_to_string(file).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
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
