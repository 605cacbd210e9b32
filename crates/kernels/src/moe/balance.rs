//! Load-balancing loss of the Switch Transformer, as in transformers.

use super::{Dims, Routing, check_dims, route::check_routing};
use crate::error::{Result, check, check_len};

/// Sums of the load-balancing loss over the tokens of one or several layers; transformers has one loss for
/// all layers.
#[derive(Clone, Debug, PartialEq)]
pub struct Balance {
    /// Number of tokens, counted once per layer.
    rows: usize,
    /// Number of choices of each expert.
    chosen: Vec<u64>,
    /// Sum of the probabilities of each expert.
    probability: Vec<f64>,
}

impl Balance {
    /// Creates sums over no tokens.
    pub fn new(experts: usize) -> Balance {
        Balance { rows: 0, chosen: vec![0; experts], probability: vec![0.0; experts] }
    }

    /// Adds the tokens of a layer: logits [tokens, E] and their routing.
    pub fn add(&mut self, logits: &[f32], routing: &Routing, dims: Dims) -> Result {
        check_dims(dims)?;
        let tokens = self.check_rows(logits)?;
        check(dims.experts == self.chosen.len(), || {
            format!("layer has {} experts, but the layers before have {}", dims.experts, self.chosen.len())
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

    /// Adds other sums over the same experts, such as those of another part of the batch.
    pub fn merge(&mut self, other: &Balance) -> Result {
        check(other.chosen.len() == self.chosen.len(), || {
            format!("sums must be over {} experts, got {}", self.chosen.len(), other.chosen.len())
        })?;
        self.rows += other.rows;
        self.chosen.iter_mut().zip(&other.chosen).for_each(|(sum, chosen)| *sum += chosen);
        self.probability.iter_mut().zip(&other.probability).for_each(|(sum, p)| *sum += p);
        Ok(())
    }

    /// All sums as numbers, for [`Balance::from_values`]: 1 + 2 E of them.
    pub fn to_values(&self) -> Vec<f64> {
        let chosen = self.chosen.iter().map(|count| *count as f64);
        std::iter::once(self.rows as f64).chain(chosen).chain(self.probability.iter().copied()).collect()
    }

    /// Sums from the numbers of [`Balance::to_values`]; counts below 2^53 are exact.
    pub fn from_values(values: &[f64]) -> Result<Balance> {
        check(values.len() % 2 == 1, || format!("number of values must be odd, got {}", values.len()))?;
        let (chosen, probability) = values[1..].split_at(values.len() / 2);
        let chosen = chosen.iter().map(|count| *count as u64).collect();
        Ok(Balance { rows: values[0] as usize, chosen, probability: probability.to_vec() })
    }

    /// Loss E sum_e f_e P_e; 0 without tokens.
    pub fn loss(&self) -> f64 {
        self.loss_of(self)
    }

    /// Part of the loss that the tokens of `part` contribute, which are among those of these sums: f_e is
    /// that of all tokens, P_e the part's share of the mean. The parts of a batch add up to its loss.
    pub fn loss_of(&self, part: &Balance) -> f64 {
        let rows = self.rows.max(1) as f64;
        let products = self.chosen.iter().zip(&part.probability).map(|(f, p)| *f as f64 / rows * p / rows);
        self.chosen.len() as f64 * products.sum::<f64>()
    }

    /// dlogits [tokens, E] += `coefficient` times the gradient of the loss with respect to these logits,
    /// which were added before.
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

    /// Returns the number of tokens.
    fn check_rows(&self, logits: &[f32]) -> Result<usize> {
        let e = self.chosen.len();
        check(e > 0 && logits.len().is_multiple_of(e), || {
            format!("logits have {} elements, not a multiple of {e} experts", logits.len())
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
