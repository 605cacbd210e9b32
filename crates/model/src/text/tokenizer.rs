//! `tokenizer.json`, and the special tokens that `tokenizer_config.json` names.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde_json::Value;

use ballast_checkpoint::encoding::without_mark;

use super::pieces::{Neighbors, WINDOW};
use super::{read_object, text_error};
use crate::error::Result;

/// Text to ids and back.
pub struct Tokenizer {
    pub(super) inner: tokenizers::Tokenizer,
    file: PathBuf,
    /// For long texts, see `pieces.rs`; made when they are needed.
    pub(super) neighbors: OnceLock<Neighbors>,
    pub(super) longest_added: OnceLock<usize>,
    /// By name (`bos_token`, `eos_token`, ...): the special tokens of `tokenizer_config.json`.
    pub special: BTreeMap<String, String>,
}

impl Tokenizer {
    /// From the folder of a model.
    pub fn load(folder: &Path) -> Result<Tokenizer> {
        let file = folder.join("tokenizer.json");
        let bytes = std::fs::read(&file).map_err(|error| {
            let missing = error.kind() == std::io::ErrorKind::NotFound;
            let hint = if missing { "; text needs it beside the weights" } else { "" };
            text_error(&file, format!("cannot read: {error}{hint}"))
        })?;
        let not_a_tokenizer = |error| text_error(&file, format!("not a tokenizer: {error}"));
        let mut inner = tokenizers::Tokenizer::from_bytes(without_mark(&bytes)).map_err(not_a_tokenizer)?;
        // Settings of whoever saved the file; transformers does not use them either unless it is asked to.
        inner.with_padding(None).with_truncation(None).map_err(not_a_tokenizer)?;
        let config = read_object(&folder.join("tokenizer_config.json"))?;
        let special = config
            .iter()
            .filter(|(name, _)| name.ends_with("_token"))
            .filter_map(|(name, token)| {
                let content = token.as_str().or_else(|| token.get("content").and_then(Value::as_str));
                Some((name.clone(), content?.to_string()))
            })
            .collect();
        Ok(Tokenizer { inner, file, special, neighbors: OnceLock::new(), longest_added: OnceLock::new() })
    }

    /// Where it came from.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// The ids of `text`; `special` adds what the tokenizer puts around a text of its own (a bos, say). Special tokens
    /// that the text itself names are recognised either way.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        if text.len() > WINDOW {
            let mut ids = Vec::new();
            self.encode_pieces(text, special, usize::MAX, |token| ids.push(token.id))?;
            return Ok(ids);
        }
        let encoding =
            self.inner.encode_fast(text, special).map_err(|error| text_error(&self.file, error))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The ids, and for each the byte of `text` where it ends (0 for those that are added around it).
    pub fn encode_with_ends(&self, text: &str, special: bool) -> Result<(Vec<u32>, Vec<usize>)> {
        self.encode_first(text, special, usize::MAX)
    }

    /// The text of `ids`, without the special tokens if so wished.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        self.inner.decode(ids, skip_special).map_err(|error| text_error(&self.file, error))
    }

    /// The id of a token.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The id of a special token by its name in `tokenizer_config.json`.
    pub fn special_id(&self, name: &str) -> Option<u32> {
        self.id(self.special.get(name)?)
    }

    /// Text from ids that come one by one; special tokens are left out.
    pub fn stream(&self) -> TextStream<'_> {
        TextStream { tokenizer: self, ids: Vec::new(), context: 0, shown: String::new() }
    }
}

/// Turns ids that come one by one into text; a character appears when its last byte has come.
///
/// What a token adds can depend on the one before it (a space, the rest of a character), so a piece is the difference
/// between two decodings that begin at the same, earlier place.
pub struct TextStream<'t> {
    tokenizer: &'t Tokenizer,
    /// The last ids of what was shown, then those that were not.
    ids: Vec<u32>,
    /// How many of them are shown.
    context: usize,
    /// The text of those.
    shown: String,
}

/// What stands for bytes that are no character (yet).
const INCOMPLETE: char = '\u{fffd}';

/// A character has four bytes at most; more tokens than this without an end are no character.
const PATIENCE: usize = 256;

impl TextStream<'_> {
    /// The text that is complete with this id; often none.
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.ids.push(id);
        let text = self.tokenizer.decode(&self.ids, true)?;
        if text.ends_with(INCOMPLETE) && self.ids.len() - self.context < PATIENCE {
            return Ok(String::new());
        }
        let piece = text.strip_prefix(&self.shown).unwrap_or_default().to_string();
        if !piece.is_empty() {
            self.ids.drain(..self.context);
            self.context = self.ids.len();
            self.shown = self.tokenizer.decode(&self.ids, true)?;
        }
        Ok(piece)
    }

    /// What is left at the end: bytes that never became a character.
    pub fn finish(self) -> Result<String> {
        let text = self.tokenizer.decode(&self.ids, true)?;
        Ok(text.strip_prefix(&self.shown).unwrap_or_default().to_string())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// The fixture's folder: a byte-level tokenizer of 160 tokens.
    pub(crate) fn fixture() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/text/qwen3_5")
    }

    pub(crate) fn golden(name: &str) -> Value {
        let text = std::fs::read_to_string(fixture().with_file_name(name)).unwrap();
        serde_json::from_str(&text).unwrap()
    }

    fn ids(value: &Value) -> Vec<u32> {
        value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
    }

    #[test]
    fn a_text_has_the_ids_that_the_python_package_gives_it_and_comes_back() {
        let tokenizer = Tokenizer::load(&fixture()).unwrap();
        let golden = golden("evaluation.json");
        let text = golden["text"].as_str().unwrap();
        assert_eq!(tokenizer.encode(text, true).unwrap(), ids(&golden["ids"]));
        assert_eq!(tokenizer.decode(&ids(&golden["ids"]), true).unwrap(), text);
        let (_, ends) = tokenizer.encode_with_ends(text, true).unwrap();
        assert_eq!(*ends.last().unwrap(), text.len());
    }

    #[test]
    fn special_tokens_are_known_by_name_and_left_out_of_the_text() {
        let tokenizer = Tokenizer::load(&fixture()).unwrap();
        assert_eq!(tokenizer.special["eos_token"], "<|im_end|>");
        assert_eq!(tokenizer.special_id("eos_token"), Some(159));
        assert_eq!(tokenizer.special_id("bos_token"), None);
        let ids = tokenizer.encode("<|im_start|>a<|im_end|>", false).unwrap();
        assert_eq!((ids[0], ids[2], ids.len()), (158, 159, 3));
        assert_eq!(tokenizer.decode(&ids, true).unwrap(), "a");
        assert_eq!(tokenizer.decode(&ids, false).unwrap(), "<|im_start|>a<|im_end|>");
    }

    #[test]
    fn a_stream_shows_whole_characters_only_and_loses_nothing() {
        let tokenizer = Tokenizer::load(&fixture()).unwrap();
        let text = "the é, 10 € and 😀 of\n\nit";
        let mut stream = tokenizer.stream();
        let mut pieces = Vec::new();
        for id in tokenizer.encode(text, false).unwrap() {
            pieces.push(stream.push(id).unwrap());
        }
        assert!(pieces.iter().all(|piece| !piece.contains(INCOMPLETE)));
        assert!(pieces.iter().any(|piece| piece == "😀"));
        assert!(pieces.iter().filter(|piece| piece.is_empty()).count() >= 6);
        assert_eq!(pieces.concat() + &stream.finish().unwrap(), text);
    }

    #[test]
    fn bytes_that_never_become_a_character_are_shown_at_the_end_as_such() {
        let tokenizer = Tokenizer::load(&fixture()).unwrap();
        let smile = tokenizer.encode("a😀", false).unwrap();
        let mut stream = tokenizer.stream();
        assert_eq!(stream.push(smile[0]).unwrap(), "a");
        assert_eq!(stream.push(smile[1]).unwrap(), "");
        assert_eq!(stream.finish().unwrap(), "\u{fffd}");
        let mut stream = tokenizer.stream();
        let shown: String = (0..2 * PATIENCE).map(|_| stream.push(smile[1]).unwrap()).collect();
        assert!(shown.chars().count() >= PATIENCE, "it does not wait for ever");
    }

    #[test]
    fn a_missing_or_broken_tokenizer_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let error = Tokenizer::load(folder.path()).err().unwrap().to_string();
        assert!(error.contains("tokenizer.json: cannot read"), "{error}");
        std::fs::write(folder.path().join("tokenizer.json"), "{\"model\": 3}").unwrap();
        let error = Tokenizer::load(folder.path()).err().unwrap().to_string();
        assert!(error.contains("tokenizer.json: not a tokenizer"), "{error}");
    }
}
