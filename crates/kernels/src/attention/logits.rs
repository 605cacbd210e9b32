//! Attention logits for inspection; the other kernels never store them.

use rayon::prelude::*;

use super::tile::spans;
use super::{Dims, Input, Options, UNUSED, check_input};
use crate::Element;
use crate::error::Result;

/// Logits x of every query and key, sequence after sequence, each [heads, queries, keys]; 0 for keys that a
/// query does not see.
pub fn attention_logits<T: Element>(input: &Input<'_, T>, dims: Dims, options: &Options) -> Result<Vec<f32>> {
    check_input(dims, options, input)?;
    let scale = options.scale(dims);
    let (hd, group) = (dims.head_dim, dims.group());
    let mut all = Vec::new();
    for span in spans(input.cu_seqlens, input.before) {
        let begin = all.len();
        all.resize(begin + dims.heads * span.queries * span.keys(), 0.0);
        all[begin..].par_chunks_mut(span.keys().max(1)).enumerate().for_each(|(row, logits)| {
            let (head, i) = (row / span.queries, row % span.queries);
            let q = &input.q[((span.query + i) * dims.heads + head) * hd..][..hd];
            for j in options.visible(span.offset + i) {
                if let Some(selected) = input.selected {
                    let keys = &selected.keys[(span.query + i) * selected.topk..][..selected.topk];
                    if !keys.iter().any(|key| *key != UNUSED && *key as usize == j) {
                        continue;
                    }
                }
                let k = &input.k[((span.key + j) * dims.kv_heads + head / group) * hd..][..hd];
                let product: f64 = q.iter().zip(k).map(|(q, k)| q.to_f32() as f64 * k.to_f32() as f64).sum();
                let mut x = options.qk_product.round(product as f32 * scale);
                if let Some(cap) = options.soft_cap {
                    x = options.qk_product.round(cap * (x / cap).tanh());
                }
                logits[j] = options.logits.round(x);
            }
        });
    }
    Ok(all)
}
