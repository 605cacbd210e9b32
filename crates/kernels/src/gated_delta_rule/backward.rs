//! Backward, chunks in reverse, one task for each sequence and key head.

use rayon::prelude::*;

use super::chunk::{Head, Keys, prefetch_rows, scale, substitute_transposed};
use super::{Dims, Input, L2Norm, Options, Saved, check_input, first_kept, kept_chunks};
use crate::error::{Result, check, check_len};
use crate::matmul::{Mat, matmul, matmul_add, matmul_strided};
use crate::scratch::take;
use crate::shared::Shared;
use crate::simd::{dot, dot_body, fma, scale_rows, simd_fn};
use crate::{Element, Scratch};

/// Where backward writes (nothing is accumulated: these are activations' gradients).
pub struct Grads<'a, T> {
    /// [tokens, Hk, dk]
    pub dq: &'a mut [T],
    /// [tokens, Hk, dk]
    pub dk: &'a mut [T],
    /// [tokens, Hv, dv]
    pub dv: &'a mut [T],
    /// [tokens, Hv]
    pub dg: &'a mut [f32],
    /// [tokens, Hv]
    pub dbeta: &'a mut [f32],
    /// [sequences, Hv, dk, dv]
    pub dh0: Option<&'a mut [f32]>,
}

/// f32 that one slot of scratch needs for backward.
pub fn backward_scratch(dims: Dims, options: &Options) -> usize {
    let c = options.chunk;
    let Dims { key_dim, value_dim, .. } = dims;
    let states =
        if options.states_every > 1 { options.states_every * dims.group() * dims.state_len() } else { 0 };
    Keys::len(dims, c)
        + Head::len(dims, c)
        + Work::len(dims, c)
        + 2 * c * key_dim
        + c * value_dim
        + dims.group() * dims.state_len()
        + states
}

/// All gradients from `d_o` [tokens, Hv, dv] and `dht` [sequences, Hv, dk, dv] (`None` is zero).
pub fn gated_delta_rule_backward<T: Element>(
    grads: Grads<'_, T>,
    d_o: &[T],
    dht: Option<&[f32]>,
    input: &Input<'_, T>,
    saved: &Saved<T>,
    dims: Dims,
    options: &Options,
    scratch: &Scratch,
) -> Result {
    let tokens = check_input(dims, options, input)?;
    let sequences = input.cu_seqlens.len() - 1;
    let (keys, values) = (tokens * dims.key_heads * dims.key_dim, tokens * dims.value_heads * dims.value_dim);
    let states = sequences * dims.value_heads * dims.state_len();
    check_len("dq", grads.dq, keys)?;
    check_len("dk", grads.dk, keys)?;
    check_len("dv", grads.dv, values)?;
    check_len("dg", grads.dg, tokens * dims.value_heads)?;
    check_len("dbeta", grads.dbeta, tokens * dims.value_heads)?;
    check_len("do", d_o, values)?;
    if let Some(dh0) = &grads.dh0 {
        check_len("dh0", dh0, states)?;
    }
    if let Some(dht) = dht {
        check_len("dht", dht, states)?;
    }
    let first_kept = first_kept(input.cu_seqlens, options);
    check(saved.states.len() == first_kept[sequences] * dims.value_heads * dims.state_len(), || {
        "what forward saved does not belong to these inputs and options: was it asked to save?".into()
    })?;
    let norm_rows = if options.l2norm == L2Norm::Off { 0 } else { tokens * dims.key_heads };
    check_len("saved.q_rstd", &saved.q_rstd, norm_rows)?;
    check_len("saved.k_rstd", &saved.k_rstd, norm_rows)?;
    let targets = Targets {
        dq: Shared::new(grads.dq),
        dk: Shared::new(grads.dk),
        dv: Shared::new(grads.dv),
        dg: Shared::new(grads.dg),
        dbeta: Shared::new(grads.dbeta),
        dh0: grads.dh0.map(Shared::new),
    };
    let task = Task { targets: &targets, d_o, dht, input, saved, dims, options };
    let tasks: Vec<(usize, usize)> =
        (0..sequences).flat_map(|s| (0..dims.key_heads).map(move |h| (s, h))).collect();
    tasks.par_iter().with_max_len(1).for_each(|&(sequence, key_head)| {
        scratch.with(backward_scratch(dims, options), |slot| {
            task.run(sequence, key_head, first_kept[sequence], slot);
        });
    });
    Ok(())
}

/// What the tasks write: every (sequence, key head) its own rows.
struct Targets<'a, T> {
    dq: Shared<'a, T>,
    dk: Shared<'a, T>,
    dv: Shared<'a, T>,
    dg: Shared<'a, f32>,
    dbeta: Shared<'a, f32>,
    dh0: Option<Shared<'a, f32>>,
}

struct Task<'a, 'b, T> {
    targets: &'a Targets<'a, T>,
    d_o: &'a [T],
    dht: Option<&'a [f32]>,
    input: &'a Input<'b, T>,
    saved: &'a Saved<T>,
    dims: Dims,
    options: &'a Options,
}

/// Scratch of one head's backward.
struct Work<'s> {
    /// dVn, then dR; then dO below it: [2c, dv]
    dr_do: &'s mut [f32],
    /// M, then Y: [2c, dv]
    my: &'s mut [f32],
    /// [dR; dO] Vn^T: [2c, c]
    z: &'s mut [f32],
    /// [H + H^T | N^T]: [c, 2c]
    hn: &'s mut [f32],
    /// N: [c, c]
    n: &'s mut [f32],
    /// Vn dS'^T: [c, dk]
    dk1: &'s mut [f32],
    /// [M; Y] S^T: [2c, dk]
    through: &'s mut [f32],
    /// [c]
    dbeta: &'s mut [f32],
}

impl<'s> Work<'s> {
    fn len(dims: Dims, c: usize) -> usize {
        4 * c * dims.value_dim + 5 * c * c + 3 * c * dims.key_dim + c
    }

    fn take(slot: &mut &'s mut [f32], dims: Dims, c: usize) -> Work<'s> {
        Work {
            dr_do: take(slot, 2 * c * dims.value_dim),
            my: take(slot, 2 * c * dims.value_dim),
            z: take(slot, 2 * c * c),
            hn: take(slot, 2 * c * c),
            n: take(slot, c * c),
            dk1: take(slot, c * dims.key_dim),
            through: take(slot, 2 * c * dims.key_dim),
            dbeta: take(slot, c),
        }
    }
}

impl<T: Element> Task<'_, '_, T> {
    fn qk(&self) -> (&[T], &[T]) {
        match self.options.l2norm {
            L2Norm::Outside => (&self.saved.q_normalised, &self.saved.k_normalised),
            _ => (self.input.q, self.input.k),
        }
    }

    fn load_keys(&self, keys: &mut Keys<'_>, key_head: usize, first: usize, c: usize) {
        let (q, k) = self.qk();
        // The factors come out as forward had them: the same rows, the same sum.
        let mut ignore = |_: usize, _: f32, _: f32| {};
        let rstd: Option<&mut dyn FnMut(usize, f32, f32)> =
            if self.options.l2norm == L2Norm::Inside { Some(&mut ignore) } else { None };
        keys.load(self.dims, q, k, key_head, first, c, rstd);
    }

    /// Asks for the rows of tokens `first..end`, which come next.
    fn prefetch(&self, key_head: usize, first: usize, end: usize) {
        let (dims, (q, k)) = (self.dims, self.qk());
        prefetch_rows(q, dims.key_heads, key_head, dims.key_dim, first, end);
        prefetch_rows(k, dims.key_heads, key_head, dims.key_dim, first, end);
        for head in key_head * dims.group()..(key_head + 1) * dims.group() {
            prefetch_rows(self.input.v, dims.value_heads, head, dims.value_dim, first, end);
            prefetch_rows(self.d_o, dims.value_heads, head, dims.value_dim, first, end);
        }
    }

    fn run(&self, sequence: usize, key_head: usize, first_kept: usize, mut slot: &mut [f32]) {
        let (dims, options) = (self.dims, self.options);
        let (group, len, every) = (dims.group(), dims.state_len(), options.states_every);
        let slot = &mut slot;
        let mut keys = Keys::take(slot, dims, options.chunk);
        let mut head = Head::take(slot, dims, options.chunk);
        let mut work = Work::take(slot, dims, options.chunk);
        // dK rows, then dQ rows
        let dkq = take(slot, 2 * options.chunk * dims.key_dim);
        let rows = take(slot, options.chunk * dims.value_dim);
        let d_states = take(slot, group * len);
        let made = take(slot, if every > 1 { every * group * len } else { 0 });
        let first_head = key_head * group;
        let at = (sequence * dims.value_heads + first_head) * len;
        match self.dht {
            Some(dht) => d_states.copy_from_slice(&dht[at..at + group * len]),
            None => d_states.fill(0.0),
        }
        let (begin, end) = (self.input.cu_seqlens[sequence], self.input.cu_seqlens[sequence + 1]);
        let chunks = (end - begin).div_ceil(options.chunk);
        for segment in (0..kept_chunks(end - begin, options)).rev() {
            let kept_at = ((first_kept + segment) * dims.value_heads + first_head) * len;
            let kept = &self.saved.states[kept_at..kept_at + group * len];
            let numbers = segment * every..chunks.min((segment + 1) * every);
            if every > 1 {
                self.make_states(made, kept, &mut keys, &mut head, key_head, begin, numbers.clone());
            }
            for number in numbers.rev() {
                let first = begin + number * options.chunk;
                let c = options.chunk.min(end - first);
                let states = if every > 1 { &made[(number - segment * every) * group * len..] } else { kept };
                self.prefetch(key_head, first.saturating_sub(options.chunk).max(begin), first);
                self.load_keys(&mut keys, key_head, first, c);
                let dkq = &mut dkq[..2 * c * dims.key_dim];
                dkq.fill(0.0);
                for j in 0..group {
                    let state = &states[j * len..(j + 1) * len];
                    let d_state = &mut d_states[j * len..(j + 1) * len];
                    self.chunk(
                        dkq,
                        d_state,
                        &keys,
                        &mut head,
                        &mut work,
                        rows,
                        state,
                        first_head + j,
                        first,
                        c,
                    );
                }
                self.store_keys(dkq, &keys, key_head, first, c);
            }
        }
        if let Some(dh0) = &self.targets.dh0 {
            // SAFETY: these heads' initial states of this sequence belong to this task alone.
            unsafe { dh0.part(at, group * len) }.copy_from_slice(d_states);
        }
    }

    /// The states that enter the chunks of a segment, from the one that was kept.
    fn make_states(
        &self,
        made: &mut [f32],
        kept: &[f32],
        keys: &mut Keys<'_>,
        head: &mut Head<'_>,
        key_head: usize,
        begin: usize,
        numbers: std::ops::Range<usize>,
    ) {
        let dims = self.dims;
        let (group, len) = (dims.group(), dims.state_len());
        made[..group * len].copy_from_slice(kept);
        for (i, number) in numbers.clone().enumerate().take(numbers.len().saturating_sub(1)) {
            let first = begin + number * self.options.chunk;
            let c = self.options.chunk;
            let (before, after) = made[i * group * len..].split_at_mut(group * len);
            after[..group * len].copy_from_slice(before);
            self.load_keys(keys, key_head, first, c);
            for j in 0..group {
                let state = &mut after[j * len..(j + 1) * len];
                head.load(dims, self.input, keys, state, key_head * group + j, first, c, false);
                head.advance(state, keys, dims, c);
            }
        }
    }

    /// One chunk of one value head: see the module's header for the formulas.
    fn chunk(
        &self,
        dkq: &mut [f32],
        d_state: &mut [f32],
        keys: &Keys<'_>,
        head: &mut Head<'_>,
        work: &mut Work<'_>,
        row: &mut [f32],
        state: &[f32],
        value_head: usize,
        first: usize,
        c: usize,
    ) {
        let (dims, heads) = (self.dims, self.dims.value_heads);
        let (dk, dv) = (dims.key_dim, dims.value_dim);
        let s = self.options.scale.unwrap_or((dk as f32).powf(-0.5));
        let at = |i: usize| ((first + i) * heads + value_head) * dv;
        let e_c = head.load(dims, self.input, keys, state, value_head, first, c, false);
        let kq = Mat::dense(&keys.kq[..2 * c * dk], 2 * c, dk);
        let k = Mat::dense(&keys.kq[..c * dk], c, dk);
        let vn = Mat::dense(&head.vn[..c * dv], c, dv);

        // dVn = s P^T dO + d (K dS'), then dR
        let (dr, d_out) = work.dr_do[..2 * c * dv].split_at_mut(c * dv);
        for i in 0..c {
            T::load(&mut d_out[i * dv..(i + 1) * dv], &self.d_o[at(i)..at(i) + dv]);
        }
        matmul(dr, 1.0, k, Mat::dense(d_state, dk, dv));
        scale_rows(dr, &head.d[..c], dv);
        matmul_add(dr, s, Mat::dense(&head.p[..c * c], c, c).t(), Mat::dense(d_out, c, dv));
        substitute_transposed(dr, &head.l[..c * c], c, dv);
        matmul(&mut work.z[..2 * c * c], 1.0, Mat::dense(&work.dr_do[..2 * c * dv], 2 * c, dv), vn.t());

        // d (Vn dS'^T) while dS' is still the state's that leaves
        let dk1 = &mut work.dk1[..c * dk];
        matmul(dk1, 1.0, vn, Mat::dense(d_state, dk, dv).t());
        // dG in f64: what one token adds another takes away, and only what is left counts.
        let mut dg = [0f64; 256];
        let mut last = (e_c * dot(state, d_state)) as f64;
        let mut gate = [0f32; 256];
        add_with_dots(&mut dkq[..c * dk], &mut gate, dk1, &head.d[..c], &keys.kq[..c * dk], dk);
        for (dg, t) in dg.iter_mut().zip(&gate[..c]) {
            *dg = -*t as f64;
            last += *t as f64;
        }
        dg[c - 1] += last;

        // row by row: dV, M, Y and their share of dbeta and dG
        let (dr, d_out) = work.dr_do[..2 * c * dv].split_at(c * dv);
        let rows = &mut row[..c * dv];
        let targets = RowTargets { d_value: rows, my: work.my, dbeta: work.dbeta };
        row_gradients(targets, dr, d_out, head, s, c, dv);
        for (i, row) in rows.chunks_exact(dv).enumerate() {
            // SAFETY: a token of this sequence and this value head belongs to this task alone.
            T::store(unsafe { self.targets.dv.part(at(i), dv) }, row);
        }

        // the c x c part
        triangle(work, &mut dg, &keys.products[..2 * c * c], head, s, c);
        // [M; Y] S^T, and with it <M_i, (K S)_i> + <Y_i, (Q S)_i> without Q S
        let my = Mat::dense(&work.my[..2 * c * dv], 2 * c, dv);
        let through = &mut work.through[..2 * c * dk];
        matmul(through, 1.0, my, Mat::dense(state, dk, dv).t());
        let mut gates = [0f32; 512];
        add_with_dots(dkq, &mut gates, through, &[1.0; 512][..2 * c], &keys.kq[..2 * c * dk], dk);
        for i in 0..c {
            dg[i] += (gates[i] + gates[c + i]) as f64;
        }
        let (d_keys, d_queries) = dkq.split_at_mut(c * dk);
        matmul_add(d_keys, 1.0, Mat::dense(&work.hn[..2 * c * c], c, 2 * c), kq);
        matmul_add(d_queries, 1.0, Mat::dense(&work.n[..c * c], c, c), k);
        matmul_strided(d_state, dv, e_c, 1.0, kq.t(), my);

        let mut sum = 0f64;
        for i in (0..c).rev() {
            sum += dg[i];
            let at = (first + i) * heads + value_head;
            // SAFETY: a token of this sequence and this value head belongs to this task alone.
            unsafe {
                self.targets.dg.part(at, 1)[0] = sum as f32;
                self.targets.dbeta.part(at, 1)[0] = work.dbeta[i];
            }
        }
    }

    /// The l2norm's backward, and out.
    fn store_keys(&self, dkq: &mut [f32], keys: &Keys<'_>, key_head: usize, first: usize, c: usize) {
        let (dims, dk) = (self.dims, self.dims.key_dim);
        let at = |i: usize| (first + i % c) * dims.key_heads + key_head;
        if self.options.l2norm != L2Norm::Off {
            let mut rstd = [0f32; 512];
            for i in 0..c {
                (rstd[i], rstd[c + i]) = (self.saved.k_rstd[at(i)], self.saved.q_rstd[at(i)]);
            }
            l2norm_backward_rows(dkq, &keys.kq[..2 * c * dk], &rstd[..2 * c], dk);
        }
        for (i, row) in dkq.chunks_exact(dk).enumerate() {
            let target = if i < c { &self.targets.dk } else { &self.targets.dq };
            // SAFETY: a token of this sequence and this key head belongs to this task alone.
            T::store(unsafe { target.part(at(i) * dk, dk) }, row);
        }
    }
}

simd_fn! {
    /// Row by row: target += factor source, and the dot of that with the keys.
    fn add_with_dots(
        target: &mut [f32], dots: &mut [f32], source: &[f32], factors: &[f32], keys: &[f32], width: usize,
    ) {
        let rows = target.chunks_exact_mut(width).zip(source.chunks_exact(width)).zip(keys.chunks_exact(width));
        for (((target, source), keys), (dot, factor)) in rows.zip(dots.iter_mut().zip(factors)) {
            *dot = *factor * dot_body::<FMA>(source, keys);
            for (t, s) in target.iter_mut().zip(source) {
                *t = fma::<FMA>(*factor, *s, *t);
            }
        }
    }
}

simd_fn! {
    /// dx = r (dy - y <dy, y>), row by row in place.
    fn l2norm_backward_rows(dy: &mut [f32], y: &[f32], rstd: &[f32], width: usize) {
        for ((dy, y), r) in dy.chunks_exact_mut(width).zip(y.chunks_exact(width)).zip(rstd) {
            let along = dot_body::<FMA>(dy, y);
            for (dy, y) in dy.iter_mut().zip(y) {
                *dy = *r * fma::<FMA>(-along, *y, *dy);
            }
        }
    }
}

/// What [`row_gradients`] writes.
struct RowTargets<'a> {
    /// beta dR: [c, dv]
    d_value: &'a mut [f32],
    /// M, then Y: [2c, dv]
    my: &'a mut [f32],
    /// <dR_i, X_i>: [c]
    dbeta: &'a mut [f32],
}

simd_fn! {
    /// dV, M, Y and their share of dbeta, row by row.
    fn row_gradients(to: RowTargets<'_>, dr: &[f32], d_out: &[f32], head: &Head<'_>, s: f32, c: usize, dv: usize) {
        let (m, y) = to.my[..2 * c * dv].split_at_mut(c * dv);
        for i in 0..c {
            let rows = i * dv..(i + 1) * dv;
            let (dr, d_out, x) = (&dr[rows.clone()], &d_out[rows.clone()], &head.x[rows.clone()]);
            let (d_value, m, y) = (&mut to.d_value[rows.clone()], &mut m[rows.clone()], &mut y[rows]);
            let (beta, e) = (head.beta[i], head.e[i]);
            for j in 0..dv {
                d_value[j] = beta * dr[j];
                m[j] = -e * d_value[j];
                y[j] = s * e * d_out[j];
            }
            to.dbeta[i] = dot_body::<FMA>(dr, x);
        }
    }
}

/// dL and dP from Z, and what follows from them: N, [H + H^T | N^T], and their share of dbeta and dG.
fn triangle(work: &mut Work<'_>, dg: &mut [f64; 256], products: &[f32], head: &Head<'_>, s: f32, c: usize) {
    let (kk, qk) = products.split_at(c * c);
    let mut pull = [0f32; 256];
    for i in 0..c {
        let rows = i * c..(i + 1) * c;
        let (decay, beta) = (&head.decay[rows.clone()], head.beta[i]);
        let (kk, qk) = (&kk[rows.clone()], &qk[rows.clone()]);
        let (z_l, z_p) = work.z.split_at_mut(c * c);
        let (h, n) = (&mut z_l[rows.clone()], &mut z_p[rows.clone()]);
        // dL_ij D_ij, then H_ij
        weigh(h, decay, -1.0, i);
        work.dbeta[i] += dot(h, kk);
        scale(h, beta);
        weigh(n, decay, s, i + 1);
        pulls(&mut pull[..c], h, kk, n, qk);
        let mut sum = 0f64;
        for (dg, w) in dg.iter_mut().zip(&pull[..=i]) {
            *dg -= *w as f64;
            sum += *w as f64;
        }
        dg[i] += sum;
        work.n[rows].copy_from_slice(n);
    }
    // [H + H^T | N^T]
    let (h, n) = work.z[..2 * c * c].split_at(c * c);
    for i in 0..c {
        let (left, right) = work.hn[i * 2 * c..(i + 1) * 2 * c].split_at_mut(c);
        left.copy_from_slice(&h[i * c..(i + 1) * c]);
        for j in i + 1..c {
            left[j] = h[j * c + i];
        }
        for (j, x) in right.iter_mut().enumerate() {
            *x = n[j * c + i];
        }
    }
}

simd_fn! {
    /// row = by * row * decay in the first `n` places, zero behind.
    fn weigh(row: &mut [f32], decay: &[f32], by: f32, n: usize) {
        for (x, d) in row[..n].iter_mut().zip(decay) {
            *x = by * *x * *d;
        }
        row[n..].fill(0.0);
    }
}

simd_fn! {
    /// H_ij k_i.k_j + N_ij q_i.k_j: what token i's decay gets from token j, and token j's loses.
    fn pulls(pull: &mut [f32], h: &[f32], kk: &[f32], n: &[f32], qk: &[f32]) {
        for ((((x, h), kk), n), qk) in pull.iter_mut().zip(h).zip(kk).zip(n).zip(qk) {
            *x = *h * *kk + *n * *qk;
        }
    }
}
