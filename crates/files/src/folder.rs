//! The folder of a checkpoint: on disk, or on a server.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::header::Header;
use crate::index::INDEX_SUFFIX;
use crate::regular::read_regular;
use crate::shard_file::{ShardFile, open_shard};

/// A folder whose files are found by name.
pub trait Folder {
    /// Path or address of the folder; joined with a name, that of the file.
    fn path(&self) -> &Path;

    /// Returns the names of the files, sorted; an error if one of them cannot be looked at.
    fn names(&self) -> Result<Vec<PathBuf>>;

    /// Returns true if there is a file of this name, as far as is known without opening it.
    fn has(&self, name: &Path) -> Result<bool>;

    /// Reads a whole file.
    fn read(&self, name: &Path) -> Result<Vec<u8>>;

    /// Opens safetensors files and reads their headers.
    fn open(&self, names: &[PathBuf]) -> Result<Vec<(ShardFile, Header)>>;
}

/// A folder on disk.
pub struct Disk<'a>(pub &'a Path);

impl Folder for Disk<'_> {
    fn path(&self) -> &Path {
        self.0
    }

    fn names(&self) -> Result<Vec<PathBuf>> {
        let entries = fs::read_dir(self.0).map_err(Error::io(self.0, "list"))?;
        let mut names = Vec::new();
        for entry in entries {
            let entry = entry.map_err(Error::io(self.0, "list"))?;
            let (path, name) = (entry.path(), PathBuf::from(entry.file_name()));
            if name.to_string_lossy().starts_with('.') {
                // No part of a checkpoint, and editors lock files by hidden links to nothing.
                names.extend(path.is_file().then_some(name));
                continue;
            }
            match look_at(&path)? {
                Some(found) if found.is_file() => names.push(name),
                Some(found) if !found.is_dir() => {
                    let problem = "not a file or folder; move it away".into();
                    return Err(Error::NoCheckpoint { path, problem });
                }
                _ => {}
            }
        }
        names.sort();
        Ok(names)
    }

    fn has(&self, name: &Path) -> Result<bool> {
        Ok(look_at(&self.0.join(name))?.is_some())
    }

    fn read(&self, name: &Path) -> Result<Vec<u8>> {
        let path = self.0.join(name);
        read_regular(&path).map_err(Error::io(&path, "read"))
    }

    fn open(&self, names: &[PathBuf]) -> Result<Vec<(ShardFile, Header)>> {
        names.iter().map(|name| open_shard(&self.0.join(name))).collect()
    }
}

/// Returns what is at a path, or none if there is nothing. What cannot be looked at is an error; so is a link to
/// nothing, because what it stood for was lost.
pub fn look_at(path: &Path) -> Result<Option<fs::Metadata>> {
    let fail = |cause| Err(Error::io(path, "look at")(cause));
    let is_missing = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
    match fs::metadata(path) {
        Ok(found) => Ok(Some(found)),
        Err(error) if !is_missing(&error) => fail(error),
        Err(_) => match fs::read_link(path) {
            Ok(target) => {
                let problem = format!("a link to {}, which does not exist", target.display());
                fail(io::Error::new(io::ErrorKind::NotFound, problem))
            }
            Err(error) if is_missing(&error) => Ok(None),
            Err(error) => fail(error),
        },
    }
}

/// Returns true for the name of a file that is copied with the weights.
pub fn is_sidecar(name: &str) -> bool {
    const WEIGHTS: [&str; 11] = [
        ".safetensors",
        INDEX_SUFFIX,
        ".bin",
        ".bin.index.json",
        ".ckpt",
        ".distcp",
        ".pt",
        ".pth",
        ".gguf",
        ".h5",
        ".msgpack",
    ];
    !name.starts_with('.') && !WEIGHTS.iter().any(|suffix| name.ends_with(suffix))
}
