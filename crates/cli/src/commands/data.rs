//! `ballast data`

use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::Arc;

use ballast_files::jobs::Observer;
use ballast_format::percent;
use ballast_hub as hub;
use ballast_model::batch::IGNORED;
use ballast_train::data::{
    DataConfig, DataFile, Document, Files, MicroBatch, Origin, Packer, Packing, Permutation, Split,
    TextEncoder,
};
use clap::{Args, Subcommand, ValueEnum};
use rayon::prelude::*;
use serde::Serialize;

use super::Global;
use crate::exit::Outcome;
use crate::output::{self, clean, clean_lines, count, plural, table};
use crate::progress::Progress;

/// Inspect training data: documents, tokens, and which of them are trained on.
#[derive(Args)]
pub(crate) struct DataArgs {
    #[command(subcommand)]
    operation: Operation,
}

#[derive(Subcommand)]
enum Operation {
    Inspect(InspectArgs),
}

/// Show documents, tokens, lengths, and samples with the trained tokens marked.
///
/// Every line of a .jsonl file has `text`, `messages` (formatted by the chat template; the assistant's
/// messages are trained on) or `prompt` and `completion` (the completion is trained on). Any other file is
/// plain text.
///
/// Trained tokens are bold and green on a terminal, and in ⟦brackets⟧ elsewhere. Every document read is
/// checked; --all checks the whole files.
///
/// The exit code is 1 if there is nothing to train on.
#[derive(Args)]
struct InspectArgs {
    /// Data files.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Model folder with tokenizer.json and the chat template, or hf://ORG/NAME.
    #[arg(long, value_name = "FOLDER")]
    model: PathBuf,
    /// Number of documents to show.
    #[arg(long, value_name = "N", default_value_t = 3)]
    samples: usize,
    /// Read all documents instead of a sample of 10,000.
    #[arg(long)]
    all: bool,
    /// Largest number of tokens in a sequence.
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = clap::value_parser!(u32).range(2..=1 << 22))]
    sequence_length: u32,
    /// Packing of documents into sequences.
    #[arg(long, value_name = "PACKING", default_value = "packed")]
    packing: PackingArg,
    /// Roles to train on.
    #[arg(long, value_name = "ROLE,...", value_delimiter = ',', default_value = "assistant")]
    train_roles: Vec<String>,
    /// Line that separates two documents of plain text [default: a file is one document].
    #[arg(long, value_name = "LINE", allow_hyphen_values = true)]
    document_separator: Option<String>,
    /// Append no end-of-text token to texts and completions.
    #[arg(long)]
    no_eos: bool,
    /// Random seed of the sample and its order.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
}

#[derive(Clone, Copy, ValueEnum)]
enum PackingArg {
    /// Documents end to end, each a sequence of its own.
    Packed,
    /// One document per sequence; the rest of a longer one is dropped.
    Padded,
}

/// Number of documents read without --all.
const SAMPLE: usize = 10_000;

/// Number of documents read between two updates of the progress.
const CHUNK: usize = 256;

/// Number of tokens shown of a document.
const SHOWN_TOKENS: usize = 1000;

/// Number of sequences shown of a micro-batch.
const SHOWN_SEQUENCES: usize = 20;

/// Number of full sequences that fit in the shown micro-batch.
const SEQUENCES: usize = 4;

impl InspectArgs {
    fn config(&self) -> DataConfig {
        let file = |path: &PathBuf| DataFile { path: path.clone(), weight: 1.0 };
        DataConfig {
            files: self.files.iter().map(file).collect(),
            validation_fraction: 0.0,
            sequence_length: self.sequence_length as usize,
            packing: match self.packing {
                PackingArg::Packed => Packing::Packed,
                PackingArg::Padded => Packing::Padded,
            },
            train_roles: self.train_roles.clone(),
            add_eos: !self.no_eos,
            document_separator: self.document_separator.clone(),
            ..DataConfig::default()
        }
    }
}

pub(crate) fn run(args: DataArgs, global: &Global) -> anyhow::Result<Outcome> {
    match args.operation {
        Operation::Inspect(args) => inspect(args, global),
    }
}

fn inspect(mut args: InspectArgs, global: &Global) -> anyhow::Result<Outcome> {
    args.model = super::local_part(&args.model, hub::Part::BesideWeights, global)?;
    let progress = global.progress();
    let (config, encoder) = (args.config(), Arc::new(TextEncoder::load(&args.model)?));
    let files = Files::open(&config, Split::Train, encoder.clone(), args.seed)?;
    let documents = files.len();
    let read = if args.all { documents } else { documents.min(SAMPLE) };
    let mut statistics = Statistics::default();
    let mut samples = Vec::new();
    read_sample(&files, read, args.seed, &progress, |document| {
        statistics.add(&document, config.sequence_length);
        if samples.len() < args.samples {
            samples.push(document);
        }
    })?;
    let micro_batch = match statistics.training_documents {
        0 => None,
        _ => {
            let mut packer = Packer::new(Box::new(files), config.packing, config.sequence_length, SEQUENCES);
            Some(packer.next()?)
        }
    };
    let report = Report {
        files: args.files.iter().map(|file| file.display().to_string()).collect(),
        documents,
        documents_read: read,
        all_read: read == documents,
        figures: statistics.figures(),
        samples: samples
            .iter()
            .map(|document| Sample::new(document, &encoder))
            .collect::<anyhow::Result<_>>()?,
        sequence_length: config.sequence_length,
        packing: config.packing,
        micro_batch: micro_batch.as_ref().map(boundaries),
    };
    if global.json {
        global.print_json("data.inspect", &report);
    } else {
        output::print(&words(&report));
    }
    Ok(if micro_batch.is_some() { Outcome::Ok } else { Outcome::CheckFailed })
}

/// Reads the first `read` documents in the order of the seed.
fn read_sample(
    files: &Files,
    read: usize,
    seed: u64,
    progress: &Progress,
    mut each: impl FnMut(Document),
) -> anyhow::Result<()> {
    let order = Permutation::new(files.len() as u64, seed);
    progress.documents("reading", read as u64);
    for begin in (0..read).step_by(CHUNK) {
        if progress.cancelled() {
            return Err(ballast_files::Error::Interrupted.into());
        }
        let chunk = begin..read.min(begin + CHUNK);
        progress.advance(chunk.len() as u64);
        let documents: Vec<_> =
            chunk.into_par_iter().map(|k| files.document(order.at(k as u64) as usize)).collect();
        for document in documents {
            each(document?);
        }
    }
    progress.finish();
    Ok(())
}

#[derive(Serialize)]
struct Report {
    files: Vec<String>,
    documents: usize,
    documents_read: usize,
    /// True if the figures below cover all documents.
    all_read: bool,
    #[serde(flatten)]
    figures: Figures,
    samples: Vec<Sample>,
    sequence_length: usize,
    packing: Packing,
    micro_batch: Option<Boundaries>,
}

#[derive(Default)]
struct Statistics {
    lengths: Vec<usize>,
    trained: usize,
    training_documents: usize,
    longer: usize,
}

/// Figures over the documents read.
#[derive(Serialize)]
struct Figures {
    tokens: usize,
    trained_tokens: usize,
    trained_share: f64,
    /// Documents without trained tokens; training skips them.
    untrained_documents: usize,
    /// Documents longer than a sequence.
    longer_documents: usize,
    lengths: Lengths,
}

/// Percentiles of tokens per document.
#[derive(Serialize)]
struct Lengths {
    least: usize,
    p10: usize,
    median: usize,
    p90: usize,
    p99: usize,
    most: usize,
    mean: f64,
}

impl Statistics {
    fn add(&mut self, document: &Document, sequence_length: usize) {
        self.lengths.push(document.ids.len());
        self.trained += document.trained.iter().filter(|trained| **trained).count();
        self.training_documents += document.trains() as usize;
        self.longer += (document.ids.len() > sequence_length) as usize;
    }

    fn figures(mut self) -> Figures {
        self.lengths.sort_unstable();
        let (n, tokens) = (self.lengths.len(), self.lengths.iter().sum());
        // The smallest length that this share of documents does not exceed.
        let percentile = |part: f64| self.lengths[((part * n as f64).ceil() as usize).clamp(1, n) - 1];
        Figures {
            tokens,
            trained_tokens: self.trained,
            trained_share: self.trained as f64 / (tokens.max(1)) as f64,
            untrained_documents: n - self.training_documents,
            longer_documents: self.longer,
            lengths: Lengths {
                least: percentile(0.0),
                p10: percentile(0.1),
                median: percentile(0.5),
                p90: percentile(0.9),
                p99: percentile(0.99),
                most: percentile(1.0),
                mean: tokens as f64 / n as f64,
            },
        }
    }
}

/// A document as shown.
#[derive(Serialize)]
struct Sample {
    #[serde(flatten)]
    origin: Origin,
    tokens: usize,
    trained_tokens: usize,
    /// The first SHOWN_TOKENS tokens.
    parts: Vec<Part>,
    tokens_not_shown: usize,
}

/// Consecutive tokens that are all trained on, or all not.
#[derive(Serialize)]
struct Part {
    trained: bool,
    text: String,
}

impl Sample {
    fn new(document: &Document, encoder: &TextEncoder) -> anyhow::Result<Sample> {
        let shown = document.ids.len().min(SHOWN_TOKENS);
        let mut parts = Vec::new();
        let mut ids = &document.ids[..shown];
        for run in document.trained[..shown].chunk_by(|a, b| a == b) {
            let (part, rest) = ids.split_at(run.len());
            parts.push(Part { trained: run[0], text: encoder.tokenizer.decode(part, false)? });
            ids = rest;
        }
        Ok(Sample {
            origin: document.origin.clone(),
            tokens: document.ids.len(),
            trained_tokens: document.trained.iter().filter(|trained| **trained).count(),
            parts,
            tokens_not_shown: document.ids.len() - shown,
        })
    }

    fn words(&self, colored: bool) -> String {
        let mut out = format!(
            "\n{}: {}, {} trained\n",
            clean(&self.origin.to_string()),
            plural(self.tokens, "token"),
            count(self.trained_tokens as u64)
        );
        for Part { trained, text } in &self.parts {
            let text = text.split('\t').map(clean_lines).collect::<Vec<_>>().join("\t");
            out += &match (trained, colored) {
                (false, _) => text,
                (true, true) => format!("\x1b[1;32m{text}\x1b[0m"),
                (true, false) => format!("⟦{text}⟧"),
            };
        }
        if self.tokens_not_shown > 0 {
            out += &format!(" ... and {} more", plural(self.tokens_not_shown, "token"));
        }
        if out.ends_with('\n') { out } else { out + "\n" }
    }
}

/// The sequences of a micro-batch.
#[derive(Serialize)]
struct Boundaries {
    tokens: usize,
    /// Predicted tokens: trained on, and not the first of their sequence.
    targets: usize,
    sequences: Vec<Sequence>,
}

#[derive(Serialize)]
struct Sequence {
    begin: usize,
    end: usize,
    targets: usize,
    #[serde(flatten)]
    origin: Origin,
}

fn boundaries(MicroBatch { batch, origins }: &MicroBatch) -> Boundaries {
    let sequence = |(ends, origin): (&[usize], &Origin)| Sequence {
        begin: ends[0],
        end: ends[1],
        targets: batch.targets[ends[0]..ends[1]].iter().filter(|target| **target != IGNORED).count(),
        origin: origin.clone(),
    };
    let sequences = batch.cu_seqlens.windows(2).zip(origins).map(sequence).collect();
    Boundaries { tokens: batch.tokens(), targets: batch.counted(), sequences }
}

fn words(report: &Report) -> String {
    let figures = &report.figures;
    let lengths = &figures.lengths;
    let number = |n: usize| count(n as u64);
    let read = match report.all_read {
        true => "all read".to_string(),
        false => format!("a sample of {} read (--all reads all)", number(report.documents_read)),
    };
    let mut table = table(&["data", &clean(&report.files.join(", "))]);
    for (name, value) in [
        ("documents", format!("{}, {read}", number(report.documents))),
        ("tokens", format!("{} in the documents read", number(figures.tokens))),
        (
            "trained tokens",
            format!("{} ({})", number(figures.trained_tokens), percent(figures.trained_share)),
        ),
        ("without trained tokens", plural(figures.untrained_documents, "document")),
        (
            "longer than a sequence",
            format!(
                "{} (sequence length {})",
                plural(figures.longer_documents, "document"),
                report.sequence_length
            ),
        ),
        (
            "tokens per document",
            format!(
                "min {}, p10 {}, median {}, p90 {}, p99 {}, max {}, mean {:.1}",
                number(lengths.least),
                number(lengths.p10),
                number(lengths.median),
                number(lengths.p90),
                number(lengths.p99),
                number(lengths.most),
                lengths.mean
            ),
        ),
    ] {
        table.add_row([name.to_string(), value]);
    }
    let mut out = format!("{table}\n");
    let colored = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    for sample in &report.samples {
        out += &sample.words(colored);
    }
    match &report.micro_batch {
        Some(boundaries) => out + &micro_batch_words(boundaries, report.packing),
        None => out + "\nno tokens to train on\n",
    }
}

fn micro_batch_words(boundaries: &Boundaries, packing: Packing) -> String {
    let mut table = table(&[">from", ">to", ">tokens", ">predicted", "document"]);
    for sequence in boundaries.sequences.iter().take(SHOWN_SEQUENCES) {
        table.add_row([
            sequence.begin.to_string(),
            sequence.end.to_string(),
            (sequence.end - sequence.begin).to_string(),
            sequence.targets.to_string(),
            clean(&sequence.origin.to_string()),
        ]);
    }
    let name = match packing {
        Packing::Packed => "packed",
        Packing::Padded => "padded",
    };
    let more = match boundaries.sequences.len().saturating_sub(SHOWN_SEQUENCES) {
        0 => String::new(),
        more => format!("and {}\n", plural(more, "more sequence")),
    };
    format!(
        "\na {name} micro-batch: {} in {}, {} predicted\n{table}\n{more}",
        plural(boundaries.tokens, "token"),
        plural(boundaries.sequences.len(), "sequence"),
        count(boundaries.targets as u64)
    )
}
