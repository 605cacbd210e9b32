//! The gated delta rule: forward, backward, and token by token.

use ballast_kernels::gated_delta_rule::{
    self as gdn, Dims, GateGrads, Gates, Grads, Input, L2Norm, Options, Output, SavedMut, SavedRef,
};
use pyo3::prelude::*;

use super::arguments::{Arguments, Tensor, shape, with_dtype};
use super::packing::offsets;
use super::threads;
use crate::errors::UsageError;

fn dims(q: &Tensor<'_>, v: &Tensor<'_>) -> PyResult<(usize, usize, Dims)> {
    let [batch, tokens, key_heads, key_dim] = shape("q", q)?;
    let [_, _, value_heads, value_dim] = shape("v", v)?;
    Ok((batch, tokens, Dims { key_heads, value_heads, key_dim, value_dim }))
}

fn options(scale: f32, l2norm: bool, chunk: usize) -> Options {
    let l2norm = if l2norm { L2Norm::Inside } else { L2Norm::Off };
    Options { scale: Some(scale), l2norm, chunk, ..Options::default() }
}

/// Number of values in the states that forward saves; the tensor of `found` values may be larger.
fn states_len(cu_seqlens: &[usize], dims: Dims, options: &Options, found: usize) -> PyResult<usize> {
    // A chunk out of range is an error of the kernel.
    let saved = if options.chunk == 0 { 0 } else { gdn::saved_states(cu_seqlens, options) };
    let state = dims.key_dim.checked_mul(dims.value_dim);
    let heads = saved.checked_mul(dims.value_heads);
    match heads.zip(state).and_then(|(heads, state)| heads.checked_mul(state)) {
        Some(len) if len <= found => Ok(len),
        _ => Err(UsageError::new_err(format!("states must have {saved} states, got {found} values"))),
    }
}

/// o [B, T, Hv, dv] and, which are empty unless wanted, ht [N, Hv, dk, dv] and the saved values.
#[pyfunction]
pub fn gated_delta_rule_forward(
    py: Python<'_>,
    o: &Tensor<'_>,
    ht: &Tensor<'_>,
    q_rstd: &Tensor<'_>,
    k_rstd: &Tensor<'_>,
    states: &Tensor<'_>,
    q: &Tensor<'_>,
    k: &Tensor<'_>,
    v: &Tensor<'_>,
    g: &Tensor<'_>,
    beta: &Tensor<'_>,
    h0: Option<&Tensor<'_>>,
    cu_seqlens: Option<&Tensor<'_>>,
    scale: f32,
    l2norm: bool,
    chunk: usize,
    threads: usize,
) -> PyResult<()> {
    let (batch, tokens, dims) = dims(q, v)?;
    let options = options(scale, l2norm, chunk);
    let mut arguments = Arguments::default();
    let cu_seqlens = offsets(&mut arguments, cu_seqlens, batch, tokens)?;
    let gates = (arguments.input("g", g)?, arguments.input("beta", beta)?);
    let h0 = arguments.optional("initial_state", h0)?;
    let ht = arguments.optional_output("final_state", ht)?;
    let (q_rstd, k_rstd) = (arguments.output("q_rstd", q_rstd)?, arguments.output("k_rstd", k_rstd)?);
    let states = arguments.optional_output::<f32>("states", states)?;
    with_dtype!("q", q, T => {
        let input = Input {
            q: arguments.input::<T>("q", q)?,
            k: arguments.input("k", k)?,
            v: arguments.input("v", v)?,
            gates: Gates::Given { g: gates.0, beta: gates.1 },
            h0,
            cu_seqlens: &cu_seqlens,
        };
        let output = Output { o: arguments.output("o", o)?, ht };
        let saved = match states {
            Some(states) => {
                let len = states_len(&cu_seqlens, dims, &options, states.len())?;
                let (states, unused) = states.split_at_mut(len);
                unused.fill(0.0);
                Some(SavedMut { q_rstd, k_rstd, q_normalized: &mut [], k_normalized: &mut [], states })
            }
            None => None,
        };
        threads::run(py, threads, |scratch| {
            match saved {
                Some(saved) => {
                    gdn::gated_delta_rule_forward_into(output, saved, &input, dims, &options, scratch)
                }
                None => gdn::gated_delta_rule_forward(output, None, &input, dims, &options, scratch),
            }
        })
    })
}

/// Gradients of all inputs, with the shapes of their tensors, from d_o and dht.
#[pyfunction]
pub fn gated_delta_rule_backward(
    py: Python<'_>,
    dq: &Tensor<'_>,
    dk: &Tensor<'_>,
    dv: &Tensor<'_>,
    dg: &Tensor<'_>,
    dbeta: &Tensor<'_>,
    dh0: &Tensor<'_>,
    d_o: &Tensor<'_>,
    dht: Option<&Tensor<'_>>,
    q_rstd: &Tensor<'_>,
    k_rstd: &Tensor<'_>,
    states: &Tensor<'_>,
    q: &Tensor<'_>,
    k: &Tensor<'_>,
    v: &Tensor<'_>,
    g: &Tensor<'_>,
    beta: &Tensor<'_>,
    h0: Option<&Tensor<'_>>,
    cu_seqlens: Option<&Tensor<'_>>,
    scale: f32,
    l2norm: bool,
    chunk: usize,
    threads: usize,
) -> PyResult<()> {
    let (batch, tokens, dims) = dims(q, v)?;
    let options = options(scale, l2norm, chunk);
    let mut arguments = Arguments::default();
    let cu_seqlens = offsets(&mut arguments, cu_seqlens, batch, tokens)?;
    let gates = (arguments.input("g", g)?, arguments.input("beta", beta)?);
    let h0 = arguments.optional("initial_state", h0)?;
    let dht = arguments.optional_gradient("dht", dht)?;
    let (q_rstd, k_rstd) = (arguments.input("q_rstd", q_rstd)?, arguments.input("k_rstd", k_rstd)?);
    let states: &[f32] = arguments.input("states", states)?;
    let states = &states[..states_len(&cu_seqlens, dims, &options, states.len())?];
    let dgates = (arguments.output("dg", dg)?, arguments.output("dbeta", dbeta)?);
    let dh0 = arguments.optional_output("dh0", dh0)?;
    with_dtype!("q", q, T => {
        let input = Input {
            q: arguments.input::<T>("q", q)?,
            k: arguments.input("k", k)?,
            v: arguments.input("v", v)?,
            gates: Gates::Given { g: gates.0, beta: gates.1 },
            h0,
            cu_seqlens: &cu_seqlens,
        };
        let d_o = arguments.input("do", d_o)?;
        let grads = Grads {
            dq: arguments.output("dq", dq)?,
            dk: arguments.output("dk", dk)?,
            dv: arguments.output("dv", dv)?,
            gates: GateGrads::Given { dg: dgates.0, dbeta: dgates.1 },
            dh0,
        };
        let saved = SavedRef { q_rstd, k_rstd, q_normalized: &[], k_normalized: &[], states };
        threads::run(py, threads, |scratch| {
            gdn::gated_delta_rule_backward(grads, d_o, dht, &input, saved, dims, &options, scratch)
        })
    })
}

/// o [B, T, Hv, dv], token by token; ht [N, Hv, dk, dv], which starts as the initial state, is updated.
#[pyfunction]
pub fn gated_delta_rule_steps(
    py: Python<'_>,
    o: &Tensor<'_>,
    ht: &Tensor<'_>,
    q: &Tensor<'_>,
    k: &Tensor<'_>,
    v: &Tensor<'_>,
    g: &Tensor<'_>,
    beta: &Tensor<'_>,
    cu_seqlens: Option<&Tensor<'_>>,
    scale: f32,
    l2norm: bool,
    threads: usize,
) -> PyResult<()> {
    let (batch, tokens, dims) = dims(q, v)?;
    let options = options(scale, l2norm, 1);
    let mut arguments = Arguments::default();
    let cu_seqlens = offsets(&mut arguments, cu_seqlens, batch, tokens)?;
    let (g, beta) = (arguments.input::<f32>("g", g)?, arguments.input::<f32>("beta", beta)?);
    let state = arguments.output::<f32>("state", ht)?;
    let Dims { key_heads, value_heads, key_dim, value_dim } = dims;
    let all = batch * tokens;
    let state_len = key_dim.saturating_mul(value_heads * value_dim);
    // Every token is a row of each slice, and every sequence has a state.
    let (key, value) = (key_heads * key_dim, value_heads * value_dim);
    for (name, tensor, width) in [("o", o, value), ("q", q, key), ("k", k, key), ("v", v, value)] {
        check_len(name, tensor.call_method0("numel")?.extract()?, all * width)?;
    }
    check_len("g", g.len(), all * value_heads)?;
    check_len("beta", beta.len(), all * value_heads)?;
    check_len("state", state.len(), state_len.saturating_mul(cu_seqlens.len() - 1))?;
    with_dtype!("q", q, T => {
        let o = arguments.output::<T>("o", o)?;
        let (q, k) = (arguments.input::<T>("q", q)?, arguments.input::<T>("k", k)?);
        let v = arguments.input::<T>("v", v)?;
        threads::run(py, threads, |scratch| {
            for (sequence, bounds) in cu_seqlens.windows(2).enumerate() {
                let state = &mut state[sequence * state_len..][..state_len];
                for t in bounds[0]..bounds[1] {
                    let (key, value) = (t * key..(t + 1) * key, t * value..(t + 1) * value);
                    let gate = t * value_heads..(t + 1) * value_heads;
                    gdn::gated_delta_rule_step(
                        &mut o[value.clone()],
                        state,
                        &q[key.clone()],
                        &k[key],
                        &v[value],
                        &g[gate.clone()],
                        &beta[gate],
                        dims,
                        &options,
                        scratch,
                    )?;
                }
            }
            Ok(())
        })
    })
}

fn check_len(name: &str, found: usize, expected: usize) -> PyResult<()> {
    if found == expected {
        return Ok(());
    }
    Err(UsageError::new_err(format!("{name} must have {expected} elements, got {found}")))
}
