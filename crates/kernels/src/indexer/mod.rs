//! The sparse indexer: a small attention without values that chooses the keys of the large one.
//!
//! Query t with heads h, one key per token u <= t, d the width:
//! ```text
//! x_hu     = q_h.k_u                      accumulated in f32, rounded to `logits`
//! score_u  = sum_h w_h relu(x_hu d^-1/2)  in f32, heads in ascending order
//! selected = the min(topk, t + 1) keys of the highest score, of equal scores the earliest (see [`Ties`])
//! ```
//! w comes with its factor heads^-1/2. A sequence that is not longer than topk has all its keys selected, unscored.
//!
//! Its loss compares it with the attention it serves, which it cannot move: p is constant here.
//! ```text
//! p_u  = a_u / (sum_u a_u + eps)          a_u = sum over the attention's heads of its probabilities
//! s    = softmax(score)                   in f32
//! loss = scale mean_t sum_u p_u (ln(p_u + eps) - ln(s_u + eps))       eps = 1e-8
//! ```
//! Megatron-LM's `compute_dsa_indexer_loss` is the same formula, by hand, with eps = 1e-10 in the logarithms and none in
//! p's sum, which is the number of heads: there 1e-8 is below the last digit of f32.
//!
//! The sum runs over the keys that the attention sees: all of them in the dense stage, the selected ones in the sparse stage, where
//! the attention's input has `selected`. Backward, c = scale / tokens:
//! ```text
//! r_u = p_u s_u / (s_u + eps)             dscore_u = c (s_u sum_v r_v - r_u)
//! dw_h = sum_u dscore_u relu(x_hu d^-1/2)
//! dx_hu = dscore_u w_h d^-1/2  where x_hu > 0, else 0
//! dq_h = sum_u dx_hu k_u                  dk_u = sum_h,t dx_hu q_h
//! ```
//! Rows of scores and of p exist for one block of queries at a time; the attention's probabilities are made anew from
//! its lse. dk is summed in [`LANES`] parts: query blocks go to them in turn, and they are added in order.
//!
//! # Example
//! ```
//! use ballast_kernels::attention::UNUSED;
//! use ballast_kernels::{Scratch, indexer};
//!
//! let dims = indexer::Dims { heads: 1, dim: 1 };
//! let (options, topk) = (indexer::Options::default(), 2);
//! // The scores of the last query are 1, 3 and 2: it keeps the keys 1 and 2.
//! let (q, k, w) = ([1.0f32, 1.0, 1.0], [1.0, 3.0, 2.0], [1.0, 1.0, 1.0]);
//! let input = indexer::Input { q: &q, k: &k, w: &w, cu_seqlens: &[0, 3] };
//! let scratch = Scratch::new(indexer::indexer_topk_scratch::<f32>(dims, 3));
//! let mut selected = [0; 6];
//! indexer::indexer_topk(&mut selected, &input, dims, &options, topk, &scratch)?;
//! assert_eq!(selected, [0, UNUSED, 0, 1, 1, 2]);
//! # Ok::<(), ballast_kernels::KernelError>(())
//! ```

mod loss;
pub mod reference;
mod score;
mod ties;

#[cfg(test)]
mod tests;

pub use loss::{
    Grads, Target, attention_distribution, attention_distribution_scratch, indexer_loss,
    indexer_loss_scratch, indexer_loss_workspace,
};
pub use ties::{Score, Ties, choose};

pub use score::{
    indexer_scores, indexer_scores_scratch, indexer_topk, indexer_topk_decode, indexer_topk_scratch,
};

use crate::Rounding;
use crate::error::{Result, check, check_shape};
use crate::packing::check_cu_seqlens;

/// Inside the logarithms, and in the normalisation of p.
pub const EPS: f64 = 1e-8;

/// Parts in which dk is summed: as many tasks work on one sequence at most.
pub const LANES: usize = 8;

/// Heads and width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dims {
    /// Heads of q and w; k has one.
    pub heads: usize,
    /// d: width of q and k.
    pub dim: usize,
}

/// Settings of the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Options {
    /// What q.k is rounded to before the relu.
    pub logits: Rounding,
    /// Factor of the loss.
    pub loss_scale: f32,
    /// Which of several equal scores are taken.
    pub ties: Ties,
}

/// The inputs: `tokens` is the last entry of `cu_seqlens`.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a, T> {
    /// [tokens, heads, d]
    pub q: &'a [T],
    /// [tokens, d]
    pub k: &'a [T],
    /// [tokens, heads]
    pub w: &'a [f32],
    /// Where sequences begin and end: starts with 0, never falls.
    pub cu_seqlens: &'a [usize],
}

fn check_dims(dims: Dims) -> Result {
    check(dims.heads > 0 && dims.dim > 0, || "an indexer without heads or width".into())
}

fn check_input<T>(dims: Dims, input: &Input<'_, T>) -> Result<usize> {
    check_dims(dims)?;
    let tokens = check_cu_seqlens(input.cu_seqlens)?;
    check_shape("q", input.q, [tokens, dims.heads, dims.dim])?;
    check_shape("k", input.k, [tokens, dims.dim])?;
    check_shape("w", input.w, [tokens, dims.heads])?;
    Ok(tokens)
}

/// Tokens of a block of queries: about 512 rows, heads stacked.
fn block_tokens(dims: Dims) -> usize {
    (512 / dims.heads).clamp(1, 32)
}
