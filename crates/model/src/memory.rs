//! How much memory there is.

use crate::error::{Error, Result};

/// Bytes that can still be had without swapping; `None` where the system does not say.
pub fn available() -> Option<u64> {
    field("/proc/meminfo", "MemAvailable:")
}

/// What this process has in use now.
pub fn current() -> Option<u64> {
    field("/proc/self/status", "VmRSS:")
}

/// The most memory that this process has had in use at once.
pub fn peak() -> Option<u64> {
    field("/proc/self/status", "VmHWM:")
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
