//! Operations of the decoder on a tape: forward, with its gradient beside it.
//!
//! Tensors are row-major, [tokens, ...]; work is divided by shape alone, so that results are the same on any
//! pool.

mod attention;
mod conv;
mod delta_rule;
mod elementwise;
mod experts;
mod indexer;
mod linear;
mod norm;
mod rotary;

pub use attention::{Attention, attention};
pub use conv::conv;
pub use delta_rule::{Inputs as RuleInputs, delta_rule};
pub use elementwise::{activate, add, beside, columns, decay, embedding, gated, mul_rows, scale};
pub use experts::{choose_experts, combine, expert_weights, rows, scale_chosen};
pub use indexer::{Indexer, indexer_loss};
pub use linear::{add_bias, linear};
pub use norm::{Gamma, l2_norm, layer_norm, rms_norm};
pub use rotary::{Rotation, rotary};

use std::ops::Range;

use rayon::prelude::*;

/// Elements per task.
const ELEMENTS: usize = 1 << 13;

/// Computes n values from their indices.
fn map(n: usize, f: impl Fn(usize) -> f64 + Sync) -> Vec<f64> {
    (0..n).into_par_iter().with_min_len(ELEMENTS).map(&f).collect()
}

/// sum_i += f(i)
fn add_each(sum: &mut [f64], f: impl Fn(usize) -> f64 + Sync) {
    sum.par_iter_mut().with_min_len(ELEMENTS).enumerate().for_each(|(i, sum)| *sum += f(i));
}

/// Runs `f(row, its elements)` on every row of `width` elements.
fn each_row(x: &mut [f64], width: usize, f: impl Fn(usize, &mut [f64]) + Sync) {
    let each = (ELEMENTS / width).max(1);
    x.par_chunks_mut(width).with_min_len(each).enumerate().for_each(|(row, x)| f(row, x));
}

/// Copies the rows of one head of x [tokens, heads, width].
fn take(x: &[f64], tokens: &Range<usize>, head: usize, heads: usize, width: usize) -> Vec<f64> {
    tokens.clone().flat_map(|t| &x[(t * heads + head) * width..][..width]).copied().collect()
}

/// Adds the rows of one head to a sum [tokens, heads, width].
fn put(sum: &mut [f64], rows: &[f64], tokens: &Range<usize>, head: usize, heads: usize, width: usize) {
    for (t, row) in tokens.clone().zip(rows.chunks(width)) {
        super::tape::add(&mut sum[(t * heads + head) * width..][..width], row);
    }
}

/// Dot product, summed in lanes that vectorize.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<8>(), b.as_chunks::<8>());
    let mut lanes = [0.0; 8];
    for (a, b) in a.iter().zip(b) {
        for (lane, (a, b)) in lanes.iter_mut().zip(a.iter().zip(b)) {
            *lane += a * b;
        }
    }
    let rest: f64 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    lanes.iter().sum::<f64>() + rest
}

#[cfg(test)]
mod tests;
