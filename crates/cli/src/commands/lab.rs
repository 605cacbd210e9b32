//! `ballast lab`

use std::io::Write;
use std::path::{Path, PathBuf};

use ballast_checkpoint::tensor_file::TensorFile;
use ballast_files::Error::Interrupted;
use ballast_files::jobs::Observer;
use ballast_format::{duration, exact_percent, number, signed};
use ballast_lab::dump::Dump;
use ballast_lab::experiment::Arithmetic;
use ballast_lab::findings::{DecodingRun, Input, Kind, Run};
use ballast_lab::input::{self, Length};
use ballast_lab::{Choice, Findings, More, Study, Training, embedded, report};
use ballast_model::{Batch, LazyCheckpoint};
use clap::{Args, ValueEnum};
use comfy_table::Table;

use super::Global;
use crate::exit::{Outcome, Usage};
use crate::output::{self, bytes, clean, count, plural, table};

/// Measure what each precision choice costs on a model, against f64; without arguments, on an embedded model.
///
/// Runs the same input through an f64 reference and under each policy, and compares outputs, every
/// activation, and gradients. Policies are presets, and single choices in an otherwise f32 model (only A_log
/// in bf16, only the qk product, ...). Without arguments, runs the embedded model in under a minute.
///
/// A policy is a preset (f32, bf16, megatron, nemo, maxtext-default, hf-bf16), a protected tensor (A_log,
/// out_norm, dt_bias, ...), a site (qk_product, logits, beta, l2norm, state, router, ...; =f16 for f16),
/// params, activations, all-sites, or several joined by +: `--policies hf-bf16,A_log,bf16+logits=f16`.
///
/// Layers are read one at a time, so a large checkpoint needs little memory.
#[derive(Args)]
pub(crate) struct LabArgs {
    /// Model: a folder, an index or a safetensors file, in any layout, or hf://ORG/NAME [default: the embedded
    /// model].
    model: Option<PathBuf>,
    /// Input text: .txt, or .jsonl with `text`, `messages` or `prompt` and `completion` [default: an embedded
    /// text].
    #[arg(long, value_name = "FILE", conflicts_with = "ids")]
    data: Option<PathBuf>,
    /// Input tokens, in the format of `ballast trace --ids`.
    #[arg(long, value_name = "FILE.safetensors")]
    ids: Option<PathBuf>,
    /// Use held-out documents of the embedded task of `ballast train` as input.
    #[arg(long, conflicts_with_all = ["data", "ids"])]
    task: bool,
    /// Number of tokens per sequence of the text [default: 512; for the task, one document per sequence].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    tokens: Option<u32>,
    /// Largest number of sequences of the text [default: 1].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    sequences: Option<u32>,
    /// Policies to compare, separated by commas [default: all that apply to the model].
    #[arg(long, value_name = "A,B,C", value_delimiter = ',')]
    policies: Vec<String>,
    /// Arithmetic of the reference.
    #[arg(long, default_value = "f64")]
    reference: ReferenceArg,
    /// Skip the backward pass; faster and with less memory.
    #[arg(long)]
    no_gradients: bool,
    /// Also take N training steps (AdamW) in f32 and under each policy; the whole model must fit in memory.
    #[arg(long, value_name = "N", conflicts_with_all = ["compare", "dump"])]
    steps: Option<u32>,
    /// Learning rate of the training steps.
    #[arg(long, value_name = "LR", default_value_t = 1e-4)]
    learning_rate: f64,
    /// Also decode the input token by token, in f32 and under each policy; two copies of the model must fit
    /// in memory.
    #[arg(long, conflicts_with_all = ["compare", "dump"])]
    decode: bool,
    /// Compare two checkpoints of the same model, such as before and after a conversion: find where B departs
    /// from A.
    #[arg(long, num_args = 2, value_names = ["A", "B"], conflicts_with_all = ["model", "policies", "dump"])]
    compare: Option<Vec<PathBuf>>,
    /// Compare MODEL on --ids with another framework's tensors: safetensors files, tensors named by site.
    #[arg(long, value_name = "DIR", conflicts_with = "policies", requires = "ids")]
    dump: Option<PathBuf>,
    /// Largest error at which a dumped tensor counts as equal.
    #[arg(long, value_name = "X", default_value_t = 1e-3, requires = "dump")]
    tolerance: f64,
    /// Output folder of lab.json and lab.html [default: runs/lab, or the next free name].
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Replace existing lab.json and lab.html.
    #[arg(long)]
    force: bool,
}

impl LabArgs {
    /// Returns the model to run: the first of --compare, or MODEL; `None` for the embedded model.
    fn model(&self) -> Option<&Path> {
        self.compare.as_ref().and_then(|both| both.first()).or(self.model.as_ref()).map(PathBuf::as_path)
    }
}

#[derive(Clone, Copy, ValueEnum)]
enum ReferenceArg {
    F64,
    F32,
}

pub(crate) fn run(mut args: LabArgs, global: &Global) -> anyhow::Result<Outcome> {
    for model in args.model.iter_mut().chain(args.compare.iter_mut().flatten()) {
        *model = super::local(model, global)?;
    }
    let progress = global.progress();
    let out = Out::prepare(&args, global)?;
    let embedded = match args.model() {
        None => Some(embedded::write(tempfile::tempdir()?)?),
        Some(_) => None,
    };
    let path = match (args.model(), &embedded) {
        (Some(path), _) => path,
        (None, embedded) => embedded.as_ref().map_or(Path::new("."), |folder| folder.path()),
    };
    let checkpoint = LazyCheckpoint::open(path)?;
    global.warnings.add_all(&checkpoint.warnings);
    global.warnings.check_config(&*super::open(path)?);
    let (batch, input) = read_input(&args, path)?;
    global.warnings.check_length("a sequence", input.longest, checkpoint.config.max_positions);
    let study = Study {
        path,
        checkpoint: &checkpoint,
        batch: &batch,
        input,
        reference: match args.reference {
            ReferenceArg::F64 => Arithmetic::F64,
            ReferenceArg::F32 => Arithmetic::F32,
        },
        gradients: !args.no_gradients,
        observer: &progress,
    };
    let mut findings = carry_out(&args, &study)?;
    progress.finish();
    if !progress.may_publish() {
        return Err(Interrupted.into());
    }
    if embedded.is_some() {
        findings.model = "the embedded model".into();
    }
    out.write(&findings, global)?;
    if global.json {
        global.print_json("lab", &findings);
    } else {
        output::print(&words(&findings, &args));
        out.say();
    }
    let parted = args.dump.is_some() && findings.runs.iter().any(|run| run.first_difference.is_some());
    Ok(if parted { Outcome::CheckFailed } else { Outcome::Ok })
}

fn carry_out(args: &LabArgs, study: &Study<'_>) -> anyhow::Result<Findings> {
    if let Some([_, other]) = args.compare.as_deref() {
        return Ok(study.compare(&other.display().to_string(), &LazyCheckpoint::open(other)?)?);
    }
    if let Some(folder) = &args.dump {
        let dump = Dump::open(folder, study.checkpoint.config.vocabulary)?;
        return Ok(study.dump(&folder.display().to_string(), dump, args.tolerance)?);
    }
    let (config, specs) = (&study.checkpoint.config, &study.checkpoint.specs);
    let choices = if args.policies.is_empty() {
        Choice::defaults(config, specs)?
    } else {
        args.policies.iter().map(|name| Choice::parse(name, config, specs)).collect::<Result<_, _>>()?
    };
    let training =
        args.steps.map(|steps| Training { steps: steps as usize, learning_rate: args.learning_rate });
    Ok(study.choices(choices, More { training, decoding: args.decode })?)
}

fn read_input(args: &LabArgs, model: &Path) -> anyhow::Result<(Batch, Input)> {
    let length = Length {
        tokens: args.tokens.unwrap_or(512) as usize,
        sequences: args.sequences.unwrap_or(1) as usize,
    };
    if let Some(file) = &args.ids {
        if args.tokens.is_some() || args.sequences.is_some() {
            return Err(Usage(
                "--tokens and --sequences apply to a text and cannot be combined with --ids".into(),
            )
            .into());
        }
        let (batch, _) = super::trace::read_batch(&TensorFile::open(file)?)?;
        let input = input::describe(&batch, file.display().to_string());
        return Ok((batch, input));
    }
    Ok(match (&args.data, args.model()) {
        (Some(file), _) => input::from_file(file, model, length)?,
        (None, Some(_)) if !args.task => input::embedded_text(model, length)?,
        (None, _) => input::task((args.tokens.is_some() || args.sequences.is_some()).then_some(length))?,
    })
}

/// The output folder; none with --json and without --out.
struct Out {
    folder: Option<PathBuf>,
}

impl Out {
    fn prepare(args: &LabArgs, global: &Global) -> anyhow::Result<Out> {
        let folder = match &args.out {
            Some(folder) => Some(folder.clone()),
            None if global.json => None,
            None => Some(super::train::free_name(Path::new("runs/lab"))),
        };
        if let Some(folder) = &folder {
            for file in ["lab.json", "lab.html"].map(|name| folder.join(name)) {
                if file.exists() && !args.force {
                    return Err(Usage(format!("{} exists; use --force to replace it", file.display())).into());
                }
            }
        }
        Ok(Out { folder })
    }

    fn write(&self, findings: &Findings, global: &Global) -> anyhow::Result<()> {
        let Some(folder) = &self.folder else { return Ok(()) };
        std::fs::create_dir_all(folder)
            .map_err(|error| anyhow::anyhow!("{}: cannot create the folder: {error}", folder.display()))?;
        let json = output::json("lab", findings, &global.warnings) + "\n";
        for (name, text) in [("lab.json", json), ("lab.html", report::html(findings))] {
            let path = folder.join(name);
            write_whole(&path, &text)
                .map_err(|error| anyhow::anyhow!("{}: cannot write: {error}", path.display()))?;
        }
        Ok(())
    }

    fn say(&self) {
        if let Some(folder) = &self.folder {
            output::print(&format!("\n{}\n", clean(&folder.join("lab.html").display().to_string())));
        }
    }
}

/// Writes a file atomically.
fn write_whole(path: &Path, text: &str) -> std::io::Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let partial = path.with_file_name(format!(".{name}.ballast-partial-{}", std::process::id()));
    let written = std::fs::File::create(&partial).and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        file.sync_all()
    });
    let done = written.and_then(|()| std::fs::rename(&partial, path));
    if done.is_err() {
        let _ = std::fs::remove_file(&partial);
    }
    done
}

fn words(findings: &Findings, args: &LabArgs) -> String {
    let input = &findings.input;
    let mut text = format!(
        "{}: {}, {} parameters in {}\n{} tokens in {} of {}; reference in {}: loss {:.6}, perplexity {:.4}\n\n",
        clean(&findings.model),
        clean(&findings.model_type),
        count(findings.parameters),
        plural(findings.layers, "layer"),
        count(input.tokens as u64),
        plural(input.sequences, "sequence"),
        clean(&input.source),
        findings.reference.arithmetic,
        findings.reference.loss,
        findings.reference.perplexity,
    );
    if args.compare.is_some() || args.dump.is_some() {
        for run in &findings.runs {
            text += &difference_text(run, &findings.notes, args);
        }
    } else {
        text += &format!("{}\n", runs_table(findings));
        text += &format!("{}\n", wrap(&report::headline(findings).replace('`', "")));
        if let Some(training) = &findings.training {
            text += &format!("\n{}\n", training_table(training));
        }
        if !findings.decoding.is_empty() {
            text += &format!("\n{}\n", decoding_table(&findings.decoding));
        }
        for answer in &findings.answers {
            text += &format!("\n{} {}.\n{}\n", answer.question, answer.short, wrap(&answer.text));
        }
    }
    let memory = findings.peak_memory_bytes.map_or_else(|| "unknown".into(), bytes);
    text + &format!("\n{}, peak memory {memory}\n", duration(findings.seconds))
}

/// Wraps text at 100 columns, indented by two.
fn wrap(text: &str) -> String {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let line = lines.last_mut().expect("there is one");
        if !line.is_empty() && line.chars().count() + word.chars().count() + 3 > 100 {
            lines.push(word.into());
        } else {
            line.push_str(if line.is_empty() { "" } else { " " });
            line.push_str(word);
        }
    }
    lines.iter().map(|line| format!("  {line}")).collect::<Vec<_>>().join("\n")
}

fn runs_table(findings: &Findings) -> Table {
    let headings =
        ["policy", ">loss", ">KL mean", ">p99", ">max", ">top-1", ">gradients", "first difference"];
    let mut rows = table(&headings);
    for run in &findings.runs {
        let place = match (&run.not_finite, &run.first_difference) {
            (Some(bad), _) => format!("{}: {} non-finite", bad.site, count(bad.count as u64)),
            (None, Some(site)) => site.clone(),
            (None, None) if run.name == "f32" => "f32 baseline".into(),
            (None, None) if findings.changes_gradients_alone(run) => "gradients alone".into(),
            (None, None) => "none, same bits as f32".into(),
        };
        rows.add_row([
            clean(&run.name),
            signed(run.loss_difference),
            number(run.kl.mean),
            number(run.kl.p99),
            number(run.kl.max),
            exact_percent(run.top1_agreement),
            run.gradient_error.map_or_else(|| "-".into(), number),
            clean(&place),
        ]);
    }
    rows
}

fn training_table(training: &ballast_lab::findings::Training) -> Table {
    let mut rows =
        table(&["training", ">first loss", ">last loss", ">drift", ">protected drift", "non-finite"]);
    for run in &training.runs {
        let loss = |loss: Option<&f64>| loss.map_or_else(|| "-".into(), |loss| format!("{loss:.5}"));
        rows.add_row([
            clean(&run.name),
            loss(run.losses.first()),
            loss(run.losses.last()),
            number(run.drift),
            run.protected_drift.map_or_else(|| "-".into(), number),
            run.not_finite.map_or_else(String::new, |step| format!("at step {step}")),
        ]);
    }
    rows
}

fn decoding_table(runs: &[DecodingRun]) -> Table {
    let mut rows = table(&["decoding", ">KL mean", ">p99", ">max", ">top-1"]);
    for run in runs {
        rows.add_row([
            clean(&run.name),
            number(run.kl.mean),
            number(run.kl.p99),
            number(run.kl.max),
            exact_percent(run.top1_agreement),
        ]);
    }
    rows
}

/// Formats the first difference between two runs, and the sites around it.
fn difference_text(run: &Run, notes: &[String], args: &LabArgs) -> String {
    let mut text = String::new();
    text += &match &run.first_difference {
        Some(site) => format!("{} first differs at {}.\n", clean(&run.name), clean(site)),
        None if run.kind == Kind::Dump => {
            format!("{} agrees within {} everywhere.\n", clean(&run.name), number(args.tolerance))
        }
        None => format!("{} gives the same values everywhere.\n", clean(&run.name)),
    };
    let mut rows = table(&["tensor", ">error", ">max difference", ">max value"]);
    let first = run.sites.iter().position(|site| Some(&site.site) == run.first_difference.as_ref());
    let around = first.map_or(0..0, |at| at.saturating_sub(2)..(at + 8).min(run.sites.len()));
    let last = run.sites.len().saturating_sub(1);
    for (i, site) in run.sites.iter().enumerate() {
        if around.contains(&i) || i == last || site.site.ends_with(".out") {
            rows.add_row([clean(&site.site), number(site.error), number(site.max_abs), number(site.largest)]);
        }
    }
    text += &format!("{rows}\n");
    let compared = plural(run.sites.len(), "tensor");
    text += &format!("{compared} and {} compared\n", plural(run.gradients.len(), "gradient"));
    for note in notes {
        text += &format!("{}\n", clean(note));
    }
    if !run.has_outputs() {
        text += "no logits in the dump: outputs were not compared\n";
    } else {
        text += &format!(
            "loss {:.6} ({}), KL {} per token (p99 {}, largest {}), same top-1 token for {}\n",
            run.loss,
            signed(run.loss_difference),
            number(run.kl.mean),
            number(run.kl.p99),
            number(run.kl.max),
            exact_percent(run.top1_agreement)
        );
    }
    if let Some(error) = run.gradient_error {
        let worst = run.gradients.iter().max_by(|a, b| a.error.total_cmp(&b.error));
        text += &format!("gradient error {}", number(error));
        text += &worst
            .map_or_else(String::new, |g| format!(", largest {} with {}", clean(&g.tensor), number(g.error)));
        text += "\n";
    }
    text
}
