//! The one error type of this crate.

/// Shorthand for results of this crate.
pub type Result<T = (), E = Error> = std::result::Result<T, E>;

/// What went wrong, where, and what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A choice that does not exist.
    #[error("{0}")]
    Choice(String),
    /// An input that cannot be used.
    #[error("{0}")]
    Input(String),
    /// The model cannot be read or run.
    #[error(transparent)]
    Model(#[from] ballast_model::Error),
    /// The data cannot be read, or training went wrong.
    #[error(transparent)]
    Train(#[from] ballast_train::Error),
}

impl From<ballast_checkpoint::Error> for Error {
    fn from(error: ballast_checkpoint::Error) -> Error {
        Error::Model(error.into())
    }
}
