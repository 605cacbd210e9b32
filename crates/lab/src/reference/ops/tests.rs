//! Larger operations against the kernels' plain versions, and gradients against finite differences.

use std::sync::Arc;

use ballast_kernels::attention as softmax;
use ballast_kernels::gated_delta_rule as gdn;
use ballast_kernels::indexer as sparse;
use ballast_model::config::{LinearAttention, Router};

use super::*;
use crate::reference::tape::{Param, Tape, Value};

/// n pseudo-random values in [-by, by].
fn values(n: usize, seed: u64, by: f64) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((state >> 33) as f64 / (1u64 << 31) as f64 * 2.0 - 1.0) * by
    };
    (0..n).map(|_| next()).collect()
}

fn leaf(tape: &mut Tape<'_>, values: &[f64]) -> Value {
    tape.leaf(Arc::new(values.to_vec()))
}

fn assert_close(name: &str, got: &[f64], expected: &[f64]) {
    assert_eq!(got.len(), expected.len(), "{name}");
    let size = dot(expected, expected).sqrt();
    let off = got.iter().zip(expected).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt();
    assert!(size > 0.0 && off <= 1e-12 * size, "{name} is off by {:e}", off / size);
}

#[test]
fn the_delta_rule_is_that_of_the_kernels_twin() {
    let shape = LinearAttention { key_heads: 2, value_heads: 4, key_dim: 6, value_dim: 5, conv_width: 4 };
    let dims = gdn::Dims { key_heads: 2, value_heads: 4, key_dim: 6, value_dim: 5 };
    // Sequences of more than two segments, of exactly one, and an empty one.
    let cu_seqlens = vec![0, 5, 5, 155, 219];
    let tokens = 219;
    let twin = gdn::reference::Reference {
        q: values(tokens * 12, 1, 1.0),
        k: values(tokens * 12, 2, 1.0),
        v: values(tokens * 20, 3, 1.0),
        g: values(tokens * 4, 4, 0.5).iter().map(|g| -g.abs()).collect(),
        beta: values(tokens * 4, 5, 1.0).iter().map(|b| b.abs()).collect(),
        h0: vec![0.0; 4 * 4 * 30],
        cu_seqlens: cu_seqlens.clone(),
        scale: 6f64.powf(-0.5),
        l2norm: true,
    };
    let d_o = values(tokens * 20, 6, 1.0);
    let expected = twin.run(dims, &d_o, &vec![0.0; 4 * 4 * 30]);
    let mut tape = Tape::new(true);
    let [q, k, v, g, beta] = [&twin.q, &twin.k, &twin.v, &twin.g, &twin.beta].map(|x| leaf(&mut tape, x));
    let eps = gdn::L2NORM_EPS as f64;
    let (qn, kn) = (l2_norm(&mut tape, &q, eps, 6), l2_norm(&mut tape, &k, eps, 6));
    let inputs = RuleInputs { q: qn, k: kn, v: v.clone(), g: g.clone(), beta: beta.clone() };
    let o = delta_rule(&mut tape, inputs, shape, &cu_seqlens);
    assert_close("o", &o, &expected.o);
    let mut sums = tape.backward(&[(&o, &d_o)]);
    assert_close("dq", &sums.take(&q), &expected.dq);
    assert_close("dk", &sums.take(&k), &expected.dk);
    assert_close("dv", &sums.take(&v), &expected.dv);
    assert_close("dg", &sums.take(&g), &expected.dg);
    assert_close("dbeta", &sums.take(&beta), &expected.dbeta);
}

const SEQUENCES: [usize; 5] = [0, 3, 3, 140, 150];

/// Some keys for every query; some lie in the future.
fn lists() -> Vec<Vec<u32>> {
    (0..150u32).map(|t| vec![0, t % 3 + 1, t % 50 + 4, 200]).collect()
}

/// An attention over these sequences.
fn six_heads(selects: bool) -> Attention {
    Attention {
        heads: 6,
        kv_heads: 2,
        head_dim: 8,
        value_dim: 5,
        scale: 0.75,
        window: None,
        soft_cap: None,
        selected: selects.then(lists),
        cu_seqlens: SEQUENCES.to_vec(),
    }
}

#[test]
fn attention_is_that_of_the_kernels_twin() {
    let (cu_seqlens, tokens, topk) = (SEQUENCES.to_vec(), 150, 4);
    for (window, soft_cap, selects) in
        [(None, None, false), (Some(70), None, false), (Some(5), Some(2.0), false), (None, None, true)]
    {
        let dims = softmax::Dims { heads: 6, kv_heads: 2, head_dim: 8, value_dim: 5 };
        let options = softmax::Options { scale: Some(0.75), window, soft_cap, ..softmax::Options::default() };
        let twin = softmax::reference::Reference {
            q: values(tokens * 48, 1, 2.0),
            k: values(tokens * 16, 2, 2.0),
            v: values(tokens * 10, 3, 1.0),
            sinks: None,
            selected: selects.then(|| (lists().concat(), topk)),
            cu_seqlens: cu_seqlens.clone(),
        };
        let d_o = values(tokens * 30, 4, 1.0);
        let expected = twin.run(dims, &options, &d_o);
        let mut tape = Tape::new(true);
        let [q, k, v] = [&twin.q, &twin.k, &twin.v].map(|x| leaf(&mut tape, x));
        let settings = Attention { window, soft_cap: soft_cap.map(f64::from), ..six_heads(selects) };
        let o = attention(&mut tape, &q, &k, &v, settings);
        assert_close("o", &o, &expected.o);
        let mut sums = tape.backward(&[(&o, &d_o)]);
        assert_close("dq", &sums.take(&q), &expected.dq);
        assert_close("dk", &sums.take(&k), &expected.dk);
        assert_close("dv", &sums.take(&v), &expected.dv);
    }
}

#[test]
fn an_indexer_and_its_loss_are_those_of_the_kernels_twin() {
    let (cu_seqlens, tokens, heads, dim, topk) = (SEQUENCES.to_vec(), 150, 3, 4, 4);
    let dims = sparse::Dims { heads, dim };
    let twin = sparse::reference::Reference {
        q: values(tokens * heads * dim, 1, 2.0),
        k: values(tokens * dim, 2, 2.0),
        w: values(tokens * heads, 3, 2.0),
        cu_seqlens: cu_seqlens.clone(),
    };
    for selects in [false, true] {
        let served = softmax::reference::Reference {
            q: values(tokens * 48, 4, 2.0),
            k: values(tokens * 16, 5, 2.0),
            v: vec![0.0; tokens * 10],
            sinks: None,
            selected: selects.then(|| (lists().concat(), topk)),
            cu_seqlens: cu_seqlens.clone(),
        };
        let shape = softmax::Dims { heads: 6, kv_heads: 2, head_dim: 8, value_dim: 5 };
        let options = softmax::Options { scale: Some(0.75), ..softmax::Options::default() };
        let targets = sparse::reference::distributions(&served, shape, &options);
        let trained = sparse::Options { loss_scale: 1.0, ..sparse::Options::default() };
        let expected = twin.run(dims, &trained, &targets);
        let mut tape = Tape::new(true);
        let [q, k, w] = [&twin.q, &twin.k, &twin.w].map(|x| leaf(&mut tape, x));
        let [of_q, of_k] = [&served.q, &served.k].map(|x| leaf(&mut tape, x));
        let indexer = Indexer { heads, dim, q: q.clone(), k: k.clone(), w: w.clone() };
        for (i, row) in indexer.scores(&(3..140), 60..80).into_iter().enumerate() {
            let score = |u| twin.score(dims, &sparse::Options::default(), 63 + i, 3 + u);
            assert_close("scores", &row, &(0..61 + i).map(score).collect::<Vec<f64>>());
        }
        let settings = six_heads(selects);
        let loss = indexer_loss(&mut tape, &indexer, &of_q, &of_k, settings);
        assert_close("loss", &loss, &[expected.loss]);
        let mut sums = tape.backward(&[(&loss, &[1.0])]);
        assert_close("dq", &sums.take(&q), &expected.dq);
        assert_close("dk", &sums.take(&k), &expected.dk);
        assert_close("dw", &sums.take(&w), &expected.dw);
        assert!(sums.take(&of_q).iter().chain(&sums.take(&of_k)).all(|x| *x == 0.0), "p is a constant");
    }
}

#[test]
fn the_gradient_of_a_layer_norm_is_what_differences_give() {
    let (x, dy) = (values(15, 1, 2.0), values(15, 2, 1.0));
    let (weight, bias) = ([0.5f32, -1.5, 2.0, 1.0, 0.25], [0.25f32, 0.5, -1.0, 0.0, 2.0]);
    let y = |x: &[f64], weight: &[f32], bias: &[f32]| {
        let mut tape = Tape::new(false);
        let x = leaf(&mut tape, x);
        let [w, b] = [Param::new("w".into(), weight), Param::new("b".into(), bias)];
        dot(&layer_norm(&mut tape, &x, &w, &b, 1e-6), &dy)
    };
    let mut tape = Tape::new(true);
    let start = leaf(&mut tape, &x);
    let [w, b] = [Param::new("w".into(), &weight), Param::new("b".into(), &bias)];
    let out = layer_norm(&mut tape, &start, &w, &b, 1e-6);
    let mut sums = tape.backward(&[(&out, &dy)]);
    let by = 2f64.powi(-16);
    let close =
        |got: f64, up: f64, down: f64| assert!((got - (up - down) / (2.0 * by)).abs() < 1e-8, "{got}");
    for (i, got) in sums.take(&start).into_iter().enumerate() {
        let moved = |by: f64| {
            let mut x = x.clone();
            x[i] += by;
            y(&x, &weight, &bias)
        };
        close(got, moved(by), moved(-by));
    }
    let parameters = sums.into_parameters();
    for i in 0..5 {
        let moved = |of: &[f32; 5], by: f64| {
            let mut of = *of;
            of[i] = (of[i] as f64 + by) as f32;
            of
        };
        let weights = [by, -by].map(|by| y(&x, &moved(&weight, by), &bias));
        close(parameters["w"][i], weights[0], weights[1]);
        let biases = [by, -by].map(|by| y(&x, &weight, &moved(&bias, by)));
        close(parameters["b"][i], biases[0], biases[1]);
    }
}

#[test]
fn the_gradient_of_a_router_is_what_differences_give() {
    let groups = |normalize| Router::SigmoidGroups { groups: 4, kept_groups: 2, normalize, scaling: 2.5 };
    let softmax = |normalize| Router::Softmax { normalize };
    let (tokens, experts, top_k) = (5, 8, 3);
    let (logits, dw) = (values(tokens * experts, 1, 2.0), values(tokens * top_k, 2, 1.0));
    let bias = [0.5, -0.5, 0.0, 1.0, -1.0, 0.25, 0.0, 0.75];
    for router in [softmax(true), softmax(false), groups(true), groups(false), Router::Normed] {
        let chosen = Arc::new(choose_experts(&logits, router, Some(&bias), experts, top_k));
        let loss = |logits: &[f64]| {
            let mut tape = Tape::new(false);
            let logits = leaf(&mut tape, logits);
            dot(&expert_weights(&mut tape, &logits, router, &chosen, experts, top_k), &dw)
        };
        let differences: Vec<f64> = (0..logits.len())
            .map(|i| {
                let [mut up, mut down] = [logits.clone(), logits.clone()];
                (up[i], down[i]) = (up[i] + 1e-5, down[i] - 1e-5);
                (loss(&up) - loss(&down)) / 2e-5
            })
            .collect();
        let mut tape = Tape::new(true);
        let logits = leaf(&mut tape, &logits);
        let weights = expert_weights(&mut tape, &logits, router, &chosen, experts, top_k);
        let got = tape.backward(&[(&weights, &dw)]).take(&logits);
        let off = got.iter().zip(&differences).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(off < 1e-9, "{router:?}: {off:e}");
    }
}

#[test]
fn experts_come_from_the_best_groups_and_of_equal_ones_the_first_is_taken() {
    let router = Router::SigmoidGroups { groups: 2, kept_groups: 1, normalize: true, scaling: 1.0 };
    // The best single expert is in the first group, the best two together are the second.
    let logits = [5.0, -5.0, 1.0, 1.0];
    assert_eq!(choose_experts(&logits, router, None, 4, 2), [2, 3]);
    // The bias affects the choice, and may be negative.
    assert_eq!(choose_experts(&logits, router, Some(&[-0.1, 0.0, -2.0, -2.0]), 4, 2), [0, 1]);
    let equal = [1.0, 3.0, 3.0, f64::NAN];
    assert_eq!(choose_experts(&equal, Router::Normed, None, 4, 3), [1, 2, 0]);
}
