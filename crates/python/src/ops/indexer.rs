//! The sparse-attention indexer: selection of keys, and its loss.

use ballast_kernels::attention::{self, Saved};
use ballast_kernels::indexer::{self, Dims, Grads, Input, Options, Target};
use ballast_kernels::scratch::workspace;
use pyo3::prelude::*;

use super::arguments::{Arguments, Tensor, copy, shape, with_dtype};
use super::attention::{options as attention_options, selected_keys};
use super::packing::offsets;
use super::threads;
use crate::errors::UsageError;

fn dims(q: &Tensor<'_>) -> PyResult<(usize, usize, Dims)> {
    let [batch, tokens, heads, dim] = shape("q", q)?;
    Ok((batch, tokens, Dims { heads, dim }))
}

/// selected [B, T, topk]: positions in the sequence, ascending; -1 in unused slots.
#[pyfunction]
pub fn indexer_topk(
    py: Python<'_>,
    selected: &Tensor<'_>,
    q: &Tensor<'_>,
    k: &Tensor<'_>,
    w: &Tensor<'_>,
    cu_seqlens: Option<&Tensor<'_>>,
    threads: usize,
) -> PyResult<()> {
    let (batch, tokens, dims) = dims(q)?;
    let [_, _, topk] = shape("selected", selected)?;
    let mut arguments = Arguments::default();
    let cu_seqlens = offsets(&mut arguments, cu_seqlens, batch, tokens)?;
    let w = arguments.input("w", w)?;
    let selected = arguments.output("selected", selected)?;
    with_dtype!("q", q, T => {
        let (q, k) = (arguments.input::<T>("q", q)?, arguments.input("k", k)?);
        let input = Input { q, k, w, before: 0, cu_seqlens: &cu_seqlens };
        threads::run(py, threads, |scratch| {
            indexer::indexer_topk(selected, &input, dims, &Options::default(), topk, scratch)
        })
    })
}

/// The loss, a scalar, and its gradients dq, dk and dw, which are empty unless wanted.
#[pyfunction]
pub fn indexer_loss(
    py: Python<'_>,
    loss: &Tensor<'_>,
    dq: &Tensor<'_>,
    dk: &Tensor<'_>,
    dw: &Tensor<'_>,
    q: &Tensor<'_>,
    k: &Tensor<'_>,
    w: &Tensor<'_>,
    attention_q: &Tensor<'_>,
    attention_k: &Tensor<'_>,
    lse: &Tensor<'_>,
    selected: Option<&Tensor<'_>>,
    cu_seqlens: Option<&Tensor<'_>>,
    loss_scale: f32,
    scale: f32,
    window: Option<usize>,
    soft_cap: Option<f32>,
    threads: usize,
) -> PyResult<()> {
    let (batch, tokens, dims) = dims(q)?;
    let [_, _, heads, head_dim] = shape("attention_q", attention_q)?;
    let [_, _, kv_heads, _] = shape("attention_k", attention_k)?;
    if heads == 0 || kv_heads == 0 || !heads.is_multiple_of(kv_heads) || head_dim == 0 {
        return Err(UsageError::new_err(format!(
            "attention_q heads must be a multiple of attention_k heads, got {heads} and {kv_heads}"
        )));
    }
    let options = Options { loss_scale, ..Options::default() };
    let served = attention::Dims { heads, kv_heads, head_dim, value_dim: head_dim };
    let served_options = attention_options(scale, window, soft_cap);
    let mut arguments = Arguments::default();
    let cu_seqlens = offsets(&mut arguments, cu_seqlens, batch, tokens)?;
    let w = arguments.input("w", w)?;
    let saved = Saved { lse: arguments.input("lse", lse)?.to_vec(), max_sum: Vec::new() };
    let loss = arguments.output("loss", loss)?;
    let selected = selected_keys(&mut arguments, selected, &cu_seqlens)?;
    with_dtype!("q", q, T => {
        let (q, k) = (arguments.input::<T>("q", q)?, arguments.input("k", k)?);
        let input = Input { q, k, w, before: 0, cu_seqlens: &cu_seqlens };
        let attended = attention::Input {
            q: arguments.input("attention_q", attention_q)?,
            k: arguments.input("attention_k", attention_k)?,
            v: &[],
            sinks: None,
            selected,
            before: 0,
            cu_seqlens: &cu_seqlens,
        };
        let (dk, dw) = (arguments.output("dk", dk)?, arguments.output("dw", dw)?);
        let grads = arguments.optional_output("dq", dq)?.map(|dq| Grads::<T> { dq, dk, dw });
        threads::run(py, threads, |scratch| {
            let target =
                Target { input: &attended, saved: &saved, dims: served, options: &served_options };
            let keys = cu_seqlens[cu_seqlens.len() - 1];
            let mut workspace = workspace(indexer::indexer_loss_workspace(dims, keys))?;
            let value =
                indexer::indexer_loss(grads, &input, &target, dims, &options, &mut workspace, scratch)?;
            copy("loss", loss, &[value])
        })
    })
}
