//! Choice of experts, their weights, and the weighted sum of their outputs.
//!
//! ```text
//! softmax   p = softmax(l), the k largest p                 w_i = p_i, or p_i / sum of the chosen
//! sigmoid   s = sigmoid(l), choice by c = s + bias: groups by the sum of their two best c, the best groups kept,
//!           then the k largest c in them                    w_i = scaling s_i, or scaling s_i / (sum of the chosen + 1e-20)
//! y_t = sum over the chosen of w_i out_i
//! ```
//! The lowest index wins among equal scores. The choice has no gradient; the weights have:
//! ```text
//! softmax   dl_j = w_j (dw_j - sum_i dw_i w_i), over the chosen if normalized, else over all, dw 0 off the chosen
//! sigmoid   ds_i = scaling (dw_i - sum_j dw_j s_j / S) / S, S the sum; else scaling dw_i       dl_i = ds_i s_i (1 - s_i)
//! ```

use std::cmp::Ordering;
use std::sync::Arc;

use ballast_model::config::Router;

use super::{dot, each_row, elementwise::sigmoid};
use crate::reference::tape::{Param, Tape, Value};

/// Epsilon in DeepSeek's sum over the chosen.
const TINY: f64 = 1e-20;

/// Returns the experts of every token [tokens, k], best first, from logits [tokens, E]; `bias` `[E]` is used
/// with groups only.
pub fn choose_experts(
    logits: &[f64],
    router: Router,
    bias: Option<&[f32]>,
    experts: usize,
    top_k: usize,
) -> Vec<usize> {
    let row = |logits: &[f64]| match router {
        Router::Softmax { .. } | Router::Normed => largest(logits, top_k),
        Router::SigmoidGroups { groups, kept_groups, .. } => {
            let biased = |(i, l): (usize, &f64)| sigmoid(*l) + bias.map_or(0.0, |bias| bias[i] as f64);
            let mut scores: Vec<f64> = logits.iter().enumerate().map(biased).collect();
            let size = experts / groups;
            let best_two = |group: &[f64]| largest(group, 2).iter().map(|i| group[*i]).sum();
            let group_scores: Vec<f64> = scores.chunks(size).map(best_two).collect();
            let kept = largest(&group_scores, kept_groups);
            for (i, group) in scores.chunks_mut(size).enumerate() {
                if !kept.contains(&i) {
                    group.fill(f64::NEG_INFINITY);
                }
            }
            largest(&scores, top_k)
        }
    };
    logits.chunks(experts).flat_map(row).collect()
}

/// Indices of the largest scores, best first; of equal ones the lowest index. NaN counts as the smallest.
fn largest(scores: &[f64], count: usize) -> Vec<usize> {
    let value = |i: usize| if scores[i].is_nan() { f64::NEG_INFINITY } else { scores[i] };
    let mut order: Vec<usize> = (0..scores.len()).collect();
    // The sort is stable: equal scores keep their order.
    order.sort_by(|a, b| value(*b).partial_cmp(&value(*a)).unwrap_or(Ordering::Equal));
    order.truncate(count);
    order
}

/// Returns the weights [tokens, k] of the chosen experts from logits [tokens, E].
pub fn expert_weights(
    tape: &mut Tape<'_>,
    logits: &Value,
    router: Router,
    chosen: &Arc<Vec<usize>>,
    experts: usize,
    top_k: usize,
) -> Value {
    let rows = logits.chunks(experts).zip(chosen.chunks(top_k));
    let weights = rows.flat_map(|(logits, chosen)| weigh(logits, chosen, router)).collect();
    let (logits, chosen) = (logits.clone(), chosen.clone());
    tape.record(weights, move |dw, sums| {
        each_row(sums.of(&logits), experts, |t, dl| {
            let (logits, chosen) = (&logits[t * experts..][..experts], &chosen[t * top_k..][..top_k]);
            weigh_backward(dl, &dw[t * top_k..][..top_k], logits, chosen, router);
        });
    })
}

/// Softmax over some logits, at all of which `among` looks.
fn softmax(logits: &[f64], among: impl Iterator<Item = usize> + Clone) -> impl Fn(usize) -> f64 {
    let max = among.clone().map(|i| logits[i]).fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = among.map(|i| (logits[i] - max).exp()).sum();
    move |i| (logits[i] - max).exp() / sum
}

fn weigh(logits: &[f64], chosen: &[usize], router: Router) -> Vec<f64> {
    match router {
        Router::Normed | Router::Softmax { normalize: true } => {
            let p = softmax(logits, chosen.iter().copied());
            chosen.iter().map(|i| p(*i)).collect()
        }
        Router::Softmax { normalize: false } => {
            let p = softmax(logits, 0..logits.len());
            chosen.iter().map(|i| p(*i)).collect()
        }
        Router::SigmoidGroups { normalize, scaling, .. } => {
            let s: Vec<f64> = chosen.iter().map(|i| sigmoid(logits[*i])).collect();
            let sum = if normalize { s.iter().sum::<f64>() + TINY } else { 1.0 };
            s.iter().map(|s| scaling as f64 * s / sum).collect()
        }
    }
}

/// Adds the gradient of the logits from dw to dl.
fn weigh_backward(dl: &mut [f64], dw: &[f64], logits: &[f64], chosen: &[usize], router: Router) {
    let w = weigh(logits, chosen, router);
    match router {
        Router::Normed | Router::Softmax { normalize: true } => {
            let along = dot(dw, &w);
            for ((i, dw), w) in chosen.iter().zip(dw).zip(&w) {
                dl[*i] += w * (dw - along);
            }
        }
        Router::Softmax { normalize: false } => {
            let (along, p) = (dot(dw, &w), softmax(logits, 0..logits.len()));
            for (i, dl) in dl.iter_mut().enumerate() {
                *dl -= p(i) * along;
            }
            for ((i, dw), w) in chosen.iter().zip(dw).zip(&w) {
                dl[*i] += w * dw;
            }
        }
        Router::SigmoidGroups { normalize, scaling, .. } => {
            let s: Vec<f64> = chosen.iter().map(|i| sigmoid(logits[*i])).collect();
            let sum = if normalize { s.iter().sum::<f64>() + TINY } else { 1.0 };
            let along = if normalize { dot(dw, &s) / sum } else { 0.0 };
            for ((i, dw), s) in chosen.iter().zip(dw).zip(&s) {
                dl[*i] += scaling as f64 * (dw - along) / sum * s * (1.0 - s);
            }
        }
    }
}

/// Multiplies weights [tokens, k] by the chosen expert's entry of `factors` `[E]`.
pub fn scale_chosen<'w>(
    tape: &mut Tape<'w>,
    weights: &Value,
    factors: &Param<'w>,
    chosen: &Arc<Vec<usize>>,
) -> Value {
    let scaled = weights.iter().zip(chosen.iter()).map(|(w, expert)| w * factors.at(*expert)).collect();
    let (weights, factors, chosen) = (weights.clone(), factors.clone(), chosen.clone());
    tape.record(scaled, move |dy, sums| {
        let dw = sums.of(&weights);
        for ((dw, dy), expert) in dw.iter_mut().zip(dy).zip(chosen.iter()) {
            *dw += dy * factors.at(*expert);
        }
        let d_factors = sums.parameter(&factors);
        for ((w, dy), expert) in weights.iter().zip(dy).zip(chosen.iter()) {
            d_factors[*expert] += dy * w;
        }
    })
}

/// Copies rows of x [tokens, width] by index.
pub fn rows(tape: &mut Tape<'_>, x: &Value, tokens: Vec<usize>, width: usize) -> Value {
    let y = tokens.iter().flat_map(|t| &x[t * width..][..width]).copied().collect();
    let x = x.clone();
    tape.record(y, move |dy, sums| {
        let dx = sums.of(&x);
        for (t, dy) in tokens.iter().zip(dy.chunks(width)) {
            crate::reference::tape::add(&mut dx[t * width..][..width], dy);
        }
    })
}

/// y [tokens, width]: every token's sum of weights [tokens, k] times outputs; `parts` has the outputs of some
/// slots (token k + choice), and which slots these are.
pub fn combine(tape: &mut Tape<'_>, parts: Vec<(Value, Vec<usize>)>, weights: &Value, top_k: usize) -> Value {
    let slots: usize = parts.iter().map(|(_, slots)| slots.len()).sum();
    let elements: usize = parts.iter().map(|(out, _)| out.len()).sum();
    let width = elements / slots.max(1);
    let mut y = vec![0.0; weights.len() / top_k * width];
    for (out, slots) in &parts {
        for (slot, out) in slots.iter().zip(out.chunks(width)) {
            let y = &mut y[slot / top_k * width..][..width];
            y.iter_mut().zip(out).for_each(|(y, out)| *y += weights[*slot] * out);
        }
    }
    let weights = weights.clone();
    tape.record(y, move |dy, sums| {
        for (out, slots) in &parts {
            let row = |slot: usize| &dy[slot / top_k * width..][..width];
            for (slot, out) in slots.iter().zip(out.chunks(width)) {
                sums.of(&weights)[*slot] += dot(row(*slot), out);
            }
            each_row(sums.of(out), width, |i, d_out| {
                let weight = weights[slots[i]];
                d_out.iter_mut().zip(row(slots[i])).for_each(|(d, dy)| *d += weight * dy);
            });
        }
    })
}
