//! The error type of this crate.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use ballast_contract::ErrorKind;
use ballast_format::shortage;

use crate::index::IndexIssue;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error: what is wrong, where, and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A system call failed.
    #[error("{}: cannot {action}: {cause}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// Action that failed.
        action: &'static str,
        /// Error of the system.
        cause: io::Error,
    },
    /// A safetensors file is malformed.
    #[error("{}{place}: {problem}", file.display())]
    Header {
        /// The file.
        file: PathBuf,
        /// Tensor and byte.
        place: Place,
        /// Problem.
        problem: String,
    },
    /// An index file is malformed, or names a file that cannot be used.
    #[error("{}: {problem}", file.display())]
    Index {
        /// The index file.
        file: PathBuf,
        /// Problem.
        problem: String,
    },
    /// Index and shards disagree.
    #[error(
        "{}: the index and the shards disagree ({} problems), first: {}; `ballast audit` lists all",
        root.display(),
        issues.len(),
        issues[0]
    )]
    Inconsistent {
        /// The checkpoint.
        root: PathBuf,
        /// All disagreements, at least one.
        issues: Vec<IndexIssue>,
    },
    /// A config.json that cannot be used.
    #[error("{}: {problem}", file.display())]
    Config {
        /// The config file.
        file: PathBuf,
        /// Problem.
        problem: String,
    },
    /// There is no checkpoint at the path.
    #[error("{}: {problem}", path.display())]
    NoCheckpoint {
        /// The path.
        path: PathBuf,
        /// Problem.
        problem: String,
    },
    /// A tensor cannot be used as asked: missing, misshapen, or of a dtype that must not be cast.
    #[error("{}tensor {tensor:?}: {problem}", in_front(checkpoint))]
    Tensor {
        /// Checkpoint, if known.
        checkpoint: Option<PathBuf>,
        /// The tensor.
        tensor: String,
        /// Problem.
        problem: String,
    },
    /// The request is invalid, or refused for safety.
    #[error("{0}")]
    Refused(String),
    /// The destination exists and may not be replaced.
    #[error("{} exists; add --force to replace it", path.display())]
    Exists {
        /// The destination.
        path: PathBuf,
    },
    /// The destination's disk is too small.
    #[error("{}: not enough disk space: {}; nothing was written", path.display(), shortage(*needed, *available))]
    NoSpace {
        /// The destination.
        path: PathBuf,
        /// Bytes needed.
        needed: u64,
        /// Bytes available.
        available: u64,
    },
    /// The system starts no more threads.
    #[error(
        "cannot start a thread: {0}; use fewer with --threads, or raise the limit (ulimit -u, ulimit -v, the \
         container's pids limit)"
    )]
    Threads(io::Error),
    /// A hub or a web server did not answer as needed.
    #[error("{address}: {problem}")]
    Hub {
        /// Address of the checkpoint or the file.
        address: String,
        /// Problem.
        problem: String,
    },
    /// The user asked to stop a download.
    #[error("interrupted; what was downloaded stays in {}, and the next call continues from there", cache.display())]
    DownloadInterrupted {
        /// Folder of the cache.
        cache: PathBuf,
    },
    /// The written data differs from the planned data when it is read back.
    #[error("verification failed, the output was discarded: {0}")]
    Verification(String),
    /// The user asked to stop.
    #[error("interrupted; nothing was left behind")]
    Interrupted,
}

/// A place in a safetensors file; displayed as `, tensor "x", byte 8`, or as nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// Tensor.
    pub tensor: Option<String>,
    /// Byte, from the start of the file.
    pub byte: Option<u64>,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(tensor) = &self.tensor {
            write!(f, ", tensor {tensor:?}")?;
        }
        if let Some(byte) = self.byte {
            write!(f, ", byte {byte}")?;
        }
        Ok(())
    }
}

/// Returns true if a device or a quota is full, a file is larger than allowed, or memory is short.
pub fn is_full(error: &io::Error) -> bool {
    use io::ErrorKind::{FileTooLarge, OutOfMemory, QuotaExceeded, StorageFull};
    matches!(error.kind(), FileTooLarge | OutOfMemory | QuotaExceeded | StorageFull)
}

fn in_front(checkpoint: &Option<PathBuf>) -> String {
    checkpoint.as_ref().map(|root| format!("{}, ", root.display())).unwrap_or_default()
}

impl Error {
    /// Returns a closure that wraps the error of an operation on a file.
    pub fn io(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> Error {
        let path = path.to_path_buf();
        move |cause| Error::Io { path, action, cause }
    }

    /// Returns an error about a tensor.
    pub fn tensor(tensor: impl Into<String>, problem: impl Into<String>) -> Error {
        Error::Tensor { checkpoint: None, tensor: tensor.into(), problem: problem.into() }
    }

    /// Adds the checkpoint at `root` to an error about a tensor.
    pub fn of(self, root: &Path) -> Error {
        match self {
            Error::Tensor { checkpoint: None, tensor, problem } => {
                Error::Tensor { checkpoint: Some(root.into()), tensor, problem }
            }
            other => other,
        }
    }

    /// Returns the file or folder that the error is about.
    pub fn file(&self) -> Option<&Path> {
        match self {
            Error::Io { path, .. }
            | Error::NoCheckpoint { path, .. }
            | Error::NoSpace { path, .. }
            | Error::Exists { path } => Some(path),
            Error::Header { file, .. } | Error::Index { file, .. } | Error::Config { file, .. } => Some(file),
            Error::Inconsistent { root, .. } => Some(root),
            Error::Tensor { checkpoint, .. } => checkpoint.as_deref(),
            Error::Hub { address, .. } => Some(Path::new(address)),
            Error::DownloadInterrupted { cache } => Some(cache),
            Error::Refused(_) | Error::Threads(_) | Error::Verification(_) | Error::Interrupted => None,
        }
    }

    /// Returns the tensor and the byte of the file that the error is about.
    pub fn place(&self) -> Place {
        match self {
            Error::Header { place, .. } => place.clone(),
            Error::Tensor { tensor, .. } => Place { tensor: Some(tensor.clone()), byte: None },
            _ => Place::default(),
        }
    }

    /// Returns true if the message has several lines.
    pub fn is_list(&self) -> bool {
        false
    }

    /// Returns the kind of this error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::Verification(_) => ErrorKind::Check,
            Error::Refused(_) | Error::Exists { .. } => ErrorKind::Usage,
            Error::NoSpace { .. } | Error::Threads(_) => ErrorKind::Space,
            Error::Io { cause, .. } if is_full(cause) => ErrorKind::Space,
            Error::Interrupted | Error::DownloadInterrupted { .. } => ErrorKind::Interrupted,
            _ => ErrorKind::Input,
        }
    }
}
