//! Long texts, tokenized in pieces.
//!
//! A tokenizer takes a few hundred bytes of memory for each byte of a text. A text of more than [`PIECE`] bytes is cut into
//! pieces, so that this memory is bounded by a piece.
//!
//! A cut is right if the tokens of both sides, one after the other, are the tokens of the whole. Tokenizers split a text
//! into words first and merge within them, so what matters is near the cut: [`Pieces`] tokenizes [`CONTEXT`] bytes on each
//! side in one go and in two, and cuts only where the ids are the same. It looks for such a place where kinds of characters
//! meet (letters and digits, spaces, others). A text without one, such as a megabyte of one letter, stays in one piece; as a
//! rule so does a text of a tokenizer that puts something before each text it is given.

use super::Tokenizer;
use crate::error::Result;

/// Bytes of a piece, as far as there is a place to cut.
const PIECE: usize = 64 << 10;

/// Bytes on each side of a cut that are tokenized to prove it.
const CONTEXT: usize = 2 << 10;

/// Places that are tried before the piece grows by [`PIECE`] bytes.
const ATTEMPTS: usize = 16;

impl Tokenizer {
    /// The ids of `text`; `special` adds the tokens that the tokenizer puts around a text (a bos token, for example).
    /// Special tokens that the text itself names are recognized either way.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        if text.len() <= PIECE {
            return Ok(self.encode_piece(text, special, false)?.get_ids().to_vec());
        }
        let (before, after) = if special { self.around()? } else { Default::default() };
        let mut ids = before;
        let mut pieces = Pieces::new(self, text);
        while let Some(piece) = pieces.next()? {
            ids.extend(self.encode_piece(piece, false, false)?.get_ids());
        }
        ids.extend(after);
        Ok(ids)
    }

    /// The ids, and for each the byte of `text` where it ends (0 for those that are added around it).
    pub fn encode_with_ends(&self, text: &str, special: bool) -> Result<(Vec<u32>, Vec<usize>)> {
        self.encode_first(text, special, usize::MAX)
    }

    /// The first `limit` ids at most, with their ends; the text after them is not read.
    pub fn encode_first(&self, text: &str, special: bool, limit: usize) -> Result<(Vec<u32>, Vec<usize>)> {
        let (mut ids, mut ends) = (Vec::new(), Vec::new());
        if text.len() <= PIECE {
            let encoding = self.encode_piece(text, special, true)?;
            ids.extend(encoding.get_ids());
            ends.extend(encoding.get_offsets().iter().map(|(_, end)| *end));
        } else {
            let (before, after) = if special { self.around()? } else { Default::default() };
            ends.resize(before.len(), 0);
            ids.extend(before);
            let mut pieces = Pieces::new(self, text);
            while ids.len() < limit
                && let Some(piece) = pieces.next()?
            {
                let begin = pieces.at - piece.len();
                let encoding = self.encode_piece(piece, false, true)?;
                ids.extend(encoding.get_ids());
                ends.extend(encoding.get_offsets().iter().map(|(_, end)| begin + end));
            }
            ids.extend(after);
            ends.resize(ids.len(), 0);
        }
        ids.truncate(limit);
        ends.truncate(limit);
        Ok((ids, ends))
    }

    /// The ids that are put before and after a text.
    fn around(&self) -> Result<(Vec<u32>, Vec<u32>)> {
        let encoding = self.encode_piece("a", true, true)?;
        let (ids, added) = (encoding.get_ids(), encoding.get_special_tokens_mask());
        let before = added.iter().take_while(|added| **added == 1).count();
        let after = added[before..].iter().rev().take_while(|added| **added == 1).count();
        Ok((ids[..before].to_vec(), ids[ids.len() - after..].to_vec()))
    }
}

/// The pieces of a text, one after the other.
struct Pieces<'t> {
    tokenizer: &'t Tokenizer,
    text: &'t str,
    /// End of the last piece.
    at: usize,
}

impl<'t> Pieces<'t> {
    fn new(tokenizer: &'t Tokenizer, text: &'t str) -> Pieces<'t> {
        Pieces { tokenizer, text, at: 0 }
    }

    fn next(&mut self) -> Result<Option<&'t str>> {
        let begin = self.at;
        if begin == self.text.len() {
            return Ok(None);
        }
        let mut low = begin;
        while self.at == begin {
            let high = low + PIECE;
            self.at =
                if high >= self.text.len() { self.text.len() } else { self.cut(low, high)?.unwrap_or(begin) };
            low = high;
        }
        Ok(Some(&self.text[begin..self.at]))
    }

    /// The last right cut of the few that are tried in the second half of `low..high`.
    fn cut(&self, low: usize, high: usize) -> Result<Option<usize>> {
        let (low, high) =
            (self.text.floor_char_boundary((low + high) / 2), self.text.floor_char_boundary(high));
        let part = &self.text[low..high];
        let mut next = None;
        let mut tried = 0;
        for (at, character) in part.char_indices().rev() {
            let kind = kind_of(character);
            if next.is_some_and(|(_, after)| after != kind) {
                let cut = low + next.map_or(0, |(at, _)| at);
                if self.is_right(cut)? {
                    return Ok(Some(cut));
                }
                tried += 1;
                if tried == ATTEMPTS {
                    return Ok(None);
                }
            }
            next = Some((at, kind));
        }
        Ok(None)
    }

    /// Returns true if the text around a cut has the same tokens in one piece and in two.
    fn is_right(&self, cut: usize) -> Result<bool> {
        let begin = self.text.floor_char_boundary(cut.saturating_sub(CONTEXT));
        let end = self.text.floor_char_boundary(self.text.len().min(cut + CONTEXT));
        let ids = |part: &str| -> Result<Vec<u32>> {
            Ok(self.tokenizer.encode_piece(part, false, false)?.get_ids().to_vec())
        };
        let mut parts = ids(&self.text[begin..cut])?;
        parts.extend(ids(&self.text[cut..end])?);
        Ok(parts == ids(&self.text[begin..end])?)
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Space,
    Word,
    Other,
}

fn kind_of(character: char) -> Kind {
    match character {
        c if c.is_whitespace() => Kind::Space,
        c if c.is_alphanumeric() => Kind::Word,
        _ => Kind::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::super::tokenizer::tests::fixture;
    use super::*;
    use crate::random::Rng;

    /// A tokenizer without words: merges run over the whole text, as in Gemma's. Spaces become `▁`, which begins tokens
    /// and never ends one but in a row of its own kind; what is unknown becomes bytes.
    fn without_words(prefix: bool) -> Tokenizer {
        let mut vocabulary = serde_json::Map::new();
        let mut add = |token: String| {
            let id = vocabulary.len();
            vocabulary.entry(token).or_insert(id.into());
        };
        add("<bos>".into());
        (0..=255).for_each(|byte| add(format!("<0x{byte:02X}>")));
        "abc,\n▁".chars().for_each(|c| add(c.to_string()));
        let merges = ["a b", "▁ ab", "▁ ▁", "▁▁ ▁▁", "ab c", "c ab", "\n \n", "▁ c", ", ▁"];
        merges.iter().for_each(|merge| add(merge.replace(' ', "")));
        let replace = serde_json::json!({ "type": "Replace", "pattern": { "String": " " }, "content": "▁" });
        let prepend = serde_json::json!({ "type": "Prepend", "prepend": "▁" });
        let normalizers = if prefix { vec![prepend, replace] } else { vec![replace] };
        let json = serde_json::json!({
            "version": "1.0",
            "added_tokens": [{ "id": 0, "content": "<bos>", "single_word": false, "lstrip": false, "rstrip": false,
                               "normalized": false, "special": true }],
            "normalizer": { "type": "Sequence", "normalizers": normalizers },
            "post_processor": { "type": "TemplateProcessing",
                "single": [{ "SpecialToken": { "id": "<bos>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
                "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } }],
                "special_tokens": { "<bos>": { "id": "<bos>", "ids": [0], "tokens": ["<bos>"] } } },
            "model": { "type": "BPE", "vocab": vocabulary, "merges": merges, "byte_fallback": true, "fuse_unk": true },
        });
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("tokenizer.json"), json.to_string()).unwrap();
        Tokenizer::load(folder.path()).unwrap()
    }

    /// About `bytes` bytes of words, spaces, line ends, marks, characters of several bytes and special tokens.
    fn text(bytes: usize, seed: u64) -> String {
        let parts = [
            "ab",
            "c",
            " ",
            "  ",
            "    ",
            "\n",
            "\n\n",
            ", ",
            "abc ab",
            "é",
            "😀",
            "the",
            " of",
            "1234",
            "<|im_end|>",
            "<bos>",
            "\t",
            "。",
            "漢字",
            "x'll",
            "\u{301}",
            "---",
            "}\n",
        ];
        let mut random = Rng::new(seed);
        let mut text = String::new();
        while text.len() < bytes {
            text += parts[(random.unit() * parts.len() as f64) as usize];
        }
        text
    }

    fn whole(tokenizer: &Tokenizer, text: &str) -> (Vec<u32>, Vec<usize>) {
        let encoding = tokenizer.encode_piece(text, true, true).unwrap();
        (encoding.get_ids().to_vec(), encoding.get_offsets().iter().map(|(_, end)| *end).collect())
    }

    #[test]
    fn a_text_in_pieces_has_the_tokens_of_the_whole() {
        for tokenizer in [Tokenizer::load(&fixture()).unwrap(), without_words(false), without_words(true)] {
            for seed in 0..6 {
                let text = text(3 * PIECE + 777, seed);
                let expected = whole(&tokenizer, &text);
                assert_eq!(tokenizer.encode(&text, true).unwrap(), expected.0);
                assert_eq!(tokenizer.encode_with_ends(&text, true).unwrap(), expected);
                let (ids, ends) = tokenizer.encode_first(&text, true, 1000).unwrap();
                assert_eq!((&ids[..], &ends[..]), (&expected.0[..1000], &expected.1[..1000]));
            }
        }
    }

    #[test]
    fn pieces_are_as_long_as_they_should_be() {
        for tokenizer in [Tokenizer::load(&fixture()).unwrap(), without_words(false)] {
            let text = text(4 * PIECE, 7);
            let (mut pieces, mut lengths) = (Pieces::new(&tokenizer, &text), Vec::new());
            while let Some(piece) = pieces.next().unwrap() {
                lengths.push(piece.len());
            }
            assert_eq!(lengths.iter().sum::<usize>(), text.len());
            assert!(lengths.len() > 4 && lengths.iter().all(|length| *length <= PIECE), "{lengths:?}");
        }
    }

    #[test]
    fn a_text_without_a_place_to_cut_stays_whole() {
        let tokenizer = Tokenizer::load(&fixture()).unwrap();
        for text in ["a".repeat(2 * PIECE + 5), "é".repeat(PIECE), " ".repeat(2 * PIECE + 5)] {
            assert_eq!(tokenizer.encode(&text, true).unwrap(), whole(&tokenizer, &text).0);
        }
    }
}
