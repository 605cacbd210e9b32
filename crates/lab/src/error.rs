//! The error type of this crate.

/// Result of this crate.
pub type Result<T = (), E = Error> = std::result::Result<T, E>;

/// An error of this crate. Its message says what is wrong, where, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An unknown or unusable precision choice.
    #[error("{0}")]
    Choice(String),
    /// An unusable input.
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
