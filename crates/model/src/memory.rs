//! Memory that this process can have, has, and has had.

mod cgroup;

use std::path::Path;

use crate::error::{Error, Result};

/// Bytes that this process can still have without swapping: what the machine has left, or the limit of its container
/// where that is less. `None` where the system does not say.
pub fn available() -> Option<u64> {
    [field("/proc/meminfo", "MemAvailable:"), cgroup::available(Path::new("/"))].into_iter().flatten().min()
}

/// What this process has in use now.
pub fn current() -> Option<u64> {
    field("/proc/self/status", "VmRSS:")
}

/// The most memory that this process has had in use at once.
pub fn peak() -> Option<u64> {
    field("/proc/self/status", "VmHWM:")
}

/// Tells the allocator to keep what is freed instead of giving it back to the system: a step frees and takes the same large
/// buffers over and over, and every fresh page costs time. For the whole process, so it is a program's to call, at its start.
/// Nothing happens where the allocator is not glibc's.
pub fn keep_freed() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: mallopt sets numbers inside the allocator, under its own lock.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 1 << 30);
        libc::mallopt(libc::M_TRIM_THRESHOLD, i32::MAX);
    }
}

/// An error if `needed` bytes for `what` are not there.
pub fn check(what: &str, needed: u64) -> Result {
    match available() {
        Some(available) if needed > available => Err(Error::Memory { what: what.into(), needed, available }),
        _ => Ok(()),
    }
}

/// A number of kB in a file of the proc system, in bytes.
fn field(file: &str, name: &str) -> Option<u64> {
    let text = std::fs::read_to_string(file).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_as_good_as_before_when_freed_pages_are_kept() {
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
    fn what_cannot_fit_is_refused_with_both_figures() {
        if available().is_none() {
            return;
        }
        assert!(check("nothing", 0).is_ok());
        let error = check("the model", u64::MAX).unwrap_err().to_string();
        assert!(error.contains("the model needs 18446744073709551615 bytes"), "{error}");
        assert!(peak().is_some_and(|bytes| bytes > 1 << 20));
    }
}
