//! Architectures that both Ballast and llama.cpp have, and the fields of config.json.

use std::path::PathBuf;

use ballast_files::{Error, Result};
use serde_json::Value;

/// An architecture of llama.cpp.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Family {
    /// Qwen3.5, dense.
    Qwen35,
    /// Qwen3.5 with experts.
    Qwen35Moe,
    /// Qwen3-Next.
    Qwen3Next,
    /// Gemma 2.
    Gemma2,
    /// Gemma 3.
    Gemma3,
    /// Gemma 4.
    Gemma4,
    /// DeepSeek-V3.2.
    Deepseek32,
}

/// `model_type` in config.json, name in llama.cpp.
const FAMILIES: [(&[&str], Family, &str); 7] = [
    (&["qwen3_5", "qwen3_5_text"], Family::Qwen35, "qwen35"),
    (&["qwen3_5_moe", "qwen3_5_moe_text"], Family::Qwen35Moe, "qwen35moe"),
    (&["qwen3_next"], Family::Qwen3Next, "qwen3next"),
    (&["gemma2"], Family::Gemma2, "gemma2"),
    (&["gemma3", "gemma3_text"], Family::Gemma3, "gemma3"),
    (&["gemma4", "gemma4_text"], Family::Gemma4, "gemma4"),
    (&["deepseek_v32"], Family::Deepseek32, "deepseek32"),
];

impl Family {
    /// Returns the architecture of a config.json.
    pub fn of(config: &Config) -> Result<Family> {
        let found = config.text("model_type")?;
        let family = FAMILIES.iter().find(|row| row.0.contains(&found));
        family.map(|row| row.1).ok_or_else(|| {
            let known: Vec<&str> = FAMILIES.iter().map(|row| row.0[0]).collect();
            let problem = format!("model type {found:?} cannot be written as GGUF; {} can", known.join(", "));
            Error::Refused(format!("{}: {problem}", config.file.display()))
        })
    }

    /// Returns llama.cpp's name.
    pub fn name(self) -> &'static str {
        FAMILIES.iter().find(|row| row.1 == self).expect("every family has a row").2
    }

    /// Returns true for models with gated delta rule layers.
    pub fn is_hybrid(self) -> bool {
        matches!(self, Family::Qwen35 | Family::Qwen35Moe | Family::Qwen3Next)
    }

    /// Returns true for Gemma models.
    pub fn is_gemma(self) -> bool {
        matches!(self, Family::Gemma2 | Family::Gemma3 | Family::Gemma4)
    }
}

/// Largest count in config.json.
const MAX_COUNT: u64 = 1 << 24;

/// The fields of a text model's config.json.
pub struct Config<'a> {
    fields: &'a Value,
    outer: &'a Value,
    pub(crate) file: PathBuf,
}

impl<'a> Config<'a> {
    /// Returns the fields of a config.json, which was read from `file` or belongs there.
    pub fn new(config: Option<&'a Value>, file: PathBuf) -> Result<Config<'a>> {
        let Some(outer) = config else {
            let problem = "config.json not found; GGUF needs its hyperparameters".into();
            return Err(Error::Config { file, problem });
        };
        Ok(Config { fields: outer.get("text_config").unwrap_or(outer), outer, file })
    }

    /// Returns an error about config.json.
    pub(crate) fn fail(&self, problem: String) -> Error {
        Error::Config { file: self.file.clone(), problem }
    }

    /// Returns an error about something that llama.cpp cannot express.
    pub(crate) fn refuse(&self, problem: &str) -> Error {
        Error::Refused(format!("{}: {problem}", self.file.display()))
    }

    /// Returns a field that is not null.
    pub(crate) fn get(&self, key: &str) -> Option<&'a Value> {
        self.fields.get(key).filter(|value| !value.is_null())
    }

    /// Returns a field of the text model, or of the model around it.
    pub(crate) fn get_outer(&self, key: &str) -> Option<&'a Value> {
        self.get(key).or_else(|| self.outer.get(key).filter(|value| !value.is_null()))
    }

    fn missing(&self, key: &str) -> Error {
        self.fail(format!("field `{key}` is missing; GGUF needs it"))
    }

    pub(crate) fn text(&self, key: &str) -> Result<&'a str> {
        let value = self.get(key).ok_or_else(|| self.missing(key))?;
        value.as_str().ok_or_else(|| self.fail(format!("`{key}` must be a string, got {value}")))
    }

    /// Returns a count that must be there.
    pub fn count(&self, key: &str) -> Result<u64> {
        let value = self.get(key).ok_or_else(|| self.missing(key))?;
        self.as_count(key, value)
    }

    pub(crate) fn count_or(&self, key: &str, default: u64) -> Result<u64> {
        self.get(key).map_or(Ok(default), |value| self.as_count(key, value))
    }

    pub(crate) fn as_count(&self, key: &str, value: &Value) -> Result<u64> {
        value
            .as_u64()
            .filter(|n| *n <= MAX_COUNT)
            .ok_or_else(|| self.fail(format!("`{key}` must be a count of at most {MAX_COUNT}, got {value}")))
    }

    pub(crate) fn number(&self, key: &str) -> Result<f64> {
        let value = self.get(key).ok_or_else(|| self.missing(key))?;
        value.as_f64().ok_or_else(|| self.fail(format!("`{key}` must be a number, got {value}")))
    }

    pub(crate) fn flag(&self, key: &str, default: bool) -> Result<bool> {
        let Some(value) = self.get(key) else { return Ok(default) };
        value.as_bool().ok_or_else(|| self.fail(format!("`{key}` must be true or false, got {value}")))
    }

    /// Returns the types of all layers, if they are listed.
    pub(crate) fn layer_types(&self, layers: u64) -> Result<Option<Vec<&'a str>>> {
        let Some(value) = self.get("layer_types") else { return Ok(None) };
        let types: Option<Vec<&str>> = value.as_array().and_then(|a| a.iter().map(Value::as_str).collect());
        let fits = types.filter(|types| types.len() as u64 == layers);
        fits.map(Some)
            .ok_or_else(|| self.fail(format!("`layer_types` must name the types of {layers} layers")))
    }

    /// Returns the rotary parameters of a kind of layer, or of all layers.
    pub(crate) fn rope(&self, layer_type: &str) -> Rope<'a> {
        let parameters = self.get("rope_parameters").or_else(|| self.get("rope_scaling"));
        let parameters = match parameters {
            Some(by_type) if by_type.get(layer_type).is_some() => by_type.get(layer_type),
            other => other,
        };
        Rope { parameters }
    }
}

/// The rotary parameters of a kind of layer.
pub(crate) struct Rope<'a> {
    parameters: Option<&'a Value>,
}

impl<'a> Rope<'a> {
    /// Returns a field that is not null.
    pub(crate) fn get(&self, key: &str) -> Option<&'a Value> {
        self.parameters?.get(key).filter(|value| !value.is_null())
    }

    /// Returns a number.
    pub(crate) fn number(&self, key: &str) -> Option<f64> {
        self.get(key)?.as_f64()
    }

    /// Returns the kind of scaling.
    pub(crate) fn kind(&self) -> &'a str {
        self.get("rope_type").or_else(|| self.get("type")).and_then(Value::as_str).unwrap_or("default")
    }
}
