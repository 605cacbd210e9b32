//! Renames that never replace an existing path.

use std::fs::{self, File};
use std::io;
use std::path::Path;

/// Renames `from` to `to`. Fails if `to` exists; on file systems without such a rename, a folder may replace
/// an empty folder.
pub(super) fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    match rename_noreplace(from, to) {
        Err(error) if is_unsupported(&error) => rename_new_portable(from, to),
        done => done,
    }
}

/// Does the same as [`rename_new`] on file systems that lack the call (NFS, some FUSE file systems). A folder
/// never replaces a file or a folder with content; a file gets a hard link, whose name must be new. Without
/// hard links, an empty file claims the name first.
fn rename_new_portable(from: &Path, to: &Path) -> io::Result<()> {
    if fs::symlink_metadata(from)?.is_dir() {
        return fs::rename(from, to);
    }
    match fs::hard_link(from, to) {
        Ok(()) => fs::remove_file(from),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Err(error),
        Err(_) => {
            File::create_new(to)?;
            fs::rename(from, to).inspect_err(|_| drop(fs::remove_file(to)))
        }
    }
}

/// Returns true if a rename failed because its target exists.
pub(super) fn is_taken(error: &io::Error) -> bool {
    use io::ErrorKind::{AlreadyExists, DirectoryNotEmpty, IsADirectory, NotADirectory};
    matches!(error.kind(), AlreadyExists | DirectoryNotEmpty | IsADirectory | NotADirectory)
}

fn is_unsupported(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::Unsupported | io::ErrorKind::InvalidInput)
}

/// Flushes a folder's entries.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// Creates a folder and those above it, and flushes the entries of the new ones. Otherwise a loss of power could
/// take away a folder whose content has been flushed.
pub fn create_folders(folder: &Path) -> io::Result<()> {
    let is_new = |folder: &&Path| !folder.as_os_str().is_empty() && !folder.exists();
    let above: Vec<&Path> = folder.ancestors().take_while(is_new).filter_map(Path::parent).collect();
    fs::create_dir_all(folder)?;
    above.into_iter().try_for_each(|above| match above.as_os_str().is_empty() {
        true => sync_folder(Path::new(".")),
        false => sync_folder(above),
    })
}

#[cfg(target_os = "linux")]
fn rename_noreplace(from: &Path, to: &Path) -> io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    Ok(renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE)?)
}

#[cfg(not(target_os = "linux"))]
fn rename_noreplace(_: &Path, _: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Exchanges two paths in one step.
#[cfg(target_os = "linux")]
pub(super) fn exchange(a: &Path, b: &Path) -> io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    Ok(renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE)?)
}

/// Exchanges two paths in one step.
#[cfg(not(target_os = "linux"))]
pub(super) fn exchange(_: &Path, _: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    type Rename = fn(&Path, &Path) -> io::Result<()>;

    #[test]
    fn a_rename_that_finds_something_at_its_target_fails_and_changes_nothing() {
        for rename in [rename_new as Rename, rename_new_portable as Rename] {
            let home = tempfile::tempdir().unwrap();
            let path = |name: &str| home.path().join(name);
            fs::create_dir(path("folder")).unwrap();
            fs::write(path("folder/a"), "a").unwrap();
            fs::create_dir(path("other")).unwrap();
            fs::write(path("other/b"), "b").unwrap();
            fs::write(path("file"), "file").unwrap();
            fs::write(path("second"), "second").unwrap();
            for (from, to) in [("folder", "other"), ("folder", "file"), ("file", "second"), ("file", "other")]
            {
                let error = rename(&path(from), &path(to)).unwrap_err();
                assert!(is_taken(&error), "{from} to {to}: {error}");
            }
            assert_eq!(fs::read(path("folder/a")).unwrap(), b"a");
            assert_eq!(fs::read(path("other/b")).unwrap(), b"b");
            assert_eq!(fs::read(path("file")).unwrap(), b"file");
            assert_eq!(fs::read(path("second")).unwrap(), b"second");
            rename(&path("folder"), &path("new")).unwrap();
            rename(&path("file"), &path("new.txt")).unwrap();
            assert_eq!(fs::read(path("new/a")).unwrap(), b"a");
            assert_eq!(fs::read(path("new.txt")).unwrap(), b"file");
            assert!(!path("folder").exists() && !path("file").exists());
        }
    }
}
