//! Perplexity of a model on a text.
//!
//! The text's tokens are cut into windows, and each window is read alone. Without overlap every token but a
//! window's first is predicted. With a stride below the window's length, windows overlap and a token is
//! counted in the first window that predicts it: more context, more work.
//!
//! With S_i the summed negative log-likelihood of window i over its n_i counted tokens, N = sum n_i, and k
//! windows:
//!
//! nll = sum S_i / N,  error(nll) = sqrt(k / (k - 1) sum (S_i - nll n_i)^2) / N,  perplexity = exp(nll),
//! error(perplexity) = perplexity error(nll)
//!
//! The error is taken over windows, not tokens: tokens of one window depend on each other, and an error that
//! ignores this is too small.

use std::ops::Range;

use serde::Serialize;

use crate::batch::{Batch, IGNORED};
use crate::error::Result;
use crate::model::{LossOptions, Model};

/// Tokens of one forward pass, and those of them that are counted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// Range of the tokens.
    pub tokens: Range<usize>,
    /// First counted token; at least one token precedes it.
    pub counted: usize,
}

/// Splits a text of `tokens` tokens into windows.
pub fn windows(tokens: usize, window: usize, stride: usize) -> Vec<Window> {
    let (window, stride) = (window.max(2), stride.clamp(1, window.max(2)));
    let mut all: Vec<Window> = Vec::new();
    let mut begin = 0;
    while begin + 1 < tokens {
        let done = all.last().map_or(0, |last| last.tokens.end);
        let end = (begin + window).min(tokens);
        all.push(Window { tokens: begin..end, counted: done.max(begin + 1) });
        if end == tokens {
            break;
        }
        begin += stride;
    }
    all
}

impl Model {
    /// Summed negative log-likelihood of a window's counted tokens, and their number.
    pub fn window_nll(&self, ids: &[u32], window: &Window) -> Result<(f64, usize)> {
        let piece = &ids[window.tokens.clone()];
        let label = |(at, id): (usize, &u32)| if at < window.counted { IGNORED } else { *id as i64 };
        let labels: Vec<i64> = (window.tokens.start..).zip(piece).map(label).collect();
        let batch = Batch::with_labels(piece.to_vec(), &labels, vec![0, piece.len()])?;
        let loss = self.loss(&batch, &LossOptions::default(), None)?;
        Ok((loss.sum, loss.tokens))
    }
}

/// Perplexity over all windows.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Perplexity {
    /// Number of predicted tokens.
    pub predicted: usize,
    /// Mean negative log-likelihood of a token, in nats.
    pub nll: f64,
    /// Standard error of that mean, over windows; `None` for one window.
    pub nll_error: Option<f64>,
    /// exp(nll)
    pub perplexity: f64,
    /// Standard error of the perplexity.
    pub perplexity_error: Option<f64>,
}

impl Perplexity {
    /// Computes the result from the sum and count of every window.
    pub fn of(windows: &[(f64, usize)]) -> Perplexity {
        let predicted: usize = windows.iter().map(|(_, n)| n).sum();
        let (k, total) = (windows.len() as f64, predicted as f64);
        let nll = windows.iter().map(|(sum, _)| sum).sum::<f64>() / total;
        let squares: f64 = windows.iter().map(|(sum, n)| (sum - nll * *n as f64).powi(2)).sum();
        let nll_error = (windows.len() > 1).then(|| (k / (k - 1.0) * squares).sqrt() / total);
        let perplexity = nll.exp();
        Perplexity {
            predicted,
            nll,
            nll_error,
            perplexity,
            perplexity_error: nll_error.map(|e| e * perplexity),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_but_the_first_of_a_window_counts_once() {
        let cut = |tokens, window, stride| {
            let windows = windows(tokens, window, stride);
            windows.iter().map(|w| (w.tokens.start, w.counted, w.tokens.end)).collect::<Vec<_>>()
        };
        assert_eq!(cut(10, 4, 4), [(0, 1, 4), (4, 5, 8), (8, 9, 10)]);
        assert_eq!(cut(9, 4, 4), [(0, 1, 4), (4, 5, 8)], "a last token alone has nothing before it");
        assert_eq!(cut(10, 4, 2), [(0, 1, 4), (2, 4, 6), (4, 6, 8), (6, 8, 10)]);
        assert_eq!(cut(3, 100, 100), [(0, 1, 3)]);
        assert_eq!(cut(1, 4, 4), []);
        assert_eq!(cut(0, 4, 4), []);
    }

    #[test]
    fn equal_windows_have_the_standard_error_of_their_means() {
        let sums = [3.0, 5.0, 4.0, 6.0];
        let windows: Vec<(f64, usize)> = sums.iter().map(|sum| (*sum, 2)).collect();
        let result = Perplexity::of(&windows);
        let means = sums.map(|sum| sum / 2.0);
        let mean = means.iter().sum::<f64>() / 4.0;
        let variance = means.iter().map(|m| (m - mean).powi(2)).sum::<f64>() / 3.0;
        assert_eq!((result.predicted, result.nll, result.perplexity), (8, mean, mean.exp()));
        assert!((result.nll_error.unwrap() - (variance / 4.0).sqrt()).abs() < 1e-12);
        assert_eq!(Perplexity::of(&[(3.0, 2)]).nll_error, None);
    }
}
