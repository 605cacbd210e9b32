//! `tokenizer.json`, and the special tokens that `tokenizer_config.json` names.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde_json::Value;

use ballast_files::encoding::without_mark;
use ballast_files::regular::read_regular;

use super::pieces::{Neighbors, WINDOW};
use super::{read_object, text_error};
use crate::error::Result;

/// Converts text to token ids and back.
pub struct Tokenizer {
    pub(super) inner: tokenizers::Tokenizer,
    /// True if tokens such as `<0xE2>` stand for bytes.
    byte_fallback: bool,
    file: PathBuf,
    /// Used for long texts (see `pieces.rs`); computed on first use.
    pub(super) neighbors: OnceLock<Neighbors>,
    pub(super) longest_added: OnceLock<usize>,
    /// Special tokens of `tokenizer_config.json` by name (`bos_token`, `eos_token`, ...).
    pub special: BTreeMap<String, String>,
}

impl Tokenizer {
    /// Loads the tokenizer from the folder of a model.
    pub fn load(folder: &Path) -> Result<Tokenizer> {
        let file = folder.join("tokenizer.json");
        let bytes = read_regular(&file).map_err(|error| {
            let missing = error.kind() == std::io::ErrorKind::NotFound;
            let hint = if missing { "; put it beside the weights" } else { "" };
            text_error(&file, format!("cannot read: {error}{hint}"))
        })?;
        let not_a_tokenizer = |error| text_error(&file, format!("not a tokenizer: {error}"));
        let bytes = without_mark(&bytes);
        check_decoder(bytes).map_err(|error| text_error(&file, format!("not a tokenizer: {error}")))?;
        let mut inner = tokenizers::Tokenizer::from_bytes(bytes).map_err(not_a_tokenizer)?;
        // Padding and truncation saved in the file are ignored, as transformers does by default.
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
        let decoder = serde_json::to_value(inner.get_decoder()).unwrap_or_default();
        let byte_fallback = has_byte_fallback(&decoder);
        let (neighbors, longest_added) = (OnceLock::new(), OnceLock::new());
        Ok(Tokenizer { inner, byte_fallback, file, special, neighbors, longest_added })
    }

    /// Returns the path of tokenizer.json.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Encodes `text`; `special` adds the tokenizer's special tokens around it (such as bos). Special tokens
    /// written in the text itself are always recognized.
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

    /// Encodes `text`; returns the ids and the byte where each ends (0 for special tokens added around it).
    pub fn encode_with_ends(&self, text: &str, special: bool) -> Result<(Vec<u32>, Vec<usize>)> {
        self.encode_first(text, special, usize::MAX)
    }

    /// Decodes `ids`; `skip_special` omits special tokens.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        self.inner.decode(ids, skip_special).map_err(|error| text_error(&self.file, error))
    }

    /// Returns the id of a token.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Returns the id of a special token by its name in `tokenizer_config.json`.
    pub fn special_id(&self, name: &str) -> Option<u32> {
        self.id(self.special.get(name)?)
    }

    /// Creates a streaming decoder, which omits special tokens.
    pub fn stream(&self) -> TextStream<'_> {
        TextStream { tokenizer: self, ids: Vec::new(), context: 0, shown: String::new() }
    }

    /// Returns the token of an id, or `None` for special tokens and unknown ids.
    fn shown_token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id).filter(|token| !self.inner.get_added_vocabulary().is_special_token(token))
    }

    /// Returns true if the token stands for one byte, by the rule of the `tokenizers` crate.
    fn is_byte(&self, token: &str) -> bool {
        let digits = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
        let byte = digits.filter(|digits| digits.len() == 2).map(|digits| u8::from_str_radix(digits, 16));
        self.byte_fallback && matches!(byte, Some(Ok(_)))
    }
}

/// Reads the part of tokenizer.json on which the `tokenizers` crate panics if it is not valid JSON. The rest,
/// which has the vocabulary, is skipped.
fn check_decoder(bytes: &[u8]) -> serde_json::Result<()> {
    #[derive(serde::Deserialize)]
    struct Parts {
        #[serde(default, rename = "decoder")]
        _decoder: Value,
    }
    serde_json::from_slice::<Parts>(bytes).map(drop)
}

/// Returns true if a decoder, or one of a sequence, turns byte tokens into text.
fn has_byte_fallback(decoder: &Value) -> bool {
    let parts = decoder.get("decoders").and_then(Value::as_array);
    decoder["type"] == "ByteFallback" || parts.is_some_and(|parts| parts.iter().any(has_byte_fallback))
}

/// Streaming decoder: takes ids one by one; the concatenated pieces are the text of all ids.
///
/// A token's text can depend on the one before it (a space, the rest of a character), so a piece is the
/// difference between two decodings that begin at the same, earlier place. Two things can still change when
/// more ids come, and are held back:
/// - a replacement character at the end: its bytes may be the beginning of a character;
/// - a run of byte tokens: an invalid byte at its end turns every byte of the run into a replacement
///   character.
pub struct TextStream<'t> {
    tokenizer: &'t Tokenizer,
    /// Last ids whose text was returned in full, then the pending ones; without special tokens.
    ids: Vec<u32>,
    /// Number of ids whose text was returned in full.
    context: usize,
    /// Part of the text of `ids` that was returned.
    shown: String,
}

/// Replacement character, decoded from incomplete or invalid bytes.
const INCOMPLETE: char = '\u{fffd}';

/// Approximate limit of the pending ids when every piece ends in an incomplete character.
const MAX_PENDING: usize = 256;

/// Maximum number of bytes of a character.
const MAX_CHAR_BYTES: usize = 4;

impl TextStream<'_> {
    /// Adds an id and returns the text that is final now, often empty.
    pub fn push(&mut self, id: u32) -> Result<String> {
        let Some(token) = self.tokenizer.shown_token(id) else { return Ok(String::new()) };
        self.ids.push(id);
        if self.tokenizer.is_byte(&token) {
            return Ok(String::new());
        }
        let text = self.tokenizer.decode(&self.ids, true)?;
        let stable = text.strip_suffix(INCOMPLETE).unwrap_or(&text);
        let piece = self.after_shown(stable);
        if stable.len() == text.len() {
            if !piece.is_empty() {
                self.ids.drain(..self.context);
                self.context = self.ids.len();
                self.shown = self.tokenizer.decode(&self.ids, true)?;
            }
        } else {
            self.shown = stable.to_string();
            if self.ids.len() - self.context > MAX_PENDING {
                self.shorten(&text)?;
            }
        }
        Ok(piece)
    }

    /// Returns the remaining text; incomplete characters become replacement characters.
    pub fn finish(self) -> Result<String> {
        Ok(self.after_shown(&self.tokenizer.decode(&self.ids, true)?))
    }

    /// Returns the part of `text` that was not returned before.
    fn after_shown(&self, text: &str) -> String {
        let same = text.chars().zip(self.shown.chars()).take_while(|(a, b)| a == b);
        text[same.map(|(a, _)| a.len_utf8()).sum()..].to_string()
    }

    /// Drops ids that later ones cannot change. A cut inside a character's bytes would show as another text.
    fn shorten(&mut self, text: &str) -> Result {
        for kept in 1..=MAX_CHAR_BYTES.min(self.ids.len()) {
            let (before, after) = self.ids.split_at(self.ids.len() - kept);
            let after_text = self.tokenizer.decode(after, true)?;
            if self.tokenizer.decode(before, true)? + &after_text == text {
                self.shown = after_text.strip_suffix(INCOMPLETE).unwrap_or(&after_text).to_string();
                self.ids = after.to_vec();
                self.context = 0;
                return Ok(());
            }
        }
        Ok(())
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
        let shown: String = (0..2 * MAX_PENDING).map(|_| stream.push(smile[1]).unwrap()).collect();
        assert!(shown.chars().count() >= MAX_PENDING, "it does not wait for ever");
    }

    /// A tokenizer with a token for every byte (ids 0 to 255), a few words, and special tokens (the last
    /// two), of Gemma's kind or, with the text's first space taken away, of Llama's.
    fn byte_fallback(strip: bool) -> Tokenizer {
        let words = ["\u{2581}", "a", "\u{2581}b", "\u{fffd}", "<0xG1>", "", "<eos>", "<bos>"];
        let tokens = (0..256).map(|byte| format!("<0x{byte:02X}>")).chain(words.map(String::from));
        let vocabulary: serde_json::Map<String, Value> =
            tokens.zip(0..).map(|(token, id)| (token, Value::from(id))).collect();
        let mut decoders = vec![
            serde_json::json!({"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "}),
            serde_json::json!({"type": "ByteFallback"}),
            serde_json::json!({"type": "Fuse"}),
        ];
        if strip {
            decoders.push(serde_json::json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        let special = |content: &str, id: u32| {
            serde_json::json!({"id": id, "content": content, "special": true, "normalized": false,
                "single_word": false, "lstrip": false, "rstrip": false})
        };
        let json = serde_json::json!({
            "version": "1.0",
            "added_tokens": [special("<eos>", 262), special("<bos>", 263)],
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": {"type": "BPE", "byte_fallback": true, "vocab": vocabulary, "merges": []},
        });
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("tokenizer.json"), json.to_string()).unwrap();
        Tokenizer::load(folder.path()).unwrap()
    }

    fn streamed(tokenizer: &Tokenizer, ids: &[u32]) -> String {
        let mut stream = tokenizer.stream();
        let pieces: String = ids.iter().map(|id| stream.push(*id).unwrap()).collect();
        pieces + &stream.finish().unwrap()
    }

    #[test]
    fn an_invalid_byte_after_a_byte_fallback_character_loses_no_text() {
        let tokenizer = byte_fallback(false);
        // é, an invalid byte, then words: all bytes of the run become replacement characters
        let ids = [257, 0xC3, 0xA9, 0xFF, 257, 258, 257];
        assert_eq!(streamed(&tokenizer, &ids), "a\u{fffd}\u{fffd}\u{fffd}a ba");
        let mut stream = tokenizer.stream();
        let pieces: Vec<String> = [257, 0xC3, 0xA9, 258].map(|id| stream.push(id).unwrap()).to_vec();
        assert_eq!(pieces, ["a", "", "", "é b"]);
    }

    /// Bytes of characters, halves of them and invalid ones; words; special tokens; an id of no token.
    fn any_id() -> impl proptest::strategy::Strategy<Value = u32> {
        proptest::prop_oneof![
            proptest::sample::select(&[0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0xFF, 0x41][..]),
            0u32..256,
            256u32..265,
        ]
    }

    proptest::proptest! {
        #[test]
        fn streamed_pieces_are_the_text_of_all_ids_with_byte_fallback(
            ids in proptest::collection::vec(any_id(), 0..24), strip: bool,
        ) {
            let tokenizer = byte_fallback(strip);
            proptest::prop_assert_eq!(streamed(&tokenizer, &ids), tokenizer.decode(&ids, true).unwrap());
        }

        #[test]
        fn streamed_pieces_are_the_text_of_all_ids_of_bytes(
            ids in proptest::collection::vec(proptest::prop_oneof![0u32..162, 94u32..106], 0..600),
        ) {
            let tokenizer = Tokenizer::load(&fixture()).unwrap();
            proptest::prop_assert_eq!(streamed(&tokenizer, &ids), tokenizer.decode(&ids, true).unwrap());
        }
    }

    #[test]
    fn a_missing_or_broken_tokenizer_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let error = Tokenizer::load(folder.path()).err().unwrap().to_string();
        assert!(error.contains("tokenizer.json: cannot read"), "{error}");
        for broken in ["{\"model\": 3}", "{\"decoder\": {\"type\" 3}}", "{\"decoder\": [1e999]}", "{"] {
            std::fs::write(folder.path().join("tokenizer.json"), broken).unwrap();
            let error = Tokenizer::load(folder.path()).err().unwrap().to_string();
            assert!(error.contains("tokenizer.json: not a tokenizer"), "{error}");
        }
    }
}
