//! The choice of the next token.
//!
//! As transformers defines and orders them, on scores s = logits:
//! - repetition penalty r: s / r where s >= 0, s r else, for every token that occurred, prompt included;
//! - temperature t: s / t; 0 is greedy, the first of the highest scores;
//! - top-k: scores below the k-th highest go (ties with it stay);
//! - top-p: with probabilities p = softmax(s) in rising order, those whose running sum is at most 1 - top_p go, the highest never;
//! - min-p: what has p < min_p max p goes.
//!
//! Then one is drawn from the softmax of what is left. Probabilities are f64.

use crate::error::{Error, Result};
use crate::random::Rng;

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Sampling {
    /// 0: greedy.
    pub temperature: f64,
    /// 0: all.
    pub top_k: usize,
    /// 1: all.
    pub top_p: f64,
    /// 0: all.
    pub min_p: f64,
    /// 1: none.
    pub repetition_penalty: f64,
}

impl Sampling {
    /// The highest score wins.
    pub const GREEDY: Sampling =
        Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0 };

    /// Whether the highest score wins.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }
}

/// A token and its score.
type Candidate = (u32, f32);

/// Chooses tokens; the same seed makes the same choices.
pub struct Sampler {
    sampling: Sampling,
    rng: Rng,
}

impl Sampler {
    /// With this seed.
    pub fn new(sampling: Sampling, seed: u64) -> Sampler {
        Sampler { sampling, rng: Rng::new(seed) }
    }

    /// The next token after those `seen`, by the logits \[V\] of the last.
    pub fn next(&mut self, logits: &[f32], seen: &[u32]) -> Result<u32> {
        if let Some(id) = logits.iter().position(|logit| logit.is_nan() || *logit == f32::INFINITY) {
            return Err(Error::NotFinite(format!("the logit of token {id} is {}", logits[id])));
        }
        let mut scores = logits.to_vec();
        penalise(&mut scores, seen, self.sampling.repetition_penalty);
        if self.sampling.is_greedy() {
            let best = scores.iter().enumerate().rev().max_by(|a, b| a.1.total_cmp(b.1));
            return best.map(|(id, _)| id as u32).ok_or_else(|| Error::Input("there are no logits".into()));
        }
        let left = filter(&scores, &self.sampling);
        let probabilities = softmax(&left);
        let mut point = self.rng.unit();
        for ((id, _), probability) in left.iter().zip(&probabilities) {
            point -= probability;
            if point < 0.0 {
                return Ok(*id);
            }
        }
        // Rounding: the sum fell short of 1 by a hair.
        left.last().map(|(id, _)| *id).ok_or_else(|| Error::Input("there are no logits".into()))
    }
}

fn penalise(scores: &mut [f32], seen: &[u32], penalty: f64) {
    let penalty = penalty as f32;
    if penalty == 1.0 {
        return;
    }
    let mut seen = seen.to_vec();
    seen.sort_unstable();
    seen.dedup();
    for id in seen {
        if let Some(score) = scores.get_mut(id as usize) {
            *score = if *score < 0.0 { *score * penalty } else { *score / penalty };
        }
    }
}

/// Temperature and filters: what is left, by rising id.
fn filter(scores: &[f32], sampling: &Sampling) -> Vec<Candidate> {
    let temperature = sampling.temperature as f32;
    let mut left: Vec<Candidate> = (0..).zip(scores.iter().map(|score| score / temperature)).collect();
    keep_top_k(&mut left, sampling.top_k);
    keep_top_p(&mut left, sampling.top_p);
    keep_min_p(&mut left, sampling.min_p);
    left
}

fn keep_top_k(left: &mut Vec<Candidate>, k: usize) {
    if k == 0 || k >= left.len() {
        return;
    }
    let mut scores: Vec<f32> = left.iter().map(|(_, score)| *score).collect();
    let (_, threshold, _) = scores.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a));
    let threshold = *threshold;
    left.retain(|(_, score)| *score >= threshold);
}

fn keep_top_p(left: &mut Vec<Candidate>, p: f64) {
    if p >= 1.0 || left.is_empty() {
        return;
    }
    let probabilities = softmax(left);
    let mut order: Vec<usize> = (0..left.len()).collect();
    order.sort_by(|a, b| left[*a].1.total_cmp(&left[*b].1));
    order.pop();
    let mut sum = 0.0;
    let mut goes = vec![false; left.len()];
    for i in order {
        sum += probabilities[i];
        if sum > 1.0 - p {
            break;
        }
        goes[i] = true;
    }
    let mut goes = goes.into_iter();
    left.retain(|_| goes.next() == Some(false));
}

fn keep_min_p(left: &mut Vec<Candidate>, min_p: f64) {
    if min_p <= 0.0 {
        return;
    }
    let probabilities = softmax(left);
    let threshold = min_p * probabilities.iter().copied().fold(0.0, f64::max);
    let mut probabilities = probabilities.into_iter();
    left.retain(|_| probabilities.next().is_some_and(|probability| probability >= threshold));
}

fn softmax(candidates: &[Candidate]) -> Vec<f64> {
    let max = candidates.iter().map(|(_, score)| *score).fold(f32::NEG_INFINITY, f32::max) as f64;
    let mut values: Vec<f64> = candidates.iter().map(|(_, score)| (*score as f64 - max).exp()).collect();
    let sum: f64 = values.iter().sum();
    values.iter_mut().for_each(|value| *value /= sum);
    values
}

#[cfg(test)]
mod tests {
    use super::super::tokenizer::tests::golden;
    use super::*;
    use serde_json::Value;

    const FREE: Sampling = Sampling { temperature: 1.0, ..Sampling::GREEDY };
    const ALL: Sampling =
        Sampling { temperature: 0.7, top_k: 4, top_p: 0.8, min_p: 0.1, repetition_penalty: 1.3 };

    fn numbers(value: &Value) -> Vec<Option<f64>> {
        value.as_array().unwrap().iter().map(Value::as_f64).collect()
    }

    fn check(case: &str, scores: &[f32], seen: &[u32], sampling: Sampling, expected: &Value) {
        let mut scores = scores.to_vec();
        penalise(&mut scores, seen, sampling.repetition_penalty);
        let left = filter(&scores, &sampling);
        let expected = numbers(expected);
        let kept: Vec<(u32, f64)> =
            (0..).zip(expected).filter_map(|(id, score)| Some((id, score?))).collect();
        assert_eq!(left.len(), kept.len(), "{case}: {left:?} {kept:?}");
        for ((id, score), (kept, expected)) in left.iter().zip(kept) {
            assert_eq!(*id, kept, "{case}");
            assert!((*score as f64 - expected).abs() <= 1e-6 * expected.abs(), "{case}: {score} {expected}");
        }
    }

    #[test]
    fn every_filter_alone_and_all_together_are_those_of_transformers() {
        let golden = golden("sampling.json");
        let scores: Vec<f32> = numbers(&golden["scores"]).iter().map(|s| s.unwrap() as f32).collect();
        let seen: Vec<u32> = numbers(&golden["seen"]).iter().map(|s| s.unwrap() as u32).collect();
        for (name, sampling) in [
            ("repetition_penalty", Sampling { repetition_penalty: ALL.repetition_penalty, ..FREE }),
            ("temperature", Sampling { temperature: ALL.temperature, ..FREE }),
            ("top_k", Sampling { top_k: ALL.top_k, ..FREE }),
            ("top_p", Sampling { top_p: ALL.top_p, ..FREE }),
            ("min_p", Sampling { min_p: ALL.min_p, ..FREE }),
        ] {
            check(name, &scores, &seen, sampling, &golden["alone"][name]);
        }
        check("all", &scores, &seen, ALL, &golden["all"]);
    }

    #[test]
    fn tokens_are_drawn_with_their_probabilities() {
        let golden = golden("sampling.json");
        let scores: Vec<f32> = numbers(&golden["scores"]).iter().map(|s| s.unwrap() as f32).collect();
        let probabilities: Vec<f64> = numbers(&golden["probabilities"]).into_iter().flatten().collect();
        const DRAWS: usize = 100_000;
        let mut sampler = Sampler::new(ALL, 7);
        let mut drawn = vec![0usize; scores.len()];
        for _ in 0..DRAWS {
            drawn[sampler.next(&scores, &[2, 5, 5, 9]).unwrap() as usize] += 1;
        }
        for (id, (count, p)) in drawn.iter().zip(&probabilities).enumerate() {
            let deviation = (*count as f64 - p * DRAWS as f64).abs();
            let limit = 4.0 * (p * (1.0 - p) * DRAWS as f64).sqrt();
            assert!(deviation <= limit, "token {id}: {count} of {DRAWS} where p is {p}");
        }
    }

    #[test]
    fn greedy_takes_the_first_of_the_highest_after_the_penalty() {
        let mut greedy = Sampler::new(Sampling::GREEDY, 0);
        assert_eq!(greedy.next(&[1.0, 3.0, 3.0, -1.0], &[]).unwrap(), 1);
        let mut penalised = Sampler::new(Sampling { repetition_penalty: 2.0, ..Sampling::GREEDY }, 0);
        assert_eq!(penalised.next(&[1.0, 3.0, 2.0, -1.0], &[1, 1]).unwrap(), 2);
        assert_eq!(penalised.next(&[-2.0, -1.5], &[1]).unwrap(), 0, "negative scores are made smaller too");
    }

    #[test]
    fn the_same_seed_draws_the_same_and_another_does_not() {
        let logits = vec![0.0; 1000];
        let draw = |seed| {
            let mut sampler = Sampler::new(FREE, seed);
            (0..20).map(|_| sampler.next(&logits, &[]).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
    }

    #[test]
    fn one_token_is_always_left_and_what_is_not_finite_is_refused() {
        let strict = Sampling { top_k: 1, top_p: 1e-9, min_p: 1.0, ..FREE };
        assert_eq!(Sampler::new(strict, 0).next(&[0.0, 2.0, 1.0], &[]).unwrap(), 1);
        let never = [f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY];
        assert_eq!(Sampler::new(FREE, 0).next(&never, &[]).unwrap(), 1);
        assert!(
            Sampler::new(FREE, 0)
                .next(&[0.0, f32::NAN], &[])
                .unwrap_err()
                .to_string()
                .contains("token 1 is NaN")
        );
        assert!(Sampler::new(FREE, 0).next(&[f32::INFINITY], &[]).is_err());
        assert!(Sampler::new(Sampling::GREEDY, 0).next(&[], &[]).is_err());
    }
}
