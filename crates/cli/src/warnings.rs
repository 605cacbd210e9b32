//! Warnings: one line each on stderr. Keys of config.json without effect are also part of the command's JSON
//! document.

use std::sync::{Arc, Mutex, OnceLock};

use ballast_checkpoint::Checkpoint;
use ballast_model::Config;

use crate::output::{clean, note, plural};

/// Number of keys that one line names.
const SHOWN_KEYS: usize = 20;

/// The warnings of a command.
#[derive(Default)]
pub(crate) struct Warnings {
    /// Set once the command has read a config.json.
    unknown_config_keys: OnceLock<Vec<String>>,
    /// List of the warnings for a calling program; `None`: they are printed.
    kept: Option<Arc<Mutex<Vec<String>>>>,
}

impl Warnings {
    /// Creates warnings that are kept instead of printed.
    pub(crate) fn kept(place: Arc<Mutex<Vec<String>>>) -> Warnings {
        Warnings { kept: Some(place), ..Warnings::default() }
    }

    /// Prints a warning.
    pub(crate) fn add(&self, warning: &str) {
        match self.kept.as_ref().map(|kept| kept.lock()) {
            Some(Ok(mut kept)) => kept.push(clean(warning)),
            Some(Err(_)) => {}
            None => note(&format!("warning: {}", clean(warning))),
        }
    }

    /// Prints the warnings of a loaded model.
    pub(crate) fn add_all(&self, warnings: &[String]) {
        warnings.iter().for_each(|warning| self.add(warning));
    }

    /// Warns of a sequence that is longer than the model's positions.
    pub(crate) fn check_length(&self, what: &str, tokens: usize, positions: usize) {
        if tokens > positions {
            self.add(&format!("{what} has {tokens} tokens, more than max_position_embeddings ({positions})"));
        }
    }

    /// Warns of keys in the config.json of `checkpoint` that have no effect here. A model that cannot be run
    /// has its own error.
    pub(crate) fn check_config(&self, checkpoint: &Checkpoint) {
        let unknown = |config| Config::unknown_keys(config, &checkpoint.config_path()).ok();
        self.set_unknown_config_keys(checkpoint.config.as_ref().and_then(unknown).unwrap_or_default());
    }

    /// Warns of keys of config.json that have no effect here and are not known to be harmless.
    pub(crate) fn set_unknown_config_keys(&self, keys: Vec<String>) {
        if !keys.is_empty() {
            let named: Vec<&str> = keys.iter().take(SHOWN_KEYS).map(String::as_str).collect();
            let more = match keys.len().saturating_sub(SHOWN_KEYS) {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            let number = plural(keys.len(), "key");
            self.add(&format!("config.json has {number} without effect here: {}{more}", named.join(", ")));
        }
        let _ = self.unknown_config_keys.set(keys);
    }

    /// Returns these keys, or `None` if the command has read no config.json.
    pub(crate) fn unknown_config_keys(&self) -> Option<&Vec<String>> {
        self.unknown_config_keys.get()
    }
}
