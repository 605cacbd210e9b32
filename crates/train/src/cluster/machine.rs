//! The machine of a rank.

use std::path::Path;

use ballast_model::memory;
use serde::{Deserialize, Serialize};

/// A machine, or a container of one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Machine {
    /// Host name, for messages.
    pub(crate) name: String,
    boot: String,
    /// The set of mounted file systems.
    mounts: String,
}

impl Machine {
    /// The machine of this process.
    pub(crate) fn here() -> Machine {
        let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let name = if name.trim().is_empty() { "a machine without a name" } else { name.trim() };
        let mounts = std::fs::read_link(Path::new("/proc/self/ns/mnt")).unwrap_or_default();
        Machine { name: name.into(), boot: memory::boot_id(), mounts: mounts.to_string_lossy().into_owned() }
    }

    /// Returns true if a file that a process of one creates is visible to the other at once.
    pub(crate) fn shares_files(&self, other: &Machine) -> bool {
        let is_known = !self.boot.is_empty() && !self.mounts.is_empty();
        is_known && (&self.boot, &self.mounts) == (&other.boot, &other.mounts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_shared_under_one_kernel_and_one_set_of_mounts() {
        let here = Machine::here();
        assert!(!here.name.is_empty());
        assert_eq!(here.shares_files(&Machine::here()), !here.boot.is_empty() && !here.mounts.is_empty());
        let other_boot = Machine { boot: "other".into(), ..here.clone() };
        let other_mounts = Machine { mounts: "other".into(), ..here.clone() };
        assert!(!here.shares_files(&other_boot) && !here.shares_files(&other_mounts));
        let unknown = Machine { boot: String::new(), ..here };
        assert!(!unknown.shares_files(&unknown), "a machine without an identity is no other's");
    }
}
