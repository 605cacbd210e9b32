//! The pieces of a chunk that forward and backward share, on thread-local scratch.

use super::{Dims, Input, L2NORM_EPS};
use crate::Element;
use crate::matmul::{Mat, matmul, matmul_strided};
use crate::scratch::take;
use crate::simd::{axpy, exp_f32, simd_fn, sum_of_squares};

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
        for i in 0..c {
            let at = ((first + i) * dims.key_heads + key_head) * dk;
            let (k_rows, q_rows) = self.kq.split_at_mut(c * dk);
            let (k_row, q_row) = (&mut k_rows[i * dk..(i + 1) * dk], &mut q_rows[i * dk..(i + 1) * dk]);
            T::load(k_row, &k[at..at + dk]);
            T::load(q_row, &q[at..at + dk]);
            if let Some(rstd) = &mut rstd {
                let (rk, rq) = (l2_rstd(k_row), l2_rstd(q_row));
                scale(k_row, rk);
                scale(q_row, rq);
                rstd(i, rk, rq);
            }
        }
        let kq = Mat::dense(&self.kq[..2 * c * dk], 2 * c, dk);
        let k = Mat::dense(&self.kq[..c * dk], c, dk);
        matmul(&mut self.products[..2 * c * c], 1.0, kq, k.t());
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
    /// [K; Q] S: [2c, dv]
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

    /// Gates, L, P, [K;Q]S and Vn of tokens `first..first + c` of value head `head`, given the state that enters.
    /// Returns E_C.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn load<T: Element>(
        &mut self,
        dims: Dims,
        input: &Input<'_, T>,
        keys: &Keys<'_>,
        state: &[f32],
        head: usize,
        first: usize,
        c: usize,
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
            let row = &mut self.decay[i * c..(i + 1) * c];
            for (x, s) in row[..=i].iter_mut().zip(&sums) {
                *x = (sums[i] - s) as f32;
            }
            exp_prefix(row, i + 1);
        }
        crate::simd::exp(&mut self.e[..c]);
        crate::simd::exp(&mut self.d[..c]);
        for i in 0..c {
            let row = i * c..(i + 1) * c;
            let decay = &self.decay[row.clone()];
            masked_row(&mut self.l[row.clone()], &keys.products[row.clone()], decay, self.beta[i], i);
            let q_row = (c + i) * c..(c + i + 1) * c;
            masked_row(&mut self.p[row], &keys.products[q_row], decay, 1.0, i + 1);
        }
        let kqs = &mut self.kqs[..2 * c * dv];
        matmul(kqs, 1.0, Mat::dense(&keys.kq[..2 * c * dk], 2 * c, dk), Mat::dense(state, dk, dv));
        for i in 0..c {
            let at = ((first + i) * heads + head) * dv;
            let (x, vn) = (&mut self.x[i * dv..(i + 1) * dv], &mut self.vn[i * dv..(i + 1) * dv]);
            T::load(x, &input.v[at..at + dv]);
            axpy(x, -self.e[i], &self.kqs[i * dv..(i + 1) * dv]);
            crate::simd::scale_into(vn, self.beta[i], x);
        }
        substitute(&mut self.vn[..c * dv], &self.l[..c * c], c, dv);
        self.e[c - 1]
    }

    /// S = E_C S + K^T (d Vn); Vn is scaled by d on the way and is not Vn any more.
    pub(super) fn advance(&mut self, state: &mut [f32], keys: &Keys<'_>, dims: Dims, c: usize) {
        let (dk, dv) = (dims.key_dim, dims.value_dim);
        for i in 0..c {
            scale(&mut self.vn[i * dv..(i + 1) * dv], self.d[i]);
        }
        let k = Mat::dense(&keys.kq[..c * dk], c, dk);
        matmul_strided(state, dv, self.e[c - 1], 1.0, k.t(), Mat::dense(&self.vn[..c * dv], c, dv));
    }
}

simd_fn! {
    /// e^x of the first `n` values, zero behind them.
    fn exp_prefix(row: &mut [f32], n: usize) {
        for x in &mut row[..n] {
            *x = exp_f32::<FMA>(*x);
        }
        row[n..].fill(0.0);
    }
}

simd_fn! {
    /// by * products * decay in the first `n` places, zero behind them.
    fn masked_row(row: &mut [f32], products: &[f32], decay: &[f32], by: f32, n: usize) {
        for ((x, p), d) in row[..n].iter_mut().zip(products).zip(decay) {
            *x = by * *p * *d;
        }
        row[n..].fill(0.0);
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
        for i in 1..rows {
            let (above, here) = rest.split_at_mut(i * width);
            for j in 0..i {
                axpy(&mut here[..width], -l[(begin + i) * c + begin + j], &above[j * width..(j + 1) * width]);
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
        for i in (0..rows).rev() {
            let (above, below) = here.split_at_mut((i + 1) * width);
            for j in i + 1..rows {
                let row = &below[(j - i - 1) * width..(j - i) * width];
                axpy(&mut above[i * width..], -l[(begin + j) * c + begin + i], row);
            }
        }
    }
}
