//! A few tokens: every row of the weight is read once, where it lies.

use rayon::prelude::*;

use super::Dims;
use crate::shared::Shared;
use crate::simd::{fma, prefetch, simd_fn};
use crate::{Element, Scratch};

/// Tokens up to which [`super::linear_forward`] reads the weight directly.
pub const GEMV_TOKENS: usize = 8;

/// Rows of the weight that one task takes.
const ROWS: usize = 32;

/// Rows between the one that is multiplied and the one that is asked for.
const AHEAD: usize = 2;

/// Lanes of a sum: enough of them to hide the latency of an addition.
const LANES: usize = 32;

pub(super) fn gemv<Y: Element, X: Element, W: Element>(
    y: &mut [Y],
    x: &[X],
    w: &[W],
    bias: Option<&[W]>,
    dims: Dims,
    scratch: &Scratch,
) {
    let Dims { inputs, outputs } = dims;
    let tokens = x.len() / inputs;
    let y = Shared::new(y);
    scratch.with(tokens * inputs, |wide| {
        X::load(wide, x);
        w.par_chunks(ROWS * inputs).enumerate().for_each(|(task, w)| {
            let mut sums = [[0f32; ROWS]; GEMV_TOKENS];
            for (i, row) in w.chunks(inputs).enumerate() {
                // Memory answers late: what comes is asked for two rows ahead.
                prefetch(w.get((i + AHEAD) * inputs..(i + AHEAD + 1) * inputs).unwrap_or_default());
                for (sums, x) in sums.chunks_mut(2).zip(wide.chunks(2 * inputs)) {
                    let (x0, x1) = x.split_at(inputs);
                    // A row is in the nearest cache when the next two tokens come.
                    if x1.is_empty() {
                        sums[0][i] = dot_one(row, x0);
                    } else {
                        [sums[0][i], sums[1][i]] = dot_two(row, x0, x1);
                    }
                }
            }
            let rows = w.len() / inputs;
            for (t, sums) in sums.iter_mut().take(tokens).enumerate() {
                if let Some(bias) = bias {
                    for (sum, b) in sums.iter_mut().zip(&bias[task * ROWS..]) {
                        *sum += b.to_f32();
                    }
                }
                // SAFETY: these rows' outputs of a token belong to this task alone.
                Y::store(unsafe { y.part(t * outputs + task * ROWS, rows) }, &sums[..rows]);
            }
        });
    });
}

#[inline(always)]
fn sum_lanes(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

simd_fn! {
    fn dot_one<W: Element>(w: &[W], x: &[f32]) -> f32 {
        let mut lanes = [0f32; LANES];
        let ((w, w_rest), (x, x_rest)) = (w.as_chunks::<LANES>(), x.as_chunks::<LANES>());
        for (w, x) in w.iter().zip(x) {
            for i in 0..LANES {
                lanes[i] = fma::<FMA>(w[i].to_f32(), x[i], lanes[i]);
            }
        }
        for (i, (w, x)) in w_rest.iter().zip(x_rest).enumerate() {
            lanes[i] = fma::<FMA>(w.to_f32(), *x, lanes[i]);
        }
        sum_lanes(lanes)
    }
}

simd_fn! {
    /// [`dot_one`] with two x, the same bits for each.
    fn dot_two<W: Element>(w: &[W], x: &[f32], y: &[f32]) -> [f32; 2] {
        let (mut sum_x, mut sum_y) = ([0f32; LANES], [0f32; LANES]);
        let (w, w_rest) = w.as_chunks::<LANES>();
        let ((x, x_rest), (y, y_rest)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>());
        for ((w, x), y) in w.iter().zip(x).zip(y) {
            for i in 0..LANES {
                sum_x[i] = fma::<FMA>(w[i].to_f32(), x[i], sum_x[i]);
            }
            for i in 0..LANES {
                sum_y[i] = fma::<FMA>(w[i].to_f32(), y[i], sum_y[i]);
            }
        }
        for (i, ((w, x), y)) in w_rest.iter().zip(x_rest).zip(y_rest).enumerate() {
            sum_x[i] = fma::<FMA>(w.to_f32(), *x, sum_x[i]);
            sum_y[i] = fma::<FMA>(w.to_f32(), *y, sum_y[i]);
        }
        [sum_lanes(sum_x), sum_lanes(sum_y)]
    }
}
