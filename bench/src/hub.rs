//! Benchmark of `ballast audit hf://...` on a model with the shapes of Qwen3.5-27B, served on the loopback.
//!
//! ```text
//! cargo build --release && cargo run --release -p ballast-bench --bin bench-hub
//! ```
//!
//! The files have holes in place of most values, so 51 GB take a few megabytes of disk. As in the release, A_log
//! and the output norm are F32 and lie together, and dt_bias is BF16 and lies among the matrices. The hub redirects every shard to a second host, as the public one does. `--latency` adds a delay to
//! every answer, for the round trip of a network.

#![forbid(unsafe_code)]
#![allow(missing_docs)] // the server of the tests

#[path = "../../crates/checkpoint/tests/common/server.rs"]
mod server;

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use ballast_checkpoint::synthetic::SyntheticModel;
use ballast_contract::Dtype;
use clap::Parser;
use server::{FakeHub, name_etag};

#[derive(Parser)]
struct Args {
    /// Number of rounds; the median is reported
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Number of decoder layers; 64 are the 27B model
    #[arg(long, default_value_t = 64)]
    layers: u64,
    /// Also measure `audit --full`
    #[arg(long)]
    full: bool,
    /// Delay of every answer, in milliseconds
    #[arg(long, default_value_t = 0)]
    latency: u64,
    /// Binary to measure
    #[arg(long, default_value = "target/release/ballast")]
    ballast: PathBuf,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let ballast = args.ballast.canonicalize().context("build the binary first: cargo build --release")?;
    let folder = tempfile::tempdir()?;
    let model = folder.path().join("model");
    let shapes = SyntheticModel {
        layers: args.layers,
        hidden_size: 5120,
        intermediate_size: 17408,
        vocab_size: 248_320,
        heads: 24,
        kv_heads: 4,
        head_dim: 256,
        linear_key_heads: 16,
        linear_value_heads: 48,
        linear_head_dim: 128,
        dtype: Dtype::Bf16,
        seed: 1,
    };
    shapes.write_sparse(&model, 5_000_000_000)?;
    let mut size = 0;
    for entry in std::fs::read_dir(&model)? {
        size += entry?.metadata()?.len();
    }
    let hub = FakeHub::start(&model, name_etag);
    let latency = Duration::from_millis(args.latency);
    hub.set_delay(latency);
    println!("model: {:.1} GB, latency {} ms", size as f64 / 1e9, args.latency);
    let mut commands = vec![&["inspect"][..], &["audit"]];
    if args.full {
        commands.push(&["audit", "--full"]);
    }
    for command in commands {
        let mut times = Vec::new();
        let mut last = serde_json::Value::Null;
        for _ in 0..args.rounds {
            let begun = Instant::now();
            let output = Command::new(&ballast)
                .args(command)
                .args(["hf://org/model", "--json"])
                .env("HF_ENDPOINT", hub.endpoint())
                .env("HF_HOME", folder.path())
                .env("NO_PROXY", "127.0.0.1,localhost")
                .output()?;
            times.push(begun.elapsed());
            // The audit fails as that of the release does: dt_bias is not F32.
            let expected = if command[0] == "audit" { 1 } else { 0 };
            let errors = String::from_utf8_lossy(&output.stderr);
            ensure!(output.status.code() == Some(expected), "{errors}");
            last = serde_json::from_slice(&output.stdout)?;
        }
        times.sort();
        let (bytes, requests) = (&last["remote"]["bytes"], &last["remote"]["requests"]);
        let bytes = bytes.as_u64().context("no number of bytes")?;
        println!(
            "{:13} {:.2} MB in {requests} requests, {:.3} s (median of {})",
            command.join(" "),
            bytes as f64 / 1e6,
            times[times.len() / 2].as_secs_f64(),
            args.rounds
        );
    }
    Ok(())
}
