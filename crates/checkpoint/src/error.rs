//! The one error type of this crate.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use crate::index::IndexIssue;

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, where, and what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused.
    #[error("{}: cannot {action}: {cause}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// The system's answer.
        cause: io::Error,
    },
    /// A safetensors file is malformed.
    #[error("{}{place}: {problem}", file.display())]
    Header {
        /// The file.
        file: PathBuf,
        /// The tensor and byte concerned.
        place: Place,
        /// What is wrong with it.
        problem: String,
    },
    /// An index file is malformed, or names a file that cannot be used.
    #[error("{}: {problem}", file.display())]
    Index {
        /// The index file.
        file: PathBuf,
        /// What is wrong with it.
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
        /// What is wrong with it.
        problem: String,
    },
    /// There is no checkpoint at the path.
    #[error("{}: {problem}", path.display())]
    NoCheckpoint {
        /// The path.
        path: PathBuf,
        /// What was found instead.
        problem: String,
    },
    /// A tensor cannot be used as asked: missing, misshapen, or of a dtype that must not be cast.
    #[error("{}tensor {tensor:?}: {problem}", in_front(checkpoint))]
    Tensor {
        /// The checkpoint, where it is known.
        checkpoint: Option<PathBuf>,
        /// The tensor.
        tensor: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The request itself makes no sense, or is refused for safety.
    #[error("{0}")]
    Refused(String),
    /// The destination's disk is too small.
    #[error("{}: not enough disk space: {needed} bytes needed, {available} available; nothing was written", path.display())]
    NoSpace {
        /// The destination.
        path: PathBuf,
        /// Bytes needed.
        needed: u64,
        /// Bytes available.
        available: u64,
    },
    /// What was written does not read back as what was meant.
    #[error("verification failed, nothing was kept: {0}")]
    Verification(String),
    /// The user asked to stop.
    #[error("interrupted; nothing was left behind")]
    Interrupted,
}

/// Where in a safetensors file: prints as `, tensor "x", byte 8`, or nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// The tensor concerned.
    pub tensor: Option<String>,
    /// The byte concerned, from the start of the file.
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

fn in_front(checkpoint: &Option<PathBuf>) -> String {
    checkpoint.as_ref().map(|root| format!("{}, ", root.display())).unwrap_or_default()
}

/// What kind of failure an error is: the caller's exit code depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// A check failed.
    Check,
    /// The request was wrong.
    Usage,
    /// The input is missing or malformed.
    Input,
    /// It does not fit.
    Space,
    /// The user asked to stop.
    Interrupted,
}

impl Error {
    /// What a failed operation on a file becomes.
    pub fn io(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> Error {
        let path = path.to_path_buf();
        move |cause| Error::Io { path, action, cause }
    }

    pub(crate) fn tensor(tensor: impl Into<String>, problem: impl Into<String>) -> Error {
        Error::Tensor { checkpoint: None, tensor: tensor.into(), problem: problem.into() }
    }

    /// The same error; one about a tensor says that the tensor is of the checkpoint at `root`.
    pub(crate) fn of(self, root: &Path) -> Error {
        match self {
            Error::Tensor { checkpoint: None, tensor, problem } => {
                Error::Tensor { checkpoint: Some(root.into()), tensor, problem }
            }
            other => other,
        }
    }

    /// What kind of failure this is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::Verification(_) => ErrorKind::Check,
            Error::Refused(_) => ErrorKind::Usage,
            Error::NoSpace { .. } => ErrorKind::Space,
            Error::Io { cause, .. }
                if matches!(cause.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) =>
            {
                ErrorKind::Space
            }
            Error::Interrupted => ErrorKind::Interrupted,
            _ => ErrorKind::Input,
        }
    }
}
