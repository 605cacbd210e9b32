//! The indexer of latent attention: the keys that each query sees.
//!
//! ```text
//! q = rotate(W_q q_resid)        k = rotate(LayerNorm(W_k x))        w = heads^-1/2 W_w x
//! score_u = sum_h w_h relu(q_h.k_u d^-1/2)      the topk highest of the keys u <= t
//! ```
//! A choice has no gradient, so nothing of this is on the tape. A batch without a sequence longer than topk chooses
//! nothing; its indexer is run for those who look on.

use std::ops::Range;

use ballast_kernels::indexer::choose;
use ballast_kernels::matmul::{Mat, matmul_f64};
use ballast_kernels::rotary::Heads;
use ballast_model::config::LatentAttention;
use rayon::prelude::*;

use crate::Result;
use crate::reference::ops::layer_norm;
use crate::reference::pass::Pass;
use crate::reference::product::times_transposed;
use crate::reference::shows_scores;

/// Of the key's norm.
const EPS: f64 = 1e-6;

/// Queries of a task.
const QUERIES: usize = 64;

/// The keys of every query, in ascending order; `None` where all are seen.
pub fn select(
    pass: &mut Pass<'_, '_>,
    x: &[f64],
    q_resid: &[f64],
    shape: &LatentAttention,
) -> Result<Option<Vec<Vec<u32>>>> {
    let setting = pass.setting.clone();
    let ends = setting.batch.cu_seqlens.windows(2).map(|ends| ends[0]..ends[1]);
    let chooses = ends.clone().any(|tokens| tokens.len() > shape.index_topk);
    if !chooses && !pass.is_watched() {
        return Ok(None);
    }
    let indexer = Indexer::new(pass, x, q_resid, shape)?;
    if pass.is_watched() && shows_scores(&setting.batch) {
        let square = |tokens: Range<usize>| {
            let len = tokens.len();
            let padded = |row: Vec<f64>| (0..len).map(move |u| row.get(u).copied().unwrap_or(0.0));
            indexer.scores(&tokens, 0..len).into_iter().flat_map(padded).collect::<Vec<f64>>()
        };
        let all: Vec<f64> = ends.clone().flat_map(square).collect();
        pass.show("self_attn.indexer.scores", &[all.len()], &all);
    }
    if !chooses {
        return Ok(None);
    }
    let sequence = |tokens: Range<usize>| -> Vec<Vec<u32>> {
        let (len, topk) = (tokens.len(), shape.index_topk);
        if len <= topk {
            return (0..len as u32).map(|t| (0..=t).collect()).collect();
        }
        let blocks: Vec<usize> = (0..len).step_by(QUERIES).collect();
        let block = |first: &usize| {
            let scores = indexer.scores(&tokens, *first..(first + QUERIES).min(len));
            let chosen = scores.iter().map(|scores| {
                let mut order = vec![0; len];
                choose(&mut order, scores, topk, setting.ties);
                order.truncate(topk.min(scores.len()));
                order
            });
            chosen.collect::<Vec<Vec<u32>>>()
        };
        blocks.par_iter().flat_map_iter(block).collect()
    };
    Ok(Some(ends.flat_map(sequence).collect()))
}

struct Indexer {
    heads: usize,
    dim: usize,
    /// [tokens, heads, d]
    q: Vec<f64>,
    /// [tokens, d]
    k: Vec<f64>,
    /// [tokens, heads]
    w: Vec<f64>,
}

impl Indexer {
    fn new(pass: &mut Pass<'_, '_>, x: &[f64], q_resid: &[f64], shape: &LatentAttention) -> Result<Indexer> {
        let hidden = pass.setting.config.hidden;
        let LatentAttention { index_heads: heads, index_dim: dim, q_rank, .. } = *shape;
        let rotation = pass.setting.rotation(&shape.indexer_rope)?;
        let linear = |pass: &Pass<'_, '_>, x: &[f64], name: &str, inputs: usize, outputs: usize| {
            let weight = pass.param(&format!("self_attn.indexer.{name}.weight"), inputs * outputs)?;
            Ok::<_, crate::Error>(times_transposed(x, weight.values(), inputs, outputs))
        };
        let raw = linear(pass, x, "wk", hidden, dim)?;
        let weight = pass.param("self_attn.indexer.k_norm.weight", dim)?;
        let bias = pass.param("self_attn.indexer.k_norm.bias", dim)?;
        let mut k = layer_norm(&raw, weight.values(), bias.values(), EPS);
        rotation.rotate(&mut k, Heads { heads: 1, width: dim, offset: 0 }, false);
        let mut q = linear(pass, q_resid, "wq_b", q_rank, heads * dim)?;
        rotation.rotate(&mut q, Heads { heads, width: dim, offset: 0 }, false);
        let mut w = linear(pass, x, "weights_proj", hidden, heads)?;
        w.iter_mut().for_each(|w| *w *= (heads as f64).powf(-0.5));
        pass.see("self_attn.indexer.k", &k);
        pass.see("self_attn.indexer.q", &q);
        pass.see("self_attn.indexer.w", &w);
        Ok(Indexer { heads, dim, q, k, w })
    }

    /// Of some queries of a sequence, counted from its start: the scores of the keys that each sees.
    fn scores(&self, tokens: &Range<usize>, queries: Range<usize>) -> Vec<Vec<f64>> {
        let Indexer { heads, dim, .. } = *self;
        let mut rows: Vec<Vec<f64>> = queries.clone().map(|t| vec![0.0; t + 1]).collect();
        let k = Mat::dense(&self.k[tokens.start * dim..], queries.end, dim);
        let mut x = vec![0.0; queries.len() * queries.end];
        for h in 0..heads {
            let first = tokens.start + queries.start;
            let q = Mat::new(&self.q[(first * heads + h) * dim..], queries.len(), dim, heads * dim);
            matmul_f64(&mut x, queries.end, 0.0, (dim as f64).powf(-0.5), q, k.t());
            for (i, (row, x)) in rows.iter_mut().zip(x.chunks(queries.end)).enumerate() {
                let w = self.w[(first + i) * heads + h];
                // Not `max`, which would hide a NaN.
                row.iter_mut().zip(x).for_each(|(row, x)| *row += w * if *x < 0.0 { 0.0 } else { *x });
            }
        }
        rows
    }
}

#[cfg(test)]
mod tests {
    use ballast_kernels::indexer::{self, Options, reference::Reference};

    use super::*;

    #[test]
    fn scores_are_those_of_the_kernels_twin() {
        let (tokens, heads, dim) = (90, 3, 4);
        let value = |i: usize, by: usize| ((i * by) % 31) as f64 / 15.0 - 1.0;
        let part = |n: usize, by: usize| (0..n).map(|i| value(i, by)).collect::<Vec<f64>>();
        let (q, k, w) = (part(tokens * heads * dim, 7), part(tokens * dim, 5), part(tokens * heads, 3));
        let ours = Indexer { heads, dim, q: q.clone(), k: k.clone(), w: w.clone() };
        let twin = Reference { q, k, w, cu_seqlens: vec![0, 10, 90] };
        let dims = indexer::Dims { heads, dim };
        for (i, row) in ours.scores(&(10..90), 60..80).into_iter().enumerate() {
            assert_eq!(row.len(), 61 + i);
            for (u, score) in row.into_iter().enumerate() {
                let expected = twin.score(dims, &Options::default(), 70 + i, 10 + u);
                assert!((score - expected).abs() < 1e-14);
            }
        }
    }
}
