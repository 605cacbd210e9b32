//! Linear layer with a weight [outputs, inputs], as in checkpoints.
//!
//! ```text
//! y = x W^T + b        dx = dy W        dW += dy^T x        db += sum dy
//! ```
//! x, y and W may each be f32 or bf16. Products use AMX if the machine has it, f32 operands in three parts. Else
//! a product of two bf16 operands uses AVX512-BF16, with sums in f32; otherwise bf16 is widened panel by panel
//! into scratch, and all products are f32. The result is cut into tiles, one task each with a fixed order of
//! summation, also for dW, so no sum crosses a thread and no bit depends on the number of threads.
//!
//! For up to [`GEMV_TOKENS`] tokens the weight is read once, in place, row by row: decoding is bound by
//! memory bandwidth.
//!
//! # Example
//! ```
//! use ballast_kernels::{Scratch, linear};
//!
//! let dims = linear::Dims { inputs: 2, outputs: 1 };
//! let scratch = Scratch::new(linear::linear_scratch(dims, 1));
//! let (x, w, bias) = ([1.0f32, 2.0], [3.0f32, 4.0], [0.5]);
//! let mut y = [0.0f32];
//! linear::linear_forward(&mut y, &x, &w, Some(&bias), dims, &scratch)?;
//! assert_eq!(y, [11.5]);
//!
//! let (mut dx, mut dw, dy) = ([0.0f32; 2], [0.0; 2], [1.0f32]);
//! linear::linear_backward_input(&mut dx, &dy, &w, dims, &scratch)?;
//! linear::linear_backward_weight(&mut dw, None, &dy, &x, dims, &scratch)?;
//! assert_eq!((dx, dw), ([3.0, 4.0], [1.0, 2.0]));
//! # Ok::<(), ballast_kernels::KernelError>(())
//! ```

mod gemv;
mod product;

#[cfg(test)]
mod tests;

pub use gemv::GEMV_TOKENS;

use rayon::prelude::*;

use crate::error::{Result, check, check_len, check_shape};
use crate::partition::{add_partials, block_rows, blocks};
use crate::{Element, KernelError, Scratch};
use product::{Operand, product};

/// Widths of the layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dims {
    /// Width of x.
    pub inputs: usize,
    /// Width of y.
    pub outputs: usize,
}

impl Dims {
    /// Number of elements of the weight.
    pub fn weight_len(&self) -> usize {
        self.inputs * self.outputs
    }
}

/// Number of f32 of one scratch slot of every function of this module on `tokens` tokens.
pub fn linear_scratch(dims: Dims, tokens: usize) -> usize {
    let gemv = if tokens <= GEMV_TOKENS { tokens * dims.inputs } else { 0 };
    product::SCRATCH.max(gemv).max(blocks(tokens) * dims.outputs)
}

/// y [tokens, outputs] from x [tokens, inputs], w [outputs, inputs] and, unless `None`, bias \[outputs\].
pub fn linear_forward<Y: Element, X: Element, W: Element>(
    y: &mut [Y],
    x: &[X],
    w: &[W],
    bias: Option<&[W]>,
    dims: Dims,
    scratch: &Scratch,
) -> Result {
    let tokens = check_dims(x, w, dims)?;
    check_shape("y", y, [tokens, dims.outputs])?;
    if let Some(bias) = bias {
        check_len("bias", bias, dims.outputs)?;
    }
    if tokens <= GEMV_TOKENS {
        gemv::gemv([gemv::Part { y, w, bias }], x, dims.inputs, scratch);
        return Ok(());
    }
    let add_bias = |row: &mut [f32], first: usize| {
        if let Some(bias) = bias {
            for (y, b) in row.iter_mut().zip(&bias[first..]) {
                *y += b.to_f32();
            }
        }
    };
    let (a, b) = (Operand::new(x, dims.inputs), Operand::new(w, dims.inputs).t());
    product(
        y,
        false,
        a,
        b,
        (tokens, dims.outputs, dims.inputs),
        bias.is_some().then_some(&add_bias),
        scratch,
    );
    Ok(())
}

/// Several layers with the same x: `ys[i]` [tokens, outputs of i] from `ws[i]` [outputs of i, inputs]. The
/// bits are those of [`linear_forward`]; for a few tokens, threads are synchronized once instead of N times.
pub fn linear_forward_many<Y: Element, X: Element, W: Element, const N: usize>(
    ys: [&mut [Y]; N],
    x: &[X],
    ws: [&[W]; N],
    inputs: usize,
    scratch: &Scratch,
) -> Result {
    let dims = |w: &[W]| Dims { inputs, outputs: w.len() / inputs.max(1) };
    for (y, w) in ys.iter().zip(&ws) {
        let tokens = check_dims(x, w, dims(w))?;
        check_shape("y", y, [tokens, dims(w).outputs])?;
    }
    let parts = ys.into_iter().zip(ws);
    if x.len() > GEMV_TOKENS * inputs {
        for (y, w) in parts {
            linear_forward(y, x, w, None, dims(w), scratch)?;
        }
        return Ok(());
    }
    let mut parts = parts.map(|(y, w)| gemv::Part { y, w, bias: None });
    gemv::gemv(std::array::from_fn::<_, N, _>(|_| parts.next().expect("N of each")), x, inputs, scratch);
    Ok(())
}

/// dx [tokens, inputs] (written) from dy [tokens, outputs] and w.
pub fn linear_backward_input<X: Element, Y: Element, W: Element>(
    dx: &mut [X],
    dy: &[Y],
    w: &[W],
    dims: Dims,
    scratch: &Scratch,
) -> Result {
    check_shape("dy", dy, [check_dims(dx, w, dims)?, dims.outputs])?;
    backward_input(dx, false, dy, dims.outputs, w, dims, scratch)
}

/// dx [tokens, inputs] += dy W in f32, for several layers with the same x.
pub fn linear_backward_input_add<Y: Element, W: Element>(
    dx: &mut [f32],
    dy: &[Y],
    w: &[W],
    dims: Dims,
    scratch: &Scratch,
) -> Result {
    check_shape("dy", dy, [check_dims(dx, w, dims)?, dims.outputs])?;
    backward_input(dx, true, dy, dims.outputs, w, dims, scratch)
}

/// dx [tokens, inputs] = (dx +) dy W, where the rows of dy are `stride` apart.
pub(crate) fn backward_input<X: Element, Y: Element, W: Element>(
    dx: &mut [X],
    accumulate: bool,
    dy: &[Y],
    stride: usize,
    w: &[W],
    dims: Dims,
    scratch: &Scratch,
) -> Result {
    let tokens = check_dims(dx, w, dims)?;
    let (a, b) = (Operand::new(dy, stride), Operand::new(w, dims.inputs));
    product(dx, accumulate, a, b, (tokens, dims.inputs, dims.outputs), None, scratch);
    Ok(())
}

/// dw [outputs, inputs] and, unless `None`, dbias \[outputs\] (both accumulated) from dy and x.
pub fn linear_backward_weight<Y: Element, X: Element>(
    dw: &mut [f32],
    dbias: Option<&mut [f32]>,
    dy: &[Y],
    x: &[X],
    dims: Dims,
    scratch: &Scratch,
) -> Result {
    let tokens = check_dims(x, dw, dims)?;
    check_shape("dy", dy, [tokens, dims.outputs])?;
    if let Some(dbias) = &dbias {
        check_len("dbias", dbias, dims.outputs)?;
    }
    backward_weight(dw, dy, dims.outputs, x, dims, scratch)?;
    if let Some(dbias) = dbias {
        add_bias_gradient(dbias, dy, dims.outputs, scratch);
    }
    Ok(())
}

/// dw [outputs, inputs] += dy^T x, where the rows of dy are `stride` apart.
pub(crate) fn backward_weight<Y: Element, X: Element>(
    dw: &mut [f32],
    dy: &[Y],
    stride: usize,
    x: &[X],
    dims: Dims,
    scratch: &Scratch,
) -> Result {
    let tokens = check_dims(x, dw, dims)?;
    let (a, b) = (Operand::new(dy, stride).t(), Operand::new(x, dims.inputs));
    product(dw, true, a, b, (dims.outputs, dims.inputs, tokens), None, scratch);
    Ok(())
}

/// dbias += sum of the rows of dy, block by block.
fn add_bias_gradient<Y: Element>(dbias: &mut [f32], dy: &[Y], outputs: usize, scratch: &Scratch) {
    let rows = dy.len() / outputs;
    let block = block_rows(rows);
    scratch.with(blocks(rows) * outputs, |partials| {
        partials.fill(0.0);
        partials.par_chunks_mut(outputs).zip(dy.par_chunks(block * outputs)).for_each(|(sum, dy)| {
            for row in dy.chunks(outputs) {
                for (sum, dy) in sum.iter_mut().zip(row) {
                    *sum += dy.to_f32();
                }
            }
        });
        add_partials(dbias, partials);
    });
}

/// Returns the number of tokens.
fn check_dims<X, W>(x: &[X], w: &[W], dims: Dims) -> Result<usize, KernelError> {
    let Dims { inputs, outputs } = dims;
    check(inputs > 0 && outputs > 0, || {
        format!("linear inputs and outputs must be above 0, got {inputs} and {outputs}")
    })?;
    check(x.len().is_multiple_of(inputs), || {
        format!("linear input has {} elements, not a multiple of the {inputs} inputs", x.len())
    })?;
    check_shape("w", w, [dims.inputs, dims.outputs])?;
    Ok(x.len() / inputs)
}
