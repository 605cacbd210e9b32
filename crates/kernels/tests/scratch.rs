//! Every scratch function says exactly what its operation takes: that much is enough, and not more is planned
//! than used.

use ballast_kernels::gated_delta_rule as gdn;
use ballast_kernels::linear_cross_entropy::{self as loss, linear_cross_entropy};
use ballast_kernels::{Element, Scratch, attention, conv, glu, indexer, linear, moe, norm};
use half::bf16;

/// Runs on one thread, whose slot grows to the most that was asked for.
fn check(what: &str, planned: usize, run: impl Fn(&Scratch) + Sync) {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    pool.install(|| {
        for (start, name) in [(planned, "is not enough"), (0, "is more than is used")] {
            let scratch = Scratch::new(start);
            run(&scratch);
            assert_eq!(scratch.bytes(), 4 * planned, "{what}: a plan of {planned} {name}");
        }
    });
}

fn ones<T: Element>(n: usize) -> Vec<T> {
    vec![T::from_f32(0.5); n]
}

fn linear_of<Y: Element, X: Element, W: Element>() {
    for (tokens, inputs, outputs) in [(3, 20, 30), (40, 20, 30), (1500, 7, 9000), (8, 50_000, 2)] {
        let dims = linear::Dims { inputs, outputs };
        let (x, dy) = (ones::<X>(tokens * inputs), ones::<Y>(tokens * outputs));
        let (w, dw) = (ones::<W>(dims.weight_len()), ones::<f32>(dims.weight_len()));
        check("linear", linear::linear_scratch(dims, tokens), |scratch| {
            linear::linear_forward(&mut dy.clone(), &x, &w, None, dims, scratch).unwrap();
            linear::linear_backward_input(&mut x.clone(), &dy, &w, dims, scratch).unwrap();
            let mut dbias = ones::<f32>(outputs);
            linear::linear_backward_weight(&mut dw.clone(), Some(&mut dbias), &dy, &x, dims, scratch)
                .unwrap();
        });
    }
}

#[test]
fn linear() {
    linear_of::<f32, bf16, f32>();
    linear_of::<bf16, bf16, bf16>();
}

#[test]
fn linear_cross_entropy_has_that_of_a_slice() {
    let (dims, tokens) = (linear::Dims { inputs: 12, outputs: 50 }, 70);
    let options = loss::Options { slice: 32, ..loss::Options::default() };
    let (hidden, w, targets) = (ones::<f32>(tokens * 12), ones::<bf16>(600), vec![3; tokens]);
    check("loss", loss::linear_cross_entropy_scratch(dims, tokens, &options), |scratch| {
        let (mut dhidden, mut dw) = (hidden.clone(), ones::<f32>(600));
        let mut logits = ones::<f32>(loss::linear_cross_entropy_workspace(dims, tokens, &options));
        let grads = loss::Grads { dhidden: &mut dhidden, dw: Some(&mut dw), scale: 1.0 };
        linear_cross_entropy(Some(grads), &hidden, &w, &targets, dims, &options, &mut logits, scratch)
            .unwrap();
    });
}

#[test]
fn norms() {
    let (rows, width) = (300, 20);
    let (x, w) = (ones::<bf16>(rows * width), ones::<f32>(width));
    let mut saved = norm::Saved::default();
    norm::layer_norm_forward(&mut x.clone(), Some(&mut saved), &x, &w, &w, 1e-6).unwrap();
    let rms = norm::Saved { mean: vec![], ..saved.clone() };
    check("rms", norm::rms_norm_backward_scratch(rows, width), |scratch| {
        let (mut dx, mut dw, gamma) = (x.clone(), w.clone(), norm::Gamma::Plain(&w));
        norm::rms_norm_backward(&mut dx, Some(&mut dw), &x, &x, gamma, &rms, width, scratch).unwrap();
    });
    check("gated", norm::gated_rms_norm_backward_scratch(rows, width), |scratch| {
        let (mut dx, mut dz, mut dw) = (x.clone(), x.clone(), w.clone());
        norm::gated_rms_norm_backward(&mut dx, &mut dz, &mut dw, &x, &x, &x, &w, &rms, scratch).unwrap();
    });
    check("layer", norm::layer_norm_backward_scratch(rows, width), |scratch| {
        let (mut dx, mut dw, mut db) = (x.clone(), w.clone(), w.clone());
        norm::layer_norm_backward(&mut dx, &mut dw, &mut db, &x, &x, &w, &saved, scratch).unwrap();
    });
}

#[test]
fn convolution() {
    let dims = conv::Dims { channels: 200, width: 4 };
    let (x, weight) = (ones::<bf16>(200 * 50), ones::<f32>(800));
    let input = conv::Input { x: &x, weight: &weight, state: None, cu_seqlens: &[0, 50] };
    check("forward", conv::conv_forward_scratch(dims), |scratch| {
        conv::conv_forward(&mut x.clone(), None, &input, dims, scratch).unwrap();
    });
    check("backward", conv::conv_backward_scratch(dims), |scratch| {
        let (mut dx, mut dweight) = (x.clone(), weight.clone());
        let grads = conv::Grads { dx: &mut dx, dweight: &mut dweight, dstate: None };
        conv::conv_backward(grads, &x, None, &input, dims, scratch).unwrap();
    });
}

#[test]
fn gated_delta_rule() {
    let dims = gdn::Dims { key_heads: 1, value_heads: 2, key_dim: 8, value_dim: 6 };
    let (tokens, options) = (70, gdn::Options::default());
    let (q, v, beta) = (ones::<bf16>(tokens * 8), ones::<bf16>(tokens * 12), ones::<f32>(tokens * 2));
    // The plan of backward holds where no g is above 0.
    let (g, cu_seqlens) = (vec![-0.5; tokens * 2], [0, tokens]);
    let gates = gdn::Gates::Given { g: &g, beta: &beta };
    let input = gdn::Input { q: &q, k: &q, v: &v, gates, h0: None, cu_seqlens: &cu_seqlens };
    let forward_of = |input: &gdn::Input<'_, bf16>, scratch: &Scratch| {
        let (mut o, mut saved) = (v.clone(), gdn::Saved::default());
        let output = gdn::Output { o: &mut o, ht: None };
        gdn::gated_delta_rule_forward(output, Some(&mut saved), input, dims, &options, scratch).unwrap();
        saved
    };
    let growing = gdn::Input { gates: gdn::Gates::Given { g: &beta, beta: &beta }, ..input };
    for input in [&input, &growing] {
        check("forward", gdn::gated_delta_rule_forward_scratch(dims, &options), |scratch| {
            forward_of(input, scratch);
        });
    }
    let saved = forward_of(&input, &Scratch::new(0));
    check("backward", gdn::gated_delta_rule_backward_scratch(dims, &options), |scratch| {
        let (mut dq, mut dk, mut dv, mut dg, mut dbeta) =
            (q.clone(), q.clone(), v.clone(), g.clone(), g.clone());
        let gates = gdn::GateGrads::Given { dg: &mut dg, dbeta: &mut dbeta };
        let grads = gdn::Grads { dq: &mut dq, dk: &mut dk, dv: &mut dv, gates, dh0: None };
        gdn::gated_delta_rule_backward(grads, &v, None, &input, &saved, dims, &options, scratch).unwrap();
    });
    check("step", gdn::gated_delta_rule_step_scratch(dims), |scratch| {
        let (mut o, mut state) = (ones::<bf16>(12), ones::<f32>(96));
        let (q, v, g) = (&q[..8], &v[..12], &g[..2]);
        gdn::gated_delta_rule_step(&mut o, &mut state, q, q, v, g, g, dims, &options, scratch).unwrap();
    });
}

fn attention_of<T: Element>(topk: Option<usize>) {
    let dims = attention::Dims { heads: 4, kv_heads: 2, head_dim: 8, value_dim: 6 };
    let (tokens, options) = (300, attention::Options::default());
    let (q, k) = (ones::<T>(tokens * 32), ones::<T>(tokens * 16));
    let (v, o) = (ones::<T>(tokens * 12), ones::<T>(tokens * 24));
    let keys = vec![0; tokens * topk.unwrap_or(0)];
    let selected = topk.map(|topk| attention::Selected { keys: &keys, topk });
    let input =
        attention::Input { q: &q, k: &k, v: &v, sinks: None, selected, before: 0, cu_seqlens: &[0, tokens] };
    let forward = |scratch: &Scratch| {
        let mut saved = attention::Saved::default();
        let keep = Some(&mut saved);
        attention::attention_forward(&mut o.clone(), keep, &input, dims, &options, scratch).unwrap();
        saved
    };
    check("forward", attention::attention_forward_scratch::<T>(dims, topk), |scratch| {
        forward(scratch);
    });
    check("decode", attention::attention_decode_scratch::<T>(dims, topk), |scratch| {
        let cache = attention::Cache { k: &k, v: &v, len: tokens };
        let mut o = o.clone();
        attention::attention_decode(&mut o, &q, &cache, None, selected, dims, &options, scratch).unwrap();
    });
    let saved = forward(&Scratch::new(0));
    check("backward", attention::attention_backward_scratch::<T>(dims, topk), |scratch| {
        let (mut dq, mut dk, mut dv) = (q.clone(), k.clone(), v.clone());
        let grads = attention::Grads { dq: &mut dq, dk: &mut dk, dv: &mut dv, dsinks: None };
        let mut buffer = ones::<f32>(attention::attention_backward_workspace::<T>(dims, tokens));
        attention::attention_backward(grads, &o, &o, &input, &saved, dims, &options, &mut buffer, scratch)
            .unwrap();
    });
}

#[test]
fn attention() {
    for topk in [None, Some(1)] {
        attention_of::<f32>(topk);
        attention_of::<bf16>(topk);
    }
}

#[test]
fn indexer() {
    let (dims, tokens) = (indexer::Dims { heads: 4, dim: 8 }, 100);
    let served = attention::Dims { heads: 2, kv_heads: 1, head_dim: 8, value_dim: 8 };
    let (q, k, w) = (ones::<f32>(tokens * 32), ones::<f32>(tokens * 8), ones::<f32>(tokens * 4));
    let (options, served_options) = (indexer::Options::default(), attention::Options::default());
    let input = indexer::Input { q: &q, k: &k, w: &w, before: 0, cu_seqlens: &[0, tokens] };
    check("topk", indexer::indexer_topk_scratch::<f32>(dims, tokens), |scratch| {
        let mut selected = vec![0; tokens * 10];
        indexer::indexer_topk(&mut selected, &input, dims, &options, 10, scratch).unwrap();
        indexer::indexer_topk_decode(&mut selected, &q, &w, &k, tokens, dims, &options, 10, scratch).unwrap();
    });
    check("scores", indexer::indexer_scores_scratch::<f32>(dims), |scratch| {
        let mut scores = vec![0.0; tokens * tokens];
        indexer::indexer_scores(&mut scores, &input, dims, &options, 0, 0..tokens, scratch).unwrap();
    });
    let query = ones::<f32>(tokens * 16);
    let attention = attention::Input {
        q: &query,
        k: &k,
        v: &k,
        sinks: None,
        selected: None,
        before: 0,
        cu_seqlens: &[0, tokens],
    };
    let (mut o, mut saved, scratch) = (query.clone(), attention::Saved::default(), Scratch::new(0));
    let keep = Some(&mut saved);
    attention::attention_forward(&mut o, keep, &attention, served, &served_options, &scratch).unwrap();
    let target = indexer::Target { input: &attention, saved: &saved, dims: served, options: &served_options };
    check("distribution", indexer::attention_distribution_scratch::<f32>(served), |scratch| {
        let mut p = vec![0.0; tokens * tokens];
        indexer::attention_distribution(&mut p, &target, 0, 0..tokens, scratch).unwrap();
    });
    check("loss", indexer::indexer_loss_scratch::<f32>(dims, served, tokens, None), |scratch| {
        let (mut dq, mut dk, mut dw) = (q.clone(), k.clone(), w.clone());
        let grads = indexer::Grads { dq: &mut dq, dk: &mut dk, dw: &mut dw };
        let mut buffer = ones::<f32>(indexer::indexer_loss_workspace(dims, tokens));
        indexer::indexer_loss(Some(grads), &input, &target, dims, &options, &mut buffer, scratch).unwrap();
    });
}

#[test]
fn experts() {
    let dims = moe::Dims { experts: 4, top_k: 2, hidden: 10, intermediate: 6 };
    let (x, gate_up, down) = (ones::<f32>(300), ones::<bf16>(480), ones::<bf16>(240));
    let logits = ones::<f32>(120);
    let routing = moe::route_forward(&logits, None, &moe::Router::Softmax { normalize: true }, dims).unwrap();
    let dispatch = moe::Dispatch::new(&routing, dims).unwrap();
    let experts = moe::Experts { gate_up: &gate_up, down: &down, activation: glu::Activation::Silu };
    check("moe", moe::experts_scratch(dims, 30), |scratch| {
        let (mut y, mut saved) = (x.clone(), moe::Saved::default());
        let mut work = ones::<f32>(moe::experts_forward_workspace::<f32>(&dispatch, dims, true));
        moe::experts_forward(
            &mut y,
            Some(&mut saved),
            &x,
            &routing,
            &dispatch,
            &experts,
            dims,
            &mut work,
            scratch,
        )
        .unwrap();
        let (mut dx, mut dweights) = (x.clone(), ones::<f32>(60));
        let (mut dgate_up, mut ddown) = (ones::<f32>(480), ones::<f32>(240));
        let grads = moe::ExpertsGrads {
            dx: &mut dx,
            dweights: &mut dweights,
            dgate_up: &mut dgate_up,
            ddown: &mut ddown,
        };
        let mut work = ones::<f32>(moe::experts_backward_workspace(&dispatch, dims));
        moe::experts_backward(grads, &x, &x, &saved, &routing, &dispatch, &experts, dims, &mut work, scratch)
            .unwrap();
    });
}
