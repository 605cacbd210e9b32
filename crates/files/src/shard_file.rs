//! One file of a checkpoint, or a tensor that is read like one: in memory, in several places, computed, or on a
//! server.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::error::{Error, Place, Result};
use crate::header::{self, Header};

/// Bytes that are read by position, like those of a file: a tensor in several places, a computed one, a file on a
/// server.
pub trait Source: std::fmt::Debug + Send + Sync {
    /// Fills `buffer` from byte `at` on.
    fn read_at(&self, buffer: &mut [u8], at: u64) -> Result<()>;

    /// Returns true if reads take requests to a server.
    fn is_remote(&self) -> bool {
        false
    }

    /// Reads `bytes` bytes from byte `at` on ahead, if they are on a server.
    fn prefetch(&self, _at: u64, _bytes: u64) -> Result<()> {
        Ok(())
    }
}

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
    Source(Box<dyn Source>),
}

impl ShardFile {
    /// Opens a file.
    pub fn open(path: &Path) -> Result<ShardFile> {
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
    pub fn in_memory(path: &Path, bytes: Vec<u8>) -> ShardFile {
        let length = bytes.len() as u64;
        ShardFile { path: path.into(), bytes: length, modified: None, data: Data::Memory(bytes) }
    }

    /// A tensor or a file on a server that is read like a file of `bytes` bytes.
    pub fn from_source(path: &Path, bytes: u64, source: impl Source + 'static) -> ShardFile {
        ShardFile { path: path.into(), bytes, modified: None, data: Data::Source(Box::new(source)) }
    }

    /// Returns the source of the bytes, if it is a file on a server.
    pub fn as_remote(&self) -> Option<&dyn Source> {
        match &self.data {
            Data::Source(source) if source.is_remote() => Some(source.as_ref()),
            _ => None,
        }
    }

    /// Returns true if this is a tensor that is put together or computed, not a file of its own.
    pub fn is_assembled(&self) -> bool {
        matches!(&self.data, Data::Source(source) if !source.is_remote())
    }

    /// Fills `buffer` from byte `at` of the file.
    pub fn read_at(&self, buffer: &mut [u8], at: u64) -> Result<()> {
        let read = match &self.data {
            Data::Source(source) => return source.read_at(buffer, at),
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
    pub fn handle(&self) -> Option<&File> {
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
pub fn open_shard(path: &Path) -> Result<(ShardFile, Header)> {
    let file = ShardFile::open(path)?;
    let header = read_header(&file)?;
    Ok((file, header))
}

/// Reads the header of a safetensors file.
pub fn read_header(file: &ShardFile) -> Result<Header> {
    let (path, bytes) = (&file.path, file.bytes);
    let mut first = [0; 8];
    let first = &mut first[..bytes.min(8) as usize];
    file.read_at(first, 0)?;
    let mut json = vec![0; header::json_bytes(path, bytes, first)? as usize];
    file.read_at(&mut json, 8)?;
    Header::parse(path, bytes, &json)
}
