//! Errors of this crate.

use std::path::{Path, PathBuf};

use ballast_contract::ErrorKind;
use ballast_files::{Place, is_full};

/// Shorthand for results of this crate.
pub type Result<T = (), E = Error> = std::result::Result<T, E>;

/// An error of a training run: what is wrong, where, and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A key of the configuration is unknown, or its value is invalid or does not fit the run.
    #[error("{problem}")]
    Config {
        /// The key as a path, for example `batch.groups`.
        key: String,
        /// The problem as a sentence that names the key.
        problem: String,
    },
    /// Text that is not TOML or JSON, or a setting without a key or a value.
    #[error("{0}")]
    Syntax(String),
    /// The folder of a new run has checkpoints of an earlier one.
    #[error("{} has checkpoints of a run; resume it or set another `out`", out.display())]
    HasRun {
        /// The folder.
        out: PathBuf,
    },
    /// A new run would overwrite a finished model.
    #[error("{} exists, and this run would overwrite it; set another `out`", path.display())]
    Exists {
        /// The finished model or adapters.
        path: PathBuf,
    },
    /// Another run is writing to the folder.
    #[error("{}: another run is writing there; wait for it or set another `out`", out.display())]
    Busy {
        /// The folder.
        out: PathBuf,
    },
    /// The ranks of a run do not run the same program, configuration and data.
    #[error("{0}")]
    Ranks(String),
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
    /// Returns the error of a key.
    pub(crate) fn config(key: impl Into<String>, problem: impl Into<String>) -> Error {
        Error::Config { key: key.into(), problem: problem.into() }
    }

    /// Returns a function for `map_err` that adds path and action to an I/O error.
    pub(crate) fn io(path: &Path, action: &'static str) -> impl FnOnce(std::io::Error) -> Error {
        let path = path.to_path_buf();
        move |cause| Error::Io { path, action, cause }
    }

    /// Returns the kind of this error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::Config { .. } | Error::Syntax(_) | Error::Ranks(_) => ErrorKind::Usage,
            Error::HasRun { .. } | Error::Exists { .. } | Error::Busy { .. } => ErrorKind::Usage,
            Error::Io { cause, .. } if is_full(cause) => ErrorKind::Space,
            Error::Data { .. } | Error::Resume { .. } | Error::Io { .. } => ErrorKind::Input,
            Error::Diverged(_) => ErrorKind::Diverged,
            Error::Cluster(_) => ErrorKind::Rank,
            Error::Model(error) => error.kind(),
        }
    }

    /// Returns the file or folder that the error is about.
    pub fn file(&self) -> Option<&Path> {
        match self {
            Error::Data { file, .. } | Error::Resume { path: file, .. } | Error::Io { path: file, .. } => {
                Some(file)
            }
            Error::Model(error) => error.file(),
            _ => None,
        }
    }

    /// Returns the tensor and the byte of the file that the error is about.
    pub fn place(&self) -> Place {
        match self {
            Error::Model(error) => error.place(),
            _ => Place::default(),
        }
    }

    /// Returns true if the message has several lines.
    pub fn is_list(&self) -> bool {
        matches!(self, Error::Model(error) if error.is_list())
    }
}

impl From<ballast_files::Error> for Error {
    fn from(error: ballast_files::Error) -> Error {
        Error::Model(error.into())
    }
}

impl From<ballast_kernels::KernelError> for Error {
    fn from(error: ballast_kernels::KernelError) -> Error {
        Error::Model(error.into())
    }
}
