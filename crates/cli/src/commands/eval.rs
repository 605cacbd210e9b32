//! `ballast eval`

use std::path::{Path, PathBuf};
use std::time::Instant;

use ballast_checkpoint::jobs::Observer;
use ballast_model::text::perplexity::{Perplexity, windows};
use ballast_model::text::{Tokenizer, folder_of};
use ballast_model::{Error, memory};
use clap::Args;
use serde::Serialize;

use super::Global;
use super::model::{AdapterArg, PrecisionArg, load, peak, rate};
use crate::exit::{Outcome, Usage};
use crate::output::{self, clean, count, table};

/// Perplexity of a model on a text, with its standard error.
///
/// The documents are turned into tokens one by one, each with what the tokenizer puts around a text, and laid end to end;
/// the tokens are cut into windows that do not overlap, and every token but a window's first is predicted. This is what
/// published figures mean, and it depends on the window's length: compare like with like. With `--stride` below the
/// window, windows overlap and a token counts in the first window that predicts it.
///
/// The standard error is that of the mean over windows, since tokens of one window depend on each other; the perplexity's
/// is that times the perplexity. Bits per byte are the mean over predicted tokens for the bytes of a mean token, so
/// models with different tokenizers can be compared.
#[derive(Args)]
pub(crate) struct EvalArgs {
    /// A model: a folder, an index or a safetensors file, with tokenizer.json beside it.
    model: PathBuf,
    /// The text: one document, or JSON lines with a `text` each (.jsonl).
    #[arg(long, value_name = "FILE")]
    data: PathBuf,
    /// Tokens that are read together [default: 2048, or what the model was made for if that is less].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    window: Option<u32>,
    /// Tokens from one window's begin to the next [default: the window].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    stride: Option<u32>,
    /// Use the first N tokens only.
    #[arg(long, value_name = "N")]
    max_tokens: Option<usize>,
    #[command(flatten)]
    precision: PrecisionArg,
    #[command(flatten)]
    adapter: AdapterArg,
}

const DEFAULT_WINDOW: usize = 2048;

#[derive(Serialize)]
struct Report {
    data: String,
    precision: String,
    documents: usize,
    tokens: usize,
    bytes: usize,
    window: usize,
    stride: usize,
    windows: usize,
    #[serde(flatten)]
    result: Perplexity,
    bits_per_byte: f64,
    seconds: f64,
    tokens_per_second: f64,
    peak_memory_bytes: Option<u64>,
}

pub(crate) fn run(args: EvalArgs, global: &Global) -> anyhow::Result<Outcome> {
    let progress = global.progress();
    let precision = args.precision.name(&args.model)?;
    let tokenizer = Tokenizer::load(&folder_of(&args.model))?;
    let text = Tokens::read(&args.data, &tokenizer, args.max_tokens)?;
    let (model, _) = load(&args.model, &precision, &args.adapter)?;
    text.check(model.config.vocabulary, &tokenizer)?;
    let window = args.window.map_or(DEFAULT_WINDOW.min(model.config.max_positions), |n| n as usize);
    let stride = args.stride.map_or(window, |n| n as usize);
    if stride > window {
        return Err(Usage(format!("--stride {stride} leaves tokens out between windows of {window}")).into());
    }
    if window > model.config.max_positions {
        eprintln!(
            "warning: windows of {window} tokens; the model was made for {}",
            model.config.max_positions
        );
    }
    let windows = windows(text.ids.len(), window, stride);
    let begun = Instant::now();
    progress.tokens("evaluating", windows.iter().map(|w| w.tokens.len() as u64).sum());
    let mut sums = Vec::new();
    for window in &windows {
        if progress.cancelled() {
            return Err(ballast_checkpoint::Error::Interrupted.into());
        }
        sums.push(model.window_nll(&text.ids, window)?);
        progress.advance(window.tokens.len() as u64);
    }
    progress.finish();
    let time = begun.elapsed();
    let result = Perplexity::of(&sums);
    if !result.nll.is_finite() {
        return Err(Error::NotFinite(format!("the mean loss is {}", result.nll)).into());
    }
    let read = windows.iter().map(|w| w.tokens.len()).sum();
    let report = Report {
        data: args.data.display().to_string(),
        precision,
        documents: text.documents,
        tokens: text.ids.len(),
        bytes: text.bytes,
        window,
        stride,
        windows: windows.len(),
        bits_per_byte: result.nll / std::f64::consts::LN_2 * text.ids.len() as f64 / text.bytes.max(1) as f64,
        result,
        seconds: time.as_secs_f64(),
        tokens_per_second: rate(read, time),
        peak_memory_bytes: memory::peak(),
    };
    if global.json {
        output::print_json("eval", &report);
    } else {
        output::print(&words(&report));
    }
    Ok(Outcome::Ok)
}

fn words(report: &Report) -> String {
    let error = |value: Option<f64>| {
        value.map_or(" (one window: no standard error)".into(), |e| format!(" ± {e:.4}"))
    };
    let result = &report.result;
    let stride =
        if report.stride < report.window { format!(", {} apart", report.stride) } else { String::new() };
    let mut table = table(&["eval", &clean(&report.data)]);
    for (name, value) in [
        ("precision", report.precision.clone()),
        ("tokens", format!("{}, {} predicted", count(report.tokens as u64), count(result.predicted as u64))),
        ("windows", format!("{} of {} tokens{stride}", count(report.windows as u64), report.window)),
        ("nll per token", format!("{:.4}{}", result.nll, error(result.nll_error))),
        ("perplexity", format!("{:.4}{}", result.perplexity, error(result.perplexity_error))),
        ("bits per byte", format!("{:.4}", report.bits_per_byte)),
        ("speed", format!("{} tokens/s", count(report.tokens_per_second as u64))),
        ("peak memory", peak()),
    ] {
        table.add_row([name.to_string(), value]);
    }
    format!("{table}\n")
}

/// The tokens of a file.
struct Tokens {
    ids: Vec<u32>,
    documents: usize,
    /// Of the text that the ids stand for.
    bytes: usize,
}

impl Tokens {
    fn read(file: &Path, tokenizer: &Tokenizer, limit: Option<usize>) -> anyhow::Result<Tokens> {
        let bad = |problem: String| Error::Text { file: file.into(), problem };
        let bytes = std::fs::read(file).map_err(|error| bad(format!("cannot read: {error}")))?;
        let text = String::from_utf8(bytes)
            .map_err(|error| bad(format!("not UTF-8 from byte {}", error.utf8_error().valid_up_to())))?;
        let documents = if file.extension().is_some_and(|e| e == "jsonl") {
            text_fields(&text).map_err(|(line, problem)| bad(format!("line {line}: {problem}")))?
        } else {
            vec![text]
        };
        let mut tokens = Tokens { ids: Vec::new(), documents: 0, bytes: 0 };
        for document in &documents {
            let room = limit.unwrap_or(usize::MAX) - tokens.ids.len();
            if room == 0 {
                break;
            }
            tokens.documents += 1;
            if limit.is_none() {
                tokens.ids.extend(tokenizer.encode(document, true)?);
                tokens.bytes += document.len();
                continue;
            }
            let (mut ids, mut ends) = tokenizer.encode_with_ends(document, true)?;
            ids.truncate(room);
            ends.truncate(room);
            tokens.ids.extend(ids);
            tokens.bytes += ends.into_iter().max().unwrap_or(0);
        }
        if tokens.ids.len() < 2 {
            return Err(
                bad(format!("{} in it; two are needed", output::plural(tokens.ids.len(), "token"))).into()
            );
        }
        Ok(tokens)
    }

    fn check(&self, vocabulary: usize, tokenizer: &Tokenizer) -> anyhow::Result<()> {
        match self.ids.iter().find(|id| **id as usize >= vocabulary) {
            None => Ok(()),
            Some(id) => Err(Error::Text {
                file: tokenizer.file().into(),
                problem: format!("it gives the id {id}, outside the model's vocabulary of {vocabulary}"),
            }
            .into()),
        }
    }
}

/// The `text` of every line, or the line that has none.
fn text_fields(lines: &str) -> Result<Vec<String>, (usize, String)> {
    let field = |line: &str| -> Result<String, String> {
        let mut value: serde_json::Value =
            serde_json::from_str(line).map_err(|error| format!("not valid JSON: {error}"))?;
        match value.get_mut("text").map(serde_json::Value::take) {
            Some(serde_json::Value::String(text)) => Ok(text),
            _ => Err("no string `text`".into()),
        }
    };
    let lines = (1..).zip(lines.lines()).filter(|(_, line)| !line.trim().is_empty());
    lines.map(|(number, line)| field(line).map_err(|problem| (number, problem))).collect()
}
