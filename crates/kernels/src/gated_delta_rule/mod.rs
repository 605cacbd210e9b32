//! The gated delta rule, with the l2norm of q and k inside.
//!
//! One head, row vectors, S [dk, dv] the state, s the scale (dk^-1/2 unless given), r = 1/sqrt(sum x^2 + 1e-6):
//! ```text
//! token by token   S = e^g S;   d = beta (v - S^T k);   S = S + k d^T;   o = s S^T q
//! gates            g = -exp(A_log) softplus(a + dt_bias)      beta = sigmoid(b)
//! ```
//! A chunk of C tokens at once, S the state that enters it:
//! ```text
//! G_i = sum_{m<=i} g_m      E_i = e^{G_i}      d_i = e^{G_C - G_i}      D_ij = e^{G_i - G_j}  for i >= j
//! L = stril(beta_i (k_i.k_j) D_ij)             P = tril((q_i.k_j) D_ij)
//! R = beta (V - E K S)                         Vn = (I + L)^-1 R          by forward substitution
//! O = s (E Q S + P Vn)                         S' = E_C S + K^T (d Vn)
//! ```
//! which is the usual form with U and W multiplied out: Vn = U - W S, so neither is needed, nor the inverse.
//! Backward, chunks in reverse, dS' the gradient of the state that leaves the chunk:
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
//! dL needs no inverse because A^T dA A^T = (A^T dVn)(A R)^T with A = (I + L)^-1. All exponents are <= 0 and are taken
//! after the mask; G is summed in f64, so that a small decay beside a huge one keeps its digits.
//!
//! Several value heads may share a key head (value head h uses key head h / (Hv/Hk)); q and k are never repeated. A
//! batch is a packing of sequences of equal length: everything is [tokens, heads, width] with `cu_seqlens`.
//!
//! Kept for backward ([`Saved`]): the rstd of q and k, and the state at every `states_every`-th chunk. Backward goes
//! through such a segment of chunks twice: forth, to make its states, normalised q and k, L, X and Vn anew in scratch,
//! and back.
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
pub mod reference;
mod step;

#[cfg(test)]
mod tests;

pub use backward::{Grads, gated_delta_rule_backward, gated_delta_rule_backward_scratch};
pub use forward::{Output, gated_delta_rule_forward, gated_delta_rule_forward_scratch};
pub use gates::{GateGrads, Gates, RawGates, gates_backward, gates_forward};
pub use step::{gated_delta_rule_step, gated_delta_rule_step_scratch};

pub use crate::packing::check_cu_seqlens;

use crate::error::{Result, check, check_shape};
use crate::{Element, Rounding};

/// Inside the root of the l2norm.
pub const L2NORM_EPS: f32 = 1e-6;

/// Heads and widths.
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
    /// Value heads that share a key head.
    pub fn group(&self) -> usize {
        self.value_heads / self.key_heads
    }

    /// Elements of one head's state.
    pub fn state_len(&self) -> usize {
        self.key_dim * self.value_dim
    }
}

/// Where q and k are normalised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum L2Norm {
    /// They are taken as they are.
    Off,
    /// In the kernel, in f32, chunk by chunk: nothing of their size is kept.
    Inside,
    /// Before the kernel, into copies of their own storage type that are kept for backward: what frameworks do
    /// without a fused kernel. For comparison.
    Outside,
}

/// Settings of the kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// s; `None` is dk^-1/2.
    pub scale: Option<f32>,
    /// Where q and k are normalised.
    pub l2norm: L2Norm,
    /// Tokens per chunk, 1 to 256: a tuning choice, the result differs by rounding only.
    pub chunk: usize,
    /// Backward keeps the state of every so many chunks and makes the others anew, in scratch that grows with it: 4 chunks of
    /// 32 tokens with dk = 128 keep as much as v has, in f32.
    pub states_every: usize,
    /// What the state is rounded to each time that a chunk, or a step, hands it on. For comparison; rounding has derivative
    /// 1.
    pub state: Rounding,
}

impl Default for Options {
    fn default() -> Options {
        Options { scale: None, l2norm: L2Norm::Inside, chunk: 32, states_every: 4, state: Rounding::F32 }
    }
}

/// The inputs: `tokens` is the last entry of `cu_seqlens`.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a, T> {
    /// [tokens, Hk, dk]
    pub q: &'a [T],
    /// [tokens, Hk, dk]
    pub k: &'a [T],
    /// [tokens, Hv, dv]
    pub v: &'a [T],
    /// The decay and the step
    pub gates: Gates<'a, T>,
    /// [sequences, Hv, dk, dv]; `None` is zero
    pub h0: Option<&'a [f32]>,
    /// Where sequences begin and end: starts with 0, never falls; state is reset at each boundary.
    pub cu_seqlens: &'a [usize],
}

/// What forward keeps for backward, beside the inputs themselves.
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
    /// [kept chunks, Hv, dk, dv]: the states that enter them
    pub states: Vec<f32>,
}

impl<T> Saved<T> {
    /// Bytes of all fields.
    pub fn bytes(&self) -> usize {
        let f32s = self.q_rstd.len() + self.k_rstd.len() + self.states.len();
        f32s * size_of::<f32>() + (self.q_normalized.len() + self.k_normalized.len()) * size_of::<T>()
    }
}

/// Bytes of a [`Saved`] that forward has filled.
pub fn saved_bytes<T: Element>(dims: Dims, options: &Options, cu_seqlens: &[usize]) -> usize {
    let tokens = cu_seqlens.last().copied().unwrap_or(0);
    let kept: usize = cu_seqlens.windows(2).map(|w| kept_chunks(w[1] - w[0], options)).sum();
    let rstd = if options.l2norm == L2Norm::Off { 0 } else { 2 * tokens * dims.key_heads };
    let copies =
        if options.l2norm == L2Norm::Outside { 2 * tokens * dims.key_heads * dims.key_dim } else { 0 };
    (rstd + kept * dims.value_heads * dims.state_len()) * size_of::<f32>() + copies * size_of::<T>()
}

/// States that are kept of a sequence of `tokens` tokens.
fn kept_chunks(tokens: usize, options: &Options) -> usize {
    tokens.div_ceil(options.chunk).div_ceil(options.states_every)
}

/// Where the kept states of each sequence begin, and at the end how many there are.
fn first_kept(cu_seqlens: &[usize], options: &Options) -> Vec<usize> {
    let mut first = vec![0];
    for w in cu_seqlens.windows(2) {
        first.push(first[first.len() - 1] + kept_chunks(w[1] - w[0], options));
    }
    first
}

fn check_input<T: Element>(dims: Dims, options: &Options, input: &Input<'_, T>) -> Result<usize> {
    let Dims { key_heads, value_heads, key_dim, value_dim } = dims;
    check(key_heads > 0 && value_heads > 0 && value_heads.is_multiple_of(key_heads), || {
        format!("{value_heads} value heads are not a multiple of {key_heads} key heads")
    })?;
    check(key_dim > 0 && value_dim > 0, || "heads of width 0".into())?;
    check((1..=256).contains(&options.chunk), || format!("chunk {}: between 1 and 256", options.chunk))?;
    check(options.states_every > 0, || "states_every 0: at least 1".into())?;
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
