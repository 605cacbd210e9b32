//! Tokens of a long text, piece by piece: memory is bounded by the piece, and the tokens are those of the whole.
//!
//! The `tokenizers` crate takes some 240 bytes of memory for a byte of text. So a long text is encoded in windows that
//! overlap, and two neighbors A and B are joined at a token where
//!
//! - every token in the inner part of the overlap is the same in both (id and place). What the ends of a window change, a word
//!   that is cut or a space that the tokenizer puts in front, lies outside of that part;
//! - and nothing that matters can span the place: there the pre-tokenizer ends a piece in both windows, or no token of the
//!   vocabulary has the two characters on its sides next to each other.
//!
//! A pre-tokenizer goes on from the end of one piece by the text behind it, and models look at one piece. Where there is no
//! pre-tokenizer, neither merges (BPE) nor a best path (Unigram) reach across two characters that no token has in a row. Where two
//! windows cannot be joined they are encoded as one, and the next window is twice as long; so a text without any such place is
//! encoded as a whole.

use std::collections::HashSet;

use tokenizers::{Encoding, Model, ModelWrapper};

use super::text_error;
use super::tokenizer::Tokenizer;
use crate::error::Result;
use crate::memory;

/// Bytes of a window; a text that is not longer is encoded at once.
pub(super) const WINDOW: usize = 64 << 10;

/// A window is so many times as long as its overlap with the next.
const OVERLAPS: usize = 16;

/// Bytes at each end of an overlap that are not compared; further ones for the longest added token.
const MARGIN: usize = 256;

/// Tokens that the inner part of an overlap must have.
const LEAST_COMMON: usize = 8;

/// A window of more bytes is only encoded if memory is there for it, at so many bytes for each.
const LARGE: usize = 4 << 20;
const BYTES_PER_BYTE: u64 = 256;

/// A token of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token {
    /// The id.
    pub id: u32,
    /// The byte of the text where it ends; 0 for those that are added around it.
    pub end: usize,
}

/// Encodes a text that comes in parts. The tokens are those of the whole text.
pub struct PieceEncoder<'t> {
    tokenizer: &'t Tokenizer,
    special: bool,
    /// Bytes of a window, to begin with and after a join.
    base: usize,
    /// Bytes of the next window.
    window: usize,
    /// Text from the begin of the last window on.
    text: String,
    /// The last window that was encoded; what it has before `joined` was given out.
    last: Option<Window>,
    /// What comes after the text.
    suffix: Vec<Token>,
}

/// Encoded text; places are bytes of the whole text.
struct Window {
    begin: usize,
    end: usize,
    tokens: Vec<Place>,
    /// The first token that was not given out.
    joined: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct Place {
    id: u32,
    begin: usize,
    end: usize,
    /// Number of the pre-tokenizer's piece in its window.
    word: Option<u32>,
}

impl Place {
    fn is_same(&self, other: &Place) -> bool {
        (self.id, self.begin, self.end) == (other.id, other.begin, other.end)
    }
}

impl<'t> PieceEncoder<'t> {
    /// An encoder for one text; `special` adds what the tokenizer puts around it.
    pub fn new(tokenizer: &'t Tokenizer, special: bool) -> PieceEncoder<'t> {
        PieceEncoder::with_window(tokenizer, special, WINDOW)
    }

    fn with_window(tokenizer: &'t Tokenizer, special: bool, window: usize) -> PieceEncoder<'t> {
        let (text, suffix) = (String::new(), Vec::new());
        PieceEncoder { tokenizer, special, base: window, window, text, last: None, suffix }
    }

    /// Goes on with `text`; the tokens that are certain now.
    pub fn push(&mut self, text: &str) -> Result<Vec<Token>> {
        let mut tokens = Vec::new();
        let mut rest = text;
        loop {
            let room = self.next_end().saturating_sub(self.known_end());
            let part = floor_char(rest, room.max(4));
            self.text.push_str(&rest[..part]);
            rest = &rest[part..];
            // A character that does not fit in the room is taken in the next round.
            match self.known_end() < self.next_end() {
                true if rest.is_empty() => return Ok(tokens),
                true => {}
                false => tokens.extend(self.advance()?),
            }
        }
    }

    /// The tokens that are left when the text has ended.
    pub fn finish(mut self) -> Result<Vec<Token>> {
        let unread = self.last.as_ref().is_none_or(|last| last.end < self.known_end());
        let mut tokens = if unread { self.advance()? } else { Vec::new() };
        if let Some(last) = self.last.take() {
            tokens.extend(last.tokens[last.joined..].iter().map(given));
        }
        tokens.append(&mut self.suffix);
        Ok(tokens)
    }

    fn known_end(&self) -> usize {
        self.last.as_ref().map_or(0, |last| last.begin) + self.text.len()
    }

    /// Where the text must have come to for the next window.
    fn next_end(&self) -> usize {
        self.last.as_ref().map_or(0, |last| last.end) + self.window
    }

    /// Encodes the text behind the last window and joins the two.
    fn advance(&mut self) -> Result<Vec<Token>> {
        let Some(last) = self.last.take() else {
            return self.first();
        };
        let overlap = (self.window / OVERLAPS).max(4 * self.margin()).min(last.end - last.begin);
        let cut = floor_char(&self.text, last.end - overlap - last.begin);
        let next = self.encode(cut, last.begin)?;
        if let Some((a, b)) = self.join(&last, &next) {
            let tokens = last.tokens[last.joined..a].iter().map(given).collect();
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

    /// The first token that was not given out, in a longer window that begins where `last` does.
    fn find_joined(&self, last: &Window, longer: &Window) -> Result<usize> {
        let Some(before) = last.joined.checked_sub(1) else { return Ok(0) };
        let sides = &last.tokens[before..=last.joined];
        let begin = longer.tokens.partition_point(|place| place.begin < sides[0].begin);
        let found = longer.tokens[begin..]
            .windows(2)
            .position(|both| both.iter().zip(sides).all(|(place, known)| place.is_same(known)));
        found.map(|at| begin + at + 1).ok_or_else(|| {
            let problem = format!(
                "it gives other tokens around byte {} when more text follows; make the document shorter than {} bytes",
                sides[1].begin, self.base
            );
            text_error(self.tokenizer.file(), problem)
        })
    }

    /// The first window, which shows what is added around a text.
    fn first(&mut self) -> Result<Vec<Token>> {
        self.check_memory(self.text.len())?;
        let encoding = self.tokenizer.encoding(&self.text, self.special)?;
        let added: Vec<bool> = encoding.get_special_tokens_mask().iter().map(|mask| *mask == 1).collect();
        let before = added.iter().take_while(|added| **added).count();
        let after = added[before..].iter().rev().take_while(|added| **added).count();
        let mut tokens = places(&encoding, 0);
        self.suffix = tokens.split_off(tokens.len() - after).iter().map(given).collect();
        let prefix = tokens.drain(..before).as_slice().iter().map(given).collect();
        self.last = Some(Window { begin: 0, end: self.text.len(), tokens, joined: 0 });
        Ok(prefix)
    }

    fn check_memory(&self, bytes: usize) -> Result {
        if bytes <= LARGE {
            return Ok(());
        }
        let what = format!("a text with no place to cut it in {bytes} bytes");
        memory::check(&what, BYTES_PER_BYTE * bytes as u64)
    }

    /// Encodes the text from byte `from` of it on; the text begins at `begin` of the whole.
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

    /// The token of A and that of B which begin at the place where the two are joined.
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
        if !same || common_a.len() < LEAST_COMMON {
            return None;
        }
        let ends_word = |places: &[Place], at: usize| places[at - 1].word != places[at].word;
        let is_new = |at: &usize| in_a.start + at >= a.joined;
        // The last half: what is behind it is encoded again with more text around it.
        let candidates = || (common_a.len() / 2..common_a.len()).filter(is_new);
        let found = candidates()
            .find(|at| ends_word(common_a, *at) && ends_word(common_b, *at))
            .or_else(|| candidates().find(|at| self.cannot_span(common_a[at - 1].id, common_a[*at].id)))?;
        Some((in_a.start + found, in_b.start + found))
    }

    /// Whether no token of the vocabulary has the last character of one token before the first of the other.
    fn cannot_span(&self, left: u32, right: u32) -> bool {
        let token = |id: u32| self.tokenizer.plain_token(id);
        let (Some(left), Some(right)) = (token(left), token(right)) else { return false };
        let (Some(left), Some(right)) = (left.chars().next_back(), right.chars().next()) else {
            return false;
        };
        !self.tokenizer.neighbors().contains(&(left, right))
    }
}

/// Pairs of characters that stand next to each other in some token.
pub(super) type Neighbors = HashSet<(char, char)>;

/// The neighbors in these tokens.
fn neighbors<'a>(tokens: impl Iterator<Item = &'a String>) -> Neighbors {
    tokens.flat_map(|token| token.chars().zip(token.chars().skip(1))).collect()
}

impl Tokenizer {
    /// The first `limit` ids of a text, and for each the byte where it ends (0 for those that are added around it). Only as much
    /// text is encoded as they need.
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

    /// Bytes of the longest token that is looked for in a text before all else.
    fn longest_added(&self) -> usize {
        *self.longest_added.get_or_init(|| {
            self.inner.get_added_tokens_decoder().values().map(|token| token.content.len()).max().unwrap_or(0)
        })
    }

    /// The text of a token where it says what the token covers: not of added, unknown and byte tokens, and only of models whose
    /// tokens do not depend on more than the characters that they cover.
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

fn given(place: &Place) -> Token {
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

/// The last place between two characters that is not behind byte `at`.
fn floor_char(text: &str, at: usize) -> usize {
    (0..=at.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0)
}

#[cfg(test)]
mod tests;
