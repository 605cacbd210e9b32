//! Benchmark of the checkpoint commands against `cp` and `cat` on the same files, printed as ratios.
//!
//! ```text
//! cargo build --release && cargo run --release -p ballast-bench --bin bench-checkpoint
//! ```
//!
//! Creates a checkpoint of more than 4 GiB. Every round runs each command once, from a warm page cache; the
//! medians over the rounds are compared. `convert` flushes its output and reads it back, which `cp` does not,
//! so `cp` is measured alone and followed by a flush of its files. Peak memory is VmHWM of the process.

#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use ballast_checkpoint::synthetic::SyntheticModel;
use ballast_contract::Dtype;
use clap::Parser;

#[derive(Parser)]
struct Args {
    /// Number of rounds; the median is reported
    #[arg(long, default_value_t = 6)]
    rounds: usize,
    /// Number of decoder layers; 14 are about 4.4 GiB
    #[arg(long, default_value_t = 14)]
    layers: u64,
    /// Working directory; needs five times the size of the checkpoint
    #[arg(long)]
    folder: Option<PathBuf>,
    /// Checkpoint to measure with; created there and kept if it does not exist [default: a temporary one]
    #[arg(long)]
    source: Option<PathBuf>,
    /// Binary to measure
    #[arg(long, default_value = "target/release/ballast")]
    ballast: PathBuf,
}

/// A command to time.
struct Contender {
    name: &'static str,
    command: Vec<String>,
    /// Folder that it reads.
    input: PathBuf,
    /// Removed before every run.
    output: Option<PathBuf>,
    /// If true, the flush of the output is timed too.
    flush: bool,
    times: Vec<Duration>,
    peak_bytes: u64,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let ballast = args.ballast.canonicalize().context("build the binary first: cargo build --release")?;
    let folder = match &args.folder {
        Some(folder) => tempfile::tempdir_in(folder)?,
        None => tempfile::tempdir()?,
    };
    let source = args.source.unwrap_or(folder.path().join("source"));
    let model = SyntheticModel {
        layers: args.layers,
        hidden_size: 2048,
        intermediate_size: 6144,
        vocab_size: 65536,
        heads: 16,
        kv_heads: 2,
        head_dim: 256,
        linear_key_heads: 16,
        linear_value_heads: 32,
        linear_head_dim: 128,
        dtype: Dtype::F32,
        seed: 1,
    };
    if !source.exists() {
        eprintln!("creating the checkpoint");
        model.write(&source, 1_000_000_000)?;
    }
    println!("checkpoint: {:.2} GiB", size(&source)? as f64 / (1u64 << 30) as f64);

    let path = |name: &str| folder.path().join(name);
    let text = |path: &Path| path.display().to_string();
    let tool = |words: &[&str]| -> Vec<String> {
        std::iter::once(text(&ballast)).chain(words.iter().map(ToString::to_string)).collect()
    };
    let (src, copy, kept, cast) = (text(&source), path("copy"), path("kept"), path("cast"));
    // In folders of their own, as the other outputs.
    let (gguf, gguf_kept) = (path("gguf"), path("gguf_kept"));
    let file = |folder: &Path| text(&folder.join("model.gguf"));
    // The same model in other formats, made once.
    let (dist, quantized, read) = (path("torch_dist"), path("fp8"), path("read"));
    eprintln!("converting it to torch_dist and FP8");
    run(&tool(&["convert", &src, &text(&dist), "--layout", "megatron", "--format", "torch_dist", "-q"]))?;
    run(&tool(&["convert", &src, &text(&quantized), "--dtype", "fp8", "-q"]))?;
    let reading = |name, input: &PathBuf, words: &[&str], output: &PathBuf| Contender {
        name,
        command: tool(&[&["convert", &text(input), &text(output), "-q"], words].concat()),
        input: input.clone(),
        output: Some(output.clone()),
        flush: false,
        times: Vec::new(),
        peak_bytes: 0,
    };
    let contender = |name, command, output: Option<&PathBuf>, flush| Contender {
        name,
        command,
        input: source.clone(),
        output: output.cloned(),
        flush,
        times: Vec::new(),
        peak_bytes: 0,
    };
    let cat = format!("cat {src}/*.safetensors > /dev/null");
    let mut commands = [
        contender("cp", vec!["cp".into(), "-r".into(), src.clone(), text(&copy)], Some(&copy), false),
        contender("cp, flushed", vec!["cp".into(), "-r".into(), src.clone(), text(&copy)], Some(&copy), true),
        contender("convert", tool(&["convert", &src, &text(&kept), "-q"]), Some(&kept), false),
        contender(
            "convert --dtype bf16",
            tool(&["convert", &src, &text(&cast), "--dtype", "bf16", "-q"]),
            Some(&cast),
            false,
        ),
        contender(
            "convert to GGUF",
            tool(&["convert", &src, &file(&gguf_kept), "-q"]),
            Some(&gguf_kept),
            false,
        ),
        contender(
            "convert to GGUF, bf16",
            tool(&["convert", &src, &file(&gguf), "--dtype", "bf16", "-q"]),
            Some(&gguf),
            false,
        ),
        reading("convert to torch_dist", &source, &["--layout", "megatron", "--format", "torch_dist"], &read),
        reading("torch_dist to hf", &dist, &["--layout", "hf"], &read),
        reading("FP8 to bf16", &quantized, &["--dtype", "bf16"], &read),
        contender("cat", vec!["sh".into(), "-c".into(), cat], None, false),
        contender("audit", tool(&["audit", &src, "-q"]), None, false),
    ];
    // Round 0 is not counted. Every round starts with another command, because the first one after a pause
    // pays for memory and disk blocks that the machine has released.
    let places = commands.len();
    for round in 0..=args.rounds {
        for place in 0..places {
            let c = &mut commands[(place + round) % places];
            // The next command starts with the source in the page cache and nothing to write back.
            let warm = format!("sync; find {} -type f -exec cat {{}} + > /dev/null", c.input.display());
            run(&["sh".into(), "-c".into(), warm])?;
            let begin = Instant::now();
            c.peak_bytes = c.peak_bytes.max(run(&c.command)?);
            if let (true, Some(output)) = (c.flush, &c.output) {
                run(&["sh".into(), "-c".into(), format!("sync {0}/* {0}", output.display())])?;
            }
            let elapsed = begin.elapsed();
            if round > 0 {
                c.times.push(elapsed);
            }
            if let Some(output) = &c.output {
                std::fs::remove_dir_all(output)?;
            }
            eprintln!("round {round}/{}: {} {:.2} s", args.rounds, c.name, elapsed.as_secs_f64());
        }
    }
    let median = |name: &str| {
        let c = commands.iter().find(|c| c.name == name).expect("named above");
        let mut times = c.times.clone();
        times.sort();
        times[times.len() / 2].as_secs_f64()
    };
    // Bytes read per second.
    let rate = |name: &str| -> anyhow::Result<f64> {
        let c = commands.iter().find(|c| c.name == name).expect("named above");
        Ok(size(&c.input)? as f64 / median(name))
    };
    println!("{:22} {:>9} {:>9} {:>12}", "median", "seconds", "GiB/s", "peak memory");
    for c in &commands {
        let seconds = median(c.name);
        println!(
            "{:22} {seconds:9.2} {:9.2} {:8.1} MiB",
            c.name,
            rate(c.name)? / (1u64 << 30) as f64,
            c.peak_bytes as f64 / (1u64 << 20) as f64
        );
    }
    println!("\n{:44} {:>7} {:>7}", "ratio of bytes read per second", "got", "target");
    for (what, peer, target) in [
        ("convert", "cp", "0.8"),
        ("convert", "cp, flushed", "0.8"),
        ("convert --dtype bf16", "cp", "0.6"),
        ("convert --dtype bf16", "cp, flushed", "0.6"),
        ("convert to GGUF", "cp", "0.8"),
        ("convert to GGUF", "cp, flushed", "0.8"),
        ("convert to GGUF, bf16", "cp", "0.8"),
        ("convert to GGUF, bf16", "cp, flushed", "0.8"),
        ("convert to torch_dist", "cp", "0.8"),
        ("convert to torch_dist", "cp, flushed", "0.8"),
        ("torch_dist to hf", "cp", "0.8"),
        ("torch_dist to hf", "cp, flushed", "0.8"),
        ("FP8 to bf16", "cp", "0.6"),
        ("FP8 to bf16", "cp, flushed", "0.6"),
        ("audit", "cat", "0.8"),
    ] {
        println!("{:44} {:6.2}x {target:>6}x", format!("{what} against {peer}"), rate(what)? / rate(peer)?);
    }
    Ok(())
}

/// Runs a command to its end; returns its peak resident memory.
fn run(command: &[String]) -> anyhow::Result<u64> {
    let mut child = Command::new(&command[0]).args(&command[1..]).stdout(Stdio::null()).spawn()?;
    let status_file = format!("/proc/{}/status", child.id());
    let mut peak = 0;
    loop {
        if let Ok(status) = std::fs::read_to_string(&status_file)
            && let Some(line) = status.lines().find(|l| l.starts_with("VmHWM:"))
        {
            let kib: u64 = line.split_whitespace().nth(1).and_then(|n| n.parse().ok()).unwrap_or(0);
            peak = peak.max(kib * 1024);
        }
        if let Some(status) = child.try_wait()? {
            ensure!(status.success(), "{command:?} failed: {status}");
            return Ok(peak);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Bytes of all files below a folder.
fn size(folder: &Path) -> anyhow::Result<u64> {
    let mut bytes = 0;
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        bytes += if metadata.is_dir() { size(&entry.path())? } else { metadata.len() };
    }
    Ok(bytes)
}
