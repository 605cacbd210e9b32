//! The pieces of a chunk that forward and backward share, on thread-local scratch.

use super::{Dims, Input, L2NORM_EPS};
use crate::Element;
use crate::matmul::{Mat, matmul, matmul_strided};
use crate::scratch::take;
use crate::simd::{dot_body, exp_f32, fma, prefetch, scale_rows, simd_fn, sum_of_squares};

/// Rows that are substituted one by one; everything outside such a block is a matrix product.
const BLOCK: usize = 16;

/// What is known of a chunk of one key head: K and Q and their products, shared by the group's value heads.
pub(super) struct Keys<'s> {
    /// K rows, then Q rows: [2c, dk], normalised
    pub(super) kq: &'s mut [f32],
    /// [K; Q] K^T: [2c, c]
    pub(super) products: &'s mut [f32],
}

impl<'s> Keys<'s> {
    pub(super) fn len(dims: Dims, chunk: usize) -> usize {
        2 * chunk * dims.key_dim + 2 * chunk * chunk
    }

    pub(super) fn take(slot: &mut &'s mut [f32], dims: Dims, chunk: usize) -> Keys<'s> {
        Keys { kq: take(slot, 2 * chunk * dims.key_dim), products: take(slot, 2 * chunk * chunk) }
    }

    /// Loads tokens `first..first + c` of one key head, normalises, multiplies. `rstd` gets the factors of K and
    /// Q by token when there is a norm.
    pub(super) fn load<T: Element>(
        &mut self,
        dims: Dims,
        q: &[T],
        k: &[T],
        key_head: usize,
        first: usize,
        c: usize,
        mut rstd: Option<&mut dyn FnMut(usize, f32, f32)>,
    ) {
        let dk = dims.key_dim;
        let at = |i: usize| ((first + i) * dims.key_heads + key_head) * dk;
        let (k_rows, q_rows) = self.kq[..2 * c * dk].split_at_mut(c * dk);
        for (i, (k_row, q_row)) in k_rows.chunks_exact_mut(dk).zip(q_rows.chunks_exact_mut(dk)).enumerate() {
            T::load(k_row, &k[at(i)..at(i) + dk]);
            T::load(q_row, &q[at(i)..at(i) + dk]);
        }
        if let Some(rstd) = &mut rstd {
            let mut factors = [0f32; 512];
            l2norm_rows(&mut self.kq[..2 * c * dk], &mut factors[..2 * c], dk);
            for i in 0..c {
                rstd(i, factors[i], factors[c + i]);
            }
        }
        let kq = Mat::dense(&self.kq[..2 * c * dk], 2 * c, dk);
        let k = Mat::dense(&self.kq[..c * dk], c, dk);
        matmul(&mut self.products[..2 * c * c], 1.0, kq, k.t());
    }
}

simd_fn! {
    /// Every row times its factor, which is kept.
    fn l2norm_rows(x: &mut [f32], factors: &mut [f32], width: usize) {
        for (row, factor) in x.chunks_exact_mut(width).zip(factors) {
            *factor = 1.0 / (dot_body::<FMA>(row, row) + L2NORM_EPS).sqrt();
            for x in row {
                *x *= *factor;
            }
        }
    }
}

/// 1 / sqrt(sum x^2 + eps).
pub(super) fn l2_rstd(x: &[f32]) -> f32 {
    1.0 / (sum_of_squares(x) + L2NORM_EPS).sqrt()
}

simd_fn! {
    pub(super) fn scale(x: &mut [f32], by: f32) {
        for x in x {
            *x *= by;
        }
    }
}

/// Asks for the rows of head `head` that the chunk at token `first` will need.
pub(super) fn prefetch_rows<T>(x: &[T], heads: usize, head: usize, width: usize, first: usize, end: usize) {
    for token in first..end {
        let at = (token * heads + head) * width;
        prefetch(&x[at..at + width]);
    }
}

/// What is known of a chunk of one value head.
pub(super) struct Head<'s> {
    /// [c]
    pub(super) beta: &'s mut [f32],
    /// e^{G_i}: [c]
    pub(super) e: &'s mut [f32],
    /// e^{G_C - G_i}: [c]
    pub(super) d: &'s mut [f32],
    /// D_ij, zero above the diagonal: [c, c]
    pub(super) decay: &'s mut [f32],
    /// [c, c], strictly lower
    pub(super) l: &'s mut [f32],
    /// [c, c], lower
    pub(super) p: &'s mut [f32],
    /// K S, then Q S where it was asked for: [2c, dv]
    pub(super) kqs: &'s mut [f32],
    /// V - E K S: [c, dv]
    pub(super) x: &'s mut [f32],
    /// [c, dv]
    pub(super) vn: &'s mut [f32],
}

impl<'s> Head<'s> {
    pub(super) fn len(dims: Dims, chunk: usize) -> usize {
        3 * chunk + 3 * chunk * chunk + 4 * chunk * dims.value_dim
    }

    pub(super) fn take(slot: &mut &'s mut [f32], dims: Dims, chunk: usize) -> Head<'s> {
        Head {
            beta: take(slot, chunk),
            e: take(slot, chunk),
            d: take(slot, chunk),
            decay: take(slot, chunk * chunk),
            l: take(slot, chunk * chunk),
            p: take(slot, chunk * chunk),
            kqs: take(slot, 2 * chunk * dims.value_dim),
            x: take(slot, chunk * dims.value_dim),
            vn: take(slot, chunk * dims.value_dim),
        }
    }

    /// Gates, L, P, K S (with `queries` Q S too) and Vn of tokens `first..first + c` of value head `head`, given the
    /// state that enters. Returns E_C.
    pub(super) fn load<T: Element>(
        &mut self,
        dims: Dims,
        input: &Input<'_, T>,
        keys: &Keys<'_>,
        state: &[f32],
        head: usize,
        first: usize,
        c: usize,
        queries: bool,
    ) -> f32 {
        let (dk, dv, heads) = (dims.key_dim, dims.value_dim, dims.value_heads);
        let mut sums = [0f64; 256];
        let mut sum = 0f64;
        for i in 0..c {
            let at = (first + i) * heads + head;
            sum += input.g[at] as f64;
            sums[i] = sum;
            self.beta[i] = input.beta[at];
        }
        for i in 0..c {
            self.e[i] = sums[i] as f32;
            self.d[i] = (sum - sums[i]) as f32;
        }
        crate::simd::exp(&mut self.e[..c]);
        crate::simd::exp(&mut self.d[..c]);
        decays(self.decay, &sums, c);
        gate_products(self.l, self.p, keys.products, self.decay, self.beta, c);
        let rows = if queries { 2 * c } else { c };
        let kq = Mat::dense(&keys.kq[..rows * dk], rows, dk);
        matmul(&mut self.kqs[..rows * dv], 1.0, kq, Mat::dense(state, dk, dv));
        for (i, x) in self.x[..c * dv].chunks_exact_mut(dv).enumerate() {
            let at = ((first + i) * heads + head) * dv;
            T::load(x, &input.v[at..at + dv]);
        }
        errors(self.x, self.vn, self.kqs, self.e, self.beta, c, dv);
        substitute(&mut self.vn[..c * dv], &self.l[..c * c], c, dv);
        self.e[c - 1]
    }

    /// S = E_C S + K^T (d Vn); Vn is scaled by d on the way and is not Vn any more.
    pub(super) fn advance(&mut self, state: &mut [f32], keys: &Keys<'_>, dims: Dims, c: usize) {
        let (dk, dv) = (dims.key_dim, dims.value_dim);
        scale_rows(&mut self.vn[..c * dv], &self.d[..c], dv);
        let k = Mat::dense(&keys.kq[..c * dk], c, dk);
        matmul_strided(state, dv, self.e[c - 1], 1.0, k.t(), Mat::dense(&self.vn[..c * dv], c, dv));
    }
}

simd_fn! {
    /// D_ij = e^{G_i - G_j} on and below the diagonal, zero above it.
    fn decays(decay: &mut [f32], sums: &[f64; 256], c: usize) {
        for (i, row) in decay[..c * c].chunks_exact_mut(c).enumerate() {
            for (x, s) in row[..=i].iter_mut().zip(sums) {
                *x = (sums[i] - *s) as f32;
            }
            for x in &mut row[..=i] {
                *x = exp_f32::<FMA>(*x);
            }
            row[i + 1..].fill(0.0);
        }
    }
}

simd_fn! {
    /// L_ij = beta_i (k_i.k_j) D_ij below the diagonal, P_ij = (q_i.k_j) D_ij on it too; zero elsewhere.
    fn gate_products(l: &mut [f32], p: &mut [f32], products: &[f32], decay: &[f32], beta: &[f32], c: usize) {
        let (kk, qk) = products[..2 * c * c].split_at(c * c);
        for i in 0..c {
            let (l, p) = (&mut l[i * c..(i + 1) * c], &mut p[i * c..(i + 1) * c]);
            let (kk, qk, decay) = (&kk[i * c..(i + 1) * c], &qk[i * c..(i + 1) * c], &decay[i * c..(i + 1) * c]);
            for j in 0..c {
                l[j] = beta[i] * kk[j] * decay[j];
                p[j] = qk[j] * decay[j];
            }
            // The decay is zero above the diagonal, but an infinite product would make that NaN.
            l[i..].fill(0.0);
            p[i + 1..].fill(0.0);
        }
    }
}

simd_fn! {
    /// X = V - E K S in place of V, and R = beta X.
    fn errors(x: &mut [f32], r: &mut [f32], kqs: &[f32], e: &[f32], beta: &[f32], c: usize, dv: usize) {
        for i in 0..c {
            let rows = i * dv..(i + 1) * dv;
            for ((x, r), ks) in x[rows.clone()].iter_mut().zip(&mut r[rows.clone()]).zip(&kqs[rows]) {
                *x = fma::<FMA>(-e[i], *ks, *x);
                *r = beta[i] * *x;
            }
        }
    }
}

/// X = (I + L)^-1 X, L strictly lower [c, c], X [c, width].
pub(super) fn substitute(x: &mut [f32], l: &[f32], c: usize, width: usize) {
    for begin in (0..c).step_by(BLOCK) {
        let rows = BLOCK.min(c - begin);
        let (done, rest) = x.split_at_mut(begin * width);
        if begin > 0 {
            let l_left = Mat::new(&l[begin * c..], rows, begin, c);
            matmul_strided(
                &mut rest[..rows * width],
                width,
                1.0,
                -1.0,
                l_left,
                Mat::dense(done, begin, width),
            );
        }
        substitute_block(&mut rest[..rows * width], &l[begin * c + begin..], rows, c, width);
    }
}

simd_fn! {
    /// X = (I + L)^-1 X, row by row; L's rows are `stride` apart.
    fn substitute_block(x: &mut [f32], l: &[f32], rows: usize, stride: usize, width: usize) {
        for i in 1..rows {
            let (above, here) = x.split_at_mut(i * width);
            let here = &mut here[..width];
            for (j, above) in above.chunks_exact(width).enumerate() {
                let by = -l[i * stride + j];
                for (x, y) in here.iter_mut().zip(above) {
                    *x = fma::<FMA>(by, *y, *x);
                }
            }
        }
    }
}

simd_fn! {
    /// X = (I + L)^-T X, row by row from the last; L's rows are `stride` apart.
    fn substitute_block_transposed(x: &mut [f32], l: &[f32], rows: usize, stride: usize, width: usize) {
        for i in (0..rows).rev() {
            let (above, below) = x.split_at_mut((i + 1) * width);
            let here = &mut above[i * width..];
            for (j, below) in below.chunks_exact(width).enumerate() {
                let by = -l[(i + 1 + j) * stride + i];
                for (x, y) in here.iter_mut().zip(below) {
                    *x = fma::<FMA>(by, *y, *x);
                }
            }
        }
    }
}

/// X = (I + L)^-T X.
pub(super) fn substitute_transposed(x: &mut [f32], l: &[f32], c: usize, width: usize) {
    for begin in (0..c).step_by(BLOCK).rev() {
        let rows = BLOCK.min(c - begin);
        let end = begin + rows;
        let (head, done) = x.split_at_mut(end * width);
        let here = &mut head[begin * width..];
        if end < c {
            let l_below = Mat::new(&l[end * c + begin..], c - end, rows, c).t();
            matmul_strided(here, width, 1.0, -1.0, l_below, Mat::dense(done, c - end, width));
        }
        substitute_block_transposed(here, &l[begin * c + begin..], rows, c, width);
    }
}
