//! The auxiliary loss that spreads tokens over experts, as Switch and transformers have it.

use super::{Dims, Routing, check_dims, route::check_routing};
use crate::error::{Result, check, check_len};

/// What the loss adds up over the tokens of one layer, or of several: transformers has one loss for all of them.
#[derive(Clone, Debug, PartialEq)]
pub struct Balance {
    /// Tokens, once for every layer.
    rows: usize,
    /// By expert: how often it was chosen.
    chosen: Vec<u64>,
    /// By expert: the sum of its probabilities.
    probability: Vec<f64>,
}

impl Balance {
    /// Of no tokens yet.
    pub fn new(experts: usize) -> Balance {
        Balance { rows: 0, chosen: vec![0; experts], probability: vec![0.0; experts] }
    }

    /// Adds a layer's tokens: logits [tokens, E] and their routing.
    pub fn add(&mut self, logits: &[f32], routing: &Routing, dims: Dims) -> Result {
        check_dims(dims)?;
        let tokens = self.check_rows(logits)?;
        check(dims.experts == self.chosen.len(), || {
            format!("{} experts where the layers before had {}", dims.experts, self.chosen.len())
        })?;
        check_routing(routing, tokens, dims)?;
        self.rows += tokens;
        for expert in &routing.experts {
            self.chosen[*expert as usize] += 1;
        }
        let mut p = Vec::new();
        for row in logits.chunks(dims.experts) {
            softmax(row, &mut p);
            self.probability.iter_mut().zip(&p).for_each(|(sum, p)| *sum += p);
        }
        Ok(())
    }

    /// E sum_e f_e P_e; 0 of no tokens.
    pub fn loss(&self) -> f64 {
        let rows = self.rows.max(1) as f64;
        let products = self.chosen.iter().zip(&self.probability).map(|(f, p)| *f as f64 / rows * p / rows);
        self.chosen.len() as f64 * products.sum::<f64>()
    }

    /// dlogits [tokens, E] += `coefficient` times the loss's gradient by some of the logits that were added.
    pub fn backward(&self, dlogits: &mut [f32], logits: &[f32], coefficient: f32) -> Result {
        self.check_rows(logits)?;
        check_len("dlogits", dlogits, logits.len())?;
        let (e, rows) = (self.chosen.len(), self.rows.max(1) as f64);
        let share: Vec<f64> = self.chosen.iter().map(|f| *f as f64 / rows).collect();
        let scale = coefficient as f64 * e as f64 / rows;
        let mut p = Vec::new();
        for (drow, row) in dlogits.chunks_mut(e).zip(logits.chunks(e)) {
            softmax(row, &mut p);
            let along: f64 = p.iter().zip(&share).map(|(p, f)| p * f).sum();
            for ((dl, p), f) in drow.iter_mut().zip(&p).zip(&share) {
                *dl += (scale * p * (f - along)) as f32;
            }
        }
        Ok(())
    }

    /// The number of tokens.
    fn check_rows(&self, logits: &[f32]) -> Result<usize> {
        let e = self.chosen.len();
        check(e > 0 && logits.len().is_multiple_of(e), || {
            format!("{} logits, not rows of {e}", logits.len())
        })?;
        Ok(logits.len() / e)
    }
}

fn softmax(row: &[f32], p: &mut Vec<f64>) {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    p.clear();
    p.extend(row.iter().map(|l| ((l - max) as f64).exp()));
    let sum: f64 = p.iter().sum();
    p.iter_mut().for_each(|p| *p /= sum);
}
