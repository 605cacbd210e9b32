//! Error type of this crate.

use std::path::{Path, PathBuf};

use ballast_contract::ErrorKind;
use ballast_files::Place;
use ballast_format::shortage;
use ballast_kernels::KernelError;

/// Result type of this crate.
pub type Result<T = (), E = Error> = std::result::Result<T, E>;

/// Error of this crate; the message says what is wrong, where, and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A field of config.json is invalid or unsupported.
    #[error("{}: `{field}` {problem}", file.display())]
    Config {
        /// The config file.
        file: PathBuf,
        /// The field.
        field: String,
        /// Description of the problem.
        problem: String,
    },
    /// The checkpoint cannot be read or written.
    #[error(transparent)]
    Checkpoint(#[from] ballast_files::Error),
    /// The checkpoint's tensors do not match its configuration.
    #[error("{}: tensors do not match config.json\n{problems}", root.display())]
    Tensors {
        /// The checkpoint.
        root: PathBuf,
        /// Missing tensors, extra tensors, and tensors of the wrong shape.
        problems: Mismatch,
    },
    /// Unknown precision preset.
    #[error("unknown precision {0:?}; known: {known}", known = crate::precision::PRESETS.map(|(name, _)| name).join(", "))]
    Precision(String),
    /// A tokenizer, template, conversation or settings file is invalid.
    #[error("{}: {problem}", file.display())]
    Text {
        /// The file.
        file: PathBuf,
        /// Description of the problem.
        problem: String,
    },
    /// A NaN or infinity where only finite values are allowed.
    #[error("non-finite value: {0}")]
    NotFinite(String),
    /// Token ids, lengths or settings do not fit the model.
    #[error("{0}")]
    Input(String),
    /// Invalid arguments of a kernel.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A message between the ranks that share a batch failed.
    #[error(transparent)]
    Cluster(#[from] ballast_cluster::Error),
    /// Not enough memory.
    #[error("not enough memory for {what}: {}", shortage(*needed, *available))]
    Memory {
        /// Purpose of the memory.
        what: String,
        /// Bytes needed.
        needed: u64,
        /// Bytes available.
        available: u64,
    },
}

impl Error {
    /// Returns the kind of this error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::Checkpoint(error) => error.kind(),
            Error::Precision(_) => ErrorKind::Usage,
            Error::Memory { .. } => ErrorKind::Space,
            Error::NotFinite(_) => ErrorKind::Diverged,
            Error::Cluster(_) => ErrorKind::Rank,
            Error::Config { .. } | Error::Tensors { .. } | Error::Text { .. } => ErrorKind::Input,
            Error::Input(_) | Error::Kernel(_) => ErrorKind::Input,
        }
    }

    /// Returns the file or folder that the error is about.
    pub fn file(&self) -> Option<&Path> {
        match self {
            Error::Checkpoint(error) => error.file(),
            Error::Config { file, .. } | Error::Text { file, .. } | Error::Tensors { root: file, .. } => {
                Some(file)
            }
            _ => None,
        }
    }

    /// Returns the tensor and the byte of the file that the error is about.
    pub fn place(&self) -> Place {
        match self {
            Error::Checkpoint(error) => error.place(),
            _ => Place::default(),
        }
    }

    /// Returns true if the message has several lines.
    pub fn is_list(&self) -> bool {
        matches!(self, Error::Tensors { .. })
    }
}

/// Differences between a checkpoint's tensors and those of a configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mismatch {
    /// Tensors that the checkpoint lacks.
    pub missing: Vec<String>,
    /// Tensors that no part of the model uses.
    pub extra: Vec<String>,
    /// Tensors of the wrong shape: name, shape found, shape expected.
    pub misshapen: Vec<(String, Vec<u64>, Vec<u64>)>,
}

impl Mismatch {
    /// Returns true if there are no differences.
    pub fn is_empty(&self) -> bool {
        self.missing.is_empty() && self.extra.is_empty() && self.misshapen.is_empty()
    }
}

impl std::fmt::Display for Mismatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        const SHOWN: usize = 20;
        let misshapen: Vec<String> = self
            .misshapen
            .iter()
            .map(|(name, found, expected)| format!("{name}: shape must be {expected:?}, got {found:?}"))
            .collect();
        for (what, names) in
            [("missing", &self.missing), ("extra", &self.extra), ("of the wrong shape", &misshapen)]
        {
            if names.is_empty() {
                continue;
            }
            writeln!(f, "  {} {what}:", names.len())?;
            for name in names.iter().take(SHOWN) {
                writeln!(f, "    {name}")?;
            }
            if names.len() > SHOWN {
                writeln!(f, "    and {} more", names.len() - SHOWN)?;
            }
        }
        Ok(())
    }
}
