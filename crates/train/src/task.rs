//! The embedded task: associative recall beside a small formal language, in bytes.
//!
//! ```text
//! recall      aQkTcX?kTaQkT\n    pairs of a key and a value, then queries: only the value after a queried key is trained
//! brackets    ([]{()})\n         well-nested brackets: everything is trained
//! ```
//! To answer a query, the model must store the value under its key when it reads the pair, and look it up
//! long after: this is what the state of the delta rule does. Brackets need a stack. A document depends only
//! on the seed and its number.

use crate::data::shuffle::{Purpose, below, hash};
use crate::data::{Cursor, Document, Documents, Origin, Split};
use crate::error::Result;

/// Size of the vocabulary: bytes, then the token that ends a document.
#[cfg(test)]
pub(crate) const VOCABULARY: usize = 257;

/// The token that ends a document.
pub(crate) const END: u32 = 256;

/// Name of the token that ends a document.
pub(crate) const END_TOKEN: &str = "<|endoftext|>";

/// Fewest and most pairs of a recall document.
const PAIRS: [u64; 2] = [2, 14];

/// Number of queries; keys may repeat.
const QUERIES: u64 = 16;

/// Deepest nesting.
const DEPTH: usize = 6;

/// Most brackets.
const BRACKETS: usize = 40;

/// An endless stream of documents of the task.
pub struct Task {
    seed: u64,
    split: Split,
    drawn: u64,
    share: (u64, u64),
}

impl Task {
    /// The stream of a split; training and validation have different documents.
    pub fn new(split: Split, seed: u64) -> Task {
        Task { seed, split, drawn: 0, share: (0, 1) }
    }
}

impl Documents for Task {
    fn next(&mut self) -> Result<Document> {
        let (group, groups) = self.share;
        self.drawn += (group + groups - self.drawn % groups) % groups + 1;
        let mut draws = Draws {
            seed: self.seed,
            stream: 2 * self.drawn + (self.split == Split::Validation) as u64,
            count: 0,
        };
        let document = if draws.below(8) > 0 { recall(&mut draws) } else { brackets(&mut draws) };
        Ok(Document { origin: Origin { number: self.drawn, ..document.origin }, ..document })
    }

    fn cursor(&self) -> Cursor {
        Cursor { drawn: self.drawn, ..Cursor::default() }
    }

    fn seek(&mut self, cursor: &Cursor) -> Result {
        self.drawn = cursor.drawn;
        Ok(())
    }

    fn share(&self, group: u64, groups: u64) -> Box<dyn Documents> {
        Box::new(Task { seed: self.seed, split: self.split, drawn: 0, share: (group, groups) })
    }
}

/// Random numbers of one document.
struct Draws {
    seed: u64,
    stream: u64,
    count: u64,
}

impl Draws {
    fn below(&mut self, n: u64) -> u64 {
        self.count += 1;
        below(hash(self.seed, Purpose::Task, [self.stream, self.count]), n)
    }
}

/// Tokens with a mask of the trained ones.
struct Bytes {
    ids: Vec<u32>,
    trained: Vec<bool>,
}

impl Bytes {
    fn push(&mut self, text: &[u8], trained: bool) {
        self.ids.extend(text.iter().map(|byte| *byte as u32));
        self.trained.resize(self.ids.len(), trained);
    }

    fn finish(mut self, source: &str, trained: bool) -> Document {
        self.push(b"\n", trained);
        self.ids.push(END);
        self.trained.push(trained);
        Document { ids: self.ids, trained: self.trained, origin: Origin { source: source.into(), number: 0 } }
    }
}

fn recall(draws: &mut Draws) -> Document {
    let pairs = PAIRS[0] + draws.below(PAIRS[1] - PAIRS[0] + 1);
    let mut keys: Vec<u8> = (b'a'..=b'z').collect();
    let mut bytes = Bytes { ids: Vec::new(), trained: Vec::new() };
    let mut known = Vec::new();
    for _ in 0..pairs {
        let key = keys.swap_remove(draws.below(keys.len() as u64) as usize);
        let value = b'A' + draws.below(26) as u8;
        bytes.push(&[key, value], false);
        known.push((key, value));
    }
    bytes.push(b"?", false);
    for _ in 0..QUERIES {
        let (key, value) = known[draws.below(pairs) as usize];
        bytes.push(&[key], false);
        bytes.push(&[value], true);
    }
    bytes.finish("recall", false)
}

fn brackets(draws: &mut Draws) -> Document {
    const PAIRS: [[u8; 2]; 3] = [*b"()", *b"[]", *b"{}"];
    let mut bytes = Bytes { ids: Vec::new(), trained: Vec::new() };
    let mut open = Vec::new();
    let length = 8 + draws.below(BRACKETS as u64 - 8) as usize;
    while bytes.ids.len() + open.len() < length || !open.is_empty() {
        let full = open.len() == DEPTH || bytes.ids.len() + open.len() >= length;
        if full || !open.is_empty() && draws.below(2) == 0 {
            let close = open.pop().unwrap_or(b')');
            bytes.push(&[close], true);
        } else {
            let [begin, end] = PAIRS[draws.below(3) as usize];
            bytes.push(&[begin], true);
            open.push(end);
        }
    }
    bytes.finish("brackets", true)
}

/// tokenizer.json with one token per byte, for the `tokenizers` library.
pub fn tokenizer_json() -> String {
    let mut vocabulary = serde_json::Map::new();
    for (id, symbol) in byte_symbols().into_iter().enumerate() {
        vocabulary.insert(symbol.to_string(), id.into());
    }
    let byte_level = serde_json::json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false
    });
    let tokenizer = serde_json::json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [{
            "id": END, "content": END_TOKEN, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true
        }],
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocabulary, "merges": []
        }
    });
    format!("{tokenizer:#}\n")
}

/// tokenizer_config.json of the task.
pub fn tokenizer_config_json() -> String {
    let config = serde_json::json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_TOKEN,
        "clean_up_tokenization_spaces": false,
        "model_max_length": 32768
    });
    format!("{config:#}\n")
}

/// generation_config.json of the task.
pub(crate) fn generation_config_json() -> String {
    format!("{:#}\n", serde_json::json!({ "eos_token_id": END }))
}

/// The character of each byte in a byte-level vocabulary: the byte itself if printable, else a character from
/// 256 on.
fn byte_symbols() -> [char; 256] {
    let mut next = 256;
    std::array::from_fn(|byte| {
        if matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) {
            return byte as u8 as char;
        }
        next += 1;
        char::from_u32(next - 1).unwrap_or(char::REPLACEMENT_CHARACTER)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn documents(split: Split, count: usize) -> Vec<Document> {
        let mut task = Task::new(split, 7);
        (0..count).map(|_| task.next().unwrap()).collect()
    }

    fn text(ids: &[u32]) -> String {
        ids.iter().filter(|id| **id < 256).map(|id| *id as u8 as char).collect()
    }

    #[test]
    fn every_trained_value_of_recall_stands_behind_its_key_in_the_pairs() {
        let (mut answers, mut recalls) = (0, 0);
        for document in documents(Split::Train, 400) {
            if document.origin.source != "recall" {
                continue;
            }
            recalls += 1;
            let text = text(&document.ids);
            let (pairs, _) = text.split_once('?').unwrap();
            for t in (0..document.ids.len()).filter(|t| document.trained[*t]) {
                let pair = &text[t - 1..=t];
                let known = (0..pairs.len()).step_by(2).any(|at| &pairs[at..at + 2] == pair);
                assert!(known, "{text}: {pair}");
                answers += 1;
            }
        }
        assert!(recalls > 300 && answers == 16 * recalls, "{recalls} {answers}");
    }

    #[test]
    fn brackets_are_well_nested() {
        let mut seen = 0;
        for document in documents(Split::Train, 400).iter().filter(|d| d.origin.source == "brackets") {
            let mut open = Vec::new();
            for c in text(&document.ids).trim_end().chars() {
                match c {
                    '(' => open.push(')'),
                    '[' => open.push(']'),
                    '{' => open.push('}'),
                    close => assert_eq!(open.pop(), Some(close)),
                }
            }
            assert!(open.is_empty() && document.trained.iter().all(|t| *t));
            seen += 1;
        }
        assert!(seen > 25);
    }

    #[test]
    fn held_out_documents_are_others_and_a_cursor_brings_the_stream_back() {
        let (train, held_out) = (documents(Split::Train, 300), documents(Split::Validation, 300));
        assert!(held_out.iter().all(|document| train.iter().all(|other| other.ids != document.ids)));
        let mut task = Task::new(Split::Train, 7);
        task.seek(&Cursor { drawn: 100, ..Cursor::default() }).unwrap();
        assert_eq!(task.next().unwrap(), train[100]);
    }

    #[test]
    fn every_byte_has_a_symbol_of_its_own() {
        let symbols = byte_symbols();
        let different: std::collections::HashSet<char> = symbols.into_iter().collect();
        assert_eq!((different.len(), symbols[b' ' as usize], symbols[b'a' as usize]), (256, 'Ġ', 'a'));
    }

    #[test]
    fn the_tokenizer_gives_bytes() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("tokenizer.json"), tokenizer_json()).unwrap();
        std::fs::write(folder.path().join("tokenizer_config.json"), tokenizer_config_json()).unwrap();
        let tokenizer = ballast_model::text::Tokenizer::load(folder.path()).unwrap();
        let text = "aQ ?\n\u{e9}\u{0}";
        let ids: Vec<u32> = text.bytes().map(u32::from).collect();
        assert_eq!(tokenizer.encode(text, false).unwrap(), ids);
        assert_eq!(tokenizer.decode(&ids, true).unwrap(), text);
        assert_eq!(tokenizer.special_id("eos_token"), Some(END));
    }
}
