//! The commands: their arguments (`*Args`) and what they do.

mod audit;
mod audit_formats;
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
mod report;
mod trace;
mod train;
mod train_plan;

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use ballast_checkpoint::Checkpoint;
use ballast_checkpoint::tensor_file::TensorFile;
use ballast_contract::{Policy, Registry};
use ballast_files::Error;
use ballast_files::encoding::text_without_mark;
use ballast_files::regular::read_regular_text;
use ballast_hub::{self as hub, Part, RemoteSummary};
use clap::{Args, Parser, Subcommand};
use serde::Serialize;

use crate::call::Caller;
use crate::exit::{self, Outcome, Usage};
use crate::launcher::{cores, launch};
use crate::output;
use crate::progress::Progress;
use crate::warnings::Warnings;

/// Train, run, convert and check hybrid Gated-DeltaNet language models in mixed precision, with critical
/// tensors in f32.
#[derive(Parser)]
#[command(name = "ballast", version, max_term_width = 100, after_long_help = exit::codes_help())]
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
    /// Show no progress; warnings, errors and results are shown.
    #[arg(long, short, global = true)]
    pub(crate) quiet: bool,
    /// Number of threads [default: all cores, or each rank's share of them].
    #[arg(long, global = true, value_name = "N")]
    pub(crate) threads: Option<usize>,
    #[arg(skip)]
    pub(crate) warnings: Warnings,
    /// The calling program, if this one is not `ballast` itself.
    #[arg(skip)]
    pub(crate) caller: Option<Caller>,
}

// The help of a command is on its `Args`: a comment here would hide the long text there.
#[derive(Subcommand)]
enum Command {
    Demo(demo::DemoArgs),
    Inspect(inspect::InspectArgs),
    Audit(audit::AuditArgs),
    Convert(convert::ConvertArgs),
    Diff(diff::DiffArgs),
    Repair(repair::RepairArgs),
    Train(train::TrainArgs),
    Report(report::ReportArgs),
    Merge(merge::MergeArgs),
    Generate(generate::GenerateArgs),
    Eval(eval::EvalArgs),
    Data(data::DataArgs),
    Lab(lab::LabArgs),
    Oracle(oracle::OracleArgs),
    Trace(trace::TraceArgs),
}

impl Cli {
    /// Runs the command. Returns how it ended, and what printing that needs.
    pub(crate) fn run(self) -> (anyhow::Result<Outcome>, Global) {
        let on_all_ranks = self.runs_on_all_ranks();
        let result = self.global.start_threads(on_all_ranks).and_then(|()| self.command.run(&self.global));
        (result, self.global)
    }

    /// Runs the command for a calling program, which has threads of its own. Returns how it ended, and the caller
    /// with the document.
    pub(crate) fn run_for(mut self, caller: Caller) -> (anyhow::Result<Outcome>, Option<Caller>) {
        self.global.warnings = Warnings::kept(Arc::clone(&caller.warnings));
        self.global.caller = Some(caller);
        let result = self.command.run(&self.global);
        (result, self.global.caller)
    }

    /// Returns true if all ranks of a cluster run the command together; otherwise the first runs it.
    pub(crate) fn runs_on_all_ranks(&self) -> bool {
        matches!(&self.command, Command::Train(args) if args.trains())
    }
}

impl Command {
    fn run(self, global: &Global) -> anyhow::Result<Outcome> {
        ballast_kernels::simd::check_setting().map_err(Usage)?;
        match self {
            Command::Demo(args) => demo::run(args, global),
            Command::Inspect(args) => inspect::run(args, global),
            Command::Audit(args) => audit::run(args, global),
            Command::Convert(args) => convert::run(args, global),
            Command::Diff(args) => diff::run(args, global),
            Command::Repair(args) => repair::run(args, global),
            Command::Report(args) => report::run(args, global),
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
    fn start_threads(&self, on_all_ranks: bool) -> anyhow::Result<()> {
        let share = || launch().filter(|_| on_all_ranks).map(|launch| launch.threads());
        let threads = self.threads().or_else(share).unwrap_or(0); // 0: one per core
        if launch().is_some() && threads > cores() {
            self.warnings.add(&format!(
                "{threads} threads on {}: the launcher binds each rank to its cores; with Open MPI use \
                 `--bind-to none` or `--map-by slot:PE={threads}`",
                output::plural(cores(), "core")
            ));
        }
        // Here, where it can fail; the first parallel loop would panic.
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build_global();
        Ok(pool.map_err(|error| Error::Threads(std::io::Error::other(error)))?)
    }

    /// Prints `value` as the JSON document of `command`, or hands it to the caller.
    pub(crate) fn print_json(&self, command: &str, value: &impl Serialize) {
        let document = output::json(command, value, &self.warnings);
        match self.caller.as_ref().map(|caller| caller.document.lock()) {
            Some(Ok(mut place)) => *place = Some(document),
            Some(Err(_)) => {}
            None => output::print(&(document + "\n")),
        }
    }

    /// Returns the number of threads from `--threads` or RAYON_NUM_THREADS, limited because every thread has
    /// scratch memory.
    fn threads(&self) -> Option<usize> {
        const PER_CORE: usize = 16;
        let variable = || std::env::var("RAYON_NUM_THREADS").ok()?.parse().ok();
        let asked: usize = self.threads.or_else(variable)?;
        let most = PER_CORE * cores();
        if asked > most {
            self.warnings.add(&format!("--threads {asked} is too many; using {most} ({PER_CORE} per core)"));
        }
        Some(asked.min(most))
    }

    fn progress(&self) -> Progress {
        match &self.caller {
            Some(caller) => Progress::observed(Arc::clone(&caller.observer)),
            None => Progress::new(self.quiet),
        }
    }
}

/// The option `--policy`.
#[derive(Args)]
pub(crate) struct PolicyArg {
    /// Policy that says which tensors must be F32: strict, megatron, nemo, none, or a file (.toml) [default: strict].
    #[arg(long, value_name = "POLICY")]
    policy: Option<OsString>,
}

impl PolicyArg {
    /// Returns true if the caller chose the policy.
    fn is_given(&self, global: &Global) -> bool {
        self.policy.is_some() || global.caller.as_ref().is_some_and(|caller| caller.policy.is_some())
    }

    /// Loads the registry and the policy.
    fn load(&self, global: &Global) -> anyhow::Result<(Registry, Policy)> {
        if let Some(given) = global.caller.as_ref().and_then(|caller| caller.policy.as_ref()) {
            return Ok(given.clone());
        }
        let builtin = Registry::builtin();
        let policy = self.policy.as_deref().unwrap_or(OsStr::new("strict"));
        let path = Path::new(policy);
        if path.extension().is_some_and(|e| e == "toml") {
            let text = read_regular_text(path).with_context(|| format!("{}: cannot read", path.display()))?;
            return builtin
                .with_policy_file(text_without_mark(&text))
                .with_context(|| path.display().to_string());
        }
        Ok((builtin.clone(), builtin.policy(&policy.to_string_lossy())?))
    }

    /// Loads the policy, reduced to the architecture of `checkpoint`.
    fn load_for(&self, checkpoint: &Checkpoint, global: &Global) -> anyhow::Result<Policy> {
        let (registry, policy) = self.load(global)?;
        Ok(checkpoint.contract(&registry, &policy)?.1)
    }
}

fn open(path: &Path) -> anyhow::Result<Arc<Checkpoint>> {
    Ok(Arc::new(Checkpoint::open_consistent(path)?))
}

/// Returns the path of a model on disk, after it was downloaded into the cache if it is the address of a hub.
fn local(path: &Path, global: &Global) -> anyhow::Result<PathBuf> {
    local_part(path, Part::All, global)
}

/// Returns the path of a model on disk, with the files of `part` only.
fn local_part(path: &Path, part: Part, global: &Global) -> anyhow::Result<PathBuf> {
    if !hub::is_address(path) {
        return Ok(path.to_path_buf());
    }
    let progress = global.progress();
    let place = hub::localize(path, part, &progress)?;
    progress.finish();
    Ok(place)
}

/// Opens a checkpoint of which everything is read: a model of a hub from the cache.
fn open_whole(path: &Path, global: &Global) -> anyhow::Result<Arc<Checkpoint>> {
    let is_repo = path.as_os_str().as_encoded_bytes().starts_with(b"hf:");
    if is_repo { open(&local(path, global)?) } else { open(path) }
}

/// Says what was read from a server.
fn remote_text(remote: &RemoteSummary) -> String {
    let mut text = match remote.requests {
        0 => format!("read from the local cache: {}\n", output::clean(&remote.address)),
        requests => format!(
            "read {} in {} from {}\n",
            output::bytes(remote.bytes),
            output::plural(requests, "request"),
            output::clean(&remote.address)
        ),
    };
    if let Some(note) = &remote.note {
        text += &format!("note: {}\n", output::clean(note));
    }
    text
}

/// Returns the offsets of the sequences in a [B, T] batch: `cu_seqlens`, else one sequence per row.
fn sequences(file: &TensorFile, b: usize, t: usize) -> anyhow::Result<Vec<usize>> {
    if !file.has("cu_seqlens") {
        return Ok((0..=b).map(|i| i * t).collect());
    }
    let offsets = file.integers("cu_seqlens")?.values;
    let tokens = (b * t) as i64;
    if b != 1 || offsets.first() != Some(&0) || offsets.last() != Some(&tokens) || !offsets.is_sorted() {
        let problem =
            format!("must be ascending offsets from 0 to {tokens} with B = 1, got {offsets:?} with B = {b}");
        return Err(file.error("cu_seqlens", problem).into());
    }
    Ok(offsets.iter().map(|x| *x as usize).collect())
}
