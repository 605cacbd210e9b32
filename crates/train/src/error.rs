//! Errors of this crate.

use std::path::{Path, PathBuf};

/// Shorthand for results of this crate.
pub type Result<T = (), E = Error> = std::result::Result<T, E>;

/// An error of a training run: what is wrong, where, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Invalid configuration.
    #[error("{0}")]
    Config(String),
    /// Invalid data file.
    #[error("{}{}: {problem}", file.display(), line.map(|line| format!(", line {line}")).unwrap_or_default())]
    Data {
        /// The file.
        file: PathBuf,
        /// Line number from 1, if known.
        line: Option<u64>,
        /// The problem.
        problem: String,
    },
    /// Training checkpoint that cannot be resumed.
    #[error("{}: {problem}", path.display())]
    Resume {
        /// The checkpoint or one of its files.
        path: PathBuf,
        /// The problem.
        problem: String,
    },
    /// The run was stopped: a value is non-finite, or a protected tensor changed.
    #[error("{0}")]
    Diverged(String),
    /// File that cannot be read or written.
    #[error("{}: cannot {action}: {cause}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The action that failed.
        action: &'static str,
        /// The system's error. Not called `source`, because the message already contains it.
        cause: std::io::Error,
    },
    /// A rank failed or does not answer.
    #[error(transparent)]
    Cluster(#[from] ballast_cluster::Error),
    /// Error of the model: reading, running or writing it.
    #[error(transparent)]
    Model(#[from] ballast_model::Error),
}

impl Error {
    /// Returns a function for `map_err` that adds path and action to an I/O error.
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
