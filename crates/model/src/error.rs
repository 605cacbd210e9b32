//! The one error type of this crate.

use std::path::PathBuf;

use ballast_kernels::KernelError;

/// Shorthand for results of this crate.
pub type Result<T = (), E = Error> = std::result::Result<T, E>;

/// What went wrong, where, and what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A field of config.json that cannot be used.
    #[error("{}: `{field}` {problem}", file.display())]
    Config {
        /// The config file.
        file: PathBuf,
        /// The field.
        field: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The checkpoint cannot be read or written.
    #[error(transparent)]
    Checkpoint(#[from] ballast_checkpoint::Error),
    /// The checkpoint's tensors are not those of the configuration.
    #[error("{}: the tensors are not those that config.json describes\n{problems}", root.display())]
    Tensors {
        /// The checkpoint.
        root: PathBuf,
        /// All that is missing, extra or misshapen.
        problems: Mismatch,
    },
    /// A precision that does not exist.
    #[error("no precision is called {0:?}; known: {known}", known = crate::precision::PRESETS.map(|(name, _)| name).join(", "))]
    Precision(String),
    /// A tokenizer, template, conversation or settings file that cannot be used.
    #[error("{}: {problem}", file.display())]
    Text {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// A NaN or an infinity where none may be.
    #[error("not finite: {0}")]
    NotFinite(String),
    /// Ids, lengths or settings that do not fit the model.
    #[error("{0}")]
    Input(String),
    /// Shapes that do not fit a kernel.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// It would not fit in memory.
    #[error("{what} needs {needed} bytes of memory, and {available} are available")]
    Memory {
        /// What was asked for.
        what: String,
        /// Bytes needed.
        needed: u64,
        /// Bytes available.
        available: u64,
    },
}

/// How a checkpoint's tensors differ from those of a configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mismatch {
    /// Names that are not there.
    pub missing: Vec<String>,
    /// Names that belong to no part of the model.
    pub extra: Vec<String>,
    /// Name, shape that was found, shape that was expected.
    pub misshapen: Vec<(String, Vec<u64>, Vec<u64>)>,
}

impl Mismatch {
    /// Whether there is nothing to complain of.
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
            .map(|(name, found, expected)| format!("{name}: {found:?} where {expected:?} is expected"))
            .collect();
        for (what, names) in [("missing", &self.missing), ("extra", &self.extra), ("misshapen", &misshapen)] {
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
