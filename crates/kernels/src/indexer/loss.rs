//! Loss and gradients of the indexer, one block of queries at a time.

use std::ops::Range;

use rayon::prelude::*;

use super::score::Scorer;
use super::{Dims, EPS, Input, LANES, Options, block_tokens, check_input};
use crate::attention::tile::{
    Factor, KEYS, Keys, Problem, Rows, Span, divide, exp_minus_sum, key_rows, key_rows_len, load_rows,
    loaded_rows, masked_product_add, maximum, panels_len, scale, spans, takes_stored, tiles,
};
use crate::attention::{self, Saved};
use crate::error::{Result, check, check_len, check_shape};
use crate::matmul::Mat;
use crate::scratch::{check_workspace, take};
use crate::shared::Shared;
use crate::simd::{axpy, simd_fn, sum_lanes};
use crate::{Element, Rounding, Scratch};

/// Attention that the indexer serves. With `selected` in its input this is the sparse stage, without it the
/// dense one.
#[derive(Clone, Copy, Debug)]
pub struct Target<'a, T> {
    /// Its inputs; the values are not used and may be empty.
    pub input: &'a attention::Input<'a, T>,
    /// Values that its forward saved.
    pub saved: &'a Saved,
    /// Its number and width of heads.
    pub dims: attention::Dims,
    /// Its settings.
    pub options: &'a attention::Options,
}

impl<T: Element> Target<'_, T> {
    fn check(&self, cu_seqlens: &[usize], before: usize) -> Result {
        let tokens = cu_seqlens[cu_seqlens.len() - 1];
        check(self.input.cu_seqlens == cu_seqlens && self.input.before == before, || {
            "cu_seqlens and before of the indexer and its attention must be equal".into()
        })?;
        check_shape("attention q", self.input.q, [tokens, self.dims.heads, self.dims.head_dim])?;
        check_shape("attention k", self.input.k, [before + tokens, self.dims.kv_heads, self.dims.head_dim])?;
        check_shape("attention saved.lse", &self.saved.lse, [tokens, self.dims.heads])?;
        if let Some(selected) = self.input.selected {
            check_shape("selected", selected.keys, [tokens, selected.topk])?;
        }
        Ok(())
    }

    fn topk(&self) -> Option<usize> {
        self.input.selected.map(|s| s.topk)
    }
}

/// Gradients; all are written. That of k may be f32 whatever the storage, for a caller that adds more to it.
pub struct Grads<'a, T, K = T> {
    /// [tokens, heads, d]
    pub dq: &'a mut [T],
    /// [before + tokens, d]
    pub dk: &'a mut [K],
    /// [tokens, heads]
    pub dw: &'a mut [f32],
}

/// Most keys of one query.
fn row_len(longest: usize, topk: Option<usize>) -> usize {
    topk.unwrap_or(longest)
}

/// Number of f32 of one scratch slot of [`indexer_loss`]; `longest` is the largest number of keys
/// of a sequence, `topk` that of `selected`.
pub fn indexer_loss_scratch<T: Element>(
    dims: Dims,
    attention: attention::Dims,
    longest: usize,
    topk: Option<usize>,
) -> usize {
    let tokens = block_tokens(dims);
    Scorer::len::<T>(dims, topk.is_some())
        + Distribution::len::<T>(dims, attention, topk)
        // scores and p; dq; the list of keys
        + 2 * tokens * row_len(longest, topk)
        + tokens * dims.heads * dims.dim
        + topk.unwrap_or(0)
}

/// Number of f32 of the workspace of [`indexer_loss`] with gradients: the partial sums of dk. Without
/// gradients it needs none. `tokens` is the number of keys.
pub fn indexer_loss_workspace(dims: Dims, tokens: usize) -> usize {
    LANES.saturating_mul(tokens).saturating_mul(dims.dim)
}

/// Returns the loss; with `grads` also computes its gradients.
///
/// ```
/// use ballast_kernels::{Scratch, attention, indexer};
///
/// // The attention that the indexer serves: queries of zero, so every key has the same probability.
/// let served = attention::Dims { heads: 1, kv_heads: 1, head_dim: 1, value_dim: 1 };
/// let served_options = attention::Options::default();
/// let (x, zero, cu_seqlens) = ([1.0f32, 3.0], [0.0; 2], [0, 2]);
/// let attended = attention::Input {
///     q: &zero, k: &x, v: &x, sinks: None, selected: None, before: 0, cu_seqlens: &cu_seqlens,
/// };
/// let (mut o, mut saved, scratch) = ([0.0; 2], attention::Saved::default(), Scratch::new(0));
/// attention::attention_forward(&mut o, Some(&mut saved), &attended, served, &served_options, &scratch)?;
///
/// // The indexer prefers the second key, so its loss is above zero.
/// let dims = indexer::Dims { heads: 1, dim: 1 };
/// let options = indexer::Options { loss_scale: 1.0, ..indexer::Options::default() };
/// let (q, w) = ([1.0, 1.0], [1.0, 1.0]);
/// let input = indexer::Input { q: &q, k: &x, w: &w, before: 0, cu_seqlens: &cu_seqlens };
/// let target =
///     indexer::Target { input: &attended, saved: &saved, dims: served, options: &served_options };
/// let (mut dq, mut dk, mut dw) = ([0.0; 2], [0.0; 2], [0.0; 2]);
/// let grads = indexer::Grads { dq: &mut dq, dk: &mut dk, dw: &mut dw };
/// let mut workspace = vec![0.0; indexer::indexer_loss_workspace(dims, 2)];
/// let loss =
///     indexer::indexer_loss(Some(grads), &input, &target, dims, &options, &mut workspace, &scratch)?;
/// assert!(loss > 0.1 && dk[1] > 0.0);
/// # Ok::<(), ballast_kernels::KernelError>(())
/// ```
#[allow(clippy::too_many_arguments)] // outputs, then inputs, then sizes
pub fn indexer_loss<T: Element, K: Element>(
    grads: Option<Grads<'_, T, K>>,
    input: &Input<'_, T>,
    target: &Target<'_, T>,
    dims: Dims,
    options: &Options,
    workspace: &mut [f32],
    scratch: &Scratch,
) -> Result<f32> {
    let tokens = check_input(dims, input)?;
    target.check(input.cu_seqlens, input.before)?;
    let keys = input.before + tokens;
    if let Some(grads) = &grads {
        check_len("dq", grads.dq, input.q.len())?;
        check_len("dk", grads.dk, input.k.len())?;
        check_len("dw", grads.dw, input.w.len())?;
        check_workspace(workspace, indexer_loss_workspace(dims, keys))?;
    }
    if tokens == 0 {
        if let Some(grads) = grads {
            grads.dk.fill(K::default());
        }
        return Ok(0.0);
    }
    let all = spans(input.cu_seqlens, input.before);
    let longest = all.iter().map(Span::keys).max().unwrap_or(0);
    let lanes = |span: &Span| LANES.min(span.queries.div_ceil(block_tokens(dims)));
    let tasks: Vec<(Span, usize)> = all.iter().flat_map(|s| (0..lanes(s)).map(|lane| (*s, lane))).collect();
    let (mut dk, targets) = match grads {
        Some(Grads { dq, dk, dw }) => (
            Some(dk),
            Some(Targets { dq: Shared::new(dq), dw: Shared::new(dw), lanes: Shared::new(workspace) }),
        ),
        None => (None, None),
    };
    let job = Job { input, target, dims, options, longest, tokens, keys, targets: targets.as_ref() };
    let len = indexer_loss_scratch::<T>(dims, target.dims, longest, target.topk());
    // Collected in the order of the tasks, for a fixed order of summation.
    let sums: Vec<f64> = tasks
        .par_iter()
        .with_max_len(1)
        .map(|&(span, lane)| scratch.with(len, |slot| job.run(span, lane, slot)))
        .collect();
    if let Some(dk) = &mut dk {
        for span in &all {
            sum_lanes_of_dk(dk, workspace, *span, lanes(span), keys, dims.dim);
        }
    }
    Ok((options.loss_scale as f64 * sums.iter().sum::<f64>() / tokens as f64) as f32)
}

fn sum_lanes_of_dk<T: Element>(
    dk: &mut [T],
    workspace: &mut [f32],
    span: Span,
    lanes: usize,
    keys: usize,
    dim: usize,
) {
    let rows = span.key * dim..(span.key + span.keys()) * dim;
    if lanes == 0 {
        return dk[rows].fill(T::default());
    }
    let (sum, rest) = workspace.split_at_mut(keys * dim);
    for lane in rest.chunks_exact(keys * dim).take(lanes.saturating_sub(1)) {
        axpy(&mut sum[rows.clone()], 1.0, &lane[rows.clone()]);
    }
    T::store(&mut dk[rows.clone()], &sum[rows]);
}

/// Dimensions of an indexer whose blocks are one token.
const ONE_TOKEN: Dims = Dims { heads: 512, dim: 1 };

/// Number of f32 of one scratch slot of [`attention_distribution`].
pub fn attention_distribution_scratch<T: Element>(attention: attention::Dims) -> usize {
    Distribution::len::<T>(ONE_TOKEN, attention, None)
}

/// p [tokens.len(), tokens.end] of some queries of one sequence, counted from its start: zero for keys they
/// do not see. Only for the dense stage.
pub fn attention_distribution<T: Element>(
    p: &mut [f32],
    target: &Target<'_, T>,
    sequence: usize,
    tokens: Range<usize>,
    scratch: &Scratch,
) -> Result {
    target.check(target.input.cu_seqlens, 0)?;
    let all = spans(target.input.cu_seqlens, 0);
    check(target.input.selected.is_none(), || {
        "attention_distribution needs an attention without selected keys".into()
    })?;
    check(sequence < all.len() && tokens.end <= all[sequence].queries, || {
        format!("sequence {sequence} has no tokens {tokens:?}")
    })?;
    check_shape("p", p, [tokens.len(), tokens.end])?;
    let problem = Problem::new(target.input, target.dims, target.options);
    scratch.with(attention_distribution_scratch::<T>(target.dims), |mut slot| {
        let mut distribution = Distribution::take::<T>(&mut slot, ONE_TOKEN, target.dims, None);
        for (row, i) in p.chunks_exact_mut(tokens.end.max(1)).zip(tokens.clone()) {
            row.fill(0.0);
            let keys = problem.block_keys(all[sequence], i, 1);
            let part = &mut row[keys.clone()];
            distribution.add(part, keys.len(), tiles(keys), &problem, target.saved, all[sequence], i, 1);
            normalize(part);
        }
    });
    Ok(())
}

/// Replaces a by p.
fn normalize(a: &mut [f32]) {
    let sum = a.iter().map(|a| *a as f64).sum::<f64>() + EPS;
    scale(a, (1.0 / sum) as f32);
}

/// Working memory for the probabilities of the attention.
struct Distribution<'s> {
    /// [tokens x group, hd]
    q: &'s mut [f32],
    /// [tokens x group, keys]
    x: &'s mut [f32],
    k: &'s mut [f32],
    /// Panels of products on AMX: the logits are those of the attention.
    panels: &'s mut [f32],
}

impl<'s> Distribution<'s> {
    fn len<T: Element>(dims: Dims, attention: attention::Dims, topk: Option<usize>) -> usize {
        block_tokens(dims) * attention.group() * (attention.head_dim + KEYS)
            + key_rows_len::<T>(attention.head_dim, topk.is_some())
            + panels_len::<T>()
    }

    fn take<T: Element>(
        slot: &mut &'s mut [f32],
        dims: Dims,
        attention: attention::Dims,
        topk: Option<usize>,
    ) -> Distribution<'s> {
        let rows = block_tokens(dims) * attention.group();
        Distribution {
            q: take(slot, rows * attention.head_dim),
            x: take(slot, rows * KEYS),
            k: take(slot, key_rows_len::<T>(attention.head_dim, topk.is_some())),
            panels: take(slot, panels_len::<T>()),
        }
    }

    /// a [tokens, stride] += the probabilities of all heads, tile after tile.
    #[allow(clippy::too_many_arguments)]
    fn add<'k, T: Element>(
        &mut self,
        a: &mut [f32],
        stride: usize,
        tiles: impl Iterator<Item = Keys<'k>> + Clone,
        problem: &Problem<'_, T>,
        saved: &Saved,
        span: Span,
        first: usize,
        tokens: usize,
    ) {
        let attention::Dims { heads, kv_heads, head_dim, .. } = problem.dims;
        let group = problem.dims.group();
        let rows = tokens * group;
        for kv_head in 0..kv_heads {
            let (row, stored) = (span.query + first, takes_stored::<T>(rows));
            load_rows(self.q, problem.q, row, tokens, kv_head, problem.dims, head_dim, stored);
            let q = loaded_rows(self.q, rows, head_dim, stored);
            let mut at = 0;
            for keys in tiles.clone() {
                let count = keys.len();
                let x = &mut self.x[..rows * count];
                let k = key_rows(self.k, problem.k, keys, span, kv_head, kv_heads, head_dim, stored);
                problem.logits(x, q, k, self.panels);
                for (row, x) in x.chunks_exact_mut(count).enumerate() {
                    let t = row / group;
                    let seen = problem.columns(span, first + t, keys);
                    let of = (span.query + first + t) * heads + kv_head * group + row % group;
                    problem.probabilities(&mut x[seen.clone()], saved, of);
                    let a = &mut a[t * stride + at..t * stride + at + count];
                    axpy(&mut a[seen.clone()], 1.0, &x[seen]);
                }
                at += count;
            }
        }
    }
}

/// Outputs of the tasks: each query writes its own rows, each (sequence, lane) its own part.
struct Targets<'a, T> {
    dq: Shared<'a, T>,
    dw: Shared<'a, f32>,
    lanes: Shared<'a, f32>,
}

struct Job<'a, T> {
    input: &'a Input<'a, T>,
    target: &'a Target<'a, T>,
    dims: Dims,
    options: &'a Options,
    longest: usize,
    tokens: usize,
    /// Number of keys of all sequences.
    keys: usize,
    targets: Option<&'a Targets<'a, T>>,
}

/// Working memory of a block.
struct Work<'s> {
    scorer: Scorer<'s>,
    distribution: Distribution<'s>,
    /// scores, then dscore: [tokens, keys]
    scores: &'s mut [f32],
    /// a, then p: [tokens, keys]
    p: &'s mut [f32],
    /// [tokens x heads, d]
    dq: &'s mut [f32],
}

impl<T: Element> Job<'_, T> {
    /// Runs the blocks of one lane; returns the sum of the divergences of their queries.
    fn run(&self, span: Span, lane: usize, mut slot: &mut [f32]) -> f64 {
        let (dims, topk) = (self.dims, self.target.topk());
        let (tokens, slot) = (block_tokens(dims), &mut slot);
        let mut work = Work {
            scorer: Scorer::take::<T>(slot, dims, self.options, topk.is_some()),
            distribution: Distribution::take::<T>(slot, dims, self.target.dims, topk),
            scores: take(slot, tokens * row_len(self.longest, topk)),
            p: take(slot, tokens * row_len(self.longest, topk)),
            dq: take(slot, tokens * dims.heads * dims.dim),
        };
        let list: &mut [u32] = bytemuck::cast_slice_mut(take(slot, topk.unwrap_or(0)));
        let dk = match self.targets {
            Some(targets) => {
                let at = (lane * self.keys + span.key) * dims.dim;
                // SAFETY: this sequence's rows of this lane belong to this task alone.
                unsafe { targets.lanes.part(at, span.keys() * dims.dim) }
            }
            None => &mut [],
        };
        dk.fill(0.0);
        let problem = Problem::new(self.target.input, self.target.dims, self.target.options);
        let mut sum = 0.0;
        for first in (lane * tokens..span.queries).step_by(LANES * tokens) {
            let count = tokens.min(span.queries - first);
            match self.target.input.selected {
                None => {
                    let keys = problem.block_keys(span, first, count);
                    let all = Keys::Range { first: keys.start, count: keys.len() };
                    sum += self.block(&mut work, dk, all, tiles(keys), &problem, span, first, count);
                }
                // Every query has its own keys, so a block is one query.
                Some(selected) => {
                    for i in first..first + count {
                        let n = problem.list_keys(list, selected, span, i);
                        let (all, tiles) = (Keys::List(&list[..n]), list[..n].chunks(KEYS).map(Keys::List));
                        sum += self.block(&mut work, dk, all, tiles, &problem, span, i, 1);
                    }
                }
            }
        }
        sum
    }

    #[allow(clippy::too_many_arguments)]
    fn block<'k>(
        &self,
        work: &mut Work<'_>,
        dk: &mut [f32],
        all: Keys<'_>,
        tiles: impl Iterator<Item = Keys<'k>> + Clone,
        problem: &Problem<'_, T>,
        span: Span,
        first: usize,
        tokens: usize,
    ) -> f64 {
        let (stride, row) = (all.len(), span.query + first);
        work.scorer.load(self.input, row, tokens);
        let mut at = 0;
        for keys in tiles.clone() {
            work.scorer.scores(work.scores, stride, at, self.input, keys, span, row, tokens);
            at += keys.len();
        }
        let p = &mut work.p[..tokens * stride];
        p.fill(0.0);
        work.distribution.add(p, stride, tiles.clone(), problem, self.target.saved, span, first, tokens);
        let factor = self.options.loss_scale / self.tokens as f32;
        let mut sum = 0.0;
        for t in 0..tokens {
            let seen = problem.columns(span, first + t, all);
            let scores = &mut work.scores[t * stride..(t + 1) * stride];
            scores[..seen.start].fill(0.0);
            scores[seen.end..].fill(0.0);
            sum += divergence(&mut scores[seen.clone()], &mut p[t * stride..(t + 1) * stride][seen], factor);
        }
        if let Some(targets) = self.targets {
            let seen = |t: usize, keys: Keys<'_>| problem.columns(span, first + t, keys);
            self.block_backward(work, targets, dk, stride, tiles, seen, span, row, tokens);
        }
        sum
    }

    #[allow(clippy::too_many_arguments)]
    fn block_backward<'k>(
        &self,
        work: &mut Work<'_>,
        targets: &Targets<'_, T>,
        dk: &mut [f32],
        stride: usize,
        tiles: impl Iterator<Item = Keys<'k>>,
        seen: impl Fn(usize, Keys<'_>) -> Range<usize>,
        span: Span,
        row: usize,
        tokens: usize,
    ) {
        let Dims { heads, dim } = self.dims;
        let (rows, scale) = (tokens * heads, (dim as f32).powf(-0.5));
        // SAFETY: these queries belong to this task alone.
        let dw = unsafe { targets.dw.part(row * heads, rows) };
        dw.fill(0.0);
        work.dq[..rows * dim].fill(0.0);
        let mut at = 0;
        for keys in tiles {
            let count = keys.len();
            let (x, q, k) = work.scorer.logits(self.input, keys, span, tokens);
            let seen = |r: usize| seen(r / heads, keys);
            for (r, x) in x.chunks_exact_mut(count).enumerate() {
                let (seen, dscore) = (seen(r), &work.scores[r / heads * stride + at..][..count]);
                x[..seen.start].fill(0.0);
                x[seen.end..].fill(0.0);
                let w = self.input.w[row * heads + r];
                dw[r] += relu_backward(&mut x[seen.clone()], &dscore[seen], w, scale);
            }
            let a = Mat::dense(x, rows, count);
            let dx = Factor { a, by: 1.0, transposed: false, rounding: Rounding::F32 };
            masked_product_add(&mut work.dq[..rows * dim], dx, Rows::Wide(k), seen, &mut []);
            match keys {
                Keys::Range { first, .. } => {
                    let dk = &mut dk[first * dim..(first + count) * dim];
                    let q = Rows::Wide(Mat::dense(q, rows, dim));
                    masked_product_add(dk, Factor { transposed: true, ..dx }, q, seen, &mut []);
                }
                Keys::List(list) => {
                    for (j, position) in list.iter().enumerate() {
                        let dk = &mut dk[*position as usize * dim..(*position as usize + 1) * dim];
                        for h in 0..heads {
                            axpy(dk, x[h * count + j], &q[h * dim..(h + 1) * dim]);
                        }
                    }
                }
            }
            at += count;
        }
        // SAFETY: these queries belong to this task alone.
        T::store(unsafe { targets.dq.part(row * heads * dim, rows * dim) }, &work.dq[..rows * dim]);
    }
}

/// KL(p || softmax(scores)) of one query, with a in the place of p. Replaces scores by factor dKL/dscore.
fn divergence(scores: &mut [f32], p: &mut [f32], factor: f32) -> f64 {
    if scores.is_empty() {
        return 0.0;
    }
    normalize(p);
    let max = maximum(scores);
    let sum = exp_minus_sum(scores, max);
    divide(scores, sum);
    let (mut kl, mut all) = (0.0, 0.0);
    for (s, p) in scores.iter().zip(&*p) {
        let (s, p) = (*s as f64, *p as f64);
        kl += p * ((p + EPS) / (s + EPS)).ln();
        all += p * s / (s + EPS);
    }
    for (s, p) in scores.iter_mut().zip(&*p) {
        let wide = *s as f64;
        *s = (factor as f64 * (wide * all - *p as f64 * wide / (wide + EPS))) as f32;
    }
    kl
}

simd_fn! {
    /// Replaces x by dx; returns the query's part of dw.
    fn relu_backward(x: &mut [f32], dscore: &[f32], w: f32, scale: f32) -> f32 {
        assert_eq!(x.len(), dscore.len());
        let by = w * scale;
        let mut lanes = [0f32; 16];
        for (x, dscore) in x.chunks_mut(16).zip(dscore.chunks(16)) {
            for i in 0..x.len() {
                let on = if x[i] < 0.0 { 0.0 } else { x[i] };
                lanes[i] += dscore[i] * on * scale;
                x[i] = if x[i] > 0.0 { dscore[i] * by } else { 0.0 };
            }
        }
        sum_lanes(lanes)
    }
}
