//! Decoding the input token by token: caches and recurrent states are rounded at every token.
//!
//! Each policy decodes in step with f32 and is compared with it, so only one row of logits of each exists at
//! a time.

use std::path::Path;

use ballast_files::jobs::Observer;
use ballast_model::batch::IGNORED;
use ballast_model::{Batch, Model, Precision, memory};

use crate::choices::Choice;
use crate::error::Result;
use crate::findings::{DecodingRun, PositionDivergence};
use crate::measure::output::Outputs;
use crate::measure::position;

/// A decoding comparison.
pub struct Decoding<'a> {
    /// Path of the checkpoint.
    pub path: &'a Path,
    /// Input.
    pub batch: &'a Batch,
    /// Progress: a unit is a token.
    pub observer: &'a dyn Observer,
}

impl Decoding<'_> {
    /// Compares every choice with f32, the largest mean KL first.
    pub fn run(&self, choices: &[Choice]) -> Result<Vec<DecodingRun>> {
        let exact = Model::load(self.path, |_| Ok(Precision::f32()))?;
        let longest = self.batch.cu_seqlens.windows(2).map(|ends| ends[1] - ends[0]).max().unwrap_or(0);
        let parameters: usize = exact.specs.all().map(|spec| spec.len()).sum();
        // The f32 model is loaded; the second is f32 before its cast, and its caches are no larger.
        let needed = 4 * parameters + 2 * exact.session_bytes(longest);
        memory::check("the lab's decoding", needed as u64)?;
        let runs: Result<Vec<DecodingRun>> = choices.iter().map(|choice| self.one(&exact, choice)).collect();
        let mut runs = runs?;
        runs.sort_by(|a, b| b.kl.damage().total_cmp(&a.kl.damage()));
        Ok(runs)
    }

    fn one(&self, exact: &Model, choice: &Choice) -> Result<DecodingRun> {
        let mut model = Model::load(self.path, |_| Ok(Precision::f32()))?;
        model.set_precision(choice.precision.clone());
        let (vocabulary, mut outputs) = (model.config.vocabulary, Outputs::default());
        for ends in self.batch.cu_seqlens.windows(2) {
            let mut sessions = [exact.session(1), model.session(1)];
            for token in &self.batch.ids[ends[0]..ends[1]] {
                if self.observer.cancelled() {
                    return Err(ballast_files::Error::Interrupted.into());
                }
                let mut step = |i: usize| -> Result<Vec<f64>> {
                    let logits = sessions[i].advance_all(&[&[*token]], None)?;
                    Ok(logits.into_iter().map(f64::from).collect())
                };
                let (reference, logits) = (step(0)?, step(1)?);
                outputs.add(&logits, &reference, &[IGNORED], vocabulary);
                self.observer.advance(1);
            }
        }
        let by_position = position::means(&outputs.kl, &position::buckets(self.batch))
            .into_iter()
            .map(|(range, kl)| PositionDivergence { from: range.start, to: range.end, kl })
            .collect();
        Ok(DecodingRun {
            name: choice.name.clone(),
            kl: outputs.spread(),
            top1_agreement: outputs.agreement(),
            by_position,
        })
    }
}
