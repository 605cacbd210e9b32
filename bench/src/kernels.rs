//! Times one kernel case and prints a line of JSON: what `bench/peers/kernels.py` runs beside its peers.
//!
//! ```text
//! cargo run --release -p ballast-bench --bin bench-kernels -- gdn --tokens 2048 --backward
//! ```

use std::time::Instant;

use ballast_kernels::gated_delta_rule::{
    Dims, GateGrads, Gates, Grads, Input, L2Norm, Options, Output, Saved, backward_scratch, forward_scratch,
    gated_delta_rule_backward, gated_delta_rule_forward,
};
use ballast_kernels::matmul::{Mat, matmul};
use ballast_kernels::{Element, Scratch};
use clap::{Parser, Subcommand, ValueEnum};
use half::bf16;
use rayon::prelude::*;

#[derive(Parser)]
struct Args {
    #[command(subcommand)]
    case: Case,
    /// Repetitions; the median counts.
    #[arg(long, default_value_t = 7, global = true)]
    repetitions: usize,
    /// Threads.
    #[arg(long, default_value_t = 2, global = true)]
    threads: usize,
}

#[derive(Subcommand)]
enum Case {
    /// A square matrix product on every thread at once: what the machine can do.
    Peak {
        #[arg(long, default_value_t = 512)]
        size: usize,
    },
    /// The gated delta rule, one sequence, as many key as value heads.
    Gdn {
        #[arg(long, default_value_t = 2048)]
        tokens: usize,
        #[arg(long, default_value_t = 16)]
        heads: usize,
        #[arg(long, default_value_t = 128)]
        dim: usize,
        #[arg(long, default_value_t = 32)]
        chunk: usize,
        #[arg(long, default_value_t = 4)]
        states_every: usize,
        #[arg(long, default_value = "f32")]
        storage: Storage,
        /// Forward and backward, instead of forward alone.
        #[arg(long)]
        backward: bool,
    },
}

#[derive(Clone, Copy, ValueEnum)]
enum Storage {
    F32,
    Bf16,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    rayon::ThreadPoolBuilder::new().num_threads(args.threads).build_global()?;
    match args.case {
        Case::Peak { size } => {
            let seconds = peak(size, args.threads, args.repetitions)?;
            report(seconds, 2.0 * (size * size * size * args.threads) as f64);
        }
        Case::Gdn { tokens, heads, dim, chunk, states_every, storage, backward } => {
            let dims = Dims { key_heads: heads, value_heads: heads, key_dim: dim, value_dim: dim };
            let options = Options { chunk, states_every, ..Options::default() };
            let run = match storage {
                Storage::F32 => gdn::<f32>,
                Storage::Bf16 => gdn::<bf16>,
            };
            // As the specification counts them, forward: 2 (5 C d + 3 d^2) a token and head.
            let flops = 2.0 * (5 * chunk * dim + 3 * dim * dim) as f64 * (tokens * heads) as f64;
            let seconds = run(tokens, dims, &options, backward, args.repetitions)?;
            report(seconds, flops);
        }
    }
    Ok(())
}

fn report(seconds: f64, flops: f64) {
    println!("{}", serde_json::json!({ "seconds": seconds, "gflops": flops / seconds / 1e9 }));
}

/// The median time of `work`, after one run that does not count.
fn median(repetitions: usize, mut work: impl FnMut() -> anyhow::Result<()>) -> anyhow::Result<f64> {
    work()?;
    let mut times = Vec::new();
    for _ in 0..repetitions.max(1) {
        let begin = Instant::now();
        work()?;
        times.push(begin.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

/// Reproducible values in (-1, 1).
fn values(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// Seconds of one product of [size, size] matrices while every thread does one.
fn peak(size: usize, threads: usize, repetitions: usize) -> anyhow::Result<f64> {
    const PRODUCTS: usize = 20;
    let (a, b) = (values(size * size, 1), values(size * size, 2));
    let mut outputs = vec![vec![0.0; size * size]; threads];
    let seconds = median(repetitions, || {
        outputs.par_iter_mut().with_max_len(1).for_each(|c| {
            for _ in 0..PRODUCTS {
                matmul(c, 1.0, Mat::dense(&a, size, size), Mat::dense(&b, size, size));
            }
        });
        Ok(())
    })?;
    Ok(seconds / PRODUCTS as f64)
}

fn gdn<T: Element>(
    tokens: usize,
    dims: Dims,
    options: &Options,
    backward: bool,
    repetitions: usize,
) -> anyhow::Result<f64> {
    let stored = |n: usize, seed| -> Vec<T> { values(n, seed).into_iter().map(T::from_f32).collect() };
    let (keys, vals, gates) = (
        tokens * dims.key_heads * dims.key_dim,
        tokens * dims.value_heads * dims.value_dim,
        tokens * dims.value_heads,
    );
    let (q, k, v, d_o) = (stored(keys, 1), stored(keys, 2), stored(vals, 3), stored(vals, 4));
    let g: Vec<f32> = values(gates, 5).into_iter().map(|x| -0.1 * x.abs()).collect();
    let beta: Vec<f32> = values(gates, 6).into_iter().map(f32::abs).collect();
    let cu_seqlens = [0, tokens];
    let input = Input {
        q: &q,
        k: &k,
        v: &v,
        gates: Gates::Given { g: &g, beta: &beta },
        h0: None,
        cu_seqlens: &cu_seqlens,
    };
    let scratch = Scratch::new(forward_scratch(dims, options).max(backward_scratch(dims, options)));
    let mut o = vec![T::default(); vals];
    let (mut dq, mut dk, mut dv) =
        (vec![T::default(); keys], vec![T::default(); keys], vec![T::default(); vals]);
    let (mut dg, mut dbeta) = (vec![0.0; gates], vec![0.0; gates]);
    let mut saved = Saved::default();
    median(repetitions, || {
        let output = Output { o: &mut o, ht: None };
        gated_delta_rule_forward(output, backward.then_some(&mut saved), &input, dims, options, &scratch)?;
        if backward {
            let grads = Grads {
                dq: &mut dq,
                dk: &mut dk,
                dv: &mut dv,
                gates: GateGrads::Given { dg: &mut dg, dbeta: &mut dbeta },
                dh0: None,
            };
            gated_delta_rule_backward(grads, &d_o, None, &input, &saved, dims, options, &scratch)?;
        }
        Ok(())
    })
}
