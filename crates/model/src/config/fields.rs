//! Typed access to the fields of config.json, with errors that name the field.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::rc::Rc;

use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// Upper limit of the number of layers, far above every model: a damaged file must not exhaust the memory.
const MAX_LAYERS: usize = 10_000;

/// An object in config.json, with its path and a record of the keys that were read.
#[derive(Clone)]
pub(super) struct Fields<'a> {
    pub(super) file: &'a Path,
    /// Path of the object with a final dot, such as `text_config.`; empty for the root.
    prefix: String,
    object: &'a Map<String, Value>,
    seen: Rc<RefCell<Seen<'a>>>,
}

/// Objects that were opened and keys that were read, used to list the unread keys.
#[derive(Default)]
struct Seen<'a> {
    objects: BTreeMap<String, &'a Map<String, Value>>,
    /// Addresses of the read keys inside the parsed file.
    keys: HashSet<*const String>,
}

impl<'a> Fields<'a> {
    pub(super) fn new(file: &'a Path, value: &'a Value) -> Result<Fields<'a>> {
        match value {
            Value::Object(object) => {
                let seen = Rc::new(RefCell::new(Seen::default()));
                Ok(Fields { file, prefix: String::new(), object, seen }.opened())
            }
            _ => Err(Error::Config {
                file: file.into(),
                field: String::new(),
                problem: "is not an object".into(),
            }),
        }
    }

    fn opened(self) -> Fields<'a> {
        self.seen.borrow_mut().objects.insert(self.prefix.clone(), self.object);
        self
    }

    /// Lists all unread keys with a value other than null, in every object that was opened.
    pub(super) fn unread(&self) -> Vec<Unread<'a>> {
        let seen = self.seen.borrow();
        let unread = |(prefix, object): (&String, &&'a Map<String, Value>)| {
            let keys = object.iter().filter(|(key, value)| {
                !value.is_null() && !seen.keys.contains(&std::ptr::from_ref::<String>(key))
            });
            keys.map(|(key, value)| Unread { prefix: prefix.clone(), key, value }).collect::<Vec<_>>()
        };
        seen.objects.iter().flat_map(unread).collect()
    }

    pub(super) fn error(&self, field: &str, problem: impl Into<String>) -> Error {
        Error::Config {
            file: self.file.into(),
            field: format!("{}{field}", self.prefix),
            problem: problem.into(),
        }
    }

    /// Returns the value of a field, null included, and marks the field as read.
    fn entry(&self, field: &str) -> Option<&'a Value> {
        let (key, value) = self.object.get_key_value(field)?;
        self.seen.borrow_mut().keys.insert(std::ptr::from_ref(key));
        Some(value)
    }

    /// Returns the value of a field, or `None` if it is missing or null.
    pub(super) fn get(&self, field: &str) -> Option<&'a Value> {
        self.entry(field).filter(|v| !v.is_null())
    }

    /// Returns true if the field exists, even if it is null.
    pub(super) fn contains(&self, field: &str) -> bool {
        self.entry(field).is_some()
    }

    /// Marks a field as read if it repeats `value`, which is used. A different value stays unread and is
    /// reported.
    pub(super) fn mark_copy_read(&self, field: &str, value: impl Into<Value>) {
        if self.object.get(field).is_some_and(|copy| same(copy, &value.into())) {
            self.entry(field);
        }
    }

    /// Iterates over the keys in file order.
    pub(super) fn keys(&self) -> impl Iterator<Item = &'a String> {
        self.object.keys()
    }

    pub(super) fn object(&self, field: &str) -> Result<Option<Fields<'a>>> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::Object(object)) => {
                let prefix = format!("{}{field}.", self.prefix);
                Ok(Some(Fields { prefix, object, ..self.clone() }.opened()))
            }
            Some(_) => Err(self.error(field, "is not an object")),
        }
    }

    /// Fails if the field is null, which transformers does not accept either.
    fn not_null(&self, field: &str) -> Result {
        match self.entry(field) {
            Some(Value::Null) => Err(self.error(field, "is null; set a value or remove it")),
            _ => Ok(()),
        }
    }

    /// Fails unless the field is missing, null, or equal to `wanted`, the only supported value.
    pub(super) fn only(&self, field: &str, wanted: impl Into<Value>) -> Result {
        let wanted = wanted.into();
        match self.get(field) {
            Some(found) if !same(found, &wanted) => {
                Err(self.error(field, format!("is {found}; only {wanted} is supported")))
            }
            _ => Ok(()),
        }
    }

    /// Reads an integer from 0 to 2^31 - 1.
    pub(super) fn whole(&self, field: &str) -> Result<Option<usize>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match value.as_u64() {
            Some(n) if n < 1 << 31 => Ok(Some(n as usize)),
            _ => Err(self.error(field, format!("is {value}; expected an integer from 0 to 2147483647"))),
        }
    }

    /// Reads an integer above 0.
    pub(super) fn count(&self, field: &str, default: usize) -> Result<usize> {
        self.not_null(field)?;
        match self.whole(field)? {
            Some(0) => Err(self.error(field, "must be at least 1, got 0")),
            found => Ok(found.unwrap_or(default)),
        }
    }

    /// Reads an integer above 0; fails if it is missing.
    pub(super) fn required(&self, field: &str) -> Result<usize> {
        match self.get(field) {
            None => Err(self.error(field, "is missing")),
            Some(_) => self.count(field, 0),
        }
    }

    /// Reads the number of layers.
    pub(super) fn layers(&self, default: usize) -> Result<usize> {
        match self.count("num_hidden_layers", default)? {
            n if n > MAX_LAYERS => {
                Err(self.error("num_hidden_layers", format!("must be at most {MAX_LAYERS}, got {n}")))
            }
            n => Ok(n),
        }
    }

    /// Reads a number within the range of f32.
    pub(super) fn number(&self, field: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match value.as_f64() {
            Some(x) if (x as f32).is_finite() => Ok(Some(x)),
            _ => Err(self.error(field, format!("is {value}; expected a number within the range of f32"))),
        }
    }

    /// Reads a number above 0.
    pub(super) fn positive(&self, field: &str, default: f64) -> Result<f64> {
        self.not_null(field)?;
        Ok(self.positive_or_none(field)?.unwrap_or(default))
    }

    /// Reads a number above 0, or `None` if it is missing or null.
    pub(super) fn positive_or_none(&self, field: &str) -> Result<Option<f64>> {
        match self.number(field)? {
            Some(x) if x <= 0.0 => Err(self.error(field, format!("must be above 0, got {x}"))),
            found => Ok(found),
        }
    }

    pub(super) fn flag(&self, field: &str, default: bool) -> Result<bool> {
        self.not_null(field)?;
        match self.get(field) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(value) => Err(self.error(field, format!("is {value}; expected true or false"))),
        }
    }

    pub(super) fn text(&self, field: &str) -> Result<Option<&'a str>> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(value) => Err(self.error(field, format!("is {value}; expected a string"))),
        }
    }

    /// Reads a list of strings, one for each of `layers` layers.
    pub(super) fn texts(&self, field: &str, layers: usize) -> Result<Option<Vec<&'a str>>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let texts: Option<Vec<&str>> =
            value.as_array().and_then(|list| list.iter().map(|item| item.as_str()).collect());
        match texts {
            Some(texts) if texts.len() == layers => Ok(Some(texts)),
            Some(texts) => Err(self.error(field, format!("has {} entries for {layers} layers", texts.len()))),
            None => Err(self.error(field, "is not a list of strings")),
        }
    }

    /// Reads a list of integers from 0; empty if it is missing.
    pub(super) fn wholes(&self, field: &str) -> Result<Vec<usize>> {
        let Some(value) = self.get(field) else { return Ok(Vec::new()) };
        let wholes: Option<Vec<usize>> = value
            .as_array()
            .and_then(|list| list.iter().map(|item| item.as_u64().map(|n| n as usize)).collect());
        wholes.ok_or_else(|| self.error(field, "is not a list of integers from 0"))
    }

    /// Fails unless the field is missing or one of `known`.
    pub(super) fn one_of(&self, field: &str, known: &[&str]) -> Result {
        match self.text(field)? {
            Some(text) if !known.contains(&text) => {
                Err(self
                    .error(field, format!("is {text:?}, which is not supported; use {}", known.join(", "))))
            }
            _ => Ok(()),
        }
    }
}

/// A key that the parser did not read.
pub(super) struct Unread<'a> {
    /// Path of the object that holds it, with a final dot; empty for the root.
    pub(super) prefix: String,
    pub(super) key: &'a str,
    pub(super) value: &'a Value,
}

/// Returns true if the values are equal; numbers compare by value (1 equals 1.0).
fn same(a: &Value, b: &Value) -> bool {
    match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => a == b,
        _ => a == b,
    }
}
