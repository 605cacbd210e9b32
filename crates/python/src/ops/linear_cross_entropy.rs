//! Fused output projection and cross entropy.

use ballast_kernels::linear::Dims;
use ballast_kernels::linear_cross_entropy::{self as loss, Grads, Options};
use ballast_kernels::scratch::workspace;
use pyo3::prelude::*;

use super::arguments::{Arguments, Tensor, copy, shape, with_dtype};
use super::threads;

/// The mean of the loss and the number of counted tokens, two scalars. Of the gradients of the mean, which are
/// empty unless wanted, dhidden is written and dweight [V, H] in f32 is added to.
#[pyfunction]
pub fn linear_cross_entropy(
    py: Python<'_>,
    mean: &Tensor<'_>,
    count: &Tensor<'_>,
    dhidden: &Tensor<'_>,
    dweight: &Tensor<'_>,
    hidden: &Tensor<'_>,
    weight: &Tensor<'_>,
    targets: &Tensor<'_>,
    ignore_index: i64,
    soft_cap: Option<f32>,
    z_loss: f32,
    label_smoothing: f32,
    threads: usize,
) -> PyResult<()> {
    let [_, inputs] = shape("hidden", hidden)?;
    let [outputs, _] = shape("weight", weight)?;
    let dims = Dims { inputs, outputs };
    let options = Options { ignore_index, soft_cap, z_loss, label_smoothing, ..Options::default() };
    let mut arguments = Arguments::default();
    let targets = arguments.input("targets", targets)?;
    let (mean, count) = (arguments.output("mean", mean)?, arguments.output("count", count)?);
    let dw = arguments.optional_output("dweight", dweight)?;
    with_dtype!("hidden", hidden, T => with_dtype!("weight", weight, W => {
        let hidden = arguments.input::<T>("hidden", hidden)?;
        let weight = arguments.input::<W>("weight", weight)?;
        let dhidden = arguments.optional_output("dhidden", dhidden)?;
        threads::run(py, threads, |scratch| {
            let scale = 1.0 / loss::counted_tokens(targets, &options).max(1) as f32;
            let grads = dhidden.map(|dhidden| Grads { dhidden, dw, scale });
            let tokens = targets.len();
            let mut workspace = workspace(loss::linear_cross_entropy_workspace(dims, tokens, &options))?;
            let all = loss::linear_cross_entropy(
                grads, hidden, weight, targets, dims, &options, &mut workspace, scratch,
            )?;
            copy("mean", mean, &[(all.sum / all.tokens.max(1) as f64) as f32])?;
            copy("count", count, &[all.tokens as f32])
        })
    }))
}
