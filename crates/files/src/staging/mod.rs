//! Atomic writes: a destination appears complete or not at all, and replaces only what was checked before.
//!
//! Everything is written into a hidden folder, flushed to disk, and renamed into place. A process that dies
//! leaves only the hidden folder, which does not look like a checkpoint; the next run removes it. The
//! destination is checked twice, when the work starts and when the result is published:
//!
//! - It did not exist: the rename fails if it exists now. Of two runs with the same destination, one
//!   succeeds.
//! - It was an empty folder: the rename fails unless it is still empty.
//! - It was a checkpoint that may be replaced: old and new are exchanged in one step, or, where that is not
//!   possible, the old one is moved aside first. If the old one is not what was checked, it is put back. It
//!   is removed last.
//! - It was an empty mount point, which cannot be replaced by a rename: the hidden folder is inside it, and
//!   its entries are moved out one by one, the index first and config.json last. Every reader rejects an
//!   index with missing shards, rank 0 comes after the other ranks, and without config.json there is no
//!   model. A mount point that is not empty is rejected.

mod hidden;
mod publish;

pub use publish::{create_folders, sync_folder};

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::error::{Error, Result};
use crate::jobs::Observer;
use crate::ranks::{RELEASE, TRACKER, is_rank_folder};
use hidden::{Hidden, NEW, OLD};
use publish::{exchange, is_taken, rename_new};

/// The destination of a write, until [`Staging::commit`].
pub struct Staging {
    target: PathBuf,
    before: Before,
    hidden: Hidden,
    /// New content: a folder or a file in the hidden folder.
    staged: PathBuf,
    is_file: bool,
    // Dropped last, after the hidden folder was removed.
    _created: CreatedFolders,
}

/// Returns an error about `target` if the disk of a folder has no room for `bytes` more.
pub fn check_space(folder: &Path, target: &Path, bytes: u64) -> Result<()> {
    let stat = rustix::fs::statvfs(folder).map_err(|e| Error::io(folder, "look at")(e.into()))?;
    let available = stat.f_bavail.saturating_mul(stat.f_frsize);
    if bytes > available {
        return Err(Error::NoSpace { path: target.into(), needed: bytes, available });
    }
    Ok(())
}

/// The state of the destination when the work starts.
enum Before {
    Nothing,
    EmptyFolder,
    /// Root of a mounted file system, empty but for the file system's own entries.
    EmptyMountPoint,
    Checkpoint(Snapshot),
}

/// All entries below a path, links not followed: their kind, and the length and modification time of files.
type Snapshot = BTreeMap<PathBuf, (fs::FileType, Option<(u64, Option<SystemTime>)>)>;

/// Folders that were created, innermost first; those still empty at the end are removed.
struct CreatedFolders(Vec<PathBuf>);

impl Drop for CreatedFolders {
    fn drop(&mut self) {
        for folder in &self.0 {
            let _ = fs::remove_dir(folder);
        }
    }
}

impl Staging {
    /// Prepares to write `target`, which must not exist unless `force` is set; even then, only a checkpoint
    /// is replaced. `target` must not overlap `sources`. Nothing is created before these checks.
    pub fn new(target: &Path, is_file: bool, force: bool, sources: &[PathBuf]) -> Result<Staging> {
        let Some(name) = target.file_name() else {
            return Err(Error::Refused(format!("{}: not a valid name for an output", target.display())));
        };
        let parent = resolved(&parent_of(target))?;
        let target = parent.join(name);
        for source in sources {
            let source = source.canonicalize().map_err(Error::io(source, "resolve"))?;
            let resolved = target.canonicalize().unwrap_or(target.clone());
            if source == resolved || resolved.starts_with(&source) || source.starts_with(&resolved) {
                return Err(Error::Refused(format!(
                    "source {} and destination {} overlap; choose another destination",
                    source.display(),
                    target.display()
                )));
            }
        }
        let is_mount_point = is_mount_point(&target, &parent);
        let home = if is_mount_point { &target } else { &parent };
        // A run that died while it replaced the destination had --force.
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

    /// Returns the folder to write into.
    pub fn folder(&self) -> &Path {
        if self.is_file { &self.hidden.path } else { &self.staged }
    }

    /// Returns the name in [`Staging::folder`] of a target that is one file.
    pub fn file_name(&self) -> Option<&'static str> {
        self.is_file.then_some(NEW)
    }

    /// Returns the path of the staged folder or file.
    pub fn staged(&self) -> PathBuf {
        self.staged.clone()
    }

    /// Returns an error if the disk has no room for `bytes` more.
    pub fn check_space(&self, bytes: u64) -> Result<()> {
        check_space(&self.hidden.path, &self.target, bytes)
    }

    /// Flushes folders and renames into place; files must be flushed already. Returns an error if the
    /// destination has changed, or if the observer has cancelled; the destination is then left as it is, and
    /// nothing is published.
    pub fn commit(self, observer: &dyn Observer) -> Result<()> {
        if !self.is_file {
            for folder in folders_below(&self.staged)? {
                sync(&folder)?;
            }
        }
        if !observer.may_publish() {
            return Err(Error::Interrupted);
        }
        let (staged, target) = (&self.staged, &self.target);
        let renamed = match &self.before {
            Before::Nothing => rename_new(staged, target),
            // A plain rename of a folder succeeds only if the target is missing or an empty folder.
            Before::EmptyFolder if !self.is_file => fs::rename(staged, target),
            Before::EmptyFolder => fs::remove_dir(target).and_then(|()| rename_new(staged, target)),
            Before::EmptyMountPoint => return self.fill(),
            Before::Checkpoint(checked) => return self.replace(checked),
        };
        renamed.map_err(|error| self.refused(error))?;
        sync(&parent_of(target))
    }

    /// Moves the staged entries to the root of a mounted file system; all of them or none.
    fn fill(&self) -> Result<()> {
        let target = &self.target;
        // Of two runs, the first to get the lock publishes.
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

    /// Moves entries to the target in this order; all of them or none.
    fn move_in(&self, names: &[OsString]) -> io::Result<()> {
        let target = &self.target;
        let moved = names.iter().try_for_each(|name| {
            rename_new(&self.staged.join(name), &target.join(name))?;
            sync_folder(target)
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

    /// Replaces the checked checkpoint with the staged one.
    fn replace(&self, checked: &Snapshot) -> Result<()> {
        let (staged, target) = (&self.staged, &self.target);
        let is_checked = |path: &Path| snapshot(path).is_ok_and(|found| found == *checked);
        if !is_checked(target) {
            return Err(self.changed());
        }
        if exchange(staged, target).is_err() {
            return self.replace_in_steps(&is_checked);
        }
        // The old one is now in the hidden folder and is removed with it.
        if !is_checked(staged) {
            if exchange(staged, target).is_err() {
                self.put_back(staged)?;
            }
            return Err(self.changed());
        }
        sync(&parent_of(target))
    }

    /// Does the same as [`Staging::replace`] where two paths cannot be exchanged.
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

    /// Moves the old destination back from the hidden folder; if its place is taken, to a name beside it.
    fn put_back(&self, moved: &Path) -> Result<()> {
        let Err(cause) = rename_new(moved, &self.target) else { return Ok(()) };
        let beside = self.target.with_file_name(format!("ballast-displaced-{}", std::process::id()));
        rename_new(moved, &beside).map_err(Error::io(&beside, "rename"))?;
        Err(Error::Refused(format!(
            "{}: another process created this path while it was replaced ({cause}); the old content is now {}, and nothing was published",
            self.target.display(),
            beside.display()
        )))
    }

    /// Returns the error of a failed rename into place.
    fn refused(&self, error: io::Error) -> Error {
        if !is_taken(&error) {
            return Error::io(&self.target, "rename into place")(error);
        }
        Error::Refused(format!(
            "{} was created or filled by another process while this one ran; it was left unchanged, and this result was \
             discarded; choose another destination, or run again with --force to replace it",
            self.target.display()
        ))
    }

    fn changed(&self) -> Error {
        Error::Refused(format!(
            "{} was changed by another process while this one ran; it was left unchanged, and this result was \
             discarded; run the command again to replace it",
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

/// Resolves links and `..`; components that do not exist yet stay as given.
fn resolved(path: &Path) -> Result<PathBuf> {
    match path.canonicalize() {
        Err(e) if e.kind() == io::ErrorKind::NotFound => match path.file_name() {
            Some(name) => Ok(resolved(&parent_of(path))?.join(name)),
            None => Err(Error::io(path, "resolve")(e)),
        },
        result => result.map_err(Error::io(path, "resolve")),
    }
}

/// Returns true if a folder is the root of a mounted file system, which cannot be replaced by a rename.
fn is_mount_point(target: &Path, parent: &Path) -> bool {
    let Ok(found) = fs::symlink_metadata(target) else { return false };
    let other_device = fs::metadata(parent).is_ok_and(|parent| parent.dev() != found.dev());
    found.is_dir() && (other_device || is_bind_mount(target))
}

/// Returns true for a mounted folder of the same file system.
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

/// Returns the entries of a destination, without hidden folders and the file system's own entries on a mount
/// point.
fn entries(target: &Path, is_mount_point: bool) -> Result<Vec<fs::DirEntry>> {
    let name = target.file_name().unwrap_or_default();
    let own = |entry: &OsStr| entry == "lost+found" || hidden::is_hidden_of(name, entry);
    Ok(list(target)?.into_iter().filter(|e| !is_mount_point || !own(&e.file_name())).collect())
}

/// Returns the state of the destination, or an error if it must not be replaced.
fn look(target: &Path, is_mount_point: bool, is_file: bool, force: bool) -> Result<Before> {
    let existing = match fs::symlink_metadata(target) {
        Ok(existing) => existing,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Before::Nothing),
        Err(e) => return Err(Error::io(target, "look at")(e)),
    };
    if is_mount_point && is_file {
        return Err(Error::Refused(format!(
            "{} is a mount point and cannot be replaced by a file; choose a name below it",
            target.display()
        )));
    }
    let is_rank = |n: &String| is_rank_folder(n);
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
        // The files of Megatron's formats are in a folder of their own.
        if names.iter().any(|name| name == TRACKER) {
            foreign.retain(|name| name != RELEASE);
        }
    } else {
        names.push(target.to_string_lossy().into_owned());
    }
    if names.is_empty() {
        return Ok(if is_mount_point { Before::EmptyMountPoint } else { Before::EmptyFolder });
    }
    let is_gguf = |n: &String| !existing.is_dir() && n.ends_with(".gguf");
    let is_torch = |n: &String| n.ends_with(".distcp") || n == TRACKER;
    let weights = |n: &String| n.ends_with(".safetensors") || is_rank(n) || is_gguf(n) || is_torch(n);
    let problem = match (force, foreign.first()) {
        (false, _) => return Err(Error::Exists { path: target.into() }),
        (true, Some(folder)) => format!(
            "contains the folder {folder:?}, which is not part of a checkpoint; --force does not replace it; move that \
             folder away, or choose another destination"
        ),
        (true, None) if !names.iter().any(weights) => {
            "exists and does not look like a checkpoint; --force does not replace it".into()
        }
        (true, None) if is_mount_point => {
            "is a mount point with content; --force does not replace it; empty it first, or write to a folder below it"
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

/// Sorts entries into the order in which they are moved to a mount point; see the module documentation.
fn sort_for_publishing(names: &mut [OsString]) {
    let rank = |name: &str| match name {
        name if name.ends_with(crate::index::INDEX_SUFFIX) => 0,
        name if name.ends_with(".safetensors") || is_rank_folder(name) => 2,
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
    sync_folder(folder).map_err(Error::io(folder, "flush"))
}

#[cfg(test)]
mod tests;
