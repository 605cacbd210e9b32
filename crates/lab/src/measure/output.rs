//! Output distributions relative to the reference: losses, KL divergences, top-1 agreement.

use ballast_model::batch::IGNORED;
use rayon::prelude::*;

use crate::findings::Spread;

/// Sums over tokens.
#[derive(Clone, Debug, Default)]
pub struct Outputs {
    /// KL(reference || this), by token.
    pub kl: Vec<f64>,
    loss: f64,
    predicted: usize,
    agree: usize,
}

/// Log-probabilities of a row of logits; all NaN if a logit is NaN or all are -inf.
fn log_softmax(row: &[f64]) -> Vec<f64> {
    let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = row.iter().map(|x| (x - max).exp()).sum();
    row.iter().map(|x| x - max - sum.ln()).collect()
}

/// Index of the largest value; the first of equals.
pub fn argmax(row: &[f64]) -> usize {
    let mut best = 0;
    for (i, x) in row.iter().enumerate() {
        if *x > row[best] || row[best].is_nan() {
            best = i;
        }
    }
    best
}

impl Outputs {
    /// Adds rows of logits [rows, V] with their targets; `reference` has the same shape.
    pub fn add(&mut self, logits: &[f64], reference: &[f64], targets: &[i64], vocabulary: usize) {
        let one = |((row, reference), target): ((&[f64], &[f64]), &i64)| {
            let (own, exact) = (log_softmax(row), log_softmax(reference));
            // exp(-inf) * (-inf) would be NaN; a probability of 0 contributes nothing.
            let term = |(p, q): (&f64, &f64)| if *p == f64::NEG_INFINITY { 0.0 } else { p.exp() * (p - q) };
            let kl: f64 = exact.iter().zip(&own).map(term).sum();
            let loss = if *target == IGNORED { None } else { Some(-own[*target as usize]) };
            // Rounding can make the sum slightly negative.
            (if kl < 0.0 { 0.0 } else { kl }, loss, argmax(row) == argmax(reference))
        };
        let rows = logits.par_chunks(vocabulary).zip(reference.par_chunks(vocabulary));
        let found: Vec<(f64, Option<f64>, bool)> = rows.zip(targets).map(one).collect();
        for (kl, loss, agrees) in found {
            self.kl.push(kl);
            self.loss += loss.unwrap_or(0.0);
            self.predicted += loss.is_some() as usize;
            self.agree += agrees as usize;
        }
    }

    /// Mean loss of the tokens with a target; NaN without any.
    pub fn loss(&self) -> f64 {
        self.loss / self.predicted as f64
    }

    /// Share of tokens with the same top-1 next token as the reference; NaN without tokens.
    pub fn agreement(&self) -> f64 {
        self.agree as f64 / self.kl.len() as f64
    }

    /// Mean, 99th percentile and maximum of the KL divergences; NaN without tokens.
    pub fn spread(&self) -> Spread {
        if self.kl.is_empty() {
            return Spread { mean: f64::NAN, p99: f64::NAN, max: f64::NAN };
        }
        let mut sorted = self.kl.clone();
        // NaN counts as the largest, whatever its sign bit.
        sorted.sort_by(|a, b| a.is_nan().cmp(&b.is_nan()).then(a.total_cmp(b)));
        let at = ((0.99 * sorted.len() as f64).ceil() as usize).clamp(1, sorted.len()) - 1;
        Spread {
            mean: self.kl.iter().sum::<f64>() / sorted.len() as f64,
            p99: sorted[at],
            max: sorted[sorted.len() - 1],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divergence_of_known_distributions() {
        // p = (1/2, 1/2), q = (3/4, 1/4): KL = ln(2/3)/2 + ln(2)/2.
        let mut outputs = Outputs::default();
        let q = [3f64.ln(), 0.0];
        outputs.add(&q, &[0.0, 0.0], &[1], 2);
        assert!((outputs.kl[0] - 0.5 * ((2.0f64 / 3.0).ln() + 2f64.ln())).abs() < 1e-15);
        assert!((outputs.loss() - 4f64.ln()).abs() < 1e-15);
        assert_eq!(outputs.agreement(), 1.0);
    }

    #[test]
    fn equal_logits_diverge_nowhere_and_a_shift_changes_nothing() {
        let (mut outputs, row) = (Outputs::default(), [0.3, -2.0, 9.0, 1e3]);
        outputs.add(&row.map(|x| x + 5.0), &row, &[IGNORED], 4);
        assert!(outputs.kl[0] < 1e-12 && outputs.loss().is_nan(), "a loss of no token is no number");
    }

    #[test]
    fn a_logit_that_is_not_a_number_is_not_hidden() {
        let mut outputs = Outputs::default();
        outputs.add(&[f64::NAN, 1.0], &[0.0, 1.0], &[0], 2);
        assert!(outputs.kl[0].is_nan() && outputs.loss().is_nan() && outputs.spread().mean.is_nan());
        outputs.kl = vec![1.0, -f64::NAN, f64::NAN, 2.0];
        assert!(outputs.spread().p99.is_nan() && outputs.spread().max.is_nan());
    }

    #[test]
    fn the_99th_of_100_is_the_percentile() {
        let outputs = Outputs { kl: (1..=100).map(|i| i as f64).collect(), ..Outputs::default() };
        assert_eq!(outputs.spread(), Spread { mean: 50.5, p99: 99.0, max: 100.0 });
    }
}
