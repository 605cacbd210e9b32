//! `ballast eval`

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::time::Instant;

use ballast_files::encoding::BYTE_ORDER_MARK;
use ballast_files::jobs::Observer;
use ballast_files::regular::open_regular;
use ballast_model::text::perplexity::{Perplexity, windows};
use ballast_model::text::{PieceEncoder, Token, Tokenizer, folder_of};
use ballast_model::{Error, memory};
use clap::Args;
use serde::Serialize;

use super::Global;
use super::model::{AdapterArg, PrecisionArg, load, peak, rate};
use crate::exit::{Outcome, Usage};
use crate::output::{self, clean, count, table};

/// Measure a model's perplexity on a text, with its standard error.
///
/// Documents are tokenized one by one, with the tokenizer's special tokens, and concatenated. The tokens are
/// cut into windows that do not overlap, and every token but the first of a window is predicted. Published
/// figures are computed this way; they depend on the window, so compare equal windows only. With --stride
/// below the window, windows overlap and a token counts in the first window that predicts it.
///
/// The standard error is that of the mean over windows, because the tokens of a window depend on each other;
/// for the perplexity it is multiplied by the perplexity. Bits per byte compare models with different
/// tokenizers.
#[derive(Args)]
pub(crate) struct EvalArgs {
    /// Model: a folder, an index or a safetensors file, with tokenizer.json beside it; or hf://ORG/NAME.
    model: PathBuf,
    /// Text: one document, or a .jsonl file with a `text` on every line.
    #[arg(long, value_name = "FILE")]
    data: PathBuf,
    /// Number of tokens per window [default: 2048, or the model's positions if fewer].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    window: Option<u32>,
    /// Number of tokens between the starts of two windows [default: the window].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    stride: Option<u32>,
    /// Evaluate the first N tokens only.
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

pub(crate) fn run(mut args: EvalArgs, global: &Global) -> anyhow::Result<Outcome> {
    args.model = super::local(&args.model, global)?;
    let progress = global.progress();
    let precision = args.precision.name(&args.model, &global.warnings)?;
    let tokenizer = Tokenizer::load(&folder_of(&args.model))?;
    let text = Tokens::read(&args.data, &tokenizer, args.max_tokens)?;
    let (model, _) = load(&args.model, &precision, &args.adapter, &global.warnings)?;
    text.check(model.config.vocabulary, &tokenizer)?;
    let window = args.window.map_or(DEFAULT_WINDOW.min(model.config.max_positions), |n| n as usize);
    let stride = args.stride.map_or(window, |n| n as usize);
    if stride > window {
        return Err(Usage(format!("--stride must be at most the window ({window}), got {stride}")).into());
    }
    global.warnings.check_length("a window", window, model.config.max_positions);
    let windows = windows(text.ids.len(), window, stride);
    let begun = Instant::now();
    progress.tokens("evaluating", windows.iter().map(|w| w.tokens.len() as u64).sum());
    let mut sums = Vec::new();
    for window in &windows {
        if progress.cancelled() {
            return Err(ballast_files::Error::Interrupted.into());
        }
        sums.push(model.window_nll(&text.ids, window)?);
        progress.advance(window.tokens.len() as u64);
    }
    progress.finish();
    let time = begun.elapsed();
    let result = Perplexity::of(&sums);
    if !result.nll.is_finite() {
        return Err(Error::NotFinite(format!("mean loss is {}", result.nll)).into());
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
        global.print_json("eval", &report);
    } else {
        output::print(&words(&report));
    }
    Ok(Outcome::Ok)
}

fn words(report: &Report) -> String {
    let error = |value: Option<f64>| {
        value.map_or(" (no standard error: one window)".into(), |e| format!(" ± {e:.4}"))
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

/// The tokens of a data file.
struct Tokens {
    ids: Vec<u32>,
    documents: usize,
    /// Bytes of the text that the ids cover.
    bytes: usize,
}

impl Tokens {
    /// Reads as much of the file as `limit` tokens need.
    fn read(file: &Path, tokenizer: &Tokenizer, limit: Option<usize>) -> anyhow::Result<Tokens> {
        let mut tokens = Tokens { ids: Vec::new(), documents: 0, bytes: 0 };
        let mut source = Source::open(file)?;
        if file.extension().is_some_and(|e| e == "jsonl") {
            tokens.read_lines(&mut source, tokenizer, limit)?;
        } else {
            tokens.read_text(&mut source, tokenizer, limit)?;
        }
        if tokens.ids.len() < 2 {
            let found = output::plural(tokens.ids.len(), "token");
            return Err(source.error(format!("at least 2 tokens are needed, found {found}")).into());
        }
        Ok(tokens)
    }

    /// Reads the file as one document.
    fn read_text(
        &mut self,
        source: &mut Source,
        tokenizer: &Tokenizer,
        limit: Option<usize>,
    ) -> anyhow::Result<()> {
        let most = limit.unwrap_or(usize::MAX);
        let mut encoder = PieceEncoder::new(tokenizer, true);
        let (mut length, mut last) = (0, 0);
        let mut take = |tokens: Vec<Token>, ids: &mut Vec<u32>| {
            for token in tokens.into_iter().take(most - ids.len()) {
                ids.push(token.id);
                last = last.max(token.end);
            }
        };
        while self.ids.len() < most {
            let text = source.next_part()?;
            if text.is_empty() {
                take(encoder.finish()?, &mut self.ids);
                break;
            }
            length += text.len();
            take(encoder.push(&text)?, &mut self.ids);
        }
        self.documents = usize::from(most > 0);
        self.bytes = if limit.is_none() { length } else { last };
        Ok(())
    }

    /// Reads a document from the `text` of every line.
    fn read_lines(
        &mut self,
        source: &mut Source,
        tokenizer: &Tokenizer,
        limit: Option<usize>,
    ) -> anyhow::Result<()> {
        let most = limit.unwrap_or(usize::MAX);
        for number in 1.. {
            if self.ids.len() >= most {
                break;
            }
            let Some(line) = source.next_line()? else { break };
            if line.trim().is_empty() {
                continue;
            }
            let document =
                text_field(&line).map_err(|problem| source.error(format!("line {number}: {problem}")))?;
            self.documents += 1;
            if limit.is_none() {
                self.ids.extend(tokenizer.encode(&document, true)?);
                self.bytes += document.len();
                continue;
            }
            let (ids, ends) = tokenizer.encode_first(&document, true, most - self.ids.len())?;
            self.ids.extend(ids);
            self.bytes += ends.into_iter().max().unwrap_or(0);
        }
        Ok(())
    }

    fn check(&self, vocabulary: usize, tokenizer: &Tokenizer) -> anyhow::Result<()> {
        match self.ids.iter().find(|id| **id as usize >= vocabulary) {
            None => Ok(()),
            Some(id) => Err(Error::Text {
                file: tokenizer.file().into(),
                problem: format!("token id {id} is outside the model's vocabulary of {vocabulary}"),
            }
            .into()),
        }
    }
}

/// Returns the `text` of a line, or the problem with the line.
fn text_field(line: &str) -> Result<String, String> {
    let mut value: serde_json::Value =
        serde_json::from_str(line).map_err(|error| format!("not valid JSON: {error}"))?;
    match value.get_mut("text").map(serde_json::Value::take) {
        Some(serde_json::Value::String(text)) => Ok(text),
        _ => Err("no string `text`".into()),
    }
}

/// A UTF-8 file that is read in parts, without a byte-order mark at its start.
struct Source {
    file: PathBuf,
    reader: BufReader<File>,
    /// Number of bytes read.
    at: usize,
    /// First bytes of a character that the last part cut.
    cut: Vec<u8>,
}

/// Size of a part in bytes.
const PART: usize = 64 << 10;

impl Source {
    fn open(file: &Path) -> Result<Source, Error> {
        let fail = |error: std::io::Error| Error::Text {
            file: file.into(),
            problem: format!("cannot read: {error}"),
        };
        let mut reader = BufReader::with_capacity(PART, open_regular(file).map_err(fail)?);
        let mark = reader.fill_buf().map_err(fail)?.starts_with(BYTE_ORDER_MARK);
        let at = if mark { BYTE_ORDER_MARK.len() } else { 0 };
        reader.consume(at);
        Ok(Source { file: file.into(), reader, at, cut: Vec::new() })
    }

    fn error(&self, problem: String) -> Error {
        Error::Text { file: self.file.clone(), problem }
    }

    /// Returns the next part; empty at the end of the file.
    fn next_part(&mut self) -> Result<String, Error> {
        let mut bytes = std::mem::take(&mut self.cut);
        let room = PART as u64;
        let read = (&mut self.reader).take(room).read_to_end(&mut bytes);
        let read = read.map_err(|error| self.error(format!("cannot read: {error}")))?;
        let begin = self.at;
        let text = match String::from_utf8(bytes) {
            Ok(text) => text,
            Err(error) => {
                let (valid, bad) = (error.utf8_error().valid_up_to(), error.utf8_error().error_len());
                let mut bytes = error.into_bytes();
                // The end of a part may cut a character, the end of the file may not.
                if bad.is_some() || read == 0 {
                    return Err(self.not_utf8(begin + valid));
                }
                self.cut = bytes.split_off(valid);
                String::from_utf8(bytes).map_err(|_| self.not_utf8(begin))?
            }
        };
        self.at += text.len();
        Ok(text)
    }

    /// Returns the next line; `None` at the end of the file.
    fn next_line(&mut self) -> Result<Option<String>, Error> {
        let mut bytes = Vec::new();
        let read = self.reader.read_until(b'\n', &mut bytes);
        let read = read.map_err(|error| self.error(format!("cannot read: {error}")))?;
        let begin = self.at;
        self.at += read;
        let line = String::from_utf8(bytes)
            .map_err(|error| self.not_utf8(begin + error.utf8_error().valid_up_to()))?;
        Ok((read > 0).then_some(line))
    }

    fn not_utf8(&self, byte: usize) -> Error {
        self.error(format!("not UTF-8 from byte {byte}"))
    }
}
