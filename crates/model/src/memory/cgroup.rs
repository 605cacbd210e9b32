//! Memory limit of the control group that this process runs in: a container, a service, a batch job.
//!
//! `/proc/self/cgroup` names the group, `/proc/self/mountinfo` the folder of its files. Limits of parent
//! groups count too. Version 2 has `memory.max` and `memory.current`, version 1 `memory.limit_in_bytes` and
//! `memory.usage_in_bytes`. Inactive file pages count as usage, but the system reclaims them before it
//! refuses memory, so they are counted as available.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// File names of one version of control groups.
struct Version {
    filesystem: &'static str,
    limit: &'static str,
    usage: &'static str,
    /// Field of `memory.stat` with the reclaimable bytes.
    reclaimable: &'static str,
}

const VERSIONS: [Version; 2] = [
    Version {
        filesystem: "cgroup2",
        limit: "memory.max",
        usage: "memory.current",
        reclaimable: "inactive_file",
    },
    Version {
        filesystem: "cgroup",
        limit: "memory.limit_in_bytes",
        usage: "memory.usage_in_bytes",
        reclaimable: "total_inactive_file",
    },
];

/// Returns the bytes that the tightest limit leaves; `None` without a limit.
#[cfg(test)]
fn available(root: &Path) -> Option<u64> {
    limits(root).into_iter().map(|(_, left)| left).min()
}

/// Returns the groups with a limit that this process is in, as device and inode of their folder, which containers of
/// one machine have in common, and the bytes that each limit leaves. `root` is `/`, or another folder in tests.
pub(super) fn limits(root: &Path) -> Vec<((u64, u64), u64)> {
    let read = |name: &str| fs::read_to_string(root.join(name)).unwrap_or_default();
    let (groups, mounts) = (read("proc/self/cgroup"), read("proc/self/mountinfo"));
    let limits = |version: &Version| -> Option<Vec<((u64, u64), u64)>> {
        let group = groups.lines().find_map(|line| group_path(line, version))?;
        let (mount_root, mount_point) = mounts.lines().find_map(|line| mount(line, version))?;
        // A container may see its own group as the root of the mount, under a path of the host.
        let below = Path::new(group).strip_prefix(mount_root).unwrap_or(Path::new(""));
        let top = root.join(mount_point.strip_prefix('/')?);
        let folder = top.join(below.strip_prefix("/").unwrap_or(below));
        let limit = |folder: &Path| {
            let found = fs::metadata(folder).ok()?;
            Some(((found.dev(), found.ino()), left_in(folder, version)?))
        };
        Some(folder.ancestors().take_while(|p| p.starts_with(&top)).filter_map(limit).collect())
    };
    VERSIONS.iter().filter_map(limits).flatten().collect()
}

/// Path of the memory group in a line `number:controllers:path`; version 2 has the number 0 and no
/// controllers.
fn group_path<'a>(line: &'a str, version: &Version) -> Option<&'a str> {
    let mut fields = line.splitn(3, ':');
    let (number, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
    let matches = match version.filesystem {
        "cgroup2" => number == "0" && controllers.is_empty(),
        _ => controllers.split(',').any(|controller| controller == "memory"),
    };
    matches.then_some(path)
}

/// Root and mount point in a line of mountinfo, if it mounts the memory groups of this version.
fn mount<'a>(line: &'a str, version: &Version) -> Option<(&'a str, &'a str)> {
    let (before, after) = line.split_once(" - ")?;
    let (mut before, mut after) = (before.split(' ').skip(3), after.split(' '));
    let (root, point) = (before.next()?, before.next()?);
    let (filesystem, options) = (after.next()?, after.nth(1).unwrap_or_default());
    let has_memory = version.filesystem == "cgroup2" || options.split(',').any(|option| option == "memory");
    (filesystem == version.filesystem && has_memory).then_some((root, point))
}

/// Returns the bytes that the limit of one group leaves; `None` without a limit.
fn left_in(folder: &Path, version: &Version) -> Option<u64> {
    let number = |name: &str| -> Option<u64> { read(folder.join(name))?.trim().parse().ok() };
    let (limit, usage) = (number(version.limit)?, number(version.usage)?);
    let stat = read(folder.join("memory.stat")).unwrap_or_default();
    let reclaimable = stat.lines().find_map(|line| {
        let (name, value) = line.split_once(' ')?;
        if name == version.reclaimable { value.trim().parse::<u64>().ok() } else { None }
    });
    Some(limit.saturating_sub(usage.saturating_sub(reclaimable.unwrap_or(0))))
}

fn read(path: PathBuf) -> Option<String> {
    fs::read_to_string(path).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A file tree with these files; parents are made.
    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    #[test]
    fn version_2_takes_the_tightest_limit_of_a_group_and_its_parents_and_counts_file_pages_as_free() {
        let mut files = vec![
            ("proc/self/cgroup", "0::/jobs/one\n"),
            ("proc/self/mountinfo", "30 24 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"),
            ("sys/fs/cgroup/jobs/one/memory.max", "max\n"),
            ("sys/fs/cgroup/jobs/one/memory.current", "1048576\n"),
        ];
        assert_eq!(available(tree(&files).path()), None, "no limit");
        files.extend([
            ("sys/fs/cgroup/jobs/memory.max", "104857600\n"),
            ("sys/fs/cgroup/jobs/memory.current", "62914560\n"),
            ("sys/fs/cgroup/jobs/memory.stat", "anon 1\ninactive_file 20971520\nactive_file 7\n"),
        ]);
        assert_eq!(available(tree(&files).path()), Some(60 * MIB), "100 - (60 - 20)");
        files[2].1 = "3145728\n";
        assert_eq!(available(tree(&files).path()), Some(2 * MIB), "the group's own limit is tighter");
    }

    #[test]
    fn every_group_with_a_limit_is_listed_and_two_jobs_have_their_parent_in_common() {
        let mount = "30 24 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n";
        let root = tree(&[
            ("proc/self/cgroup", "0::/jobs/one\n"),
            ("proc/self/mountinfo", mount),
            ("sys/fs/cgroup/jobs/memory.max", "4194304\n"),
            ("sys/fs/cgroup/jobs/memory.current", "1048576\n"),
            ("sys/fs/cgroup/jobs/one/memory.max", "2097152\n"),
            ("sys/fs/cgroup/jobs/one/memory.current", "0\n"),
            ("sys/fs/cgroup/jobs/two/memory.max", "2097152\n"),
            ("sys/fs/cgroup/jobs/two/memory.current", "0\n"),
        ]);
        let one = limits(root.path());
        fs::write(root.path().join("proc/self/cgroup"), "0::/jobs/two\n").unwrap();
        let two = limits(root.path());
        let left = |limits: &[((u64, u64), u64)]| limits.iter().map(|(_, left)| *left).collect::<Vec<_>>();
        assert_eq!((left(&one), left(&two)), (vec![2 * MIB, 3 * MIB], vec![2 * MIB, 3 * MIB]));
        assert!(one[0].0 != two[0].0 && one[1] == two[1]);
    }

    #[test]
    fn a_container_that_sees_its_group_as_the_root_has_the_limit_that_stands_there() {
        for group in ["0::/\n", "0::/docker/abc\n", "0::/../other\n"] {
            let files = [
                ("proc/self/cgroup", group),
                ("proc/self/mountinfo", "1 2 0:3 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup rw\n"),
                ("sys/fs/cgroup/memory.max", "8388608\n"),
                ("sys/fs/cgroup/memory.current", "9000000\n"),
            ];
            assert_eq!(available(tree(&files).path()), Some(0), "{group:?}: more is used than allowed");
        }
    }

    #[test]
    fn version_1_reads_the_memory_controller_among_the_others() {
        let files = [
            ("proc/self/cgroup", "7:cpu,cpuacct:/x\n5:memory:/docker/abc\n0::/system\n"),
            (
                "proc/self/mountinfo",
                "1 2 0:3 /docker/abc /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu,cpuacct\n\
                 4 2 0:5 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
            ),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "10485760\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "4194304\n"),
            ("sys/fs/cgroup/memory/memory.stat", "inactive_file 99\ntotal_inactive_file 1048576\n"),
        ];
        assert_eq!(available(tree(&files).path()), Some(7 * MIB));
    }

    #[test]
    fn a_system_without_control_groups_has_no_limit() {
        assert_eq!(available(tree(&[("proc/self/cgroup", "garbage\n")]).path()), None);
        assert_eq!(available(tempfile::tempdir().unwrap().path()), None);
    }
}
