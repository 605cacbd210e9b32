//! Tiles of queries and keys, shared by forward, backward and decode: layout, logits, exponentials.

use std::ops::Range;

use super::Saved;
use super::{Dims, Input, Options, Selected, UNUSED};
use crate::Element;
use crate::matmul::{AMX_SCRATCH, Left, Mat, matmul, matmul_add, matmul_amx};
use crate::rounding::{Rounding, to_bf16, to_f16};
use crate::simd::{Level, axpy, dot, exp_f32, level, simd_fn, sum_lanes, tanh_f32};

/// Approximate number of rows of a tile: the query heads of one kv head, stacked.
const ROWS: usize = 256;

/// Keys of a tile.
pub(crate) const KEYS: usize = 256;

/// Tokens of a block of queries: a power of two, so that blocks divide the [`KEYS`] tokens of a block in
/// backward.
pub(crate) fn block_tokens(dims: Dims) -> usize {
    let tokens = (ROWS / dims.group()).clamp(1, 128);
    1 << tokens.ilog2()
}

/// Rows of a block of queries.
pub(crate) fn block_rows(dims: Dims) -> usize {
    block_tokens(dims) * dims.group()
}

/// Queries and the keys of the same sequence: query i is row `query + i` and has position `offset + i`, the
/// key at position j is row `key + j`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    pub(crate) query: usize,
    pub(crate) queries: usize,
    pub(crate) key: usize,
    pub(crate) offset: usize,
}

impl Span {
    /// Number of keys.
    pub(crate) fn keys(&self) -> usize {
        self.offset + self.queries
    }
}

/// Spans of the packed sequences, the first of which has `before` keys before its first query.
pub(crate) fn spans(cu_seqlens: &[usize], before: usize) -> Vec<Span> {
    let span = |(number, w): (usize, &[usize])| match number {
        0 => Span { query: 0, queries: w[1], key: 0, offset: before },
        _ => Span { query: w[0], queries: w[1] - w[0], key: before + w[0], offset: 0 },
    };
    cu_seqlens.windows(2).enumerate().map(span).collect()
}

/// Positions within a span.
#[derive(Clone, Copy)]
pub(crate) enum Keys<'a> {
    /// `count` keys from `first` on.
    Range { first: usize, count: usize },
    /// These positions, in this order.
    List(&'a [u32]),
}

impl Keys<'_> {
    pub(crate) fn len(&self) -> usize {
        match self {
            Keys::Range { count, .. } => *count,
            Keys::List(list) => list.len(),
        }
    }
}

/// Tiles of a range of keys, cut at multiples of [`KEYS`]. Forward and backward cut queries and keys at the
/// same positions, so backward recomputes every product by the same operations, with the same bits.
pub(crate) fn tiles<'k>(keys: Range<usize>) -> impl Iterator<Item = Keys<'k>> + Clone {
    let numbers = keys.start / KEYS..if keys.is_empty() { 0 } else { keys.end.div_ceil(KEYS) };
    numbers.map(move |number| {
        let first = keys.start.max(number * KEYS);
        Keys::Range { first, count: keys.end.min((number + 1) * KEYS) - first }
    })
}

/// Number of f32 of the buffer of [`key_rows`] for `width` columns of a tile.
pub(crate) fn key_rows_len<T: Element>(width: usize, gathered: bool) -> usize {
    if gathered || T::as_f32(&[]).is_none() { KEYS * width } else { 0 }
}

/// Rows `keys` of one head of [rows, heads, width] as a matrix: a view if possible, else a copy in `buffer`.
pub(crate) fn key_rows<'a, T: Element>(
    buffer: &'a mut [f32],
    data: &'a [T],
    keys: Keys<'_>,
    span: Span,
    head: usize,
    heads: usize,
    width: usize,
) -> Mat<'a> {
    let stride = heads * width;
    let at = |position: usize| (span.key + position) * stride + head * width;
    match keys {
        Keys::Range { first, count } => {
            if let Some(data) = T::as_f32(data) {
                return Mat::new(&data[at(first)..], count, width, stride);
            }
            for (i, row) in buffer.chunks_exact_mut(width).take(count).enumerate() {
                T::load(row, &data[at(first + i)..at(first + i) + width]);
            }
        }
        Keys::List(list) => {
            for (row, position) in buffer.chunks_exact_mut(width).zip(list) {
                let at = at(*position as usize);
                T::load(row, &data[at..at + width]);
            }
        }
    }
    Mat::dense(&*buffer, keys.len(), width)
}

/// Rows of `tokens` queries of one kv head, [tokens x group, width], from [rows, heads, width].
pub(crate) fn load_rows<T: Element>(
    rows: &mut [f32],
    data: &[T],
    first: usize,
    tokens: usize,
    kv_head: usize,
    dims: Dims,
    width: usize,
) {
    let len = dims.group() * width;
    for (i, row) in rows.chunks_exact_mut(len).take(tokens).enumerate() {
        let at = (first + i) * dims.heads * width + kv_head * len;
        T::load(row, &data[at..at + len]);
    }
}

/// Most rows for which a product reads the other matrix once, row by row, without packing: faster than
/// blocks.
const FEW_ROWS: usize = 4;

/// Number of f32 of the panels of a product with tensors of this type: none unless they are bf16 and the machine
/// has AMX. Rows that were widened are exact in bf16, and a product with panels relies on it.
pub(crate) fn panels_len<T: Element>() -> usize {
    if level() >= Level::Amx && T::as_bf16(&[]).is_some() { AMX_SCRATCH } else { 0 }
}

/// c = by a b^T; a [m, n] and b [k, n] have contiguous rows, exact in bf16 if there are panels.
pub(crate) fn product_t(c: &mut [f32], by: f32, a: Mat<'_>, b: Mat<'_>, panels: &mut [f32]) {
    if a.rows() > FEW_ROWS && !panels.is_empty() {
        matmul_amx(c, false, Left::Narrow(a), b.t(), panels);
        return scale(c, by);
    }
    if a.rows() > FEW_ROWS {
        return matmul(c, by, a, b.t());
    }
    for j in 0..b.rows() {
        for i in 0..a.rows() {
            c[i * b.rows() + j] = by * dot(a.row(i), b.row(j));
        }
    }
}

/// c [m, n] += by a b; a [m, k] and b [k, n] have contiguous rows.
pub(crate) fn product_add(c: &mut [f32], by: f32, a: Mat<'_>, b: Mat<'_>) {
    if a.rows() > FEW_ROWS {
        return matmul_add(c, by, a, b);
    }
    for j in 0..b.rows() {
        let row = b.row(j);
        for (i, c) in c.chunks_exact_mut(row.len()).enumerate() {
            axpy(c, by * a.row(i)[j], row);
        }
    }
}

/// c += by a b, or a^T b with `transposed`; b is exact in bf16 if there are panels. `seen(i)` are the columns of
/// row i of a that may be non-zero. A zero of a cancels its partner even if that is non-finite: 0 times infinity
/// would be NaN.
pub(crate) fn masked_product_add(
    c: &mut [f32],
    by: f32,
    a: Mat<'_>,
    b: Mat<'_>,
    transposed: bool,
    seen: impl Fn(usize) -> Range<usize>,
    panels: &mut [f32],
) {
    let width = b.row(0).len();
    let mut plain = |c: &mut [f32], b: Mat<'_>| match transposed {
        _ if a.rows() > FEW_ROWS && !panels.is_empty() => {
            let a = if transposed { a.t() } else { a };
            matmul_amx(c, true, Left::Wide(a, by), b, panels);
        }
        true => matmul_add(c, by, a.t(), b),
        false => product_add(c, by, a, b),
    };
    // Only a tile at the edge of the mask has hidden columns.
    let whole = (0..a.rows()).all(|i| seen(i).len() == a.row(0).len());
    if whole || (0..b.rows()).all(|i| is_finite(b.row(i))) {
        return plain(c, b);
    }
    // Rare, so an allocation is acceptable: the product without the non-finite rows of b, then these rows
    // separately.
    let mut rest = Vec::with_capacity(b.rows() * width);
    for i in 0..b.rows() {
        let row = b.row(i);
        if is_finite(row) { rest.extend_from_slice(row) } else { rest.resize(rest.len() + width, 0.0) }
    }
    plain(c, Mat::dense(&rest, b.rows(), width));
    for k in (0..b.rows()).filter(|k| !is_finite(b.row(*k))) {
        for i in 0..a.rows() {
            for j in seen(i) {
                // (row of b, row of c) of the element (i, j) of a
                let (from, to) = if transposed { (i, j) } else { (j, i) };
                if from == k {
                    axpy(&mut c[to * width..(to + 1) * width], by * a.row(i)[j], b.row(k));
                }
            }
        }
    }
}

/// Tensors and settings of one call.
#[derive(Clone, Copy)]
pub(crate) struct Problem<'a, T> {
    pub(crate) q: &'a [T],
    pub(crate) k: &'a [T],
    pub(crate) v: &'a [T],
    pub(crate) sinks: Option<&'a [f32]>,
    pub(crate) selected: Option<Selected<'a>>,
    pub(crate) dims: Dims,
    pub(crate) options: Options,
}

impl<'a, T: Element> Problem<'a, T> {
    pub(crate) fn new(input: &Input<'a, T>, dims: Dims, options: &Options) -> Problem<'a, T> {
        let Input { q, k, v, sinks, selected, .. } = *input;
        Problem { q, k, v, sinks, selected, dims, options: *options }
    }

    /// Keys that some query of the block sees.
    pub(crate) fn block_keys(&self, span: Span, first: usize, tokens: usize) -> Range<usize> {
        let begin = self.options.visible(span.offset + first).start;
        let end = self.options.visible(span.offset + first + tokens - 1).end;
        begin..end.max(begin)
    }

    /// Columns of the tile `keys` that query i sees; all columns of a list.
    pub(crate) fn columns(&self, span: Span, i: usize, keys: Keys<'_>) -> Range<usize> {
        match keys {
            Keys::Range { first, count } => {
                let visible = self.options.visible(span.offset + i);
                let begin = visible.start.max(first).min(first + count) - first;
                let end = visible.end.max(first).min(first + count) - first;
                begin..end.max(begin)
            }
            Keys::List(list) => 0..list.len(),
        }
    }

    /// Writes the positions that query i sees to the front of `list`; returns their number.
    pub(crate) fn list_keys(&self, list: &mut [u32], selected: Selected<'_>, span: Span, i: usize) -> usize {
        let visible = self.options.visible(span.offset + i);
        let row = span.query + i;
        let mut count = 0;
        for key in &selected.keys[row * selected.topk..(row + 1) * selected.topk] {
            if *key != UNUSED && visible.contains(&(*key as usize)) {
                list[count] = *key;
                count += 1;
            }
        }
        count
    }

    /// x [rows, keys] of q [rows, hd] and k [keys, hd], as they enter the softmax.
    pub(crate) fn logits(&self, x: &mut [f32], q: Mat<'_>, k: Mat<'_>, panels: &mut [f32]) {
        product_t(x, self.options.scale(self.dims), q, k, panels);
        self.options.qk_product.round_all(x);
        if let Some(cap) = self.options.soft_cap {
            soft_cap(x, cap);
            self.options.qk_product.round_all(x);
        }
        self.options.logits.round_all(x);
    }

    /// The sink of a query head as it enters the softmax.
    pub(crate) fn sink(&self, head: usize) -> Option<f32> {
        self.sinks.map(|sinks| self.options.logits.round(sinks[head]))
    }

    /// Replaces x by p, for the query row (token, head) numbered `at` in [tokens, heads].
    pub(crate) fn probabilities(&self, x: &mut [f32], saved: &Saved, at: usize) {
        match self.options.logits {
            Rounding::F32 => exp_minus(x, saved.lse[at]),
            logits => {
                let (max, sum) = (saved.max_sum[2 * at], saved.max_sum[2 * at + 1]);
                exp_minus_lowered(x, max, logits);
                divide(x, sum);
            }
        }
    }
}

simd_fn! {
    /// Returns true if all values are finite.
    fn is_finite(x: &[f32]) -> bool {
        const EXPONENT: u32 = 0x7f80_0000;
        let mut found = false;
        for x in x {
            found |= x.to_bits() & EXPONENT == EXPONENT;
        }
        !found
    }
}

simd_fn! {
    fn soft_cap(x: &mut [f32], cap: f32) {
        for x in x {
            *x = cap * tanh_f32::<FMA>(*x / cap);
        }
    }
}

simd_fn! {
    /// Largest value, or -inf if there is none. A NaN is ignored here; it reappears in the sum.
    pub(crate) fn maximum(x: &[f32]) -> f32 {
        let mut lanes = [f32::NEG_INFINITY; 16];
        let chunks = x.chunks_exact(16);
        let rest = chunks.remainder();
        for chunk in chunks {
            for i in 0..16 {
                lanes[i] = if chunk[i] > lanes[i] { chunk[i] } else { lanes[i] };
            }
        }
        for i in 0..rest.len() {
            lanes[i] = if rest[i] > lanes[i] { rest[i] } else { lanes[i] };
        }
        let mut max = lanes[0];
        for lane in lanes {
            max = if lane > max { lane } else { max };
        }
        max
    }
}

simd_fn! {
    /// x = e^(x - max); returns the sum.
    pub(crate) fn exp_minus_sum(x: &mut [f32], max: f32) -> f32 {
        let mut lanes = [0f32; 16];
        let mut chunks = x.chunks_exact_mut(16);
        for chunk in &mut chunks {
            for i in 0..16 {
                chunk[i] = exp_f32::<FMA>(chunk[i] - max);
                lanes[i] += chunk[i];
            }
        }
        for (x, lane) in chunks.into_remainder().iter_mut().zip(&mut lanes) {
            *x = exp_f32::<FMA>(*x - max);
            *lane += *x;
        }
        sum_lanes(lanes)
    }
}

simd_fn! {
    /// x = e^(x - lse).
    fn exp_minus(x: &mut [f32], lse: f32) {
        for x in x {
            *x = exp_f32::<FMA>(*x - lse);
        }
    }
}

simd_fn! {
    /// x = e^(x - max), rounded after each of the two.
    pub(crate) fn exp_minus_lowered(x: &mut [f32], max: f32, precision: Rounding) {
        match precision {
            Rounding::F32 => x.iter_mut().for_each(|x| *x = exp_f32::<FMA>(*x - max)),
            Rounding::Bf16 => x.iter_mut().for_each(|x| *x = to_bf16(exp_f32::<FMA>(to_bf16(*x - max)))),
            Rounding::F16 => x.iter_mut().for_each(|x| *x = to_f16(exp_f32::<FMA>(to_f16(*x - max)))),
        }
    }
}

simd_fn! {
    pub(crate) fn scale(x: &mut [f32], by: f32) {
        for x in x {
            *x *= by;
        }
    }
}

simd_fn! {
    pub(crate) fn divide(x: &mut [f32], by: f32) {
        for x in x {
            *x /= by;
        }
    }
}

/// e^(x - max) of one value, rounded as the rows are.
pub(crate) fn exp_minus_one(x: f32, max: f32, precision: Rounding) -> f32 {
    let mut value = [x];
    exp_minus_lowered(&mut value, max, precision);
    value[0]
}
