//! The causal convolution with SiLU.

use ballast_kernels::conv::{self, Dims, Grads, Input};
use pyo3::prelude::*;

use super::arguments::{Arguments, Tensor, shape, with_dtype};
use super::packing::offsets;
use super::threads;

fn dims(x: &Tensor<'_>, weight: &Tensor<'_>) -> PyResult<(usize, usize, Dims)> {
    let [batch, tokens, channels] = shape("x", x)?;
    let [_, width] = shape("weight", weight)?;
    Ok((batch, tokens, Dims { channels, width }))
}

/// y [B, T, C] and the final states [N, W-1, C], which are empty unless wanted.
#[pyfunction]
pub fn conv_forward(
    py: Python<'_>,
    y: &Tensor<'_>,
    final_state: &Tensor<'_>,
    x: &Tensor<'_>,
    weight: &Tensor<'_>,
    state: Option<&Tensor<'_>>,
    cu_seqlens: Option<&Tensor<'_>>,
    threads: usize,
) -> PyResult<()> {
    let (batch, tokens, dims) = dims(x, weight)?;
    let mut arguments = Arguments::default();
    let cu_seqlens = offsets(&mut arguments, cu_seqlens, batch, tokens)?;
    with_dtype!("x", x, T => with_dtype!("weight", weight, W => {
        let input = Input {
            x: arguments.input::<T>("x", x)?,
            weight: arguments.input::<W>("weight", weight)?,
            state: arguments.optional("initial_states", state)?,
            cu_seqlens: &cu_seqlens,
        };
        let y = arguments.output("y", y)?;
        let final_state = arguments.optional_output("final_states", final_state)?;
        threads::run(py, threads, |scratch| {
            conv::conv_forward(y, final_state, &input, dims, scratch)
        })
    }))
}

/// Gradients: dx and dstate are written, dweight [C, W] in f32 is added to.
#[pyfunction]
pub fn conv_backward(
    py: Python<'_>,
    dx: &Tensor<'_>,
    dweight: &Tensor<'_>,
    dstate: &Tensor<'_>,
    dy: &Tensor<'_>,
    dfinal_state: Option<&Tensor<'_>>,
    x: &Tensor<'_>,
    weight: &Tensor<'_>,
    state: Option<&Tensor<'_>>,
    cu_seqlens: Option<&Tensor<'_>>,
    threads: usize,
) -> PyResult<()> {
    let (batch, tokens, dims) = dims(x, weight)?;
    let mut arguments = Arguments::default();
    let cu_seqlens = offsets(&mut arguments, cu_seqlens, batch, tokens)?;
    with_dtype!("x", x, T => with_dtype!("weight", weight, W => {
        let input = Input {
            x: arguments.input::<T>("x", x)?,
            weight: arguments.input::<W>("weight", weight)?,
            state: arguments.optional("initial_states", state)?,
            cu_seqlens: &cu_seqlens,
        };
        let dy = arguments.input("dy", dy)?;
        let dfinal_state = arguments.optional_gradient("dfinal_states", dfinal_state)?;
        let grads = Grads {
            dx: arguments.output("dx", dx)?,
            dweight: arguments.output("dweight", dweight)?,
            dstate: arguments.optional_output("dinitial_states", dstate)?,
        };
        threads::run(py, threads, |scratch| {
            conv::conv_backward(grads, dy, dfinal_state, &input, dims, scratch)
        })
    }))
}
