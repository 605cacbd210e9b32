//! Benchmark cases, one function per kernel: creates inputs of the given shape and returns the work to time.

use ballast_kernels::adamw::{self, adamw_step};
use ballast_kernels::attention::{self, attention_backward, attention_forward};
use ballast_kernels::conv::{self, conv_backward, conv_forward};
use ballast_kernels::gated_delta_rule::{self as gdn, gated_delta_rule_backward, gated_delta_rule_forward};
use ballast_kernels::glu::{Activation, glu_backward, glu_forward};
use ballast_kernels::indexer::{self, indexer_loss, indexer_topk};
use ballast_kernels::linear::{
    self, linear_backward_input, linear_backward_weight, linear_forward, linear_scratch,
};
use ballast_kernels::linear_cross_entropy::{self as loss, linear_cross_entropy};
use ballast_kernels::matmul::{Mat, matmul};
use ballast_kernels::moe::{self, experts_backward, experts_forward, route_forward};
use ballast_kernels::norm::{self, Gamma, rms_norm_backward, rms_norm_backward_scratch, rms_norm_forward};
use ballast_kernels::rotary::{Frequencies, Heads, Layout, Rotary, rotary_forward};
use ballast_kernels::{Element, Scratch};
use rayon::prelude::*;

/// Work to time; owns its inputs and outputs.
pub type Work = Box<dyn FnMut() -> anyhow::Result<()>>;

/// Passes of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// Forward without saving.
    Forward,
    /// Forward with saving, then backward.
    Both,
}

/// Reproducible values in (-1, 1).
pub fn values(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// Reproducible values in (-1, 1), rounded to the storage type.
pub fn stored<T: Element>(n: usize, seed: u64) -> Vec<T> {
    values(n, seed).into_iter().map(T::from_f32).collect()
}

fn zeros<T: Element>(n: usize) -> Vec<T> {
    vec![T::default(); n]
}

/// Peak throughput: [`PEAK_PRODUCTS`] products of [size, size] matrices on each of `threads` threads at once.
pub fn peak(size: usize, threads: usize) -> Work {
    let (a, b) = (values(size * size, 1), values(size * size, 2));
    let mut outputs = vec![vec![0.0; size * size]; threads];
    Box::new(move || {
        outputs.par_iter_mut().with_max_len(1).for_each(|c| {
            for _ in 0..PEAK_PRODUCTS {
                matmul(c, 1.0, Mat::dense(&a, size, size), Mat::dense(&b, size, size));
            }
        });
        Ok(())
    })
}

/// Products per thread in [`peak`].
pub const PEAK_PRODUCTS: usize = 20;

/// The gated delta rule on one sequence.
pub fn gated_delta_rule<T: Element + 'static>(
    tokens: usize,
    dims: gdn::Dims,
    options: gdn::Options,
    pass: Pass,
) -> Work {
    let (keys, vals, gates) = (
        tokens * dims.key_heads * dims.key_dim,
        tokens * dims.value_heads * dims.value_dim,
        tokens * dims.value_heads,
    );
    let (q, k, v, d_o) =
        (stored::<T>(keys, 1), stored::<T>(keys, 2), stored::<T>(vals, 3), stored::<T>(vals, 4));
    let g: Vec<f32> = values(gates, 5).into_iter().map(|x| -0.1 * x.abs()).collect();
    let beta: Vec<f32> = values(gates, 6).into_iter().map(f32::abs).collect();
    let len = gdn::gated_delta_rule_forward_scratch(dims, &options)
        .max(gdn::gated_delta_rule_backward_scratch(dims, &options));
    let scratch = Scratch::new(len);
    let mut o = zeros::<T>(vals);
    let (mut dq, mut dk, mut dv) = (zeros::<T>(keys), zeros::<T>(keys), zeros::<T>(vals));
    let (mut dg, mut dbeta) = (zeros(gates), zeros(gates));
    let mut saved = gdn::Saved::default();
    Box::new(move || {
        let cu_seqlens = &[0, tokens];
        let gates = gdn::Gates::Given { g: &g, beta: &beta };
        let input = gdn::Input { q: &q, k: &k, v: &v, gates, h0: None, cu_seqlens };
        let output = gdn::Output { o: &mut o, ht: None };
        let keep = (pass == Pass::Both).then_some(&mut saved);
        gated_delta_rule_forward(output, keep, &input, dims, &options, &scratch)?;
        if pass == Pass::Both {
            let grads = gdn::Grads {
                dq: &mut dq,
                dk: &mut dk,
                dv: &mut dv,
                gates: gdn::GateGrads::Given { dg: &mut dg, dbeta: &mut dbeta },
                dh0: None,
            };
            gated_delta_rule_backward(grads, &d_o, None, &input, &saved, dims, &options, &scratch)?;
        }
        Ok(())
    })
}

/// Causal attention on one sequence.
pub fn attention<T: Element + 'static>(
    tokens: usize,
    dims: attention::Dims,
    options: attention::Options,
    pass: Pass,
) -> Work {
    let (queries, keys) = (tokens * dims.heads * dims.head_dim, tokens * dims.kv_heads * dims.head_dim);
    let (outs, vals) = (tokens * dims.heads * dims.value_dim, tokens * dims.kv_heads * dims.value_dim);
    let (q, k, v, d_o) =
        (stored::<T>(queries, 1), stored::<T>(keys, 2), stored::<T>(vals, 3), stored::<T>(outs, 4));
    let len = attention::attention_forward_scratch::<T>(dims, None)
        .max(attention::attention_backward_scratch::<T>(dims, None));
    let scratch = Scratch::new(len);
    let mut workspace = zeros(attention::attention_backward_workspace::<T>(dims, tokens));
    let mut o = zeros::<T>(outs);
    let (mut dq, mut dk, mut dv) = (zeros::<T>(queries), zeros::<T>(keys), zeros::<T>(vals));
    let mut saved = attention::Saved::default();
    Box::new(move || {
        let cu_seqlens = &[0, tokens];
        let input =
            attention::Input { q: &q, k: &k, v: &v, sinks: None, selected: None, before: 0, cu_seqlens };
        let keep = (pass == Pass::Both).then_some(&mut saved);
        attention_forward(&mut o, keep, &input, dims, &options, &scratch)?;
        if pass == Pass::Both {
            let grads = attention::Grads { dq: &mut dq, dk: &mut dk, dv: &mut dv, dsinks: None };
            attention_backward(grads, &d_o, &o, &input, &saved, dims, &options, &mut workspace, &scratch)?;
        }
        Ok(())
    })
}

/// Product of a linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Product {
    /// y
    Forward,
    /// dx
    Input,
    /// dw
    Weight,
}

/// One product of a linear layer, activations in X and weights in W.
pub fn linear<X: Element + 'static, W: Element + 'static>(
    tokens: usize,
    dims: linear::Dims,
    product: Product,
) -> Work {
    let (x, w) = (stored::<X>(tokens * dims.inputs, 1), stored::<W>(dims.weight_len(), 2));
    let dy = stored::<X>(tokens * dims.outputs, 3);
    let (mut y, mut dx, mut dw) = (zeros::<X>(dy.len()), zeros::<X>(x.len()), zeros(w.len()));
    let scratch = Scratch::new(linear_scratch(dims, tokens));
    Box::new(move || {
        match product {
            Product::Forward => linear_forward(&mut y, &x, &w, None, dims, &scratch)?,
            Product::Input => linear_backward_input(&mut dx, &dy, &w, dims, &scratch)?,
            Product::Weight => linear_backward_weight(&mut dw, None, &dy, &x, dims, &scratch)?,
        }
        Ok(())
    })
}

/// Loss and both gradients of the output projection.
pub fn cross_entropy<T: Element + 'static>(
    tokens: usize,
    dims: linear::Dims,
    options: loss::Options,
) -> Work {
    let (hidden, w) = (stored::<T>(tokens * dims.inputs, 1), stored::<T>(dims.weight_len(), 2));
    let targets: Vec<i64> = (0..tokens).map(|t| (t * 7919 % dims.outputs) as i64).collect();
    let (mut dhidden, mut dw) = (zeros::<T>(hidden.len()), zeros(w.len()));
    let mut workspace = zeros(loss::linear_cross_entropy_workspace(dims, tokens, &options));
    let scratch = Scratch::new(loss::linear_cross_entropy_scratch(dims, tokens, &options));
    Box::new(move || {
        let (dw, scale) = (Some(&mut dw[..]), 1.0 / tokens as f32);
        let grads = loss::Grads { dhidden: &mut dhidden, dw, scale };
        linear_cross_entropy(Some(grads), &hidden, &w, &targets, dims, &options, &mut workspace, &scratch)?;
        Ok(())
    })
}

/// Indexer on one sequence: selection of keys, or the loss of the dense stage with its gradients.
pub fn indexer(tokens: usize, dims: indexer::Dims, topk: usize, pass: Pass) -> anyhow::Result<Work> {
    let (q, k) = (values(tokens * dims.heads * dims.dim, 1), values(tokens * dims.dim, 2));
    let w = values(tokens * dims.heads, 3);
    let options = indexer::Options { loss_scale: 0.01, ..Default::default() };
    let served = attention::Dims { heads: 8, kv_heads: 2, head_dim: 64, value_dim: 64 };
    let (query, key) = (values(tokens * 8 * 64, 4), values(tokens * 2 * 64, 5));
    let len = indexer::indexer_topk_scratch::<f32>(dims, tokens)
        .max(indexer::indexer_loss_scratch::<f32>(dims, served, tokens, None))
        .max(attention::attention_forward_scratch::<f32>(served, None));
    let scratch = Scratch::new(len);
    let served_options = attention::Options::default();
    let cu_seqlens = [0, tokens];
    let mut saved = attention::Saved::default();
    {
        let input = attention::Input {
            q: &query,
            k: &key,
            v: &key,
            sinks: None,
            selected: None,
            before: 0,
            cu_seqlens: &cu_seqlens,
        };
        let mut o = zeros(query.len());
        attention_forward(&mut o, Some(&mut saved), &input, served, &served_options, &scratch)?;
    }
    let mut selected = vec![0; tokens * topk];
    let mut workspace = zeros(indexer::indexer_loss_workspace(dims, tokens));
    let (mut dq, mut dk, mut dw) = (zeros::<f32>(q.len()), zeros::<f32>(k.len()), zeros(w.len()));
    Ok(Box::new(move || {
        let input = indexer::Input { q: &q, k: &k, w: &w, before: 0, cu_seqlens: &cu_seqlens };
        if pass == Pass::Forward {
            indexer_topk(&mut selected, &input, dims, &options, topk, &scratch)?;
            return Ok(());
        }
        let attention = attention::Input {
            q: &query,
            k: &key,
            v: &[],
            sinks: None,
            selected: None,
            before: 0,
            cu_seqlens: &cu_seqlens,
        };
        let target =
            indexer::Target { input: &attention, saved: &saved, dims: served, options: &served_options };
        let grads = indexer::Grads { dq: &mut dq, dk: &mut dk, dw: &mut dw };
        indexer_loss(Some(grads), &input, &target, dims, &options, &mut workspace, &scratch)?;
        Ok(())
    }))
}

/// RMSNorm with 1 + w.
pub fn rms_norm(rows: usize, width: usize, pass: Pass) -> Work {
    let (x, w, dy) = (values(rows * width, 1), values(width, 2), values(rows * width, 3));
    let (mut y, mut dx, mut dw) = (zeros::<f32>(x.len()), zeros::<f32>(x.len()), zeros(width));
    let scratch = Scratch::new(rms_norm_backward_scratch(rows, width));
    let mut saved = norm::Saved::default();
    Box::new(move || {
        rms_norm_forward(&mut y, Some(&mut saved), &x, Gamma::OnePlus(&w), 1e-6, width)?;
        if pass == Pass::Both {
            let gamma = Gamma::OnePlus(&w);
            rms_norm_backward(&mut dx, Some(&mut dw), &dy, &x, gamma, &saved, width, &scratch)?;
        }
        Ok(())
    })
}

/// Convolution of width 4 with SiLU on one sequence.
pub fn convolution(tokens: usize, channels: usize, pass: Pass) -> Work {
    let dims = conv::Dims { channels, width: 4 };
    let (x, weight, dy) =
        (values(tokens * channels, 1), values(channels * 4, 2), values(tokens * channels, 3));
    let (mut y, mut dx, mut dweight) = (zeros::<f32>(x.len()), zeros::<f32>(x.len()), zeros(weight.len()));
    let scratch = Scratch::new(conv::conv_forward_scratch(dims).max(conv::conv_backward_scratch(dims)));
    Box::new(move || {
        let input = conv::Input { x: &x, weight: &weight, state: None, cu_seqlens: &[0, tokens] };
        conv_forward(&mut y, None, &input, dims, &scratch)?;
        if pass == Pass::Both {
            let grads = conv::Grads { dx: &mut dx, dweight: &mut dweight, dstate: None };
            conv_backward(grads, &dy, None, &input, dims, &scratch)?;
        }
        Ok(())
    })
}

/// Rotary embedding of a quarter of each head, in place.
pub fn rotary(tokens: usize, heads: usize, width: usize) -> anyhow::Result<Work> {
    let rotary = Rotary::new(Frequencies::Plain { dims: width / 4 }, 1e7, Layout::HalfSplit)?;
    let table = rotary.table(&(0..tokens as u32).collect::<Vec<u32>>());
    let mut x = values(tokens * heads * width, 1);
    Ok(Box::new(move || Ok(rotary_forward(&mut x, &table, Heads { heads, width, offset: 0 })?)))
}

/// SwiGLU on `n` elements.
pub fn glu(n: usize, pass: Pass) -> Work {
    let (gate, up, dh) = (values(n, 1), values(n, 2), values(n, 3));
    let (mut h, mut dgate, mut dup) = (zeros::<f32>(n), zeros::<f32>(n), zeros::<f32>(n));
    Box::new(move || {
        glu_forward(&mut h, &gate, &up, Activation::Silu)?;
        if pass == Pass::Both {
            glu_backward(&mut dgate, &mut dup, &dh, &gate, &up, Activation::Silu)?;
        }
        Ok(())
    })
}

/// Routing and experts.
pub fn experts(tokens: usize, dims: moe::Dims, pass: Pass) -> anyhow::Result<Work> {
    let len = dims.experts * dims.hidden * dims.intermediate;
    let (x, dy) = (values(tokens * dims.hidden, 1), values(tokens * dims.hidden, 2));
    let (gate_up, down) = (values(2 * len, 3), values(len, 4));
    let logits = values(tokens * dims.experts, 5);
    let scratch = Scratch::new(moe::experts_scratch(dims, tokens));
    let (mut y, mut dx) = (zeros::<f32>(x.len()), zeros::<f32>(x.len()));
    let (mut dgate_up, mut ddown) = (zeros(2 * len), zeros(len));
    let mut dweights = zeros(tokens * dims.top_k);
    let (mut saved, mut workspace) = (moe::Saved::default(), Vec::new());
    Ok(Box::new(move || {
        let weights = moe::Experts { gate_up: &gate_up, down: &down, activation: Activation::Silu };
        let routing = route_forward(&logits, None, &moe::Router::Softmax { normalize: true }, dims)?;
        let dispatch = moe::Dispatch::new(&routing, dims)?;
        let len = moe::experts_forward_workspace::<f32>(&dispatch, dims, pass == Pass::Both);
        workspace.resize(len.max(moe::experts_backward_workspace(&dispatch, dims)), 0.0);
        let keep = (pass == Pass::Both).then_some(&mut saved);
        experts_forward(&mut y, keep, &x, &routing, &dispatch, &weights, dims, &mut workspace, &scratch)?;
        if pass == Pass::Both {
            let grads = moe::ExpertsGrads {
                dx: &mut dx,
                dweights: &mut dweights,
                dgate_up: &mut dgate_up,
                ddown: &mut ddown,
            };
            experts_backward(
                grads,
                &dy,
                &x,
                &saved,
                &routing,
                &dispatch,
                &weights,
                dims,
                &mut workspace,
                &scratch,
            )?;
        }
        Ok(())
    }))
}

/// One AdamW step on `n` parameters.
pub fn adamw(n: usize) -> Work {
    let (mut w, g) = (values(n, 1), values(n, 2));
    let (mut m, mut v) = (zeros::<f32>(n), zeros::<f32>(n));
    let (options, mut step) = (adamw::Options::default(), 0);
    Box::new(move || {
        step += 1;
        Ok(adamw_step(&mut w, &mut m, &mut v, &g, 1.0, step, &options)?)
    })
}
