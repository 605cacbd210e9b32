//! Router: the experts of each token and their weights.

use rayon::prelude::*;

use super::{Dims, check_dims};
use crate::error::{Result, check, check_len, check_shape};
use crate::shared::Shared;

/// Tokens per task.
const TOKENS: usize = 32;

/// Formula of scores and weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Router<'a> {
    /// Softmax over all experts (Qwen, Gemma).
    Softmax {
        /// If true, the weights of a token are normalized to a sum of 1.
        normalize: bool,
    },
    /// Sigmoid scores with groups of experts (DeepSeek).
    SigmoidGroups {
        /// \[E\]: correction bias, used for the choice only
        bias: Option<&'a [f32]>,
        /// Number of groups, of equal size and adjacent experts.
        groups: usize,
        /// Number of groups to choose from.
        kept_groups: usize,
        /// If true, the weights of a token are divided by their sum.
        normalize: bool,
        /// Factor of the weights.
        scaling: f32,
    },
}

/// Chosen experts and their weights; needed again by backward.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Routing {
    /// [tokens, k], best first
    pub experts: Vec<u32>,
    /// [tokens, k]
    pub weights: Vec<f32>,
}

impl Routing {
    /// Size of all fields in bytes.
    pub fn bytes(&self) -> usize {
        (self.experts.len() + self.weights.len()) * 4
    }
}

/// Returns the experts and weights of every token, from logits [tokens, E]; `per_expert_scale` \[E\]
/// multiplies the weights.
pub fn route_forward(
    logits: &[f32],
    per_expert_scale: Option<&[f32]>,
    router: &Router<'_>,
    dims: Dims,
) -> Result<Routing> {
    let tokens = check_router(logits, per_expert_scale, router, dims)?;
    let (e, k) = (dims.experts, dims.top_k);
    let mut routing = Routing { experts: vec![0; tokens * k], weights: vec![0.0; tokens * k] };
    let tasks = routing
        .experts
        .par_chunks_mut(TOKENS * k)
        .zip(routing.weights.par_chunks_mut(TOKENS * k))
        .zip(logits.par_chunks(TOKENS * e));
    tasks.for_each(|((experts, weights), logits)| {
        let mut work = Work::default();
        let rows = experts.chunks_mut(k).zip(weights.chunks_mut(k)).zip(logits.chunks(e));
        for ((experts, weights), logits) in rows {
            work.choose(experts, logits, router);
            weigh(weights, experts, logits, router);
            if let Some(scale) = per_expert_scale {
                for (weight, expert) in weights.iter_mut().zip(&*experts) {
                    *weight *= scale[*expert as usize];
                }
            }
        }
    });
    Ok(routing)
}

/// dlogits [tokens, E] (written) and, unless `None`, dper_expert_scale \[E\] (accumulated) from dweights
/// [tokens, k].
pub fn route_backward(
    dlogits: &mut [f32],
    dper_expert_scale: Option<&mut [f32]>,
    dweights: &[f32],
    logits: &[f32],
    routing: &Routing,
    per_expert_scale: Option<&[f32]>,
    router: &Router<'_>,
    dims: Dims,
) -> Result {
    let tokens = check_router(logits, per_expert_scale, router, dims)?;
    let (e, k) = (dims.experts, dims.top_k);
    check_len("dlogits", dlogits, logits.len())?;
    check_shape("dweights", dweights, [tokens, k])?;
    check_routing(routing, tokens, dims)?;
    let mut weights = vec![0.0; tokens * k];
    let rows = weights.par_chunks_mut(k).zip(dlogits.par_chunks_mut(e)).zip(logits.par_chunks(e)).enumerate();
    rows.with_min_len(TOKENS).for_each(|(t, ((weights, dlogits), logits))| {
        let experts = &routing.experts[t * k..(t + 1) * k];
        weigh(weights, experts, logits, router);
        let dw: Vec<f32> = experts
            .iter()
            .zip(&dweights[t * k..(t + 1) * k])
            .map(|(expert, dw)| dw * per_expert_scale.map_or(1.0, |scale| scale[*expert as usize]))
            .collect();
        row_backward(dlogits, &dw, weights, experts, logits, router);
    });
    if let Some(dscale) = dper_expert_scale {
        check_len("dper_expert_scale", dscale, e)?;
        // In the order of the tokens.
        let mut sums = vec![0f64; e];
        for ((expert, weight), dw) in routing.experts.iter().zip(&weights).zip(dweights) {
            sums[*expert as usize] += *weight as f64 * *dw as f64;
        }
        for (dscale, sum) in dscale.iter_mut().zip(sums) {
            *dscale += sum as f32;
        }
    }
    Ok(())
}

#[derive(Default)]
struct Work {
    scores: Vec<f32>,
    group_scores: Vec<f32>,
    kept: Vec<u32>,
}

impl Work {
    fn choose(&mut self, experts: &mut [u32], logits: &[f32], router: &Router<'_>) {
        match *router {
            // Softmax keeps the order of the logits, so they are compared instead of rounded probabilities.
            Router::Softmax { .. } => largest(experts, logits),
            Router::SigmoidGroups { bias, groups, kept_groups, .. } => {
                self.scores.clear();
                self.scores.extend(logits.iter().map(|l| sigmoid(*l)));
                if let Some(bias) = bias {
                    self.scores.iter_mut().zip(bias).for_each(|(score, bias)| *score += bias);
                }
                let size = logits.len() / groups;
                self.group_scores.clear();
                self.group_scores.extend(self.scores.chunks(size).map(|group| {
                    let mut best = [0u32; 2];
                    let best = &mut best[..size.min(2)];
                    largest(best, group);
                    best.iter().map(|i| group[*i as usize]).sum::<f32>()
                }));
                self.kept.resize(kept_groups, 0);
                largest(&mut self.kept, &self.group_scores);
                for (i, group) in self.scores.chunks_mut(size).enumerate() {
                    if !self.kept.contains(&(i as u32)) {
                        group.fill(f32::NEG_INFINITY);
                    }
                }
                largest(experts, &self.scores);
            }
        }
    }
}

/// Indices of the largest scores, best first; of equal scores the lowest index first. NaN counts as the
/// smallest.
fn largest(chosen: &mut [u32], scores: &[f32]) {
    let value = |score: f32| if score.is_nan() { f32::NEG_INFINITY } else { score };
    let mut len = 0;
    for (i, score) in scores.iter().enumerate() {
        let score = value(*score);
        let better = |other: u32| score > value(scores[other as usize]);
        if len == chosen.len() && !better(chosen[len - 1]) {
            continue;
        }
        let mut at = if len < chosen.len() { len } else { len - 1 };
        len = (len + 1).min(chosen.len());
        while at > 0 && better(chosen[at - 1]) {
            chosen[at] = chosen[at - 1];
            at -= 1;
        }
        chosen[at] = i as u32;
    }
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// Weights of the chosen experts, before any multiplier.
fn weigh(weights: &mut [f32], experts: &[u32], logits: &[f32], router: &Router<'_>) {
    let chosen = experts.iter().map(|expert| logits[*expert as usize]);
    match *router {
        Router::Softmax { normalize } => {
            let max = logits[experts[0] as usize];
            weights.iter_mut().zip(chosen).for_each(|(w, l)| *w = (l - max).exp());
            // Normalized probabilities are a softmax over the chosen experts.
            let sum: f32 = if normalize {
                weights.iter().sum()
            } else {
                logits.iter().map(|l| (l - max).exp() as f64).sum::<f64>() as f32
            };
            weights.iter_mut().for_each(|w| *w /= sum);
        }
        Router::SigmoidGroups { normalize, scaling, .. } => {
            weights.iter_mut().zip(chosen).for_each(|(w, l)| *w = sigmoid(l));
            let sum = if normalize { weights.iter().sum::<f32>() + 1e-20 } else { 1.0 };
            weights.iter_mut().for_each(|w| *w = *w / sum * scaling);
        }
    }
}

fn row_backward(
    dlogits: &mut [f32],
    dw: &[f32],
    weights: &[f32],
    experts: &[u32],
    logits: &[f32],
    router: &Router<'_>,
) {
    dlogits.fill(0.0);
    let along: f32 = dw.iter().zip(weights).map(|(dw, w)| dw * w).sum();
    match *router {
        Router::Softmax { normalize: true } => {
            for ((expert, dw), w) in experts.iter().zip(dw).zip(weights) {
                dlogits[*expert as usize] = w * (dw - along);
            }
        }
        Router::Softmax { normalize: false } => {
            let max = logits[experts[0] as usize];
            let sum = logits.iter().map(|l| (l - max).exp() as f64).sum::<f64>() as f32;
            for (dl, l) in dlogits.iter_mut().zip(logits) {
                *dl = -(l - max).exp() / sum * along;
            }
            for ((expert, dw), w) in experts.iter().zip(dw).zip(weights) {
                dlogits[*expert as usize] += w * dw;
            }
        }
        Router::SigmoidGroups { normalize, scaling, .. } => {
            let scores: f32 = experts.iter().map(|expert| sigmoid(logits[*expert as usize])).sum();
            let (sum, along) = if normalize { (scores + 1e-20, along / scaling) } else { (1.0, 0.0) };
            for (expert, dw) in experts.iter().zip(dw) {
                let s = sigmoid(logits[*expert as usize]);
                dlogits[*expert as usize] = scaling * (dw - along) / sum * s * (1.0 - s);
            }
        }
    }
}

/// Returns the number of tokens.
fn check_router(
    logits: &[f32],
    per_expert_scale: Option<&[f32]>,
    router: &Router<'_>,
    dims: Dims,
) -> Result<usize> {
    check_dims(dims)?;
    let e = dims.experts;
    check(logits.len().is_multiple_of(e), || {
        format!("logits have {} elements, not a multiple of {e} experts", logits.len())
    })?;
    if let Some(scale) = per_expert_scale {
        check_len("per_expert_scale", scale, e)?;
    }
    if let Router::SigmoidGroups { bias, groups, kept_groups, scaling, .. } = *router {
        check(groups > 0 && e.is_multiple_of(groups), || {
            format!("number of experts must be a multiple of groups, got {e} and {groups}")
        })?;
        check(kept_groups <= groups && kept_groups * (e / groups) >= dims.top_k, || {
            format!("cannot choose {} experts from {kept_groups} of {groups} groups", dims.top_k)
        })?;
        check(scaling != 0.0, || "router scaling must not be 0".into())?;
        if let Some(bias) = bias {
            check_len("bias", bias, e)?;
        }
    }
    Ok(logits.len() / e)
}

pub(super) fn check_routing(routing: &Routing, tokens: usize, dims: Dims) -> Result {
    check_shape("routing experts", &routing.experts, [tokens, dims.top_k])?;
    check_shape("routing weights", &routing.weights, [tokens, dims.top_k])?;
    check(routing.experts.iter().all(|expert| (*expert as usize) < dims.experts), || {
        format!("routing has an expert index of {} or more", dims.experts)
    })?;
    let twice = |row: &[u32]| row.iter().enumerate().any(|(i, expert)| row[..i].contains(expert));
    check(!routing.experts.chunks(dims.top_k).any(twice), || {
        "routing sends a token to the same expert twice".into()
    })
}

/// Tokens of every expert.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dispatch {
    /// [E + 1]: where each expert's slots begin
    pub offsets: Vec<usize>,
    /// [tokens * k]: token * k + choice, by expert, then by token
    pub slots: Vec<u32>,
}

impl Dispatch {
    /// Groups the tokens of a routing by expert.
    pub fn new(routing: &Routing, dims: Dims) -> Result<Dispatch> {
        check_dims(dims)?;
        check_routing(routing, routing.experts.len() / dims.top_k, dims)?;
        check(u32::try_from(routing.experts.len()).is_ok(), || {
            "tokens times top_k must be below 2^32".into()
        })?;
        let mut offsets = vec![0; dims.experts + 1];
        for expert in &routing.experts {
            offsets[*expert as usize + 1] += 1;
        }
        for e in 0..dims.experts {
            offsets[e + 1] += offsets[e];
        }
        let (mut next, mut slots) = (offsets.clone(), vec![0; routing.experts.len()]);
        for (slot, expert) in routing.experts.iter().enumerate() {
            slots[next[*expert as usize]] = slot as u32;
            next[*expert as usize] += 1;
        }
        Ok(Dispatch { offsets, slots })
    }

    /// Number of slots of the busiest expert.
    pub(crate) fn largest_load(&self) -> usize {
        self.offsets.windows(2).map(|w| w[1] - w[0]).max().unwrap_or(0)
    }

    /// rows [slots, width] of an expert = the rows of its tokens in x [tokens, width].
    pub(super) fn gather<T: crate::Element, U: crate::Element>(
        rows: &mut [U],
        slots: &[u32],
        x: &[T],
        top_k: usize,
        width: usize,
    ) {
        rows.par_chunks_mut(width).zip(slots).with_min_len(8).for_each(|(row, slot)| {
            let x = &x[*slot as usize / top_k * width..][..width];
            for (row, x) in row.iter_mut().zip(x) {
                *row = U::from_f32(x.to_f32());
            }
        });
    }

    /// sums [tokens, width] of an expert's tokens += weight(slot) rows.
    pub(super) fn scatter(
        sums: &mut [f32],
        slots: &[u32],
        rows: &[f32],
        weight: impl Fn(u32) -> f32 + Sync,
        top_k: usize,
        width: usize,
    ) {
        let sums = Shared::new(sums);
        rows.par_chunks(width).zip(slots).with_min_len(8).for_each(|(row, slot)| {
            // SAFETY: a token goes to an expert once, so its row belongs to this task alone.
            let sum = unsafe { sums.part(*slot as usize / top_k * width, width) };
            crate::simd::axpy(sum, weight(*slot), row);
        });
    }
}
