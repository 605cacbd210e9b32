//! Reading config.json field by field, with errors that name the field.

use std::path::Path;

use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// Far beyond every model; a file that says more is broken, and would only fill the memory.
const MAX_LAYERS: usize = 10_000;

/// An object of config.json and where it stands.
#[derive(Clone, Copy)]
pub(super) struct Fields<'a> {
    pub(super) file: &'a Path,
    /// What stands before a field's name in messages: `text_config.` for instance.
    prefix: &'a str,
    object: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    pub(super) fn new(file: &'a Path, prefix: &'a str, value: &'a Value) -> Result<Fields<'a>> {
        match value {
            Value::Object(object) => Ok(Fields { file, prefix, object }),
            _ => Err(Error::Config {
                file: file.into(),
                field: prefix.trim_end_matches('.').into(),
                problem: "is not an object".into(),
            }),
        }
    }

    pub(super) fn error(&self, field: &str, problem: impl Into<String>) -> Error {
        Error::Config {
            file: self.file.into(),
            field: format!("{}{field}", self.prefix),
            problem: problem.into(),
        }
    }

    /// The value, unless it is missing or null.
    pub(super) fn get(&self, field: &str) -> Option<&'a Value> {
        self.object.get(field).filter(|v| !v.is_null())
    }

    /// Whether the file has the field, be it null.
    pub(super) fn says(&self, field: &str) -> bool {
        self.object.contains_key(field)
    }

    pub(super) fn object(&self, field: &str, prefix: &'a str) -> Result<Option<Fields<'a>>> {
        self.get(field).map(|value| Fields::new(self.file, prefix, value)).transpose()
    }

    /// A whole number from 0 to 2^31.
    pub(super) fn whole(&self, field: &str) -> Result<Option<usize>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match value.as_u64() {
            Some(n) if n < 1 << 31 => Ok(Some(n as usize)),
            _ => Err(self.error(field, format!("is {value}, not a whole number that can be used"))),
        }
    }

    /// A whole number above 0.
    pub(super) fn count(&self, field: &str, default: usize) -> Result<usize> {
        match self.whole(field)? {
            Some(0) => Err(self.error(field, "is 0")),
            found => Ok(found.unwrap_or(default)),
        }
    }

    /// The number of layers.
    pub(super) fn layers(&self, default: usize) -> Result<usize> {
        match self.count("num_hidden_layers", default)? {
            n if n > MAX_LAYERS => {
                Err(self.error("num_hidden_layers", format!("is {n}; at most {MAX_LAYERS} can be used")))
            }
            n => Ok(n),
        }
    }

    /// A number that f32 can hold.
    pub(super) fn number(&self, field: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match value.as_f64() {
            Some(x) if (x as f32).is_finite() => Ok(Some(x)),
            _ => Err(self.error(field, format!("is {value}, not a number that f32 can hold"))),
        }
    }

    /// A number above 0.
    pub(super) fn positive(&self, field: &str, default: f64) -> Result<f64> {
        let found = self.positive_or_none(field)?;
        Ok(found.unwrap_or(default))
    }

    /// A number above 0, or nothing.
    pub(super) fn positive_or_none(&self, field: &str) -> Result<Option<f64>> {
        match self.number(field)? {
            Some(x) if x <= 0.0 => Err(self.error(field, format!("is {x}; it must be above 0"))),
            found => Ok(found),
        }
    }

    pub(super) fn flag(&self, field: &str, default: bool) -> Result<bool> {
        match self.get(field) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(value) => Err(self.error(field, format!("is {value}, neither true nor false"))),
        }
    }

    pub(super) fn text(&self, field: &str) -> Result<Option<&'a str>> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(value) => Err(self.error(field, format!("is {value}, not a text"))),
        }
    }

    /// A list of texts, one for each of `layers` layers.
    pub(super) fn texts(&self, field: &str, layers: usize) -> Result<Option<Vec<&'a str>>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let texts: Option<Vec<&str>> =
            value.as_array().and_then(|list| list.iter().map(|item| item.as_str()).collect());
        match texts {
            Some(texts) if texts.len() == layers => Ok(Some(texts)),
            Some(texts) => Err(self.error(field, format!("has {} entries for {layers} layers", texts.len()))),
            None => Err(self.error(field, "is not a list of texts")),
        }
    }

    /// A list of whole numbers.
    pub(super) fn wholes(&self, field: &str) -> Result<Vec<usize>> {
        let Some(value) = self.get(field) else { return Ok(Vec::new()) };
        let wholes: Option<Vec<usize>> = value
            .as_array()
            .and_then(|list| list.iter().map(|item| item.as_u64().map(|n| n as usize)).collect());
        wholes.ok_or_else(|| self.error(field, "is not a list of whole numbers"))
    }

    /// An error unless the field is missing or one of `known`.
    pub(super) fn one_of(&self, field: &str, known: &[&str]) -> Result {
        match self.text(field)? {
            Some(text) if !known.contains(&text) => Err(self
                .error(field, format!("is {text:?}, which is not supported; known: {}", known.join(", ")))),
            _ => Ok(()),
        }
    }
}
