//! Data settings.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub use crate::config::DataConfig;
use crate::config::check_value;
use crate::error::{Error, Result};

/// A training file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataFile {
    /// Path.
    pub path: PathBuf,
    /// Relative frequency of documents from this file, whatever its size.
    #[serde(default = "one")]
    pub weight: f64,
}

fn one() -> f64 {
    1.0
}

/// Packing of documents into sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Packing {
    /// Documents are concatenated, each as a sequence of its own: state, convolution and attention are reset
    /// between them. A document that does not fit continues in the next sequence.
    Packed,
    /// One document per sequence; tokens beyond the sequence length are dropped.
    Padded,
}

impl DataConfig {
    /// Returns true if documents are held out.
    pub(crate) fn has_validation(&self) -> bool {
        self.validation.is_some() || self.validation_fraction > 0.0
    }

    /// Fraction of every training file's documents that is held out.
    pub(crate) fn held_out(&self) -> f64 {
        if self.validation.is_some() { 0.0 } else { self.validation_fraction }
    }

    /// Returns an error for invalid or contradictory settings.
    pub fn check(&self) -> Result {
        check_value("data.validation_fraction", self.validation_fraction)?;
        check_value("data.sequence_length", self.sequence_length)?;
        let bad = |key: &str, problem: String| Err(Error::config(key, problem));
        if self.files.is_empty() {
            return bad("data.files", "`data.files` is empty; name at least one training file".into());
        }
        let weights = || self.files.iter().map(|file| file.weight);
        if let Some(file) = self.files.iter().find(|file| !file.weight.is_finite() || file.weight < 0.0) {
            let path = file.path.display();
            return bad(
                "data.files",
                format!(
                    "`data.files`: the weight of {path} must be finite and at least 0, got {}",
                    file.weight
                ),
            );
        }
        if weights().all(|weight| weight == 0.0) {
            return bad("data.files", "`data.files`: all weights are 0; at least one must be above 0".into());
        }
        if !weights().sum::<f64>().is_finite() {
            return bad(
                "data.files",
                "`data.files`: the weights add up to infinity; use smaller ones".into(),
            );
        }
        if let Some(line) = self.document_separator.as_ref().filter(|line| line.contains(['\n', '\r'])) {
            return bad(
                "data.document_separator",
                format!("`data.document_separator` must be one line, got {line:?}"),
            );
        }
        self.check_validation()
    }

    fn check_validation(&self) -> Result {
        let Some(validation) = &self.validation else { return Ok(()) };
        // A missing file is reported when it is opened.
        let Ok(place) = validation.canonicalize() else { return Ok(()) };
        match self.files.iter().find(|file| file.path.canonicalize().is_ok_and(|other| other == place)) {
            None => Ok(()),
            Some(file) => Err(Error::config(
                "data.validation",
                format!(
                    "`data.validation`: {} is a training file too; name another file, or set `data.validation_fraction` instead",
                    file.path.display()
                ),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> DataConfig {
        toml::from_str(text).unwrap()
    }

    fn refused(text: &str) -> String {
        config(text).check().unwrap_err().to_string()
    }

    #[test]
    fn a_path_alone_is_a_configuration() {
        let config = config("files = [{ path = 'a.jsonl' }]");
        config.check().unwrap();
        assert_eq!((config.files[0].weight, config.validation_fraction), (1.0, 0.05));
        assert_eq!(
            (config.packing, config.train_roles.as_slice()),
            (Packing::Packed, &["assistant".into()][..])
        );
        assert!(config.shuffle && config.add_eos && config.has_validation());
    }

    #[test]
    fn unknown_names_are_refused() {
        assert!(toml::from_str::<DataConfig>("file = 'a'").is_err());
        assert!(toml::from_str::<DataConfig>("files = [{ path = 'a', wight = 2 }]").is_err());
        assert!(toml::from_str::<DataConfig>("packing = 'pack'").is_err());
    }

    #[test]
    fn settings_without_sense_are_refused_by_name() {
        assert!(refused("").contains("`data.files` is empty"));
        assert!(
            refused("files = [{ path = 'a', weight = -1 }]")
                .contains("weight of a must be finite and at least 0, got -1")
        );
        assert!(
            refused("files = [{ path = 'a', weight = nan }]")
                .contains("weight of a must be finite and at least 0, got NaN")
        );
        assert!(refused("files = [{ path = 'a', weight = 0 }]").contains("all weights are 0"));
        let huge = "files = [{ path = 'a', weight = 1e308 }, { path = 'b', weight = 1e308 }]";
        assert!(refused(huge).contains("add up to infinity"));
        assert!(
            refused("files = [{ path = 'a' }]\nvalidation_fraction = 1")
                .contains("`data.validation_fraction` must be at least 0 and below 1, got 1")
        );
        assert!(
            refused("files = [{ path = 'a' }]\nsequence_length = 1")
                .contains("`data.sequence_length` must be at least 2, got 1")
        );
        assert!(refused("files = [{ path = 'a' }]\ndocument_separator = \"a\\nb\"").contains("one line"));
    }

    #[test]
    fn a_validation_file_that_is_trained_on_is_refused_under_any_of_its_names() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.txt");
        std::fs::write(&path, "a").unwrap();
        let other = folder.path().join(".").join("a.txt");
        let file = |path: &PathBuf| DataFile { path: path.clone(), weight: 1.0 };
        let config =
            DataConfig { files: vec![file(&path)], validation: Some(other), ..DataConfig::default() };
        assert!(config.check().unwrap_err().to_string().contains("is a training file too"));
    }
}
