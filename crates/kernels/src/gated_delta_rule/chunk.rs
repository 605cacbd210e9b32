//! Parts of a chunk that forward and backward share, in per-thread scratch.

use std::ops::Range;

use super::growth::MAX_GROWTH;
use super::{Dims, Input, L2NORM_EPS};
use crate::Element;
use crate::matmul::{By, Mat, Onto, matmul_small};
use crate::scratch::take;
use crate::shared::Shared;
use crate::simd::{dot_body, exp_f32, fma, prefetch, scale_rows_into, simd_fn, sum_of_squares};

/// Rows that are substituted one by one, and the block size along a triangle's diagonal; the rest are matrix
/// products.
const BLOCK: usize = 8;
/// Columns of [`lower_products`] that are computed together.
const COLUMNS: usize = 16;

/// Number of computed columns of row i of a [c, c] triangle: up to the diagonal, rounded up to whole vectors.
pub(super) fn reach(i: usize, c: usize) -> usize {
    c.min((i / COLUMNS + 1) * COLUMNS)
}

/// K, Q and their products in a chunk of one key head, shared by the value heads of the group.
pub(super) struct Keys<'s> {
    /// K rows, then Q rows: [2c, dk], normalized
    pub(super) kq: &'s mut [f32],
    /// [K; Q] K^T on and below the diagonals: [2c, c]
    pub(super) products: &'s mut [f32],
    /// 1 / sqrt(sum x^2 + eps) of K rows, then Q rows, if they are normalized here: [2c]
    pub(super) rstd: &'s mut [f32],
}

impl<'s> Keys<'s> {
    pub(super) fn len(dims: Dims, chunk: usize) -> usize {
        2 * chunk * dims.key_dim + 2 * chunk * chunk + 2 * chunk
    }

    pub(super) fn take(slot: &mut &'s mut [f32], dims: Dims, chunk: usize) -> Keys<'s> {
        Keys {
            kq: take(slot, 2 * chunk * dims.key_dim),
            products: take(slot, 2 * chunk * chunk),
            rstd: take(slot, 2 * chunk),
        }
    }

    /// The n-th of several stored consecutively.
    pub(super) fn nth(memory: &'s mut [f32], n: usize, dims: Dims, chunk: usize) -> Keys<'s> {
        Keys::take(&mut &mut memory[n * Keys::len(dims, chunk)..], dims, chunk)
    }

    /// Loads tokens `first..first + c` of one key head, normalizes them if `norm`, and computes the products.
    pub(super) fn load<T: Element>(
        &mut self,
        dims: Dims,
        q: &[T],
        k: &[T],
        key_head: usize,
        first: usize,
        c: usize,
        norm: bool,
    ) {
        let (dk, stride) = (dims.key_dim, dims.key_heads * dims.key_dim);
        let begin = first * stride + key_head * dk;
        for (i, source) in [k, q].into_iter().enumerate() {
            let to = &mut self.kq[i * c * dk..(i + 1) * c * dk];
            if norm {
                load_normalized(to, &mut self.rstd[i * c..(i + 1) * c], &source[begin..], stride, dk);
            } else {
                load_rows(to, &source[begin..], stride, dk);
            }
        }
        let kq = Mat::dense(&self.kq[..2 * c * dk], 2 * c, dk);
        lower_products(self.products, kq, kq.part(0..c, 0..dk));
    }
}

/// Rows `stride` apart into rows without gaps.
pub(super) fn load_rows<T: Element>(to: &mut [f32], source: &[T], stride: usize, width: usize) {
    for (i, row) in to.chunks_exact_mut(width).enumerate() {
        T::load(row, &source[i * stride..i * stride + width]);
    }
}

simd_fn! {
    /// Rows `stride` apart into rows without gaps, normalized; the factors go to `rstd`.
    fn load_normalized<T: Element>(to: &mut [f32], rstd: &mut [f32], source: &[T], stride: usize, width: usize) {
        for (i, (row, rstd)) in to.chunks_exact_mut(width).zip(rstd).enumerate() {
            for (x, y) in row.iter_mut().zip(&source[i * stride..i * stride + width]) {
                *x = y.to_f32();
            }
            *rstd = 1.0 / (dot_body::<FMA>(row, row) + L2NORM_EPS).sqrt();
            for x in row {
                *x *= *rstd;
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

/// Prefetches the rows of one head of these tokens.
pub(super) fn prefetch_rows<T>(x: &[T], heads: usize, head: usize, width: usize, tokens: Range<usize>) {
    for token in tokens {
        let at = (token * heads + head) * width;
        prefetch(&x[at..at + width]);
    }
}

/// [`prefetch_rows`] for rows that will be written.
///
/// # Safety
/// No part of these rows may be written elsewhere during the call.
pub(super) unsafe fn prefetch_targets<T>(
    x: &Shared<'_, T>,
    heads: usize,
    head: usize,
    width: usize,
    tokens: Range<usize>,
) {
    for token in tokens {
        // SAFETY: the caller's guarantee.
        prefetch(unsafe { x.part((token * heads + head) * width, width) });
    }
}

/// A B^T for A [c, w] or two of them stacked, and B [c, w]; of row i the columns below [`reach`].
pub(super) fn lower_products(out: &mut [f32], a: Mat<'_>, b: Mat<'_>) {
    let (c, width) = (b.rows(), b.columns());
    for begin in (0..c).step_by(COLUMNS) {
        let columns = begin..c.min(begin + COLUMNS);
        let (a, b) = (a.part(begin..a.rows(), 0..width), b.part(columns, 0..width).t());
        matmul_small(&mut out[begin * c + begin..], c, Onto::Nothing, By::All(1.0), a, b);
    }
}

/// Half of a triangular matrix that is stored, with the diagonal.
#[derive(Clone, Copy)]
pub(super) enum Half {
    Lower,
    Upper,
}

/// C += by A B for triangular A [c, c]. Its other half must be zero near the diagonal and is not read
/// elsewhere.
pub(super) fn triangle_add(out: &mut [f32], by: f32, a: Mat<'_>, half: Half, b: Mat<'_>) {
    let (c, width) = (a.rows(), b.columns());
    for begin in (0..c).step_by(BLOCK) {
        let rows = begin..c.min(begin + BLOCK);
        let inner = match half {
            Half::Lower => 0..rows.end,
            Half::Upper => begin..c,
        };
        let (a, b) = (a.part(rows, inner.clone()), b.part(inner, 0..width));
        matmul_small(&mut out[begin * width..], width, Onto::Itself(1.0), By::All(by), a, b);
    }
}

/// Gates, L, X and Vn in a chunk of one value head.
pub(super) struct Head<'s> {
    /// [c]
    pub(super) beta: &'s mut [f32],
    /// e^{G_i}: [c]
    pub(super) e: &'s mut [f32],
    /// e^{G_C - G_i}: [c]
    pub(super) d: &'s mut [f32],
    /// D_ij on and below the diagonal: [c, c]
    pub(super) decay: &'s mut [f32],
    /// [c, c], strictly lower
    pub(super) l: &'s mut [f32],
    /// V - E K S: [c, dv]
    pub(super) x: &'s mut [f32],
    /// [c, dv]
    pub(super) vn: &'s mut [f32],
}

impl<'s> Head<'s> {
    pub(super) fn len(dims: Dims, chunk: usize) -> usize {
        3 * chunk + 2 * chunk * chunk + 2 * chunk * dims.value_dim
    }

    pub(super) fn take(slot: &mut &'s mut [f32], dims: Dims, chunk: usize) -> Head<'s> {
        Head {
            beta: take(slot, chunk),
            e: take(slot, chunk),
            d: take(slot, chunk),
            decay: take(slot, chunk * chunk),
            l: take(slot, chunk * chunk),
            x: take(slot, chunk * dims.value_dim),
            vn: take(slot, chunk * dims.value_dim),
        }
    }

    /// The n-th of several stored consecutively.
    pub(super) fn nth(memory: &'s mut [f32], n: usize, dims: Dims, chunk: usize) -> Head<'s> {
        Head::take(&mut &mut memory[n * Head::len(dims, chunk)..], dims, chunk)
    }

    /// Gates, L, X and Vn of tokens `first..first + c` of value head `head`, given the state before the
    /// chunk.
    pub(super) fn load<T: Element>(
        &mut self,
        dims: Dims,
        input: &Input<'_, T>,
        keys: &Keys<'_>,
        state: &[f32],
        head: usize,
        first: usize,
        c: usize,
    ) {
        let (dk, dv, heads) = (dims.key_dim, dims.value_dim, dims.value_heads);
        let mut sums = [0f64; 256];
        let mut sum = 0f64;
        input.gates.load(&mut self.e[..c], &mut self.beta[..c], first, head, heads);
        for (g, to) in self.e[..c].iter().zip(&mut sums) {
            sum += if *g < RESET { RESET } else { *g } as f64;
            *to = sum;
        }
        for i in 0..c {
            self.e[i] = sums[i] as f32;
            self.d[i] = (sum - sums[i]) as f32;
        }
        decays(&mut self.e[..c]);
        decays(&mut self.d[..c]);
        mutual_decays(self.decay, &sums, c);
        gate_keys(self.l, keys.products, self.decay, self.beta, c);
        load_rows(&mut self.x[..c * dv], &input.v[(first * heads + head) * dv..], heads * dv, dv);
        let mut minus_e = [0f32; 256];
        for (minus_e, e) in minus_e.iter_mut().zip(&self.e[..c]) {
            *minus_e = -e;
        }
        let (k, state) = (Mat::dense(&keys.kq[..c * dk], c, dk), Mat::dense(state, dk, dv));
        matmul_small(self.x, dv, Onto::Itself(1.0), By::Rows(&minus_e), k, state);
        scale_rows_into(&mut self.vn[..c * dv], &self.beta[..c], &self.x[..c * dv], dv);
        substitute(&mut self.vn[..c * dv], &self.l[..c * c], c, dv);
    }

    /// S' = E_C S + K^T (d Vn), where S is `from`, or what `to` holds; `spare` is [c, dv].
    pub(super) fn advance(
        &self,
        to: &mut [f32],
        from: Option<&[f32]>,
        spare: &mut [f32],
        keys: &Keys<'_>,
        dims: Dims,
        c: usize,
    ) {
        let (dk, dv) = (dims.key_dim, dims.value_dim);
        let d_vn = &mut spare[..c * dv];
        scale_rows_into(d_vn, &self.d[..c], &self.vn[..c * dv], dv);
        let (k, e_c) = (Mat::dense(&keys.kq[..c * dk], c, dk), self.e[c - 1]);
        let onto = from.map_or(Onto::Itself(e_c), |from| Onto::Other(e_c, from));
        matmul_small(to, dv, onto, By::All(1.0), k.t(), Mat::dense(d_vn, c, dv));
    }
}

/// Logarithm of the least decay, 2^-100; what is below counts as zero. Products with it would be subnormal
/// numbers, which Intel processors compute many times slower.
const LEAST_DECAY: f32 = -69.31;

/// Log decay that stands for all below it: zero as they are, and differences of its sums keep their digits.
const RESET: f32 = -1e6;

/// e^x.
#[inline(always)]
fn decay_f32<const FMA: bool>(x: f32) -> f32 {
    if x < LEAST_DECAY { 0.0 } else { exp_f32::<FMA>(x) }
}

simd_fn! {
    /// e^x of every value.
    fn decays(x: &mut [f32]) {
        for x in x {
            *x = decay_f32::<FMA>(*x);
        }
    }
}

simd_fn! {
    /// D_ij = e^{G_i - G_j}; above the diagonal, where that may be huge, any finite value.
    fn mutual_decays(decay: &mut [f32], sums: &[f64; 256], c: usize) {
        for (i, row) in decay[..c * c].chunks_exact_mut(c).enumerate() {
            let row = &mut row[..reach(i, c)];
            for (x, s) in row.iter_mut().zip(sums) {
                *x = (sums[i] - *s).min(MAX_GROWTH) as f32;
            }
            for x in row {
                *x = decay_f32::<FMA>(*x);
            }
        }
    }
}

simd_fn! {
    /// L_ij = beta_i (k_i.k_j) D_ij below the diagonal, zero near it on the other side.
    fn gate_keys(l: &mut [f32], products: &[f32], decay: &[f32], beta: &[f32], c: usize) {
        for i in 0..c {
            let row = i * c..i * c + reach(i, c);
            let (l, kk, decay) = (&mut l[row.clone()], &products[row.clone()], &decay[row]);
            for (j, ((l, kk), decay)) in l.iter_mut().zip(kk).zip(decay).enumerate() {
                *l = if j < i { beta[i] * *kk * *decay } else { 0.0 };
            }
        }
    }
}

simd_fn! {
    /// P_ij = (q_i.k_j) D_ij on and below the diagonal, zero near it on the other side.
    pub(super) fn gate_queries(p: &mut [f32], products: &[f32], decay: &[f32], c: usize) {
        let products = &products[c * c..];
        for i in 0..c {
            let row = i * c..i * c + reach(i, c);
            let (p, qk, decay) = (&mut p[row.clone()], &products[row.clone()], &decay[row]);
            for (j, ((p, qk), decay)) in p.iter_mut().zip(qk).zip(decay).enumerate() {
                *p = if j <= i { *qk * *decay } else { 0.0 };
            }
        }
    }
}

/// X = (I + L)^-1 X, L strictly lower [c, c], X [c, width].
fn substitute(x: &mut [f32], l: &[f32], c: usize, width: usize) {
    let whole = Mat::dense(l, c, c);
    for begin in (0..c).step_by(BLOCK) {
        let end = c.min(begin + BLOCK);
        let (done, rest) = x.split_at_mut(begin * width);
        let (here, done) = (&mut rest[..(end - begin) * width], Mat::dense(done, begin, width));
        if begin > 0 {
            let left = whole.part(begin..end, 0..begin);
            matmul_small(here, width, Onto::Itself(1.0), By::All(-1.0), left, done);
        }
        substitute_block(here, &l[begin * c + begin..], end - begin, c, width);
    }
}

/// X = (I + L)^-T X.
pub(super) fn substitute_transposed(x: &mut [f32], l: &[f32], c: usize, width: usize) {
    let whole = Mat::dense(l, c, c);
    for begin in (0..c).step_by(BLOCK).rev() {
        let end = c.min(begin + BLOCK);
        let (head, done) = x.split_at_mut(end * width);
        let (here, done) = (&mut head[begin * width..], Mat::dense(done, c - end, width));
        if end < c {
            let below = whole.part(end..c, begin..end).t();
            matmul_small(here, width, Onto::Itself(1.0), By::All(-1.0), below, done);
        }
        substitute_block_transposed(here, &l[begin * c + begin..], end - begin, c, width);
    }
}

simd_fn! {
    /// X = (I + L)^-1 X, row by row; L's rows are `stride` apart.
    fn substitute_block(x: &mut [f32], l: &[f32], rows: usize, stride: usize, width: usize) {
        for i in 1..rows {
            let (above, here) = x.split_at_mut(i * width);
            subtract_rows::<FMA>(&mut here[..width], above, |j| l[i * stride + j]);
        }
    }
}

simd_fn! {
    /// X = (I + L)^-T X, row by row from the last; L's rows are `stride` apart.
    fn substitute_block_transposed(x: &mut [f32], l: &[f32], rows: usize, stride: usize, width: usize) {
        for i in (0..rows).rev() {
            let (above, below) = x.split_at_mut((i + 1) * width);
            subtract_rows::<FMA>(&mut above[i * width..], below, |j| l[(i + 1 + j) * stride + i]);
        }
    }
}

/// row -= sum over j of by(j) times row j of `rows`, strip by strip so that it stays in registers.
#[inline(always)]
fn subtract_rows<const FMA: bool>(row: &mut [f32], rows: &[f32], by: impl Fn(usize) -> f32) {
    const STRIP: usize = 32;
    let width = row.len();
    let (strips, rest) = row.as_chunks_mut::<STRIP>();
    let after = strips.len() * STRIP;
    for (s, strip) in strips.iter_mut().enumerate() {
        let mut sums = *strip;
        for (j, other) in rows.chunks_exact(width).enumerate() {
            let (by, other) = (-by(j), &other[s * STRIP..(s + 1) * STRIP]);
            for i in 0..STRIP {
                sums[i] = fma::<FMA>(by, other[i], sums[i]);
            }
        }
        *strip = sums;
    }
    for (j, other) in rows.chunks_exact(width).enumerate() {
        let by = -by(j);
        for (x, y) in rest.iter_mut().zip(&other[after..]) {
            *x = fma::<FMA>(by, *y, *x);
        }
    }
}
