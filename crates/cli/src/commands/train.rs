//! `ballast train`

use std::cell::RefCell;
use std::ffi::OsString;
use std::io::IsTerminal;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use ballast_cluster::Kind;
use ballast_files::jobs::Observer;
use ballast_format::{duration, estimate, percent};
use ballast_hub::Part;
use ballast_train::config::KEYS;
use ballast_train::metrics::{Evaluation, MetricsEntry, RankUse, Step};
use ballast_train::report::Sample;
use ballast_train::setup::PRESETS;
use ballast_train::{Summary, TrainConfig, Trainer, Watcher};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use toml::{Table, Value};

use super::{Global, train_plan};
use crate::cluster;
use crate::exit::{self, Outcome, Usage};
use crate::output::{self, bytes, clean, count, table};
use crate::progress::Progress;

/// Train or fine-tune a model; without arguments, a small hybrid on an embedded task (two minutes).
///
/// A TOML file (--config) describes the run; --set overrides single keys, and other flags override both.
/// --print-config prints the resolved configuration, --keys explains every key. A run writes a folder: model/
/// (for `ballast generate` and transformers), checkpoints/, metrics.jsonl and report.html.
///
/// Ctrl-C saves a checkpoint and exits with code 130; --resume continues from it with the same bits.
#[derive(Args)]
pub(crate) struct TrainArgs {
    /// Run configuration (TOML).
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Override a key, for example `--set optimizer.learning_rate=1e-3`; repeatable.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    settings: Vec<String>,
    /// Resume the run in this folder from its last checkpoint.
    #[arg(long, value_name = "OUT", conflicts_with = "config")]
    resume: Option<PathBuf>,
    /// Output folder of the run [default: runs/default, or the next free name].
    #[arg(long, value_name = "OUT")]
    out: Option<PathBuf>,
    /// Embedded architecture to initialize randomly: hybrid, hybrid-moe, gemma or deepseek.
    #[arg(long, value_name = "NAME")]
    preset: Option<String>,
    /// Checkpoint to start from, in any layout, or hf://ORG/NAME[@REVISION].
    #[arg(long, value_name = "CHECKPOINT")]
    model: Option<PathBuf>,
    /// Training data (.txt or .jsonl); repeatable.
    #[arg(long, value_name = "FILE")]
    data: Vec<PathBuf>,
    /// Precision preset: f32, bf16, megatron, nemo, maxtext-default or hf-bf16.
    #[arg(long, value_name = "PRECISION")]
    precision: Option<String>,
    /// Number of optimizer steps.
    #[arg(long, value_name = "N")]
    steps: Option<u64>,
    /// Random seed.
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Write TensorBoard event files.
    #[arg(long)]
    tensorboard: bool,
    /// Show samples, dtypes, memory and the time of a step; train and write nothing.
    #[arg(long, conflicts_with = "resume")]
    dry_run: bool,
    #[command(flatten)]
    plan: train_plan::PlanArgs,
    /// Print the resolved configuration and exit.
    #[arg(long, conflicts_with = "resume")]
    print_config: bool,
    /// Print every configuration key with its values, default and meaning, and exit.
    #[arg(long)]
    keys: bool,
}

impl TrainArgs {
    /// Returns the flags as settings `key=value`, in the order in which they apply.
    fn settings(&self) -> anyhow::Result<Vec<String>> {
        let name = |name: &String| Value::String(name.clone());
        let number = |flag: &str, n: u64| {
            let problem = || Usage(format!("{flag} must be at most {}, got {n}", i64::MAX));
            i64::try_from(n).map(Value::Integer).map_err(|_| problem())
        };
        let out = self.out.as_deref().map(|out| path("--out", out)).transpose()?;
        let model = self.model.as_deref().map(|model| path("--model", model)).transpose()?;
        let file = |file: &PathBuf| {
            Ok(Value::Table(Table::from_iter([("path".to_string(), path("--data", file)?)])))
        };
        let files = self.data.iter().map(file).collect::<Result<Vec<_>, Usage>>()?;
        let flags = [
            ("out", out),
            ("model.preset", self.preset.as_ref().map(name)),
            ("model.checkpoint", model),
            ("precision.preset", self.precision.as_ref().map(name)),
            ("steps", self.steps.map(|n| number("--steps", n)).transpose()?),
            ("seed", self.seed.map(|n| number("--seed", n)).transpose()?),
            ("tensorboard", self.tensorboard.then_some(Value::Boolean(true))),
            ("data.files", (!files.is_empty()).then_some(Value::Array(files))),
        ];
        let given = flags.into_iter().filter_map(|(key, value)| Some(format!("{key}={}", value?)));
        Ok(self.settings.iter().cloned().chain(given).collect())
    }

    /// Loads the configuration from the file; without one, the embedded run, unless a model or data are
    /// given.
    fn load(&self) -> anyhow::Result<TrainConfig> {
        let settings = self.settings()?;
        let names = |key: &str| settings.iter().any(|setting| setting.starts_with(key));
        Ok(match &self.config {
            Some(file) => TrainConfig::load(file, &settings)?,
            None if names("model.checkpoint=") || names("data.files=") => {
                TrainConfig::from_table(Default::default(), &settings, None)?
            }
            None => TrainConfig::embedded(&settings)?,
        })
    }

    /// Returns true if a run is started or resumed, on all ranks; the rest is for one.
    pub(crate) fn trains(&self) -> bool {
        !(self.keys || self.print_config || self.dry_run)
    }

    fn names_out(&self) -> bool {
        self.out.is_some() || self.config.is_some() || self.settings.iter().any(|s| s.starts_with("out="))
    }
}

/// Returns a path as a value of the configuration, which is TOML and can hold UTF-8 only.
fn path(flag: &str, path: &Path) -> Result<Value, Usage> {
    let text = path.to_str().ok_or_else(|| {
        Usage(format!(
            "{flag} {path:?}: the name is not UTF-8 and cannot be saved in the run's configuration; rename it"
        ))
    })?;
    Ok(Value::String(text.into()))
}

pub(crate) fn run(args: TrainArgs, global: &Global) -> anyhow::Result<Outcome> {
    if args.keys {
        print_keys(global);
        return Ok(Outcome::Ok);
    }
    let _signals = Progress::new(true);
    let mut trainer = match &args.resume {
        Some(out) => Trainer::resume_on(out, &args.settings()?, cluster::start(START_TIMEOUT)?)?,
        None => {
            let mut config = args.load()?;
            if args.print_config {
                output::print(&config.to_toml()?);
                return Ok(Outcome::Ok);
            }
            let part = if args.plan.ranks.is_some() { Part::BesideWeights } else { Part::All };
            localize(&mut config, part, global)?;
            if let Some(ranks) = args.plan.ranks {
                return train_plan::run(&config, &args.plan, ranks, global);
            }
            if !args.names_out() {
                config.out = free_name(&config.out);
            }
            if args.dry_run {
                return dry_run(config, global);
            }
            let world = cluster::start(START_TIMEOUT)?;
            if !args.names_out() {
                // The first rank chooses: it may create the folder before another looks.
                let out = config.out.as_os_str().as_bytes().to_vec();
                config.out = OsString::from_vec(world.broadcast(Kind::Setup, 0, out)?).into();
            }
            Trainer::new_on(config, world)?
        }
    };
    global.warnings.add_all(&trainer.model.warnings);
    global.warnings.set_unknown_config_keys(trainer.model.unknown_config_keys());
    let terminal = Terminal::new(global, &trainer);
    if !global.json && !global.quiet {
        introduce(&trainer)?;
    }
    let summary = trainer.run(&terminal);
    terminal.finish();
    let summary = summary?;
    if !trainer.ranks.world.is_first() {
        // The first rank reports for all.
    } else if global.json {
        print_json(&trainer, &summary, global);
    } else {
        conclude(&trainer, &summary);
    }
    Ok(match (&summary.save_failure, summary.stopped) {
        (Some(error), true) => Outcome::Failed(exit::code_of(error.kind())),
        (Some(_), false) => Outcome::Failed(NOT_SAVED),
        (None, true) => Outcome::Interrupted,
        (None, false) => Outcome::Ok,
    })
}

/// Exit code of a run that took its last step and could not save it.
const NOT_SAVED: u8 = 4;

/// Replaces addresses of a hub by the folders of the cache, so that the saved configuration names the commit
/// that was used, and a resumed run reads the same files.
fn localize(config: &mut TrainConfig, part: Part, global: &Global) -> anyhow::Result<()> {
    if let Some(checkpoint) = &mut config.model.checkpoint {
        *checkpoint = super::local_part(checkpoint, part, global)?;
    }
    if let Some(tokenizer) = &mut config.model.tokenizer {
        *tokenizer = super::local_part(tokenizer, Part::BesideWeights, global)?;
    }
    Ok(())
}

/// Time limit for other ranks before the configuration is known.
const START_TIMEOUT: Duration = Duration::from_secs(600);

/// `runs/default`, `runs/default-2`, ...
pub(super) fn free_name(out: &Path) -> PathBuf {
    let numbered = |n: u32| if n == 1 { out.to_path_buf() } else { format!("{}-{n}", out.display()).into() };
    (1..).map(numbered).find(|path| !path.exists()).unwrap_or_else(|| out.into())
}

fn print_keys(global: &Global) {
    if global.json {
        let keys: serde_json::Map<String, serde_json::Value> =
            KEYS.iter().map(|key| (key.name.into(), json!(key.help()))).collect();
        return global.print_json("train-keys", &keys);
    }
    let mut rows = table(&["key", "values", "default", "meaning"]);
    for key in KEYS {
        rows.add_row([key.name, &key.values(), &key.default().unwrap_or_default(), key.help()]);
    }
    output::print(&format!("{rows}\n"));
    let presets: Vec<String> = PRESETS.iter().map(|(name, what, _)| format!("  {name:11} {what}")).collect();
    output::print(&format!("\nmodel.preset:\n{}\n", presets.join("\n")));
}

fn introduce(trainer: &Trainer) -> anyhow::Result<()> {
    let (model, config) = (&trainer.model, &trainer.config);
    let parameters: usize = model.specs.all().map(|spec| spec.len()).sum();
    let data = match config.data.files.len() {
        0 => "the embedded task (associative recall, brackets)".to_string(),
        1 => clean(&config.data.files[0].path.display().to_string()),
        n => format!("{n} files"),
    };
    let tokens = config.batch.sequences * config.batch.accumulation * config.data.sequence_length;
    let ranks = match trainer.ranks.size() {
        1 => String::new(),
        ranks => format!(
            "{ranks} ranks of {}, shard {}, context {}\n",
            output::plural(rayon::current_num_threads(), "thread"),
            config.cluster.shard,
            config.cluster.context
        ),
    };
    output::note(&format!(
        "{}: {} parameters, {}, {} protected tensors in f32\n{} steps of up to {} tokens on {data}\n{ranks}planned memory {}, output in {}\n",
        model.config.model_type,
        count(parameters as u64),
        model.precision().name,
        trainer.ledger.f32_tensors(),
        config.steps,
        count(tokens as u64),
        bytes(trainer.memory_plan()?.total()),
        clean(&config.out.display().to_string()),
    ));
    Ok(())
}

fn conclude(trainer: &Trainer, summary: &Summary) {
    let mut text = String::new();
    if !summary.samples.is_empty() {
        text += &format!("\n{}\n", samples_table(&last_samples(&summary.samples)));
    }
    if let Some(evaluation) = &summary.evaluation {
        text += &format!(
            "\nheld-out loss {:.4}, accuracy {} of {} tokens",
            evaluation.loss,
            percent(evaluation.accuracy),
            count(evaluation.tokens)
        );
        for (source, score) in evaluation.by_source.iter().filter(|_| evaluation.by_source.len() > 1) {
            text += &format!("\n  {}: {} of {}", clean(source), percent(score.accuracy), count(score.tokens));
        }
        text += "\n";
    }
    text += &format!("{}\n", summary.ledger);
    for (step, site) in &trainer.ledger.escalations {
        text += &format!("{site} was raised to f32 at step {step}\n");
    }
    if trainer.sentinel.untrained > 0 {
        text +=
            &format!("{} steps were skipped: they had no tokens to train on\n", trainer.sentinel.untrained);
    }
    text += &format!(
        "{} steps, {}, {} tokens/s, peak memory {}\n\n",
        summary.step,
        duration(summary.seconds),
        count(summary.tokens_per_second as u64),
        bytes(summary.peak_memory),
    );
    let what = if trainer.config.lora.is_some() { "adapter" } else { "model" };
    let shown = |path: Option<&PathBuf>, none: &str| {
        path.map_or(none.to_string(), |path| clean(&path.display().to_string()))
    };
    text += &format!("{what:7} {}\n", shown(summary.model.as_ref(), "not saved"));
    text += &format!("report  {}\n", shown(summary.report.as_ref(), "not written"));
    for (step, error) in &summary.failed_saves {
        text += &format!("the checkpoint of step {step} was not saved: {}\n", clean(error));
    }
    if summary.stopped {
        text += &stop_message(trainer, summary);
    } else if summary.save_failure.is_some() {
        text += &format!("the run has finished, but {}\n", newest_text(summary));
    }
    output::print(&text);
}

/// Says what a stopped run has saved and how to resume it.
fn stop_message(trainer: &Trainer, summary: &Summary) -> String {
    let out = clean(&trainer.config.out.display().to_string());
    let resume = format!("resume with: ballast train --resume {out}");
    let step = summary.step;
    match (&summary.save_failure, &summary.checkpoint) {
        (None, _) => format!("\nstopped after saving step {step}; {resume}\n"),
        (Some(error), checkpoint) => {
            let error = clean(&error.to_string());
            let resume = if checkpoint.is_some() { format!("; {resume}") } else { String::new() };
            let newest = newest_text(summary);
            format!("\nstopped at step {step}, which could not be saved ({error}); {newest}{resume}\n")
        }
    }
}

fn newest_text(summary: &Summary) -> String {
    match &summary.checkpoint {
        Some((saved, _)) => format!("the newest checkpoint is from step {saved}"),
        None => "this run has no checkpoint".into(),
    }
}

fn last_samples(samples: &[Sample]) -> Vec<Sample> {
    let last = samples.last().map_or(0, |sample| sample.step);
    samples.iter().filter(|sample| sample.step == last).cloned().collect()
}

fn samples_table(samples: &[Sample]) -> String {
    let mut rows = table(&["prompt", "expected", "answer", ""]);
    for sample in samples {
        let mark = match sample.right {
            Some(true) => "right",
            Some(false) => "wrong",
            None => "",
        };
        rows.add_row([
            clean(&sample.prompt),
            clean(sample.expected.as_deref().unwrap_or_default()),
            clean(&sample.answer),
            mark.into(),
        ]);
    }
    rows.to_string()
}

fn print_json(trainer: &Trainer, summary: &Summary, global: &Global) {
    let samples: Vec<_> = summary
        .samples
        .iter()
        .map(|s| json!({ "step": s.step, "prompt": s.prompt, "expected": s.expected, "answer": s.answer, "right": s.right }))
        .collect();
    let failed_saves: Vec<_> =
        summary.failed_saves.iter().map(|(step, error)| json!({ "step": step, "error": error })).collect();
    // Lossy for a path that is not UTF-8: JSON cannot hold it.
    let shown = |path: Option<&PathBuf>| path.map(|path| path.display().to_string());
    global.print_json(
        "train",
        &json!({
            "out": trainer.config.out.display().to_string(),
            "step": summary.step,
            "stopped": summary.stopped,
            "evaluation": summary.evaluation,
            "samples": samples,
            "ledger": { "summary": summary.ledger, "entries": trainer.ledger.entries, "escalations": trainer.ledger.escalations,
                        "occasions": trainer.ledger.occasions },
            "faults": trainer.sentinel.faults,
            "skipped": trainer.sentinel.skipped,
            "untrained": trainer.sentinel.untrained,
            "model": shown(summary.model.as_ref()),
            "checkpoint": summary.checkpoint.as_ref().map(|(step, path)| json!({ "step": step, "path": shown(Some(path)) })),
            "save_failure": summary.save_failure.as_ref().map(|error| error.to_string()),
            "failed_saves": failed_saves,
            "report": shown(summary.report.as_ref()),
            "seconds": summary.seconds,
            "tokens_per_second": summary.tokens_per_second,
            "peak_memory_bytes": summary.peak_memory,
        }),
    );
}

/// Shows samples with their masks, dtypes by role, memory and the time of a step. Works in a temporary
/// folder.
fn dry_run(config: TrainConfig, global: &Global) -> anyhow::Result<Outcome> {
    // Checks the destination of the real run, not the temporary folder.
    ballast_train::places::check_new(&config)?;
    let folder = tempfile::tempdir()?;
    let out = config.out.clone();
    let mut trainer = Trainer::new(TrainConfig { out: folder.path().into(), ..config })?;
    global.warnings.add_all(&trainer.model.warnings);
    global.warnings.set_unknown_config_keys(trainer.model.unknown_config_keys());
    let batches = trainer.preview()?;
    let plan = trainer.memory_plan()?;
    let seconds = trainer.measure_step(&batches)?;
    let roles = trainer.dtypes_by_role();
    let tokens: usize = batches.iter().map(|batch| batch.batch.tokens()).sum();
    let trained: usize = batches.iter().map(|batch| batch.batch.counted()).sum();
    let all = seconds * trainer.config.steps as f64;
    if global.json {
        global.print_json(
            "train-dry-run",
            &json!({
                "out": out.display().to_string(),
                "tokens_per_step": tokens,
                "trained_tokens_per_step": trained,
                "dtypes": roles.iter().map(|r| json!({ "role": r.0, "dtype": r.1, "tensors": r.2, "elements": r.3 })).collect::<Vec<_>>(),
                "memory": plan.rows.iter().map(|(what, bytes)| json!({ "what": what, "bytes": bytes })).collect::<Vec<_>>(),
                "memory_total_bytes": plan.total(),
                "memory_available_bytes": ballast_model::memory::available(),
                "seconds_per_step": seconds,
                "seconds": all,
            }),
        );
        return Ok(Outcome::Ok);
    }
    let mut text = String::new();
    for (origin, marked) in trainer.marked_samples(&batches, 3)? {
        text += &format!("{}: {}\n", clean(&origin), clean(&marked));
    }
    text += &format!(
        "text in ⟦ ⟧ is trained on: {} of {} tokens per step\n\n",
        count(trained as u64),
        count(tokens as u64)
    );
    let mut rows = table(&["role", "dtype", ">tensors", ">elements"]);
    for (role, dtype, tensors, elements) in &roles {
        rows.add_row([role.clone(), dtype.clone(), tensors.to_string(), count(*elements as u64)]);
    }
    text += &format!("{rows}\n\n");
    let mut rows = table(&["memory", ">size"]);
    for (what, size) in &plan.rows {
        rows.add_row([what.clone(), bytes(*size)]);
    }
    rows.add_row(["total".to_string(), bytes(plan.total())]);
    text += &format!("{rows}\n\n");
    if let Some(available) = ballast_model::memory::available() {
        let fits = if plan.total() <= available { "the run fits" } else { "the run does NOT fit" };
        text += &format!("available memory {}: {fits}\n", bytes(available));
    }
    text += &format!(
        "a step takes {} ({} tokens/s); {} steps take about {}\n",
        duration(seconds),
        count((tokens as f64 / seconds) as u64),
        trainer.config.steps,
        estimate(all)
    );
    output::print(&text);
    Ok(Outcome::Ok)
}

/// Shows the progress of a run on stderr.
struct Terminal {
    quiet: bool,
    steps: u64,
    bar: Option<ProgressBar>,
    shown: Mutex<RefCell<Shown>>,
}

struct Shown {
    begun: Instant,
    first_step: Option<u64>,
    tokens: u64,
    last_line: Option<Instant>,
    evaluation: Option<Evaluation>,
}

/// Time between two plain lines.
const PLAIN_INTERVAL: Duration = Duration::from_secs(5);

impl Terminal {
    fn new(global: &Global, trainer: &Trainer) -> Terminal {
        let quiet = global.quiet || !trainer.ranks.world.is_first();
        let drawn = !quiet && std::io::stderr().is_terminal();
        let bar = drawn.then(|| {
            let style =
                ProgressStyle::with_template("{wide_bar} {pos}/{len} ETA {eta}\n{msg}").expect("a constant");
            ProgressBar::new(trainer.config.steps).with_style(style).with_position(trainer.step)
        });
        let shown =
            Shown { begun: Instant::now(), first_step: None, tokens: 0, last_line: None, evaluation: None };
        Terminal { quiet, steps: trainer.config.steps, bar, shown: Mutex::new(RefCell::new(shown)) }
    }

    fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    /// Prints a line of progress.
    fn say(&self, line: &str) {
        if !self.quiet {
            self.tell(line);
        }
    }

    /// Prints a line that --quiet does not hide.
    fn tell(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.println(line),
            None => output::note(line),
        }
    }

    fn step(&self, step: &Step) {
        let Ok(shown) = self.shown.lock() else { return };
        let mut shown = shown.borrow_mut();
        let first = *shown.first_step.get_or_insert(step.step);
        shown.tokens += step.tokens;
        let seconds = shown.begun.elapsed().as_secs_f64();
        let speed = shown.tokens as f64 / seconds.max(1e-9);
        let eta = seconds / (step.step - first + 1) as f64 * self.steps.saturating_sub(step.step) as f64;
        let held_out = shown.evaluation.as_ref().map_or(String::new(), |e| {
            format!(", held-out {:.4} (accuracy {})", e.loss, percent(e.accuracy))
        });
        let memory = match &step.ranks {
            None => bytes(step.peak_memory),
            Some(RankUse { waiting, peak_memory, .. }) => {
                let most = peak_memory.iter().max().copied().unwrap_or(0);
                let waiting = waiting.iter().sum::<f64>() / waiting.len().max(1) as f64;
                format!("{} in the largest rank, {} waiting", bytes(most), percent(waiting))
            }
        };
        let parts = step.cross_entropy.map_or(String::new(), |plain| format!(" (cross-entropy {plain:.4})"));
        let figures = format!(
            "loss {:.4}{parts}{held_out}, {} tokens/s, learning rate {:.2e}, gradient norm {:.3}, {memory}",
            step.loss,
            count(speed as u64),
            step.learning_rate,
            step.gradient_norm,
        );
        if let Some(bar) = &self.bar {
            bar.set_position(step.step);
            bar.set_message(figures);
        } else if !self.quiet
            && (step.step == self.steps || shown.last_line.is_none_or(|t| t.elapsed() >= PLAIN_INTERVAL))
        {
            shown.last_line = Some(Instant::now());
            output::note(&format!("step {}/{}, ETA {}: {figures}", step.step, self.steps, estimate(eta)));
        }
    }
}

/// Never cancels: a save must not be interrupted by the signal that asked for it.
impl Observer for Terminal {}

impl Watcher for Terminal {
    fn record(&self, record: &MetricsEntry) {
        match record {
            MetricsEntry::Step(step) => self.step(step),
            MetricsEntry::Evaluation(evaluation) => {
                let line = format!(
                    "step {}: held-out loss {:.4}, accuracy {}",
                    evaluation.step,
                    evaluation.loss,
                    percent(evaluation.accuracy)
                );
                let sources: Vec<String> = evaluation
                    .by_source
                    .iter()
                    .map(|(source, score)| format!("{} {}", clean(source), percent(score.accuracy)))
                    .collect();
                let sources =
                    if sources.len() > 1 { format!(" ({})", sources.join(", ")) } else { String::new() };
                self.say(&format!("{line}{sources}"));
                if let Ok(shown) = self.shown.lock() {
                    shown.borrow_mut().evaluation = Some(evaluation.clone());
                }
            }
            MetricsEntry::Event(event) => self.tell(&format!("{}: {}", event.what, clean(&event.text))),
        }
    }

    fn samples(&self, samples: &[Sample]) {
        // The final samples are part of the summary.
        if samples.first().is_some_and(|sample| sample.step < self.steps) {
            self.say(&samples_table(samples));
        }
    }

    fn should_stop(&self) -> bool {
        crate::progress::interrupted()
    }
}
