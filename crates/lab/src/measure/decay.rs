//! Decay of the delta rule's heads: the rate exp(A_log) and the mean decay per token.

use crate::findings::{Decay, DecayError};

/// Decay rates and mean decays per token of a layer, by head.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Decays {
    /// exp(A_log)
    pub rates: Vec<f64>,
    /// Mean of -g.
    pub per_token: Vec<f64>,
}

impl Decays {
    /// Computes decays from A_log `[heads]` and g [tokens, heads].
    pub fn new(a_log: &[f64], g: &[f64]) -> Decays {
        let heads = a_log.len().max(1);
        let mut per_token = vec![0.0; a_log.len()];
        for row in g.chunks(heads) {
            for (sum, g) in per_token.iter_mut().zip(row) {
                *sum -= g;
            }
        }
        let tokens = (g.len() / heads).max(1) as f64;
        per_token.iter_mut().for_each(|sum| *sum /= tokens);
        Decays { rates: a_log.iter().map(|x| x.exp()).collect(), per_token }
    }

    /// Describes the decays of the reference.
    pub fn describe(&self, layer: usize) -> impl Iterator<Item = Decay> + '_ {
        self.rates.iter().zip(&self.per_token).enumerate().map(move |(head, (rate, per_token))| Decay {
            layer,
            head,
            rate: *rate,
            per_token: *per_token,
            half_life: half_life(*per_token),
        })
    }

    /// Compares the decays with the reference's.
    pub fn compare<'a>(
        &'a self,
        reference: &'a Decays,
        layer: usize,
    ) -> impl Iterator<Item = DecayError> + 'a {
        (0..self.rates.len()).map(move |head| DecayError {
            layer,
            head,
            rate_error: self.rates[head] / reference.rates[head] - 1.0,
            per_token_error: self.per_token[head] / reference.per_token[head] - 1.0,
            half_life: half_life(self.per_token[head]),
        })
    }
}

fn half_life(per_token: f64) -> f64 {
    std::f64::consts::LN_2 / per_token
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_that_loses_ln_2_lives_one_token() {
        let g = -std::f64::consts::LN_2;
        let exact = Decays::new(&[0.0, 1.0], &[g, 2.0 * g, g, 2.0 * g]);
        let lives: Vec<f64> = exact.describe(0).map(|decay| decay.half_life).collect();
        assert_eq!(lives, [1.0, 0.5]);
        let doubled = Decays::new(&[2f64.ln(), 1.0], &[2.0 * g, 2.0 * g]);
        let errors: Vec<DecayError> = doubled.compare(&exact, 0).collect();
        assert!(
            (errors[0].rate_error - 1.0).abs() < 1e-12 && (errors[0].per_token_error - 1.0).abs() < 1e-12
        );
        assert_eq!((errors[1].rate_error, errors[1].half_life), (0.0, 0.5));
    }
}
