//! Training data: from files to micro-batches.
//!
//! A file is indexed once when it is opened and its documents are read by position, one at a time: memory
//! does not grow with the text. [`Record`] is the content of a line, [`TextEncoder`] makes it a [`Document`]
//! (ids, and which of them are trained on), [`Files`] orders the documents of several files, and a [`Packer`]
//! concatenates them. The order depends only on the seed and a few counters, the [`Cursor`].

mod chat;
mod config;
mod encoder;
mod files;
mod index;
mod pack;
mod record;
pub(crate) mod shuffle;
mod split;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

pub use chat::{Rendered, render};
pub use config::{DataConfig, DataFile, Packing};
pub use encoder::TextEncoder;
pub use files::Files;
pub use pack::{MicroBatch, Packer};
pub use record::Record;
pub use shuffle::Permutation;
pub use split::Split;

/// Token ids, and which of them are trained on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Document {
    /// Token ids.
    pub ids: Vec<u32>,
    /// For each token, true if its prediction has a loss. The first token is never predicted.
    pub trained: Vec<bool>,
    /// Origin, for messages.
    pub origin: Origin,
}

impl Document {
    /// Returns true if any token of the document is trained on.
    pub fn trains(&self) -> bool {
        self.trains_within(usize::MAX)
    }

    /// Returns true if any of the first `tokens` tokens is trained on.
    pub(crate) fn trains_within(&self, tokens: usize) -> bool {
        self.trained.iter().take(tokens).skip(1).any(|trained| *trained)
    }
}

/// Origin of a document, for messages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Origin {
    /// The file.
    pub source: String,
    /// First line, from 1.
    pub number: u64,
}

impl Origin {
    /// Returns an error at this place.
    pub(crate) fn error(&self, problem: impl ToString) -> Error {
        Error::Data {
            file: self.source.clone().into(),
            line: Some(self.number),
            problem: problem.to_string(),
        }
    }
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}, line {}", self.source, self.number)
    }
}

/// An endless stream of documents with a position that can be restored.
pub trait Documents: Send {
    /// The next document.
    fn next(&mut self) -> Result<Document>;

    /// Position in the stream, for [`Documents::seek`].
    fn cursor(&self) -> Cursor;

    /// Restores a position.
    fn seek(&mut self, cursor: &Cursor) -> Result;

    /// A stream of the same documents from the start: every `groups`th of them, from document `group` on. The streams
    /// of all groups together have every document once. The files are not read again.
    fn share(&self, group: u64, groups: u64) -> Box<dyn Documents>;

    /// Number of times that every document has come since `cursor`; 0 for a stream without repetition.
    fn epochs_since(&self, _cursor: &Cursor) -> u64 {
        0
    }
}

/// A position in a stream of documents or micro-batches; the default is the start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cursor {
    /// Number of documents drawn.
    pub drawn: u64,
    /// Position in every file; empty at the start of a stream.
    pub files: Vec<FileCursor>,
    /// Tokens of the next document that earlier micro-batches have used.
    pub offset: usize,
}

/// A position in one file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileCursor {
    /// Number of documents drawn, over all epochs.
    pub taken: u64,
    /// Size of the file in bytes; identifies it.
    pub bytes: u64,
    /// Checksum of the content; absent in checkpoints of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<u64>,
}

impl FileCursor {
    /// Returns an error unless the file at `path` is the one of the saved run.
    pub(crate) fn check_same(&self, path: &std::path::Path, saved: &FileCursor) -> Result {
        let problem = if self.bytes != saved.bytes {
            format!("it has {} bytes, expected {} as when the run was saved", self.bytes, saved.bytes)
        } else if saved.content.is_some() && self.content != saved.content {
            "its content has changed since the run was saved".into()
        } else {
            return Ok(());
        };
        let problem = problem + "; resume with the same data";
        Err(Error::Data { file: path.into(), line: None, problem })
    }
}
