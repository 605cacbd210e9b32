//! Softmax attention, computed in blocks of queries of one head:
//! ```text
//! x_j = s q.k_j, capped c tanh(x_j / c)      p = softmax over the keys that are seen       o = sum_j p_j v_j
//! dv_j += p_j do      dx_j = p_j (do.v_j - do.o) (1 - (x_j / c)^2)      dq += s dx_j k_j      dk_j += s dx_j q
//! ```
//! Query i sees j <= i; with a window W only i - W < j; with a selection only the listed keys of these.
//! Backward recomputes p: no tensor of tokens x tokens is kept.

use std::ops::Range;

use ballast_kernels::matmul::{Mat, matmul_f64};
use rayon::prelude::*;

use super::{dot, put, take};
use crate::reference::tape::{Tape, Value, add};

/// Queries per block.
const QUERIES: usize = 64;

/// Dimensions and visibility of keys.
#[derive(Clone, Debug)]
pub struct Attention {
    /// Heads of q.
    pub heads: usize,
    /// Heads of k and v.
    pub kv_heads: usize,
    /// Width of a head of q and k.
    pub head_dim: usize,
    /// Width of a head of v.
    pub value_dim: usize,
    /// s
    pub scale: f64,
    /// W
    pub window: Option<usize>,
    /// c
    pub soft_cap: Option<f64>,
    /// By token: keys that it may see, relative to the start of its sequence
    pub selected: Option<Vec<Vec<u32>>>,
    /// Boundaries of the sequences.
    pub cu_seqlens: Vec<usize>,
}

impl Attention {
    /// Keys that query i of a sequence may see, before a selection.
    fn visible(&self, i: usize) -> Range<usize> {
        self.window.map_or(0, |window| (i + 1).saturating_sub(window))..i + 1
    }

    /// Keys that query i of the sequence that begins at `begin` sees.
    pub fn seen(&self, begin: usize, i: usize) -> Vec<usize> {
        let visible = self.visible(i);
        match &self.selected {
            None => visible.collect(),
            Some(selected) => {
                let keys = selected[begin + i].iter().map(|key| *key as usize);
                keys.filter(|key| visible.contains(key)).collect()
            }
        }
    }
}

/// Returns o [tokens, heads, vd] from q [tokens, heads, hd], k [tokens, kv heads, hd] and v [tokens, kv
/// heads, vd].
pub fn attention(tape: &mut Tape<'_>, q: &Value, k: &Value, v: &Value, attention: Attention) -> Value {
    let Attention { heads, kv_heads, head_dim, value_dim, .. } = attention;
    let tasks: Vec<(usize, Range<usize>)> = attention
        .cu_seqlens
        .windows(2)
        .flat_map(|ends| (0..heads).map(move |head| (head, ends[0]..ends[1])))
        .collect();
    let gather = move |task: &(usize, Range<usize>), q: &[f64], k: &[f64], v: &[f64]| -> [Vec<f64>; 3] {
        let (head, tokens) = task;
        let kv = head / (heads / kv_heads);
        [
            take(q, tokens, *head, heads, head_dim),
            take(k, tokens, kv, kv_heads, head_dim),
            take(v, tokens, kv, kv_heads, value_dim),
        ]
    };
    let outputs: Vec<Vec<f64>> = tasks
        .par_iter()
        .map(|task| {
            let [q, k, v] = gather(task, q, k, v);
            Head { attention: &attention, begin: task.1.start, q: &q, k: &k, v: &v }.forward()
        })
        .collect();
    let mut o = vec![0.0; q.len() / head_dim * value_dim];
    for ((head, tokens), rows) in tasks.iter().zip(&outputs) {
        put(&mut o, rows, tokens, *head, heads, value_dim);
    }
    let (q, k, v) = (q.clone(), k.clone(), v.clone());
    tape.record(o, move |d_o, sums| {
        let gradients: Vec<[Vec<f64>; 3]> = tasks
            .par_iter()
            .map(|task| {
                let [q, k, v] = gather(task, &q, &k, &v);
                let d_o = take(d_o, &task.1, task.0, heads, value_dim);
                Head { attention: &attention, begin: task.1.start, q: &q, k: &k, v: &v }.backward(&d_o)
            })
            .collect();
        for ((head, tokens), [dq, dk, dv]) in tasks.iter().zip(&gradients) {
            let kv = head / (heads / kv_heads);
            put(sums.of(&q), dq, tokens, *head, heads, head_dim);
            put(sums.of(&k), dk, tokens, kv, kv_heads, head_dim);
            put(sums.of(&v), dv, tokens, kv, kv_heads, value_dim);
        }
    })
}

/// Attention probabilities of some queries of a sequence, summed over heads: [queries, keys 0..queries.end].
pub fn distribution(
    q: &[f64],
    k: &[f64],
    attention: &Attention,
    sequence: &Range<usize>,
    queries: &Range<usize>,
) -> Vec<f64> {
    let Attention { heads, kv_heads, head_dim, .. } = *attention;
    let seen = sequence.start..sequence.start + queries.end;
    let mut sum = vec![0.0; queries.len() * queries.end];
    for head in 0..heads {
        let q = take(q, &seen, head, heads, head_dim);
        let k = take(k, &seen, head / (heads / kv_heads), kv_heads, head_dim);
        let block = Head { attention, begin: sequence.start, q: &q, k: &k, v: &[] }.block(queries.clone());
        for (sum, p) in sum.chunks_mut(queries.end).zip(block.p.chunks(block.keys.len())) {
            add(&mut sum[block.keys.clone()], p);
        }
    }
    sum
}

/// One head of one sequence: q, k [n, hd], v [n, vd].
struct Head<'h> {
    attention: &'h Attention,
    /// First token of the sequence
    begin: usize,
    q: &'h [f64],
    k: &'h [f64],
    v: &'h [f64],
}

/// A block of queries and the keys that they may see.
struct Block {
    queries: Range<usize>,
    keys: Range<usize>,
    /// Probabilities [queries, keys]; 0 for keys that are not seen
    p: Vec<f64>,
    /// Derivative of the soft cap [queries, keys]
    slopes: Option<Vec<f64>>,
}

impl Head<'_> {
    fn blocks(&self) -> impl Iterator<Item = Block> {
        let tokens = self.q.len() / self.attention.head_dim;
        (0..tokens).step_by(QUERIES).map(move |first| self.block(first..(first + QUERIES).min(tokens)))
    }

    fn rows<'x>(x: &'x [f64], rows: &Range<usize>, width: usize) -> Mat<'x, f64> {
        Mat::dense(&x[rows.start * width..rows.end * width], rows.len(), width)
    }

    fn block(&self, queries: Range<usize>) -> Block {
        let Attention { head_dim, scale, soft_cap, .. } = *self.attention;
        let keys = self.attention.visible(queries.start).start..queries.end;
        let mut x = vec![0.0; queries.len() * keys.len()];
        let (q, k) = (Head::rows(self.q, &queries, head_dim), Head::rows(self.k, &keys, head_dim));
        matmul_f64(&mut x, keys.len(), scale, q, k.t(), 0.0);
        let slopes = soft_cap.map(|cap| {
            x.iter_mut().for_each(|x| *x = cap * (*x / cap).tanh());
            x.iter().map(|x| 1.0 - (x / cap).powi(2)).collect()
        });
        for (i, row) in queries.clone().zip(x.chunks_mut(keys.len())) {
            let seen = self.attention.seen(self.begin, i);
            let logits: Vec<f64> = seen.iter().map(|key| row[key - keys.start]).collect();
            row.fill(0.0);
            for (key, p) in seen.iter().zip(softmax(&logits)) {
                row[key - keys.start] = p;
            }
        }
        Block { queries, keys, p: x, slopes }
    }

    /// o [n, vd]
    fn forward(&self) -> Vec<f64> {
        let width = self.attention.value_dim;
        let mut o = vec![0.0; self.q.len() / self.attention.head_dim * width];
        for block in self.blocks() {
            let p = Mat::dense(&block.p, block.queries.len(), block.keys.len());
            let v = Head::rows(self.v, &block.keys, width);
            matmul_f64(&mut o[block.queries.start * width..], width, 1.0, p, v, 0.0);
        }
        o
    }

    /// dq, dk, dv from d_o [n, vd]
    fn backward(&self, d_o: &[f64]) -> [Vec<f64>; 3] {
        let Attention { head_dim, value_dim, scale, .. } = *self.attention;
        let [mut dq, mut dk, mut dv] = [self.q, self.k, self.v].map(|x| vec![0.0; x.len()]);
        for Block { queries, keys, p, slopes } in self.blocks() {
            let d_out = Head::rows(d_o, &queries, value_dim);
            let mut dx = vec![0.0; p.len()];
            matmul_f64(&mut dx, keys.len(), 1.0, d_out, Head::rows(self.v, &keys, value_dim).t(), 0.0);
            for (dx, p) in dx.chunks_mut(keys.len()).zip(p.chunks(keys.len())) {
                // do.o is the mean of do.v under p.
                let mean = dot(dx, p);
                dx.iter_mut().zip(p).for_each(|(dx, p)| *dx = p * (*dx - mean));
            }
            if let Some(slopes) = slopes {
                dx.iter_mut().zip(slopes).for_each(|(dx, slope)| *dx *= slope);
            }
            let (dx, p) =
                (Mat::dense(&dx, queries.len(), keys.len()), Mat::dense(&p, queries.len(), keys.len()));
            let (q, k) = (Head::rows(self.q, &queries, head_dim), Head::rows(self.k, &keys, head_dim));
            matmul_f64(&mut dq[queries.start * head_dim..], head_dim, scale, dx, k, 0.0);
            matmul_f64(&mut dk[keys.start * head_dim..], head_dim, scale, dx.t(), q, 1.0);
            matmul_f64(&mut dv[keys.start * value_dim..], value_dim, 1.0, p.t(), d_out, 1.0);
        }
        [dq, dk, dv]
    }
}

/// e^x / sum of e^x
pub fn softmax(logits: &[f64]) -> Vec<f64> {
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut p: Vec<f64> = logits.iter().map(|x| (x - max).exp()).collect();
    let sum: f64 = p.iter().sum();
    p.iter_mut().for_each(|p| *p /= sum);
    p
}
