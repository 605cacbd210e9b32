//! Products of f64 activations with weights that are stored in f32.
//!
//! A weight [outputs, inputs] is widened some rows at a time; tokens are divided into blocks by their number
//! alone. The products are computed by [`matmul_f64`].

use ballast_kernels::matmul::{Mat, matmul_f64};
use rayon::prelude::*;

/// Elements of a weight that are widened at a time.
const WIDENED: usize = 1 << 20;

/// Rows per task.
fn block(rows: usize) -> usize {
    rows.div_ceil(8).clamp(16, 256)
}

/// Runs `work(first row, rows, their widened values)` on all rows of w [outputs, inputs], some at a time.
fn widened(w: &[f32], inputs: usize, mut work: impl FnMut(usize, usize, &[f64])) {
    let rows = (WIDENED / inputs).max(1);
    for (i, part) in w.chunks(rows * inputs).enumerate() {
        let wide: Vec<f64> = part.iter().map(|x| *x as f64).collect();
        work(i * rows, part.len() / inputs, &wide);
    }
}

/// y [tokens, outputs] = x w^T, from x [tokens, inputs] and w [outputs, inputs].
pub fn times_transposed(x: &[f64], w: &[f32], inputs: usize, outputs: usize) -> Vec<f64> {
    let tokens = x.len() / inputs;
    let mut y = vec![0.0; tokens * outputs];
    let rows = block(tokens);
    widened(w, inputs, |first, count, wide| {
        let parts = y.par_chunks_mut(rows * outputs).zip(x.par_chunks(rows * inputs));
        parts.for_each(|(y, x)| {
            let x = Mat::dense(x, x.len() / inputs, inputs);
            matmul_f64(&mut y[first..], outputs, 1.0, x, Mat::dense(wide, count, inputs).t(), 0.0);
        });
    });
    y
}

/// dx [tokens, inputs] += dy w, from dy [tokens, outputs] and w [outputs, inputs].
pub fn add_times(dx: &mut [f64], dy: &[f64], w: &[f32], inputs: usize, outputs: usize) {
    let rows = block(dy.len() / outputs);
    widened(w, inputs, |first, count, wide| {
        let parts = dx.par_chunks_mut(rows * inputs).zip(dy.par_chunks(rows * outputs));
        parts.for_each(|(dx, dy)| {
            let tokens = dx.len() / inputs;
            let dy = Mat::dense(dy, tokens, outputs).part(0..tokens, first..first + count);
            matmul_f64(dx, inputs, 1.0, dy, Mat::dense(wide, count, inputs), 1.0);
        });
    });
}

/// dw [outputs, inputs] += dy^T x, from dy [tokens, outputs] and x [tokens, inputs].
pub fn add_outer(dw: &mut [f64], dy: &[f64], x: &[f64], inputs: usize, outputs: usize) {
    let tokens = x.len() / inputs;
    let rows = block(outputs);
    let (dy, x) = (Mat::dense(dy, tokens, outputs), Mat::dense(x, tokens, inputs));
    dw.par_chunks_mut(rows * inputs).enumerate().for_each(|(i, dw)| {
        let columns = i * rows..i * rows + dw.len() / inputs;
        matmul_f64(dw, inputs, 1.0, dy.part(0..tokens, columns).t(), x, 1.0);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_and_parts_are_put_together_as_one_product_gives_them() {
        // More rows than are widened at once.
        let (tokens, inputs, outputs) = (37, 1 << 15, 75);
        let value = |i: usize, by: usize| ((i * by) % 17) as f64 - 8.0;
        let x: Vec<f64> = (0..tokens * inputs).map(|i| value(i, 5)).collect();
        let w: Vec<f32> = (0..outputs * inputs).map(|i| value(i, 3) as f32).collect();
        let y = times_transposed(&x, &w, inputs, outputs);
        for (t, o) in [(0, 0), (36, 74), (16, 33), (15, 32)] {
            let exact: f64 = (0..inputs).map(|i| x[t * inputs + i] * w[o * inputs + i] as f64).sum();
            assert_eq!(y[t * outputs + o], exact);
        }
        let (mut dx, mut dw) = (vec![1.0; x.len()], vec![1.0; w.len()]);
        add_times(&mut dx, &y, &w, inputs, outputs);
        add_outer(&mut dw, &y, &x, inputs, outputs);
        for (t, o, i) in [(0, 0, 0), (36, 74, inputs - 1), (16, 33, 7)] {
            let exact: f64 = (0..outputs).map(|o| y[t * outputs + o] * w[o * inputs + i] as f64).sum();
            assert_eq!(dx[t * inputs + i], 1.0 + exact);
            let exact: f64 = (0..tokens).map(|t| y[t * outputs + o] * x[t * inputs + i]).sum();
            assert_eq!(dw[o * inputs + i], 1.0 + exact);
        }
    }
}
