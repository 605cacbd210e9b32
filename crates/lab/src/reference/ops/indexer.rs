//! Indexer scores, and the loss that trains the indexer to match the attention. Query t, heads h of width d,
//! keys u <= t:
//! ```text
//! x_hu = d^-1/2 q_h.k_u      score_u = sum_h w_h relu(x_hu)
//! p = a / (sum a + eps)      a: the attention's probabilities, summed over its heads        s = softmax(score)
//! loss = mean_t sum_u p_u (ln(p_u + eps) - ln(s_u + eps))                over the keys u that the attention sees
//! r_u = p_u s_u / (s_u + eps)            dscore_u = (s_u sum_v r_v - r_u) / tokens
//! dw_h = sum_u dscore_u relu(x_hu)       dx_hu = dscore_u w_h where x_hu > 0
//! dq_h = d^-1/2 sum_u dx_hu k_u          dk_u = d^-1/2 sum_h,t dx_hu q_h
//! ```
//! p is treated as a constant. Scores and p exist for one block of queries, which computes its part of the
//! gradients at once: no tensor of tokens x tokens is kept or recomputed.

use std::ops::Range;

use ballast_kernels::indexer::EPS;
use ballast_kernels::matmul::{Mat, matmul_f64};
use rayon::prelude::*;

use super::attention::{Attention, distribution, softmax};
use super::dot;
use crate::reference::tape::{Tape, Value, add};

/// Queries per block.
const QUERIES: usize = 64;

/// Blocks whose parts of dk exist at a time.
const BLOCKS: usize = 8;

/// Tensors of an indexer.
#[derive(Clone, Debug)]
pub struct Indexer {
    /// Heads of q and w; k has one.
    pub heads: usize,
    /// d
    pub dim: usize,
    /// [tokens, heads, d]
    pub q: Value,
    /// [tokens, d]
    pub k: Value,
    /// [tokens, heads]
    pub w: Value,
}

/// A block of queries, relative to the start of their sequence.
#[derive(Clone, Debug)]
struct Block {
    sequence: Range<usize>,
    queries: Range<usize>,
}

impl Indexer {
    /// Returns q of a head, and all keys of these queries.
    fn operands(&self, h: usize, sequence: &Range<usize>, queries: &Range<usize>) -> [Mat<'_, f64>; 2] {
        let Indexer { heads, dim, .. } = *self;
        let first = sequence.start + queries.start;
        [
            Mat::new(&self.q[(first * heads + h) * dim..], queries.len(), dim, heads * dim),
            Mat::dense(&self.k[sequence.start * dim..], queries.end, dim),
        ]
    }

    /// x_h [queries, keys]
    fn products(&self, h: usize, sequence: &Range<usize>, queries: &Range<usize>) -> Vec<f64> {
        let mut x = vec![0.0; queries.len() * queries.end];
        let [q, k] = self.operands(h, sequence, queries);
        matmul_f64(&mut x, queries.end, (self.dim as f64).powf(-0.5), q, k.t(), 0.0);
        x
    }

    /// w_h of query t.
    fn weight(&self, token: usize, h: usize) -> f64 {
        self.w[token * self.heads + h]
    }

    /// Scores of the keys that each query of a block sees.
    pub fn scores(&self, sequence: &Range<usize>, queries: Range<usize>) -> Vec<Vec<f64>> {
        let mut rows: Vec<Vec<f64>> = queries.clone().map(|t| vec![0.0; t + 1]).collect();
        for h in 0..self.heads {
            let x = self.products(h, sequence, &queries);
            for ((t, row), x) in queries.clone().zip(&mut rows).zip(x.chunks(queries.end)) {
                let w = self.weight(sequence.start + t, h);
                row.iter_mut().zip(x).for_each(|(row, x)| *row += w * relu(*x));
            }
        }
        rows
    }

    /// Returns the sum of the losses of a block, and dscore [queries, keys] before the division by tokens.
    fn compare(&self, block: &Block, q: &[f64], k: &[f64], attention: &Attention) -> (f64, Vec<f64>) {
        let Block { sequence, queries } = block;
        let looked = distribution(q, k, attention, sequence, queries);
        let scores = self.scores(sequence, queries.clone());
        let (mut loss, mut dscores) = (0.0, vec![0.0; looked.len()]);
        for (i, (a, dscores)) in looked.chunks(queries.end).zip(dscores.chunks_mut(queries.end)).enumerate() {
            let seen = attention.seen(sequence.start, queries.start + i);
            let sum: f64 = seen.iter().map(|u| a[*u]).sum();
            let p: Vec<f64> = seen.iter().map(|u| a[*u] / (sum + EPS)).collect();
            let s = softmax(&seen.iter().map(|u| scores[i][*u]).collect::<Vec<f64>>());
            let r: Vec<f64> = p.iter().zip(&s).map(|(p, s)| p * s / (s + EPS)).collect();
            let all: f64 = r.iter().sum();
            for (j, u) in seen.into_iter().enumerate() {
                loss += p[j] * ((p[j] + EPS).ln() - (s[j] + EPS).ln());
                dscores[u] = s[j] * all - r[j];
            }
        }
        (loss, dscores)
    }

    /// Returns dq, dk and dw of a block from dscore [queries, keys].
    fn backward(&self, block: &Block, dscores: &[f64]) -> [Vec<f64>; 3] {
        let Indexer { heads, dim, .. } = *self;
        let Block { sequence, queries } = block;
        let (keys, scale) = (queries.end, (dim as f64).powf(-0.5));
        let mut dq = vec![0.0; queries.len() * heads * dim];
        let (mut dk, mut dw) = (vec![0.0; keys * dim], vec![0.0; queries.len() * heads]);
        for h in 0..heads {
            let mut x = self.products(h, sequence, queries);
            for (i, (x, dscore)) in x.chunks_mut(keys).zip(dscores.chunks(keys)).enumerate() {
                let w = self.weight(sequence.start + queries.start + i, h);
                dw[i * heads + h] = dot(&x.iter().map(|x| relu(*x)).collect::<Vec<f64>>(), dscore);
                x.iter_mut().zip(dscore).for_each(|(x, d)| *x = if *x > 0.0 { w * d } else { 0.0 });
            }
            let dx = Mat::dense(&x, queries.len(), keys);
            let [q, k] = self.operands(h, sequence, queries);
            matmul_f64(&mut dq[h * dim..], heads * dim, scale, dx, k, 0.0);
            matmul_f64(&mut dk, dim, scale, dx.t(), q, 1.0);
        }
        [dq, dk, dw]
    }
}

/// ReLU; `max` would hide a NaN.
fn relu(x: f64) -> f64 {
    if x < 0.0 { 0.0 } else { x }
}

/// Returns the loss of an indexer (one value), given q [tokens, heads, hd] and k [tokens, kv heads, hd] of
/// its attention. Call it only if its gradient is wanted.
pub fn indexer_loss(
    tape: &mut Tape<'_>,
    indexer: &Indexer,
    q: &Value,
    k: &Value,
    attention: Attention,
) -> Value {
    let sequences = attention.cu_seqlens.windows(2).map(|ends| ends[0]..ends[1]);
    let cut = |sequence: Range<usize>| {
        let queries = (0..sequence.len()).step_by(QUERIES);
        queries.map(move |first| {
            let queries = first..(first + QUERIES).min(sequence.len());
            Block { sequence: sequence.clone(), queries }
        })
    };
    let blocks: Vec<Block> = sequences.flat_map(cut).collect();
    let Indexer { heads, dim, .. } = *indexer;
    let tokens = (indexer.w.len() / heads) as f64;
    let work = |block: &Block| {
        let (loss, dscores) = indexer.compare(block, q, k, &attention);
        (loss, indexer.backward(block, &dscores))
    };
    let (mut loss, mut gradients) = (0.0, [&indexer.q, &indexer.k, &indexer.w].map(|x| vec![0.0; x.len()]));
    for some in blocks.chunks(BLOCKS) {
        let parts: Vec<(f64, [Vec<f64>; 3])> = some.par_iter().map(work).collect();
        for (Block { sequence, queries }, (part, [dq, dk, dw])) in some.iter().zip(parts) {
            let first = sequence.start + queries.start;
            loss += part;
            add(&mut gradients[0][first * heads * dim..], &dq);
            add(&mut gradients[1][sequence.start * dim..], &dk);
            add(&mut gradients[2][first * heads..], &dw);
        }
    }
    let of = [&indexer.q, &indexer.k, &indexer.w].map(Value::clone);
    tape.record(vec![loss / tokens], move |d, sums| {
        for (value, gradient) in of.iter().zip(&gradients) {
            sums.of(value).iter_mut().zip(gradient).for_each(|(sum, x)| *sum += d[0] / tokens * x);
        }
    })
}
