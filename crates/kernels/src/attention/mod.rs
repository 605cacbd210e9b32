//! Softmax attention over the keys of a query's own sequence, in tiles: nothing of size tokens x tokens exists.
//!
//! One query i of head h with the keys j it sees, s the scale, kv head h / (heads / kv_heads):
//! ```text
//! x_j = s q.k_j            accumulated in f32, multiplied by s, rounded to `qk_product`
//! x_j = cap tanh(x_j/cap)  in f32, rounded to `qk_product` again; only with a soft cap
//! x_j                      rounded to `logits`
//! e_j = exp(x_j - m)       m = max of x_j and of the sink z_h
//! l   = sum_j e_j + exp(z_h - m)
//! o   = sum_j e_j v_j / l  the sink has no value
//! lse = m + ln l
//! ```
//! It sees j <= i; with a window W only i - W < j <= i; with `selected` only the keys listed for it, of these. Keys
//! outside are never touched by the softmax: they are left out of the loops, not pushed to -inf. A query that sees
//! nothing gives zeros, and zero gradients; its lse is the sink, or -inf without one.
//!
//! With `logits` = f32 the maximum and the sum run along with the tiles and are corrected as the maximum rises. With
//! lowered `logits` this would make the result depend on the tiles, so the maximum is found first, in a pass of its
//! own; then x_j - m is rounded, exp of that is rounded, and the sum is rounded after every addition, keys in
//! ascending order (as listed, with `selected`), the sink last. The value product and the division by l stay f32.
//!
//! Backward, with p_j = e_j / l made anew from lse (lowered: from m and l, through the same roundings), D = do.o:
//! ```text
//! dv_j += p_j do           dp_j = do.v_j          dx_j = p_j (dp_j - D) (1 - (x_j/cap)^2)
//! dq   += s dx_j k_j       dk_j += s dx_j q       dz_h -= exp(z_h - lse) D
//! ```
//! Rounding has derivative 1. Forward and backward have the same tiles, so x comes out in the same bits and a lowered
//! site rounds it to the same side. Kept ([`Saved`]): lse; m and l as well where `logits` is lowered. The caller keeps o.
//!
//! Forward divides the work by blocks of queries. Backward divides a sequence into equal blocks of queries and keys
//! and takes the pairs (query block a, key block b) diagonal by diagonal, a - b = 0, 1, 2, ...: no two pairs of a
//! diagonal share a block, so they run at once, each row of dq, dk and dv has one writer, and the order of its sum is
//! that of the diagonals, for any number of threads.
//!
//! # Example
//! ```
//! use ballast_kernels::{Scratch, attention};
//!
//! let dims = attention::Dims { heads: 1, kv_heads: 1, head_dim: 1, value_dim: 1 };
//! let (options, tokens) = (attention::Options::default(), 2);
//! // Queries of zero see all their keys alike.
//! let (q, k, v) = ([0.0f32, 0.0], [1.0, -1.0], [2.0, 4.0]);
//! let input =
//!     attention::Input { q: &q, k: &k, v: &v, sinks: None, selected: None, cu_seqlens: &[0, tokens] };
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
use crate::packing::check_cu_seqlens;

/// Heads and widths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dims {
    /// Heads of q and the output; a multiple of `kv_heads`.
    pub heads: usize,
    /// Heads of k and v.
    pub kv_heads: usize,
    /// hd: width of q and k, at most 512.
    pub head_dim: usize,
    /// vd: width of v and the output, at most 512.
    pub value_dim: usize,
}

impl Dims {
    /// Query heads that share a kv head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }
}

/// Settings of the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Options {
    /// s; `None` is hd^-1/2.
    pub scale: Option<f32>,
    /// W: query i sees i - W < j <= i.
    pub window: Option<usize>,
    /// x becomes cap tanh(x/cap).
    pub soft_cap: Option<f32>,
    /// What the scaled product is rounded to.
    pub qk_product: Rounding,
    /// What maximum, exp and sum of the softmax run in.
    pub logits: Rounding,
}

impl Options {
    pub(crate) fn scale(&self, dims: Dims) -> f32 {
        self.scale.unwrap_or((dims.head_dim as f32).powf(-0.5))
    }

    /// Keys that the query at `position` may see by mask and window.
    pub(crate) fn visible(&self, position: usize) -> std::ops::Range<usize> {
        let begin = self.window.map_or(0, |w| (position + 1).saturating_sub(w));
        begin..position + 1
    }
}

/// A slot of [`Selected`] that holds no key.
pub const UNUSED: u32 = u32::MAX;

/// The keys that each query may see, beside mask and window.
#[derive(Clone, Copy, Debug)]
pub struct Selected<'a> {
    /// [tokens, topk]: positions counted from the start of the sequence, each at most once per query; [`UNUSED`]
    /// slots anywhere
    pub keys: &'a [u32],
    /// Slots per query.
    pub topk: usize,
}

/// The inputs: `tokens` is the last entry of `cu_seqlens`.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a, T> {
    /// [tokens, heads, hd]
    pub q: &'a [T],
    /// [tokens, kv_heads, hd]
    pub k: &'a [T],
    /// [tokens, kv_heads, vd]
    pub v: &'a [T],
    /// `[heads]`: the extra logits
    pub sinks: Option<&'a [f32]>,
    /// `None`: all keys that mask and window allow
    pub selected: Option<Selected<'a>>,
    /// Where sequences begin and end: starts with 0, never falls.
    pub cu_seqlens: &'a [usize],
}

/// What forward keeps for backward, beside the inputs and o.
#[derive(Clone, Debug, Default)]
pub struct Saved {
    /// [tokens, heads]
    pub lse: Vec<f32>,
    /// [tokens, heads, 2]: m and l; empty unless `logits` is lowered
    pub max_sum: Vec<f32>,
}

impl Saved {
    /// Bytes of all fields.
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
        format!("{heads} query heads are not a multiple of {kv_heads} kv heads")
    })?;
    check((1..=512).contains(&head_dim) && (1..=512).contains(&value_dim), || {
        format!("heads of width {head_dim} and {value_dim}: between 1 and 512")
    })?;
    check(options.soft_cap.is_none_or(|cap| cap > 0.0), || "a soft cap must be above 0".into())
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
    check_shape("q", input.q, [tokens, dims.heads, dims.head_dim])?;
    check_shape("k", input.k, [tokens, dims.kv_heads, dims.head_dim])?;
    check_shape("v", input.v, [tokens, dims.kv_heads, dims.value_dim])?;
    check_extras(dims, input.sinks, input.selected, tokens)?;
    Ok(tokens)
}
