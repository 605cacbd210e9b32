//! Times whole models and prints a line of JSON. `bench/peers/models.py` runs it next to other frameworks.
//!
//! ```text
//! cargo run --release -p ballast-bench --bin bench-model -- step MODEL --tokens 1024 --precision bf16
//! cargo run --release -p ballast-bench --bin bench-model -- step MODEL --tokens 1024 --precision bf16 --update
//! cargo run --release -p ballast-bench --bin bench-model -- decode MODEL --tokens 64
//! ```

#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::time::Instant;

use ballast_bench::measure::median;
use ballast_model::{Batch, LossOptions, Model, Plan, Precision, Recompute, Step, memory};
use ballast_train::config::{MomentStorage, OptimizerConfig};
use ballast_train::optimizer::Optimizer;
use clap::{Parser, Subcommand, ValueEnum};
use rayon::prelude::*;

#[derive(Parser)]
struct Args {
    #[command(subcommand)]
    case: Case,
    /// Number of threads
    #[arg(long, default_value_t = 2, global = true)]
    threads: usize,
    /// Number of timed runs; with 0 a step is only planned
    #[arg(long, default_value_t = 5, global = true)]
    repetitions: usize,
    /// Precision preset: f32, bf16, ...
    #[arg(long, default_value = "f32", global = true)]
    precision: String,
}

#[derive(Subcommand)]
enum Case {
    /// Loss and all gradients of one sequence
    Step {
        /// Checkpoint, or config.json for random weights
        model: PathBuf,
        #[arg(long, default_value_t = 1024)]
        tokens: usize,
        #[arg(long, default_value = "none")]
        recompute: Made,
        /// Time a whole training step, with clipping and AdamW with f32 master weights
        #[arg(long)]
        update: bool,
        /// Storage of the moments of weights, with --update
        #[arg(long, default_value = "f32")]
        moments: Moments,
        /// Train adapters of this rank on all linear layers instead of the weights
        #[arg(long)]
        lora: Option<usize>,
    },
    /// Decode tokens one by one, and report the memory bandwidth
    Decode {
        model: PathBuf,
        #[arg(long, default_value_t = 64)]
        tokens: usize,
    },
}

#[derive(Clone, Copy, ValueEnum)]
enum Moments {
    F32,
    Bf16,
    #[value(name = "8bit")]
    Bits8,
}

#[derive(Clone, Copy, ValueEnum)]
enum Made {
    None,
    Selective,
    Full,
}

fn main() -> anyhow::Result<()> {
    memory::keep_freed();
    let args = Args::parse();
    rayon::ThreadPoolBuilder::new().num_threads(args.threads).build_global()?;
    let before = memory::peak().unwrap_or(0);
    let load = |path: &PathBuf| Model::load(path, |config| Precision::preset(&args.precision, config));
    let load_f32 = |path: &PathBuf| -> anyhow::Result<Model> {
        if path.extension().is_some_and(|e| e == "json") {
            let config = serde_json::from_str(&std::fs::read_to_string(path)?)?;
            return Ok(Model::init(&config, |_| Ok(Precision::f32()), 1)?);
        }
        Ok(Model::load(path, |_| Ok(Precision::f32()))?)
    };
    let report = match &args.case {
        Case::Step { model, tokens, recompute, update, moments, lora } => {
            // Master weights start with all bits; without them the weights are loaded in their storage type.
            let is_config = model.extension().is_some_and(|e| e == "json");
            let wide = *update && lora.is_none() || is_config;
            let mut model = if wide { load_f32(model)? } else { load(model)? };
            let precision = Precision::preset(&args.precision, &model.config)?;
            if let Some(rank) = lora {
                let mut targets = model.adapter_targets();
                targets.retain(|name| !name.ends_with("lm_head"));
                let wanted = |name: &str| targets.iter().any(|target| target == name);
                model.add_adapters(&wanted, *rank, 2.0 * *rank as f32, 1)?;
            }
            let learned = model.grads_of(|_| lora.is_none());
            let moments = match moments {
                Moments::F32 => MomentStorage::F32,
                Moments::Bf16 => MomentStorage::Bf16,
                Moments::Bits8 => MomentStorage::Bits8,
            };
            let settings = OptimizerConfig { moments, ..OptimizerConfig::default() };
            let mut optimizer = update.then(|| Optimizer::new(&model, &learned, &settings, &precision));
            drop(learned);
            model.set_precision(precision);
            memory::release_freed();
            let recompute = match recompute {
                Made::None => Recompute::None,
                Made::Selective => Recompute::Selective,
                Made::Full => Recompute::Full,
            };
            let ids = (0..*tokens).map(|t| (t * 7919 % model.config.vocabulary) as u32).collect();
            let batch = Batch::packed(ids, vec![0, *tokens])?;
            let mut grads = model.grads_of(|_| lora.is_none());
            let options = LossOptions::default();
            let mut loss = 0.0;
            let mut step = || {
                grads.clear();
                loss = model.forward_backward(&mut grads, &batch, &options, recompute, None)?.language.sum;
                if let Some(optimizer) = &mut optimizer {
                    let norm = optimizer.norms(&grads).global;
                    optimizer.step(&mut model, &grads, norm, 1e-6)?;
                }
                Ok(())
            };
            let seconds = if args.repetitions == 0 { 0.0 } else { median(args.repetitions, &mut step)? };
            let plan = Plan::new(&model.config, model.precision(), &Step::new(&batch.cu_seqlens, recompute))?;
            let kept = optimizer.as_ref().map_or(0, |o| o.master_bytes() + o.state_bytes());
            serde_json::json!({
                "seconds": seconds,
                "loss": loss / batch.counted() as f64,
                "memory": memory::peak().unwrap_or(0) - before,
                "plan": plan,
                "planned": plan.total() + kept,
            })
        }
        Case::Decode { model, tokens } => {
            let model = load(model)?;
            let mut session = model.session(1);
            let mut logits = session.advance(&[&[1, 2, 3]])?;
            let bandwidth = bandwidth(args.threads);
            let mut times = Vec::new();
            for _ in 0..args.repetitions {
                let begin = Instant::now();
                for _ in 0..*tokens {
                    let best = (0..logits[0].len()).max_by(|a, b| logits[0][*a].total_cmp(&logits[0][*b]));
                    logits = session.advance(&[&[best.unwrap_or(0) as u32]])?;
                }
                times.push(begin.elapsed().as_secs_f64() / *tokens as f64);
            }
            times.sort_by(f64::total_cmp);
            let seconds = times[times.len() / 2];
            // A tied embedding is read once, as the head; an untied one by one row.
            let bytes = model.params.bytes();
            let limit = bytes as f64 / bandwidth;
            serde_json::json!({
                "seconds": seconds, "tokens_per_second": 1.0 / seconds, "bytes": bytes, "bandwidth": bandwidth,
                "limit_seconds": limit, "share_of_limit": limit / seconds,
            })
        }
    };
    println!("{report}");
    Ok(())
}

/// Memory bandwidth: bytes per second that all threads together read from uncached memory.
fn bandwidth(threads: usize) -> f64 {
    let words = vec![1u64; (512 << 20) / 8];
    let mut best = f64::MAX;
    for _ in 0..5 {
        let begin = Instant::now();
        let sum: u64 = words
            .par_chunks(words.len() / (threads * 16))
            .map(|part| part.iter().fold(0u64, |a, b| a.wrapping_add(*b)))
            .reduce(|| 0, u64::wrapping_add);
        assert!(sum >= words.len() as u64);
        best = best.min(begin.elapsed().as_secs_f64());
    }
    (words.len() * 8) as f64 / best
}
