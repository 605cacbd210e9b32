//! Linear layer for a few tokens: every row of the weight is read once, in place. It is widened, or
//! multiplied as bf16 if x is bf16 too and the machine has AVX512-BF16.

use rayon::prelude::*;

use crate::matmul::dot_bf16;
use crate::shared::Shared;
use crate::simd::{Level, fma, level, prefetch, simd_fn};
use crate::{Element, Scratch};

/// Most tokens for which [`super::linear_forward`] reads the weight in place.
pub const GEMV_TOKENS: usize = 8;

/// Most rows of the weight per task.
const ROWS: usize = 32;

/// Bytes of the weight per task, at least one row: enough to be worth a task, few enough that all threads end
/// together.
const TASK: usize = 64 << 10;

/// Prefetch distance in bytes.
const AHEAD: usize = 8 << 10;

/// Lanes of a sum: enough to hide the latency of an addition.
const LANES: usize = 32;

/// Weight [outputs, inputs] with its bias and its output.
pub(super) struct Part<'a, Y, W> {
    pub(super) y: &'a mut [Y],
    pub(super) w: &'a [W],
    pub(super) bias: Option<&'a [W]>,
}

/// All weights with the same x at once: threads are synchronized once.
pub(super) fn gemv<Y: Element, X: Element, W: Element, const N: usize>(
    parts: [Part<'_, Y, W>; N],
    x: &[X],
    inputs: usize,
    scratch: &Scratch,
) {
    let tokens = x.len() / inputs;
    let height = (TASK / (inputs * size_of::<W>())).clamp(1, ROWS);
    let parts = parts.map(|part| (Shared::new(part.y), part.w, part.bias));
    // For each part, the task after its last one.
    let mut ends = [0; N];
    let mut tasks = 0;
    for (end, (_, w, _)) in ends.iter_mut().zip(&parts) {
        tasks += (w.len() / inputs).div_ceil(height);
        *end = tasks;
    }
    let narrow = level() >= Level::Avx512Bf16;
    scratch.with(tokens * inputs, |wide| {
        X::load(wide, x);
        (0..tasks).into_par_iter().with_max_len(1).for_each(|task| {
            let part = ends.partition_point(|end| *end <= task);
            let (y, w, bias) = &parts[part];
            let outputs = w.len() / inputs;
            let first = (task - if part == 0 { 0 } else { ends[part - 1] }) * height;
            let rows = height.min(outputs - first);
            let narrow = if narrow { W::as_bf16(w).zip(X::as_bf16(x)) } else { None };
            let mut sums = [[0f32; ROWS]; GEMV_TOKENS];
            for i in 0..rows {
                let row = (first + i) * inputs..(first + i + 1) * inputs;
                // Hides memory latency. The rows after this task's are usually the thread's next task.
                let ahead = |at: usize| (at + AHEAD / size_of::<W>()).min(w.len());
                prefetch(&w[ahead(row.start)..ahead(row.end)]);
                match narrow {
                    Some((w, x)) => {
                        for (sums, x) in sums.iter_mut().zip(x.chunks(inputs)) {
                            // SAFETY: this machine has the level.
                            sums[i] = unsafe { dot_bf16(&w[row.clone()], x) };
                        }
                    }
                    None => dot_all(&mut sums, i, &w[row], wide),
                }
            }
            for (t, sums) in sums.iter_mut().take(tokens).enumerate() {
                if let Some(bias) = bias {
                    for (sum, b) in sums.iter_mut().zip(&bias[first..]) {
                        *sum += b.to_f32();
                    }
                }
                // SAFETY: these rows' outputs of a token belong to this task alone.
                Y::store(unsafe { y.part(t * outputs + first, rows) }, &sums[..rows]);
            }
        });
    });
}

/// Element i of every token's sums, two tokens at a time; from the second pair on the row is in the L1 cache.
fn dot_all<W: Element>(sums: &mut [[f32; ROWS]], i: usize, row: &[W], x: &[f32]) {
    for (sums, x) in sums.chunks_mut(2).zip(x.chunks(2 * row.len())) {
        let (x0, x1) = x.split_at(row.len());
        if x1.is_empty() {
            sums[0][i] = dot_one(row, x0);
        } else {
            [sums[0][i], sums[1][i]] = dot_two(row, x0, x1);
        }
    }
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
    /// [`dot_one`] for two x, with the same bits.
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
