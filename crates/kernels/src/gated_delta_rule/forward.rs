//! Gated delta rule forward: chunk by chunk, one task per sequence and key head.

use rayon::prelude::*;

use super::chunk::{Half, Head, Keys, gate_queries, l2_rstd, prefetch_rows, prefetch_targets, triangle_add};
use super::growth::bounded;
use super::{Dims, Input, L2Norm, Options, Saved, SavedMut, check_input, first_kept, saved_states, visited};
use crate::error::{Result, check_shape, elements};
use crate::matmul::{By, Mat, Onto, matmul_small};
use crate::scratch::take;
use crate::shared::Shared;
use crate::{Element, Scratch};

/// Outputs of forward.
pub struct Output<'a, T> {
    /// [tokens, Hv, dv]
    pub o: &'a mut [T],
    /// [sequences, Hv, dk, dv]: final states
    pub ht: Option<&'a mut [f32]>,
}

/// Number of f32 of one scratch slot of [`gated_delta_rule_forward`].
pub fn gated_delta_rule_forward_scratch(dims: Dims, options: &Options) -> usize {
    let c = options.chunk;
    Keys::len(dims, c) + Head::len(dims, c) + c * c + c * dims.value_dim + dims.group() * dims.state_len()
}

/// o and ht from the inputs; `saved` takes what backward needs, and its memory is reused.
pub fn gated_delta_rule_forward<T: Element>(
    output: Output<'_, T>,
    saved: Option<&mut Saved<T>>,
    input: &Input<'_, T>,
    dims: Dims,
    options: &Options,
    scratch: &Scratch,
) -> Result {
    let tokens = check_input(dims, options, input)?;
    let save = saved.is_some();
    let mut unsaved = Saved::default();
    let saved = saved.unwrap_or(&mut unsaved);
    let rows = tokens * dims.key_heads;
    let (norm_rows, copies) = match options.l2norm {
        L2Norm::Off => (0, 0),
        L2Norm::Inside => (if save { rows } else { 0 }, 0),
        L2Norm::Outside => (rows, rows * dims.key_dim),
    };
    let kept = if save { saved_states(input.cu_seqlens, options) } else { 0 };
    let states = elements("saved.states", [kept, dims.value_heads, dims.key_dim, dims.value_dim])?;
    saved.q_rstd.resize(norm_rows, 0.0);
    saved.k_rstd.resize(norm_rows, 0.0);
    saved.q_normalized.resize(copies, T::default());
    saved.k_normalized.resize(copies, T::default());
    saved.states.resize(states, 0.0);
    let Saved { q_rstd, k_rstd, q_normalized, k_normalized, states } = saved;
    let saved = SavedMut { q_rstd, k_rstd, q_normalized, k_normalized, states };
    forward(output, saved, save, input, dims, options, scratch)
}

/// As [`gated_delta_rule_forward`], with the saved values in memory of the caller.
pub fn gated_delta_rule_forward_into<T: Element>(
    output: Output<'_, T>,
    saved: SavedMut<'_, T>,
    input: &Input<'_, T>,
    dims: Dims,
    options: &Options,
    scratch: &Scratch,
) -> Result {
    let tokens = check_input(dims, options, input)?;
    let rows = if options.l2norm == L2Norm::Off { 0 } else { tokens };
    let copies = if options.l2norm == L2Norm::Outside { tokens } else { 0 };
    let kept = saved_states(input.cu_seqlens, options);
    check_shape("saved.q_rstd", saved.q_rstd, [rows, dims.key_heads])?;
    check_shape("saved.k_rstd", saved.k_rstd, [rows, dims.key_heads])?;
    check_shape("saved.q_normalized", saved.q_normalized, [copies, dims.key_heads, dims.key_dim])?;
    check_shape("saved.k_normalized", saved.k_normalized, [copies, dims.key_heads, dims.key_dim])?;
    check_shape("saved.states", saved.states, [kept, dims.value_heads, dims.key_dim, dims.value_dim])?;
    forward(output, saved, true, input, dims, options, scratch)
}

/// Forward with checked inputs and saved values of the right lengths.
fn forward<T: Element>(
    output: Output<'_, T>,
    saved: SavedMut<'_, T>,
    save: bool,
    input: &Input<'_, T>,
    dims: Dims,
    options: &Options,
    scratch: &Scratch,
) -> Result {
    let sequences = input.cu_seqlens.len() - 1;
    check_shape("o", output.o, [input.cu_seqlens[sequences], dims.value_heads, dims.value_dim])?;
    if let Some(ht) = &output.ht {
        check_shape("ht", ht, [sequences, dims.value_heads, dims.key_dim, dims.value_dim])?;
    }
    let SavedMut { q_rstd, k_rstd, q_normalized, k_normalized, states } = saved;
    let (mut q, mut k) = (input.q, input.k);
    if options.l2norm == L2Norm::Outside {
        l2norm_copy(q_normalized, q_rstd, input.q, dims.key_dim);
        l2norm_copy(k_normalized, k_rstd, input.k, dims.key_dim);
        (q, k) = (q_normalized, k_normalized);
    }
    let first_kept = first_kept(input.cu_seqlens, options);
    let visited = visited(input.cu_seqlens, output.ht.is_some());
    let targets = Targets {
        o: Shared::new(output.o),
        ht: output.ht.map(Shared::new),
        states: Shared::new(states),
        q_rstd: Shared::new(q_rstd),
        k_rstd: Shared::new(k_rstd),
        save,
    };
    let tasks: Vec<(usize, usize)> =
        visited.iter().flat_map(|s| options.heads(dims).map(move |h| (*s, h))).collect();
    let grow = input.gates.grow();
    tasks.par_iter().with_max_len(1).for_each(|&(sequence, key_head)| {
        let tokens = input.cu_seqlens[sequence]..input.cu_seqlens[sequence + 1];
        let bounded = grow.then(|| bounded(options, &input.gates, dims, tokens, key_head));
        // Smaller chunks need less than was planned; the slot has the planned size all the same.
        scratch.with(gated_delta_rule_forward_scratch(dims, options), |slot| {
            let options = bounded.as_ref().unwrap_or(options);
            run(&targets, input, q, k, dims, options, sequence, key_head, first_kept[sequence], slot);
        });
    });
    Ok(())
}

/// Outputs of the tasks: each (sequence, key head) writes its own rows.
struct Targets<'a, T> {
    o: Shared<'a, T>,
    ht: Option<Shared<'a, f32>>,
    states: Shared<'a, f32>,
    q_rstd: Shared<'a, f32>,
    k_rstd: Shared<'a, f32>,
    save: bool,
}

fn run<T: Element>(
    targets: &Targets<'_, T>,
    input: &Input<'_, T>,
    q: &[T],
    k: &[T],
    dims: Dims,
    options: &Options,
    sequence: usize,
    key_head: usize,
    first_kept: usize,
    mut slot: &mut [f32],
) {
    let (dk, dv, group, len) = (dims.key_dim, dims.value_dim, dims.group(), dims.state_len());
    let scale = options.scale.unwrap_or((dims.key_dim as f32).powf(-0.5));
    let mut keys = Keys::take(&mut slot, dims, options.chunk);
    let mut chunk_head = Head::take(&mut slot, dims, options.chunk);
    let p = take(&mut slot, options.chunk * options.chunk);
    let out = take(&mut slot, options.chunk * dv);
    let states = take(&mut slot, group * len);
    let first_head = key_head * group;
    match input.h0 {
        Some(h0) => {
            let at = (sequence * dims.value_heads + first_head) * len;
            states.copy_from_slice(&h0[at..at + group * len]);
        }
        None => states.fill(0.0),
    }
    let (begin, end) = (input.cu_seqlens[sequence], input.cu_seqlens[sequence + 1]);
    for (number, first) in (begin..end).step_by(options.chunk).enumerate() {
        let c = options.chunk.min(end - first);
        if targets.save && number.is_multiple_of(options.states_every) {
            let kept = first_kept + number / options.states_every;
            // SAFETY: these heads' states of this sequence's chunk belong to this task alone.
            unsafe { targets.states.part((kept * dims.value_heads + first_head) * len, group * len) }
                .copy_from_slice(states);
        }
        let next = first + c..(first + c + options.chunk).min(end);
        prefetch_rows(q, dims.key_heads, key_head, dk, next.clone());
        prefetch_rows(k, dims.key_heads, key_head, dk, next.clone());
        // The value heads of a group are adjacent.
        prefetch_rows(input.v, dims.key_heads, key_head, group * dv, next);
        // SAFETY: a token of this sequence and this group of value heads belongs to this task alone.
        unsafe { prefetch_targets(&targets.o, dims.key_heads, key_head, group * dv, first..first + c) };
        let norm = options.l2norm == L2Norm::Inside;
        keys.load(dims, q, k, key_head, first, c, norm);
        if norm && targets.save {
            for i in 0..c {
                let at = (first + i) * dims.key_heads + key_head;
                // SAFETY: a token of this sequence and this key head belongs to this task alone.
                unsafe {
                    targets.k_rstd.part(at, 1)[0] = keys.rstd[i];
                    targets.q_rstd.part(at, 1)[0] = keys.rstd[c + i];
                }
            }
        }
        for j in 0..group {
            let head = first_head + j;
            let state = &mut states[j * len..(j + 1) * len];
            chunk_head.load(dims, input, &keys, state, head, first, c);
            gate_queries(p, keys.products, chunk_head.decay, c);
            // O = s (E Q S + P Vn)
            let out = &mut out[..c * dv];
            let mut s_e = [0f32; 256];
            for (s_e, e) in s_e.iter_mut().zip(&chunk_head.e[..c]) {
                *s_e = scale * e;
            }
            let queries = Mat::dense(&keys.kq[c * dk..2 * c * dk], c, dk);
            matmul_small(out, dv, Onto::Nothing, By::Rows(&s_e), queries, Mat::dense(state, dk, dv));
            let (p, vn) = (Mat::dense(&p[..c * c], c, c), Mat::dense(&chunk_head.vn[..c * dv], c, dv));
            triangle_add(out, scale, p, Half::Lower, vn);
            for i in 0..c {
                let at = ((first + i) * dims.value_heads + head) * dv;
                // SAFETY: a token of this sequence and this value head belongs to this task alone.
                T::store(unsafe { targets.o.part(at, dv) }, &out[i * dv..(i + 1) * dv]);
            }
            chunk_head.advance(state, None, out, &keys, dims, c);
            options.state.round_all(state);
        }
    }
    if let Some(ht) = &targets.ht {
        let at = (sequence * dims.value_heads + first_head) * len;
        // SAFETY: these heads' final states of this sequence belong to this task alone.
        unsafe { ht.part(at, group * len) }.copy_from_slice(states);
    }
}

/// Normalizes rows of width `width` in their storage type, and stores their factors.
fn l2norm_copy<T: Element>(y: &mut [T], rstd: &mut [f32], x: &[T], width: usize) {
    y.par_chunks_mut(width).zip(x.par_chunks(width)).zip(rstd.par_iter_mut()).for_each_init(
        || vec![0.0; width],
        |row, ((y, x), rstd)| {
            T::load(row, x);
            *rstd = l2_rstd(row);
            super::chunk::scale(row, *rstd);
            T::store(y, row);
        },
    );
}
