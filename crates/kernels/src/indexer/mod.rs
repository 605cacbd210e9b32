//! Sparse-attention indexer: a small attention without values that selects the keys of the main attention.
//!
//! Query t with heads h, one key per token u <= t, width d:
//! ```text
//! x_hu     = q_h.k_u                      accumulated in f32, rounded to `logits`
//! score_u  = sum_h w_h relu(x_hu d^-1/2)  in f32, heads in ascending order
//! selected = the min(topk, t + 1) keys of the highest score, of equal scores the earliest (see [`Ties`])
//! ```
//! w already has its factor heads^-1/2. In a sequence of at most topk tokens all keys are selected without
//! scoring.
//!
//! The loss compares the indexer with the attention it serves. That attention gets no gradient: p is a
//! constant.
//! ```text
//! p_u  = a_u / (sum_u a_u + eps)          a_u = sum over the attention's heads of its probabilities
//! s    = softmax(score)                   in f32
//! loss = scale mean_t sum_u p_u (ln(p_u + eps) - ln(s_u + eps))       eps = 1e-8
//! ```
//! `compute_dsa_indexer_loss` of Megatron-LM has the same formula with eps = 1e-10 in the logarithms and none
//! in the sum of p. That sum is the number of heads, where 1e-8 is below the last digit of f32.
//!
//! The sum runs over the keys that the attention sees: all of them in the dense stage, the selected ones in
//! the sparse stage, where the input of the attention has `selected`. Backward, with c = scale / tokens:
//! ```text
//! r_u = p_u s_u / (s_u + eps)             dscore_u = c (s_u sum_v r_v - r_u)
//! dw_h = sum_u dscore_u relu(x_hu d^-1/2)
//! dx_hu = dscore_u w_h d^-1/2  where x_hu > 0, else 0
//! dq_h = sum_u dx_hu k_u                  dk_u = sum_h,t dx_hu q_h
//! ```
//! Scores and p are held for one block of queries at a time; the probabilities of the attention are
//! recomputed from its lse. dk is summed in [`LANES`] parts: query blocks are assigned to them in turn, and
//! they are added in order.
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
//! let input = indexer::Input { q: &q, k: &k, w: &w, before: 0, cu_seqlens: &[0, 3] };
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
use crate::packing::{check_before, check_cu_seqlens};

/// Epsilon of the logarithms and of the normalization of p.
pub const EPS: f64 = 1e-8;

/// Number of partial sums of dk, and most tasks per sequence.
pub const LANES: usize = 8;

/// Number and width of heads.
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
    /// Rounding of q.k before the relu.
    pub logits: Rounding,
    /// Factor of the loss.
    pub loss_scale: f32,
    /// Tie-breaking rule for equal scores.
    pub ties: Ties,
}

/// Inputs; `tokens` is the last entry of `cu_seqlens`.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a, T> {
    /// [tokens, heads, d]
    pub q: &'a [T],
    /// [before + tokens, d]
    pub k: &'a [T],
    /// [tokens, heads]
    pub w: &'a [f32],
    /// Number of keys of the first sequence that precede its first query: its query i has position before + i
    pub before: usize,
    /// Offsets of the sequences: starts with 0, never decreases.
    pub cu_seqlens: &'a [usize],
}

fn check_dims(dims: Dims) -> Result {
    check(dims.heads > 0 && dims.dim > 0, || "indexer heads and dim must be above 0".into())
}

fn check_input<T>(dims: Dims, input: &Input<'_, T>) -> Result<usize> {
    check_dims(dims)?;
    let tokens = check_cu_seqlens(input.cu_seqlens)?;
    let keys = check_before(input.before, input.cu_seqlens)?;
    check_shape("q", input.q, [tokens, dims.heads, dims.dim])?;
    check_shape("k", input.k, [keys, dims.dim])?;
    check_shape("w", input.w, [tokens, dims.heads])?;
    Ok(tokens)
}

/// Tokens of a block of queries: about 512 rows, heads stacked.
fn block_tokens(dims: Dims) -> usize {
    (512 / dims.heads).clamp(1, 32)
}
