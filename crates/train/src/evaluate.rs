//! Evaluation on held-out data: loss and accuracy by source, and sample answers.

use std::collections::BTreeMap;

use ballast_cluster::Kind;
use ballast_kernels::linear_cross_entropy::Loss;
use ballast_model::text::{Generation, Sampler, Sampling};
use ballast_model::{Batch, Model};
use serde::{Deserialize, Serialize};

use crate::data::{Cursor, Document, MicroBatch, TextEncoder};
use crate::error::{Error, Result};
use crate::metrics::{Evaluation, SourceScore};
use crate::report::Sample;
use crate::trainer::Trainer;

impl Trainer {
    /// Loss and accuracy on the first held-out micro-batches; `None` without held-out data, or if it has no
    /// trained tokens.
    pub fn evaluate(&mut self) -> Result<Option<Evaluation>> {
        let batches = self.config.evaluation.batches;
        let Some(validation) = self.validation.as_mut().filter(|_| batches > 0) else { return Ok(None) };
        validation.seek(&Cursor::default())?;
        let mut own = Vec::new();
        for number in 0..batches {
            let batch = validation.next()?;
            if self.ranks.does(number) {
                own.extend(by_source(&batch)?.into_iter().map(|(source, batch)| (number, source, batch)));
            }
        }
        let mut sources: BTreeMap<String, (f64, usize, usize)> = BTreeMap::new();
        for Score { source, sum, tokens, right, .. } in self.scores(&own)? {
            let all = sources.entry(source).or_default();
            *all = (all.0 + f64::from_bits(sum), all.1 + tokens, all.2 + right);
        }
        sources.retain(|_, (_, tokens, _)| *tokens > 0);
        if sources.is_empty() {
            return Ok(None);
        }
        let score = |(sum, tokens, right): &(f64, usize, usize)| SourceScore {
            loss: sum / *tokens as f64,
            accuracy: *right as f64 / *tokens as f64,
            tokens: *tokens as u64,
        };
        let all = sources.values().fold((0.0, 0, 0), |a, b| (a.0 + b.0, a.1 + b.1, a.2 + b.2));
        let SourceScore { loss, accuracy, tokens } = score(&all);
        let by_source = sources.iter().map(|(source, sums)| (source.clone(), score(sums))).collect();
        Ok(Some(Evaluation { step: self.step, loss, accuracy, tokens, by_source }))
    }

    /// Scores of held-out batches, over all ranks, in the order of the batches.
    fn scores(&mut self, own: &[(usize, String, Batch)]) -> Result<Vec<Score>> {
        // Ranks that share the weights take part in every run of the others.
        let runs = match self.ranks.is_solo() {
            true => own.len(),
            false => self.ranks.exchange(Kind::Scalars, &own.len())?.into_iter().max().unwrap_or(0),
        };
        let mut scores = Vec::new();
        for run in 0..runs {
            let batch = own.get(run);
            let (mut engine, ..) = self.split();
            let loss = engine.loss(batch.map(|(_, _, batch)| batch), None)?;
            // Ranks that share sequences have a part of the score each, or all of the score of a short batch.
            let (parts, speaks) = (self.ranks.context.size(), self.ranks.speaks());
            let counts = |batch: &Batch| speaks || batch.tokens() >= parts;
            if let (Some((number, source, batch)), Some(Loss { sum, tokens, right, .. })) = (batch, loss)
                && counts(batch)
            {
                let (sum, source) = (sum.to_bits(), source.clone());
                scores.push(Score { batch: *number, source, sum, tokens, right });
            }
        }
        if self.ranks.is_solo() {
            return Ok(scores);
        }
        // The parts of a sequence come from consecutive ranks, so a stable sort leaves them in order.
        let mut all = self.ranks.exchange(Kind::Scalars, &scores)?.concat();
        all.sort_by(|a, b| (a.batch, &a.source).cmp(&(b.batch, &b.source)));
        Ok(all)
    }

    /// The model's answers to held-out documents; none where the whole model does not fit beside the run.
    pub fn sample(&mut self) -> Result<Vec<Sample>> {
        let (tokens, step, encoder) = (self.config.samples.tokens, self.step, self.encoder.clone());
        let documents = std::mem::take(&mut self.sample_documents);
        let bytes = self.model.specs.bytes(self.model.precision().params) as u64;
        let (mut engine, ..) = self.split();
        // Ranks of one machine gather a whole model each.
        let fits = match engine.shards.is_some() {
            true => match engine.ranks.check_memory("samples", bytes) {
                Err(Error::Model(ballast_model::Error::Memory { .. })) => false,
                checked => checked.map(|()| true)?,
            },
            false => true,
        };
        let samples = match documents.is_empty() || engine.ranks.any(!fits)? {
            true => Ok(Vec::new()),
            // Only the first rank reports them; the others wait for it in the next step.
            false => {
                let world = engine.ranks.world.clone();
                engine.with_whole_model(|model| {
                    let documents = documents.iter().filter(|_| world.is_first());
                    documents.map(|document| sample(model, &encoder, document, tokens, step)).collect()
                })
            }
        };
        self.sample_documents = documents;
        samples
    }
}

/// Score of the documents of one source in a batch, or of a rank's part of them.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Score {
    batch: usize,
    source: String,
    /// Bits of the f64: JSON has no NaN.
    sum: u64,
    tokens: usize,
    right: usize,
}

/// The sequences of a micro-batch, grouped by source.
fn by_source(batch: &MicroBatch) -> Result<BTreeMap<String, Batch>> {
    let all = &batch.batch;
    let mut sources: BTreeMap<String, Batch> = BTreeMap::new();
    for (ends, origin) in all.cu_seqlens.windows(2).zip(&batch.origins) {
        let empty =
            || Batch { ids: vec![], targets: vec![], cu_seqlens: vec![0], positions: vec![], part: None };
        let part = sources.entry(origin.source.clone()).or_insert_with(empty);
        part.ids.extend(&all.ids[ends[0]..ends[1]]);
        part.targets.extend(&all.targets[ends[0]..ends[1]]);
        part.positions.extend(&all.positions[ends[0]..ends[1]]);
        part.cu_seqlens.push(part.ids.len());
    }
    Ok(sources)
}

/// End of a document's prompt and range of the expected answer: a trained span, chosen by the document's
/// number. A document that is trained as a whole has its first half as the prompt, and no expected answer.
fn question(document: &Document) -> (usize, Option<std::ops::Range<usize>>) {
    const PROMPT: usize = 64;
    let trained = |t: usize| document.trained[t];
    let len = document.ids.len();
    let begins: Vec<usize> = (1..len).filter(|t| trained(*t) && !trained(*t - 1)).collect();
    match begins.get(document.origin.number as usize % begins.len().max(1)) {
        Some(begin) => {
            let end = (*begin..len).find(|t| !trained(*t)).unwrap_or(len);
            (*begin, Some(*begin..end))
        }
        None => ((len / 2).clamp(1, PROMPT), None),
    }
}

fn sample(
    model: &Model,
    encoder: &TextEncoder,
    document: &Document,
    tokens: usize,
    step: u64,
) -> Result<Sample> {
    let (prompt, expected) = question(document);
    let mut sampler = Sampler::new(Sampling::GREEDY, 0);
    let mut generation = Generation::new(model);
    generation.prompt(&document.ids[..prompt], || false)?;
    let wanted = expected.as_ref().map_or(tokens, |expected| expected.len().min(tokens));
    for _ in 0..wanted {
        if Some(generation.next(&mut sampler)?) == encoder.eos {
            break;
        }
    }
    let answer = &generation.ids()[prompt..];
    let decode = |ids: &[u32]| encoder.tokenizer.decode(ids, true);
    let right = expected.as_ref().map(|expected| document.ids[expected.clone()][..wanted] == *answer);
    Ok(Sample {
        step,
        prompt: decode(&document.ids[..prompt])?,
        expected: expected.map(|expected| decode(&document.ids[expected])).transpose()?,
        answer: decode(answer)?,
        right,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Origin;

    fn document(trained: &[bool]) -> Document {
        Document {
            ids: (0..trained.len() as u32).collect(),
            trained: trained.to_vec(),
            origin: Origin { source: "x".into(), number: 1 },
        }
    }

    #[test]
    fn a_question_ends_where_an_answer_begins() {
        let (t, f) = (true, false);
        assert_eq!(question(&document(&[f, f, t, f, f, t, t, f])), (5, Some(5..7)));
        assert_eq!(question(&document(&[f, t, t])), (1, Some(1..3)));
        assert_eq!(question(&document(&[t; 10])), (5, None));
    }

    #[test]
    fn sources_are_told_apart_with_their_sequences_whole() {
        let batch = Batch::packed(vec![1, 2, 3, 4, 5, 6], vec![0, 2, 4, 6]).unwrap();
        let origins = ["a", "b", "a"].map(|source| Origin { source: source.into(), number: 1 });
        let parts = by_source(&MicroBatch { batch, origins: origins.to_vec() }).unwrap();
        assert_eq!(parts["a"], Batch::packed(vec![1, 2, 5, 6], vec![0, 2, 4]).unwrap());
        assert_eq!(parts["b"], Batch::packed(vec![3, 4], vec![0, 2]).unwrap());
    }
}
