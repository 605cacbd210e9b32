//! `saved_bytes` predicts `Saved::bytes`, and the outputs do not depend on whether a forward saves.

use ballast_kernels::gated_delta_rule::{self as gdn, L2Norm};
use ballast_kernels::{Element, Rounding, Scratch, attention, glu, moe, norm};
use half::bf16;

/// Values from -1 to 1.
fn values<T: Element>(n: usize, seed: u32) -> Vec<T> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        T::from_f32((state >> 8) as f32 / (1 << 23) as f32 - 1.0)
    };
    (0..n).map(|_| next()).collect()
}

fn attention_of<T: Element>(logits: Rounding) {
    let (dims, tokens) = (attention::Dims { heads: 4, kv_heads: 2, head_dim: 8, value_dim: 6 }, 70);
    let options = attention::Options { logits, ..attention::Options::default() };
    let (q, k, v) = (values::<T>(tokens * 32, 1), values::<T>(tokens * 16, 2), values::<T>(tokens * 12, 3));
    let cu_seqlens = [0, 30, 30, tokens];
    let input = attention::Input {
        q: &q,
        k: &k,
        v: &v,
        sinks: None,
        selected: None,
        before: 0,
        cu_seqlens: &cu_seqlens,
    };
    let run = |saved: Option<&mut attention::Saved>| {
        let mut o = vec![T::default(); tokens * 24];
        attention::attention_forward(&mut o, saved, &input, dims, &options, &Scratch::new(0)).unwrap();
        o
    };
    let mut saved = attention::Saved::default();
    assert_eq!(run(Some(&mut saved)), run(None));
    assert_eq!(saved.bytes(), attention::saved_bytes(dims, &options, tokens));
}

#[test]
fn attention() {
    for logits in [Rounding::F32, Rounding::Bf16] {
        attention_of::<f32>(logits);
        attention_of::<bf16>(logits);
    }
}

fn delta_rule_of<T: Element>(l2norm: L2Norm, chunk: usize, states_every: usize) {
    let dims = gdn::Dims { key_heads: 1, value_heads: 2, key_dim: 8, value_dim: 6 };
    let options = gdn::Options { l2norm, chunk, states_every, ..gdn::Options::default() };
    let tokens = 70;
    let (q, k, v) = (values::<T>(tokens * 8, 1), values::<T>(tokens * 8, 2), values::<T>(tokens * 12, 3));
    let (g, beta) = (vec![-0.1; tokens * 2], vec![0.5; tokens * 2]);
    let (gates, cu_seqlens) = (gdn::Gates::Given { g: &g, beta: &beta }, [0, 30, 30, tokens]);
    let input = gdn::Input { q: &q, k: &k, v: &v, gates, h0: None, cu_seqlens: &cu_seqlens };
    let run = |saved: Option<&mut gdn::Saved<T>>| {
        let mut o = vec![T::default(); tokens * 12];
        let output = gdn::Output { o: &mut o, ht: None };
        gdn::gated_delta_rule_forward(output, saved, &input, dims, &options, &Scratch::new(0)).unwrap();
        o
    };
    let mut saved = gdn::Saved::default();
    assert_eq!(run(Some(&mut saved)), run(None));
    assert_eq!(saved.bytes(), gdn::saved_bytes::<T>(dims, &options, &cu_seqlens));
}

#[test]
fn gated_delta_rule() {
    for l2norm in [L2Norm::Off, L2Norm::Inside, L2Norm::Outside] {
        for (chunk, states_every) in [(16, 1), (32, 4)] {
            delta_rule_of::<f32>(l2norm, chunk, states_every);
            delta_rule_of::<bf16>(l2norm, chunk, states_every);
        }
    }
}

#[test]
fn norms() {
    let (rows, width) = (300, 20);
    let (x, z, w) =
        (values::<bf16>(rows * width, 1), values::<bf16>(rows * width, 2), values::<f32>(width, 3));
    let check = |bytes: usize, run: &dyn Fn(&mut [bf16], Option<&mut norm::Saved>)| {
        let (mut y, mut unsaved, mut saved) = (x.clone(), x.clone(), norm::Saved::default());
        run(&mut y, Some(&mut saved));
        run(&mut unsaved, None);
        assert_eq!(y, unsaved);
        assert_eq!(saved.bytes(), bytes);
    };
    check(norm::saved_bytes(rows), &|y, saved| {
        norm::rms_norm_forward(y, saved, &x, norm::Gamma::Plain(&w), 1e-6, width).unwrap();
    });
    check(norm::saved_bytes(rows), &|y, saved| {
        norm::gated_rms_norm_forward(y, saved, &x, &z, &w, 1e-6).unwrap();
    });
    check(norm::saved_bytes(rows), &|y, saved| {
        norm::l2norm_forward(y, saved, &x, 1e-6, width).unwrap();
    });
    check(norm::layer_norm_saved_bytes(rows), &|y, saved| {
        norm::layer_norm_forward(y, saved, &x, &w, &w, 1e-6).unwrap();
    });
}

fn experts_of<T: Element>() {
    let dims = moe::Dims { experts: 4, top_k: 2, hidden: 10, intermediate: 7 };
    let tokens = 31;
    let (x, logits) = (values::<T>(tokens * 10, 1), values::<f32>(tokens * 4, 2));
    let (gate_up, down) = (values::<bf16>(560, 3), values::<bf16>(280, 4));
    let router = moe::Router::Softmax { normalize: true };
    let routing = moe::route_forward(&logits, None, &router, dims).unwrap();
    let dispatch = moe::Dispatch::new(&routing, dims).unwrap();
    let experts = moe::Experts { gate_up: &gate_up, down: &down, activation: glu::Activation::Silu };
    let run = |saved: Option<&mut moe::Saved<T>>| {
        let len = moe::experts_forward_workspace::<T>(&dispatch, dims, saved.is_some());
        let (mut y, mut work, scratch) = (x.clone(), vec![f32::NAN; len], Scratch::new(0));
        moe::experts_forward(&mut y, saved, &x, &routing, &dispatch, &experts, dims, &mut work, &scratch)
            .unwrap();
        y
    };
    let mut saved = moe::Saved::default();
    assert_eq!(run(Some(&mut saved)), run(None));
    assert_eq!(saved.bytes(), moe::saved_bytes::<T>(dims, tokens));
}

#[test]
fn experts() {
    experts_of::<f32>();
    experts_of::<bf16>();
}
