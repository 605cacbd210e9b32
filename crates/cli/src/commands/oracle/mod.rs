//! `ballast oracle`: the kernels as a reference for kernels elsewhere.

mod attention;
mod gdn;
mod indexer;

use std::path::PathBuf;

use ballast_checkpoint::tensor_file::{Array, Named, TensorFile, write_f32};
use ballast_kernels::Rounding;
use ballast_model::{Error, memory};
use clap::{Args, Subcommand, ValueEnum};

use super::{Global, sequences};
use crate::compare::Comparison;
use crate::exit::Outcome;

/// Run one kernel on given inputs and compare with expected results.
#[derive(Args)]
pub(crate) struct OracleArgs {
    #[command(subcommand)]
    operation: Operation,
}

#[derive(Subcommand)]
enum Operation {
    /// Run the gated delta rule. IN holds q, k [B, T, Hk, dk] (raw), v [B, T, Hv, dv], g, beta [B, T, Hv],
    /// and optionally h0 [N, Hv, dk, dv], cu_seqlens `[N+1]`, do, dht; metadata `scale` and `l2norm`.
    Gdn(gdn::GdnArgs),
    /// Run causal softmax attention. IN holds q [B, T, heads, hd], k [B, T, kv, hd], v [B, T, kv, vd], and
    /// optionally sinks `[heads]`, cu_seqlens `[N+1]`, do; metadata `scale`, `window`, `cap`.
    Attention(attention::AttentionArgs),
    /// Run the sparse indexer: scores and selected keys. IN holds q [B, T, heads, d], k [B, T, d], w [B, T,
    /// heads], and optionally cu_seqlens `[N+1]`; metadata `topk`.
    Indexer(indexer::IndexerArgs),
}

pub(crate) fn run(args: OracleArgs, global: &Global) -> anyhow::Result<Outcome> {
    match args.operation {
        Operation::Gdn(args) => gdn::run(args, global),
        Operation::Attention(args) => attention::run(args, global),
        Operation::Indexer(args) => indexer::run(args, global),
    }
}

/// Options of every operation.
#[derive(Args)]
struct Common {
    /// Input tensors, and the expected results to compare with.
    #[arg(value_name = "IN.safetensors")]
    input: PathBuf,
    /// Output file for the results.
    #[arg(long, value_name = "OUT.safetensors")]
    out: Option<PathBuf>,
    /// Largest RMS(a-b)/(RMS(b)+1e-8) that passes [default: 1e-4 in f32, 0.02 in bf16].
    #[arg(long, value_name = "X")]
    tolerance: Option<f64>,
    /// Storage type of tensors; arithmetic is f32 either way.
    #[arg(long, default_value = "f32")]
    storage: Storage,
    /// Replace an existing output file.
    #[arg(long)]
    force: bool,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Storage {
    F32,
    Bf16,
}

/// The results of an operation, by name.
type Results = Vec<(&'static str, Array<f32>)>;

/// The dtype of a site.
#[derive(Clone, Copy, ValueEnum)]
enum Site {
    F32,
    Bf16,
    F16,
}

impl From<Site> for Rounding {
    fn from(site: Site) -> Rounding {
        match site {
            Site::F32 => Rounding::F32,
            Site::Bf16 => Rounding::Bf16,
            Site::F16 => Rounding::F16,
        }
    }
}

/// Returns a number from the file's metadata.
fn metadata_number<T: std::str::FromStr>(file: &TensorFile, key: &str) -> anyhow::Result<Option<T>> {
    let parse = |text: &str| {
        text.parse().map_err(|_| file.error("q", format!("metadata `{key}` is {text:?}, not a number")))
    };
    Ok(file.metadata(key).map(parse).transpose()?)
}

/// Reads the tensor `name`, which must have this shape.
fn expect(file: &TensorFile, name: &str, shape: &[usize]) -> anyhow::Result<Array<f32>> {
    let array = file.f32(name)?;
    expect_shape(file, name, &array, shape)?;
    Ok(array)
}

/// Reads an optional tensor, which must have this shape.
fn optional(file: &TensorFile, name: &str, shape: &[usize]) -> anyhow::Result<Option<Array<f32>>> {
    if file.has(name) { expect(file, name, shape).map(Some) } else { Ok(None) }
}

/// Rejects a dimension of 0. Without one, every size of an input is bounded by the bytes of the file.
fn check_nonzero(file: &TensorFile, name: &str, array: &Array<f32>) -> anyhow::Result<()> {
    if array.shape.contains(&0) {
        let problem = format!("dimensions must be at least 1, got {:?}", array.shape);
        return Err(file.error(name, problem).into());
    }
    Ok(())
}

/// Rejects tensors of these shapes, 4 bytes per element, if they do not fit in memory.
fn check_memory(shapes: &[&[usize]]) -> anyhow::Result<()> {
    let bytes = |shape: &&[usize]| shape.iter().fold(4u64, |bytes, n| bytes.saturating_mul(*n as u64));
    let needed = shapes.iter().map(bytes).fold(0u64, u64::saturating_add);
    Ok(memory::check("the results of this input", needed)?)
}

/// Compares results with those of `file`, writes and prints them.
fn finish(
    common: &Common,
    file: &TensorFile,
    results: Results,
    notes: serde_json::Value,
    global: &Global,
) -> anyhow::Result<Outcome> {
    let tolerance = common.tolerance.unwrap_or(if common.storage == Storage::F32 { 1e-4 } else { 0.02 });
    let mut comparison = Comparison::new(tolerance);
    for (name, result) in &results {
        let expected = optional(file, name, &result.shape)?;
        comparison.add(name, result, expected.as_ref());
    }
    let not_finite = comparison.non_finite().map(String::from);
    if let Some(out) = &common.out {
        let named = results.iter().map(|(name, array)| (*name, &array.shape[..], &array.values[..]));
        let tensors: Vec<Named<'_>> = named.collect();
        write_f32(out, &tensors, &[], common.force)?;
    }
    match not_finite {
        Some(name) => Err(Error::NotFinite(name).into()),
        None => Ok(comparison.report("oracle", notes, global)),
    }
}

/// Rejects a tensor of another shape.
fn expect_shape(file: &TensorFile, name: &str, array: &Array<f32>, expected: &[usize]) -> anyhow::Result<()> {
    if array.shape == expected {
        return Ok(());
    }
    Err(file.error(name, format!("shape must be {expected:?}, got {:?}", array.shape)).into())
}
