//! The commands: what was typed (`*Args`), and what is done about it.

mod audit;
mod convert;
mod data;
mod demo;
mod diff;
mod eval;
mod generate;
mod inspect;
mod lab;
mod merge;
mod model;
mod oracle;
mod repair;
mod trace;
mod train;

use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use ballast_checkpoint::Checkpoint;
use ballast_checkpoint::encoding::text_without_mark;
use ballast_checkpoint::tensor_file::TensorFile;
use ballast_contract::{Policy, Registry};
use clap::{Args, Parser, Subcommand};
use serde::Serialize;

use crate::exit::Outcome;
use crate::output;
use crate::progress::Progress;
use crate::warnings::Warnings;

/// Keeps the critical tensors of hybrid Gated-DeltaNet models in f32: train and fine-tune them; write text with them and
/// measure their perplexity; inspect, audit, convert, diff and repair their checkpoints; and see in the lab what each
/// precision choice costs.
///
/// Exit codes: 0 ok, 1 a check failed, 2 usage, 3 bad or missing input, 4 does not fit, 5 not finite, 130 interrupted.
#[derive(Parser)]
#[command(name = "ballast", version, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    global: Global,
}

#[derive(Args)]
pub(crate) struct Global {
    /// Print one JSON document instead of tables.
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// No progress.
    #[arg(long, short, global = true)]
    pub(crate) quiet: bool,
    /// Threads to use [default: all cores].
    #[arg(long, global = true, value_name = "N")]
    pub(crate) threads: Option<usize>,
    #[arg(skip)]
    pub(crate) warnings: Warnings,
}

#[derive(Subcommand)]
enum Command {
    /// Make a small checkpoint, break it as frameworks do, and watch the tools find and mend it.
    Demo(demo::DemoArgs),
    /// Architecture, layout, files, dtypes and protected tensors of a checkpoint.
    Inspect(inspect::InspectArgs),
    /// Check a checkpoint against the precision contract, its index, and its values.
    Audit(audit::AuditArgs),
    /// Change layout, dtype or shards; protected tensors stay or become F32.
    Convert(convert::ConvertArgs),
    /// Compare two checkpoints across layouts and dtypes.
    Diff(diff::DiffArgs),
    /// Put the f32 bits of rounded protected tensors back from the original.
    Repair(repair::RepairArgs),
    /// Train a model; without arguments, a small hybrid on an embedded task.
    Train(train::TrainArgs),
    /// Make adapters part of the weights of a model.
    Merge(merge::MergeArgs),
    /// Write a text: continue a prompt, answer a conversation, or chat.
    Generate(generate::GenerateArgs),
    /// Perplexity of a model on a text, with its standard error.
    Eval(eval::EvalArgs),
    /// Look at training data: what becomes of it, and which part of it is trained on.
    Data(data::DataArgs),
    /// What each precision choice costs on a model, measured against f64; without arguments, on an embedded model.
    Lab(lab::LabArgs),
    /// Run a kernel on given inputs, and compare with expected results.
    Oracle(oracle::OracleArgs),
    /// Run a model on given tokens: logits, loss, gradients and inner tensors, compared with another framework's.
    Trace(trace::TraceArgs),
}

impl Cli {
    /// Runs the command. Returns how it ended, and what printing that needs.
    pub(crate) fn run(self) -> (anyhow::Result<Outcome>, Global) {
        let result = self.global.start_threads().and_then(|()| self.command.run(&self.global));
        (result, self.global)
    }
}

impl Command {
    fn run(self, global: &Global) -> anyhow::Result<Outcome> {
        match self {
            Command::Demo(args) => demo::run(args, global),
            Command::Inspect(args) => inspect::run(args, global),
            Command::Audit(args) => audit::run(args, global),
            Command::Convert(args) => convert::run(args, global),
            Command::Diff(args) => diff::run(args, global),
            Command::Repair(args) => repair::run(args, global),
            Command::Generate(args) => generate::run(args, global),
            Command::Eval(args) => eval::run(args, global),
            Command::Data(args) => data::run(args, global),
            Command::Oracle(args) => oracle::run(args, global),
            Command::Lab(args) => lab::run(args, global),
            Command::Merge(args) => merge::run(args, global),
            Command::Train(args) => train::run(args, global),
            Command::Trace(args) => trace::run(args, global),
        }
    }
}

impl Global {
    fn start_threads(&self) -> anyhow::Result<()> {
        let Some(threads) = self.threads() else { return Ok(()) };
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
        pool.build_global().context("cannot start the threads")
    }

    /// Prints `value` as the JSON document of `command`.
    pub(crate) fn print_json(&self, command: &str, value: &impl Serialize) {
        output::print(&(output::json(command, value, &self.warnings) + "\n"));
    }

    /// The number of threads that was asked for, here or in rayon's own variable. More than there is any use for would only take
    /// memory: every thread has its scratch.
    fn threads(&self) -> Option<usize> {
        const PER_CORE: usize = 16;
        let variable = || std::env::var("RAYON_NUM_THREADS").ok()?.parse().ok();
        let asked: usize = self.threads.or_else(variable)?;
        let most = PER_CORE * std::thread::available_parallelism().map_or(1, |cores| cores.get());
        if asked > most {
            self.warnings.add(&format!("--threads {asked} is too many; using {most} ({PER_CORE} per core)"));
        }
        Some(asked.min(most))
    }

    fn progress(&self) -> Progress {
        Progress::new(self.quiet)
    }
}

/// `--policy`, wherever it is offered.
#[derive(Args)]
pub(crate) struct PolicyArg {
    /// Which tensors must be F32: strict, megatron, nemo, none, or a policy file (.toml).
    #[arg(long, default_value = "strict", value_name = "POLICY")]
    policy: OsString,
}

impl PolicyArg {
    /// The registry and policy that were asked for.
    fn load(&self) -> anyhow::Result<(Registry, Policy)> {
        let builtin = Registry::builtin();
        let path = Path::new(&self.policy);
        if path.extension().is_some_and(|e| e == "toml") {
            let text =
                std::fs::read_to_string(path).with_context(|| format!("{}: cannot read", path.display()))?;
            return builtin
                .with_policy_file(text_without_mark(&text))
                .with_context(|| path.display().to_string());
        }
        Ok((builtin.clone(), builtin.policy(&self.policy.to_string_lossy())?))
    }

    /// The policy, reduced to the architecture of `checkpoint`.
    fn load_for(&self, checkpoint: &Checkpoint) -> anyhow::Result<Policy> {
        let (registry, policy) = self.load()?;
        Ok(policy.for_architecture(&checkpoint.architecture(&registry)?))
    }
}

fn open(path: &Path) -> anyhow::Result<Arc<Checkpoint>> {
    Ok(Arc::new(Checkpoint::open_consistent(path)?))
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
