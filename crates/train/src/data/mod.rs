//! From files to micro-batches.
//!
//! A file is indexed once when it is opened and its documents are read by position, one at a time: memory does not grow
//! with the text. [`Record`] says what a line holds, [`Text`] makes it a [`Document`] (ids, and which of them are trained
//! on), [`Files`] puts the documents of several files in order, and a [`Packer`] lays them end to end. The whole order follows
//! from the seed and a few counters, the [`Cursor`].

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
    /// Its tokens.
    pub ids: Vec<u32>,
    /// For each whether it is to be predicted from those before it; the first has none before it.
    pub trained: Vec<bool>,
    /// Where it came from.
    pub origin: Origin,
}

impl Document {
    /// Whether a model learns anything from it.
    pub fn trains(&self) -> bool {
        self.trains_within(usize::MAX)
    }

    /// Whether a model learns anything from its first `tokens` tokens.
    pub fn trains_within(&self, tokens: usize) -> bool {
        self.trained.iter().take(tokens).skip(1).any(|trained| *trained)
    }
}

/// Where a document came from, for messages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Origin {
    /// The file.
    pub source: String,
    /// The line where it begins, from 1 on.
    pub number: u64,
}

impl Origin {
    /// An error at this place.
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

/// An endless source of documents that can be put back to where it was.
pub trait Documents: Send {
    /// The next document.
    fn next(&mut self) -> Result<Document>;

    /// Where the source is: what [`Documents::seek`] needs to go on from here.
    fn cursor(&self) -> Cursor;

    /// Goes on as it did after `cursor` was taken.
    fn seek(&mut self, cursor: &Cursor) -> Result;

    /// How often every document has come since `cursor` was taken; 0 for a source that never repeats itself.
    fn epochs_since(&self, _cursor: &Cursor) -> u64 {
        0
    }
}

/// A place in a stream of documents or micro-batches; the default is its start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cursor {
    /// Documents that were drawn.
    pub drawn: u64,
    /// Of every file; none at the start of a stream.
    pub files: Vec<FileCursor>,
    /// Tokens of the next document that a micro-batch has had already.
    pub offset: usize,
}

/// A place in one file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileCursor {
    /// Documents that were drawn from it, over all epochs.
    pub taken: u64,
    /// Its size: another one is another file.
    pub bytes: u64,
    /// Checksum of its content; runs that were saved by earlier versions have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<u64>,
}

impl FileCursor {
    /// An error unless the file at `path` is the one that a run was saved with.
    pub(crate) fn check_same(&self, path: &std::path::Path, saved: &FileCursor) -> Result {
        let problem = if self.bytes != saved.bytes {
            format!("it has {} bytes, and had {} when the run was saved", self.bytes, saved.bytes)
        } else if saved.content.is_some() && self.content != saved.content {
            "its content has changed since the run was saved".into()
        } else {
            return Ok(());
        };
        let problem = problem + "; resume with the same data";
        Err(Error::Data { file: path.into(), line: None, problem })
    }
}
