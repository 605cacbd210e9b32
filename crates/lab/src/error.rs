//! The error type of this crate.

use std::path::Path;

use ballast_contract::ErrorKind;
use ballast_files::Place;

/// Result of this crate.
pub type Result<T = (), E = Error> = std::result::Result<T, E>;

/// An error of this crate. Its message says what is wrong, where, and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
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

impl Error {
    /// Returns the kind of this error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::Choice(_) => ErrorKind::Usage,
            Error::Input(_) => ErrorKind::Input,
            Error::Model(error) => error.kind(),
            Error::Train(error) => error.kind(),
        }
    }

    /// Returns the file or folder that the error is about.
    pub fn file(&self) -> Option<&Path> {
        match self {
            Error::Choice(_) | Error::Input(_) => None,
            Error::Model(error) => error.file(),
            Error::Train(error) => error.file(),
        }
    }

    /// Returns the tensor and the byte of the file that the error is about.
    pub fn place(&self) -> Place {
        match self {
            Error::Choice(_) | Error::Input(_) => Place::default(),
            Error::Model(error) => error.place(),
            Error::Train(error) => error.place(),
        }
    }

    /// Returns true if the message has several lines.
    pub fn is_list(&self) -> bool {
        match self {
            Error::Choice(_) => true,
            Error::Input(_) => false,
            Error::Model(error) => error.is_list(),
            Error::Train(error) => error.is_list(),
        }
    }
}

impl From<ballast_files::Error> for Error {
    fn from(error: ballast_files::Error) -> Error {
        Error::Model(error.into())
    }
}
