//! What the models read: documents of a file, an embedded text, or the embedded model's own task.

use std::path::Path;
use std::sync::Arc;

use ballast_model::Batch;
use ballast_model::batch::IGNORED;
use ballast_model::text::{Tokenizer, folder_of};
use ballast_train::data::{DataConfig, Documents, Split, TextEncoder};
use ballast_train::task::Task;

use crate::error::{Error, Result};
use crate::findings::Input;

const EMBEDDED_TEXT: &str = include_str!("../text.txt");

/// Tokens of the embedded task at least.
const TASK_TOKENS: usize = 2048;

/// Tokens of the embedded task at most: it has no end of its own.
const MOST_TASK_TOKENS: usize = 1 << 24;

/// Sequences to cut the tokens into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Length {
    /// Tokens of a sequence.
    pub tokens: usize,
    /// Sequences at most.
    pub sequences: usize,
}

impl Length {
    /// Tokens of all sequences.
    fn all(&self) -> usize {
        self.tokens.saturating_mul(self.sequences)
    }
}

/// The documents of a file (.txt, .jsonl), end to end; every token is predicted.
pub fn from_file(file: &Path, model: &Path, length: Length) -> Result<(Batch, Input)> {
    let encoder = Arc::new(TextEncoder::load(model)?);
    let data = ballast_train::data::DataFile { path: file.into(), weight: 1.0 };
    let config = DataConfig {
        files: vec![data],
        validation_fraction: 0.0,
        add_eos: encoder.eos.is_some(),
        ..DataConfig::default()
    };
    let documents = ballast_train::data::Files::open(&config, Split::Train, encoder, 0)?;
    let (mut ids, wanted) = (Vec::new(), length.all());
    for number in 0..documents.len() {
        if ids.len() >= wanted {
            break;
        }
        ids.extend(documents.document(number)?.ids);
    }
    cut(ids, length, file.display().to_string())
}

/// A text of our own.
pub fn embedded_text(model: &Path, length: Length) -> Result<(Batch, Input)> {
    let tokenizer = Tokenizer::load(&folder_of(model)).map_err(|error| {
        Error::Input(format!("{error}; the embedded text needs a tokenizer; --ids takes tokens as they are"))
    })?;
    cut(tokenizer.encode(EMBEDDED_TEXT, true)?, length, "the embedded text".into())
}

/// Held-out documents of the embedded task; only what the task trains on is predicted. Without a length, documents as the
/// model was trained on them, each a sequence of its own; with one, end to end in sequences of that length, for long contexts.
pub fn task(length: Option<Length>) -> Result<(Batch, Input)> {
    let mut documents = Task::new(Split::Validation, 0);
    let (mut ids, mut labels, mut ends) = (Vec::new(), Vec::new(), vec![0]);
    let wanted = length.map_or(TASK_TOKENS, |length| length.all());
    if wanted > MOST_TASK_TOKENS {
        return Err(Error::Choice(format!(
            "the embedded task: at most {MOST_TASK_TOKENS} tokens were expected, got {wanted}; lower --tokens or --sequences"
        )));
    }
    while ids.len() < wanted {
        let document = documents.next()?;
        let label = |(id, trained): (&u32, &bool)| if *trained { *id as i64 } else { IGNORED };
        labels.extend(document.ids.iter().zip(&document.trained).map(label));
        ids.extend(document.ids);
        ends.push(ids.len());
    }
    if let Some(Length { tokens, sequences }) = length {
        ids.truncate(wanted);
        labels.truncate(wanted);
        ends = (0..=sequences).map(|n| n * tokens).collect();
    }
    let batch = Batch::with_labels(ids, &labels, ends)?;
    let input = describe(&batch, "held-out documents of the embedded task".into());
    Ok((batch, input))
}

/// Sequences of at most `length.tokens`; a last one of a single token predicts nothing and is left out.
fn cut(mut ids: Vec<u32>, length: Length, source: String) -> Result<(Batch, Input)> {
    ids.truncate(length.all());
    if ids.len() % length.tokens == 1 && ids.len() > 1 {
        ids.pop();
    }
    if ids.len() < 2 {
        return Err(Error::Input(format!("{source}: {} tokens in it; two are needed", ids.len())));
    }
    let mut ends: Vec<usize> = (0..ids.len()).step_by(length.tokens).collect();
    ends.push(ids.len());
    let batch = Batch::packed(ids, ends)?;
    let input = describe(&batch, source);
    Ok((batch, input))
}

/// What there is to say of a batch.
pub fn describe(batch: &Batch, source: String) -> Input {
    Input {
        source,
        tokens: batch.tokens(),
        sequences: batch.cu_seqlens.len() - 1,
        longest: batch.cu_seqlens.windows(2).map(|ends| ends[1] - ends[0]).max().unwrap_or(0),
        predicted: batch.counted(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_cut_into_sequences_and_a_single_one_is_left_out() {
        let length = Length { tokens: 4, sequences: 3 };
        let (batch, input) = cut((0..9).collect(), length, "x".into()).unwrap();
        assert_eq!(batch.cu_seqlens, [0, 4, 8]);
        assert_eq!((input.tokens, input.sequences, input.longest, input.predicted), (8, 2, 4, 6));
        assert_eq!(cut((0..100).collect(), length, "x".into()).unwrap().0.cu_seqlens, [0, 4, 8, 12]);
        assert!(cut(vec![1], length, "x".into()).is_err());
    }

    #[test]
    fn the_task_predicts_what_it_trains_on() {
        let (batch, input) = task(Some(Length { tokens: 64, sequences: 2 })).unwrap();
        assert_eq!((batch.tokens(), input.sequences), (128, 2));
        assert!(input.predicted > 10 && input.predicted < 100);
        let (batch, input) = task(None).unwrap();
        assert!(batch.tokens() >= TASK_TOKENS && input.sequences > 20 && input.longest < 128);
    }
}
