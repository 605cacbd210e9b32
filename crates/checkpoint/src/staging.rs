//! A destination that appears whole or not at all.
//!
//! Everything is written into a hidden sibling folder, flushed to disk, and renamed into place. A process
//! that dies leaves only that sibling, which does not look like a checkpoint; the next run removes it. The
//! sibling is locked while its process lives, so two runs never remove each other's.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// The end of the name under which an old destination waits where two paths cannot be exchanged at once.
const OLD: &str = "-old";

/// The destination of a write, until [`Staging::commit`].
pub struct Staging {
    target: PathBuf,
    /// The hidden folder.
    folder: PathBuf,
    /// Whether the target is one file rather than a folder.
    single_file: bool,
    _lock: File,
    // Dropped after the hidden folder was removed from them.
    _created: CreatedFolders,
}

/// Folders that did not exist before, innermost first; those that are still empty at the end go again.
struct CreatedFolders(Vec<PathBuf>);

impl Drop for CreatedFolders {
    fn drop(&mut self) {
        for folder in &self.0 {
            let _ = fs::remove_dir(folder);
        }
    }
}

impl Staging {
    /// Prepares to write `target`, which must not exist unless `force` is set; even then only something
    /// that looks like a checkpoint is ever replaced. `sources` must not be in the way. Nothing is created
    /// before all of that is known.
    pub fn new(target: &Path, single_file: bool, force: bool, sources: &[PathBuf]) -> Result<Staging> {
        let Some(name) = target.file_name() else {
            return Err(Error::Refused(format!("{}: not a name that can be written to", target.display())));
        };
        let parent = resolved(&parent_of(target))?;
        let target = parent.join(name);
        for source in sources {
            let source = source.canonicalize().map_err(Error::io(source, "resolve"))?;
            let resolved = target.canonicalize().unwrap_or(target.clone());
            if source == resolved || resolved.starts_with(&source) || source.starts_with(&resolved) {
                return Err(Error::Refused(format!(
                    "source {} and destination {} overlap; write somewhere else, so that the source is never at risk",
                    source.display(),
                    target.display()
                )));
            }
        }
        check_replaceable(&target, force)?;
        let missing = parent.ancestors().take_while(|p| !p.exists()).map(PathBuf::from).collect();
        let created = CreatedFolders(missing);
        fs::create_dir_all(&parent).map_err(Error::io(&parent, "create"))?;
        let prefix = format!(".{}.ballast-partial-", name.to_string_lossy());
        remove_leftovers(&parent, &prefix, &target);
        let folder = parent.join(format!("{prefix}{}", std::process::id()));
        // A leftover with our own process number would be from another boot; it was just removed.
        fs::create_dir(&folder).map_err(Error::io(&folder, "create"))?;
        let lock = File::open(&folder).map_err(Error::io(&folder, "open"))?;
        lock.lock().map_err(Error::io(&folder, "lock"))?;
        Ok(Staging { target, folder, single_file, _lock: lock, _created: created })
    }

    /// The hidden folder to write into.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Where a reader finds what was staged: the folder, or the one file in it.
    pub fn staged(&self) -> PathBuf {
        if self.single_file {
            self.folder.join(self.target.file_name().unwrap_or_default())
        } else {
            self.folder.clone()
        }
    }

    /// Refuses early when the disk cannot hold `bytes` more.
    pub fn check_space(&self, bytes: u64) -> Result<()> {
        let stat =
            rustix::fs::statvfs(&self.folder).map_err(|e| Error::io(&self.folder, "look at")(e.into()))?;
        let available = stat.f_bavail.saturating_mul(stat.f_frsize);
        if bytes > available {
            return Err(Error::NoSpace { path: self.target.clone(), needed: bytes, available });
        }
        Ok(())
    }

    /// Flushes folders and renames into place. The files must have been flushed by their writers.
    pub fn commit(self) -> Result<()> {
        for folder in folders_below(&self.folder)? {
            sync(&folder)?;
        }
        let staged = self.staged();
        let rename = Error::io(&self.target, "rename into place");
        match fs::metadata(&self.target) {
            // An exchange never leaves a moment without a destination; the old one is then in the
            // hidden folder, and goes with it.
            Ok(_) if exchange(&staged, &self.target).is_ok() => {}
            Ok(existing) => {
                let old = PathBuf::from(format!("{}{OLD}", self.folder.display()));
                fs::rename(&self.target, &old)
                    .and_then(|()| fs::rename(&staged, &self.target))
                    .map_err(rename)?;
                let removed =
                    if existing.is_dir() { fs::remove_dir_all(&old) } else { fs::remove_file(&old) };
                removed.map_err(Error::io(&old, "remove"))?;
            }
            Err(_) => fs::rename(&staged, &self.target).map_err(rename)?,
        }
        sync(&parent_of(&self.target))
    }
}

impl Drop for Staging {
    /// Removes what was not committed (after a commit: what was replaced, if anything).
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn parent_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.into(),
        _ => ".".into(),
    }
}

/// The path without links and `..`; what does not exist yet stands at its end as given.
fn resolved(path: &Path) -> Result<PathBuf> {
    match path.canonicalize() {
        Err(e) if e.kind() == io::ErrorKind::NotFound => match path.file_name() {
            Some(name) => Ok(resolved(&parent_of(path))?.join(name)),
            None => Err(Error::io(path, "resolve")(e)),
        },
        result => result.map_err(Error::io(path, "resolve")),
    }
}

fn check_replaceable(target: &Path, force: bool) -> Result<()> {
    let existing = match fs::symlink_metadata(target) {
        Ok(existing) => existing,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(Error::io(target, "look at")(e)),
    };
    let is_rank = |n: &String| n.starts_with("mp_rank_");
    let mut names = Vec::new();
    let mut foreign = Vec::new();
    if existing.is_dir() {
        for entry in fs::read_dir(target).map_err(Error::io(target, "list"))?.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if entry.path().is_dir() && !is_rank(&name) {
                foreign.push(name.clone());
            }
            names.push(name);
        }
    } else {
        names.push(target.to_string_lossy().into_owned());
    }
    if names.is_empty() {
        return Ok(());
    }
    let weights = |n: &String| n.ends_with(".safetensors") || is_rank(n);
    if let (true, Some(folder)) = (force, foreign.first()) {
        return Err(Error::Refused(format!(
            "{} holds the folder {folder:?}, which would be lost with it: not even --force replaces it; move \
             that folder away, or write somewhere else",
            target.display()
        )));
    }
    match (force, names.iter().any(weights)) {
        (false, _) => Err(Error::Refused(format!("{} exists; add --force to replace it", target.display()))),
        (true, false) => Err(Error::Refused(format!(
            "{} exists and does not look like a checkpoint: not even --force replaces it",
            target.display()
        ))),
        (true, true) => Ok(()),
    }
}

/// Removes hidden folders of runs that died: nobody holds their lock. One that died between moving the old
/// destination away and moving the new one in gets the old one back.
fn remove_leftovers(parent: &Path, prefix: &str, target: &Path) {
    let Ok(entries) = fs::read_dir(parent) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if !name.starts_with(prefix) || !File::open(entry.path()).is_ok_and(|file| file.try_lock().is_ok()) {
            continue;
        }
        if name.ends_with(OLD) && !target.exists() {
            let _ = fs::rename(entry.path(), target);
        } else {
            let _ = fs::remove_dir_all(entry.path()).or_else(|_| fs::remove_file(entry.path()));
        }
    }
}

fn folders_below(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut folders = Vec::new();
    for entry in fs::read_dir(folder).map_err(Error::io(folder, "list"))?.flatten() {
        if entry.path().is_dir() {
            folders.extend(folders_below(&entry.path())?);
        }
    }
    folders.push(folder.into());
    Ok(folders)
}

fn sync(folder: &Path) -> Result<()> {
    File::open(folder).and_then(|f| f.sync_all()).map_err(Error::io(folder, "flush"))
}

#[cfg(target_os = "linux")]
fn exchange(a: &Path, b: &Path) -> io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    Ok(renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE)?)
}

#[cfg(not(target_os = "linux"))]
fn exchange(_: &Path, _: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
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
        remove_leftovers(folder.path(), ".out.ballast-partial-", &target);
        assert!(target.join("old.safetensors").exists());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
