//! Reading config.json field by field, with errors that name the field.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::rc::Rc;

use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// Far beyond every model; a file that says more is broken, and would only fill the memory.
const MAX_LAYERS: usize = 10_000;

/// An object of config.json and its path.
#[derive(Clone)]
pub(super) struct Fields<'a> {
    pub(super) file: &'a Path,
    /// Path before a field's name: `text_config.` for instance.
    prefix: String,
    object: &'a Map<String, Value>,
    seen: Rc<RefCell<Seen<'a>>>,
}

/// The objects that were opened and the keys that were read, so that the keys nobody read can be named.
#[derive(Default)]
struct Seen<'a> {
    objects: BTreeMap<String, &'a Map<String, Value>>,
    /// Addresses of the keys inside the parsed file.
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

    /// The paths of all keys that have a value and were not read, of every object that was opened.
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

    /// The value, be it null.
    fn entry(&self, field: &str) -> Option<&'a Value> {
        let (key, value) = self.object.get_key_value(field)?;
        self.seen.borrow_mut().keys.insert(std::ptr::from_ref(key));
        Some(value)
    }

    /// The value, unless it is missing or null.
    pub(super) fn get(&self, field: &str) -> Option<&'a Value> {
        self.entry(field).filter(|v| !v.is_null())
    }

    /// Returns true if the file has the field, be it null.
    pub(super) fn says(&self, field: &str) -> bool {
        self.entry(field).is_some()
    }

    /// Counts a field as read if it repeats a value that is used; another value is left unread, and so named.
    pub(super) fn note_copy(&self, field: &str, value: impl Into<Value>) {
        if self.object.get(field).is_some_and(|copy| same(copy, &value.into())) {
            self.entry(field);
        }
    }

    /// The keys in the order of the file.
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

    /// An error if the field is there and null: transformers takes no null for it.
    fn not_null(&self, field: &str) -> Result {
        match self.entry(field) {
            Some(Value::Null) => Err(self.error(field, "is null; give it a value or remove it")),
            _ => Ok(()),
        }
    }

    /// An error unless the field is missing, null, or `wanted`, the one value that is implemented.
    pub(super) fn only(&self, field: &str, wanted: impl Into<Value>) -> Result {
        let wanted = wanted.into();
        match self.get(field) {
            Some(found) if !same(found, &wanted) => {
                Err(self.error(field, format!("is {found}, which is not supported; only {wanted} is")))
            }
            _ => Ok(()),
        }
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
        self.not_null(field)?;
        match self.whole(field)? {
            Some(0) => Err(self.error(field, "is 0")),
            found => Ok(found.unwrap_or(default)),
        }
    }

    /// A whole number above 0 that must be there.
    pub(super) fn required(&self, field: &str) -> Result<usize> {
        match self.get(field) {
            None => Err(self.error(field, "is missing")),
            Some(_) => self.count(field, 0),
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
        self.not_null(field)?;
        Ok(self.positive_or_none(field)?.unwrap_or(default))
    }

    /// A number above 0, or nothing.
    pub(super) fn positive_or_none(&self, field: &str) -> Result<Option<f64>> {
        match self.number(field)? {
            Some(x) if x <= 0.0 => Err(self.error(field, format!("is {x}; it must be above 0"))),
            found => Ok(found),
        }
    }

    pub(super) fn flag(&self, field: &str, default: bool) -> Result<bool> {
        self.not_null(field)?;
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

/// A key that was not read.
pub(super) struct Unread<'a> {
    /// Path of the object that has it, with a dot at the end; empty at the top.
    pub(super) prefix: String,
    pub(super) key: &'a str,
    pub(super) value: &'a Value,
}

/// Returns true if the values are equal, numbers by value: 1 is 1.0.
fn same(a: &Value, b: &Value) -> bool {
    match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => a == b,
        _ => a == b,
    }
}
