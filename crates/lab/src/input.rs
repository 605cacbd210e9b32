//! Inputs: documents of a file, the embedded text, or the task of the embedded model.

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

/// Least number of tokens of the embedded task.
const TASK_TOKENS: usize = 2048;

/// Most tokens of the embedded task, which is generated without end.
const MOST_TASK_TOKENS: usize = 1 << 24;

/// Number and length of the sequences that tokens are cut into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Length {
    /// Tokens per sequence.
    pub tokens: usize,
    /// Most sequences.
    pub sequences: usize,
}

impl Length {
    /// Tokens of all sequences together.
    fn all(&self) -> usize {
        self.tokens.saturating_mul(self.sequences)
    }
}

/// Reads the documents of a file (.txt, .jsonl), concatenated; every token is predicted.
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

/// Returns the embedded text.
pub fn embedded_text(model: &Path, length: Length) -> Result<(Batch, Input)> {
    let tokenizer = Tokenizer::load(&folder_of(model)).map_err(|error| {
        Error::Input(format!(
            "{error}; the embedded text needs a tokenizer; give token ids with --ids instead"
        ))
    })?;
    cut(tokenizer.encode(EMBEDDED_TEXT, true)?, length, "the embedded text".into())
}

/// Returns held-out documents of the embedded task; only the tokens that the task trains on are predicted.
/// Without a length each document is a sequence, as in training; with one, documents are concatenated and
/// cut, for long contexts.
pub fn task(length: Option<Length>) -> Result<(Batch, Input)> {
    let mut documents = Task::new(Split::Validation, 0);
    let (mut ids, mut labels, mut ends) = (Vec::new(), Vec::new(), vec![0]);
    let wanted = length.map_or(TASK_TOKENS, |length| length.all());
    if wanted > MOST_TASK_TOKENS {
        return Err(Error::Choice(format!(
            "embedded task: at most {MOST_TASK_TOKENS} tokens are possible, got {wanted}; lower --tokens or --sequences"
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

/// Cuts tokens into sequences of at most `length.tokens`. A last sequence of one token predicts nothing and
/// is dropped.
fn cut(mut ids: Vec<u32>, length: Length, source: String) -> Result<(Batch, Input)> {
    ids.truncate(length.all());
    if ids.len() % length.tokens == 1 && ids.len() > 1 {
        ids.pop();
    }
    if ids.len() < 2 {
        return Err(Error::Input(format!("{source}: at least 2 tokens are needed, got {}", ids.len())));
    }
    let mut ends: Vec<usize> = (0..ids.len()).step_by(length.tokens).collect();
    ends.push(ids.len());
    let batch = Batch::packed(ids, ends)?;
    let input = describe(&batch, source);
    Ok((batch, input))
}

/// Describes a batch.
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
