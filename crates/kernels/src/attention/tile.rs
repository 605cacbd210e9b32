//! Tiles of queries and keys, shared by forward, backward and decode: layout, logits, exponentials.

use std::ops::Range;

use half::bf16;

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

    /// Position of key i.
    fn position(&self, i: usize) -> usize {
        match self {
            Keys::Range { first, .. } => first + i,
            Keys::List(list) => list[i] as usize,
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

/// Rows of q, k, v or do in a product: widened, or as they are stored where products take them so.
#[derive(Clone, Copy)]
pub(crate) enum Rows<'a> {
    Wide(Mat<'a>),
    Stored(Mat<'a, bf16>),
}

/// Number of f32 of the buffer of [`key_rows`] for `width` columns of a tile.
pub(crate) fn key_rows_len<T: Element>(width: usize, gathered: bool) -> usize {
    if gathered || T::as_f32(&[]).is_none() { KEYS * width } else { 0 }
}

/// Rows `keys` of one head of [rows, heads, width]: a view if possible, else a copy in `buffer`.
#[allow(clippy::too_many_arguments)]
pub(crate) fn key_rows<'a, T: Element>(
    buffer: &'a mut [f32],
    data: &'a [T],
    keys: Keys<'_>,
    span: Span,
    head: usize,
    heads: usize,
    width: usize,
    stored: bool,
) -> Rows<'a> {
    match T::as_bf16(data) {
        Some(data) if stored => {
            let copy = bytemuck::cast_slice_mut(buffer);
            Rows::Stored(view_or_copy(copy, data, keys, span, head, heads, width))
        }
        _ => Rows::Wide(wide_key_rows(buffer, data, keys, span, head, heads, width)),
    }
}

/// [`key_rows`] in f32.
pub(crate) fn wide_key_rows<'a, T: Element>(
    buffer: &'a mut [f32],
    data: &'a [T],
    keys: Keys<'_>,
    span: Span,
    head: usize,
    heads: usize,
    width: usize,
) -> Mat<'a> {
    if let Some(data) = T::as_f32(data) {
        return view_or_copy(buffer, data, keys, span, head, heads, width);
    }
    for (i, row) in buffer.chunks_exact_mut(width).take(keys.len()).enumerate() {
        let at = ((span.key + keys.position(i)) * heads + head) * width;
        T::load(row, &data[at..at + width]);
    }
    Mat::dense(&*buffer, keys.len(), width)
}

fn view_or_copy<'a, T: Element>(
    buffer: &'a mut [T],
    data: &'a [T],
    keys: Keys<'_>,
    span: Span,
    head: usize,
    heads: usize,
    width: usize,
) -> Mat<'a, T> {
    let at = |position: usize| ((span.key + position) * heads + head) * width;
    match keys {
        Keys::Range { first, count } => Mat::new(&data[at(first)..], count, width, heads * width),
        Keys::List(list) => {
            for (row, position) in buffer.chunks_exact_mut(width).zip(list) {
                row.copy_from_slice(&data[at(*position as usize)..][..width]);
            }
            Mat::dense(&*buffer, list.len(), width)
        }
    }
}

/// Copies the rows of `tokens` queries of one kv head, [tokens x group, width], from [rows, heads, width].
#[allow(clippy::too_many_arguments)]
pub(crate) fn load_rows<T: Element>(
    buffer: &mut [f32],
    data: &[T],
    first: usize,
    tokens: usize,
    kv_head: usize,
    dims: Dims,
    width: usize,
    stored: bool,
) {
    let len = dims.group() * width;
    let source = |i: usize| {
        let at = (first + i) * dims.heads * width + kv_head * len;
        &data[at..at + len]
    };
    if stored {
        let rows = bytemuck::cast_slice_mut::<f32, T>(buffer).chunks_exact_mut(len);
        return rows.take(tokens).enumerate().for_each(|(i, row)| row.copy_from_slice(source(i)));
    }
    buffer.chunks_exact_mut(len).take(tokens).enumerate().for_each(|(i, row)| T::load(row, source(i)));
}

/// The rows that [`load_rows`] has copied.
pub(crate) fn loaded_rows(buffer: &[f32], rows: usize, width: usize, stored: bool) -> Rows<'_> {
    match stored {
        true => Rows::Stored(Mat::dense(&bytemuck::cast_slice(buffer)[..rows * width], rows, width)),
        false => Rows::Wide(Mat::dense(&buffer[..rows * width], rows, width)),
    }
}

/// Most rows for which a product reads the other matrix once, row by row, without packing: faster than
/// blocks.
const FEW_ROWS: usize = 4;

/// Number of f32 of the panels of a product with tensors of this type: none unless they are bf16 and the machine
/// has AMX.
pub(crate) fn panels_len<T: Element>() -> usize {
    if level() >= Level::Amx && T::as_bf16(&[]).is_some() { AMX_SCRATCH } else { 0 }
}

/// Returns true if the products of so many queries take tensors of this type as they are stored.
pub(crate) fn takes_stored<T: Element>(rows: usize) -> bool {
    rows > FEW_ROWS && panels_len::<T>() > 0
}

/// c = by a b^T; a [m, n] and b [k, n], both widened or both as they are stored.
pub(crate) fn product_t(c: &mut [f32], by: f32, a: Rows<'_>, b: Rows<'_>, panels: &mut [f32]) {
    match (a, b) {
        (Rows::Stored(a), Rows::Stored(b)) => {
            matmul_amx(c, false, Left::Stored(a), b.t(), panels);
            scale(c, by);
        }
        (Rows::Wide(a), Rows::Wide(b)) if a.rows() > FEW_ROWS => matmul(c, by, a, b.t()),
        (Rows::Wide(a), Rows::Wide(b)) => {
            for j in 0..b.rows() {
                for i in 0..a.rows() {
                    c[i * b.rows() + j] = by * dot(a.row(i), b.row(j));
                }
            }
        }
        _ => unreachable!("rows of two kinds"),
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

/// Rounds `by` x, a factor of products with rows of this kind, unless they do so themselves. Returns the factor
/// that is left.
pub(crate) fn round_factor(x: &mut [f32], by: f32, rounding: Rounding, stored: bool) -> f32 {
    match rounding {
        Rounding::F32 => by,
        Rounding::Bf16 if stored => by,
        rounding => {
            scale(x, by);
            rounding.round_all(x);
            1.0
        }
    }
}

/// The left factor of a product: `by` a, or `by` a^T with `transposed`.
#[derive(Clone, Copy)]
pub(crate) struct Factor<'a> {
    pub(crate) a: Mat<'a>,
    pub(crate) by: f32,
    pub(crate) transposed: bool,
    /// Rounding of a product with stored rows. Other products take the factor as it is.
    pub(crate) rounding: Rounding,
}

/// c += factor b. `seen(i)` are the columns of row i of a that may be non-zero. A zero of a cancels its partner
/// even if that is non-finite: 0 times infinity would be NaN.
pub(crate) fn masked_product_add(
    c: &mut [f32],
    factor: Factor<'_>,
    b: Rows<'_>,
    seen: impl Fn(usize) -> Range<usize>,
    panels: &mut [f32],
) {
    let Factor { a, by, transposed, rounding } = factor;
    match b {
        Rows::Wide(b) => {
            let plain = |c: &mut [f32], b: Mat<'_>| match transposed {
                true => matmul_add(c, by, a.t(), b),
                false => product_add(c, by, a, b),
            };
            finite_first(c, factor, b, seen, plain);
        }
        Rows::Stored(b) => {
            let a = if transposed { a.t() } else { a };
            let left = match rounding {
                Rounding::Bf16 => Left::Rounded(a, by),
                _ => Left::Wide(a, by),
            };
            finite_first(c, factor, b, seen, |c, b| matmul_amx(c, true, left, b, panels));
        }
    }
}

/// `plain` without the non-finite rows of b that have hidden partners, then these rows separately.
fn finite_first<T: Element>(
    c: &mut [f32],
    Factor { a, by, transposed, .. }: Factor<'_>,
    b: Mat<'_, T>,
    seen: impl Fn(usize) -> Range<usize>,
    mut plain: impl FnMut(&mut [f32], Mat<'_, T>),
) {
    // Only a tile at the edge of the mask has hidden columns.
    let whole = (0..a.rows()).all(|i| seen(i).len() == a.row(0).len());
    if whole || (0..b.rows()).all(|i| is_finite(b.row(i))) {
        return plain(c, b);
    }
    // Rare, so an allocation is acceptable.
    let width = b.columns();
    let (mut rest, mut wide) = (Vec::with_capacity(b.rows() * width), vec![0.0; width]);
    for i in 0..b.rows() {
        let row = b.row(i);
        if is_finite(row) {
            rest.extend_from_slice(row)
        } else {
            rest.resize(rest.len() + width, T::default())
        }
    }
    plain(c, Mat::dense(&rest, b.rows(), width));
    for k in (0..b.rows()).filter(|k| !is_finite(b.row(*k))) {
        T::load(&mut wide, b.row(k));
        for i in 0..a.rows() {
            for j in seen(i) {
                // (row of b, row of c) of the element (i, j) of a
                let (from, to) = if transposed { (i, j) } else { (j, i) };
                if from == k {
                    axpy(&mut c[to * width..(to + 1) * width], by * a.row(i)[j], &wide);
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
    pub(crate) fn logits(&self, x: &mut [f32], q: Rows<'_>, k: Rows<'_>, panels: &mut [f32]) {
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

/// Returns true if all values are finite.
fn is_finite<T: Element>(x: &[T]) -> bool {
    match (T::as_f32(x), T::as_bf16(x)) {
        (Some(x), _) => is_finite_f32(x),
        (_, Some(x)) => is_finite_bf16(x),
        _ => x.iter().all(|x| x.to_f32().is_finite()),
    }
}

simd_fn! {
    fn is_finite_bf16(x: &[bf16]) -> bool {
        const EXPONENT: u16 = 0x7f80;
        let mut found = false;
        for x in x {
            found |= x.to_bits() & EXPONENT == EXPONENT;
        }
        !found
    }
}

simd_fn! {
    fn is_finite_f32(x: &[f32]) -> bool {
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
