//! Configuration as TOML tables: names and values of keys, and settings that replace them.

use serde::Serialize;
use strsim::levenshtein;
use toml::{Table, Value};

use super::KEYS;
use crate::error::{Error, Result};

/// The value of a key.
pub(super) fn value_of<'t>(table: &'t Table, key: &str) -> Option<&'t Value> {
    match key.split_once('.') {
        Some((section, rest)) => value_of(table.get(section)?.as_table()?, rest),
        None => table.get(key),
    }
}

/// Returns an error for a value of another type or out of range.
pub(crate) fn check_value(key: &str, value: impl Serialize) -> Result {
    let invalid = |problem: String| Error::config(key, format!("`{key}` {problem}"));
    let known = KEYS.iter().find(|known| known.name == key).ok_or_else(|| invalid("is unknown".into()))?;
    known.check(&Value::try_from(value).map_err(|error| invalid(error.to_string()))?)
}

/// Returns an error for the first key whose value has another type or is out of range.
pub(super) fn check_values(table: &Table) -> Result {
    KEYS.iter().try_for_each(|key| value_of(table, key.name).map_or(Ok(()), |value| key.check(value)))
}

/// Returns an error for the first key that is not in [`KEYS`].
pub(super) fn check_names(table: &Table, above: &str, place: &str) -> Result {
    for (key, value) in table {
        let path = if above.is_empty() { key.clone() } else { format!("{above}.{key}") };
        let known = KEYS.iter().any(|key| key.name == path);
        let section = KEYS
            .iter()
            .any(|key| key.name.strip_prefix(path.as_str()).is_some_and(|rest| rest.starts_with('.')));
        match value {
            Value::Table(inner) if section => check_names(inner, &path, place)?,
            _ if known => {}
            _ if section => {
                return Err(Error::config(
                    &path,
                    format!("{place}`{path}` is a section; set `{path}.<key>` instead"),
                ));
            }
            _ => {
                let path = first_leaf(&path, value);
                let near = nearest(&path);
                let problem = format!("{place}`{path}` is unknown; did you mean `{near}`?");
                return Err(Error::config(path, problem));
            }
        }
    }
    Ok(())
}

/// The path of the first value in an unknown section: more helpful than the section alone.
fn first_leaf(path: &str, value: &Value) -> String {
    match value.as_table().and_then(|table| table.iter().next()) {
        Some((key, inner)) => first_leaf(&format!("{path}.{key}"), inner),
        None => path.into(),
    }
}

/// The known key with the smallest edit distance.
fn nearest(path: &str) -> &'static str {
    fn last(key: &str) -> &str {
        key.rsplit('.').next().unwrap_or_default()
    }
    // The last part finds a key in the wrong section.
    let distance = |key: &str| levenshtein(path, key).min(1 + levenshtein(last(path), last(key)));
    KEYS.iter().map(|key| key.name).min_by_key(|key| distance(key)).unwrap_or("steps")
}

/// Applies `a.b=c` to the table; c is TOML or a bare word.
pub(super) fn apply(table: &mut Table, setting: &str) -> Result {
    let Some((path, text)) = setting.split_once('=') else {
        return Err(Error::Syntax(format!("--set {setting:?}: expected a key, `=` and a value")));
    };
    let parsed = format!("value = {text}").parse::<Table>().ok();
    let value = parsed.and_then(|mut table| table.remove("value")).unwrap_or(Value::String(text.into()));
    let mut keys: Vec<&str> = path.trim().split('.').collect();
    let last = keys.pop().unwrap_or_default();
    let mut inner = table;
    for key in keys {
        let entry = inner.entry(key).or_insert_with(|| Value::Table(Table::new()));
        inner = entry
            .as_table_mut()
            .ok_or_else(|| Error::Syntax(format!("--set {setting:?}: `{key}` is not a section")))?;
    }
    // A new source of the model replaces the old one.
    const SOURCES: [&str; 3] = ["preset", "config", "checkpoint"];
    if path.trim().starts_with("model.") && SOURCES.contains(&last) {
        SOURCES.iter().for_each(|source| drop(inner.remove(*source)));
    }
    inner.insert(last.into(), value);
    Ok(())
}
