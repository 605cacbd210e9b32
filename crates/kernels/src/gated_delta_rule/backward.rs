//! Gated delta rule backward: chunks in reverse order, one task per sequence and key head.

use std::ops::Range;

use rayon::prelude::*;

use super::chunk::{
    Half, Head, Keys, gate_queries, load_rows, lower_products, prefetch_rows, prefetch_targets, reach,
    substitute_transposed, triangle_add,
};
use super::gates::{GateGrads, GateTargets};
use super::growth::bounded;
use super::{Dims, Input, L2Norm, Options, SavedRef, check_input, first_kept, kept_chunks, visited};
use crate::error::{Result, check, check_len, check_shape, elements};
use crate::matmul::{By, Mat, Onto, matmul_small};
use crate::scratch::take;
use crate::shared::Shared;
use crate::simd::{dot, dot_body, fma, scale_into, simd_fn, sum_by};
use crate::{Element, Scratch};

/// Gradients; those of the gates' parameters are added to, all others are written.
pub struct Grads<'a, T> {
    /// [tokens, Hk, dk]
    pub dq: &'a mut [T],
    /// [tokens, Hk, dk]
    pub dk: &'a mut [T],
    /// [tokens, Hv, dv]
    pub dv: &'a mut [T],
    /// Gradients of g and beta, or of the tensors that they are computed from
    pub gates: GateGrads<'a, T>,
    /// [sequences, Hv, dk, dv]
    pub dh0: Option<&'a mut [f32]>,
}

/// Number of f32 of one scratch slot of [`gated_delta_rule_backward`].
pub fn gated_delta_rule_backward_scratch(dims: Dims, options: &Options) -> usize {
    let (c, every) = (options.chunk, options.states_every);
    every * Keys::len(dims, c)
        + every * dims.group() * Head::len(dims, c)
        + Work::len(dims, c)
        + 2 * c * dims.key_dim
        + every * dims.group() * dims.state_len()
}

/// All gradients from `d_o` [tokens, Hv, dv] and `dht` [sequences, Hv, dk, dv] (`None` is zero); `saved` is a
/// [`Saved`](super::Saved) or a [`SavedRef`].
pub fn gated_delta_rule_backward<'s, T: Element>(
    grads: Grads<'_, T>,
    d_o: &[T],
    dht: Option<&[f32]>,
    input: &Input<'_, T>,
    saved: impl Into<SavedRef<'s, T>>,
    dims: Dims,
    options: &Options,
    scratch: &Scratch,
) -> Result {
    let saved = saved.into();
    let tokens = check_input(dims, options, input)?;
    let sequences = input.cu_seqlens.len() - 1;
    let Dims { key_heads, value_heads, key_dim, value_dim } = dims;
    check_shape("dq", grads.dq, [tokens, key_heads, key_dim])?;
    check_shape("dk", grads.dk, [tokens, key_heads, key_dim])?;
    check_shape("dv", grads.dv, [tokens, value_heads, value_dim])?;
    check_shape("do", d_o, [tokens, value_heads, value_dim])?;
    if let Some(dh0) = &grads.dh0 {
        check_shape("dh0", dh0, [sequences, value_heads, key_dim, value_dim])?;
    }
    if let Some(dht) = dht {
        check_shape("dht", dht, [sequences, value_heads, key_dim, value_dim])?;
    }
    let first_kept = first_kept(input.cu_seqlens, options);
    let states = elements("saved.states", [first_kept[sequences], value_heads, key_dim, value_dim])?;
    check(saved.states.len() == states, || {
        "saved states do not match these inputs and options; was forward called with `saved`?".into()
    })?;
    let norm_rows = if options.l2norm == L2Norm::Off { 0 } else { tokens * dims.key_heads };
    check_len("saved.q_rstd", saved.q_rstd, norm_rows)?;
    check_len("saved.k_rstd", saved.k_rstd, norm_rows)?;
    let (dq, dk, dv) = (Shared::new(grads.dq), Shared::new(grads.dk), Shared::new(grads.dv));
    let dh0 = grads.dh0.map(Shared::new);
    let visited = visited(input.cu_seqlens, dh0.is_some());
    let tasks: Vec<(usize, usize)> =
        (0..visited.len()).flat_map(|i| options.heads(dims).map(move |h| (i, h))).collect();
    grads.gates.with(&input.gates, visited.len(), |gates| {
        let targets = Targets { dq, dk, dv, gates, dh0 };
        let grow = input.gates.grow();
        tasks.par_iter().with_max_len(1).for_each(|&(row, key_head)| {
            let sequence = visited[row];
            let tokens = input.cu_seqlens[sequence]..input.cu_seqlens[sequence + 1];
            let bounded = grow.then(|| bounded(options, &input.gates, dims, tokens, key_head));
            let options = bounded.as_ref().unwrap_or(options);
            let task = Task { targets: &targets, d_o, dht, input, saved, dims, options };
            scratch.with(gated_delta_rule_backward_scratch(dims, options), |slot| {
                task.run(sequence, row, key_head, first_kept[sequence], slot);
            });
        });
    })
}

/// Outputs of the tasks: each (sequence, key head) writes its own rows.
struct Targets<'a, T> {
    dq: Shared<'a, T>,
    dk: Shared<'a, T>,
    dv: Shared<'a, T>,
    gates: &'a GateTargets<'a, T>,
    dh0: Option<Shared<'a, f32>>,
}

struct Task<'a, 'b, T> {
    targets: &'a Targets<'a, T>,
    d_o: &'a [T],
    dht: Option<&'a [f32]>,
    input: &'a Input<'b, T>,
    saved: SavedRef<'a, T>,
    dims: Dims,
    options: &'a Options,
}

/// Working memory of one head.
struct Work<'s> {
    /// dVn, then dR; then dO below it: [2c, dv]
    dr_do: &'s mut [f32],
    /// M, then Y: [2c, dv]
    my: &'s mut [f32],
    /// P: [c, c]
    p: &'s mut [f32],
    /// [dR; dO] Vn^T, then H + H^T and N: [2c, c]
    z: &'s mut [f32],
    /// d (Vn dS'^T), then [M; Y] S^T: [2c, dk]
    through: &'s mut [f32],
    /// [c]
    dbeta: &'s mut [f32],
}

impl<'s> Work<'s> {
    fn len(dims: Dims, c: usize) -> usize {
        4 * c * dims.value_dim + 3 * c * c + 2 * c * dims.key_dim + c
    }

    fn take(slot: &mut &'s mut [f32], dims: Dims, c: usize) -> Work<'s> {
        Work {
            dr_do: take(slot, 2 * c * dims.value_dim),
            my: take(slot, 2 * c * dims.value_dim),
            p: take(slot, c * c),
            z: take(slot, 2 * c * c),
            through: take(slot, 2 * c * dims.key_dim),
            dbeta: take(slot, c),
        }
    }
}

impl<T: Element> Task<'_, '_, T> {
    fn qk(&self) -> (&[T], &[T]) {
        match self.options.l2norm {
            L2Norm::Outside => (self.saved.q_normalized, self.saved.k_normalized),
            _ => (self.input.q, self.input.k),
        }
    }

    /// Prefetches the inputs of the chunk of these tokens.
    fn prefetch_inputs(&self, key_head: usize, tokens: Range<usize>) {
        let (dims, (q, k)) = (self.dims, self.qk());
        prefetch_rows(q, dims.key_heads, key_head, dims.key_dim, tokens.clone());
        prefetch_rows(k, dims.key_heads, key_head, dims.key_dim, tokens.clone());
        // The value heads of a group are adjacent.
        let values = dims.group() * dims.value_dim;
        prefetch_rows(self.input.v, dims.key_heads, key_head, values, tokens);
    }

    /// Prefetches the targets of the gradients of these tokens.
    fn prefetch_gradients(&self, key_head: usize, tokens: Range<usize>) {
        let (dims, targets) = (self.dims, self.targets);
        let values = dims.group() * dims.value_dim;
        // SAFETY: tokens of this sequence, this key head and its value heads belong to this task alone.
        unsafe {
            prefetch_targets(&targets.dq, dims.key_heads, key_head, dims.key_dim, tokens.clone());
            prefetch_targets(&targets.dk, dims.key_heads, key_head, dims.key_dim, tokens.clone());
            prefetch_targets(&targets.dv, dims.key_heads, key_head, values, tokens);
        }
    }

    /// Prefetches dO of these tokens.
    fn prefetch_d_o(&self, key_head: usize, tokens: Range<usize>) {
        let values = self.dims.group() * self.dims.value_dim;
        prefetch_rows(self.d_o, self.dims.key_heads, key_head, values, tokens);
    }

    /// `row` is the place of the sequence's sums of the gates.
    fn run(&self, sequence: usize, row: usize, key_head: usize, first_kept: usize, mut slot: &mut [f32]) {
        let (dims, options) = (self.dims, self.options);
        let (group, len, every) = (dims.group(), dims.state_len(), options.states_every);
        let slot = &mut slot;
        let mut work = Work::take(slot, dims, options.chunk);
        // dK rows, then dQ rows
        let dkq = take(slot, 2 * options.chunk * dims.key_dim);
        let d_states = take(slot, group * len);
        let mut made = Segment {
            keys: take(slot, every * Keys::len(dims, options.chunk)),
            heads: take(slot, every * group * Head::len(dims, options.chunk)),
            states: take(slot, (every - 1) * group * len),
        };
        let first_head = key_head * group;
        let at = (sequence * dims.value_heads + first_head) * len;
        match self.dht {
            Some(dht) => d_states.copy_from_slice(&dht[at..at + group * len]),
            None => d_states.fill(0.0),
        }
        let (begin, end) = (self.input.cu_seqlens[sequence], self.input.cu_seqlens[sequence + 1]);
        for segment in (0..kept_chunks(end - begin, options)).rev() {
            let kept_at = ((first_kept + segment) * dims.value_heads + first_head) * len;
            let kept = &self.saved.states[kept_at..kept_at + group * len];
            let first = begin + segment * every * options.chunk;
            let tokens = first..end.min(first + every * options.chunk);
            self.make_segment(&mut made, &mut work, kept, key_head, tokens.clone());
            for (i, first) in tokens.clone().step_by(options.chunk).enumerate().rev() {
                let c = options.chunk.min(end - first);
                let before = first.saturating_sub(options.chunk).max(begin)..first;
                if i > 0 {
                    self.prefetch_d_o(key_head, before);
                } else {
                    let next = first.saturating_sub(every * options.chunk).max(begin);
                    self.prefetch_inputs(key_head, next..first.min(next + options.chunk));
                }
                self.prefetch_gradients(key_head, first..first + c);
                let keys = Keys::nth(made.keys, i, dims, options.chunk);
                let dkq = &mut dkq[..2 * c * dims.key_dim];
                dkq.fill(0.0);
                for j in 0..group {
                    let (state, _) = segment_states(kept, made.states, i * group + j, group, len);
                    let head = Head::nth(made.heads, i * group + j, dims, options.chunk);
                    let d_state = &mut d_states[j * len..(j + 1) * len];
                    self.chunk(dkq, d_state, &keys, &head, &mut work, state, row, first_head + j, first, c);
                }
                self.store_keys(dkq, &keys, key_head, first, c);
            }
        }
        if let Some(dh0) = &self.targets.dh0 {
            // SAFETY: these heads' initial states of this sequence belong to this task alone.
            unsafe { dh0.part(at, group * len) }.copy_from_slice(d_states);
        }
    }

    /// Recomputes the chunks of a segment from the saved states.
    fn make_segment(
        &self,
        made: &mut Segment<'_>,
        work: &mut Work<'_>,
        kept: &[f32],
        key_head: usize,
        tokens: Range<usize>,
    ) {
        let (dims, chunk) = (self.dims, self.options.chunk);
        let (group, len) = (dims.group(), dims.state_len());
        let (q, k) = self.qk();
        // The factors have the same bits as in forward: the same rows, the same sum.
        let norm = self.options.l2norm == L2Norm::Inside;
        for (i, first) in tokens.clone().step_by(chunk).enumerate() {
            let c = chunk.min(tokens.end - first);
            let last = first + c == tokens.end;
            if last {
                self.prefetch_d_o(key_head, first..tokens.end);
            } else {
                self.prefetch_inputs(key_head, first + c..tokens.end.min(first + c + chunk));
            }
            let mut keys = Keys::nth(made.keys, i, dims, chunk);
            keys.load(dims, q, k, key_head, first, c, norm);
            for j in 0..group {
                let (state, after) = segment_states(kept, made.states, i * group + j, group, len);
                let mut head = Head::nth(made.heads, i * group + j, dims, chunk);
                head.load(dims, self.input, &keys, state, key_head * group + j, first, c);
                if !last {
                    head.advance(&mut after[..len], Some(state), work.my, &keys, dims, c);
                    self.options.state.round_all(&mut after[..len]);
                }
            }
        }
    }

    /// Backward of one chunk of one value head; the formulas are in the module header.
    fn chunk(
        &self,
        dkq: &mut [f32],
        d_state: &mut [f32],
        keys: &Keys<'_>,
        head: &Head<'_>,
        work: &mut Work<'_>,
        state: &[f32],
        row: usize,
        value_head: usize,
        first: usize,
        c: usize,
    ) {
        let (dims, heads) = (self.dims, self.dims.value_heads);
        let (dk, dv) = (dims.key_dim, dims.value_dim);
        let s = self.options.scale.unwrap_or((dk as f32).powf(-0.5));
        let at = |i: usize| ((first + i) * heads + value_head) * dv;
        let e_c = head.e[c - 1];
        let kq = Mat::dense(&keys.kq[..2 * c * dk], 2 * c, dk);
        let (k, q) = (kq.part(0..c, 0..dk), kq.part(c..2 * c, 0..dk));
        let vn = Mat::dense(&head.vn[..c * dv], c, dv);

        // dVn = s P^T dO + d (K dS'), then dR
        let (dr, d_out) = work.dr_do[..2 * c * dv].split_at_mut(c * dv);
        load_rows(d_out, &self.d_o[at(0)..], heads * dv, dv);
        matmul_small(dr, dv, Onto::Nothing, By::Rows(head.d), k, Mat::dense(d_state, dk, dv));
        gate_queries(work.p, keys.products, head.decay, c);
        let p = Mat::dense(&work.p[..c * c], c, c);
        triangle_add(dr, s, p.t(), Half::Upper, Mat::dense(d_out, c, dv));
        substitute_transposed(dr, &head.l[..c * c], c, dv);
        lower_products(work.z, Mat::dense(&work.dr_do[..2 * c * dv], 2 * c, dv), vn);

        // d (Vn dS'^T) while dS' is still the gradient of the state after the chunk
        let d_key = &mut work.through[..c * dk];
        matmul_small(d_key, dk, Onto::Nothing, By::Rows(head.d), vn, Mat::dense(d_state, dk, dv).t());
        // dG in f64: the terms of different tokens nearly cancel, and the difference counts.
        let mut dg = [0f64; 256];
        let mut last = (e_c * dot(state, d_state)) as f64;
        let mut gates = [0f32; 512];
        add_with_dots(&mut dkq[..c * dk], &mut gates, d_key, &keys.kq[..c * dk], dk);
        for (dg, t) in dg.iter_mut().zip(&gates[..c]) {
            *dg = -*t as f64;
            last += *t as f64;
        }
        dg[c - 1] += last;

        // row by row: dV, M, Y and their part of dbeta
        let (dr, d_out) = work.dr_do[..2 * c * dv].split_at(c * dv);
        let (m, y) = work.my[..2 * c * dv].split_at_mut(c * dv);
        for i in 0..c {
            let row = i * dv..(i + 1) * dv;
            // SAFETY: a token of this sequence and this value head belongs to this task alone.
            let d_value = unsafe { self.targets.dv.part(at(i), dv) };
            value_gradient(d_value, &mut m[row.clone()], &dr[row.clone()], head.beta[i], head.e[i]);
            scale_into(&mut y[row.clone()], s * head.e[i], &d_out[row.clone()]);
            work.dbeta[i] = dot(&dr[row.clone()], &head.x[row]);
        }

        // the c x c part
        triangle(work.z, work.dbeta, &mut dg, keys.products, head, s, c);
        // [M; Y] S^T, and with it <M_i, (K S)_i> + <Y_i, (Q S)_i> without Q S
        let my = Mat::dense(&work.my[..2 * c * dv], 2 * c, dv);
        let through = &mut work.through[..2 * c * dk];
        matmul_small(through, dk, Onto::Nothing, By::All(1.0), my, Mat::dense(state, dk, dv).t());
        add_with_dots(dkq, &mut gates, through, &keys.kq[..2 * c * dk], dk);
        for i in 0..c {
            dg[i] += (gates[i] + gates[c + i]) as f64;
        }
        let (d_keys, d_queries) = dkq.split_at_mut(c * dk);
        let (h, n) = (Mat::dense(&work.z[..c * c], c, c), Mat::dense(&work.z[c * c..2 * c * c], c, c));
        matmul_small(d_keys, dk, Onto::Itself(1.0), By::All(1.0), h, k);
        triangle_add(d_keys, 1.0, n.t(), Half::Upper, q);
        triangle_add(d_queries, 1.0, n, Half::Lower, k);
        matmul_small(d_state, dv, Onto::Itself(e_c), By::All(1.0), kq.t(), my);

        let mut sum = 0f64;
        for i in (0..c).rev() {
            sum += dg[i];
            let gradients = (sum as f32, work.dbeta[i]);
            // SAFETY: a token of this sequence, and the sequence's sums, at this value head belong to this
            // task alone.
            unsafe { self.targets.gates.store(gradients, row, first + i, value_head, heads) };
        }
    }

    /// Backward of the l2norm, and store.
    fn store_keys(&self, dkq: &[f32], keys: &Keys<'_>, key_head: usize, first: usize, c: usize) {
        let (dims, dk) = (self.dims, self.dims.key_dim);
        for (i, (row, y)) in dkq.chunks_exact(dk).zip(keys.kq.chunks_exact(dk)).enumerate() {
            let at = (first + i % c) * dims.key_heads + key_head;
            let (target, rstd) = if i < c {
                (&self.targets.dk, self.saved.k_rstd)
            } else {
                (&self.targets.dq, self.saved.q_rstd)
            };
            // SAFETY: a token of this sequence and this key head belongs to this task alone.
            let target = unsafe { target.part(at * dk, dk) };
            match self.options.l2norm {
                L2Norm::Off => T::store(target, row),
                _ => l2norm_backward(target, row, y, rstd[at]),
            }
        }
    }
}

/// Recomputed values of a segment.
struct Segment<'s> {
    /// The [`Keys`] of every chunk
    keys: &'s mut [f32],
    /// The [`Head`] of every chunk and head of the group
    heads: &'s mut [f32],
    /// [chunks - 1, group, dk, dv]: the states before all chunks but the first
    states: &'s mut [f32],
}

/// State n of a segment, counted by chunk and head of the group, and the memory from the state before the
/// next chunk of the same head on. The states before the first chunk are the saved ones.
fn segment_states<'a>(
    kept: &'a [f32],
    made: &'a mut [f32],
    n: usize,
    group: usize,
    len: usize,
) -> (&'a [f32], &'a mut [f32]) {
    let (before, after) = made.split_at_mut((n * len).min(made.len()));
    let state = if n < group { &kept[n * len..] } else { &before[(n - group) * len..] };
    (&state[..len], after)
}

simd_fn! {
    /// Row by row: target += source; returns its inner product with the keys.
    fn add_with_dots(target: &mut [f32], dots: &mut [f32], source: &[f32], keys: &[f32], width: usize) {
        let rows = target.chunks_exact_mut(width).zip(source.chunks_exact(width)).zip(keys.chunks_exact(width));
        for (((target, source), keys), dot) in rows.zip(dots) {
            *dot = dot_body::<FMA>(source, keys);
            for (t, s) in target.iter_mut().zip(source) {
                *t += *s;
            }
        }
    }
}

simd_fn! {
    /// dx = r (dy - y <dy, y>).
    fn l2norm_backward<T: Element>(dx: &mut [T], dy: &[f32], y: &[f32], rstd: f32) {
        let along = dot_body::<FMA>(dy, y);
        for ((dx, dy), y) in dx.iter_mut().zip(dy).zip(y) {
            *dx = T::from_f32(rstd * fma::<FMA>(-along, *y, *dy));
        }
    }
}

simd_fn! {
    /// dV = beta dR and M = -beta E dR of one row.
    fn value_gradient<T: Element>(d_value: &mut [T], m: &mut [f32], dr: &[f32], beta: f32, e: f32) {
        for ((d_value, m), dr) in d_value.iter_mut().zip(m).zip(dr) {
            let x = beta * *dr;
            *d_value = T::from_f32(x);
            *m = -e * x;
        }
    }
}

simd_fn! {
    /// H + H^T and N in place of Z, and their part of dbeta and dG.
    fn triangle(
        z: &mut [f32], dbeta: &mut [f32], dg: &mut [f64; 256], products: &[f32], head: &Head<'_>, s: f32, c: usize,
    ) {
        let ((h, n), (kk, qk)) = (z.split_at_mut(c * c), products.split_at(c * c));
        // The terms of a token's dbeta, and those that its dG gains and another token's dG loses.
        let (mut gain, mut pull) = ([0f32; 256], [0f32; 256]);
        for i in 0..c {
            let width = reach(i, c);
            let row = i * c..i * c + width;
            let (h, n, kk, qk) = (&mut h[row.clone()], &mut n[row.clone()], &kk[row.clone()], &qk[row.clone()]);
            let (decay, beta) = (&head.decay[row], head.beta[i]);
            let (gain, pull) = (&mut gain[..width], &mut pull[..width]);
            for j in 0..width {
                let dl = if j < i { -h[j] * decay[j] } else { 0.0 };
                let dp = if j <= i { s * n[j] * decay[j] } else { 0.0 };
                gain[j] = if j < i { dl * kk[j] } else { 0.0 };
                pull[j] = if j <= i { fma::<FMA>(dp, qk[j], beta * gain[j]) } else { 0.0 };
                h[j] = beta * dl;
                n[j] = dp;
            }
            let mut sums = [0f64; 8];
            for (dg, pull) in dg.chunks_mut(8).zip(pull.chunks(8)) {
                for ((dg, sum), pull) in dg.iter_mut().zip(&mut sums).zip(pull) {
                    *dg -= *pull as f64;
                    *sum += *pull as f64;
                }
            }
            dg[i] += sums.iter().sum::<f64>();
            dbeta[i] += sum_by(gain, gain, gain, |x, _, _| x);
        }
        for i in 0..c {
            for j in 0..i {
                h[j * c + i] = h[i * c + j];
            }
        }
    }
}
