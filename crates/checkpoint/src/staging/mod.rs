//! A destination that appears whole or not at all, in the place of nothing but what was checked.
//!
//! Everything is written into a hidden folder, flushed to disk, and renamed into place. A process that dies leaves only
//! the hidden folder, which does not look like a checkpoint; the next run removes it. What is at the destination is
//! looked at twice, when the work begins and when it is published:
//!
//! - Nothing was there: the rename fails if something is there now. Of two runs to one destination one succeeds.
//! - An empty folder was there: the rename fails unless it is still empty.
//! - A checkpoint was there, and may be replaced: old and new are exchanged in one step, or the old one is moved aside
//!   where that is not possible. If what came out is not what was checked, it is put back. The old one is removed last.
//! - An empty mount point was there, which cannot be renamed over: the hidden folder is inside it, and its entries are
//!   moved out one by one, the index first and config.json last. An index without all of its shards is refused by every
//!   reader, rank 0 comes after the other ranks, and without config.json there is no model. A mount point that is not
//!   empty is refused.

mod hidden;
mod publish;

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::error::{Error, Result};
use hidden::{Hidden, NEW, OLD};
use publish::{exchange, is_taken, rename_new};

/// The destination of a write, until [`Staging::commit`].
pub struct Staging {
    target: PathBuf,
    before: Before,
    hidden: Hidden,
    /// What is written: a folder or a file in the hidden folder.
    staged: PathBuf,
    is_file: bool,
    // Dropped after the hidden folder was removed from them.
    _created: CreatedFolders,
}

/// What is at the destination when the work begins.
enum Before {
    Nothing,
    EmptyFolder,
    /// The root of a mounted file system, empty but for what a file system has of its own.
    EmptyMountPoint,
    Checkpoint(Snapshot),
}

/// Every entry below a path, without following links: its kind, and a file's length and time of change.
type Snapshot = BTreeMap<PathBuf, (fs::FileType, Option<(u64, Option<SystemTime>)>)>;

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
    pub fn new(target: &Path, is_file: bool, force: bool, sources: &[PathBuf]) -> Result<Staging> {
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
        let is_mount_point = is_mount_point(&target, &parent);
        let home = if is_mount_point { &target } else { &parent };
        // A run that died while it replaced a destination had leave to do so.
        let force = hidden::recover(home, name, &target) || force;
        let before = look(&target, is_mount_point, is_file, force)?;
        let missing = parent.ancestors().take_while(|p| !p.exists()).map(PathBuf::from).collect();
        let created = CreatedFolders(missing);
        let hidden = Hidden::create(home, name)?;
        let staged = hidden.path.join(NEW);
        if !is_file {
            fs::create_dir(&staged).map_err(Error::io(&staged, "create"))?;
        }
        Ok(Staging { target, before, hidden, staged, is_file, _created: created })
    }

    /// The folder to write into.
    pub fn folder(&self) -> &Path {
        if self.is_file { &self.hidden.path } else { &self.staged }
    }

    /// The name in [`Staging::folder`] under which the target is written, where it is one file.
    pub fn file_name(&self) -> Option<&'static str> {
        self.is_file.then_some(NEW)
    }

    /// Where a reader finds what was staged: the folder, or the one file.
    pub fn staged(&self) -> PathBuf {
        self.staged.clone()
    }

    /// Refuses early when the disk cannot hold `bytes` more.
    pub fn check_space(&self, bytes: u64) -> Result<()> {
        let folder = &self.hidden.path;
        let stat = rustix::fs::statvfs(folder).map_err(|e| Error::io(folder, "look at")(e.into()))?;
        let available = stat.f_bavail.saturating_mul(stat.f_frsize);
        if bytes > available {
            return Err(Error::NoSpace { path: self.target.clone(), needed: bytes, available });
        }
        Ok(())
    }

    /// Flushes folders and renames into place. The files must have been flushed by their writers. An error if the
    /// destination is no longer what it was; then it stays as it is, and nothing is published.
    pub fn commit(self) -> Result<()> {
        if !self.is_file {
            for folder in folders_below(&self.staged)? {
                sync(&folder)?;
            }
        }
        let (staged, target) = (&self.staged, &self.target);
        let renamed = match &self.before {
            Before::Nothing => rename_new(staged, target),
            // A folder goes where nothing is, or an empty folder; a plain rename does exactly that.
            Before::EmptyFolder if !self.is_file => fs::rename(staged, target),
            Before::EmptyFolder => fs::remove_dir(target).and_then(|()| rename_new(staged, target)),
            Before::EmptyMountPoint => return self.fill(),
            Before::Checkpoint(checked) => return self.replace(checked),
        };
        renamed.map_err(|error| self.refused(error))?;
        sync(&parent_of(target))
    }

    /// Moves what was staged to the root of a mounted file system, entry by entry; none if one cannot be moved.
    fn fill(&self) -> Result<()> {
        let target = &self.target;
        // Of two runs, the first that comes here publishes.
        let lock = File::open(target).map_err(Error::io(target, "open"))?;
        lock.lock().map_err(Error::io(target, "lock"))?;
        if !entries(target, true)?.is_empty() {
            return Err(self.refused(io::ErrorKind::AlreadyExists.into()));
        }
        let mut names: Vec<OsString> =
            list(&self.staged)?.into_iter().map(|entry| entry.file_name()).collect();
        sort_for_publishing(&mut names);
        self.move_in(&names).map_err(|error| self.refused(error))
    }

    /// Moves entries to the target in this order; none if one cannot be moved.
    fn move_in(&self, names: &[OsString]) -> io::Result<()> {
        let target = &self.target;
        let moved = names.iter().try_for_each(|name| {
            rename_new(&self.staged.join(name), &target.join(name))?;
            publish::sync(target)
        });
        if moved.is_err() {
            for name in names.iter().rev() {
                let staged = self.staged.join(name);
                if fs::symlink_metadata(&staged).is_err() {
                    let _ = rename_new(&target.join(name), &staged);
                }
            }
        }
        moved
    }

    /// Puts what was staged in the place of the checkpoint that was checked.
    fn replace(&self, checked: &Snapshot) -> Result<()> {
        let (staged, target) = (&self.staged, &self.target);
        let is_checked = |path: &Path| snapshot(path).is_ok_and(|found| found == *checked);
        if !is_checked(target) {
            return Err(self.changed());
        }
        if exchange(staged, target).is_err() {
            return self.replace_in_steps(&is_checked);
        }
        // The old one is in the hidden folder now, and goes with it.
        if !is_checked(staged) {
            if exchange(staged, target).is_err() {
                self.put_back(staged)?;
            }
            return Err(self.changed());
        }
        sync(&parent_of(target))
    }

    /// [`Staging::replace`] where two paths cannot be exchanged.
    fn replace_in_steps(&self, is_checked: &dyn Fn(&Path) -> bool) -> Result<()> {
        let (target, old) = (&self.target, self.hidden.path.join(OLD));
        rename_new(target, &old).map_err(Error::io(target, "move aside"))?;
        if !is_checked(&old) {
            self.put_back(&old)?;
            return Err(self.changed());
        }
        if let Err(error) = rename_new(&self.staged, target) {
            self.put_back(&old)?;
            return Err(self.refused(error));
        }
        sync(&parent_of(target))
    }

    /// Gives the destination back what was moved into the hidden folder, or where its place is taken, a name beside it.
    fn put_back(&self, moved: &Path) -> Result<()> {
        let Err(cause) = rename_new(moved, &self.target) else { return Ok(()) };
        let beside = self.target.with_file_name(format!("ballast-displaced-{}", std::process::id()));
        rename_new(moved, &beside).map_err(Error::io(&beside, "rename"))?;
        Err(Error::Refused(format!(
            "{}: its place was taken while it was replaced ({cause}); it is now {}, and nothing was published",
            self.target.display(),
            beside.display()
        )))
    }

    /// The error of a publishing rename.
    fn refused(&self, error: io::Error) -> Error {
        if !is_taken(&error) {
            return Error::io(&self.target, "rename into place")(error);
        }
        Error::Refused(format!(
            "{} was created or filled by another process while this one ran; it was left as it is, and this result was \
             discarded; write somewhere else, or run again with --force to replace it",
            self.target.display()
        ))
    }

    fn changed(&self) -> Error {
        Error::Refused(format!(
            "{} was changed by another process while this one ran; it was left as it is, and this result was \
             discarded; run the command again to replace what is there now",
            self.target.display()
        ))
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

/// Returns true if a folder is the root of a mounted file system: it can be neither renamed over nor exchanged.
fn is_mount_point(target: &Path, parent: &Path) -> bool {
    let Ok(found) = fs::symlink_metadata(target) else { return false };
    let other_device = fs::metadata(parent).is_ok_and(|parent| parent.dev() != found.dev());
    found.is_dir() && (other_device || is_bind_mount(target))
}

/// A folder of the same file system can be mounted, too.
#[cfg(target_os = "linux")]
fn is_bind_mount(folder: &Path) -> bool {
    use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags, statx};
    let found = statx(CWD, folder, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::TYPE);
    found.is_ok_and(|found| found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
}

#[cfg(not(target_os = "linux"))]
fn is_bind_mount(_: &Path) -> bool {
    false
}

fn list(folder: &Path) -> Result<Vec<fs::DirEntry>> {
    let listed = fs::read_dir(folder).and_then(|entries| entries.collect());
    listed.map_err(Error::io(folder, "list"))
}

/// The entries of a destination. A mount point is also home to hidden folders, and to the file system's own folder.
fn entries(target: &Path, is_mount_point: bool) -> Result<Vec<fs::DirEntry>> {
    let name = target.file_name().unwrap_or_default();
    let own = |entry: &OsStr| entry == "lost+found" || hidden::is_hidden_of(name, entry);
    Ok(list(target)?.into_iter().filter(|e| !is_mount_point || !own(&e.file_name())).collect())
}

/// What is at the destination; an error if it must not be replaced.
fn look(target: &Path, is_mount_point: bool, is_file: bool, force: bool) -> Result<Before> {
    let existing = match fs::symlink_metadata(target) {
        Ok(existing) => existing,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Before::Nothing),
        Err(e) => return Err(Error::io(target, "look at")(e)),
    };
    if is_mount_point && is_file {
        return Err(Error::Refused(format!(
            "{} is a mount point; one file cannot take its place; write to a name below it",
            target.display()
        )));
    }
    let is_rank = |n: &String| n.starts_with("mp_rank_");
    let mut names = Vec::new();
    let mut foreign = Vec::new();
    if existing.is_dir() {
        for entry in entries(target, is_mount_point)? {
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
        return Ok(if is_mount_point { Before::EmptyMountPoint } else { Before::EmptyFolder });
    }
    let weights = |n: &String| n.ends_with(".safetensors") || is_rank(n);
    let problem = match (force, foreign.first()) {
        (false, _) => "exists; add --force to replace it".into(),
        (true, Some(folder)) => format!(
            "holds the folder {folder:?}, which would be lost with it: not even --force replaces it; move \
             that folder away, or write somewhere else"
        ),
        (true, None) if !names.iter().any(weights) => {
            "exists and does not look like a checkpoint: not even --force replaces it".into()
        }
        (true, None) if is_mount_point => {
            "is a mount point, which cannot be replaced in one step: not even --force does that; empty it first, or \
             write to a folder below it"
                .into()
        }
        (true, None) => return Ok(Before::Checkpoint(snapshot(target).map_err(Error::io(target, "look at"))?)),
    };
    Err(Error::Refused(format!("{} {problem}", target.display())))
}

fn snapshot(path: &Path) -> io::Result<Snapshot> {
    fn visit(root: &Path, relative: PathBuf, found: &mut Snapshot) -> io::Result<()> {
        let path = if relative.as_os_str().is_empty() { root.into() } else { root.join(&relative) };
        let metadata = fs::symlink_metadata(&path)?;
        let content = (!metadata.is_dir()).then(|| (metadata.len(), metadata.modified().ok()));
        if metadata.is_dir() {
            for entry in fs::read_dir(&path)? {
                visit(root, relative.join(entry?.file_name()), found)?;
            }
        }
        found.insert(relative, (metadata.file_type(), content));
        Ok(())
    }
    let mut found = Snapshot::new();
    visit(path, PathBuf::new(), &mut found)?;
    Ok(found)
}

/// Sorts entries into the order in which they are moved to a mount point: see the module's header.
fn sort_for_publishing(names: &mut [OsString]) {
    let rank = |name: &str| match name {
        name if name.ends_with(crate::index::INDEX_SUFFIX) => 0,
        name if name.ends_with(".safetensors") || name.starts_with("mp_rank_") => 2,
        "config.json" => 3,
        _ => 1,
    };
    names.sort_by_cached_key(|name| (rank(&name.to_string_lossy()), std::cmp::Reverse(name.clone())));
}

fn folders_below(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut folders = Vec::new();
    for entry in list(folder)? {
        if entry.path().is_dir() {
            folders.extend(folders_below(&entry.path())?);
        }
    }
    folders.push(folder.into());
    Ok(folders)
}

fn sync(folder: &Path) -> Result<()> {
    publish::sync(folder).map_err(Error::io(folder, "flush"))
}

#[cfg(test)]
mod tests;
