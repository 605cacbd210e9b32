//! Causal softmax attention in tiles, without a tokens x tokens matrix.
//!
//! Query i of head h, with the keys j that it sees, the scale s and the kv head h / (heads / kv_heads):
//! ```text
//! x_j = s q.k_j            accumulated in f32, multiplied by s, rounded to `qk_product`
//! x_j = cap tanh(x_j/cap)  in f32, rounded to `qk_product` again; only with a soft cap
//! x_j                      rounded to `logits`
//! e_j = exp(x_j - m)       m = max of x_j and of the sink z_h
//! l   = sum_j e_j + exp(z_h - m)
//! o   = sum_j e_j v_j / l  the sink has no value
//! lse = m + ln l
//! ```
//! A query sees the keys j <= i of its own sequence; with a window W only i - W < j <= i; with `selected`
//! only those of them that are listed for it. Other keys are left out of the loops, not masked with -inf. A
//! query without keys has an output and gradients of zero; its lse is the sink, or -inf without one. Keys may
//! precede the first query of the first sequence ([`Input::before`]): the sequence then began elsewhere.
//!
//! With `logits` = f32 the softmax is online: maximum and sum are updated tile by tile. With `logits` = bf16
//! or f16 that would make the result depend on the tiles, so the maximum is found in a first pass. Then x_j -
//! m is rounded, exp of that is rounded, and the sum is rounded after every addition, keys in ascending order
//! (in the order of the list with `selected`), the sink last. The product with v and the division by l stay
//! f32.
//!
//! Two more roundings are those of factors of a product: `probabilities` of e_j before the product with v,
//! `gradient` of p_j before that with do and of s dx_j before those with k and q. Sums, l and D are not rounded.
//! With online softmax, e_j is rounded with the m of its tile, so the result depends on the tiles, though not on
//! the threads.
//!
//! Backward recomputes p_j = e_j / l from lse (with rounded logits from m and l, with the same roundings); D
//! = do.o:
//! ```text
//! dv_j += p_j do           dp_j = do.v_j          dx_j = p_j (dp_j - D) (1 - (x_j/cap)^2)
//! dq   += s dx_j k_j       dk_j += s dx_j q       dz_h -= exp(z_h - lse) D
//! ```
//! Rounding has derivative 1. Forward and backward use the same tiles, so x has the same bits and is rounded
//! in the same direction. Saved ([`Saved`]): lse; also m and l if `logits` is not f32. The caller keeps o.
//!
//! Forward runs blocks of queries in parallel. Backward divides a sequence into equal blocks of queries and
//! keys and goes through the pairs (query block a, key block b) diagonal by diagonal, a - b = 0, 1, 2, ... No
//! two pairs of a diagonal share a block, so they run in parallel, each row of dq, dk and dv has one writer,
//! and sums are in the order of the diagonals for any number of threads. With keys before the first query the
//! diagonals begin with the last key block that the first query block sees, and the sums begin with zero.
//!
//! # Example
//! ```
//! use ballast_kernels::{Scratch, attention};
//!
//! let dims = attention::Dims { heads: 1, kv_heads: 1, head_dim: 1, value_dim: 1 };
//! let (options, tokens) = (attention::Options::default(), 2);
//! // A query of zero gives all its keys the same weight.
//! let (q, k, v) = ([0.0f32, 0.0], [1.0, -1.0], [2.0, 4.0]);
//! let (sinks, selected, before) = (None, None, 0);
//! let input = attention::Input { q: &q, k: &k, v: &v, sinks, selected, before, cu_seqlens: &[0, tokens] };
//! let forward = attention::attention_forward_scratch::<f32>(dims, None);
//! let scratch = Scratch::new(forward.max(attention::attention_backward_scratch::<f32>(dims, None)));
//!
//! let (mut o, mut saved) = ([0.0; 2], attention::Saved::default());
//! attention::attention_forward(&mut o, Some(&mut saved), &input, dims, &options, &scratch)?;
//! assert_eq!(o, [2.0, 3.0]);
//!
//! let (mut dq, mut dk, mut dv, d_o) = ([0.0; 2], [0.0; 2], [0.0; 2], [0.0, 1.0]);
//! let grads = attention::Grads { dq: &mut dq, dk: &mut dk, dv: &mut dv, dsinks: None };
//! let mut workspace = vec![0.0; attention::attention_backward_workspace::<f32>(dims, tokens)];
//! attention::attention_backward(
//!     grads, &d_o, &o, &input, &saved, dims, &options, &mut workspace, &scratch,
//! )?;
//! assert!((dv[0] - 0.5).abs() < 1e-6 && (dv[1] - 0.5).abs() < 1e-6);
//! # Ok::<(), ballast_kernels::KernelError>(())
//! ```

mod backward;
mod decode;
mod forward;
mod logits;
pub mod reference;
pub(crate) mod tile;

#[cfg(test)]
mod tests;

pub use backward::{Grads, attention_backward, attention_backward_scratch, attention_backward_workspace};
pub use decode::{Cache, attention_decode, attention_decode_scratch};
pub use forward::{attention_forward, attention_forward_scratch};
pub use logits::attention_logits;

use crate::Rounding;
use crate::error::{Result, check, check_len, check_shape};
use crate::packing::{check_before, check_cu_seqlens};

/// Largest number of heads.
pub const MAX_HEADS: usize = 1 << 16;

/// Number and width of heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dims {
    /// Heads of q and the output; a multiple of `kv_heads`, at most [`MAX_HEADS`].
    pub heads: usize,
    /// Heads of k and v.
    pub kv_heads: usize,
    /// hd: width of q and k, at most 512.
    pub head_dim: usize,
    /// vd: width of v and the output, at most 512.
    pub value_dim: usize,
}

impl Dims {
    /// Query heads per kv head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }
}

/// Settings of the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Options {
    /// s: scale of q.k; `None` is hd^-1/2.
    pub scale: Option<f32>,
    /// W: sliding window; query i sees the keys i - W < j <= i.
    pub window: Option<usize>,
    /// Soft cap of the logits: x becomes cap tanh(x/cap).
    pub soft_cap: Option<f32>,
    /// Rounding of the scaled product s q.k.
    pub qk_product: Rounding,
    /// Rounding of the softmax: maximum, exp and sum.
    pub logits: Rounding,
    /// Rounding of e as a factor of the product with v.
    pub probabilities: Rounding,
    /// Rounding of p and s dx as factors of the products of backward.
    pub gradient: Rounding,
}

impl Options {
    pub(crate) fn scale(&self, dims: Dims) -> f32 {
        self.scale.unwrap_or((dims.head_dim as f32).powf(-0.5))
    }

    /// Keys that mask and window allow the query at `position`.
    pub(crate) fn visible(&self, position: usize) -> std::ops::Range<usize> {
        let begin = self.window.map_or(0, |w| (position + 1).saturating_sub(w));
        begin..position + 1
    }
}

/// Marks an empty slot of [`Selected`].
pub const UNUSED: u32 = u32::MAX;

/// Keys that each query may see, further limited by mask and window.
#[derive(Clone, Copy, Debug)]
pub struct Selected<'a> {
    /// [tokens, topk]: positions in the sequence, each at most once per query; [`UNUSED`] slots may be
    /// anywhere
    pub keys: &'a [u32],
    /// Slots per query.
    pub topk: usize,
}

/// Inputs; `tokens` is the last entry of `cu_seqlens`.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a, T> {
    /// [tokens, heads, hd]
    pub q: &'a [T],
    /// [before + tokens, kv_heads, hd]
    pub k: &'a [T],
    /// [before + tokens, kv_heads, vd]
    pub v: &'a [T],
    /// `[heads]`: attention sinks, one extra logit per head
    pub sinks: Option<&'a [f32]>,
    /// Selected keys; `None` for all keys that mask and window allow
    pub selected: Option<Selected<'a>>,
    /// Number of keys of the first sequence that precede its first query: its query i has position before + i
    pub before: usize,
    /// Offsets of the sequences: starts with 0, never decreases.
    pub cu_seqlens: &'a [usize],
}

/// Values that forward saves for backward, in addition to the inputs and o.
#[derive(Clone, Debug, Default)]
pub struct Saved {
    /// [tokens, heads]
    pub lse: Vec<f32>,
    /// [tokens, heads, 2]: m and l; empty if `logits` is f32
    pub max_sum: Vec<f32>,
}

impl Saved {
    /// Size of all fields in bytes.
    pub fn bytes(&self) -> usize {
        (self.lse.len() + self.max_sum.len()) * size_of::<f32>()
    }
}

/// Bytes of a [`Saved`] that forward has filled.
pub fn saved_bytes(dims: Dims, options: &Options, tokens: usize) -> usize {
    let fields = if options.logits == Rounding::F32 { 1 } else { 3 };
    fields * tokens * dims.heads * size_of::<f32>()
}

fn check_dims(dims: Dims, options: &Options) -> Result {
    let Dims { heads, kv_heads, head_dim, value_dim } = dims;
    check(kv_heads > 0 && heads > 0 && heads.is_multiple_of(kv_heads), || {
        format!("query heads must be a multiple of kv heads, got {heads} and {kv_heads}")
    })?;
    // The number of heads is no length of an argument if there are no tokens.
    check(heads <= MAX_HEADS, || format!("heads must be at most {MAX_HEADS}, got {heads}"))?;
    check((1..=512).contains(&head_dim) && (1..=512).contains(&value_dim), || {
        format!("head_dim and value_dim must be 1 to 512, got {head_dim} and {value_dim}")
    })?;
    check(options.soft_cap.is_none_or(|cap| cap > 0.0), || "soft cap must be above 0".into())
}

fn check_extras(dims: Dims, sinks: Option<&[f32]>, selected: Option<Selected<'_>>, queries: usize) -> Result {
    if let Some(sinks) = sinks {
        check_len("sinks", sinks, dims.heads)?;
    }
    if let Some(selected) = selected {
        check_shape("selected", selected.keys, [queries, selected.topk])?;
    }
    Ok(())
}

pub(crate) fn check_input<T>(dims: Dims, options: &Options, input: &Input<'_, T>) -> Result<usize> {
    check_dims(dims, options)?;
    let tokens = check_cu_seqlens(input.cu_seqlens)?;
    let keys = check_before(input.before, input.cu_seqlens)?;
    check_shape("q", input.q, [tokens, dims.heads, dims.head_dim])?;
    check_shape("k", input.k, [keys, dims.kv_heads, dims.head_dim])?;
    check_shape("v", input.v, [keys, dims.kv_heads, dims.value_dim])?;
    check_extras(dims, input.sinks, input.selected, tokens)?;
    Ok(tokens)
}
