//! Indexer of latent attention: chooses the keys that each query sees.
//!
//! ```text
//! q = rotate(W_q q_resid)        k = rotate(LayerNorm(W_k x))        w = heads^-1/2 W_w x
//! score_u = sum_h w_h relu(q_h.k_u d^-1/2)      the topk highest of the keys u <= t
//! ```
//! The choice has no gradient, and the indexer loss does not reach earlier parts: the indexer works on copies
//! of x and q_resid. Without a sequence longer than topk there is no choice; the indexer then runs only for
//! an observer or for its own gradients.

use std::ops::Range;

use ballast_kernels::indexer::choose;
use ballast_kernels::rotary::Heads;
use ballast_model::config::LatentAttention;
use rayon::prelude::*;

use crate::Result;
use crate::reference::layer_run::LayerRun;
use crate::reference::ops::{self, Indexer};
use crate::reference::shows_scores;
use crate::reference::tape::Value;

/// Epsilon of the key's norm.
const EPS: f64 = 1e-6;

/// Queries per task.
const QUERIES: usize = 64;

/// Result of an indexer.
pub struct Indexed {
    /// Keys of every query, ascending; `None` if all are seen.
    pub selected: Option<Vec<Vec<u32>>>,
    /// The indexer's tensors, if its loss is wanted.
    pub indexer: Option<Indexer>,
}

/// Runs the indexer and returns the keys of every query.
pub fn select(
    pass: &mut LayerRun<'_, '_>,
    x: &Value,
    q_resid: &Value,
    shape: &LatentAttention,
) -> Result<Indexed> {
    let setting = pass.setting.clone();
    let ends = setting.batch.cu_seqlens.windows(2).map(|ends| ends[0]..ends[1]);
    let chooses = ends.clone().any(|tokens| tokens.len() > shape.index_topk);
    if !chooses && !pass.is_watched() && !pass.trains_indexers() {
        return Ok(Indexed { selected: None, indexer: None });
    }
    let indexer = indexer(pass, x, q_resid, shape)?;
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
        return Ok(Indexed { selected: None, indexer: Some(indexer) });
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
    let selected = Some(ends.flat_map(sequence).collect());
    Ok(Indexed { selected, indexer: Some(indexer) })
}

fn indexer(
    pass: &mut LayerRun<'_, '_>,
    x: &Value,
    q_resid: &Value,
    shape: &LatentAttention,
) -> Result<Indexer> {
    let hidden = pass.setting.config.hidden;
    let LatentAttention { index_heads: heads, index_dim: dim, q_rank, .. } = *shape;
    let rotation = pass.setting.rotation(&shape.indexer_rope)?;
    let (x, q_resid) = (pass.tape.leaf(x.share()), pass.tape.leaf(q_resid.share()));
    let k = pass.linear(&x, "self_attn.indexer.wk", hidden, dim)?;
    let weight = pass.param("self_attn.indexer.k_norm.weight", dim)?;
    let bias = pass.param("self_attn.indexer.k_norm.bias", dim)?;
    let k = ops::layer_norm(&mut pass.tape, &k, &weight, &bias, EPS);
    let k = ops::rotary(&mut pass.tape, &k, &rotation, Heads { heads: 1, width: dim, offset: 0 });
    let q = pass.linear(&q_resid, "self_attn.indexer.wq_b", q_rank, heads * dim)?;
    let q = ops::rotary(&mut pass.tape, &q, &rotation, Heads { heads, width: dim, offset: 0 });
    let w = pass.linear(&x, "self_attn.indexer.weights_proj", hidden, heads)?;
    let w = ops::scale(&mut pass.tape, &w, (heads as f64).powf(-0.5));
    pass.see("self_attn.indexer.k", &k);
    pass.see("self_attn.indexer.q", &q);
    pass.see("self_attn.indexer.w", &w);
    Ok(Indexer { heads, dim, q, k, w })
}
