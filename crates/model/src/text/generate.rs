//! Generation of one text: a prompt, then token by token.

use crate::decode::{PREFILL_TOKENS, Session};
use crate::error::{Error, Result};
use crate::memory;
use crate::model::Model;

use super::Sampler;

/// A text in generation: its tokens and the decoding session.
pub struct Generation<'m> {
    model: &'m Model,
    session: Session<'m>,
    /// Prompt and continuation; the session has processed a prefix of them.
    ids: Vec<u32>,
    /// Logits after the session's last token.
    logits: Vec<f32>,
}

/// Number of tokens between two memory checks.
const MEMORY_TOKENS: usize = 1024;

impl<'m> Generation<'m> {
    /// Creates an empty text.
    pub fn new(model: &'m Model) -> Generation<'m> {
        Generation { model, session: model.session(1), ids: Vec::new(), logits: Vec::new() }
    }

    /// Returns all tokens so far.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Returns the number of tokens that the session has processed; the last sampled token is not among them.
    fn known(&self) -> usize {
        self.session.lengths()[0]
    }

    /// Replaces the text by `ids`, and returns the number of tokens processed: only the rest if `ids` starts
    /// with the tokens already processed, else all. Stops early when `cancelled`, called between chunks,
    /// returns true.
    pub fn prompt(&mut self, ids: &[u32], cancelled: impl Fn() -> bool) -> Result<usize> {
        let vocabulary = self.model.config.vocabulary;
        if let Some((at, id)) = ids.iter().enumerate().find(|(_, id)| **id as usize >= vocabulary) {
            return Err(Error::Input(format!(
                "token {at} of the prompt has the id {id}, outside the model's vocabulary of {vocabulary}; is \
                 tokenizer.json this model's?"
            )));
        }
        if ids.is_empty() {
            return Err(Error::Input("the prompt has no tokens".into()));
        }
        if !ids.starts_with(&self.ids[..self.known()]) {
            self.session = self.model.session(1);
        }
        let first = self.known();
        self.ids = ids.to_vec();
        while self.known() < ids.len() && !cancelled() {
            let end = (self.known() + PREFILL_TOKENS).min(ids.len());
            self.advance(end)?;
        }
        Ok(self.known() - first)
    }

    /// Samples the next token and appends it.
    pub fn next(&mut self, sampler: &mut Sampler) -> Result<u32> {
        self.advance(self.ids.len())?;
        let id = sampler.next(&self.logits, &self.ids)?;
        self.ids.push(id);
        Ok(id)
    }

    /// Fails before the caches outgrow the memory; checked every [`MEMORY_TOKENS`] tokens.
    fn check_memory(&self, known: usize, end: usize) -> Result {
        if known > 0 && known / MEMORY_TOKENS == end / MEMORY_TOKENS {
            return Ok(());
        }
        let tokens = end.max(self.ids.len()).next_multiple_of(MEMORY_TOKENS);
        let more = self.model.session_bytes(tokens).saturating_sub(self.session.bytes());
        memory::check(&format!("the caches of {tokens} tokens"), more as u64)
    }

    /// Processes the tokens before `end`.
    fn advance(&mut self, end: usize) -> Result {
        let known = self.known();
        if known < end {
            self.check_memory(known, end)?;
            let mut logits = self.session.advance(&[&self.ids[known..end]])?;
            self.logits = logits.pop().unwrap_or_default();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::Sampling;
    use super::*;
    use crate::precision::Precision;

    fn model() -> Model {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models/qwen3_5");
        Model::load(&folder, |_| Ok(Precision::f32())).unwrap()
    }

    #[test]
    fn a_text_that_begins_as_the_last_one_ended_is_read_from_there_on_and_goes_on_the_same() {
        let model = model();
        let mut greedy = Sampler::new(Sampling::GREEDY, 0);
        let mut talk = Generation::new(&model);
        assert_eq!(talk.prompt(&[83, 61, 18], || false).unwrap(), 3);
        let (a, b) = (talk.next(&mut greedy).unwrap(), talk.next(&mut greedy).unwrap());
        let longer = [83, 61, 18, a, b, 44, 7];
        assert_eq!(talk.prompt(&longer, || false).unwrap(), 3, "all but the prompt and the first answer");
        let mut anew = Generation::new(&model);
        assert_eq!(anew.prompt(&longer, || false).unwrap(), 7);
        let pair: Vec<(u32, u32)> =
            (0..6).map(|_| (talk.next(&mut greedy).unwrap(), anew.next(&mut greedy).unwrap())).collect();
        assert!(pair.iter().all(|(a, b)| a == b), "{pair:?}");
        assert_eq!(talk.prompt(&[83, 5], || false).unwrap(), 2, "another text begins anew");
        assert_eq!(talk.ids(), [83, 5]);
    }

    #[test]
    fn ids_outside_the_vocabulary_and_empty_prompts_are_refused() {
        let model = model();
        let mut text = Generation::new(&model);
        let error = text.prompt(&[1, 160], || false).unwrap_err().to_string();
        assert!(error.contains("token 1 of the prompt has the id 160"), "{error}");
        assert!(text.prompt(&[], || false).unwrap_err().to_string().contains("no tokens"));
        assert_eq!(text.prompt(&[1, 2], || true).unwrap(), 0, "cancelled before it began");
    }
}
