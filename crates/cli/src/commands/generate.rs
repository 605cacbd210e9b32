//! `ballast generate`

use std::io::{BufRead, IsTerminal};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context;
use ballast_files::encoding::text_without_mark;
use ballast_files::jobs::Observer;
use ballast_files::regular::{MOST_BYTES, read_bounded, read_regular_text, utf8};
use ballast_model::text::{
    ChatTemplate, Conversation, Generation, GenerationSettings, Sampler, Sampling, Tokenizer, folder_of,
};
use ballast_model::{Error, Model, memory};
use clap::Args;
use serde::Serialize;

use super::Global;
use super::model::{AdapterArg, PrecisionArg, load, peak, rate};
use crate::exit::{Outcome, Usage};
use crate::output::{self, clean_lines, plural};
use crate::progress::Progress;
use crate::warnings::Warnings;

/// Generate text: continue a prompt, answer a conversation, or chat.
///
/// Without a prompt on a terminal, chat line by line until Ctrl-D.
///
/// Defaults come from generation_config.json (do_sample, temperature, top_k, top_p, min_p,
/// repetition_penalty, max_new_tokens, eos_token_id). Tokens are sampled if --temperature is above 0; without
/// --temperature, if --top-k, --top-p, --min-p or --seed is given or the file sets do_sample. Otherwise
/// decoding is greedy.
#[derive(Args)]
pub(crate) struct GenerateArgs {
    /// Model: a folder, an index or a safetensors file, with tokenizer.json beside it; or hf://ORG/NAME.
    model: PathBuf,
    /// Read the prompt from standard input, without its final line break.
    #[arg(value_name = "-", value_parser = ["-"], conflicts_with_all = ["prompt", "chat"])]
    input: Option<String>,
    /// Text to continue; no chat template is applied.
    #[arg(long, value_name = "TEXT", conflicts_with = "chat", allow_hyphen_values = true)]
    prompt: Option<String>,
    /// Conversation to answer: JSON messages [{"role", "content"}, ...], {"messages", "tools"}, or one
    /// message per line.
    #[arg(long, value_name = "FILE")]
    chat: Option<PathBuf>,
    /// Largest number of tokens to generate [default: max_new_tokens of the file, else 256].
    #[arg(long, value_name = "N")]
    max_tokens: Option<usize>,
    /// Sampling temperature; 0 is greedy [default: the file's, else 1 when sampling].
    #[arg(long, value_name = "T", value_parser = temperature, allow_negative_numbers = true)]
    temperature: Option<f64>,
    /// Sample from the K most likely tokens; 0 for all [default: the file's, else 0].
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,
    /// Sample from the most likely tokens whose probabilities sum to P [default: the file's, else 1].
    #[arg(long, value_name = "P", value_parser = top_p)]
    top_p: Option<f64>,
    /// Sample from tokens with at least P times the highest probability [default: the file's, else 0].
    #[arg(long, value_name = "P", value_parser = min_p)]
    min_p: Option<f64>,
    /// Penalty on tokens that occurred before; 1 for none [default: the file's, else 1].
    #[arg(long, value_name = "R", value_parser = penalty)]
    repetition_penalty: Option<f64>,
    /// Random seed; the same seed gives the same text [default: 0].
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    #[command(flatten)]
    precision: PrecisionArg,
    #[command(flatten)]
    adapter: AdapterArg,
}

fn number(text: &str, expected: &str, holds: fn(f64) -> bool) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|x: &f64| x.is_finite() && holds(*x))
        .ok_or_else(|| format!("must be {expected}"))
}

fn temperature(text: &str) -> Result<f64, String> {
    number(text, "a number of at least 0", |x| x >= 0.0)
}

fn top_p(text: &str) -> Result<f64, String> {
    number(text, "a number above 0 and at most 1", |x| x > 0.0 && x <= 1.0)
}

fn min_p(text: &str) -> Result<f64, String> {
    number(text, "a number from 0 to 1", |x| (0.0..=1.0).contains(&x))
}

fn penalty(text: &str) -> Result<f64, String> {
    number(text, "a number above 0", |x| x > 0.0)
}

/// Number of tokens without --max-tokens and max_new_tokens.
const DEFAULT_TOKENS: usize = 256;

impl GenerateArgs {
    /// Returns the sampling options; flags override the file.
    fn sampling(&self, file: &GenerationSettings) -> Sampling {
        let asked =
            self.top_k.is_some() || self.top_p.is_some() || self.min_p.is_some() || self.seed.is_some();
        let draws = asked || file.do_sample == Some(true);
        let from_file = if draws { file.temperature.unwrap_or(1.0) } else { 0.0 };
        Sampling {
            temperature: self.temperature.unwrap_or(from_file),
            top_k: self.top_k.or(file.top_k).unwrap_or(0),
            top_p: self.top_p.or(file.top_p).unwrap_or(1.0),
            min_p: self.min_p.or(file.min_p).unwrap_or(0.0),
            repetition_penalty: self.repetition_penalty.or(file.repetition_penalty).unwrap_or(1.0),
        }
    }

    /// Returns the token ids of the prompt; `None` for a chat.
    fn prompt_ids(&self, folder: &Path, tokenizer: &Tokenizer) -> anyhow::Result<Option<Vec<u32>>> {
        if let Some(file) = &self.chat {
            let fail = |error: std::io::Error| Error::Text {
                file: file.clone(),
                problem: format!("cannot read: {error}"),
            };
            let text = read_regular_text(file).map_err(fail)?;
            let conversation = Conversation::parse(text_without_mark(&text), file)?;
            let text = template(folder)?.render(&conversation, &tokenizer.special, true)?;
            return Ok(Some(tokenizer.encode(&text, false)?));
        }
        let text = match (&self.prompt, &self.input) {
            (Some(prompt), _) => prompt.clone(),
            (None, Some(_)) => {
                let text = read_bounded(std::io::stdin(), MOST_BYTES)
                    .and_then(utf8)
                    .context("cannot read the prompt from standard input")?;
                let text = text_without_mark(&text);
                text.strip_suffix('\n').unwrap_or(text).to_string()
            }
            (None, None) => return Ok(None),
        };
        let ids = tokenizer.encode(&text, true)?;
        if ids.is_empty() {
            return Err(Usage("the prompt has no tokens; give --prompt TEXT, --chat FILE or -".into()).into());
        }
        Ok(Some(ids))
    }
}

fn template(folder: &Path) -> anyhow::Result<ChatTemplate> {
    ChatTemplate::load(folder)?.ok_or_else(|| {
        Error::Text {
            file: folder.join("tokenizer_config.json"),
            problem:
                "no `chat_template`, and no chat_template.jinja beside it; use --prompt, which needs none"
                    .into(),
        }
        .into()
    })
}

pub(crate) fn run(mut args: GenerateArgs, global: &Global) -> anyhow::Result<Outcome> {
    if args.prompt.is_none() && args.chat.is_none() && args.input.is_none() {
        if !std::io::stdin().is_terminal() {
            return Err(Usage(
                "no prompt; give --prompt TEXT, --chat FILE, or - to read standard input".into(),
            )
            .into());
        }
        if global.json {
            return Err(Usage("--json needs a prompt: --prompt TEXT, --chat FILE or -".into()).into());
        }
    }
    args.model = super::local(&args.model, global)?;
    let progress = global.progress();
    let precision = args.precision.name(&args.model, &global.warnings)?;
    let folder = folder_of(&args.model);
    let tokenizer = Tokenizer::load(&folder)?;
    let settings = GenerationSettings::load(&folder, &tokenizer)?;
    let prompt = args.prompt_ids(&folder, &tokenizer)?;
    let template = if prompt.is_none() { Some(template(&folder)?) } else { None };
    let (model, load_seconds) = load(&args.model, &precision, &args.adapter, &global.warnings)?;
    let sampling = args.sampling(&settings);
    let seed = args.seed.unwrap_or(0);
    let mut writer = Writer {
        text: Generation::new(&model),
        model: &model,
        sampler: Sampler::new(sampling, seed),
        tokenizer: &tokenizer,
        stops: &settings.stops,
        limit: args.max_tokens.or(settings.max_new_tokens).unwrap_or(DEFAULT_TOKENS),
        progress: &progress,
        warnings: &global.warnings,
        silent: global.json,
        quiet: global.quiet,
    };
    let Some(prompt) = prompt else {
        let template = template.expect("loaded if there is no prompt");
        return chat(&mut writer, &template, std::io::stdin().lock());
    };
    let written = writer.write(&prompt)?;
    if global.json {
        let report = Report {
            text: &written.text,
            prompt_tokens: prompt.len(),
            tokens: &written.ids,
            ended: written.ended,
            precision: &precision,
            sampling,
            seed,
            timings: written.timings(load_seconds),
            peak_memory_bytes: memory::peak(),
        };
        global.print_json("generate", &report);
    } else {
        output::print("\n");
    }
    writer.summary(&written);
    Ok(written.outcome())
}

#[derive(Serialize)]
struct Report<'a> {
    text: &'a str,
    prompt_tokens: usize,
    tokens: &'a [u32],
    ended: Ended,
    precision: &'a str,
    sampling: Sampling,
    seed: u64,
    timings: Timings,
    peak_memory_bytes: Option<u64>,
}

#[derive(Serialize)]
struct Timings {
    load_seconds: f64,
    prompt_seconds: f64,
    prompt_tokens_per_second: f64,
    generation_seconds: f64,
    generation_tokens_per_second: f64,
}

/// The reason why generation ended.
#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Ended {
    StopToken,
    MaxTokens,
    Interrupted,
    /// Standard output was closed.
    OutputClosed,
}

/// A generated text and the time it took.
struct Written {
    ids: Vec<u32>,
    text: String,
    ended: Ended,
    /// Prompt tokens that were not in the cache.
    read: usize,
    prompt_time: Duration,
    generation_time: Duration,
}

impl Written {
    fn timings(&self, load_seconds: f64) -> Timings {
        Timings {
            load_seconds,
            prompt_seconds: self.prompt_time.as_secs_f64(),
            prompt_tokens_per_second: rate(self.read, self.prompt_time),
            generation_seconds: self.generation_time.as_secs_f64(),
            generation_tokens_per_second: rate(self.ids.len(), self.generation_time),
        }
    }

    fn outcome(&self) -> Outcome {
        if self.ended == Ended::Interrupted { Outcome::Interrupted } else { Outcome::Ok }
    }
}

/// Generates texts with one model.
struct Writer<'a> {
    text: Generation<'a>,
    model: &'a Model,
    sampler: Sampler,
    tokenizer: &'a Tokenizer,
    stops: &'a [u32],
    limit: usize,
    progress: &'a Progress,
    warnings: &'a Warnings,
    silent: bool,
    /// Hides the figures of a generated text.
    quiet: bool,
}

impl Writer<'_> {
    /// Continues `prompt` and prints the text as it is generated.
    fn write(&mut self, prompt: &[u32]) -> anyhow::Result<Written> {
        let positions = self.model.config.max_positions;
        self.warnings.check_length("the prompt", prompt.len(), positions);
        let begun = Instant::now();
        let read = self.text.prompt(prompt, || self.progress.cancelled())?;
        let prompt_time = begun.elapsed();
        let begun = Instant::now();
        let mut stream = self.tokenizer.stream();
        let (mut ids, mut text) = (Vec::new(), String::new());
        let ended = loop {
            if self.progress.cancelled() {
                break Ended::Interrupted;
            }
            if ids.len() >= self.limit {
                break Ended::MaxTokens;
            }
            let id = self.text.next(&mut self.sampler)?;
            ids.push(id);
            if self.stops.contains(&id) {
                break Ended::StopToken;
            }
            let piece = stream.push(id)?;
            text += &piece;
            if !self.show(&piece) {
                break Ended::OutputClosed;
            }
        };
        let rest = stream.finish()?;
        self.show(&rest);
        text += &rest;
        Ok(Written { ids, text, ended, read, prompt_time, generation_time: begun.elapsed() })
    }

    /// Prints the figures of a text, unless the command is quiet.
    fn summary(&self, written: &Written) {
        if self.quiet {
            return;
        }
        output::note(&format!(
            "prompt: {}, {:.1}/s; generated: {}, {:.1}/s; peak memory {}",
            plural(written.read, "token"),
            rate(written.read, written.prompt_time),
            plural(written.ids.len(), "token"),
            rate(written.ids.len(), written.generation_time),
            peak()
        ));
    }

    /// Prints a piece of text; control characters do not reach a terminal. Returns false if standard output
    /// is closed.
    fn show(&self, piece: &str) -> bool {
        if self.silent || piece.is_empty() {
            return true;
        }
        if std::io::stdout().is_terminal() {
            output::print_now(&piece.split('\t').map(clean_lines).collect::<Vec<_>>().join("\t"))
        } else {
            output::print_now(piece)
        }
    }
}

/// Chats line by line; every prompt is the whole conversation so far.
fn chat(
    writer: &mut Writer<'_>,
    template: &ChatTemplate,
    mut lines: impl BufRead,
) -> anyhow::Result<Outcome> {
    output::note("each line is a message; Ctrl-D exits");
    let mut conversation = Conversation::default();
    loop {
        if !output::print_now("> ") {
            return Ok(Outcome::Ok);
        }
        let mut line = Vec::new();
        writer.progress.set_idle(true);
        let bytes = lines.read_until(b'\n', &mut line).context("cannot read the message")?;
        writer.progress.set_idle(false);
        if bytes == 0 {
            output::print("\n");
            return Ok(Outcome::Ok);
        }
        let line = match std::str::from_utf8(&line) {
            Ok(line) => line,
            Err(error) => {
                output::note(&format!(
                    "the line is not UTF-8 (byte {}) and was ignored; type it again",
                    error.valid_up_to() + 1
                ));
                continue;
            }
        };
        if line.trim().is_empty() {
            continue;
        }
        conversation.say("user", line.trim_end_matches(['\n', '\r']));
        let text = template.render(&conversation, &writer.tokenizer.special, true)?;
        let written = writer.write(&writer.tokenizer.encode(&text, false)?)?;
        output::print("\n");
        writer.summary(&written);
        if written.ended == Ended::Interrupted {
            return Ok(written.outcome());
        }
        conversation.say("assistant", &written.text);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;

    /// Makes a small model with a tokenizer and a chat template.
    fn folder() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures");
        for file in [
            "models/qwen3_5/config.json",
            "models/qwen3_5/model.safetensors",
            "text/qwen3_5/tokenizer.json",
            "text/qwen3_5/tokenizer_config.json",
        ] {
            let path = fixtures.join(file);
            std::fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
        }
        folder
    }

    #[test]
    fn a_line_that_is_not_utf8_is_left_out_and_the_chat_goes_on() {
        let folder = folder();
        let model =
            Model::load(folder.path(), |config| ballast_model::Precision::preset("f32", config)).unwrap();
        let tokenizer = Tokenizer::load(folder.path()).unwrap();
        let sampling =
            Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0 };
        let mut writer = Writer {
            text: Generation::new(&model),
            model: &model,
            sampler: Sampler::new(sampling, 0),
            tokenizer: &tokenizer,
            stops: &[],
            limit: 1,
            progress: &Progress::new(true),
            warnings: &Warnings::default(),
            silent: true,
            quiet: true,
        };
        let template = template(folder.path()).unwrap();
        let mut lines = Cursor::new(b"\xffhello\nhello\n".to_vec());
        let outcome = chat(&mut writer, &template, &mut lines).unwrap();
        assert_eq!(outcome, Outcome::Ok);
        assert_eq!(lines.position(), 13, "every line was read");
    }
}
