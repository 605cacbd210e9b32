//! Output projection and cross entropy in one, a slice of tokens at a time.
//!
//! Token t with hidden state h, weight W [V, H], target y, soft cap c, label smoothing e, z-loss coefficient
//! z:
//! ```text
//! u = W h          l = c tanh(u / c), or u          L = ln sum_j e^{l_j}
//! loss = L - (1 - e) l_y - e mean(l) + z L^2
//! dl_j = e^{l_j - L} (1 + 2 z L) - (1 - e) [j = y] - e / V         du = dl (1 - (l / c)^2)
//! dh = s W^T du    dW += s du h^T                                  s the given scale, usually 1 / tokens
//! ```
//! Only the logits of one slice exist at a time, and their gradient replaces them in place: memory is slice x
//! V f32 for any batch. `gradient` rounds s du where it enters the two products; in bf16 it is also stored so, in
//! the first half of its row. A token with the target `ignore_index` adds nothing to loss, count or gradients.
//!
//! # Example
//! ```
//! use ballast_kernels::linear::Dims;
//! use ballast_kernels::linear_cross_entropy::{self as loss, linear_cross_entropy};
//! use ballast_kernels::Scratch;
//!
//! let (dims, options) = (Dims { inputs: 1, outputs: 2 }, loss::Options::default());
//! // Both tokens of the vocabulary have the logit 0.
//! let (hidden, w, targets) = ([1.0f32], [0.0f32, 0.0], [0]);
//! let scratch = Scratch::new(loss::linear_cross_entropy_scratch(dims, 1, &options));
//! let mut workspace = vec![0.0; loss::linear_cross_entropy_workspace(dims, 1, &options)];
//! let (mut dhidden, mut dw) = ([0.0f32], [0.0; 2]);
//! let grads = loss::Grads { dhidden: &mut dhidden, dw: Some(&mut dw), scale: 1.0 };
//! let loss = linear_cross_entropy(
//!     Some(grads), &hidden, &w, &targets, dims, &options, &mut workspace, &scratch,
//! )?;
//! assert!((loss.sum - 2f64.ln()).abs() < 1e-6);
//! assert!((dw[0] + 0.5).abs() < 1e-6 && (dw[1] - 0.5).abs() < 1e-6);
//! # Ok::<(), ballast_kernels::KernelError>(())
//! ```

#[cfg(test)]
mod tests;

use half::bf16;
use rayon::prelude::*;

use crate::error::{Result, check, check_len, check_shape};
use crate::linear::{Dims, backward_input, backward_weight, linear_forward, linear_scratch};
use crate::scratch::check_workspace;
use crate::simd::{exp_f32, simd_fn, sum_by, tanh_f32};
use crate::{Element, Rounding, Scratch};

/// Settings of the loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// Target of tokens without loss.
    pub ignore_index: i64,
    /// c: soft cap, which limits logits to (-c, c).
    pub soft_cap: Option<f32>,
    /// z: coefficient of the z-loss, the squared log-sum-exp.
    pub z_loss: f32,
    /// e: label smoothing, the part of the target that is spread over the vocabulary.
    pub label_smoothing: f32,
    /// Rounding of the logits after the soft cap; it has derivative 1.
    pub logits: Rounding,
    /// Rounding of the gradient s du of the logits, as a factor of dh and dW.
    pub gradient: Rounding,
    /// Tokens per slice. Every slice reads the weight twice and its gradient once, and writes the gradient: with
    /// more tokens there is less of this, and the logits take more memory.
    pub slice: usize,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            ignore_index: -100,
            soft_cap: None,
            z_loss: 0.0,
            label_smoothing: 0.0,
            logits: Rounding::F32,
            gradient: Rounding::F32,
            slice: 512,
        }
    }
}

/// Loss of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Loss {
    /// Sum over the counted tokens, with label smoothing and z-loss.
    pub sum: f64,
    /// Part of `sum` that is z-loss.
    pub z_sum: f64,
    /// Sum of -ln p(target), without label smoothing and z-loss; the same bits as `sum` where there is neither.
    pub cross_entropy: f64,
    /// Number of counted tokens: those whose target is not `ignore_index`.
    pub tokens: usize,
    /// Number of correct predictions: counted tokens for which no logit is larger than the target's.
    pub right: usize,
}

/// Gradients.
pub struct Grads<'a, T> {
    /// [tokens, H], written
    pub dhidden: &'a mut [T],
    /// [V, H], accumulated; `None` for a frozen weight
    pub dw: Option<&'a mut [f32]>,
    /// s: factor of the gradient of the loss sum.
    pub scale: f32,
}

/// Number of f32 of the workspace of [`linear_cross_entropy`]: the logits of one slice.
pub fn linear_cross_entropy_workspace(dims: Dims, tokens: usize, options: &Options) -> usize {
    options.slice.min(tokens).saturating_mul(dims.outputs)
}

/// Number of f32 of one scratch slot of [`linear_cross_entropy`].
pub fn linear_cross_entropy_scratch(dims: Dims, tokens: usize, options: &Options) -> usize {
    linear_scratch(dims, options.slice.min(tokens))
}

/// Number of targets that are not `ignore_index`; s is usually its inverse.
pub fn counted_tokens(targets: &[i64], options: &Options) -> usize {
    targets.iter().filter(|target| **target != options.ignore_index).count()
}

/// Loss of hidden [tokens, H], w [V, H] (`dims.inputs` is H, `dims.outputs` is V) and targets \[tokens\];
/// with `grads` also the gradients.
pub fn linear_cross_entropy<T: Element, W: Element>(
    mut grads: Option<Grads<'_, T>>,
    hidden: &[T],
    w: &[W],
    targets: &[i64],
    dims: Dims,
    options: &Options,
    workspace: &mut [f32],
    scratch: &Scratch,
) -> Result<Loss> {
    check_input(&grads, hidden, w, targets, dims, options)?;
    let Dims { inputs, outputs } = dims;
    check_workspace(workspace, linear_cross_entropy_workspace(dims, targets.len(), options))?;
    let scale = grads.as_ref().map(|grads| grads.scale);
    let mut loss = Loss::default();
    for (slice, targets) in targets.chunks(options.slice).enumerate() {
        let rows = slice * options.slice * inputs..(slice * options.slice + targets.len()) * inputs;
        let hidden = &hidden[rows.clone()];
        let logits = &mut workspace[..targets.len() * outputs];
        linear_forward(logits, hidden, w, None, dims, scratch)?;
        // In the order of the tokens; each row is one task.
        let losses: Vec<Option<RowLoss>> = logits
            .par_chunks_mut(outputs)
            .zip(targets)
            .map(|(row, target)| {
                if *target == options.ignore_index {
                    // In bf16 too.
                    row.fill(0.0);
                    return None;
                }
                let loss = row_loss(row, *target as usize, options, scale);
                if scale.is_some() {
                    round_gradient(row, options.gradient);
                }
                Some(loss)
            })
            .collect();
        for row in losses.into_iter().flatten() {
            loss.sum += row.loss;
            loss.z_sum += row.z_loss;
            loss.cross_entropy += row.cross_entropy;
            loss.tokens += 1;
            loss.right += usize::from(row.right);
        }
        let Some(Grads { dhidden, dw, .. }) = &mut grads else { continue };
        let (dhidden, dw) = (&mut dhidden[rows], dw.as_deref_mut());
        if options.gradient == Rounding::Bf16 {
            let gradient = bytemuck::cast_slice::<f32, bf16>(logits);
            products(dhidden, dw, gradient, 2 * outputs, hidden, w, dims, scratch)?;
        } else {
            products(dhidden, dw, logits, outputs, hidden, w, dims, scratch)?;
        }
    }
    Ok(loss)
}

/// dh and dW from the gradient of the logits, whose rows are `stride` apart.
fn products<G: Element, T: Element, W: Element>(
    dhidden: &mut [T],
    dw: Option<&mut [f32]>,
    gradient: &[G],
    stride: usize,
    hidden: &[T],
    w: &[W],
    dims: Dims,
    scratch: &Scratch,
) -> Result {
    backward_input(dhidden, false, gradient, stride, w, dims, scratch)?;
    match dw {
        Some(dw) => backward_weight(dw, gradient, stride, hidden, dims, scratch),
        None => Ok(()),
    }
}

/// Rounds the gradient of a row. In bf16 it is then in the first half of the row.
fn round_gradient(row: &mut [f32], rounding: Rounding) {
    if rounding != Rounding::Bf16 {
        return rounding.round_all(row);
    }
    let mut wide = [0.0; 256];
    for first in (0..row.len()).step_by(wide.len()) {
        let count = wide.len().min(row.len() - first);
        // The copy is read; the result never reaches an f32 that is not copied yet.
        wide[..count].copy_from_slice(&row[first..first + count]);
        bf16::store(&mut bytemuck::cast_slice_mut(row)[first..first + count], &wide[..count]);
    }
}

fn check_input<T, W>(
    grads: &Option<Grads<'_, T>>,
    hidden: &[T],
    w: &[W],
    targets: &[i64],
    dims: Dims,
    options: &Options,
) -> Result {
    let Dims { inputs, outputs } = dims;
    check(inputs > 0 && outputs > 0, || {
        format!("projection inputs and outputs must be above 0, got {inputs} and {outputs}")
    })?;
    check(options.slice > 0, || "slice must be 1 or more, got 0".into())?;
    check(options.soft_cap.is_none_or(|cap| cap > 0.0), || "soft cap must be above 0".into())?;
    check((0.0..1.0).contains(&options.label_smoothing), || {
        format!("label smoothing must be at least 0 and below 1, got {}", options.label_smoothing)
    })?;
    check_shape("hidden", hidden, [targets.len(), inputs])?;
    check_shape("w", w, [dims.inputs, dims.outputs])?;
    if let Some(grads) = grads {
        check_len("dhidden", grads.dhidden, hidden.len())?;
        if let Some(dw) = &grads.dw {
            check_shape("dw", dw, [dims.inputs, dims.outputs])?;
        }
    }
    let valid = |target: &i64| *target == options.ignore_index || (0..outputs as i64).contains(target);
    match targets.iter().position(|target| !valid(target)) {
        None => Ok(()),
        Some(t) => check(false, || {
            format!("token {t} has target {}, but the vocabulary has {outputs} tokens", targets[t])
        }),
    }
}

/// Loss of one token.
struct RowLoss {
    loss: f64,
    z_loss: f64,
    cross_entropy: f64,
    right: bool,
}

/// Computes the loss of one token; with `scale`, its logits are replaced by their gradient.
fn row_loss(row: &mut [f32], target: usize, options: &Options, scale: Option<f32>) -> RowLoss {
    let count = row.len() as f64;
    if let Some(cap) = options.soft_cap {
        cap_row(row, cap);
    }
    options.logits.round_all(row);
    let max = row_max(row);
    let right = row[target] >= max;
    let (mut exps, mut sum) = (0f64, 0f64);
    // f64 across blocks: over a whole vocabulary, an f32 sum loses digits.
    for block in row.chunks(4096) {
        exps += exp_sum(block, max) as f64;
        if options.label_smoothing > 0.0 {
            sum += block_sum(block) as f64;
        }
    }
    let log_sum = max as f64 + exps.ln();
    let (smoothing, z) = (options.label_smoothing as f64, options.z_loss as f64);
    let z_loss = z * log_sum * log_sum;
    let cross_entropy = log_sum - row[target] as f64;
    let loss = log_sum - (1.0 - smoothing) * row[target] as f64 - smoothing * sum / count + z_loss;
    if let Some(scale) = scale {
        let slope = |logit: f32| options.soft_cap.map_or(1.0, |cap| 1.0 - (logit / cap) * (logit / cap));
        let on_target = scale * (1.0 - smoothing) as f32 * slope(row[target]);
        let weight = scale * (1.0 + 2.0 * z * log_sum) as f32;
        let spread = scale * (smoothing / count) as f32;
        match options.soft_cap {
            None => gradient_row(row, max, (1.0 / exps) as f32 * weight, spread),
            Some(cap) => capped_gradient_row(row, max, (1.0 / exps) as f32 * weight, spread, cap),
        }
        row[target] -= on_target;
    }
    RowLoss { loss, z_loss, cross_entropy, right }
}

simd_fn! {
    fn cap_row(row: &mut [f32], cap: f32) {
        for l in row {
            *l = cap * tanh_f32::<FMA>(*l / cap);
        }
    }
}

simd_fn! {
    /// Largest value, or NaN if there is one.
    fn row_max(row: &[f32]) -> f32 {
        let mut lanes = [f32::NEG_INFINITY; 16];
        let (chunks, rest) = row.as_chunks::<16>();
        let larger = |a: f32, b: f32| if a >= b || a.is_nan() { a } else { b };
        for chunk in chunks {
            for i in 0..16 {
                lanes[i] = larger(lanes[i], chunk[i]);
            }
        }
        for (lane, l) in lanes.iter_mut().zip(rest) {
            *lane = larger(*lane, *l);
        }
        lanes.into_iter().fold(f32::NEG_INFINITY, larger)
    }
}

simd_fn! {
    fn exp_sum(block: &[f32], max: f32) -> f32 {
        sum_by(block, block, block, |l, _, _| exp_f32::<FMA>(l - max))
    }
}

simd_fn! {
    fn block_sum(block: &[f32]) -> f32 {
        sum_by(block, block, block, |l, _, _| l)
    }
}

simd_fn! {
    fn gradient_row(row: &mut [f32], max: f32, weight: f32, spread: f32) {
        for l in row {
            *l = exp_f32::<FMA>(*l - max) * weight - spread;
        }
    }
}

simd_fn! {
    fn capped_gradient_row(row: &mut [f32], max: f32, weight: f32, spread: f32, cap: f32) {
        for l in row {
            let squeezed = *l / cap;
            *l = (exp_f32::<FMA>(*l - max) * weight - spread) * (1.0 - squeezed * squeezed);
        }
    }
}
