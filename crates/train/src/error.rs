//! The one error type of this crate.

use std::path::{Path, PathBuf};

/// Shorthand for results of this crate.
pub type Result<T = (), E = Error> = std::result::Result<T, E>;

/// What went wrong, where, and what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A configuration that cannot be used.
    #[error("{0}")]
    Config(String),
    /// A data file that cannot be used.
    #[error("{}{}: {problem}", file.display(), line.map(|line| format!(", line {line}")).unwrap_or_default())]
    Data {
        /// The file.
        file: PathBuf,
        /// Its line, from 1 on, where that is known.
        line: Option<u64>,
        /// What is wrong with it.
        problem: String,
    },
    /// A training checkpoint that cannot be resumed from.
    #[error("{}: {problem}", path.display())]
    Resume {
        /// The checkpoint or one of its files.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The run was stopped: a value is not finite, or a protected tensor is not what it should be.
    #[error("{0}")]
    Diverged(String),
    /// A file that cannot be read or written.
    #[error("{}: cannot {action}: {cause}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// The system's answer. Not called `source`: its words are in the message already.
        cause: std::io::Error,
    },
    /// The model cannot be read, run or written.
    #[error(transparent)]
    Model(#[from] ballast_model::Error),
}

impl Error {
    /// For `map_err`.
    pub fn io(path: &Path, action: &'static str) -> impl FnOnce(std::io::Error) -> Error {
        let path = path.to_path_buf();
        move |cause| Error::Io { path, action, cause }
    }
}

impl From<ballast_checkpoint::Error> for Error {
    fn from(error: ballast_checkpoint::Error) -> Error {
        Error::Model(error.into())
    }
}

impl From<ballast_kernels::KernelError> for Error {
    fn from(error: ballast_kernels::KernelError) -> Error {
        Error::Model(error.into())
    }
}
