//! Gates that let the state grow, g > 0.
//!
//! With S multiplied by e^{G_i} inside a chunk, terms of this size cancel in Vn and take their digits with
//! them, so rounding errors grow as e^G does; above e^88 they overflow. Token by token (a chunk of one) nothing
//! cancels. So a sequence whose state would grow by more than e^[`MAX_GROWTH`] inside a chunk is computed in
//! smaller chunks.

use std::ops::Range;

use super::{Dims, Gates, Options};

/// Logarithm of the largest growth inside a chunk of several tokens.
pub(super) const MAX_GROWTH: f64 = 2.0;

/// Largest g: e^g fits in f32.
pub(super) const MAX_G: f32 = 88.0;

/// Options for these tokens and the value heads of one key head: chunks as large as their growth permits. There
/// is still one saved state per `chunk * states_every` tokens, so all heads agree on their number.
pub(super) fn bounded<T>(
    options: &Options,
    gates: &Gates<'_, T>,
    dims: Dims,
    tokens: Range<usize>,
    key_head: usize,
) -> Options {
    let mut options = *options;
    let Gates::Given { g, .. } = gates else { return options };
    let growth = |chunk: usize| {
        let heads = key_head * dims.group()..(key_head + 1) * dims.group();
        heads.map(|head| growth(g, dims.value_heads, head, tokens.clone(), chunk)).fold(0.0, f64::max)
    };
    while options.chunk > 1 && growth(options.chunk) > MAX_GROWTH {
        let by = (2..=options.chunk).find(|by| options.chunk.is_multiple_of(*by)).unwrap_or(options.chunk);
        options.chunk /= by;
        options.states_every = options.states_every.saturating_mul(by);
    }
    options
}

/// Largest G_i - G_j, or G_i alone, of any chunk: the largest sum of adjacent g.
fn growth(g: &[f32], heads: usize, head: usize, tokens: Range<usize>, chunk: usize) -> f64 {
    let mut most = 0f64;
    for first in tokens.clone().step_by(chunk) {
        let mut sum = 0f64;
        for t in first..tokens.end.min(first + chunk) {
            sum = (sum + g[t * heads + head] as f64).max(0.0);
            most = most.max(sum);
        }
    }
    most
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_shrink_as_far_as_the_growth_asks_and_a_saved_state_has_the_same_tokens() {
        let dims = Dims { key_heads: 2, value_heads: 2, key_dim: 1, value_dim: 1 };
        let bounded = |chunk: usize, g: f32| {
            // The other key head decays.
            let g: Vec<f32> = (0..128).map(|i| if i % 2 == 0 { g } else { -1.0 }).collect();
            let gates: Gates<'_, f32> = Gates::Given { g: &g, beta: &g };
            let options = Options { chunk, ..Options::default() };
            let [grown, other] = [0, 1].map(|head| bounded(&options, &gates, dims, 0..64, head));
            assert_eq!(other, options);
            assert_eq!(grown.chunk * grown.states_every, chunk * options.states_every);
            grown.chunk
        };
        let chunks = [(32, 0.0), (32, 0.05), (32, 0.1), (32, 0.5), (32, 3.0), (7, 1.0), (9, 0.5), (1, 80.0)];
        assert_eq!(chunks.map(|(chunk, g)| bounded(chunk, g)), [32, 32, 16, 4, 1, 1, 3, 1]);
    }
}
