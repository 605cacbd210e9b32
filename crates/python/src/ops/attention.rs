//! Causal softmax attention with f32 logits.

use ballast_kernels::attention::{self, Dims, Grads, Input, Options, Saved, Selected, UNUSED};
use ballast_kernels::scratch::workspace;
use pyo3::prelude::*;

use super::arguments::{Arguments, Tensor, copy, shape, with_dtype};
use super::packing::offsets;
use super::threads;
use crate::errors::UsageError;

fn dims(q: &Tensor<'_>, v: &Tensor<'_>) -> PyResult<(usize, usize, Dims)> {
    let [batch, tokens, heads, head_dim] = shape("q", q)?;
    let [_, _, kv_heads, value_dim] = shape("v", v)?;
    Ok((batch, tokens, Dims { heads, kv_heads, head_dim, value_dim }))
}

pub(super) fn options(scale: f32, window: Option<usize>, soft_cap: Option<f32>) -> Options {
    Options { scale: Some(scale), window, soft_cap, ..Options::default() }
}

/// Selected keys of each query, [B, T, topk]: positions in its sequence.
pub(super) fn selected_keys<'a>(
    arguments: &mut Arguments,
    tensor: Option<&'a Tensor<'_>>,
    cu_seqlens: &[usize],
) -> PyResult<Option<Selected<'a>>> {
    let Some(tensor) = tensor else { return Ok(None) };
    let [_, _, topk] = shape("selected", tensor)?;
    let keys = arguments.input("selected", tensor)?;
    check_keys(keys, topk, cu_seqlens)?;
    Ok(Some(Selected { keys, topk }))
}

/// Returns an error unless every query lists distinct positions of its own sequence.
fn check_keys(keys: &[u32], topk: usize, cu_seqlens: &[usize]) -> PyResult<()> {
    let mut sorted: Vec<u32> = Vec::new();
    for bounds in cu_seqlens.windows(2).filter(|_| topk > 0) {
        let tokens = bounds[1] - bounds[0];
        // A list of another length is an error of the kernel.
        let rows = keys.chunks_exact(topk).enumerate().skip(bounds[0]).take(tokens);
        for (token, row) in rows {
            if let Some(key) = row.iter().find(|key| **key != UNUSED && **key as usize >= tokens) {
                return Err(UsageError::new_err(format!(
                    "selected has the key {} for token {token}, but positions in its sequence are 0 to {}, \
                     and -1 is an unused slot",
                    *key as i32,
                    tokens - 1
                )));
            }
            sorted.clear();
            sorted.extend(row.iter().filter(|key| **key != UNUSED));
            sorted.sort_unstable();
            if let Some(twice) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
                return Err(UsageError::new_err(format!(
                    "selected has the key {} for token {token} twice",
                    twice[0]
                )));
            }
        }
    }
    Ok(())
}

/// o [B, T, heads, vd] and lse [B, T, heads].
#[pyfunction]
pub fn attention_forward(
    py: Python<'_>,
    o: &Tensor<'_>,
    lse: &Tensor<'_>,
    q: &Tensor<'_>,
    k: &Tensor<'_>,
    v: &Tensor<'_>,
    sinks: Option<&Tensor<'_>>,
    selected: Option<&Tensor<'_>>,
    cu_seqlens: Option<&Tensor<'_>>,
    scale: f32,
    window: Option<usize>,
    soft_cap: Option<f32>,
    threads: usize,
) -> PyResult<()> {
    let (batch, tokens, dims) = dims(q, v)?;
    let options = options(scale, window, soft_cap);
    let mut arguments = Arguments::default();
    let cu_seqlens = offsets(&mut arguments, cu_seqlens, batch, tokens)?;
    let sinks = arguments.optional("sinks", sinks)?;
    let selected = selected_keys(&mut arguments, selected, &cu_seqlens)?;
    let lse: &mut [f32] = arguments.output("lse", lse)?;
    with_dtype!("q", q, T => {
        let (q, k) = (arguments.input::<T>("q", q)?, arguments.input("k", k)?);
        let v = arguments.input("v", v)?;
        let input = Input { q, k, v, sinks, selected, before: 0, cu_seqlens: &cu_seqlens };
        let o = arguments.output("o", o)?;
        threads::run(py, threads, |scratch| {
            let mut saved = Saved::default();
            attention::attention_forward(o, Some(&mut saved), &input, dims, &options, scratch)?;
            copy("lse", lse, &saved.lse)
        })
    })
}

/// Gradients: dq, dk and dv are written, dsinks in f32 is added to.
#[pyfunction]
pub fn attention_backward(
    py: Python<'_>,
    dq: &Tensor<'_>,
    dk: &Tensor<'_>,
    dv: &Tensor<'_>,
    dsinks: &Tensor<'_>,
    d_o: &Tensor<'_>,
    o: &Tensor<'_>,
    lse: &Tensor<'_>,
    q: &Tensor<'_>,
    k: &Tensor<'_>,
    v: &Tensor<'_>,
    sinks: Option<&Tensor<'_>>,
    selected: Option<&Tensor<'_>>,
    cu_seqlens: Option<&Tensor<'_>>,
    scale: f32,
    window: Option<usize>,
    soft_cap: Option<f32>,
    threads: usize,
) -> PyResult<()> {
    let (batch, tokens, dims) = dims(q, v)?;
    let options = options(scale, window, soft_cap);
    let mut arguments = Arguments::default();
    let cu_seqlens = offsets(&mut arguments, cu_seqlens, batch, tokens)?;
    let sinks = arguments.optional("sinks", sinks)?;
    let selected = selected_keys(&mut arguments, selected, &cu_seqlens)?;
    let saved = Saved { lse: arguments.input("lse", lse)?.to_vec(), max_sum: Vec::new() };
    let dsinks = sinks.map(|_| arguments.output("dsinks", dsinks)).transpose()?;
    with_dtype!("q", q, T => {
        let (q, k) = (arguments.input::<T>("q", q)?, arguments.input("k", k)?);
        let v = arguments.input("v", v)?;
        let input = Input { q, k, v, sinks, selected, before: 0, cu_seqlens: &cu_seqlens };
        let (d_o, o) = (arguments.input("do", d_o)?, arguments.input("o", o)?);
        let grads = Grads::<T> {
            dq: arguments.output("dq", dq)?,
            dk: arguments.output("dk", dk)?,
            dv: arguments.output("dv", dv)?,
            dsinks,
        };
        threads::run(py, threads, |scratch| {
            let keys = cu_seqlens[cu_seqlens.len() - 1];
            let mut workspace = workspace(attention::attention_backward_workspace::<T>(dims, keys))?;
            attention::attention_backward(
                grads, d_o, o, &input, &saved, dims, &options, &mut workspace, scratch,
            )
        })
    })
}
