//! Routing, experts and balance against the formulas in f64 and their numeric gradients.

use std::collections::HashMap;

use half::bf16;
use proptest::prelude::*;

use super::*;
use crate::glu::Activation;
use crate::testing::{
    Values, assert_close, assert_error, cast, gradient, inner, rms, same_on_any_pool, wide,
};
use crate::{Element, Scratch};

/// Weights [tokens, k] of a given choice, in f64.
fn weights_reference(
    logits: &[f64],
    experts: &[u32],
    scale: &[f64],
    router: &Router<'_>,
    dims: Dims,
) -> Vec<f64> {
    let mut weights = Vec::new();
    for (row, chosen) in logits.chunks(dims.experts).zip(experts.chunks(dims.top_k)) {
        let (scores, normalize, scaling): (Vec<f64>, bool, f64) = match *router {
            Router::Softmax { normalize } => {
                let sum: f64 = row.iter().map(|l| l.exp()).sum();
                (row.iter().map(|l| l.exp() / sum).collect(), normalize, 1.0)
            }
            Router::SigmoidGroups { normalize, scaling, .. } => {
                (row.iter().map(|l| 1.0 / (1.0 + (-l).exp())).collect(), normalize, scaling as f64)
            }
        };
        let sum: f64 = chosen.iter().map(|e| scores[*e as usize]).sum();
        let by = scaling / if normalize { sum } else { 1.0 };
        weights.extend(chosen.iter().map(|e| scores[*e as usize] * by * scale[*e as usize]));
    }
    weights
}

/// The choice by sorting, in f64.
fn choice_reference(logits: &[f64], router: &Router<'_>, dims: Dims) -> Vec<u32> {
    let by_score = |scores: &[f64], n: usize| -> Vec<usize> {
        let mut order: Vec<usize> = (0..scores.len()).collect();
        order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]).then(a.cmp(b)));
        order.truncate(n);
        order
    };
    let mut chosen = Vec::new();
    for row in logits.chunks(dims.experts) {
        let mut scores = row.to_vec();
        if let Router::SigmoidGroups { bias, groups, kept_groups, .. } = *router {
            for (i, score) in scores.iter_mut().enumerate() {
                *score = 1.0 / (1.0 + (-*score).exp()) + bias.map_or(0.0, |bias| bias[i] as f64);
            }
            let size = dims.experts / groups;
            let best: Vec<f64> =
                scores.chunks(size).map(|group| by_score(group, 2).iter().map(|i| group[*i]).sum()).collect();
            let kept = by_score(&best, kept_groups);
            for (i, score) in scores.iter_mut().enumerate() {
                if !kept.contains(&(i / size)) {
                    *score = f64::NEG_INFINITY;
                }
            }
        }
        chosen.extend(by_score(&scores, dims.top_k).iter().map(|i| *i as u32));
    }
    chosen
}

fn routers(bias: &[f32]) -> [Router<'_>; 4] {
    let groups = |normalize| Router::SigmoidGroups {
        bias: Some(bias),
        groups: 4,
        kept_groups: 2,
        normalize,
        scaling: 2.5,
    };
    [Router::Softmax { normalize: true }, Router::Softmax { normalize: false }, groups(true), groups(false)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn the_choice_its_weights_and_their_gradients_agree_with_the_formula(
        tokens in 1usize..8, size in 2usize..5, top_k in 1usize..4, kind in 0usize..4, seed in any::<u64>(),
    ) {
        let dims = Dims { experts: 4 * size, top_k, hidden: 1, intermediate: 1 };
        let mut values = Values::new(seed);
        let logits = values.take(tokens * dims.experts, 3.0);
        let (scale, bias): (Vec<f64>, Vec<f32>) = (values.take(dims.experts, 1.0), cast(&values.take(dims.experts, 0.2)));
        let dweights = values.take(tokens * top_k, 1.0);
        let router = routers(&bias)[kind];
        let (logits_f32, scale_f32, dweights_f32): (Vec<f32>, Vec<f32>, Vec<f32>) =
            (cast(&logits), cast(&scale), cast(&dweights));
        let routing = route_forward(&logits_f32, Some(&scale_f32), &router, dims).unwrap();
        prop_assert_eq!(&routing.experts, &choice_reference(&logits, &router, dims));
        let expected = weights_reference(&logits, &routing.experts, &scale, &router, dims);
        assert_close("weights", &routing.weights, &expected, 1e-6);
        let (mut dlogits, mut dscale) = (vec![f32::NAN; logits.len()], vec![1.0; dims.experts]);
        route_backward(
            &mut dlogits, Some(&mut dscale), &dweights_f32, &logits_f32, &routing, Some(&scale_f32), &router, dims,
        ).unwrap();
        let loss = |logits: &[f64], scale: &[f64]| {
            inner(&weights_reference(logits, &routing.experts, scale, &router, dims), &dweights)
        };
        // A single normalized weight is constant: its gradient is only rounding.
        let constant = top_k == 1 && matches!(kind, 0 | 2);
        if constant {
            prop_assert!(dlogits.iter().all(|dl| dl.abs() < 1e-5));
        } else {
            assert_close("dlogits", &dlogits, &gradient(&logits, |logits| loss(logits, &scale)), 1e-4);
        }
        let dscale_expected: Vec<f64> = gradient(&scale, |scale| loss(&logits, scale)).iter().map(|g| g + 1.0).collect();
        assert_close("dscale, on top of 1", &dscale, &dscale_expected, 1e-5);
    }
}

#[test]
fn equal_scores_go_to_the_lowest_index() {
    let dims = Dims { experts: 8, top_k: 3, hidden: 1, intermediate: 1 };
    for (logits, expected) in [
        ([1.0; 8], [0, 1, 2]),
        ([0.0, 5.0, 0.0, 5.0, 7.0, 5.0, 0.0, 7.0], [4, 7, 1]),
        ([f32::NAN, 0.0, f32::NAN, 0.0, f32::NAN, f32::NAN, f32::NAN, -1.0], [1, 3, 7]),
    ] {
        let routing = route_forward(&logits, None, &Router::Softmax { normalize: true }, dims).unwrap();
        assert_eq!(routing.experts, expected);
    }
    let groups = routers(&[0.0; 8])[2];
    assert_eq!(route_forward(&[1.0; 8], None, &groups, dims).unwrap().experts, [0, 1, 2]);
}

#[test]
fn the_bias_changes_the_choice_and_not_the_weights() {
    let dims = Dims { experts: 4, top_k: 1, hidden: 1, intermediate: 1 };
    let bias = [0.0, 0.0, 0.0, 5.0];
    let router = Router::SigmoidGroups {
        bias: Some(&bias),
        groups: 1,
        kept_groups: 1,
        normalize: false,
        scaling: 1.0,
    };
    let routing = route_forward(&[3.0, 0.0, 0.0, 0.0], None, &router, dims).unwrap();
    assert_eq!((routing.experts, routing.weights), (vec![3], vec![0.5]));
}

#[test]
fn huge_logits_make_finite_weights() {
    let dims = Dims { experts: 3, top_k: 2, hidden: 1, intermediate: 1 };
    for normalize in [true, false] {
        let routing =
            route_forward(&[1e30, -1e30, 200.0], None, &Router::Softmax { normalize }, dims).unwrap();
        assert_eq!(routing.weights, [1.0, 0.0]);
    }
}

struct Problem {
    dims: Dims,
    routing: Routing,
    x: Vec<f64>,
    gate_up: Vec<f64>,
    down: Vec<f64>,
    dy: Vec<f64>,
    activation: Activation,
}

impl Problem {
    fn new(tokens: usize, dims: Dims, activation: Activation, seed: u64) -> Problem {
        let mut values = Values::new(seed);
        let logits: Vec<f32> = cast(&values.take(tokens * dims.experts, 2.0));
        let len = dims.experts * dims.hidden * dims.intermediate;
        Problem {
            dims,
            routing: route_forward(&logits, None, &Router::Softmax { normalize: true }, dims).unwrap(),
            x: values.take(tokens * dims.hidden, 1.0),
            gate_up: values.take(2 * len, 1.0),
            down: values.take(len, 1.0),
            dy: values.take(tokens * dims.hidden, 1.0),
            activation,
        }
    }

    /// Outputs of the expert of each slot, [tokens, top_k, hidden], with the given product of a row of down
    /// and h.
    fn slot_outputs(
        &self,
        x: &[f64],
        gate_up: &[f64],
        down: &[f64],
        product: impl Fn(&[f64], &[f64]) -> f64,
    ) -> Vec<f64> {
        let Dims { top_k, hidden, intermediate, .. } = self.dims;
        let len = hidden * intermediate;
        let mut y = Vec::new();
        for (slot, expert) in self.routing.experts.iter().enumerate() {
            let x = &x[slot / top_k * hidden..][..hidden];
            let w = &gate_up[*expert as usize * 2 * len..][..2 * len];
            let down = &down[*expert as usize * len..][..len];
            let h: Vec<f64> = (0..intermediate)
                .map(|i| {
                    let gate = inner(&w[i * hidden..(i + 1) * hidden], x);
                    let up = inner(&w[len + i * hidden..len + (i + 1) * hidden], x);
                    match self.activation {
                        Activation::Silu => gate / (1.0 + (-gate).exp()) * up,
                        Activation::Sigmoid => up / (1.0 + (-gate).exp()),
                        Activation::GeluTanh => {
                            let c = (2.0 / std::f64::consts::PI).sqrt();
                            0.5 * gate * (1.0 + (c * (gate + 0.044715 * gate.powi(3))).tanh()) * up
                        }
                    }
                })
                .collect();
            y.extend(down.chunks(intermediate).map(|down| product(down, &h)));
        }
        y
    }

    fn reference(&self, x: &[f64], weights: &[f64], gate_up: &[f64], down: &[f64]) -> Vec<f64> {
        let Dims { top_k, hidden, .. } = self.dims;
        let mut y = vec![0.0; x.len()];
        for (slot, out) in self.slot_outputs(x, gate_up, down, inner).chunks(hidden).enumerate() {
            let y = &mut y[slot / top_k * hidden..][..hidden];
            y.iter_mut().zip(out).for_each(|(y, out)| *y += weights[slot] * out);
        }
        y
    }

    /// y, dx, dweights, dgate_up on top of 1, ddown on top of 1
    #[allow(clippy::type_complexity)]
    fn run<T: Element, W: Element>(&self) -> (Vec<T>, Vec<T>, Vec<f32>, Vec<f32>, Vec<f32>) {
        let (x, dy): (Vec<T>, Vec<T>) = (cast(&self.x), cast(&self.dy));
        let (gate_up, down): (Vec<W>, Vec<W>) = (cast(&self.gate_up), cast(&self.down));
        let experts = Experts { gate_up: &gate_up, down: &down, activation: self.activation };
        let dispatch = Dispatch::new(&self.routing, self.dims).unwrap();
        let scratch = Scratch::new(experts_scratch(self.dims, x.len() / self.dims.hidden));
        let (dims, routing) = (self.dims, &self.routing);
        let (mut y, mut saved) = (x.clone(), Saved::default());
        let mut work = vec![f32::NAN; experts_forward_workspace::<T>(&dispatch, dims, true)];
        experts_forward(
            &mut y,
            Some(&mut saved),
            &x,
            routing,
            &dispatch,
            &experts,
            dims,
            &mut work,
            &scratch,
        )
        .unwrap();
        assert_eq!(saved.bytes(), 2 * routing.experts.len() * dims.intermediate * size_of::<T>());
        let (mut dx, mut dweights) = (x.clone(), vec![f32::NAN; routing.weights.len()]);
        let (mut dgate_up, mut ddown) = (vec![1.0; gate_up.len()], vec![1.0; down.len()]);
        let grads =
            ExpertsGrads { dx: &mut dx, dweights: &mut dweights, dgate_up: &mut dgate_up, ddown: &mut ddown };
        let mut work = vec![f32::NAN; experts_backward_workspace(&dispatch, dims)];
        experts_backward(grads, &dy, &x, &saved, routing, &dispatch, &experts, dims, &mut work, &scratch)
            .unwrap();
        (y, dx, dweights, dgate_up, ddown)
    }

    fn check<T: Element, W: Element>(&self) {
        let weights: Vec<f64> = self.routing.weights.iter().map(|w| *w as f64).collect();
        let (x, g, d) = (&self.x, &self.gate_up, &self.down);
        let loss = |x: &[f64], w: &[f64], g: &[f64], d: &[f64]| inner(&self.reference(x, w, g, d), &self.dy);
        let on_one = |g: Vec<f64>| -> Vec<f64> { g.iter().map(|g| g + 1.0).collect() };
        let (y, dx, dweights, dgate_up, ddown) = self.run::<T, W>();
        // Gate and up are saved in T, so f32 results have its rounding error.
        let limit = if T::NAME == "BF16" { 2e-2 } else { 1e-5 };
        assert_close("y", &y, &self.reference(x, &weights, g, d), limit);
        assert_close("dx", &dx, &gradient(x, |x| loss(x, &weights, g, d)), limit);
        // The gradient of a weight is a sum whose terms may cancel: the error is relative to the sum of their
        // magnitudes.
        let abs = |x: &[f64]| -> Vec<f64> { x.iter().map(|x| x.abs()).collect() };
        let terms = self.slot_outputs(x, g, d, |down, h| inner(&abs(down), &abs(h)));
        let size = rms(&terms
            .chunks(self.dims.hidden)
            .enumerate()
            .map(|(slot, y)| {
                inner(y, &abs(&self.dy[slot / self.dims.top_k * self.dims.hidden..][..self.dims.hidden]))
            })
            .collect::<Vec<f64>>());
        assert_error("dweights", &dweights, &gradient(&weights, |w| loss(x, w, g, d)), size, limit);
        assert_close("dgate_up", &dgate_up, &on_one(gradient(g, |g| loss(x, &weights, g, d))), limit);
        assert_close("ddown", &ddown, &on_one(gradient(d, |d| loss(x, &weights, g, d))), limit);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn experts_and_all_their_gradients_agree_with_the_formula(
        tokens in 1usize..16, experts in 2usize..5, top_k in 1usize..3, hidden in 2usize..6, intermediate in 2usize..6,
        gelu in any::<bool>(), seed in any::<u64>(),
    ) {
        let activation = if gelu { Activation::GeluTanh } else { Activation::Silu };
        let problem = Problem::new(tokens, Dims { experts, top_k, hidden, intermediate }, activation, seed);
        problem.check::<f32, f32>();
        problem.check::<f32, bf16>();
        problem.check::<bf16, bf16>();
    }
}

/// Tensors and settings of a file that fixtures/make_moe.py wrote.
fn golden(name: &str) -> (impl Fn(&str) -> Vec<f32>, HashMap<String, String>) {
    let path = format!("{}/../../fixtures/moe/{name}.safetensors", env!("CARGO_MANIFEST_DIR"));
    let bytes = std::fs::read(path).unwrap();
    let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    let metadata = header.metadata().clone().unwrap();
    let tensor = move |name: &str| {
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let data = file.tensor(name).unwrap().data().to_vec();
        data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    };
    (tensor, metadata)
}

#[test]
fn routes_weights_and_their_gradients_are_those_of_transformers() {
    for name in
        ["deepseek_v3", "deepseek_v3_negative", "deepseek_v32_plain_weights", "qwen3_next", "qwen3_5_moe"]
    {
        let (tensor, settings) = golden(name);
        let number = |key: &str| settings[key].parse::<usize>().unwrap();
        let (logits, normalize) = (tensor("logits"), settings["normalise"] == "true");
        let dims = Dims { experts: 16, top_k: number("top_k"), hidden: 1, intermediate: 1 };
        let bias = if settings["router"] == "sigmoid" { tensor("bias") } else { vec![] };
        let router = match settings["router"].as_str() {
            "softmax" => Router::Softmax { normalize },
            _ => Router::SigmoidGroups {
                bias: Some(&bias),
                groups: number("groups"),
                kept_groups: number("kept_groups"),
                normalize,
                scaling: settings["scaling"].parse().unwrap(),
            },
        };
        let routing = route_forward(&logits, None, &router, dims).unwrap();
        // The file lists a token's experts by index.
        let (k, tokens) = (dims.top_k, logits.len() / 16);
        let mut order: Vec<usize> = (0..tokens * k).collect();
        order.sort_by_key(|slot| (slot / k, routing.experts[*slot]));
        let experts: Vec<f32> = order.iter().map(|slot| routing.experts[*slot] as f32).collect();
        assert_eq!(experts, tensor("experts"), "{name}");
        let weights: Vec<f32> = order.iter().map(|slot| routing.weights[*slot]).collect();
        assert_close(name, &weights, &wide(&tensor("weights")), 1e-6);
        let (mut dweights, mut dlogits) = (vec![0.0; tokens * k], vec![f32::NAN; logits.len()]);
        order.iter().zip(tensor("dweights")).for_each(|(slot, dw)| dweights[*slot] = dw);
        route_backward(&mut dlogits, None, &dweights, &logits, &routing, None, &router, dims).unwrap();
        assert_close(name, &dlogits, &wide(&tensor("dlogits")), 1e-5);
    }
}

#[test]
fn the_balance_of_parts_is_that_of_all_tokens() {
    let dims = Dims { experts: 5, top_k: 2, hidden: 1, intermediate: 1 };
    let logits: Vec<f32> = (0..9 * 5).map(|i| ((i * 37) % 23) as f32 * 0.2 - 2.0).collect();
    let routing =
        |logits: &[f32]| route_forward(logits, None, &Router::Softmax { normalize: true }, dims).unwrap();
    let sums = |logits: &[f32]| {
        let mut sums = Balance::new(5);
        sums.add(logits, &routing(logits), dims).unwrap();
        sums
    };
    let whole = sums(&logits);
    let parts = [sums(&logits[..4 * 5]), sums(&logits[4 * 5..])];
    let mut merged = Balance::from_values(&parts[0].to_values()).unwrap();
    assert_eq!(merged, parts[0]);
    merged.merge(&parts[1]).unwrap();
    let close = |a: f64, b: f64| (a - b).abs() < 1e-12 * b.abs();
    assert!(close(merged.loss(), whole.loss()));
    assert!(close(merged.loss_of(&parts[0]) + merged.loss_of(&parts[1]), whole.loss()));
    assert!(merged.merge(&Balance::new(4)).is_err() && Balance::from_values(&[]).is_err());
}

#[test]
fn the_balance_of_two_layers_and_its_gradient_are_those_of_transformers() {
    let (tensor, settings) = golden("balance");
    let dims = Dims { experts: 16, top_k: settings["top_k"].parse().unwrap(), hidden: 1, intermediate: 1 };
    let logits = tensor("logits");
    let routing = route_forward(&logits, None, &Router::Softmax { normalize: true }, dims).unwrap();
    let mut dlogits = vec![0.0; logits.len()];
    let mut balance = Balance::new(dims.experts);
    let (half, chosen) = (logits.len() / 2, routing.experts.len() / 2);
    for (logits, slots) in [(&logits[..half], 0..chosen), (&logits[half..], chosen..2 * chosen)] {
        let experts = routing.experts[slots.clone()].to_vec();
        balance.add(logits, &Routing { experts, weights: routing.weights[slots].to_vec() }, dims).unwrap();
    }
    let loss = balance.loss();
    assert!((loss - tensor("loss")[0] as f64).abs() < 1e-6, "{loss}");
    for (dlogits, logits) in dlogits.chunks_mut(half).zip(logits.chunks(half)) {
        balance.backward(dlogits, logits, 1.0).unwrap();
    }
    assert_close("dlogits", &dlogits, &wide(&tensor("dlogits")), 1e-5);
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let dims = Dims { experts: 5, top_k: 2, hidden: 70, intermediate: 33 };
    let problem = Problem::new(150, dims, Activation::Silu, 6);
    let bias = vec![0.1; 5];
    same_on_any_pool(|| {
        let logits: Vec<f32> = cast(&Values::new(1).take(150 * 5, 2.0));
        let router = Router::SigmoidGroups {
            bias: Some(&bias),
            groups: 5,
            kept_groups: 3,
            normalize: true,
            scaling: 2.0,
        };
        let routing = route_forward(&logits, None, &router, dims).unwrap();
        let (mut dlogits, mut dscale) = (vec![0.0; logits.len()], vec![0.0; 5]);
        let (dweights, scale) = (cast::<f32>(&Values::new(2).take(300, 1.0)), Some(&bias[..]));
        let sums = Some(&mut dscale[..]);
        route_backward(&mut dlogits, sums, &dweights, &logits, &routing, scale, &router, dims).unwrap();
        let balance = balance(&logits, &routing, dims);
        balance.backward(&mut dlogits, &logits, 0.1).unwrap();
        (problem.run::<f32, bf16>(), routing, dlogits, dscale, balance.loss().to_bits())
    });
}

#[test]
fn the_balance_loss_is_that_of_transformers_with_its_gradient() {
    let dims = Dims { experts: 4, top_k: 2, hidden: 1, intermediate: 1 };
    let logits = Values::new(4).take(24, 2.0);
    let logits_f32: Vec<f32> = cast(&logits);
    let routing = route_forward(&logits_f32, None, &Router::Softmax { normalize: true }, dims).unwrap();
    let reference = |logits: &[f64]| {
        let (mut share, mut mean) = ([0.0; 4], [0.0; 4]);
        routing.experts.iter().for_each(|e| share[*e as usize] += 1.0 / 6.0);
        for row in logits.chunks(4) {
            let sum: f64 = row.iter().map(|l| l.exp()).sum();
            row.iter().zip(&mut mean).for_each(|(l, mean)| *mean += l.exp() / sum / 6.0);
        }
        4.0 * inner(&share, &mean)
    };
    let mut dlogits = vec![1.0; 24];
    let sums = balance(&logits_f32, &routing, dims);
    let loss = sums.loss();
    sums.backward(&mut dlogits, &logits_f32, 0.5).unwrap();
    assert!((loss - reference(&logits)).abs() < 1e-9, "{loss}");
    let expected: Vec<f64> = gradient(&logits, reference).iter().map(|g| 1.0 + 0.5 * g).collect();
    assert_close("dlogits, on top of 1", &dlogits, &expected, 1e-6);
    let balanced = Routing { experts: vec![0, 1, 2, 3], weights: vec![0.5; 4] };
    assert_eq!(balance(&[0.0; 8], &balanced, dims).loss(), 2.0);
    assert_eq!(Balance::new(4).loss(), 0.0);
}

fn balance(logits: &[f32], routing: &Routing, dims: Dims) -> Balance {
    let mut balance = Balance::new(dims.experts);
    balance.add(logits, routing, dims).unwrap();
    balance
}

#[test]
fn shapes_and_routings_that_make_no_sense_are_refused() {
    let dims = Dims { experts: 4, top_k: 2, hidden: 2, intermediate: 2 };
    let softmax = Router::Softmax { normalize: true };
    assert!(route_forward(&[0.0; 8], None, &softmax, dims).is_ok());
    assert!(route_forward(&[0.0; 7], None, &softmax, dims).is_err());
    assert!(route_forward(&[0.0; 8], Some(&[1.0; 3]), &softmax, dims).is_err());
    assert!(route_forward(&[0.0; 8], None, &softmax, Dims { top_k: 5, ..dims }).is_err());
    let groups = |groups, kept_groups| Router::SigmoidGroups {
        bias: None,
        groups,
        kept_groups,
        normalize: true,
        scaling: 1.0,
    };
    assert!(route_forward(&[0.0; 8], None, &groups(2, 1), dims).is_ok());
    assert!(route_forward(&[0.0; 8], None, &groups(3, 1), dims).is_err());
    assert!(route_forward(&[0.0; 8], None, &groups(4, 1), dims).is_err());
    let twice = Routing { experts: vec![1, 1], weights: vec![0.5; 2] };
    assert!(Dispatch::new(&twice, dims).is_err(), "a token may go to an expert once");
    let outside = Routing { experts: vec![1, 4], weights: vec![0.5; 2] };
    assert!(Dispatch::new(&outside, dims).is_err());
    assert!(Balance::new(4).add(&[0.0; 4], &outside, dims).is_err());
    assert!(Balance::new(3).add(&[0.0; 12], &twice, dims).is_err());
    assert!(Balance::new(4).backward(&mut [0.0; 3], &[0.0; 4], 1.0).is_err());
}

#[test]
fn more_experts_than_memory_holds_are_refused_though_there_are_no_tokens() {
    let dims = Dims { experts: 1 << 40, top_k: 2, hidden: 4, intermediate: 4 };
    let error = Dispatch::new(&Routing::default(), dims).unwrap_err();
    assert!(error.to_string().contains("experts must be at most 65536"), "{error}");
}
