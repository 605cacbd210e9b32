//! Checkpoints on a hub (`hf://ORG/NAME[@REVISION][/PATH]`) or a web server (`https://...`).
//!
//! [`Checkpoint::open`] takes an address in place of a path. Config, index and headers are read by range
//! requests, then only the bytes that are asked for. A revision is resolved to a commit once; everything is
//! read from that commit, and a file that changes in between is an error. Files that are in the local cache
//! are read there. [`localize`] downloads a checkpoint into the cache, in the hub's own layout.

#[cfg(feature = "hub")]
pub mod address;
#[cfg(feature = "hub")]
mod cache;
#[cfg(feature = "hub")]
mod client;
#[cfg(feature = "hub")]
mod download;
#[cfg(feature = "hub")]
mod file;
#[cfg(feature = "hub")]
pub mod range;
#[cfg(feature = "hub")]
mod repo;
#[cfg(feature = "hub")]
mod settings;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;

#[cfg(feature = "hub")]
pub use client::{Waiting, set_waiting};
#[cfg(feature = "hub")]
pub(crate) use file::RemoteFile;
#[cfg(feature = "hub")]
pub use repo::{Hub, parse_listing};
#[cfg(feature = "hub")]
pub use settings::{Limits, Settings, Token};

#[cfg(not(feature = "hub"))]
use crate::error::Error;
use crate::error::Result;
use crate::jobs::Observer;
use crate::open::{Checkpoint, StoredTensor};

/// Returns true if a path is the address of a checkpoint on a server.
pub fn is_address(path: &Path) -> bool {
    let text = path.as_os_str().as_encoded_bytes();
    let starts =
        |scheme: &[u8]| text.get(..scheme.len()).is_some_and(|start| start.eq_ignore_ascii_case(scheme));
    text.starts_with(b"hf:/") || starts(b"https://") || starts(b"http://")
}

/// Opens the checkpoint at an address, with the settings of the environment.
#[cfg(feature = "hub")]
pub(crate) fn open(path: &Path) -> Result<Checkpoint> {
    Hub::new(Settings::from_env()?)?.open(path)
}

/// Says that addresses cannot be opened.
#[cfg(not(feature = "hub"))]
pub(crate) fn open(path: &Path) -> Result<Checkpoint> {
    Err(unsupported(path))
}

#[cfg(not(feature = "hub"))]
fn unsupported(path: &Path) -> Error {
    Error::Refused(format!("{}: built without the feature `hub`, which reads from servers", path.display()))
}

/// The files of a checkpoint that are downloaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The weights and the files beside them.
    All,
    /// The files beside the weights: config, tokenizer, templates.
    BesideWeights,
}

/// Returns the path of a checkpoint on disk: the path itself, or for the address of a hub the folder or file
/// in the local cache, after the missing files were downloaded.
pub fn localize(path: &Path, part: Part, observer: &dyn Observer) -> Result<PathBuf> {
    if !is_address(path) {
        return Ok(path.to_path_buf());
    }
    #[cfg(feature = "hub")]
    return Hub::new(Settings::from_env()?)?.download(path, part, observer);
    #[cfg(not(feature = "hub"))]
    {
        let _ = (part, observer);
        Err(unsupported(path))
    }
}

/// The server of a checkpoint that was opened by an address.
#[derive(Clone, Debug)]
pub struct Remote {
    /// The address, with the commit that was read.
    pub address: String,
    /// A remark on how it was opened.
    pub note: Option<String>,
    traffic: Arc<Traffic>,
    /// Number of requests at a time.
    #[cfg_attr(not(feature = "hub"), allow(dead_code))]
    parallel: usize,
}

/// Bytes and requests that a server was asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RemoteSummary {
    /// The address, with the commit that was read.
    pub address: String,
    /// Number of bytes received.
    pub bytes: u64,
    /// Number of requests, including redirects and repeated ones.
    pub requests: u64,
    /// A remark on how it was opened.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

impl Remote {
    /// Returns what has been read so far.
    pub fn summary(&self) -> RemoteSummary {
        RemoteSummary {
            address: self.address.clone(),
            bytes: self.traffic.bytes.load(Ordering::Relaxed),
            requests: self.traffic.requests.load(Ordering::Relaxed),
            note: self.note.clone(),
        }
    }
}

/// Numbers of bytes and requests.
#[derive(Debug, Default)]
struct Traffic {
    bytes: AtomicU64,
    requests: AtomicU64,
}

#[cfg(feature = "hub")]
impl Traffic {
    fn add_bytes(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    fn add_request(&self) {
        self.requests.fetch_add(1, Ordering::Relaxed);
    }
}

/// Tensors of a file that are at most this far apart are read by one request: less than a request costs.
#[cfg(feature = "hub")]
const GAP_BYTES: u64 = 16 << 10;

/// Number of bytes that are read ahead and kept in memory, at most.
#[cfg(feature = "hub")]
const PREFETCH_BYTES: u64 = 64 << 20;

impl Checkpoint {
    /// Reads tensors of files on a server ahead, by few and parallel requests. Later reads of them take no
    /// request. Does nothing for files on disk, and for tensors that are too large to be kept in memory.
    pub fn prefetch<'a>(&self, tensors: impl Iterator<Item = &'a StoredTensor>) -> Result<()> {
        #[cfg(feature = "hub")]
        if let Some(remote) = &self.remote {
            let mut parts: Vec<(usize, u64, u64)> = Vec::new();
            let mut wanted: Vec<&StoredTensor> =
                tensors.filter(|t| t.bytes > 0 && self.files[t.file].as_remote().is_some()).collect();
            wanted.sort_by_key(|t| (t.file, t.begin));
            for t in wanted {
                match parts.last_mut() {
                    Some((file, _, end)) if *file == t.file && t.begin <= *end + GAP_BYTES => {
                        *end = (t.begin + t.bytes).max(*end);
                    }
                    _ => parts.push((t.file, t.begin, t.begin + t.bytes)),
                }
            }
            let mut total = 0;
            parts.retain(|(_, begin, end)| {
                total += end - begin;
                total <= PREFETCH_BYTES
            });
            repo::parallel(&parts, remote.parallel, |(file, begin, end)| {
                self.files[*file].as_remote().map_or(Ok(()), |file| file.prefetch(*begin, end - begin))
            })?;
        }
        #[cfg(not(feature = "hub"))]
        let _ = tensors;
        Ok(())
    }

    /// Returns true if reads of this checkpoint take requests.
    pub fn is_on_server(&self) -> bool {
        #[cfg(feature = "hub")]
        return self.files.iter().any(|file| file.as_remote().is_some());
        #[cfg(not(feature = "hub"))]
        false
    }
}

/// Runs `work`, which reads all of some checkpoints; on more threads than there are cores if one of them is on
/// a server, because a thread that reads from there mostly waits.
pub(crate) fn with_readers<R: Send>(checkpoints: &[&Checkpoint], work: impl FnOnce() -> R + Send) -> R {
    const READERS: usize = 16;
    if checkpoints.iter().any(|checkpoint| checkpoint.is_on_server())
        && let Ok(pool) = rayon::ThreadPoolBuilder::new().num_threads(READERS).build()
    {
        return pool.install(work);
    }
    work()
}
