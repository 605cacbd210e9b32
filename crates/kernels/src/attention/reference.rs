//! Reference in f64: query by query, all logits in memory. Slow and simple.

use super::{Dims, Options, UNUSED};
use crate::Rounding;

/// Inputs in f64; shapes as in [`super::Input`].
#[derive(Clone, Debug)]
pub struct Reference {
    /// [tokens, heads, hd]
    pub q: Vec<f64>,
    /// [tokens, kv_heads, hd]
    pub k: Vec<f64>,
    /// [tokens, kv_heads, vd]
    pub v: Vec<f64>,
    /// `[heads]`
    pub sinks: Option<Vec<f64>>,
    /// [tokens, topk] and topk
    pub selected: Option<(Vec<u32>, usize)>,
    /// Offsets of the sequences.
    pub cu_seqlens: Vec<usize>,
}

/// Output and gradients; `lse` [tokens, heads], the others with the shapes of their tensors.
#[derive(Clone, Debug, Default)]
#[allow(missing_docs)]
pub struct Results {
    pub o: Vec<f64>,
    pub lse: Vec<f64>,
    pub dq: Vec<f64>,
    pub dk: Vec<f64>,
    pub dv: Vec<f64>,
    pub dsinks: Vec<f64>,
}

fn round(precision: Rounding, x: f64) -> f64 {
    if precision == Rounding::F32 { x } else { precision.round(x as f32) as f64 }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

impl Reference {
    /// Positions that query i of the sequence sees, in the order of summation.
    pub fn keys(&self, options: &Options, begin: usize, i: usize) -> Vec<usize> {
        let candidates: Vec<usize> = match &self.selected {
            None => (0..=i).collect(),
            Some((keys, topk)) => keys[(begin + i) * topk..(begin + i + 1) * topk]
                .iter()
                .filter(|j| **j != UNUSED)
                .map(|j| *j as usize)
                .collect(),
        };
        let seen = |j: usize| j <= i && options.window.is_none_or(|w| j + w > i);
        candidates.into_iter().filter(|j| seen(*j)).collect()
    }

    /// Forward, and backward from `d_o` [tokens, heads, vd].
    pub fn run(&self, dims: Dims, options: &Options, d_o: &[f64]) -> Results {
        let Dims { heads, kv_heads, head_dim: hd, value_dim: vd } = dims;
        let tokens = self.cu_seqlens[self.cu_seqlens.len() - 1];
        let scale = options.scale(dims) as f64;
        let (product, lowered) = (options.qk_product, options.logits);
        let mut r = Results {
            o: vec![0.0; tokens * heads * vd],
            lse: vec![f64::NEG_INFINITY; tokens * heads],
            dq: vec![0.0; self.q.len()],
            dk: vec![0.0; self.k.len()],
            dv: vec![0.0; self.v.len()],
            dsinks: vec![0.0; self.sinks.as_ref().map_or(0, Vec::len)],
        };
        for sequence in self.cu_seqlens.windows(2) {
            for (t, h) in (sequence[0]..sequence[1]).flat_map(|t| (0..heads).map(move |h| (t, h))) {
                let keys = self.keys(options, sequence[0], t - sequence[0]);
                let kv = h / (heads / kv_heads);
                let q_at = (t * heads + h) * hd;
                let k_at = |j: usize| ((sequence[0] + j) * kv_heads + kv) * hd;
                let v_at = |j: usize| ((sequence[0] + j) * kv_heads + kv) * vd;
                let o_at = (t * heads + h) * vd;
                let q = &self.q[q_at..q_at + hd];
                // Forward.
                let x: Vec<f64> = keys
                    .iter()
                    .map(|j| {
                        let mut x = round(product, scale * dot(q, &self.k[k_at(*j)..k_at(*j) + hd]));
                        if let Some(cap) = options.soft_cap {
                            let cap = cap as f64;
                            x = round(product, cap * (x / cap).tanh());
                        }
                        round(lowered, x)
                    })
                    .collect();
                let sink = self.sinks.as_ref().map(|s| round(lowered, s[h]));
                let max = x.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
                let exp = |x: f64| round(lowered, round(lowered, x - max).exp());
                let sum = x.iter().copied().chain(sink).fold(0.0, |sum, x| round(lowered, sum + exp(x)));
                if sum == 0.0 {
                    continue;
                }
                r.lse[t * heads + h] = max + sum.ln();
                let p: Vec<f64> = x.iter().map(|x| exp(*x) / sum).collect();
                for (x, j) in x.iter().zip(&keys) {
                    let e = round(options.probabilities, exp(*x));
                    for c in 0..vd {
                        r.o[o_at + c] += e / sum * self.v[v_at(*j) + c];
                    }
                }
                // Backward.
                let d_out = &d_o[o_at..o_at + vd];
                let d = dot(d_out, &r.o[o_at..o_at + vd]);
                for ((p, x), j) in p.iter().zip(&x).zip(&keys) {
                    let dp = dot(d_out, &self.v[v_at(*j)..v_at(*j) + vd]);
                    let slope = options.soft_cap.map_or(1.0, |cap| 1.0 - (x / cap as f64).powi(2));
                    let dx = round(options.gradient, scale * p * (dp - d) * slope);
                    let p = round(options.gradient, *p);
                    for (c, d_out) in d_out.iter().enumerate() {
                        r.dv[v_at(*j) + c] += p * d_out;
                    }
                    for (c, q) in q.iter().enumerate() {
                        r.dq[q_at + c] += dx * self.k[k_at(*j) + c];
                        r.dk[k_at(*j) + c] += dx * q;
                    }
                }
                if let Some(sink) = sink {
                    r.dsinks[h] -= exp(sink) / sum * d;
                }
            }
        }
        r
    }
}
