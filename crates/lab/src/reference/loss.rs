//! Output head and loss, a few tokens at a time. Token t with hidden h, weight W [V, H], target y, cap c:
//! ```text
//! u = W h          l = c tanh(u / c), or u          loss = ln sum_j e^{l_j} - l_y, the mean over n tokens with a target
//! dl_j = (e^{l_j} / sum - [j = y]) / n              du = dl (1 - (l / c)^2)
//! dh = W^T du      dW = sum of du h^T
//! ```

use std::ops::Range;

use ballast_model::batch::IGNORED;
use rayon::prelude::*;

use super::layer_run::LayerRun;
use super::product::{add_outer, add_times, times_transposed};
use super::tape::Param;
use super::{Gradients, Reference, Stage, Weights};
use crate::{Error, Result};

/// Tokens whose logits exist at a time.
const SLICE: usize = 128;

impl Reference {
    /// Returns the logits [rows, V] of some tokens, soft-capped if the model does so. Call after `norm`.
    pub fn logits(&self, rows: Range<usize>, weights: Weights<'_, '_>) -> Result<Vec<f64>> {
        let (hidden, vocabulary) = (self.setting.config.hidden, self.setting.config.vocabulary);
        let tokens = self.hidden.len() / hidden;
        if rows.start > rows.end || rows.end > tokens {
            return Err(Error::Input(format!(
                "logits: tokens {rows:?} are out of range, the input has {tokens}"
            )));
        }
        let head = self.head(weights)?;
        let x = &self.hidden[rows.start * hidden..rows.end * hidden];
        let mut logits = times_transposed(x, head.values(), hidden, vocabulary);
        if let Some(cap) = self.setting.config.final_cap {
            let cap = cap as f64;
            logits.par_iter_mut().for_each(|l| *l = cap * (*l / cap).tanh());
        }
        Ok(logits)
    }

    /// Returns the mean loss over the tokens with a target, and starts backward with the gradients of the
    /// last norm and the head. Call after `norm`. A tied head gives a part of the gradient of
    /// `embed_tokens.weight`; `embed_backward` gives the rest.
    pub fn loss(&mut self, weights: Weights<'_, '_>, gradients: Option<Gradients<'_>>) -> Result<f64> {
        self.expect(Stage::Normed, "loss")?;
        if gradients.is_some() && !self.keeps() {
            return Err(Error::Input(
                "no saved activations for backward: the run was created without gradients".into(),
            ));
        }
        let setting = self.setting.clone();
        let counted = setting.batch.counted();
        if counted == 0 {
            return Err(Error::Input("no token has a target, so there is no loss".into()));
        }
        let (hidden, vocabulary) = (setting.config.hidden, setting.config.vocabulary);
        let head = self.head(weights)?;
        let wanted = |len: usize| vec![0.0; if gradients.is_some() { len } else { 0 }];
        let (mut dw, mut dhidden) = (wanted(vocabulary * hidden), wanted(self.hidden.len()));
        let mut sum = 0.0;
        for (i, targets) in setting.batch.targets.chunks(SLICE).enumerate() {
            if targets.iter().all(|target| *target == IGNORED) {
                continue;
            }
            let rows = i * SLICE..i * SLICE + targets.len();
            let mut logits = self.logits(rows.clone(), weights)?;
            let losses: Vec<f64> = logits
                .par_chunks_mut(vocabulary)
                .zip(targets)
                .map(|(row, target)| row_loss(row, *target, setting.config.final_cap, counted))
                .collect();
            sum += losses.iter().sum::<f64>();
            if gradients.is_some() {
                let rows = rows.start * hidden..rows.end * hidden;
                add_times(&mut dhidden[rows.clone()], &logits, head.values(), hidden, vocabulary);
                add_outer(&mut dw, &logits, &self.hidden[rows], hidden, vocabulary);
            }
        }
        if let Some(gradients) = gradients {
            gradients(self.head_name(), dw);
            self.norm_backward(&dhidden, weights, gradients)?;
            self.stage = Stage::Back(setting.config.layers.len());
        }
        Ok(sum / counted as f64)
    }

    fn norm_backward(
        &mut self,
        dhidden: &[f64],
        weights: Weights<'_, '_>,
        gradients: Gradients<'_>,
    ) -> Result {
        let mut pass = LayerRun::new(&self.setting, true, weights, None, None);
        let x = pass.tape.leaf(self.x.clone());
        let hidden = pass.norm(&x, "norm", self.setting.config.hidden)?;
        let mut sums = pass.tape.backward(&[(&hidden, dhidden)]);
        self.dx = sums.take(&x);
        sums.into_parameters().into_iter().for_each(|(name, gradient)| gradients(&name, gradient));
        Ok(())
    }

    fn head_name(&self) -> &'static str {
        if self.setting.config.tied { "embed_tokens.weight" } else { "lm_head.weight" }
    }

    fn head<'w>(&self, weights: Weights<'_, 'w>) -> Result<Param<'w>> {
        let config = &self.setting.config;
        let pass = LayerRun::new(&self.setting, false, weights, None, None);
        pass.param(self.head_name(), config.vocabulary * config.hidden)
    }
}

/// Returns the loss of one token and replaces its logits by their gradient before the cap.
fn row_loss(row: &mut [f64], target: i64, cap: Option<f32>, counted: usize) -> f64 {
    if target == IGNORED {
        row.fill(0.0);
        return 0.0;
    }
    let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let lse = max + row.iter().map(|l| (l - max).exp()).sum::<f64>().ln();
    let loss = lse - row[target as usize];
    for (j, l) in row.iter_mut().enumerate() {
        let slope = cap.map_or(1.0, |cap| 1.0 - (*l / cap as f64).powi(2));
        let dl = (*l - lse).exp() - if j == target as usize { 1.0 } else { 0.0 };
        *l = dl * slope / counted as f64;
    }
    loss
}
