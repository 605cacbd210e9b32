//! Causal softmax attention with f32 logits.

use ballast_kernels::attention::{self, Dims, Grads, Input, Options, Saved, Selected};
use pyo3::prelude::*;

use super::arguments::{Arguments, Tensor, shape, with_dtype};
use super::packing::offsets;
use super::threads;

fn dims(q: &Tensor<'_>, v: &Tensor<'_>) -> PyResult<(usize, usize, Dims)> {
    let [batch, tokens, heads, head_dim] = shape("q", q)?;
    let [_, _, kv_heads, value_dim] = shape("v", v)?;
    Ok((batch, tokens, Dims { heads, kv_heads, head_dim, value_dim }))
}

/// Settings of the attention: scale, window and soft cap.
pub(super) type Settings = (f32, Option<usize>, Option<f32>);

pub(super) fn options((scale, window, soft_cap): Settings) -> Options {
    Options { scale: Some(scale), window, soft_cap, ..Options::default() }
}

/// Keys that are selected for each query, [B, T, topk].
pub(super) fn selected<'a>(
    arguments: &mut Arguments,
    tensor: Option<&'a Tensor<'_>>,
) -> PyResult<Option<Selected<'a>>> {
    let Some(tensor) = tensor else { return Ok(None) };
    let [_, _, topk] = shape("selected", tensor)?;
    Ok(Some(Selected { keys: arguments.input("selected", tensor)?, topk }))
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
    selected_keys: Option<&Tensor<'_>>,
    cu_seqlens: Option<&Tensor<'_>>,
    settings: Settings,
    threads: usize,
) -> PyResult<()> {
    let (batch, tokens, dims) = dims(q, v)?;
    let options = options(settings);
    let mut arguments = Arguments::default();
    let cu_seqlens = offsets(&mut arguments, cu_seqlens, batch, tokens)?;
    let sinks = arguments.optional("sinks", sinks)?;
    let selected = selected(&mut arguments, selected_keys)?;
    let lse: &mut [f32] = arguments.output("lse", lse)?;
    with_dtype!("q", q, T => {
        let (q, k) = (arguments.input::<T>("q", q)?, arguments.input("k", k)?);
        let v = arguments.input("v", v)?;
        let input = Input { q, k, v, sinks, selected, before: 0, cu_seqlens: &cu_seqlens };
        let o = arguments.output("o", o)?;
        threads::run(py, threads, |scratch| {
            let mut saved = Saved::default();
            attention::attention_forward(o, Some(&mut saved), &input, dims, &options, scratch)?;
            if lse.len() != saved.lse.len() {
                let (name, expected, found) = ("lse", saved.lse.len(), lse.len());
                return Err(ballast_kernels::KernelError::Length { name, expected, found });
            }
            lse.copy_from_slice(&saved.lse);
            Ok(())
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
    dsinks: Option<&Tensor<'_>>,
    d_o: &Tensor<'_>,
    o: &Tensor<'_>,
    lse: &Tensor<'_>,
    q: &Tensor<'_>,
    k: &Tensor<'_>,
    v: &Tensor<'_>,
    sinks: Option<&Tensor<'_>>,
    selected_keys: Option<&Tensor<'_>>,
    cu_seqlens: Option<&Tensor<'_>>,
    settings: Settings,
    threads: usize,
) -> PyResult<()> {
    let (batch, tokens, dims) = dims(q, v)?;
    let options = options(settings);
    let mut arguments = Arguments::default();
    let cu_seqlens = offsets(&mut arguments, cu_seqlens, batch, tokens)?;
    let sinks = arguments.optional("sinks", sinks)?;
    let selected = selected(&mut arguments, selected_keys)?;
    let saved = Saved { lse: arguments.input("lse", lse)?.to_vec(), max_sum: Vec::new() };
    let dsinks = arguments.optional_output("dsinks", dsinks)?;
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
            let mut workspace = vec![0.0; attention::attention_backward_workspace::<T>(dims, keys)];
            attention::attention_backward(
                grads, d_o, o, &input, &saved, dims, &options, &mut workspace, scratch,
            )
        })
    })
}
