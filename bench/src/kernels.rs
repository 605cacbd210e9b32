//! Times one kernel and prints a line of JSON. `bench/peers/kernels.py` runs it next to other frameworks.
//!
//! ```text
//! cargo run --release -p ballast-bench --bin bench-kernels -- gdn --tokens 2048 --backward
//! ```

#![forbid(unsafe_code)]

use ballast_bench::cases::{self, Pass, Product, Work};
use ballast_bench::measure::measure;
use ballast_kernels::{Rounding, attention, gated_delta_rule, linear, linear_cross_entropy};
use clap::{Parser, Subcommand, ValueEnum};
use half::bf16;

#[derive(Parser)]
struct Args {
    #[command(subcommand)]
    case: Case,
    /// Number of repetitions; the median is reported
    #[arg(long, default_value_t = 7, global = true)]
    repetitions: usize,
    /// Number of threads
    #[arg(long, default_value_t = 2, global = true)]
    threads: usize,
}

#[derive(Subcommand)]
enum Case {
    /// Square matrix product on every thread at once: peak throughput of the machine
    Peak {
        #[arg(long, default_value_t = 512)]
        size: usize,
    },
    /// Gated delta rule on one sequence, with as many key heads as value heads
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
        /// Run forward and backward instead of forward alone
        #[arg(long)]
        backward: bool,
    },
    /// Causal attention on one sequence
    Attention {
        #[arg(long, default_value_t = 2048)]
        tokens: usize,
        #[arg(long, default_value_t = 8)]
        heads: usize,
        #[arg(long, default_value_t = 2)]
        kv_heads: usize,
        #[arg(long, default_value_t = 256)]
        dim: usize,
        #[arg(long, default_value = "f32")]
        storage: Storage,
        /// Run forward and backward instead of forward alone
        #[arg(long)]
        backward: bool,
        /// Round to bf16 what backward multiplies, as the preset `bf16` does
        #[arg(long)]
        rounded: bool,
    },
    /// One product of a linear layer; with one token, the matrix-vector product
    Linear {
        #[arg(long, default_value_t = 1024)]
        tokens: usize,
        #[arg(long, default_value_t = 1024)]
        inputs: usize,
        #[arg(long, default_value_t = 3584)]
        outputs: usize,
        #[arg(long, default_value = "forward")]
        product: Product,
        /// Storage type of activations
        #[arg(long, default_value = "f32")]
        storage: Storage,
        /// Storage type of the weight
        #[arg(long, default_value = "f32")]
        weights: Storage,
    },
    /// Output projection and cross entropy: the loss and both gradients
    LinearCrossEntropy {
        #[arg(long, default_value_t = 2048)]
        tokens: usize,
        #[arg(long, default_value_t = 1024)]
        hidden: usize,
        #[arg(long, default_value_t = 32768)]
        vocabulary: usize,
        #[arg(long, default_value = "f32")]
        storage: Storage,
        /// Tokens per slice of logits [default: that of the kernel]
        #[arg(long)]
        slice: Option<usize>,
        /// Round the gradient of the logits to bf16
        #[arg(long)]
        rounded: bool,
    },
}

fn rounding(rounded: bool) -> Rounding {
    if rounded { Rounding::Bf16 } else { Rounding::F32 }
}

#[derive(Clone, Copy, ValueEnum)]
enum Storage {
    F32,
    Bf16,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    rayon::ThreadPoolBuilder::new().num_threads(args.threads).build_global()?;
    let (mut work, flops) = prepare(&args.case, args.threads);
    let measured = measure(args.repetitions, &mut work)?;
    let gflops = flops / measured.seconds / 1e9;
    println!(
        "{}",
        serde_json::json!({ "seconds": measured.seconds, "gflops": gflops, "bytes": measured.bytes })
    );
    Ok(())
}

/// Work of a case, and its usual count of floating-point operations.
fn prepare(case: &Case, threads: usize) -> (Work, f64) {
    let pass = |backward: bool| if backward { Pass::Both } else { Pass::Forward };
    match *case {
        Case::Peak { size } => {
            let flops = 2.0 * (size * size * size * threads * cases::PEAK_PRODUCTS) as f64;
            (cases::peak(size, threads), flops)
        }
        Case::Gdn { tokens, heads, dim, chunk, states_every, storage, backward } => {
            let dims =
                gated_delta_rule::Dims { key_heads: heads, value_heads: heads, key_dim: dim, value_dim: dim };
            let options = gated_delta_rule::Options { chunk, states_every, ..Default::default() };
            let make = match storage {
                Storage::F32 => cases::gated_delta_rule::<f32>,
                Storage::Bf16 => cases::gated_delta_rule::<bf16>,
            };
            // Forward, by the usual formula: 2 (5 C d + 3 d^2) per token and head.
            let flops = 2.0 * (5 * chunk * dim + 3 * dim * dim) as f64 * (tokens * heads) as f64;
            (make(tokens, dims, options, pass(backward)), flops)
        }
        Case::Attention { tokens, heads, kv_heads, dim, storage, backward, rounded } => {
            let dims = attention::Dims { heads, kv_heads, head_dim: dim, value_dim: dim };
            let make = match storage {
                Storage::F32 => cases::attention::<f32>,
                Storage::Bf16 => cases::attention::<bf16>,
            };
            // Two products over the keys that a query sees, half of all keys on average; backward has five.
            let products = if backward { 7.0 } else { 2.0 };
            let flops = products * (tokens * tokens * heads * dim) as f64;
            let options = attention::Options { gradient: rounding(rounded), ..attention::Options::default() };
            (make(tokens, dims, options, pass(backward)), flops)
        }
        Case::Linear { tokens, inputs, outputs, product, storage, weights } => {
            let make = match (storage, weights) {
                (Storage::F32, Storage::F32) => cases::linear::<f32, f32>,
                (Storage::F32, Storage::Bf16) => cases::linear::<f32, bf16>,
                (Storage::Bf16, Storage::F32) => cases::linear::<bf16, f32>,
                (Storage::Bf16, Storage::Bf16) => cases::linear::<bf16, bf16>,
            };
            let flops = 2.0 * (tokens * inputs * outputs) as f64;
            (make(tokens, linear::Dims { inputs, outputs }, product), flops)
        }
        Case::LinearCrossEntropy { tokens, hidden, vocabulary, storage, slice, rounded } => {
            let usual = linear_cross_entropy::Options::default();
            let options = linear_cross_entropy::Options {
                slice: slice.unwrap_or(usual.slice),
                gradient: rounding(rounded),
                ..usual
            };
            let make = match storage {
                Storage::F32 => cases::cross_entropy::<f32>,
                Storage::Bf16 => cases::cross_entropy::<bf16>,
            };
            let flops = 6.0 * (tokens * hidden * vocabulary) as f64;
            (make(tokens, linear::Dims { inputs: hidden, outputs: vocabulary }, options), flops)
        }
    }
}
