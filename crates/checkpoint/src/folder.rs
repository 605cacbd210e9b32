//! The folder of a checkpoint: on disk, or on a server.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::header::Header;
use crate::shard_file::{ShardFile, open_shard};

/// A folder whose files are found by name.
pub(crate) trait Folder {
    /// Path or address of the folder; joined with a name, that of the file.
    fn path(&self) -> &Path;

    /// Returns the names of the files, sorted.
    fn names(&self) -> Result<Vec<PathBuf>>;

    /// Returns true if there is a file of this name, as far as is known without opening it.
    fn has(&self, name: &Path) -> bool;

    /// Reads a whole file.
    fn read(&self, name: &Path) -> Result<Vec<u8>>;

    /// Opens safetensors files and reads their headers.
    fn open(&self, names: &[PathBuf]) -> Result<Vec<(ShardFile, Header)>>;
}

/// A folder on disk.
pub(crate) struct Disk<'a>(pub(crate) &'a Path);

impl Folder for Disk<'_> {
    fn path(&self) -> &Path {
        self.0
    }

    fn names(&self) -> Result<Vec<PathBuf>> {
        let entries = fs::read_dir(self.0).map_err(Error::io(self.0, "list"))?;
        let mut names = Vec::new();
        for entry in entries {
            let entry = entry.map_err(Error::io(self.0, "list"))?;
            if entry.path().is_file() {
                names.push(PathBuf::from(entry.file_name()));
            }
        }
        names.sort();
        Ok(names)
    }

    fn has(&self, name: &Path) -> bool {
        self.0.join(name).exists()
    }

    fn read(&self, name: &Path) -> Result<Vec<u8>> {
        let path = self.0.join(name);
        fs::read(&path).map_err(Error::io(&path, "read"))
    }

    fn open(&self, names: &[PathBuf]) -> Result<Vec<(ShardFile, Header)>> {
        names.iter().map(|name| open_shard(&self.0.join(name))).collect()
    }
}
