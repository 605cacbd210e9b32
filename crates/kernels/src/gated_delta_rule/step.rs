//! Decode step: the delta rule for one token, on a state that the caller owns.

use rayon::prelude::*;

use super::chunk::{l2_rstd, scale};
use super::{Dims, L2Norm, Options, check_dims};
use crate::error::{Result, check_len, check_shape};
use crate::simd::{axpy, scale_into};
use crate::{Element, Scratch};

/// Number of f32 of one scratch slot of [`gated_delta_rule_step`].
pub fn gated_delta_rule_step_scratch(dims: Dims) -> usize {
    2 * dims.key_heads * dims.key_dim + dims.value_heads * dims.value_dim * 2
}

/// o [Hv, dv] of one token with q, k [Hk, dk], v [Hv, dv], g, beta `[Hv]`; `state` [Hv, dk, dv] is updated.
///
/// ```
/// use ballast_kernels::Scratch;
/// use ballast_kernels::gated_delta_rule as gdn;
///
/// let dims = gdn::Dims { key_heads: 1, value_heads: 1, key_dim: 2, value_dim: 1 };
/// let options = gdn::Options { scale: Some(1.0), ..gdn::Options::default() };
/// let scratch = Scratch::new(gdn::gated_delta_rule_step_scratch(dims));
/// let (mut o, mut state, g, beta) = ([0.0f32], [0.0; 2], [0.0], [1.0]);
/// // Store 5 under the key (1, 0), then 7 under (0, 1) while the first is read.
/// for (q, k, v) in [([1.0, 0.0], [1.0, 0.0], [5.0]), ([1.0, 0.0], [0.0, 1.0], [7.0])] {
///     gdn::gated_delta_rule_step(&mut o, &mut state, &q, &k, &v, &g, &beta, dims, &options, &scratch)?;
///     assert!((o[0] - 5.0).abs() < 1e-4);
/// }
/// # Ok::<(), ballast_kernels::KernelError>(())
/// ```
pub fn gated_delta_rule_step<T: Element>(
    o: &mut [T],
    state: &mut [f32],
    q: &[T],
    k: &[T],
    v: &[T],
    g: &[f32],
    beta: &[f32],
    dims: Dims,
    options: &Options,
    scratch: &Scratch,
) -> Result {
    check_dims(dims)?;
    let Dims { key_heads, value_heads, key_dim: dk, value_dim: dv } = dims;
    check_shape("o", o, [value_heads, dv])?;
    check_shape("state", state, [value_heads, dk, dv])?;
    check_shape("q", q, [key_heads, dk])?;
    check_shape("k", k, [key_heads, dk])?;
    check_shape("v", v, [value_heads, dv])?;
    check_len("g", g, value_heads)?;
    check_len("beta", beta, value_heads)?;
    scratch.with(gated_delta_rule_step_scratch(dims), |slot| {
        step(o, state, q, k, v, g, beta, dims, options, slot);
    });
    Ok(())
}

fn step<T: Element>(
    o: &mut [T],
    state: &mut [f32],
    q: &[T],
    k: &[T],
    v: &[T],
    g: &[f32],
    beta: &[f32],
    dims: Dims,
    options: &Options,
    slot: &mut [f32],
) {
    let Dims { key_heads, key_dim: dk, value_dim: dv, .. } = dims;
    let s = options.scale.unwrap_or((dk as f32).powf(-0.5));
    let (qk, rest) = slot.split_at_mut(2 * key_heads * dk);
    let (q_wide, k_wide) = qk.split_at_mut(key_heads * dk);
    T::load(q_wide, q);
    T::load(k_wide, k);
    if options.l2norm != L2Norm::Off {
        for row in q_wide.chunks_mut(dk).chain(k_wide.chunks_mut(dk)) {
            let r = l2_rstd(row);
            scale(row, r);
        }
    }
    let (q_wide, k_wide) = (&*q_wide, &*k_wide);
    let heads =
        o.par_chunks_mut(dv).zip(state.par_chunks_mut(dk * dv)).zip(rest.par_chunks_mut(2 * dv)).enumerate();
    heads.with_min_len(4).for_each(|(h, ((o, state), work))| {
        let key = h / dims.group() * dk..(h / dims.group() + 1) * dk;
        let (q, k) = (&q_wide[key.clone()], &k_wide[key]);
        let (delta, out) = work.split_at_mut(dv);
        let decay = g[h].exp();
        // delta = beta (v - S^T k); S is decayed row by row in the same loop
        T::load(delta, &v[h * dv..(h + 1) * dv]);
        for (row, k) in state.chunks_mut(dv).zip(k) {
            scale(row, decay);
            axpy(delta, -k, row);
        }
        scale(delta, beta[h]);
        out.fill(0.0);
        for ((row, k), q) in state.chunks_mut(dv).zip(k).zip(q) {
            axpy(row, *k, delta);
            axpy(out, *q, row);
        }
        scale_into(delta, s, out);
        T::store(o, delta);
        options.state.round_all(state);
    });
}
