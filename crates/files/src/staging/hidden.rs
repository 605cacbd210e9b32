//! The hidden folder of a write: `.<name>.ballast-partial-<process>`, locked while its process lives.
//!
//! A process that creates or removes such a folder locks it, then checks that the path still leads to the
//! locked folder. So no folder is removed between its creation and its lock.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::xxh3_64;

use super::publish::{create_folders, rename_new};
use crate::error::{Error, Result};

const MARK: &str = ".ballast-partial-";
/// Largest length of a file name on common file systems, in bytes.
const MAX_NAME: usize = 255;
/// Length of a process id and a counter.
const MAX_OWNER: usize = 24;
/// Number of attempts to create a folder that other processes remove or create first.
const ATTEMPTS: usize = 1000;

/// Name of the new content: a folder or a file.
pub(super) const NEW: &str = "new";
/// Name of the old destination while it is replaced, where two paths cannot be exchanged.
pub(super) const OLD: &str = "old";
/// Suffix of a folder with an old destination, as version 0.1 left it.
const OLD_SUFFIX: &str = "-old";

/// A hidden folder; removed with its content when this value is dropped.
pub(super) struct Hidden {
    pub(super) path: PathBuf,
    _lock: File,
}

impl Drop for Hidden {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

impl Hidden {
    /// Creates and locks a folder in `home`, which is created if missing, for a destination called `name`.
    pub(super) fn create(home: &Path, name: &OsStr) -> Result<Hidden> {
        let prefix = prefix(name);
        let mut number = 0;
        for _ in 0..ATTEMPTS {
            create_folders(home).map_err(Error::io(home, "create"))?;
            let mut own = prefix.clone();
            own.push(match number {
                0 => std::process::id().to_string(),
                _ => format!("{}.{number}", std::process::id()),
            });
            let path = home.join(own);
            match fs::create_dir(&path) {
                Ok(()) => {}
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                // Another thread, or a process with the same id in another container.
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                    number += 1;
                    continue;
                }
                Err(e) => return Err(Error::io(&path, "create")(e)),
            }
            let lock = match File::open(&path) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                opened => opened.map_err(Error::io(&path, "open"))?,
            };
            lock.lock().map_err(Error::io(&path, "lock"))?;
            if is_at(&lock, &path) {
                return Ok(Hidden { path, _lock: lock });
            }
        }
        let problem = format!("{}: other processes keep removing the temporary folder", home.display());
        Err(Error::Refused(problem))
    }
}

/// Returns true if `path` leads to the opened file.
fn is_at(file: &File, path: &Path) -> bool {
    let place = |m: fs::Metadata| (m.dev(), m.ino());
    match (file.metadata(), fs::symlink_metadata(path)) {
        (Ok(file), Ok(at)) => place(file) == place(at),
        _ => false,
    }
}

/// Returns the prefix of the names of a destination's hidden folders. A name that leaves no room is replaced
/// by its hash.
fn prefix(name: &OsStr) -> OsString {
    let mut prefix = OsString::from(".");
    if name.len() + 1 + MARK.len() + MAX_OWNER <= MAX_NAME {
        prefix.push(name);
    } else {
        prefix.push(format!("~{:016x}", xxh3_64(name.as_bytes())));
    }
    prefix.push(MARK);
    prefix
}

/// Returns true if an entry is the hidden folder of a write to a destination called `name`.
pub(super) fn is_hidden_of(name: &OsStr, entry: &OsStr) -> bool {
    entry.as_bytes().strip_prefix(prefix(name).as_bytes()).is_some_and(|owner| {
        let owner = owner.strip_suffix(OLD_SUFFIX.as_bytes()).unwrap_or(owner);
        !owner.is_empty() && owner.iter().all(|b| b.is_ascii_digit() || *b == b'.')
    })
}

/// Removes hidden folders in `home` of runs that died, whose lock is free. If a run died between moving the
/// old destination away and the new one in, the old one is moved back; returns true in that case. An old
/// destination whose path exists again is kept.
pub(super) fn recover(home: &Path, name: &OsStr, target: &Path) -> bool {
    let Ok(entries) = fs::read_dir(home) else { return false };
    let mut recovered = false;
    for entry in entries.flatten() {
        let path = entry.path();
        if !is_hidden_of(name, &entry.file_name()) {
            continue;
        }
        // Held until the folder is removed.
        let Some(_lock) = File::open(&path).ok().filter(|file| file.try_lock().is_ok() && is_at(file, &path))
        else {
            continue;
        };
        let old = if path.as_os_str().as_bytes().ends_with(OLD_SUFFIX.as_bytes()) {
            path.clone()
        } else {
            path.join(OLD)
        };
        let waits = fs::symlink_metadata(&old).is_ok();
        let back = waits && rename_new(&old, target).is_ok();
        recovered |= back;
        if waits && !back && path.join(NEW).exists() {
            continue;
        }
        let _ = fs::remove_dir_all(&path).or_else(|_| fs::remove_file(&path));
    }
    recovered
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_destination_that_was_moved_away_comes_back_and_other_leftovers_go() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("out");
        for (name, file) in
            [(".out.ballast-partial-7-old", "old.safetensors"), (".out.ballast-partial-7", "new")]
        {
            fs::create_dir(folder.path().join(name)).unwrap();
            fs::write(folder.path().join(name).join(file), "x").unwrap();
        }
        recover(folder.path(), OsStr::new("out"), &target);
        assert!(target.join("old.safetensors").exists());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn an_old_destination_inside_a_dead_folder_comes_back_only_where_nothing_took_its_place() {
        let home = tempfile::tempdir().unwrap();
        let target = home.path().join("out");
        let hidden = home.path().join(".out.ballast-partial-7.1");
        let put = |path: PathBuf| {
            fs::create_dir_all(&path).unwrap();
            fs::write(path.join("model.safetensors"), "x").unwrap();
        };
        put(hidden.join(OLD));
        put(hidden.join(NEW));
        assert!(recover(home.path(), OsStr::new("out"), &target));
        assert!(target.join("model.safetensors").exists() && !hidden.exists());
        put(hidden.join(OLD));
        put(hidden.join(NEW));
        assert!(!recover(home.path(), OsStr::new("out"), &target));
        assert!(hidden.join(OLD).exists(), "the new one was never published, so the old one is kept");
        fs::remove_dir_all(hidden.join(NEW)).unwrap();
        assert!(!recover(home.path(), OsStr::new("out"), &target));
        assert!(!hidden.exists(), "the new one was published");
    }

    #[test]
    fn hidden_names_are_short_enough_and_belong_to_one_destination() {
        let long = |end: &str| OsString::from(format!("{}{end}", "n".repeat(255 - end.len())));
        for name in [long("a"), long("b"), "a".into(), "é".repeat(127).into()] {
            let home = tempfile::tempdir().unwrap();
            let hidden = Hidden::create(home.path(), &name).unwrap();
            let second = Hidden::create(home.path(), &name).unwrap();
            for path in [&hidden.path, &second.path] {
                let entry = path.file_name().unwrap();
                assert!(entry.len() <= MAX_NAME && is_hidden_of(&name, entry), "{entry:?}");
                assert!(
                    !is_hidden_of(&long("c"), entry) && !is_hidden_of(OsStr::new("b"), entry),
                    "{entry:?}"
                );
            }
        }
        let of_another = OsStr::new(".a.ballast-partial-1.ballast-partial-77");
        assert!(!is_hidden_of(OsStr::new("a"), of_another));
        assert!(is_hidden_of(OsStr::new("a.ballast-partial-1"), of_another));
    }

    #[test]
    fn a_folder_is_never_removed_between_its_creation_and_its_lock() {
        let home = tempfile::tempdir().unwrap();
        let (name, target) = (OsStr::new("out"), home.path().join("out"));
        std::thread::scope(|threads| {
            for _ in 0..4 {
                threads.spawn(|| {
                    for _ in 0..200 {
                        recover(home.path(), name, &target);
                        let hidden = Hidden::create(home.path(), name).unwrap();
                        fs::write(hidden.path.join("file"), "x").expect("the folder is there");
                        std::thread::yield_now();
                        assert!(hidden.path.join("file").exists());
                    }
                });
            }
        });
        assert_eq!(fs::read_dir(home.path()).unwrap().count(), 0);
    }
}
