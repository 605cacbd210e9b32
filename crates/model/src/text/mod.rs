//! Text: tokenizer, chat template, sampling, generation, perplexity.
//!
//! Everything comes from files beside the weights: `tokenizer.json`, `tokenizer_config.json`,
//! `generation_config.json`, `chat_template.jinja`. Only the first is required.

pub mod chat;
mod generate;
mod integers;
pub mod perplexity;
mod pieces;
mod python;
mod sample;
mod settings;
mod template;
mod tokenizer;

use std::path::{Path, PathBuf};

use ballast_files::regular::read_regular;
use serde_json::{Map, Value};

use crate::error::{Error, Result};

pub use chat::{ChatTemplate, Conversation};
pub use generate::Generation;
pub use integers::check_integers;
pub use pieces::{PieceEncoder, Token};
pub use sample::{Sampler, Sampling};
pub use settings::GenerationSettings;
pub use tokenizer::{TextStream, Tokenizer};

/// Returns the folder of a checkpoint that is given as a folder or as one of its files.
pub fn folder_of(model: &Path) -> PathBuf {
    if model.is_dir() { model.to_path_buf() } else { model.with_file_name("") }
}

fn text_error(file: &Path, problem: impl ToString) -> Error {
    Error::Text { file: file.into(), problem: problem.to_string() }
}

/// Reads a JSON object from a file; a missing file gives an empty object.
fn read_object(file: &Path) -> Result<Map<String, Value>> {
    if ballast_files::look_at(file)?.is_none() {
        return Ok(Map::new());
    }
    let bytes = read_regular(file).map_err(|error| text_error(file, format!("cannot read: {error}")))?;
    match serde_json::from_slice(ballast_files::encoding::without_mark(&bytes)) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) => Err(text_error(file, "not a JSON object")),
        Err(error) => Err(text_error(file, format!("not valid JSON: {error}"))),
    }
}
