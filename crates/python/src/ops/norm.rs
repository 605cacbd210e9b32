//! The gated RMSNorm.

use ballast_kernels::norm::{self, Saved};
use pyo3::prelude::*;

use super::arguments::{Arguments, Tensor, copy, with_dtype};
use super::threads;

/// y with the shape of x, and rstd of every row.
#[pyfunction]
pub fn gated_rms_norm_forward(
    py: Python<'_>,
    y: &Tensor<'_>,
    rstd: &Tensor<'_>,
    x: &Tensor<'_>,
    z: &Tensor<'_>,
    weight: &Tensor<'_>,
    eps: f32,
    threads: usize,
) -> PyResult<()> {
    let mut arguments = Arguments::default();
    let rstd: &mut [f32] = arguments.output("rstd", rstd)?;
    with_dtype!("x", x, T => with_dtype!("weight", weight, W => {
        let y = arguments.output::<T>("y", y)?;
        let (x, z) = (arguments.input::<T>("x", x)?, arguments.input::<T>("z", z)?);
        let weight = arguments.input::<W>("weight", weight)?;
        threads::run(py, threads, |_| {
            let mut saved = Saved::default();
            norm::gated_rms_norm_forward(y, Some(&mut saved), x, z, weight, eps)?;
            copy("rstd", rstd, &saved.rstd)
        })
    }))
}

/// Gradients: dx and dz are written, dweight in f32 is added to.
#[pyfunction]
pub fn gated_rms_norm_backward(
    py: Python<'_>,
    dx: &Tensor<'_>,
    dz: &Tensor<'_>,
    dweight: &Tensor<'_>,
    dy: &Tensor<'_>,
    rstd: &Tensor<'_>,
    x: &Tensor<'_>,
    z: &Tensor<'_>,
    weight: &Tensor<'_>,
    threads: usize,
) -> PyResult<()> {
    let mut arguments = Arguments::default();
    let dweight: &mut [f32] = arguments.output("dweight", dweight)?;
    let saved = Saved { rstd: arguments.input("rstd", rstd)?.to_vec(), mean: Vec::new() };
    with_dtype!("x", x, T => with_dtype!("weight", weight, W => {
        let (dx, dz) = (arguments.output::<T>("dx", dx)?, arguments.output::<T>("dz", dz)?);
        let (x, z) = (arguments.input::<T>("x", x)?, arguments.input::<T>("z", z)?);
        let (dy, weight) = (arguments.input::<T>("dy", dy)?, arguments.input::<W>("weight", weight)?);
        threads::run(py, threads, |scratch| {
            norm::gated_rms_norm_backward(dx, dz, dweight, dy, x, z, weight, &saved, scratch)
        })
    }))
}
