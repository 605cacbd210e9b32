//! Decision on keys that have changed when a run is resumed.

use std::fmt;

use toml::Value;

use super::keys::SPLIT;
use super::settings::value_of;
use super::{KEYS, Key, TrainConfig};
use crate::error::{Error, Result};

/// Rule for a new value of a key when a run is resumed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnResume {
    /// It applies from the next step.
    Applies,
    /// It applies, and the best held-out loss is discarded, because losses are no longer comparable.
    ChangesMeasure,
    /// It applies if this stays as it was, which is checked: a moved file, for example.
    MustKeep(&'static str),
    /// It is an error, for this reason.
    Refused(&'static str),
}

use OnResume::{Applies, ChangesMeasure, MustKeep, Refused};

impl fmt::Display for OnResume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Applies => write!(f, "applies"),
            ChangesMeasure => write!(f, "applies; discards the best held-out loss"),
            MustKeep(what) => write!(f, "must keep {what}"),
            Refused(reason) => write!(f, "refused: {reason}"),
        }
    }
}

/// A key that differs between two configurations; a value is `None` where the key is not set.
pub(crate) struct Change {
    pub key: &'static Key,
    pub old: Option<Value>,
    pub new: Option<Value>,
}

/// The keys that differ, in the order of [`KEYS`].
pub(crate) fn changes(before: &TrainConfig, after: &TrainConfig) -> Result<Vec<Change>> {
    let (before, after) = (before.to_table()?, after.to_table()?);
    let value = |table, key: &Key| value_of(table, key.name).cloned();
    let pairs = KEYS.iter().map(|key| Change { key, old: value(&before, key), new: value(&after, key) });
    Ok(pairs.filter(|change| change.old != change.new).collect())
}

/// Returns an error for changes between a saved configuration and the new one that are not allowed; else true
/// if held-out losses are still comparable.
pub(crate) fn check_resume(saved: &TrainConfig, new: &TrainConfig) -> Result<bool> {
    let mut comparable = true;
    for Change { key, old, new } in changes(saved, new)? {
        let reason = match key.on_resume {
            Refused(reason) => reason,
            // Without the file, the held-out documents come from the training files.
            MustKeep(_) if key.name == "data.validation" && old.is_some() != new.is_some() => SPLIT,
            MustKeep(_) | Applies => continue,
            ChangesMeasure => {
                comparable = false;
                continue;
            }
        };
        let shown = |value: Option<Value>| value.map_or("nothing".into(), |value| value.to_string());
        return Err(Error::config(
            key.name,
            format!(
                "`{}` cannot change from {} to {} when a run is resumed: {reason}; keep the old value or start a new run",
                key.name,
                shown(old),
                shown(new)
            ),
        ));
    }
    Ok(comparable)
}
