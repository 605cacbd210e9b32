//! Indexer scores in tiles, and the selection of keys.

use std::ops::Range;

use rayon::prelude::*;

use super::ties::choose;
use super::{Dims, Input, Options, block_tokens, check_dims, check_input};
use crate::attention::UNUSED;
use crate::attention::tile::{KEYS, Keys, Span, key_rows_len, spans, wide_key_rows};
use crate::error::{Result, check, check_shape};
use crate::matmul::{Mat, matmul};
use crate::scratch::take;
use crate::shared::Shared;
use crate::simd::{fma, simd_fn};
use crate::{Element, Scratch};

/// The queries of a block, and one tile of their logits.
pub(super) struct Scorer<'s> {
    dims: Dims,
    options: Options,
    /// [tokens x heads, d]
    pub(super) q: &'s mut [f32],
    /// [tokens x heads, keys]
    pub(super) x: &'s mut [f32],
    k: &'s mut [f32],
}

impl<'s> Scorer<'s> {
    pub(super) fn len<T: Element>(dims: Dims, gathered: bool) -> usize {
        block_tokens(dims) * dims.heads * (dims.dim + KEYS) + key_rows_len::<T>(dims.dim, gathered)
    }

    pub(super) fn take<T: Element>(
        slot: &mut &'s mut [f32],
        dims: Dims,
        options: &Options,
        gathered: bool,
    ) -> Scorer<'s> {
        let rows = block_tokens(dims) * dims.heads;
        Scorer {
            dims,
            options: *options,
            q: take(slot, rows * dims.dim),
            x: take(slot, rows * KEYS),
            k: take(slot, key_rows_len::<T>(dims.dim, gathered)),
        }
    }

    pub(super) fn load<T: Element>(&mut self, input: &Input<'_, T>, row: usize, tokens: usize) {
        let width = self.dims.heads * self.dims.dim;
        T::load(&mut self.q[..tokens * width], &input.q[row * width..(row + tokens) * width]);
    }

    /// Logits x of the loaded queries and `keys`, with the rows of both.
    pub(super) fn logits<'k, T: Element>(
        &'k mut self,
        input: &'k Input<'_, T>,
        keys: Keys<'_>,
        span: Span,
        tokens: usize,
    ) -> (&'k mut [f32], &'k [f32], Mat<'k>) {
        let Dims { heads, dim } = self.dims;
        let rows = tokens * heads;
        let k = wide_key_rows(self.k, input.k, keys, span, 0, 1, dim);
        let q = &self.q[..rows * dim];
        let x = &mut self.x[..rows * keys.len()];
        matmul(x, 1.0, Mat::dense(q, rows, dim), k.t());
        self.options.logits.round_all(x);
        (x, q, k)
    }

    /// scores [tokens, stride], columns from `at` on: those of `keys`.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn scores<T: Element>(
        &mut self,
        scores: &mut [f32],
        stride: usize,
        at: usize,
        input: &Input<'_, T>,
        keys: Keys<'_>,
        span: Span,
        row: usize,
        tokens: usize,
    ) {
        let (heads, count) = (self.dims.heads, keys.len());
        let scale = (self.dims.dim as f32).powf(-0.5);
        let (x, _, _) = self.logits(input, keys, span, tokens);
        for t in 0..tokens {
            let scores = &mut scores[t * stride + at..t * stride + at + count];
            scores.fill(0.0);
            for h in 0..heads {
                let w = input.w[(row + t) * heads + h];
                let at = (t * heads + h) * count;
                add_relu(scores, w, &x[at..at + count], scale);
            }
            unsign_zeros(scores);
        }
    }
}

simd_fn! {
    /// score += w relu(x scale); a NaN stays a NaN.
    fn add_relu(scores: &mut [f32], w: f32, x: &[f32], scale: f32) {
        assert_eq!(scores.len(), x.len());
        for (score, x) in scores.iter_mut().zip(x) {
            let x = *x * scale;
            *score = fma::<FMA>(w, if x < 0.0 { 0.0 } else { x }, *score);
        }
    }
}

simd_fn! {
    /// Replaces -0 by 0, because as scores they are equal.
    fn unsign_zeros(scores: &mut [f32]) {
        for score in scores {
            *score += 0.0;
        }
    }
}

/// Number of f32 of one scratch slot of [`indexer_topk`] and [`indexer_topk_decode`]; `longest` is the length
/// of the longest sequence or of the cache.
pub fn indexer_topk_scratch<T: Element>(dims: Dims, longest: usize) -> usize {
    // the scores of a block; the order of one query's keys
    Scorer::len::<T>(dims, false) + block_tokens(dims) * longest + longest
}

/// Number of f32 of one scratch slot of [`indexer_scores`].
pub fn indexer_scores_scratch<T: Element>(dims: Dims) -> usize {
    Scorer::len::<T>(dims, false)
}

/// scores [tokens.len(), tokens.end] of some queries of one sequence, given by their positions, with the keys
/// up to the last of them. Columns beyond a query's own position are the scores of future keys.
pub fn indexer_scores<T: Element>(
    scores: &mut [f32],
    input: &Input<'_, T>,
    dims: Dims,
    options: &Options,
    sequence: usize,
    tokens: Range<usize>,
    scratch: &Scratch,
) -> Result {
    check_input(dims, input)?;
    let all = spans(input.cu_seqlens, input.before);
    check(
        sequence < all.len() && tokens.start >= all[sequence].offset && tokens.end <= all[sequence].keys(),
        || format!("tokens {tokens:?} are outside sequence {sequence}"),
    )?;
    check_shape("scores", scores, [tokens.len(), tokens.end])?;
    let (span, stride) = (all[sequence], tokens.end);
    scratch.with(indexer_scores_scratch::<T>(dims), |mut slot| {
        let mut scorer = Scorer::take::<T>(&mut slot, dims, options, false);
        for first in tokens.clone().step_by(block_tokens(dims)) {
            let count = block_tokens(dims).min(tokens.end - first);
            let row = span.query + first - span.offset;
            scorer.load(input, row, count);
            let rows = &mut scores[(first - tokens.start) * stride..];
            for at in (0..stride).step_by(KEYS) {
                let keys = Keys::Range { first: at, count: KEYS.min(stride - at) };
                scorer.scores(rows, stride, at, input, keys, span, row, count);
            }
        }
    });
    Ok(())
}

/// selected [tokens, topk]: the keys of each query in ascending order, then unused slots.
pub fn indexer_topk<T: Element>(
    selected: &mut [u32],
    input: &Input<'_, T>,
    dims: Dims,
    options: &Options,
    topk: usize,
    scratch: &Scratch,
) -> Result {
    let tokens = check_input(dims, input)?;
    check_choice(selected, tokens, input.before + tokens, topk)?;
    choose_all(selected, input, &spans(input.cu_seqlens, input.before), dims, options, topk, scratch);
    Ok(())
}

/// selected [n, topk] of the last n tokens of a cache of keys k [capacity, d], of which `len` are filled, the
/// new ones included; q [n, heads, d] and w [n, heads] are theirs. In a cache of at most topk keys all are
/// selected without scoring.
pub fn indexer_topk_decode<T: Element>(
    selected: &mut [u32],
    q: &[T],
    w: &[f32],
    k: &[T],
    len: usize,
    dims: Dims,
    options: &Options,
    topk: usize,
    scratch: &Scratch,
) -> Result {
    check_dims(dims)?;
    let queries = w.len() / dims.heads;
    check_shape("w", w, [queries, dims.heads])?;
    check_shape("q", q, [queries, dims.heads, dims.dim])?;
    check(queries <= len, || format!("the cache must include the {queries} new tokens, but has only {len}"))?;
    let capacity = k.len() / dims.dim;
    check_shape("k", k, [capacity, dims.dim])?;
    check(len <= capacity, || format!("cache length must be at most its capacity of {capacity}, got {len}"))?;
    check_choice(selected, queries, len, topk)?;
    let span = Span { query: 0, queries, key: 0, offset: len - queries };
    let input = Input { q, k, w, before: 0, cu_seqlens: &[] };
    choose_all(selected, &input, &[span], dims, options, topk, scratch);
    Ok(())
}

fn check_choice(selected: &[u32], queries: usize, keys: usize, topk: usize) -> Result {
    check(topk > 0, || "topk must be 1 or more, got 0".into())?;
    check(keys < UNUSED as usize, || format!("number of keys must be below 2^32 - 1, got {keys}"))?;
    check_shape("selected", selected, [queries, topk])
}

/// The keys of all queries of the spans.
fn choose_all<T: Element>(
    selected: &mut [u32],
    input: &Input<'_, T>,
    spans: &[Span],
    dims: Dims,
    options: &Options,
    topk: usize,
    scratch: &Scratch,
) {
    let longest = spans.iter().map(Span::keys).max().unwrap_or(0);
    let mut tasks = Vec::new();
    for span in spans {
        tasks.extend((0..span.queries).step_by(block_tokens(dims)).rev().map(|first| (*span, first)));
    }
    let selected = Shared::new(selected);
    tasks.par_iter().with_max_len(1).for_each(|&(span, first)| {
        let count = block_tokens(dims).min(span.queries - first);
        // SAFETY: the queries of a block belong to one task.
        let rows = unsafe { selected.part((span.query + first) * topk, count * topk) };
        // Keys of the block's first query.
        let seen = span.offset + first + 1;
        if span.keys() <= topk {
            for (i, row) in rows.chunks_exact_mut(topk).enumerate() {
                row.fill(UNUSED);
                row[..seen + i].iter_mut().zip(0..).for_each(|(slot, key)| *slot = key);
            }
            return;
        }
        scratch.with(indexer_topk_scratch::<T>(dims, longest), |mut slot| {
            let mut scorer = Scorer::take::<T>(&mut slot, dims, options, false);
            let scores = take(&mut slot, block_tokens(dims) * longest);
            let order: &mut [u32] = bytemuck::cast_slice_mut(slot);
            let stride = span.offset + first + count;
            scorer.load(input, span.query + first, count);
            for at in (0..stride).step_by(KEYS) {
                let keys = Keys::Range { first: at, count: KEYS.min(stride - at) };
                scorer.scores(scores, stride, at, input, keys, span, span.query + first, count);
            }
            for (i, row) in rows.chunks_exact_mut(topk).enumerate() {
                let order = &mut order[..span.keys()];
                choose(order, &scores[i * stride..i * stride + seen + i], topk, options.ties);
                write_keys(row, &order[..topk.min(seen + i)]);
            }
        });
    });
}

fn write_keys(row: &mut [u32], keys: &[u32]) {
    row[..keys.len()].copy_from_slice(keys);
    row[keys.len()..].fill(UNUSED);
}
