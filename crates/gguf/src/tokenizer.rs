//! The tokenizer: tokenizer.json and the files beside it to entries of the header.
//!
//! | tokenizer.json | in GGUF |
//! |---|---|
//! | byte-level BPE | `gpt2`, with the pre-tokenizer that has the same regular expressions |
//! | BPE on characters, space as `▁`, unknown ones as bytes (Gemma) | `gemma4`, which applies the merges as listed |
//! | none | `none`: llama.cpp takes token ids only |

use std::collections::{HashMap, HashSet};
use std::path::Path;

use ballast_files::encoding::without_mark;
use ballast_files::regular::{read_regular, read_regular_text};
use ballast_files::{Error, Result, look_at};
use serde_json::Value as Json;

use super::family::{Config, Family};
use super::header::{Entry, Value};

/// Types of tokens.
mod kind {
    pub(super) const NORMAL: i32 = 1;
    pub(super) const UNKNOWN: i32 = 2;
    pub(super) const CONTROL: i32 = 3;
    pub(super) const USER_DEFINED: i32 = 4;
    pub(super) const UNUSED: i32 = 5;
    pub(super) const BYTE: i32 = 6;
}

/// Regular expressions of a pre-tokenizer, in order, and llama.cpp's name for them.
const PRE_TOKENIZERS: [(&[&str], &str); 4] = [
    (
        &[
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        "qwen35",
    ),
    (
        &[
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        "qwen2",
    ),
    (
        &[
            r"\p{N}{1,3}",
            r"[一-龥぀-ゟ゠-ヿ]+",
            r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
        ],
        "deepseek-v3",
    ),
    (&[GPT2], "gpt-2"),
];

/// The regular expression that a byte-level pre-tokenizer applies by itself.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// Returns the entries of the tokenizer beside config.json, and notes for the user.
pub fn entries(family: Family, config: &Config) -> Result<(Vec<Entry>, Vec<String>)> {
    let beside = |name: &str| config.file.with_file_name(name);
    let path = beside("tokenizer.json");
    let Some(json) = read_json(&path)? else {
        let none = vec![(key("model"), Value::String("none".into()))];
        let note = "tokenizer.json not found: the file has no vocabulary, and llama.cpp takes token ids only";
        return Ok((none, vec![note.into()]));
    };
    let settings = read_json(&beside("tokenizer_config.json"))?.unwrap_or(Json::Null);
    let generation = read_json(&beside("generation_config.json"))?.unwrap_or(Json::Null);
    let tokenizer = Tokenizer { json: &json, settings: &settings, generation: &generation, path: &path };
    let rows = config.count("vocab_size")?;
    // Gemma 3's tokenizer has the token of images, for which its text models have no row.
    let vocabulary = tokenizer.vocabulary(rows, family == Family::Gemma3)?;
    let form = tokenizer.form()?;
    let mut entries = tokenizer.model(form, &vocabulary)?;
    let mut notes = Vec::new();
    if let Some(first) = vocabulary.dropped.first() {
        let count = vocabulary.dropped.len();
        notes.push(format!(
            "not written (id beyond the {rows} rows of the embedding): {count} tokens, first {first:?}"
        ));
    }
    let around = tokenizer.added_around(form, &mut notes)?;
    entries.extend(tokenizer.special_tokens(config, &vocabulary, &around)?);
    entries.extend(chat_templates(&settings, &beside("chat_template.jinja"))?);
    Ok((entries, notes))
}

fn key(name: &str) -> String {
    format!("tokenizer.ggml.{name}")
}

fn read_json(path: &Path) -> Result<Option<Json>> {
    if look_at(path)?.is_none() {
        return Ok(None);
    }
    let text = read_regular(path).map_err(Error::io(path, "read"))?;
    serde_json::from_slice(without_mark(&text))
        .map(Some)
        .map_err(|e| Error::Config { file: path.into(), problem: format!("not valid JSON: {e}") })
}

/// Tokens by id, with their types.
struct Vocabulary {
    tokens: Vec<(String, i32)>,
    ids: HashMap<String, u32>,
    /// Added tokens whose ids have no row in the embedding.
    dropped: Vec<String>,
}

/// Special tokens that the tokenizer adds around a text.
struct Around {
    adds_bos: bool,
    adds_eos: bool,
    /// Text of the first token, where tokenizer.json names it.
    bos: Option<String>,
}

struct Tokenizer<'a> {
    json: &'a Json,
    settings: &'a Json,
    generation: &'a Json,
    path: &'a Path,
}

/// Parts of a tokenizer that decide its form.
#[derive(Clone, Copy, PartialEq)]
enum Form {
    ByteLevel,
    Characters,
}

impl<'a> Tokenizer<'a> {
    fn fail(&self, problem: impl Into<String>) -> Error {
        Error::Config { file: self.path.into(), problem: problem.into() }
    }

    fn refuse(&self, problem: &str) -> Error {
        Error::Refused(format!("{}: {problem}", self.path.display()))
    }

    /// Returns the tokens of a model with `size` rows in its embedding; ids without a token are unused. Added
    /// tokens without a row are an error, unless they can be dropped.
    fn vocabulary(&self, size: u64, can_drop: bool) -> Result<Vocabulary> {
        let model = &self.json["model"];
        if model["type"].as_str().is_some_and(|kind| kind != "BPE") || !model["vocab"].is_object() {
            return Err(self.refuse(&format!("only BPE tokenizers are written, got {}", model["type"])));
        }
        let mut tokens: Vec<Option<(String, i32)>> = vec![None; size as usize];
        let mut place = |text: &str, id: &Json, kind: i32| {
            let slot = id.as_u64().and_then(|id| tokens.get_mut(usize::try_from(id).ok()?));
            let Some(slot) = slot else {
                let problem = format!("token {text:?} has id {id}, but the embedding has {size} rows");
                return Err(self.fail(problem));
            };
            *slot = Some((text.to_string(), kind));
            Ok(())
        };
        let has_bytes = model["byte_fallback"].as_bool() == Some(true);
        let unknown = model["unk_token"].as_str();
        for (text, id) in model["vocab"].as_object().into_iter().flatten() {
            let kind = match text {
                text if Some(text.as_str()) == unknown => kind::UNKNOWN,
                text if has_bytes && is_byte(text) => kind::BYTE,
                _ => kind::NORMAL,
            };
            place(text, id, kind)?;
        }
        let mut dropped = Vec::new();
        for token in self.json["added_tokens"].as_array().into_iter().flatten() {
            let Some(text) = token["content"].as_str() else {
                return Err(self.fail("an added token has no content"));
            };
            if can_drop && token["id"].as_u64().is_some_and(|id| id >= size) {
                dropped.push(text.to_string());
                continue;
            }
            let is_special = token["special"].as_bool() == Some(true) || looks_special(text);
            let kind = match is_special {
                _ if Some(text) == unknown => kind::UNKNOWN,
                true => kind::CONTROL,
                false => kind::USER_DEFINED,
            };
            place(text, &token["id"], kind)?;
        }
        self.indexed(tokens, dropped)
    }

    /// Names the unused ids, and checks that no two tokens have the same text.
    fn indexed(&self, tokens: Vec<Option<(String, i32)>>, dropped: Vec<String>) -> Result<Vocabulary> {
        let named = |(id, token): (usize, Option<(String, i32)>)| {
            token.unwrap_or_else(|| (format!("[PAD{id}]"), kind::UNUSED))
        };
        let tokens: Vec<(String, i32)> = tokens.into_iter().enumerate().map(named).collect();
        let mut ids = HashMap::new();
        for (id, (text, _)) in tokens.iter().enumerate() {
            if text.is_empty() || ids.insert(text.clone(), id as u32).is_some() {
                return Err(self.refuse(&format!(
                    "token {text:?} is empty or occurs twice; llama.cpp needs distinct texts"
                )));
            }
        }
        Ok(Vocabulary { tokens, ids, dropped })
    }

    /// Returns model, pre-tokenizer, tokens and merges.
    fn model(&self, form: Form, vocabulary: &Vocabulary) -> Result<Vec<Entry>> {
        let merges = self.merges()?;
        let mut entries = Vec::new();
        let mut add = |name: &str, value: Value| entries.push((key(name), value));
        match form {
            Form::ByteLevel => {
                add("model", Value::String("gpt2".into()));
                add("pre", Value::String(self.pre_tokenizer(merges.is_empty())?.into()));
            }
            Form::Characters => {
                self.check_newlines(&merges)?;
                add("model", Value::String("gemma4".into()));
                add("add_space_prefix", Value::Bool(false));
                add("scores", Value::array(vec![Value::F32(-1000.0); vocabulary.tokens.len()]));
            }
        }
        add("tokens", Value::strings(vocabulary.tokens.iter().map(|(text, _)| text.clone())));
        add(
            "token_type",
            Value::array(vocabulary.tokens.iter().map(|(_, kind)| Value::I32(*kind)).collect()),
        );
        add("merges", Value::strings(merges.into_iter().map(|[a, b]| format!("{a} {b}"))));
        Ok(entries)
    }

    /// Returns the merges, in either of the two forms that tokenizer.json has.
    fn merges(&self) -> Result<Vec<[String; 2]>> {
        let mut merges = Vec::new();
        for merge in self.json["model"]["merges"].as_array().into_iter().flatten() {
            let pair = match merge {
                Json::String(text) => text.split_once(' '),
                Json::Array(pair) if pair.len() == 2 => pair[0].as_str().zip(pair[1].as_str()),
                _ => None,
            };
            let Some((a, b)) = pair.filter(|(a, b)| !a.is_empty() && !a.contains(' ') && !b.contains(' '))
            else {
                return Err(self.refuse(&format!("merge {merge} cannot be written as two words")));
            };
            merges.push([a.to_string(), b.to_string()]);
        }
        Ok(merges)
    }

    /// Returns the form of the tokenizer.
    fn form(&self) -> Result<Form> {
        let model = &self.json["model"];
        if model["ignore_merges"].as_bool() == Some(true) {
            return Err(self.refuse("ignore_merges: llama.cpp always merges with these pre-tokenizers"));
        }
        for name in ["continuing_subword_prefix", "end_of_word_suffix"] {
            if model[name].as_str().is_some_and(|text| !text.is_empty()) {
                return Err(self.refuse(&format!("{name}: llama.cpp does not have it")));
            }
        }
        let normalizer = &self.json["normalizer"];
        let is_spaced = normalizer["type"] == "Replace"
            && normalizer["pattern"]["String"] == " "
            && normalizer["content"] == "\u{2581}";
        if model["byte_fallback"].as_bool() == Some(true) && is_spaced {
            return Ok(Form::Characters);
        }
        let is_plain = match normalizer["type"].as_str() {
            None | Some("NFC") => true,
            Some("Sequence") => normalizer["normalizers"].as_array().is_some_and(Vec::is_empty),
            Some(_) => false,
        };
        if !is_plain {
            return Err(self.refuse(&format!("normalizer {} is unknown to llama.cpp", normalizer["type"])));
        }
        Ok(Form::ByteLevel)
    }

    /// Returns llama.cpp's name of the pre-tokenizer.
    fn pre_tokenizer(&self, has_no_merges: bool) -> Result<&'static str> {
        let pre = &self.json["pre_tokenizer"];
        let parts: Vec<&Json> = match pre["type"].as_str() {
            Some("Sequence") => pre["pretokenizers"].as_array().into_iter().flatten().collect(),
            Some(_) => vec![pre],
            None => Vec::new(),
        };
        let mut found = Vec::new();
        let mut is_byte_level = false;
        for part in parts {
            match part["type"].as_str() {
                Some("Split") if part["pattern"]["Regex"].is_string() && is_isolated(part) => {
                    let text = part["pattern"]["Regex"].as_str().unwrap_or_default();
                    found.push(text.replace('\r', r"\r").replace('\n', r"\n"));
                }
                Some("ByteLevel") if part["add_prefix_space"].as_bool() != Some(true) => {
                    is_byte_level = true;
                    if part["use_regex"].as_bool() != Some(false) {
                        found.push(GPT2.to_string());
                    }
                }
                _ => return Err(self.refuse(&format!("pre-tokenizer {part} is unknown to llama.cpp"))),
            }
        }
        if !is_byte_level {
            return Err(self.refuse("the pre-tokenizer is not byte-level; llama.cpp needs that"));
        }
        // Without merges every byte is a token, wherever the text is split.
        if has_no_merges {
            return Ok("qwen2");
        }
        let known = PRE_TOKENIZERS.iter().find(|row| row.0.iter().eq(found.iter()));
        known.map(|row| row.1).ok_or_else(|| {
            self.refuse(&format!(
                "the pre-tokenizer's regular expressions are unknown to llama.cpp: {found:?}"
            ))
        })
    }

    /// Checks that no merge joins a newline to other characters: llama.cpp splits there first.
    fn check_newlines(&self, merges: &[[String; 2]]) -> Result<()> {
        let is_mixed = |[a, b]: &&[String; 2]| {
            let newlines = a.chars().chain(b.chars()).filter(|c| *c == '\n').count();
            newlines > 0 && newlines < a.chars().count() + b.chars().count()
        };
        match merges.iter().find(is_mixed) {
            Some([a, b]) => Err(self.refuse(&format!(
                "the merge of {a:?} and {b:?} joins a newline to other text, which llama.cpp splits before"
            ))),
            None => Ok(()),
        }
    }

    /// Returns ids of special tokens, and whether texts begin and end with them.
    fn special_tokens(
        &self,
        config: &Config,
        vocabulary: &Vocabulary,
        around: &Around,
    ) -> Result<Vec<Entry>> {
        let named = |name: &str| {
            let token = &self.settings[name];
            let text = token.as_str().or_else(|| token["content"].as_str())?;
            vocabulary.ids.get(text).copied()
        };
        let listed = |file: &Json, name: &str| -> Vec<u32> {
            let values = match &file[name] {
                Json::Array(values) => values.clone(),
                value => vec![value.clone()],
            };
            let in_range =
                |id: u64| u32::try_from(id).ok().filter(|id| (*id as usize) < vocabulary.tokens.len());
            values.iter().filter_map(Json::as_u64).filter_map(in_range).collect()
        };
        let of_config =
            |name: &str| listed(&Json::from_iter([(name, config.get_outer(name).cloned())]), name);
        let mut ends = listed(self.generation, "eos_token_id");
        ends.extend(of_config("eos_token_id"));
        let Some(eos) = named("eos_token").or(ends.first().copied()) else {
            return Err(self.refuse(
                "no eos token in tokenizer_config.json, generation_config.json or config.json; llama.cpp would take token 11",
            ));
        };
        let mut entries = vec![(key("eos_token_id"), Value::U32(eos))];
        // Further tokens that end a text: llama.cpp has a place for one.
        let mut seen = HashSet::from([eos]);
        if let Some(eot) = ends.into_iter().find(|id| seen.insert(*id)) {
            entries.push((key("eot_token_id"), Value::U32(eot)));
        }
        let of_template = around.bos.as_ref().and_then(|text| vocabulary.ids.get(text).copied());
        let bos =
            of_template.or_else(|| named("bos_token")).or_else(|| of_config("bos_token_id").first().copied());
        match bos {
            Some(bos) => entries.push((key("bos_token_id"), Value::U32(bos))),
            None if around.adds_bos || self.says("add_bos_token") => {
                return Err(self.refuse("texts begin with a bos token, but no file names it"));
            }
            None => {}
        }
        if let Some(pad) = named("pad_token").or_else(|| of_config("pad_token_id").first().copied()) {
            entries.push((key("padding_token_id"), Value::U32(pad)));
        }
        let unknown = self.json["model"]["unk_token"].as_str().and_then(|text| vocabulary.ids.get(text));
        if let Some(unknown) = unknown {
            entries.push((key("unknown_token_id"), Value::U32(*unknown)));
        }
        entries.push((key("add_bos_token"), Value::Bool(around.adds_bos)));
        entries.push((key("add_eos_token"), Value::Bool(around.adds_eos)));
        Ok(entries)
    }

    /// Returns what is added around a text. With a byte-level tokenizer only tokenizer.json decides, as in
    /// transformers and `ballast generate`; `add_bos_token` of tokenizer_config.json has no effect there
    /// (DeepSeek).
    fn added_around(&self, form: Form, notes: &mut Vec<String>) -> Result<Around> {
        let post = &self.json["post_processor"];
        let parts: Vec<&Json> = match post["processors"].as_array() {
            Some(parts) => parts.iter().collect(),
            None if post.is_null() => Vec::new(),
            None => vec![post],
        };
        let is_known = |part: &&Json| part["type"] == "ByteLevel" || part["single"].is_array();
        if let Some(part) = parts.iter().find(|part| !is_known(part)) {
            return Err(self.refuse(&format!("post-processor {} is unknown to llama.cpp", part["type"])));
        }
        let template = parts.iter().find_map(|part| part["single"].as_array());
        let special = |part: Option<&Json>| part?["SpecialToken"]["id"].as_str().map(String::from);
        let bos = template.and_then(|template| special(template.first()));
        let eos = template.filter(|t| t.len() > 1).and_then(|template| special(template.last()));
        let mut adds = |name: &str, by_template: bool| {
            if self.says(name) && !by_template && form == Form::ByteLevel {
                notes.push(format!(
                    "{name} of tokenizer_config.json is not applied: tokenizer.json has no such token, and transformers does not add it"
                ));
            }
            by_template || self.says(name) && form == Form::Characters
        };
        let (adds_bos, adds_eos) =
            (adds("add_bos_token", bos.is_some()), adds("add_eos_token", eos.is_some()));
        Ok(Around { adds_bos, adds_eos, bos })
    }

    /// Returns true if a setting of tokenizer_config.json is true.
    fn says(&self, name: &str) -> bool {
        self.settings[name].as_bool() == Some(true)
    }
}

/// Returns true for added tokens that llama.cpp takes for control tokens whatever `special` says: it leaves
/// them out of texts, and ends a text at some of them.
fn looks_special(text: &str) -> bool {
    let is_between = |begin: &str, end: &str| text.starts_with(begin) && text.ends_with(end);
    ["<pad>", "<mask>", "<2mass>", "[@BOS@]"].contains(&text)
        || is_between("<|", "|>")
        || is_between("<\u{ff5c}", "\u{ff5c}>")
        || is_between("<unused", ">")
}

fn is_isolated(part: &Json) -> bool {
    part["behavior"] == "Isolated" && part["invert"].as_bool() != Some(true)
}

/// Returns true for the token of a byte, such as `<0x0A>`.
fn is_byte(text: &str) -> bool {
    let hex = text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    hex.is_some_and(|hex| hex.len() == 2 && hex.chars().all(|c| c.is_ascii_hexdigit()))
}

/// Returns the chat templates: of the file, or of tokenizer_config.json.
fn chat_templates(settings: &Json, path: &Path) -> Result<Vec<Entry>> {
    const KEY: &str = "tokenizer.chat_template";
    if look_at(path)?.is_some() {
        let text = read_regular_text(path).map_err(Error::io(path, "read"))?;
        return Ok(vec![(KEY.into(), Value::String(text))]);
    }
    match &settings["chat_template"] {
        Json::String(text) => Ok(vec![(KEY.into(), Value::String(text.clone()))]),
        Json::Array(list) => {
            let named = list.iter().filter_map(|t| t["name"].as_str().zip(t["template"].as_str()));
            let entry = |(name, text): (&str, &str)| {
                let key = if name == "default" { KEY.to_string() } else { format!("{KEY}.{name}") };
                (key, Value::String(text.to_string()))
            };
            Ok(named.map(entry).collect())
        }
        _ => Ok(Vec::new()),
    }
}
