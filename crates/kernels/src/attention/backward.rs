//! Attention backward: pairs of blocks, diagonal by diagonal; with selected keys, one task per sequence and
//! kv head.

use rayon::prelude::*;

use super::tile::{
    Factor, KEYS, Keys, Problem, Span, block_rows, block_tokens, exp_minus_one, key_rows, key_rows_len,
    load_rows, loaded_rows, masked_product_add, panels_len, product_t, round_factor, spans, takes_stored,
};
use super::{Dims, Input, Options, Saved, Selected, check_input};
use crate::error::{Result, check, check_len, check_shape};
use crate::matmul::Mat;
use crate::scratch::{check_workspace, take};
use crate::shared::Shared;
use crate::simd::{axpy, dot, exp_f32, simd_fn};
use crate::{Element, Rounding, Scratch};

/// Gradients; `dsinks` is a parameter's and is added to, the others are written. Those of k and v may be f32
/// whatever the storage, for a caller that adds more to them.
pub struct Grads<'a, T, K = T> {
    /// [tokens, heads, hd]
    pub dq: &'a mut [T],
    /// [before + tokens, kv_heads, hd]
    pub dk: &'a mut [K],
    /// [before + tokens, kv_heads, vd]
    pub dv: &'a mut [K],
    /// `[heads]`; required if and only if there are sinks
    pub dsinks: Option<&'a mut [f32]>,
}

/// Number of f32 of one scratch slot of [`attention_backward`]; `topk` is that of `selected`.
pub fn attention_backward_scratch<T: Element>(dims: Dims, topk: Option<usize>) -> usize {
    let width = dims.head_dim + dims.value_dim;
    // q, dq, do, x and dp of the rows; dk and dv of the keys; k and v where they are copied; the list of keys
    block_rows(dims) * (width + dims.head_dim + 2 * KEYS)
        + KEYS * width
        + key_rows_len::<T>(width, topk.is_some())
        + topk.unwrap_or(0)
        + panels_len::<T>()
}

/// Number of f32 of the workspace of [`attention_backward`]: D [tokens, heads]; if storage is not f32, also
/// the sums of dq, dk and dv of one kv head. `tokens` is the number of keys.
pub fn attention_backward_workspace<T: Element>(dims: Dims, tokens: usize) -> usize {
    let sums = if T::as_f32(&[]).is_some() {
        0
    } else {
        dims.group().saturating_mul(dims.head_dim).saturating_add(dims.head_dim + dims.value_dim)
    };
    tokens.saturating_mul(dims.heads.saturating_add(sums))
}

/// All gradients from `d_o` [tokens, heads, vd], and `o` and `saved` of forward.
#[allow(clippy::too_many_arguments)] // outputs, then inputs, then sizes
pub fn attention_backward<T: Element, K: Element>(
    grads: Grads<'_, T, K>,
    d_o: &[T],
    o: &[T],
    input: &Input<'_, T>,
    saved: &Saved,
    dims: Dims,
    options: &Options,
    workspace: &mut [f32],
    scratch: &Scratch,
) -> Result {
    let tokens = check_input(dims, options, input)?;
    check_shape("dq", grads.dq, [tokens, dims.heads, dims.head_dim])?;
    let keys = input.before + tokens;
    check_shape("dk", grads.dk, [keys, dims.kv_heads, dims.head_dim])?;
    check_shape("dv", grads.dv, [keys, dims.kv_heads, dims.value_dim])?;
    check_shape("do", d_o, [tokens, dims.heads, dims.value_dim])?;
    check_shape("o", o, [tokens, dims.heads, dims.value_dim])?;
    check_shape("saved.lse", &saved.lse, [tokens, dims.heads])?;
    let lowered = if options.logits == Rounding::F32 { 0 } else { 2 };
    check_shape("saved.max_sum", &saved.max_sum, [lowered, tokens, dims.heads])?;
    check(grads.dsinks.is_some() == input.sinks.is_some(), || {
        "dsinks must be given if and only if there are sinks".into()
    })?;
    check_workspace(workspace, attention_backward_workspace::<T>(dims, keys))?;
    let (d, sums) = workspace.split_at_mut(tokens * dims.heads);
    d.par_iter_mut().enumerate().with_min_len(64).for_each(|(row, d)| {
        let row = row * dims.value_dim..(row + 1) * dims.value_dim;
        *d = wide_dot(&d_o[row.clone()], &o[row]);
    });
    if let (Some(dsinks), Some(sinks)) = (grads.dsinks, input.sinks) {
        check_len("dsinks", dsinks, dims.heads)?;
        sinks_backward(dsinks, sinks, d, saved, options);
    }
    let pass = Pass { problem: Problem::new(input, dims, options), d_o, d, saved, scratch };
    // Sequences without keys have no gradients; they may be many times more than the keys.
    let mut spans = spans(input.cu_seqlens, input.before);
    spans.retain(|span| span.keys() > 0);
    if let (Some(dq), Some(dk), Some(dv)) =
        (T::as_f32_mut(&mut *grads.dq), K::as_f32_mut(&mut *grads.dk), K::as_f32_mut(&mut *grads.dv))
    {
        let Dims { heads, kv_heads, head_dim, value_dim } = dims;
        let targets = Targets {
            dq: Sums::new(dq, heads * head_dim, dims.group() * head_dim),
            dk: Sums::new(dk, kv_heads * head_dim, head_dim),
            dv: Sums::new(dv, kv_heads * value_dim, value_dim),
        };
        pass.run(&targets, &spans, 0..kv_heads);
        return Ok(());
    }
    let Grads { dq, dk, dv, .. } = grads;
    for kv_head in 0..dims.kv_heads {
        let mut rest = &mut *sums;
        let sum_q = take(&mut rest, tokens * dims.group() * dims.head_dim);
        let sum_k = take(&mut rest, keys * dims.head_dim);
        let sum_v = take(&mut rest, keys * dims.value_dim);
        let targets = Targets {
            dq: Sums::new(sum_q, dims.group() * dims.head_dim, 0),
            dk: Sums::new(sum_k, dims.head_dim, 0),
            dv: Sums::new(sum_v, dims.value_dim, 0),
        };
        pass.run(&targets, &spans, kv_head..kv_head + 1);
        store_head(dq, sum_q, kv_head, dims.kv_heads, dims.group() * dims.head_dim);
        store_head(dk, sum_k, kv_head, dims.kv_heads, dims.head_dim);
        store_head(dv, sum_v, kv_head, dims.kv_heads, dims.value_dim);
    }
    Ok(())
}

fn wide_dot<T: Element>(a: &[T], b: &[T]) -> f32 {
    if let (Some(a), Some(b)) = (T::as_f32(a), T::as_f32(b)) {
        return dot(a, b);
    }
    let (mut x, mut y) = ([0.0; 64], [0.0; 64]);
    let mut sum = 0.0;
    for (a, b) in a.chunks(64).zip(b.chunks(64)) {
        T::load(&mut x[..a.len()], a);
        T::load(&mut y[..b.len()], b);
        sum += dot(&x[..a.len()], &y[..b.len()]);
    }
    sum
}

/// dz_h -= sum over queries of exp(z_h - lse) D, in f64, because thousands of terms of either sign cancel.
fn sinks_backward(dsinks: &mut [f32], sinks: &[f32], d: &[f32], saved: &Saved, options: &Options) {
    let heads = sinks.len();
    dsinks.par_iter_mut().enumerate().for_each(|(head, dsink)| {
        let mut sum = 0f64;
        for at in (head..d.len()).step_by(heads) {
            let p = match options.logits {
                Rounding::F32 => exp_f32::<false>(sinks[head] - saved.lse[at]),
                logits => {
                    let e = exp_minus_one(logits.round(sinks[head]), saved.max_sum[2 * at], logits);
                    e / saved.max_sum[2 * at + 1]
                }
            };
            sum += p as f64 * d[at] as f64;
        }
        *dsink -= sum as f32;
    });
}

/// Rounds the rows [tokens, width] of one head into [tokens, heads, width].
fn store_head<T: Element>(target: &mut [T], rows: &[f32], head: usize, heads: usize, width: usize) {
    let tokens = target.par_chunks_mut(heads * width).zip(rows.par_chunks(width));
    tokens.with_min_len(16).for_each(|(target, row)| {
        T::store(&mut target[head * width..(head + 1) * width], row);
    });
}

/// Gradient sums in f32, one row per token and kv head.
struct Sums<'a> {
    data: Shared<'a, f32>,
    token_stride: usize,
    head_stride: usize,
}

impl<'a> Sums<'a> {
    fn new(data: &'a mut [f32], token_stride: usize, head_stride: usize) -> Sums<'a> {
        Sums { data: Shared::new(data), token_stride, head_stride }
    }

    /// # Safety
    /// The row of this token and kv head must not be in use elsewhere, in this task or another.
    #[allow(clippy::mut_from_ref)] // as in `Shared::part`
    unsafe fn row(&self, token: usize, kv_head: usize, width: usize) -> &mut [f32] {
        // SAFETY: by the caller's guarantee.
        unsafe { self.data.part(token * self.token_stride + kv_head * self.head_stride, width) }
    }

    /// # Safety
    /// The same as for [`Sums::row`].
    unsafe fn put(&self, token: usize, kv_head: usize, row: &[f32], add: bool) {
        // SAFETY: by the caller's guarantee.
        let target = unsafe { self.row(token, kv_head, row.len()) };
        if add {
            axpy(target, 1.0, row);
        } else {
            target.copy_from_slice(row);
        }
    }
}

struct Targets<'a> {
    dq: Sums<'a>,
    dk: Sums<'a>,
    dv: Sums<'a>,
}

struct Pass<'a, T> {
    problem: Problem<'a, T>,
    d_o: &'a [T],
    /// D [tokens, heads]
    d: &'a [f32],
    saved: &'a Saved,
    scratch: &'a Scratch,
}

impl<T: Element> Pass<'_, T> {
    fn run(&self, targets: &Targets<'_>, spans: &[Span], kv_heads: std::ops::Range<usize>) {
        let topk = self.problem.selected.map(|s| s.topk);
        let len = attention_backward_scratch::<T>(self.problem.dims, topk);
        if let Some(selected) = self.problem.selected {
            let mut tasks = Vec::new();
            for span in spans {
                tasks.extend(kv_heads.clone().map(|kv_head| (*span, kv_head)));
            }
            tasks.par_iter().with_max_len(1).for_each(|&(span, kv_head)| {
                self.scratch.with(len, |slot| {
                    Work::take::<T>(slot, self.problem.dims, topk)
                        .listed(self, targets, selected, span, kv_head);
                });
            });
            return;
        }
        // Blocks between a query block and the last key block that it sees.
        let shift = |span: &Span| span.offset.div_ceil(KEYS);
        let diagonals = |span: &Span| shift(span) + span.queries.div_ceil(KEYS);
        for span in spans.iter().filter(|span| span.offset > 0) {
            self.begin(targets, *span, kv_heads.clone());
        }
        for diagonal in 0..spans.iter().map(diagonals).max().unwrap_or(0) {
            let mut tasks = Vec::new();
            for span in spans {
                for block in diagonal.saturating_sub(shift(span))..span.queries.div_ceil(KEYS) {
                    let (first, key) = (block * KEYS, (block + shift(span) - diagonal) * KEYS);
                    // The first diagonal covers every block and sets the sums, unless there are keys before
                    // the queries; later ones may be outside the window.
                    let set = diagonal == 0 && span.offset == 0;
                    let seen =
                        key < span.keys() && self.problem.block_keys(*span, first, 1).start < key + KEYS;
                    if set || seen {
                        tasks.extend(kv_heads.clone().map(|kv_head| (*span, first, key, kv_head, !set)));
                    }
                }
            }
            tasks.par_iter().with_max_len(1).for_each(|&(span, first, key, kv_head, add)| {
                self.scratch.with(len, |slot| {
                    Work::take::<T>(slot, self.problem.dims, None)
                        .pair(self, targets, span, first, key, kv_head, add);
                });
            });
        }
    }

    /// Sets the sums of a span to zero.
    fn begin(&self, targets: &Targets<'_>, span: Span, kv_heads: std::ops::Range<usize>) {
        let Dims { head_dim, value_dim, .. } = self.problem.dims;
        let width = self.problem.dims.group() * head_dim;
        for kv_head in kv_heads {
            // SAFETY: no task runs yet, and each row is used by itself.
            unsafe {
                for i in 0..span.queries {
                    targets.dq.row(span.query + i, kv_head, width).fill(0.0);
                }
                for i in 0..span.keys() {
                    targets.dk.row(span.key + i, kv_head, head_dim).fill(0.0);
                    targets.dv.row(span.key + i, kv_head, value_dim).fill(0.0);
                }
            }
        }
    }
}

/// Working memory of a task.
struct Work<'s> {
    /// [rows, hd]
    q: &'s mut [f32],
    /// [rows, vd]
    d_o: &'s mut [f32],
    /// [rows, hd]
    dq: &'s mut [f32],
    /// x, then p: [rows, keys]
    p: &'s mut [f32],
    /// dp, then dx: [rows, keys]
    dx: &'s mut [f32],
    /// [keys, hd]
    dk: &'s mut [f32],
    /// [keys, vd]
    dv: &'s mut [f32],
    k: &'s mut [f32],
    v: &'s mut [f32],
    list: &'s mut [u32],
    /// Panels of products on AMX.
    panels: &'s mut [f32],
}

impl<'s> Work<'s> {
    fn take<T: Element>(mut slot: &'s mut [f32], dims: Dims, topk: Option<usize>) -> Work<'s> {
        let (rows, slot) = (block_rows(dims), &mut slot);
        Work {
            q: take(slot, rows * dims.head_dim),
            d_o: take(slot, rows * dims.value_dim),
            dq: take(slot, rows * dims.head_dim),
            p: take(slot, rows * KEYS),
            dx: take(slot, rows * KEYS),
            dk: take(slot, KEYS * dims.head_dim),
            dv: take(slot, KEYS * dims.value_dim),
            k: take(slot, key_rows_len::<T>(dims.head_dim, topk.is_some())),
            v: take(slot, key_rows_len::<T>(dims.value_dim, topk.is_some())),
            list: bytemuck::cast_slice_mut(take(slot, topk.unwrap_or(0))),
            panels: take(slot, panels_len::<T>()),
        }
    }

    /// Loads q and do of these queries.
    #[allow(clippy::too_many_arguments)]
    fn load<T: Element>(
        &mut self,
        pass: &Pass<'_, T>,
        span: Span,
        first: usize,
        tokens: usize,
        kv_head: usize,
        stored: bool,
    ) {
        let (dims, row) = (pass.problem.dims, span.query + first);
        load_rows(self.q, pass.problem.q, row, tokens, kv_head, dims, dims.head_dim, stored);
        load_rows(self.d_o, pass.d_o, row, tokens, kv_head, dims, dims.value_dim, stored);
    }

    /// One pair: [`KEYS`] queries from `first` on and [`KEYS`] keys from `key` on. With `add` its results are
    /// added to the sums, else they set them.
    #[allow(clippy::too_many_arguments)]
    fn pair<T: Element>(
        &mut self,
        pass: &Pass<'_, T>,
        targets: &Targets<'_>,
        span: Span,
        first: usize,
        key: usize,
        kv_head: usize,
        add: bool,
    ) {
        let Dims { head_dim, value_dim, .. } = pass.problem.dims;
        let width = pass.problem.dims.group() * head_dim;
        let count = KEYS.min(span.keys() - key);
        self.dk[..count * head_dim].fill(0.0);
        self.dv[..count * value_dim].fill(0.0);
        let end = span.queries.min(first + KEYS);
        for at in (first..end).step_by(block_tokens(pass.problem.dims)) {
            let tokens = block_tokens(pass.problem.dims).min(end - at);
            let seen = pass.problem.block_keys(span, at, tokens);
            let (begin, stop) = (seen.start.max(key), seen.end.min(key + count));
            self.dq[..tokens * width].fill(0.0);
            if begin < stop {
                let stored = takes_stored::<T>(tokens * pass.problem.dims.group());
                self.load(pass, span, at, tokens, kv_head, stored);
                let keys = Keys::Range { first: begin, count: stop - begin };
                self.tile(pass, keys, Some(begin - key), span, at, tokens, kv_head);
            } else if add {
                continue;
            }
            for (i, row) in self.dq[..tokens * width].chunks_exact(width).enumerate() {
                // SAFETY: no other pair of this diagonal has these queries and this kv head.
                unsafe { targets.dq.put(span.query + at + i, kv_head, row, add) };
            }
        }
        for i in 0..count {
            // SAFETY: no other pair of this diagonal has these keys and this kv head.
            unsafe {
                targets.dk.put(span.key + key + i, kv_head, &self.dk[i * head_dim..(i + 1) * head_dim], add);
                targets.dv.put(
                    span.key + key + i,
                    kv_head,
                    &self.dv[i * value_dim..(i + 1) * value_dim],
                    add,
                );
            }
        }
    }

    /// All queries of a span, each with its own keys.
    fn listed<T: Element>(
        &mut self,
        pass: &Pass<'_, T>,
        targets: &Targets<'_>,
        selected: Selected<'_>,
        span: Span,
        kv_head: usize,
    ) {
        let Dims { head_dim, value_dim, .. } = pass.problem.dims;
        let width = pass.problem.dims.group() * head_dim;
        let stored = takes_stored::<T>(pass.problem.dims.group());
        self.dk.fill(0.0);
        self.dv.fill(0.0);
        for i in 0..span.keys() {
            // SAFETY: a key of this sequence and this kv head belong to this task alone.
            unsafe {
                targets.dk.put(span.key + i, kv_head, &self.dk[..head_dim], false);
                targets.dv.put(span.key + i, kv_head, &self.dv[..value_dim], false);
            }
        }
        for i in 0..span.queries {
            let list = std::mem::take(&mut self.list);
            let count = pass.problem.list_keys(list, selected, span, i);
            self.dq[..width].fill(0.0);
            for keys in list[..count].chunks(KEYS) {
                self.load(pass, span, i, 1, kv_head, stored);
                self.tile(pass, Keys::List(keys), None, span, i, 1, kv_head);
                self.load(pass, span, i, 1, kv_head, false);
                self.scatter(pass, targets, keys, span, kv_head);
            }
            // SAFETY: a query of this sequence and this kv head belong to this task alone.
            unsafe { targets.dq.put(span.query + i, kv_head, &self.dq[..width], false) };
            self.list = list;
        }
    }

    /// Adds p do and s dx q of the one loaded query to the rows of its keys.
    fn scatter<T: Element>(
        &self,
        pass: &Pass<'_, T>,
        targets: &Targets<'_>,
        keys: &[u32],
        span: Span,
        kv_head: usize,
    ) {
        let Dims { head_dim, value_dim, .. } = pass.problem.dims;
        let group = pass.problem.dims.group();
        // A rounded dx has the scale already.
        let by = match pass.problem.options.gradient {
            Rounding::F32 => pass.problem.options.scale(pass.problem.dims),
            _ => 1.0,
        };
        for (j, position) in keys.iter().enumerate() {
            let row = span.key + *position as usize;
            for h in 0..group {
                let at = h * keys.len() + j;
                let (q, d_o) = (&self.q[h * head_dim..][..head_dim], &self.d_o[h * value_dim..][..value_dim]);
                // SAFETY: a key of this sequence and this kv head belong to this task alone.
                unsafe {
                    axpy(targets.dk.row(row, kv_head, head_dim), by * self.dx[at], q);
                    axpy(targets.dv.row(row, kv_head, value_dim), self.p[at], d_o);
                }
            }
        }
    }

    /// Computes p and dx of the loaded rows and `keys`, and adds to dq; with `at_key` also to dk and dv from
    /// that row on.
    #[allow(clippy::too_many_arguments)]
    fn tile<T: Element>(
        &mut self,
        pass: &Pass<'_, T>,
        keys: Keys<'_>,
        at_key: Option<usize>,
        span: Span,
        first: usize,
        tokens: usize,
        kv_head: usize,
    ) {
        let Dims { heads, kv_heads, head_dim, value_dim } = pass.problem.dims;
        let (group, count) = (heads / kv_heads, keys.len());
        let rows = tokens * group;
        let stored = takes_stored::<T>(rows);
        let k = key_rows(self.k, pass.problem.k, keys, span, kv_head, kv_heads, head_dim, stored);
        let v = key_rows(self.v, pass.problem.v, keys, span, kv_head, kv_heads, value_dim, stored);
        let q = loaded_rows(self.q, rows, head_dim, stored);
        let d_o = loaded_rows(self.d_o, rows, value_dim, stored);
        let (p, dx) = (&mut self.p[..rows * count], &mut self.dx[..rows * count]);
        pass.problem.logits(p, q, k, self.panels);
        product_t(dx, 1.0, d_o, v, self.panels);
        for row in 0..rows {
            let seen = pass.problem.columns(span, first + row / group, keys);
            let at = (span.query + first + row / group) * heads + kv_head * group + row % group;
            let (p, dx) = (&mut p[row * count..(row + 1) * count], &mut dx[row * count..(row + 1) * count]);
            for x in [&mut *p, &mut *dx] {
                x[..seen.start].fill(0.0);
                x[seen.end..].fill(0.0);
            }
            let (p, dx) = (&mut p[seen.clone()], &mut dx[seen]);
            if let Some(cap) = pass.problem.options.soft_cap {
                soft_cap_backward(dx, pass.d[at], p, cap);
                pass.problem.probabilities(p, pass.saved, at);
                multiply(dx, p);
            } else {
                pass.problem.probabilities(p, pass.saved, at);
                softmax_backward(dx, p, pass.d[at]);
            }
        }
        let scale = pass.problem.options.scale(pass.problem.dims);
        // Listed keys are multiplied by p and dx one by one.
        let in_products = stored && at_key.is_some();
        let rounding = pass.problem.options.gradient;
        let p_by = round_factor(p, 1.0, rounding, in_products);
        let dx_by = round_factor(dx, scale, rounding, in_products);
        let factor = |a, by, transposed| Factor { a: Mat::dense(a, rows, count), by, transposed, rounding };
        let seen = |row: usize| pass.problem.columns(span, first + row / group, keys);
        masked_product_add(&mut self.dq[..rows * head_dim], factor(dx, dx_by, false), k, seen, self.panels);
        if let Some(at) = at_key {
            let (dv, dk) = (&mut self.dv[at * value_dim..], &mut self.dk[at * head_dim..]);
            masked_product_add(&mut dv[..count * value_dim], factor(p, p_by, true), d_o, seen, self.panels);
            masked_product_add(&mut dk[..count * head_dim], factor(dx, dx_by, true), q, seen, self.panels);
        }
    }
}

simd_fn! {
    /// dx = p (dp - D)
    fn softmax_backward(dx: &mut [f32], p: &[f32], d: f32) {
        assert_eq!(dx.len(), p.len());
        for (dx, p) in dx.iter_mut().zip(p) {
            *dx = *p * (*dx - d);
        }
    }
}

simd_fn! {
    /// dx = (dp - D) (1 - (x/cap)^2)
    fn soft_cap_backward(dx: &mut [f32], d: f32, x: &[f32], cap: f32) {
        assert_eq!(dx.len(), x.len());
        for (dx, x) in dx.iter_mut().zip(x) {
            let t = *x / cap;
            *dx = (*dx - d) * (1.0 - t * t);
        }
    }
}

simd_fn! {
    fn multiply(x: &mut [f32], by: &[f32]) {
        assert_eq!(x.len(), by.len());
        for (x, by) in x.iter_mut().zip(by) {
            *x *= *by;
        }
    }
}
