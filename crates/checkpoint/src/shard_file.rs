//! One file of a checkpoint, or a tensor that is read like one: in memory, in several places, computed, or on a
//! server.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::assembly::Assembly;
use crate::error::{Error, Place, Result};
use crate::fp8::Computed;
use crate::header::{self, Header};
#[cfg(feature = "hub")]
use crate::hub::RemoteFile;

/// One file of a checkpoint, or a tensor that is put together from several.
#[derive(Debug)]
pub struct ShardFile {
    /// Path.
    pub path: PathBuf,
    /// Size in bytes when it was opened.
    pub bytes: u64,
    modified: Option<SystemTime>,
    data: Data,
}

/// The bytes of a shard.
#[derive(Debug)]
enum Data {
    File(File),
    Memory(Vec<u8>),
    Assembly(Assembly),
    Computed(Computed),
    #[cfg(feature = "hub")]
    Remote(Box<RemoteFile>),
}

impl ShardFile {
    /// Opens a file.
    pub(crate) fn open(path: &Path) -> Result<ShardFile> {
        // Before opening, because opening a pipe waits for its writer.
        if !fs::metadata(path).map_err(Error::io(path, "open"))?.is_file() {
            return Err(Error::NoCheckpoint { path: path.into(), problem: "not a file".into() });
        }
        let handle = File::open(path).map_err(Error::io(path, "open"))?;
        let metadata = handle.metadata().map_err(Error::io(path, "look at"))?;
        let (bytes, modified) = (metadata.len(), metadata.modified().ok());
        Ok(ShardFile { path: path.into(), bytes, modified, data: Data::File(handle) })
    }

    /// A file whose bytes are in memory.
    pub(crate) fn in_memory(path: &Path, bytes: Vec<u8>) -> ShardFile {
        let length = bytes.len() as u64;
        ShardFile { path: path.into(), bytes: length, modified: None, data: Data::Memory(bytes) }
    }

    /// A tensor that is put together from several places.
    pub(crate) fn assembled(path: &Path, assembly: Assembly) -> ShardFile {
        let bytes = assembly.bytes();
        ShardFile { path: path.into(), bytes, modified: None, data: Data::Assembly(assembly) }
    }

    /// A tensor that is computed from others.
    pub(crate) fn computed(path: &Path, bytes: u64, computed: Computed) -> ShardFile {
        ShardFile { path: path.into(), bytes, modified: None, data: Data::Computed(computed) }
    }

    /// A file on a server.
    #[cfg(feature = "hub")]
    pub(crate) fn remote(path: &Path, bytes: u64, file: RemoteFile) -> ShardFile {
        ShardFile { path: path.into(), bytes, modified: None, data: Data::Remote(Box::new(file)) }
    }

    /// Returns the file on a server, if it is one.
    #[cfg(feature = "hub")]
    pub(crate) fn as_remote(&self) -> Option<&RemoteFile> {
        match &self.data {
            Data::Remote(file) => Some(file),
            _ => None,
        }
    }

    /// Returns true if this is a tensor that is put together from several files, not a file of its own.
    pub(crate) fn is_assembled(&self) -> bool {
        matches!(self.data, Data::Assembly(_) | Data::Computed(_))
    }

    /// Fills `buffer` from byte `at` of the file.
    pub fn read_at(&self, buffer: &mut [u8], at: u64) -> Result<()> {
        let read = match &self.data {
            Data::Assembly(assembly) => return assembly.read_at(buffer, at),
            Data::Computed(computed) => return computed.read_at(buffer, at),
            #[cfg(feature = "hub")]
            Data::Remote(file) => return file.read_at(buffer, at),
            Data::File(file) => file.read_exact_at(buffer, at),
            Data::Memory(data) => match data.get(at as usize..(at as usize).saturating_add(buffer.len())) {
                Some(bytes) => {
                    buffer.copy_from_slice(bytes);
                    Ok(())
                }
                None => Err(std::io::ErrorKind::UnexpectedEof.into()),
            },
        };
        read.map_err(|e| match e.kind() {
            std::io::ErrorKind::UnexpectedEof => Error::Header {
                file: self.path.clone(),
                place: Place { tensor: None, byte: Some(at) },
                problem: format!(
                    "the file ended while {} bytes were read; it had {} bytes when it was opened: has it been changed?",
                    buffer.len(),
                    self.bytes
                ),
            },
            _ => Error::io(&self.path, "read")(e),
        })
    }

    /// Returns the open file, for copies inside the kernel; `None` for tensors in memory.
    pub(crate) fn handle(&self) -> Option<&File> {
        match &self.data {
            Data::File(file) => Some(file),
            _ => None,
        }
    }

    /// Returns an error if the file was changed since it was opened.
    pub fn check_unchanged(&self) -> Result<()> {
        if self.handle().is_none() {
            return Ok(());
        }
        let now = fs::metadata(&self.path).map_err(Error::io(&self.path, "look at"))?;
        if now.len() != self.bytes || now.modified().ok() != self.modified {
            return Err(Error::Header {
                file: self.path.clone(),
                place: Place::default(),
                problem: "the file was changed while it was read; the output was discarded".into(),
            });
        }
        Ok(())
    }
}

/// Opens a safetensors file and reads its header.
pub(crate) fn open_shard(path: &Path) -> Result<(ShardFile, Header)> {
    let file = ShardFile::open(path)?;
    let header = read_header(&file)?;
    Ok((file, header))
}

/// Reads the header of a safetensors file.
pub(crate) fn read_header(file: &ShardFile) -> Result<Header> {
    let (path, bytes) = (&file.path, file.bytes);
    let mut first = [0; 8];
    let first = &mut first[..bytes.min(8) as usize];
    file.read_at(first, 0)?;
    let mut json = vec![0; header::json_bytes(path, bytes, first)? as usize];
    file.read_at(&mut json, 8)?;
    Header::parse(path, bytes, &json)
}
