//! Encodes a long text in pieces: bounded memory, and the same tokens as encoding the whole text at once.
//!
//! The `tokenizers` crate needs about 240 bytes of memory per byte of text. So a long text is encoded in
//! overlapping windows, and two neighbors A and B are joined at a token where
//!
//! - every token in the inner part of the overlap is the same in both (id and position). Effects of a
//!   window's ends, such as a cut word or a space that the tokenizer prepends, lie outside of that part;
//! - and no token can span the position: there the pre-tokenizer ends a piece in both windows, or no token of
//!   the vocabulary has the two characters on its sides next to each other.
//!
//! A pre-tokenizer continues after a piece by the following text only, and models see one piece at a time.
//! Without a pre-tokenizer, neither merges (BPE) nor a best path (Unigram) reach across two characters
//! that no token has in a row. Two windows that cannot be joined are encoded as one, and the next
//! window is twice as long; so a text without any such position is encoded as a whole.

use std::collections::HashSet;

use ballast_format as format;
use tokenizers::{Encoding, Model, ModelWrapper};

use super::text_error;
use super::tokenizer::Tokenizer;
use crate::error::Result;
use crate::memory;

/// Bytes of a window; a shorter text is encoded at once.
pub(super) const WINDOW: usize = 64 << 10;

/// Length of a window divided by its overlap with the next.
const OVERLAPS: usize = 16;

/// Bytes at each end of an overlap that are not compared, besides those for the longest added token.
const MARGIN: usize = 256;

/// Minimum number of tokens in the inner part of an overlap.
const MIN_COMMON: usize = 8;

/// Window size in bytes above which the available memory is checked first, at `BYTES_PER_BYTE` per byte.
const LARGE: usize = 4 << 20;
const BYTES_PER_BYTE: u64 = 256;

/// A token of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token {
    /// Token id.
    pub id: u32,
    /// End of the token in the text, in bytes; 0 for special tokens added around the text.
    pub end: usize,
}

/// Streaming encoder: takes a text in parts and gives the same tokens as for the whole text.
pub struct PieceEncoder<'t> {
    tokenizer: &'t Tokenizer,
    special: bool,
    /// Initial window size in bytes, restored after a join.
    base: usize,
    /// Size of the next window in bytes.
    window: usize,
    /// Text from the start of the last window on.
    text: String,
    /// Last encoded window; its tokens before `joined` were returned.
    last: Option<Window>,
    /// Special tokens added after the text.
    suffix: Vec<Token>,
}

/// Encoded window; positions are bytes of the whole text.
struct Window {
    begin: usize,
    end: usize,
    tokens: Vec<Place>,
    /// Index of the first token that was not returned.
    joined: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct Place {
    id: u32,
    begin: usize,
    end: usize,
    /// Index of the pre-tokenizer's piece in its window.
    word: Option<u32>,
}

impl Place {
    fn is_same(&self, other: &Place) -> bool {
        (self.id, self.begin, self.end) == (other.id, other.begin, other.end)
    }
}

impl<'t> PieceEncoder<'t> {
    /// Creates an encoder for one text; `special` adds the special tokens around it.
    pub fn new(tokenizer: &'t Tokenizer, special: bool) -> PieceEncoder<'t> {
        PieceEncoder::with_window(tokenizer, special, WINDOW)
    }

    fn with_window(tokenizer: &'t Tokenizer, special: bool, window: usize) -> PieceEncoder<'t> {
        let (text, suffix) = (String::new(), Vec::new());
        PieceEncoder { tokenizer, special, base: window, window, text, last: None, suffix }
    }

    /// Appends `text` and returns the tokens that are final now.
    pub fn push(&mut self, text: &str) -> Result<Vec<Token>> {
        let mut tokens = Vec::new();
        let mut rest = text;
        loop {
            let room = self.next_end().saturating_sub(self.known_end());
            let part = floor_char(rest, room.max(4));
            self.text.push_str(&rest[..part]);
            rest = &rest[part..];
            if self.known_end() >= self.next_end() {
                tokens.extend(self.advance()?);
            } else if rest.is_empty() {
                return Ok(tokens);
            }
        }
    }

    /// Ends the text and returns the remaining tokens.
    pub fn finish(mut self) -> Result<Vec<Token>> {
        let unread = self.last.as_ref().is_none_or(|last| last.end < self.known_end());
        let mut tokens = if unread { self.advance()? } else { Vec::new() };
        if let Some(last) = self.last.take() {
            tokens.extend(last.tokens[last.joined..].iter().map(to_token));
        }
        tokens.append(&mut self.suffix);
        Ok(tokens)
    }

    fn known_end(&self) -> usize {
        self.last.as_ref().map_or(0, |last| last.begin) + self.text.len()
    }

    /// Returns the text position at which the next window is complete.
    fn next_end(&self) -> usize {
        self.last.as_ref().map_or(0, |last| last.end) + self.window
    }

    /// Encodes the next window and joins it to the last one.
    fn advance(&mut self) -> Result<Vec<Token>> {
        let Some(last) = self.last.take() else {
            return self.first();
        };
        let overlap = (self.window / OVERLAPS).max(4 * self.margin()).min(last.end - last.begin);
        let cut = floor_char(&self.text, last.end - overlap - last.begin);
        let next = self.encode(cut, last.begin)?;
        if let Some((a, b)) = self.join(&last, &next) {
            let tokens = last.tokens[last.joined..a].iter().map(to_token).collect();
            self.text.drain(..cut);
            self.last = Some(Window { joined: b, ..next });
            self.window = self.base;
            return Ok(tokens);
        }
        let mut both = self.encode(0, last.begin)?;
        both.joined = self.find_joined(&last, &both)?;
        self.last = Some(both);
        self.window *= 2;
        Ok(Vec::new())
    }

    /// Returns the first token that was not returned, in a longer window with the same start as `last`.
    fn find_joined(&self, last: &Window, longer: &Window) -> Result<usize> {
        let Some(before) = last.joined.checked_sub(1) else { return Ok(0) };
        let sides = &last.tokens[before..=last.joined];
        let begin = longer.tokens.partition_point(|place| place.begin < sides[0].begin);
        let found = longer.tokens[begin..]
            .windows(2)
            .position(|both| both.iter().zip(sides).all(|(place, known)| place.is_same(known)));
        found.map(|at| begin + at + 1).ok_or_else(|| {
            let problem = format!(
                "tokens around byte {} change when more text follows; split the document into parts below {} bytes",
                sides[1].begin, self.base
            );
            text_error(self.tokenizer.file(), problem)
        })
    }

    /// Encodes the first window, which also gives the special tokens around the text.
    fn first(&mut self) -> Result<Vec<Token>> {
        self.check_memory(self.text.len())?;
        let encoding = self.tokenizer.encoding(&self.text, self.special)?;
        let added: Vec<bool> = encoding.get_special_tokens_mask().iter().map(|mask| *mask == 1).collect();
        let before = added.iter().take_while(|added| **added).count();
        let after = added[before..].iter().rev().take_while(|added| **added).count();
        let mut tokens = places(&encoding, 0);
        self.suffix = tokens.split_off(tokens.len() - after).iter().map(to_token).collect();
        let prefix = tokens.drain(..before).as_slice().iter().map(to_token).collect();
        self.last = Some(Window { begin: 0, end: self.text.len(), tokens, joined: 0 });
        Ok(prefix)
    }

    fn check_memory(&self, bytes: usize) -> Result {
        if bytes <= LARGE {
            return Ok(());
        }
        let what = format!("tokenizing {} of text that cannot be split", format::bytes(bytes as u64));
        memory::check(&what, BYTES_PER_BYTE * bytes as u64)
    }

    /// Encodes the buffered text from byte `from` on; the buffer starts at byte `begin` of the whole text.
    fn encode(&self, from: usize, begin: usize) -> Result<Window> {
        let text = &self.text[from..];
        self.check_memory(text.len())?;
        let begin = begin + from;
        let encoding = self.tokenizer.encoding(text, false)?;
        Ok(Window { begin, end: begin + text.len(), tokens: places(&encoding, begin), joined: 0 })
    }

    /// Bytes at the ends of an overlap that are not compared.
    fn margin(&self) -> usize {
        MARGIN + 2 * self.tokenizer.longest_added()
    }

    /// Returns the indices of the first tokens of A and of B after the join.
    fn join(&self, a: &Window, b: &Window) -> Option<(usize, usize)> {
        let (low, high) = (b.begin + self.margin(), a.end.checked_sub(self.margin())?);
        let inner = |window: &Window| {
            let from = window.tokens.partition_point(|place| place.begin < low);
            let to = window.tokens.partition_point(|place| place.end <= high);
            from..to.max(from)
        };
        let (in_a, in_b) = (inner(a), inner(b));
        let (common_a, common_b) = (&a.tokens[in_a.clone()], &b.tokens[in_b.clone()]);
        let same =
            common_a.len() == common_b.len() && common_a.iter().zip(common_b).all(|(a, b)| a.is_same(b));
        if !same || common_a.len() < MIN_COMMON {
            return None;
        }
        let ends_word = |places: &[Place], at: usize| places[at - 1].word != places[at].word;
        let is_new = |at: &usize| in_a.start + at >= a.joined;
        // Joins in the last half of the overlap; later tokens come from B, which has more text after them.
        let candidates = || (common_a.len() / 2..common_a.len()).filter(is_new);
        let found = candidates()
            .find(|at| ends_word(common_a, *at) && ends_word(common_b, *at))
            .or_else(|| candidates().find(|at| self.cannot_span(common_a[at - 1].id, common_a[*at].id)))?;
        Some((in_a.start + found, in_b.start + found))
    }

    /// Returns true if no token of the vocabulary contains the last character of `left` directly before the
    /// first of `right`.
    fn cannot_span(&self, left: u32, right: u32) -> bool {
        let token = |id: u32| self.tokenizer.plain_token(id);
        let (Some(left), Some(right)) = (token(left), token(right)) else { return false };
        let (Some(left), Some(right)) = (left.chars().next_back(), right.chars().next()) else {
            return false;
        };
        !self.tokenizer.neighbors().contains(&(left, right))
    }
}

/// Pairs of adjacent characters that occur in some token.
pub(super) type Neighbors = HashSet<(char, char)>;

/// Collects the pairs of adjacent characters in the tokens.
fn neighbors<'a>(tokens: impl Iterator<Item = &'a String>) -> Neighbors {
    tokens.flat_map(|token| token.chars().zip(token.chars().skip(1))).collect()
}

impl Tokenizer {
    /// Returns the first `limit` ids of a text and the byte where each ends (0 for special tokens added
    /// around it). Encodes only as much text as needed.
    pub fn encode_first(&self, text: &str, special: bool, limit: usize) -> Result<(Vec<u32>, Vec<usize>)> {
        let (mut ids, mut ends) = (Vec::new(), Vec::new());
        self.encode_pieces(text, special, limit, |token| {
            ids.push(token.id);
            ends.push(token.end);
        })?;
        Ok((ids, ends))
    }

    /// Calls `each` with the first `limit` tokens of a text.
    pub(super) fn encode_pieces(
        &self,
        text: &str,
        special: bool,
        limit: usize,
        mut each: impl FnMut(Token),
    ) -> Result {
        let mut encoder = PieceEncoder::new(self, special);
        let (mut rest, mut left) = (text, limit);
        let mut give = |tokens: Vec<Token>| {
            let some = tokens.len().min(left);
            left -= some;
            tokens.into_iter().take(some).for_each(&mut each);
            left > 0
        };
        while !rest.is_empty() {
            let part = floor_char(rest, WINDOW);
            if !give(encoder.push(&rest[..part])?) {
                return Ok(());
            }
            rest = &rest[part..];
        }
        give(encoder.finish()?);
        Ok(())
    }

    /// Returns the length in bytes of the longest added token; these are matched before all others.
    fn longest_added(&self) -> usize {
        *self.longest_added.get_or_init(|| {
            self.inner.get_added_tokens_decoder().values().map(|token| token.content.len()).max().unwrap_or(0)
        })
    }

    /// Returns the text of a token if it equals the text it covers: `None` for added, unknown and byte
    /// tokens, and for models whose tokens depend on more than the characters that they cover.
    fn plain_token(&self, id: u32) -> Option<String> {
        let plain = match self.inner.get_model() {
            ModelWrapper::BPE(bpe) => {
                bpe.continuing_subword_prefix.is_none() && bpe.end_of_word_suffix.is_none()
            }
            ModelWrapper::Unigram(_) => true,
            _ => false,
        };
        if !plain || self.inner.get_added_vocabulary().simple_id_to_token(id).is_some() {
            return None;
        }
        let token = self.inner.get_model().id_to_token(id)?;
        let marked = |begin, end| token.starts_with(begin) && token.ends_with(end);
        (!marked('<', '>') && !marked('[', ']')).then_some(token)
    }

    fn neighbors(&self) -> &Neighbors {
        self.neighbors.get_or_init(|| neighbors(self.inner.get_model().get_vocab().keys()))
    }

    fn encoding(&self, text: &str, special: bool) -> Result<Encoding> {
        self.inner.encode(text, special).map_err(|error| text_error(self.file(), error))
    }
}

fn to_token(place: &Place) -> Token {
    Token { id: place.id, end: place.end }
}

fn places(encoding: &Encoding, begin: usize) -> Vec<Place> {
    let words = encoding.get_word_ids();
    let place = |((id, (from, to)), word): ((&u32, &(usize, usize)), &Option<u32>)| Place {
        id: *id,
        begin: begin + from,
        end: begin + to,
        word: *word,
    };
    encoding.get_ids().iter().zip(encoding.get_offsets()).zip(words).map(place).collect()
}

/// Returns the last character boundary at or before byte `at`.
fn floor_char(text: &str, at: usize) -> usize {
    (0..=at.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0)
}

#[cfg(test)]
mod tests;
