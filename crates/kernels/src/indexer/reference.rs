//! Reference in f64: query by query, all scores in memory. Slow and simple.

use super::{Dims, EPS, Options};
use crate::attention;
use crate::{Rounding, attention::UNUSED};

/// Inputs in f64; shapes as in [`super::Input`].
#[derive(Clone, Debug)]
pub struct Reference {
    /// [tokens, heads, d]
    pub q: Vec<f64>,
    /// [tokens, d]
    pub k: Vec<f64>,
    /// [tokens, heads]
    pub w: Vec<f64>,
    /// Offsets of the sequences.
    pub cu_seqlens: Vec<usize>,
}

/// Loss and gradients.
#[derive(Clone, Debug, Default)]
#[allow(missing_docs)]
pub struct Results {
    pub loss: f64,
    pub dq: Vec<f64>,
    pub dk: Vec<f64>,
    pub dw: Vec<f64>,
}

/// Attention distribution of one query: positions and p.
pub type Distribution = Vec<(usize, f64)>;

/// p of every query, from the reference of the attention.
pub fn distributions(
    attention: &attention::reference::Reference,
    dims: attention::Dims,
    options: &attention::Options,
) -> Vec<Distribution> {
    let (hd, group) = (dims.head_dim, dims.heads / dims.kv_heads);
    let tokens = attention.cu_seqlens[attention.cu_seqlens.len() - 1];
    let lse = attention.run(dims, options, &vec![0.0; tokens * dims.heads * dims.value_dim]).lse;
    let mut all = Vec::new();
    for w in attention.cu_seqlens.windows(2) {
        for t in w[0]..w[1] {
            let mut row: Distribution = Vec::new();
            for j in attention.keys(options, w[0], t - w[0]) {
                let mut sum = 0.0;
                for h in 0..dims.heads {
                    let q = &attention.q[(t * dims.heads + h) * hd..][..hd];
                    let k = &attention.k[((w[0] + j) * dims.kv_heads + h / group) * hd..][..hd];
                    let mut x = options.scale(dims) as f64 * q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>();
                    if let Some(cap) = options.soft_cap {
                        x = cap as f64 * (x / cap as f64).tanh();
                    }
                    sum += (x - lse[t * dims.heads + h]).exp();
                }
                row.push((j, sum));
            }
            let sum: f64 = row.iter().map(|(_, a)| a).sum();
            row.iter_mut().for_each(|(_, a)| *a /= sum + EPS);
            all.push(row);
        }
    }
    all
}

impl Reference {
    fn logit(&self, dims: Dims, options: &Options, t: usize, u: usize, h: usize) -> f64 {
        let q = &self.q[(t * dims.heads + h) * dims.dim..][..dims.dim];
        let k = &self.k[u * dims.dim..][..dims.dim];
        let x = q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>();
        if options.logits == Rounding::F32 { x } else { options.logits.round(x as f32) as f64 }
    }

    /// Score of key row u for query row t.
    pub fn score(&self, dims: Dims, options: &Options, t: usize, u: usize) -> f64 {
        let scale = (dims.dim as f64).powf(-0.5);
        (0..dims.heads)
            .map(|h| self.w[t * dims.heads + h] * (self.logit(dims, options, t, u, h) * scale).max(0.0))
            .sum()
    }

    /// selected [tokens, topk], by sorting all scores.
    pub fn topk(&self, dims: Dims, options: &Options, topk: usize) -> Vec<u32> {
        let mut selected = Vec::new();
        for w in self.cu_seqlens.windows(2) {
            for t in w[0]..w[1] {
                let mut keys: Vec<usize> = (w[0]..=t).collect();
                let scores: Vec<f64> = keys.iter().map(|u| self.score(dims, options, t, *u)).collect();
                // A stable sort leaves equal scores in their order.
                keys.sort_by(|a, b| scores[b - w[0]].partial_cmp(&scores[a - w[0]]).expect("numbers"));
                keys.truncate(topk);
                keys.sort();
                selected.extend(keys.iter().map(|u| (u - w[0]) as u32));
                selected.extend(std::iter::repeat_n(UNUSED, topk - keys.len()));
            }
        }
        selected
    }

    /// Loss and gradients for the given distributions.
    pub fn run(&self, dims: Dims, options: &Options, targets: &[Distribution]) -> Results {
        let Dims { heads, dim } = dims;
        let scale = (dim as f64).powf(-0.5);
        let factor = options.loss_scale as f64 / targets.len() as f64;
        let mut r = Results {
            loss: 0.0,
            dq: vec![0.0; self.q.len()],
            dk: vec![0.0; self.k.len()],
            dw: vec![0.0; self.w.len()],
        };
        for w in self.cu_seqlens.windows(2) {
            for (t, target) in targets.iter().enumerate().take(w[1]).skip(w[0]) {
                let scores: Vec<f64> =
                    target.iter().map(|(u, _)| self.score(dims, options, t, w[0] + u)).collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = scores.iter().map(|x| (x - max).exp()).sum();
                let s: Vec<f64> = scores.iter().map(|x| (x - max).exp() / sum).collect();
                let all: f64 = s.iter().zip(target).map(|(s, (_, p))| p * s / (s + EPS)).sum();
                for (s, (u, p)) in s.iter().zip(target) {
                    r.loss += factor * p * ((p + EPS).ln() - (s + EPS).ln());
                    let dscore = factor * (s * all - p * s / (s + EPS));
                    for h in 0..heads {
                        let x = self.logit(dims, options, t, w[0] + u, h) * scale;
                        r.dw[t * heads + h] += dscore * x.max(0.0);
                        if x <= 0.0 {
                            continue;
                        }
                        let dx = dscore * self.w[t * heads + h] * scale;
                        for c in 0..dim {
                            r.dq[(t * heads + h) * dim + c] += dx * self.k[(w[0] + u) * dim + c];
                            r.dk[(w[0] + u) * dim + c] += dx * self.q[(t * heads + h) * dim + c];
                        }
                    }
                }
            }
        }
        r
    }
}
