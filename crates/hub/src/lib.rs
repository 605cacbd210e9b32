//! Checkpoints on a hub (`hf://ORG/NAME[@REVISION][/PATH]`) or a web server (`https://...`).
//!
//! [`locate`] finds the folder behind an address. Its files are read by range requests: only the bytes that are
//! asked for. A revision is resolved to a commit once; everything is read from that commit, and a file that changes
//! in between is an error. Files that are in the local cache are read there. [`localize`] downloads a checkpoint into
//! the cache, in the hub's own layout.

#![forbid(unsafe_code)]

#[cfg(feature = "client")]
pub mod address;
#[cfg(feature = "client")]
mod cache;
#[cfg(feature = "client")]
mod client;
#[cfg(feature = "client")]
mod download;
#[cfg(feature = "client")]
mod file;
#[cfg(feature = "client")]
pub mod range;
#[cfg(feature = "client")]
mod repo;
#[cfg(feature = "client")]
mod settings;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ballast_files::jobs::Observer;
use ballast_files::{Folder, Result};
use serde::Serialize;

#[cfg(feature = "client")]
pub use client::{Waiting, set_waiting};
#[cfg(feature = "client")]
use file::RemoteFile;
#[cfg(feature = "client")]
pub use repo::{Hub, parse_listing};
#[cfg(feature = "client")]
pub use settings::{Limits, Settings, Token};

/// Returns true if a path is the address of a checkpoint on a server.
pub fn is_address(path: &Path) -> bool {
    let text = path.as_os_str().as_encoded_bytes();
    let starts =
        |scheme: &[u8]| text.get(..scheme.len()).is_some_and(|start| start.eq_ignore_ascii_case(scheme));
    text.starts_with(b"hf:/") || starts(b"https://") || starts(b"http://")
}

/// The place of a checkpoint that an address leads to.
pub enum Location {
    /// A folder or a file in the local cache.
    Cached(PathBuf),
    /// A folder on a server.
    Server {
        /// The folder.
        folder: Box<dyn Folder>,
        /// File in it that the address names.
        file: Option<PathBuf>,
    },
}

/// Finds the checkpoint at an address, with the settings of the environment.
pub fn locate(path: &Path) -> Result<(Location, Remote)> {
    #[cfg(feature = "client")]
    return Hub::new(Settings::from_env()?)?.locate(path);
    #[cfg(not(feature = "client"))]
    Err(unsupported(path))
}

#[cfg(not(feature = "client"))]
fn unsupported(path: &Path) -> ballast_files::Error {
    ballast_files::Error::Refused(format!(
        "{}: built without the feature `hub`, which reads from servers",
        path.display()
    ))
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
    #[cfg(feature = "client")]
    return Hub::new(Settings::from_env()?)?.download(path, part, observer);
    #[cfg(not(feature = "client"))]
    {
        let _ = (part, observer);
        Err(unsupported(path))
    }
}

/// The server of a checkpoint that was opened by an address.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Remote {
    /// The address, with the commit that was read.
    pub address: String,
    /// A remark on how it was opened.
    pub note: Option<String>,
    traffic: Arc<Traffic>,
    /// Number of requests at a time.
    pub parallel: usize,
}

/// Bytes and requests that a server was asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
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

#[cfg(feature = "client")]
impl Traffic {
    fn add_bytes(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    fn add_request(&self) {
        self.requests.fetch_add(1, Ordering::Relaxed);
    }
}

/// The examples of README.md, run as tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
