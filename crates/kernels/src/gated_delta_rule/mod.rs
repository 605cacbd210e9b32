//! Gated delta rule, computed in chunks, with the l2norm of q and k.
//!
//! One head, row vectors, state S [dk, dv], scale s (default dk^-1/2), r = 1/sqrt(sum x^2 + 1e-6):
//! ```text
//! token by token   S = e^g S;   d = beta (v - S^T k);   S = S + k d^T;   o = s S^T q
//! gates            g = -exp(A_log) softplus(a + dt_bias)      beta = sigmoid(b)
//! ```
//! A chunk of C tokens, with S the state before it:
//! ```text
//! G_i = sum_{m<=i} g_m      E_i = e^{G_i}      d_i = e^{G_C - G_i}      D_ij = e^{G_i - G_j}  for i >= j
//! L = stril(beta_i (k_i.k_j) D_ij)             P = tril((q_i.k_j) D_ij)
//! R = beta (V - E K S)                         Vn = (I + L)^-1 R          by forward substitution
//! O = s (E Q S + P Vn)                         S' = E_C S + K^T (d Vn)
//! ```
//! This is the usual form with U and W multiplied out, Vn = U - W S, so neither U and W nor the inverse is
//! computed. Backward, chunks in reverse order, with dS' the gradient of the state after the chunk:
//! ```text
//! dVn = s P^T dO + d (K dS')                   dR = (I + L)^-T dVn        by back substitution
//! dL  = -stril(dR Vn^T)                        dP = s tril(dO Vn^T)
//! X = V - E K S      dV = beta dR              M = -beta E dR             Y = s E dO
//! dbeta_i = <dR_i, X_i> + sum_j dL_ij (k_i.k_j) D_ij
//! H_ij = dL_ij D_ij beta_i                     N_ij = dP_ij D_ij
//! dQ = Y S^T + N K                             dK = M S^T + (H + H^T) K + N^T Q + d (Vn dS'^T)
//! dS = E_C dS' + K^T M + Q^T Y
//! dG_i = <M_i, (K S)_i> + <Y_i, (Q S)_i> + sum_j (H_ij k_i.k_j + N_ij q_i.k_j) - sum_j (H_ji k_j.k_i + N_ji q_j.k_i)
//!        - <K_i, d_i (Vn dS'^T)_i>             dG_C += E_C <S, dS'> + sum_i <K_i, d_i (Vn dS'^T)_i>
//! dg_t = sum of dG_i over i >= t in the chunk
//! l2norm: dx = r (dy - y <dy, y>)
//! ```
//! dL needs no inverse because A^T dA A^T = (A^T dVn)(A R)^T with A = (I + L)^-1. For g <= 0 all exponents are
//! <= 0. A g above 0 lets the state grow: chunks are then so small that it grows by at most e^2 in each
//! (growth.rs), and a g above 88 is an error. G is summed in f64, so a small decay next to a huge one keeps its
//! digits. A decay below 2^-100 counts as zero, and a g of minus infinity resets the state.
//!
//! Several value heads may share a key head (value head h uses key head h / (Hv/Hk)); q and k are not
//! repeated. A batch is a packing of sequences of equal length: all tensors are [tokens, heads, width] with
//! `cu_seqlens`.
//!
//! Saved for backward ([`Saved`]): the rstd of q and k, and the state before every `states_every`-th chunk.
//! Backward goes through such a segment of chunks twice: forward, to recompute its states, normalized q and
//! k, L, X and Vn in scratch, then in reverse.
//!
//! # Example
//! ```
//! use ballast_kernels::Scratch;
//! use ballast_kernels::gated_delta_rule as gdn;
//!
//! let dims = gdn::Dims { key_heads: 1, value_heads: 1, key_dim: 2, value_dim: 1 };
//! let options = gdn::Options { scale: Some(1.0), ..gdn::Options::default() };
//! // The first token stores 5 under the key (1, 0), the second reads it. In between, g halves the state.
//! let (q, k, v) = ([0.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 1.0], [5.0, 7.0]);
//! let gates = gdn::Gates::Given { g: &[0.0, 0.5f32.ln()], beta: &[1.0, 1.0] };
//! let input = gdn::Input { q: &q, k: &k, v: &v, gates, h0: None, cu_seqlens: &[0, 2] };
//! let forward = gdn::gated_delta_rule_forward_scratch(dims, &options);
//! let scratch = Scratch::new(forward.max(gdn::gated_delta_rule_backward_scratch(dims, &options)));
//!
//! let (mut o, mut saved) = ([0.0f32; 2], gdn::Saved::default());
//! let output = gdn::Output { o: &mut o, ht: None };
//! gdn::gated_delta_rule_forward(output, Some(&mut saved), &input, dims, &options, &scratch)?;
//! assert!((o[1] - 2.5).abs() < 1e-4);
//!
//! let (mut dq, mut dk, mut dv, mut dg, mut dbeta) = ([0.0; 4], [0.0; 4], [0.0; 2], [0.0; 2], [0.0; 2]);
//! let gates = gdn::GateGrads::Given { dg: &mut dg, dbeta: &mut dbeta };
//! let grads = gdn::Grads { dq: &mut dq, dk: &mut dk, dv: &mut dv, gates, dh0: None };
//! gdn::gated_delta_rule_backward(grads, &[0.0, 1.0], None, &input, &saved, dims, &options, &scratch)?;
//! assert!((dv[0] - 0.5).abs() < 1e-4 && (dg[1] - 2.5).abs() < 1e-4);
//! # Ok::<(), ballast_kernels::KernelError>(())
//! ```

mod backward;
mod chunk;
mod forward;
mod gates;
mod growth;
pub mod reference;
mod step;

#[cfg(test)]
mod tests;

pub use backward::{Grads, gated_delta_rule_backward, gated_delta_rule_backward_scratch};
pub use forward::{
    Output, gated_delta_rule_forward, gated_delta_rule_forward_into, gated_delta_rule_forward_scratch,
};
pub use gates::{GateGrads, Gates, RawGates, gates_backward, gates_forward};
pub use step::{gated_delta_rule_step, gated_delta_rule_step_scratch};

pub use crate::packing::check_cu_seqlens;

use crate::error::{Result, check, check_shape, elements};
use crate::{Element, Rounding};

/// Epsilon of the l2norm, inside the square root.
pub const L2NORM_EPS: f32 = 1e-6;

/// Number and width of heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dims {
    /// Hk: heads of q and k.
    pub key_heads: usize,
    /// Hv: heads of v, g, beta and the output; a multiple of Hk.
    pub value_heads: usize,
    /// dk: width of q and k.
    pub key_dim: usize,
    /// dv: width of v.
    pub value_dim: usize,
}

impl Dims {
    /// Value heads per key head.
    pub fn group(&self) -> usize {
        self.value_heads / self.key_heads
    }

    /// Number of elements of one head's state.
    pub fn state_len(&self) -> usize {
        self.key_dim * self.value_dim
    }
}

/// Place where q and k are normalized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum L2Norm {
    /// No normalization.
    Off,
    /// In the kernel, in f32, chunk by chunk; no copies of q and k are saved.
    Inside,
    /// Before the kernel, into copies in their storage type that are saved for backward, as frameworks
    /// without a fused kernel do. For comparison.
    Outside,
}

/// Settings of the kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// s: scale of q; `None` is dk^-1/2.
    pub scale: Option<f32>,
    /// Place where q and k are normalized.
    pub l2norm: L2Norm,
    /// Tokens per chunk, 1 to 256; affects speed, and the result by rounding only. Where g > 0 lets the state
    /// grow, chunks are smaller, and backward may need more scratch than planned.
    pub chunk: usize,
    /// Chunks per saved state. Backward recomputes the other states in scratch that grows with this number.
    /// With 4 chunks of 32 tokens and dk = 128, the saved states are as large as v in f32.
    pub states_every: usize,
    /// Rounding of the state after each chunk or step. For comparison; rounding has derivative 1.
    pub state: Rounding,
    /// Key heads to compute: the first one and their number; `None` for all. Results of other heads are left
    /// as they are, so a caller can hand on the states of some heads while others are computed.
    pub heads: Option<(usize, usize)>,
}

impl Options {
    /// Key heads to compute.
    fn heads(&self, dims: Dims) -> std::ops::Range<usize> {
        self.heads.map_or(0..dims.key_heads, |(first, count)| first..first + count)
    }
}

impl Default for Options {
    fn default() -> Options {
        Options {
            scale: None,
            l2norm: L2Norm::Inside,
            chunk: 32,
            states_every: 4,
            state: Rounding::F32,
            heads: None,
        }
    }
}

/// Inputs; `tokens` is the last entry of `cu_seqlens`.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a, T> {
    /// [tokens, Hk, dk]
    pub q: &'a [T],
    /// [tokens, Hk, dk]
    pub k: &'a [T],
    /// [tokens, Hv, dv]
    pub v: &'a [T],
    /// Decay g and step size beta
    pub gates: Gates<'a, T>,
    /// [sequences, Hv, dk, dv]: initial states; `None` is zero
    pub h0: Option<&'a [f32]>,
    /// Offsets of the sequences: starts with 0, never decreases. The state is reset at each boundary.
    pub cu_seqlens: &'a [usize],
}

/// Values that forward saves for backward, in addition to the inputs.
#[derive(Clone, Debug, Default)]
pub struct Saved<T> {
    /// [tokens, Hk], empty without l2norm
    pub q_rstd: Vec<f32>,
    /// [tokens, Hk], empty without l2norm
    pub k_rstd: Vec<f32>,
    /// [tokens, Hk, dk], only for [`L2Norm::Outside`]
    pub q_normalized: Vec<T>,
    /// [tokens, Hk, dk], only for [`L2Norm::Outside`]
    pub k_normalized: Vec<T>,
    /// [saved chunks, Hv, dk, dv]: the states before them
    pub states: Vec<f32>,
}

impl<T> Saved<T> {
    /// Size of all fields in bytes.
    pub fn bytes(&self) -> usize {
        let f32s = self.q_rstd.len() + self.k_rstd.len() + self.states.len();
        f32s * size_of::<f32>() + (self.q_normalized.len() + self.k_normalized.len()) * size_of::<T>()
    }
}

/// A [`Saved`] in memory of the caller, for forward to fill. Every slice has exactly the length of its shape.
pub struct SavedMut<'a, T> {
    /// [tokens, Hk], empty without l2norm
    pub q_rstd: &'a mut [f32],
    /// [tokens, Hk], empty without l2norm
    pub k_rstd: &'a mut [f32],
    /// [tokens, Hk, dk], only for [`L2Norm::Outside`]
    pub q_normalized: &'a mut [T],
    /// [tokens, Hk, dk], only for [`L2Norm::Outside`]
    pub k_normalized: &'a mut [T],
    /// [[`saved_states`], Hv, dk, dv]
    pub states: &'a mut [f32],
}

/// A [`Saved`] in memory of the caller, for backward to read.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)] // as in `Saved`
pub struct SavedRef<'a, T> {
    pub q_rstd: &'a [f32],
    pub k_rstd: &'a [f32],
    pub q_normalized: &'a [T],
    pub k_normalized: &'a [T],
    pub states: &'a [f32],
}

impl<'a, T> From<&'a Saved<T>> for SavedRef<'a, T> {
    fn from(saved: &'a Saved<T>) -> SavedRef<'a, T> {
        let Saved { q_rstd, k_rstd, q_normalized, k_normalized, states } = saved;
        SavedRef { q_rstd, k_rstd, q_normalized, k_normalized, states }
    }
}

/// Number of states that forward saves.
pub fn saved_states(cu_seqlens: &[usize], options: &Options) -> usize {
    cu_seqlens.windows(2).map(|w| kept_chunks(w[1] - w[0], options)).sum()
}

/// Bytes of a [`Saved`] that forward has filled.
pub fn saved_bytes<T: Element>(dims: Dims, options: &Options, cu_seqlens: &[usize]) -> usize {
    let tokens = cu_seqlens.last().copied().unwrap_or(0);
    let kept = saved_states(cu_seqlens, options);
    let rstd = if options.l2norm == L2Norm::Off { 0 } else { 2 * tokens * dims.key_heads };
    let copies =
        if options.l2norm == L2Norm::Outside { 2 * tokens * dims.key_heads * dims.key_dim } else { 0 };
    (rstd + kept * dims.value_heads * dims.state_len()) * size_of::<f32>() + copies * size_of::<T>()
}

/// Number of saved states of a sequence of `tokens` tokens.
fn kept_chunks(tokens: usize, options: &Options) -> usize {
    tokens.div_ceil(options.chunk).div_ceil(options.states_every)
}

/// Sequences to visit: those with tokens; with `states` all of them, because each has states to be written. The
/// others may be many times more than the tokens, and the heads of no tokens have no memory that bounds them.
fn visited(cu_seqlens: &[usize], states: bool) -> Vec<usize> {
    let visit = |s: &usize| states || cu_seqlens[*s] < cu_seqlens[s + 1];
    (0..cu_seqlens.len() - 1).filter(visit).collect()
}

/// Index of the first saved state of each sequence; the last entry is their number.
fn first_kept(cu_seqlens: &[usize], options: &Options) -> Vec<usize> {
    let mut first = vec![0];
    for w in cu_seqlens.windows(2) {
        first.push(first[first.len() - 1] + kept_chunks(w[1] - w[0], options));
    }
    first
}

fn check_dims(dims: Dims) -> Result {
    let Dims { key_heads, value_heads, key_dim, value_dim } = dims;
    check(key_heads > 0 && value_heads > 0 && value_heads.is_multiple_of(key_heads), || {
        format!("value heads must be a multiple of key heads, got {value_heads} and {key_heads}")
    })?;
    check(key_dim > 0 && value_dim > 0, || "key_dim and value_dim must be above 0".into())?;
    elements("state", [value_heads, key_dim, value_dim]).map(|_| ())
}

fn check_input<T: Element>(dims: Dims, options: &Options, input: &Input<'_, T>) -> Result<usize> {
    check_dims(dims)?;
    let Dims { key_heads, value_heads, key_dim, value_dim } = dims;
    check((1..=256).contains(&options.chunk), || format!("chunk must be 1 to 256, got {}", options.chunk))?;
    check(options.states_every > 0, || "states_every must be 1 or more, got 0".into())?;
    if let Some((first, count)) = options.heads {
        check(first.checked_add(count).is_some_and(|end| end <= key_heads), || {
            format!("heads {first} + {count} are outside the {key_heads} key heads")
        })?;
    }
    let tokens = check_cu_seqlens(input.cu_seqlens)?;
    check_shape("q", input.q, [tokens, key_heads, key_dim])?;
    check_shape("k", input.k, [tokens, key_heads, key_dim])?;
    check_shape("v", input.v, [tokens, value_heads, value_dim])?;
    input.gates.check(tokens, dims)?;
    if let Some(h0) = input.h0 {
        check_shape("h0", h0, [input.cu_seqlens.len() - 1, value_heads, key_dim, value_dim])?;
    }
    Ok(tokens)
}
