//! `ballast oracle`: the kernels as a reference for kernels elsewhere.

mod attention;
mod gdn;
mod indexer;

use std::path::PathBuf;

use ballast_checkpoint::tensor_file::{Array, TensorFile, write_f32};
use ballast_kernels::Precision;
use clap::{Args, Subcommand, ValueEnum};
use serde::Serialize;

use super::Global;
use crate::exit::Outcome;
use crate::output::{self, clean, count, table};

#[derive(Args)]
pub(crate) struct OracleArgs {
    #[command(subcommand)]
    operation: Operation,
}

#[derive(Subcommand)]
enum Operation {
    /// The gated delta rule. IN holds q, k [B, T, Hk, dk] (raw), v [B, T, Hv, dv], g, beta [B, T, Hv], and optionally
    /// h0 [N, Hv, dk, dv], cu_seqlens `[N+1]`, do, dht; metadata `scale` and `l2norm`.
    Gdn(gdn::GdnArgs),
    /// Softmax attention, causal. IN holds q [B, T, heads, hd], k [B, T, kv, hd], v [B, T, kv, vd], and optionally sinks `[heads]`,
    /// cu_seqlens `[N+1]`, do; metadata `scale`, `window`, `cap`.
    Attention(attention::AttentionArgs),
    /// The sparse indexer: scores and choice of keys. IN holds q [B, T, heads, d], k [B, T, d], w [B, T, heads], and optionally
    /// cu_seqlens `[N+1]`; metadata `topk`.
    Indexer(indexer::IndexerArgs),
}

pub(crate) fn run(args: OracleArgs, global: &Global) -> anyhow::Result<Outcome> {
    match args.operation {
        Operation::Gdn(args) => gdn::run(args, global),
        Operation::Attention(args) => attention::run(args, global),
        Operation::Indexer(args) => indexer::run(args, global),
    }
}

/// What every operation takes.
#[derive(Args)]
struct Common {
    /// The inputs; expected results in it are compared with.
    #[arg(value_name = "IN.safetensors")]
    input: PathBuf,
    /// Write the results here.
    #[arg(long, value_name = "OUT.safetensors")]
    out: Option<PathBuf>,
    /// Largest RMS(a-b)/(RMS(b)+1e-8) of a result that still passes [default: 1e-4 in f32, 0.02 in bf16].
    #[arg(long, value_name = "X")]
    tolerance: Option<f64>,
    /// What tensors are stored in; arithmetic is f32 either way.
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

impl From<Site> for Precision {
    fn from(site: Site) -> Precision {
        match site {
            Site::F32 => Precision::F32,
            Site::Bf16 => Precision::Bf16,
            Site::F16 => Precision::F16,
        }
    }
}

/// Where the sequences of a [B, T] batch begin and end: by `cu_seqlens`, else one per row.
fn sequences(file: &TensorFile, b: usize, t: usize) -> anyhow::Result<Vec<usize>> {
    if !file.has("cu_seqlens") {
        return Ok((0..=b).map(|i| i * t).collect());
    }
    let offsets = file.integers("cu_seqlens")?.values;
    let tokens = (b * t) as i64;
    if b != 1 || offsets.first() != Some(&0) || offsets.last() != Some(&tokens) || !offsets.is_sorted() {
        let problem = format!(
            "offsets from 0 to {tokens} that never fall were expected with B = 1, found {offsets:?} with B = {b}"
        );
        return Err(file.error("cu_seqlens", problem).into());
    }
    Ok(offsets.iter().map(|x| *x as usize).collect())
}

/// A number in the file's metadata.
fn metadata_number<T: std::str::FromStr>(file: &TensorFile, key: &str) -> anyhow::Result<Option<T>> {
    let parse = |text: &str| {
        text.parse().map_err(|_| file.error("q", format!("metadata `{key}` is {text:?}, not a number")))
    };
    Ok(file.metadata(key).map(parse).transpose()?)
}

/// The tensor `name`, of exactly this shape.
fn expect(file: &TensorFile, name: &str, shape: &[usize]) -> anyhow::Result<Array<f32>> {
    let array = file.f32(name)?;
    expect_shape(file, name, &array, shape)?;
    Ok(array)
}

/// The same, for a tensor that need not be there.
fn optional(file: &TensorFile, name: &str, shape: &[usize]) -> anyhow::Result<Option<Array<f32>>> {
    if file.has(name) { expect(file, name, shape).map(Some) } else { Ok(None) }
}

/// One result, and how it compares with what the file expects.
#[derive(Serialize)]
struct Row {
    tensor: &'static str,
    shape: Vec<usize>,
    /// RMS(a-b) / (RMS(b) + 1e-8)
    ratio: Option<f64>,
    max_abs: Option<f64>,
    passed: Option<bool>,
}

/// Compares results with what `file` expects, writes and prints them.
fn finish(
    common: &Common,
    file: &TensorFile,
    results: Results,
    notes: serde_json::Value,
    global: &Global,
) -> anyhow::Result<Outcome> {
    let tolerance = common.tolerance.unwrap_or(if common.storage == Storage::F32 { 1e-4 } else { 0.02 });
    let mut rows = Vec::new();
    for (name, result) in &results {
        let mut row =
            Row { tensor: name, shape: result.shape.clone(), ratio: None, max_abs: None, passed: None };
        if file.has(name) {
            let expected = file.f32(name)?;
            expect_shape(file, name, &expected, &result.shape)?;
            let (ratio, max_abs) = compare(&result.values, &expected.values);
            (row.ratio, row.max_abs, row.passed) = (Some(ratio), Some(max_abs), Some(ratio <= tolerance));
        }
        rows.push(row);
    }
    if let Some(out) = &common.out {
        let tensors: Vec<(&str, &Array<f32>)> = results.iter().map(|(name, array)| (*name, array)).collect();
        write_f32(out, &tensors, &[], common.force)?;
    }
    let failed = rows.iter().filter(|r| r.passed == Some(false)).count();
    let compared = rows.iter().filter(|r| r.passed.is_some()).count();
    if global.json {
        let document = serde_json::json!({
            "tolerance": tolerance, "passed": failed == 0, "compared": compared, "results": rows, "notes": notes,
        });
        output::print_json("oracle", &document);
    } else {
        let mut shown = table(&["result", "shape", ">ratio", ">max abs", "verdict"]);
        for r in &rows {
            let number = |x: Option<f64>| x.map(|x| format!("{x:.2e}")).unwrap_or_default();
            let verdict = match r.passed {
                Some(true) => "ok",
                Some(false) => "OFF",
                None => "not in the file",
            };
            let shape = format!("{:?}", r.shape);
            shown.add_row([clean(r.tensor), shape, number(r.ratio), number(r.max_abs), verdict.into()]);
        }
        output::print(&format!("{shown}\n"));
        output::print(&match (compared, failed) {
            (0, _) => "nothing to compare with in the file\n".to_string(),
            (_, 0) => format!("PASSED: {} compared, all within {tolerance:e}\n", count(compared as u64)),
            _ => format!("FAILED: {failed} of {compared} results are off by more than {tolerance:e}\n"),
        });
    }
    Ok(if failed == 0 { Outcome::Ok } else { Outcome::CheckFailed })
}

/// RMS(a-b) / (RMS(b) + 1e-8) and max |a-b|; a NaN on one side only is infinitely far.
fn compare(a: &[f32], b: &[f32]) -> (f64, f64) {
    let n = (a.len() as f64).max(1.0);
    let (mut squares, mut size, mut max_abs) = (0f64, 0f64, 0f64);
    for (a, b) in a.iter().zip(b) {
        let difference = (*a as f64 - *b as f64).abs();
        let same = a == b || a.is_nan() && b.is_nan();
        let difference = if same {
            0.0
        } else if difference.is_nan() {
            f64::INFINITY
        } else {
            difference
        };
        squares += difference * difference;
        size += (*b as f64) * (*b as f64);
        max_abs = max_abs.max(difference);
    }
    ((squares / n).sqrt() / ((size / n).sqrt() + 1e-8), max_abs)
}

/// An error that says which tensor, what was expected, what was found.
fn expect_shape(file: &TensorFile, name: &str, array: &Array<f32>, expected: &[usize]) -> anyhow::Result<()> {
    if array.shape == expected {
        return Ok(());
    }
    Err(file.error(name, format!("shape {expected:?} was expected, found {:?}", array.shape)).into())
}
