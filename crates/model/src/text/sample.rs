//! Sampling of the next token.
//!
//! Steps, defined and ordered as in transformers, on scores s = logits:
//! - repetition penalty r: s / r where s >= 0, s r else, for every token that occurred, prompt included;
//! - temperature t: s / t; 0 is greedy, the first of the highest scores;
//! - top-k: scores below the k-th highest are removed (ties with it stay);
//! - top-p: with probabilities p = softmax(s) in rising order, those whose running sum is at most 1 - top_p
//!   are removed, but never the highest;
//! - min-p: tokens with p < min_p max p are removed.
//!
//! Then a token is drawn from the softmax of the remaining scores. Scores and probabilities are f64, so every
//! temperature above 0 works: small ones approach greedy, large ones the uniform distribution.

use crate::error::{Error, Result};
use crate::random::Rng;

/// Sampling settings.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Sampling {
    /// Temperature; 0 means greedy.
    pub temperature: f64,
    /// Number of tokens kept; 0 keeps all.
    pub top_k: usize,
    /// Probability mass kept; 1 keeps all.
    pub top_p: f64,
    /// Minimum probability relative to the highest; 0 keeps all.
    pub min_p: f64,
    /// Repetition penalty; 1 means none.
    pub repetition_penalty: f64,
}

impl Sampling {
    /// Greedy sampling: the highest score wins.
    pub const GREEDY: Sampling =
        Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0 };

    /// Returns true if sampling is greedy.
    pub(crate) fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }
}

/// A token and its score.
type Candidate = (u32, f64);

/// Samples tokens; the same seed gives the same tokens.
pub struct Sampler {
    sampling: Sampling,
    rng: Rng,
}

impl Sampler {
    /// Creates a sampler with a random seed.
    pub fn new(sampling: Sampling, seed: u64) -> Sampler {
        Sampler { sampling, rng: Rng::new(seed) }
    }

    /// Samples the next token from the logits \[V\] of the last token; `seen` are all tokens so far.
    pub fn next(&mut self, logits: &[f32], seen: &[u32]) -> Result<u32> {
        if let Some(id) = logits.iter().position(|logit| logit.is_nan() || *logit == f32::INFINITY) {
            return Err(Error::NotFinite(format!("the logit of token {id} is {}", logits[id])));
        }
        let mut scores: Vec<f64> = logits.iter().map(|logit| *logit as f64).collect();
        penalize(&mut scores, seen, self.sampling.repetition_penalty);
        let best = scores.iter().enumerate().rev().max_by(|a, b| a.1.total_cmp(b.1));
        let (best, score) = best.ok_or_else(|| Error::Input("no logits to sample from".into()))?;
        if !score.is_finite() {
            return Err(Error::NotFinite(format!("the highest score, of token {best}, is {score}")));
        }
        if self.sampling.is_greedy() {
            return Ok(best as u32);
        }
        let left = filter(&scores, &self.sampling);
        let probabilities = softmax(&left);
        let mut point = self.rng.unit();
        // If rounding leaves the sum below 1, the last token with a probability above 0 is used.
        let mut chosen = best as u32;
        for ((id, _), probability) in left.iter().zip(&probabilities).filter(|(_, p)| **p > 0.0) {
            chosen = *id;
            point -= probability;
            if point < 0.0 {
                break;
            }
        }
        Ok(chosen)
    }
}

fn penalize(scores: &mut [f64], seen: &[u32], penalty: f64) {
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

/// Applies temperature and filters; returns the remaining candidates by ascending id.
fn filter(scores: &[f64], sampling: &Sampling) -> Vec<Candidate> {
    // The highest quotient must be finite, with room for rounding. Where that takes a higher temperature,
    // unequal scores are so far apart that it makes no difference.
    let highest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let lowest = if highest.is_finite() { highest.abs() / (f64::MAX / 4.0) } else { 0.0 };
    let temperature = sampling.temperature.clamp(lowest, f64::MAX);
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
    let mut scores: Vec<f64> = left.iter().map(|(_, score)| *score).collect();
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
    let mut removed = vec![false; left.len()];
    for i in order {
        sum += probabilities[i];
        if sum > 1.0 - p {
            break;
        }
        removed[i] = true;
    }
    let mut removed = removed.into_iter();
    left.retain(|_| removed.next() == Some(false));
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
    let max = candidates.iter().map(|(_, score)| *score).fold(f64::NEG_INFINITY, f64::max);
    let mut values: Vec<f64> = candidates.iter().map(|(_, score)| (*score - max).exp()).collect();
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
        let mut scores: Vec<f64> = scores.iter().map(|score| *score as f64).collect();
        penalize(&mut scores, seen, sampling.repetition_penalty);
        let left = filter(&scores, &sampling);
        let expected = numbers(expected);
        let kept: Vec<(u32, f64)> =
            (0..).zip(expected).filter_map(|(id, score)| Some((id, score?))).collect();
        assert_eq!(left.len(), kept.len(), "{case}: {left:?} {kept:?}");
        for ((id, score), (kept, expected)) in left.iter().zip(kept) {
            assert_eq!(*id, kept, "{case}");
            assert!((*score - expected).abs() <= 1e-6 * expected.abs(), "{case}: {score} {expected}");
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
        let mut penalized = Sampler::new(Sampling { repetition_penalty: 2.0, ..Sampling::GREEDY }, 0);
        assert_eq!(penalized.next(&[1.0, 3.0, 2.0, -1.0], &[1, 1]).unwrap(), 2);
        assert_eq!(penalized.next(&[-2.0, -1.5], &[1]).unwrap(), 0, "negative scores are made smaller too");
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
    fn a_tiny_temperature_is_greedy_and_a_huge_one_takes_all_alike() {
        let logits = [1.0, 3.0, -2.0, 3.0 - 1e-6, f32::NEG_INFINITY, 0.0];
        for temperature in [1e-8, 1e-38, 1e-45, 1e-46, 1e-200, 1e-300, f64::MIN_POSITIVE, 5e-324] {
            for (top_k, top_p, min_p) in [(0, 1.0, 0.0), (2, 1.0, 0.0), (0, 0.5, 0.0), (0, 1.0, 1.0)] {
                let sampling = Sampling { temperature, top_k, top_p, min_p, ..FREE };
                let mut sampler = Sampler::new(sampling, 3);
                for _ in 0..100 {
                    assert_eq!(sampler.next(&logits, &[]).unwrap(), 1, "{sampling:?}");
                }
            }
        }
        // Equal scores stay equally likely, at the ends of what f32 holds as well.
        for top in [f32::MAX, 1.0, 0.0, f32::from_bits(1), -1.0, f32::MIN] {
            let mut sampler = Sampler::new(Sampling { temperature: 5e-324, ..FREE }, 3);
            let drawn: Vec<u32> =
                (0..100).map(|_| sampler.next(&[top, f32::NEG_INFINITY, top], &[]).unwrap()).collect();
            assert!(drawn.contains(&0) && drawn.contains(&2) && !drawn.contains(&1), "{top}: {drawn:?}");
        }
        for temperature in [1e38, 1e39, 1e300, f64::MAX, f64::INFINITY] {
            let mut sampler = Sampler::new(Sampling { temperature, ..FREE }, 3);
            let drawn: Vec<u32> = (0..200).map(|_| sampler.next(&logits, &[]).unwrap()).collect();
            for id in [0, 1, 2, 3, 5] {
                assert!(drawn.contains(&id), "{temperature}: never {id}");
            }
            assert!(!drawn.contains(&4), "{temperature}: a token that is impossible");
        }
    }

    #[test]
    fn extreme_penalties_choose_a_token_or_are_refused() {
        for penalty in [1e-46, 1e-300, 5e-324, 1e39, 1e300, f64::MAX] {
            for temperature in [0.0, 1e-46] {
                let sampling = Sampling { temperature, repetition_penalty: penalty, ..FREE };
                let next = Sampler::new(sampling, 3).next(&[2.0, 0.0, -1.0, 1.0], &[0, 1, 2]);
                match next {
                    Ok(id) => assert_eq!(id, if penalty < 1.0 { 0 } else { 3 }, "{sampling:?}"),
                    Err(error) => assert!(error.to_string().contains("the highest score"), "{error}"),
                }
            }
        }
    }

    #[test]
    fn logits_that_allow_no_token_are_refused() {
        for sampling in [FREE, Sampling::GREEDY] {
            let error = Sampler::new(sampling, 0).next(&[f32::NEG_INFINITY; 2], &[]).unwrap_err().to_string();
            assert!(error.contains("the highest score, of token 0, is -inf"), "{error}");
        }
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
