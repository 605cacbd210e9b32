//! Attention forward, one task per sequence, kv head and block of queries.

use rayon::prelude::*;

use super::tile::{
    Factor, KEYS, Keys, Problem, Span, block_rows, block_tokens, divide, exp_minus_lowered, exp_minus_one,
    exp_minus_sum, key_rows, key_rows_len, load_rows, loaded_rows, masked_product_add, maximum, panels_len,
    round_factor, scale, spans, takes_stored, tiles,
};
use super::{Dims, Input, Options, Saved, check_input};
use crate::error::{Result, check_shape};
use crate::matmul::Mat;
use crate::scratch::take;
use crate::shared::Shared;
use crate::{Element, Rounding, Scratch};

/// Number of f32 of one scratch slot of [`attention_forward`]; `topk` is that of `selected`.
pub fn attention_forward_scratch<T: Element>(dims: Dims, topk: Option<usize>) -> usize {
    let width = dims.head_dim + dims.value_dim;
    // q, o, x, maximum and sum of the rows; k and v where they are copied; the list of keys
    let rows = block_rows(dims) * (width + KEYS + 2);
    rows + key_rows_len::<T>(width, topk.is_some()) + topk.unwrap_or(0) + panels_len::<T>()
}

/// o [tokens, heads, vd] from the inputs; `saved` takes what backward needs.
pub fn attention_forward<T: Element>(
    o: &mut [T],
    mut saved: Option<&mut Saved>,
    input: &Input<'_, T>,
    dims: Dims,
    options: &Options,
    scratch: &Scratch,
) -> Result {
    let tokens = check_input(dims, options, input)?;
    check_shape("o", o, [tokens, dims.heads, dims.value_dim])?;
    if let Some(saved) = saved.as_deref_mut() {
        let max_sum = if options.logits == Rounding::F32 { 0 } else { 2 * tokens * dims.heads };
        saved.lse.resize(tokens * dims.heads, 0.0);
        saved.max_sum.resize(max_sum, 0.0);
    }
    run(o, saved, &Problem::new(input, dims, options), &spans(input.cu_seqlens, input.before), scratch);
    Ok(())
}

/// Forward of all queries of the spans.
pub(super) fn run<T: Element>(
    o: &mut [T],
    saved: Option<&mut Saved>,
    problem: &Problem<'_, T>,
    spans: &[Span],
    scratch: &Scratch,
) {
    let dims = problem.dims;
    let keep_max_sum = problem.options.logits != Rounding::F32;
    let (lse, max_sum) = match saved {
        Some(Saved { lse, max_sum }) => (Some(Shared::new(lse)), keep_max_sum.then(|| Shared::new(max_sum))),
        None => (None, None),
    };
    let targets = Targets { o: Shared::new(o), lse, max_sum };
    let mut tasks = Vec::new();
    for span in spans {
        // The last blocks have the most keys, so they go first.
        for first in (0..span.queries).step_by(block_tokens(dims)).rev() {
            tasks.extend((0..dims.kv_heads).map(|kv_head| (*span, first, kv_head)));
        }
    }
    let topk = problem.selected.map(|s| s.topk);
    tasks.par_iter().with_max_len(1).for_each(|&(span, first, kv_head)| {
        scratch.with(attention_forward_scratch::<T>(dims, topk), |slot| {
            let tokens = block_tokens(dims).min(span.queries - first);
            Block::take(slot, problem, topk).run(&targets, span, first, tokens, kv_head);
        });
    });
}

/// Outputs of the tasks: each (query, kv head) writes its own rows.
struct Targets<'a, T> {
    o: Shared<'a, T>,
    lse: Option<Shared<'a, f32>>,
    max_sum: Option<Shared<'a, f32>>,
}

/// Working memory of a block of queries.
struct Block<'a, 's, T> {
    problem: &'a Problem<'a, T>,
    /// [rows, hd]
    q: &'s mut [f32],
    /// [rows, vd]
    o: &'s mut [f32],
    /// [rows, keys]
    x: &'s mut [f32],
    /// [rows]
    max: &'s mut [f32],
    /// [rows]
    sum: &'s mut [f32],
    k: &'s mut [f32],
    v: &'s mut [f32],
    list: &'s mut [u32],
    /// Panels of products on AMX.
    panels: &'s mut [f32],
}

impl<'a, 's, T: Element> Block<'a, 's, T> {
    fn take(mut slot: &'s mut [f32], problem: &'a Problem<'a, T>, topk: Option<usize>) -> Block<'a, 's, T> {
        let dims = problem.dims;
        let (rows, slot) = (block_rows(dims), &mut slot);
        Block {
            problem,
            q: take(slot, rows * dims.head_dim),
            o: take(slot, rows * dims.value_dim),
            x: take(slot, rows * KEYS),
            max: take(slot, rows),
            sum: take(slot, rows),
            k: take(slot, key_rows_len::<T>(dims.head_dim, topk.is_some())),
            v: take(slot, key_rows_len::<T>(dims.value_dim, topk.is_some())),
            list: bytemuck::cast_slice_mut(take(slot, topk.unwrap_or(0))),
            panels: take(slot, panels_len::<T>()),
        }
    }

    fn run(&mut self, targets: &Targets<'_, T>, span: Span, first: usize, tokens: usize, kv_head: usize) {
        match self.problem.selected {
            None => {
                self.begin(span, first, tokens, kv_head);
                let tiles = tiles(self.problem.block_keys(span, first, tokens));
                self.attend(tiles, span, first, tokens, kv_head);
                self.finish(targets, span, first, tokens, kv_head);
            }
            // Every query has its own keys, so a block is one query.
            Some(selected) => {
                for i in first..first + tokens {
                    self.begin(span, i, 1, kv_head);
                    let list = std::mem::take(&mut self.list);
                    let count = self.problem.list_keys(list, selected, span, i);
                    self.attend(list[..count].chunks(KEYS).map(Keys::List), span, i, 1, kv_head);
                    self.list = list;
                    self.finish(targets, span, i, 1, kv_head);
                }
            }
        }
    }

    /// Initializes the rows: no key seen yet.
    fn begin(&mut self, span: Span, first: usize, tokens: usize, kv_head: usize) {
        let dims = self.problem.dims;
        let rows = tokens * dims.group();
        let (row, stored) = (span.query + first, takes_stored::<T>(rows));
        load_rows(self.q, self.problem.q, row, tokens, kv_head, dims, dims.head_dim, stored);
        self.o[..rows * dims.value_dim].fill(0.0);
        for row in 0..rows {
            let sink = self.problem.sink(kv_head * dims.group() + row % dims.group());
            self.max[row] = sink.unwrap_or(f32::NEG_INFINITY);
            // An f32 sum starts with the sink; a rounded sum adds it last.
            let counted = sink.is_some() && self.problem.options.logits == Rounding::F32;
            self.sum[row] = if counted { 1.0 } else { 0.0 };
        }
    }

    fn attend<'k>(
        &mut self,
        tiles: impl Iterator<Item = Keys<'k>> + Clone,
        span: Span,
        first: usize,
        tokens: usize,
        kv_head: usize,
    ) {
        if self.problem.options.logits == Rounding::F32 {
            for keys in tiles {
                self.logits(keys, span, tokens, kv_head);
                self.exponentials(keys, span, first, tokens);
                self.values(keys, span, first, tokens, kv_head);
            }
            return;
        }
        for keys in tiles.clone() {
            self.logits(keys, span, tokens, kv_head);
            self.raise_maxima(keys, span, first, tokens);
        }
        for keys in tiles {
            self.logits(keys, span, tokens, kv_head);
            self.exponentials_lowered(keys, span, first, tokens);
            self.values(keys, span, first, tokens, kv_head);
        }
        self.add_sinks(tokens, kv_head);
    }

    fn logits(&mut self, keys: Keys<'_>, span: Span, tokens: usize, kv_head: usize) {
        let Dims { kv_heads, head_dim, .. } = self.problem.dims;
        let rows = tokens * self.problem.dims.group();
        let stored = takes_stored::<T>(rows);
        let k = key_rows(self.k, self.problem.k, keys, span, kv_head, kv_heads, head_dim, stored);
        let q = loaded_rows(self.q, rows, head_dim, stored);
        self.problem.logits(&mut self.x[..rows * keys.len()], q, k, self.panels);
    }

    /// o += e v
    fn values(&mut self, keys: Keys<'_>, span: Span, first: usize, tokens: usize, kv_head: usize) {
        let Dims { kv_heads, value_dim, .. } = self.problem.dims;
        let group = self.problem.dims.group();
        let rows = tokens * group;
        let stored = takes_stored::<T>(rows);
        let v = key_rows(self.v, self.problem.v, keys, span, kv_head, kv_heads, value_dim, stored);
        let rounding = self.problem.options.probabilities;
        let by = round_factor(&mut self.x[..rows * keys.len()], 1.0, rounding, stored);
        let e = Factor {
            a: Mat::dense(&self.x[..rows * keys.len()], rows, keys.len()),
            by,
            transposed: false,
            rounding,
        };
        let seen = |row: usize| self.problem.columns(span, first + row / group, keys);
        masked_product_add(&mut self.o[..rows * value_dim], e, v, seen, self.panels);
    }

    /// Replaces x by e; where the maximum rises, sum and o are rescaled.
    fn exponentials(&mut self, keys: Keys<'_>, span: Span, first: usize, tokens: usize) {
        let Dims { value_dim, .. } = self.problem.dims;
        let (count, group) = (keys.len(), self.problem.dims.group());
        for row in 0..tokens * group {
            let seen = self.problem.columns(span, first + row / group, keys);
            let x = &mut self.x[row * count..(row + 1) * count];
            x[..seen.start].fill(0.0);
            x[seen.end..].fill(0.0);
            if seen.is_empty() {
                continue;
            }
            let (x, before) = (&mut x[seen], self.max[row]);
            let max = before.max(maximum(x));
            if max > before {
                let by = (before - max).exp();
                self.sum[row] *= by;
                scale(&mut self.o[row * value_dim..(row + 1) * value_dim], by);
                self.max[row] = max;
            }
            self.sum[row] += exp_minus_sum(x, max);
        }
    }

    fn raise_maxima(&mut self, keys: Keys<'_>, span: Span, first: usize, tokens: usize) {
        let (count, group) = (keys.len(), self.problem.dims.group());
        for row in 0..tokens * group {
            let seen = self.problem.columns(span, first + row / group, keys);
            self.max[row] = self.max[row].max(maximum(&self.x[row * count..(row + 1) * count][seen]));
        }
    }

    /// Replaces x by e, rounded, and adds it to the sum, rounded at each addition.
    fn exponentials_lowered(&mut self, keys: Keys<'_>, span: Span, first: usize, tokens: usize) {
        let precision = self.problem.options.logits;
        let (count, group) = (keys.len(), self.problem.dims.group());
        for row in 0..tokens * group {
            let seen = self.problem.columns(span, first + row / group, keys);
            let x = &mut self.x[row * count..(row + 1) * count];
            x[..seen.start].fill(0.0);
            x[seen.end..].fill(0.0);
            let x = &mut x[seen];
            exp_minus_lowered(x, self.max[row], precision);
            self.sum[row] = x.iter().fold(self.sum[row], |sum, e| precision.round(sum + e));
        }
    }

    fn add_sinks(&mut self, tokens: usize, kv_head: usize) {
        let (group, precision) = (self.problem.dims.group(), self.problem.options.logits);
        for row in 0..tokens * group {
            if let Some(sink) = self.problem.sink(kv_head * group + row % group) {
                let e = exp_minus_one(sink, self.max[row], precision);
                self.sum[row] = precision.round(self.sum[row] + e);
            }
        }
    }

    fn finish(&mut self, targets: &Targets<'_, T>, span: Span, first: usize, tokens: usize, kv_head: usize) {
        let Dims { heads, value_dim, .. } = self.problem.dims;
        let group = self.problem.dims.group();
        for row in 0..tokens * group {
            let (max, sum) = (self.max[row], self.sum[row]);
            let at = (span.query + first + row / group) * heads + kv_head * group + row % group;
            let o = &mut self.o[row * value_dim..(row + 1) * value_dim];
            // The sum is zero only if no key was seen, because the largest e is 1. Then o is zero already.
            if sum != 0.0 {
                divide(o, sum);
            }
            // SAFETY: a query and a head belong to one task alone.
            unsafe {
                T::store(targets.o.part(at * value_dim, value_dim), o);
                if let Some(lse) = &targets.lse {
                    lse.part(at, 1)[0] = max + sum.ln();
                }
                if let Some(max_sum) = &targets.max_sum {
                    max_sum.part(2 * at, 2).copy_from_slice(&[max, sum]);
                }
            }
        }
    }
}
