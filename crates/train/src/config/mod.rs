//! Run configuration: defaults, then a TOML file, then `--set a.b=c`, then flags.
//!
//! keys.rs has the table of all keys, from which structs, checks and lists come; key.rs has what a key is.

mod choices;
mod key;
mod keys;
mod resume;
mod settings;

use std::path::Path;

use ballast_files::encoding::text_without_mark;
use ballast_files::regular::read_regular_text;
use ballast_model::{IndexerLoss, LossOptions};
use toml::{Table, Value};

use crate::error::{Error, Result};

pub use choices::{MomentStorage, OnFault, OnSpike, OptimizerKind, ScheduleKind, Shard, TimeSteps};
pub use key::Key;
use keys::MOST_STEP_TOKENS;
pub use keys::{
    BatchConfig, CheckpointsConfig, ClusterConfig, DataConfig, EvaluationConfig, KEYS, LedgerConfig,
    LoraConfig, LossConfig, ModelConfig, MuonConfig, OptimizerConfig, PrecisionConfig, SamplesConfig,
    ScheduleConfig, SentinelConfig, TrainConfig,
};
pub use resume::OnResume;
pub(crate) use resume::{Change, changes, check_resume};
pub(crate) use settings::check_value;
use settings::{apply, check_names, check_values};

/// Configuration of `ballast train` without arguments: the embedded hybrid on the embedded task.
pub const EMBEDDED: &str = include_str!("../../presets/default.toml");

impl LossConfig {
    /// Returns true if the loss has parts that a held-out loss does not have.
    pub(crate) fn has_other_parts(&self) -> bool {
        self.z_loss > 0.0 || self.label_smoothing > 0.0
    }

    /// The model's loss options, without the scale of a step.
    pub fn options(&self) -> LossOptions {
        let (scale, stage) = (self.indexer_scale, self.indexer_stage);
        LossOptions {
            z_loss: self.z_loss,
            label_smoothing: self.label_smoothing,
            indexer: (scale > 0.0).then_some(IndexerLoss { scale, stage }),
            balance: (self.balance > 0.0).then_some(self.balance),
            ..LossOptions::default()
        }
    }
}

/// An error of the TOML parser on one line, with the line number in `text` first if it is known.
pub(crate) fn one_line(error: &toml::de::Error, text: &str) -> String {
    let before = error.span().and_then(|span| text.get(..span.start));
    let line =
        before.map(|before| format!("line {}: ", before.matches('\n').count() + 1)).unwrap_or_default();
    let whole = error.to_string();
    let message = if text.is_empty() { whole.trim_end() } else { error.message() };
    format!("{line}{}", message.replace('\n', " "))
}

impl TrainConfig {
    /// Loads a file and applies `a.b=c` settings.
    pub fn load(file: &Path, settings: &[String]) -> Result<TrainConfig> {
        let text = read_regular_text(file).map_err(Error::io(file, "read"))?;
        let text = text_without_mark(&text);
        let table =
            text.parse().map_err(|e| Error::Syntax(format!("{}: {}", file.display(), one_line(&e, text))))?;
        TrainConfig::from_table(table, settings, Some(file))
    }

    /// Loads [`EMBEDDED`] and applies settings.
    pub fn embedded(settings: &[String]) -> Result<TrainConfig> {
        let table =
            EMBEDDED.parse().map_err(|error| Error::Syntax(format!("embedded configuration: {error}")))?;
        TrainConfig::from_table(table, settings, None)
    }

    /// Makes a configuration from a table that was read from `file`, and applies settings.
    pub fn from_table(mut table: Table, settings: &[String], file: Option<&Path>) -> Result<TrainConfig> {
        let place = file.map(|file| format!("{}: ", file.display())).unwrap_or_default();
        check_names(&table, "", &place)?;
        let of_file = check_values(&table).err().map(|error| error.to_string());
        for setting in settings {
            apply(&mut table, setting)?;
        }
        check_names(&table, "", "--set ")?;
        check_values(&table).map_err(|error| match error {
            // The value may also come from a setting, which names itself.
            Error::Config { key, problem } if of_file.as_ref() == Some(&problem) => {
                Error::config(key, format!("{place}{problem}"))
            }
            error => error,
        })?;
        let config: TrainConfig = Value::Table(table)
            .try_into()
            .map_err(|e| Error::Syntax(format!("{place}{}", one_line(&e, ""))))?;
        config.check()?;
        Ok(config)
    }

    /// Serializes to TOML that [`TrainConfig::load`] reads.
    pub fn to_toml(&self) -> Result<String> {
        toml::to_string(self)
            .map_err(|error| Error::Syntax(format!("cannot write the configuration as TOML: {error}")))
    }

    /// The table of [`TrainConfig::to_toml`].
    pub(crate) fn to_table(&self) -> Result<Table> {
        let problem = |error| Error::Syntax(format!("cannot read the configuration as TOML: {error}"));
        self.to_toml()?.parse().map_err(problem)
    }

    /// Returns an error that names the first key with an invalid value.
    pub fn check(&self) -> Result {
        check_values(&self.to_table()?)?;
        let refuse = |key: &str, problem: String| Err(Error::config(key, problem));
        let (sequences, length) = (self.batch.sequences, self.data.sequence_length);
        let (accumulation, groups) = (self.batch.accumulation, self.batch.groups);
        if !accumulation.is_multiple_of(groups) {
            return refuse(
                "batch.accumulation",
                format!(
                    "`batch.accumulation` must be a multiple of `batch.groups` {groups}, got {accumulation}: all groups have \
                 the same number of micro-batches"
                ),
            );
        }
        let tokens = sequences.checked_mul(accumulation).and_then(|n| n.checked_mul(length));
        if tokens.is_none_or(|tokens| tokens as u64 > MOST_STEP_TOKENS) {
            return refuse(
                "batch.sequences",
                format!(
                    "`batch.sequences` x `batch.accumulation` x `data.sequence_length`, the tokens of a step, must be at most \
                 {MOST_STEP_TOKENS}, got {sequences} x {accumulation} x {length}"
                ),
            );
        }
        let m = &self.model;
        let sources = [m.preset.is_some(), m.config.is_some(), m.checkpoint.is_some()];
        if sources.iter().filter(|given| **given).count() > 1 {
            return refuse(
                "model",
                "`model` has more than one of preset, config and checkpoint; set one".into(),
            );
        }
        if m.time_steps == TimeSteps::Drawn && m.checkpoint.is_some() {
            return refuse(
                "model.time_steps",
                "`model.time_steps` applies to new models; a checkpoint has its own".into(),
            );
        }
        if self.lora.is_some() && m.checkpoint.is_none() {
            return refuse("lora", "`lora` needs a base model: set `model.checkpoint`".into());
        }
        if self.data.task.is_some() && !self.data.files.is_empty() {
            return refuse("data", "`data` has both a task and files; set one".into());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::settings::value_of;
    use super::*;

    fn load(settings: &[&str]) -> Result<TrainConfig> {
        let settings: Vec<String> = settings.iter().map(|s| s.to_string()).collect();
        TrainConfig::from_table(Table::new(), &settings, None)
    }

    /// Paths of all values in a table that are no tables.
    fn leaves(table: &Table, above: &str, found: &mut Vec<String>) {
        for (key, value) in table {
            let path = if above.is_empty() { key.clone() } else { format!("{above}.{key}") };
            match value {
                Value::Table(inner) if path != "precision.sites" => leaves(inner, &path, found),
                _ => found.push(path),
            }
        }
    }

    #[test]
    fn the_path_of_every_key_leads_to_its_field_and_every_field_has_a_key() {
        let key_names: Vec<&str> = KEYS.iter().map(|key| key.name).collect();
        for key in KEYS {
            // An unknown path is refused by the structs; a key without a default holds text.
            let (path, value) = (key.name, (key.default)().unwrap_or("x".into()));
            let table: Table = format!("{path} = {value}").parse().unwrap();
            let config: TrainConfig = Value::Table(table).try_into().unwrap();
            assert_eq!(value_of(&config.to_table().unwrap(), path), Some(&value), "{path}");
            assert!(!key.help().is_empty(), "{path}");
            key.check(&value).unwrap();
        }
        let mut found = Vec::new();
        let config = TrainConfig { lora: Some(LoraConfig::default()), ..TrainConfig::default() };
        leaves(&config.to_table().unwrap(), "", &mut found);
        assert!(found.len() > 60 && found.iter().all(|path| key_names.contains(&path.as_str())), "{found:?}");
    }

    #[test]
    fn errors_name_the_wanted_values_and_the_one_that_was_given() {
        for (setting, error) in [
            ("steps=0", "`steps` must be at least 1, got 0"),
            ("steps=many", "`steps` must be an integer, got \"many\""),
            ("seed=-1", "`seed` must be at least 0, got -1"),
            ("optimizer.beta1=1", "`optimizer.beta1` must be at least 0 and below 1, got 1"),
            ("optimizer.eps=0.0", "`optimizer.eps` must be above 0, got 0.0"),
            ("schedule.floor=2", "`schedule.floor` must be 0 to 1, got 2"),
            ("loss.z_loss=1e300", "`loss.z_loss` must be finite, got inf"),
            (
                "sentinel.on_fault=pray",
                "`sentinel.on_fault` must be abort, skip, rollback or escalate, got \"pray\"",
            ),
            ("model.freeze=all", "`model.freeze` must be a list of strings, got \"all\""),
            ("data.shuffle=1", "`data.shuffle` must be true or false, got 1"),
            ("optimizer.muon.ns_coefficients=[1, 2]", "must be a list of 3 numbers, got [1, 2]"),
        ] {
            let problem = load(&[setting]).unwrap_err().to_string();
            assert!(problem.ends_with(error), "{problem}");
        }
        let integers = || KEYS.iter().filter(|key| key.values().contains("integer"));
        assert!(integers().count() > 20);
        for key in integers() {
            let problem = load(&[&format!("{}=-1", key.name)]).unwrap_err().to_string();
            assert!(
                problem.contains(&format!("`{}` must be ", key.name)) && problem.contains("got -1"),
                "{problem}"
            );
            assert!(!problem.contains("must be an integer"), "{problem}");
        }
    }

    #[test]
    fn settings_come_after_the_file_and_bare_words_are_text() {
        let file: Table = "steps = 5\n[optimizer]\nlearning_rate = 1e-4".parse().unwrap();
        let settings = ["steps=7".into(), "precision.preset=f32".into(), "precision.sites.logits=f16".into()];
        let config = TrainConfig::from_table(file, &settings, None).unwrap();
        assert_eq!((config.steps, config.optimizer.learning_rate), (7, 1e-4));
        assert_eq!(config.precision.preset, "f32");
        assert_eq!(config.precision.sites["logits"], "f16");
        let again: Table = config.to_toml().unwrap().parse().unwrap();
        assert_eq!(TrainConfig::from_table(again, &[], None).unwrap(), config);
    }

    #[test]
    fn an_unknown_key_names_the_nearest_one() {
        for (setting, expected) in [
            ("optimiser.learning_rate=1", "`optimizer.learning_rate`"),
            ("learning_rate=1", "`optimizer.learning_rate`"),
            ("step=1", "`steps`"),
            ("checkpoints.evry=1", "`checkpoints.every`"),
        ] {
            let error = load(&[setting]).unwrap_err().to_string();
            assert!(error.contains("is unknown") && error.contains(expected), "{error}");
        }
    }

    #[test]
    fn values_that_make_no_sense_are_refused_by_key() {
        for (setting, key) in [
            ("steps=0", "`steps`"),
            ("optimizer.learning_rate=nan", "`optimizer.learning_rate`"),
            ("optimizer.beta2=1.0", "`optimizer.beta2`"),
            ("optimizer.kind=lion", "lion"),
            ("optimizer.muon.momentum=1.0", "`optimizer.muon.momentum`"),
            ("optimizer.muon.ns_steps=100", "`optimizer.muon.ns_steps` must be 0 to 99, got 100"),
            ("optimizer.muon.ns_coefficients=[1, nan, 0]", "`optimizer.muon.ns_coefficients`"),
            ("optimizer.muon.adjust_lr=half", "half"),
            ("data.sequence_length=1", "`data.sequence_length`"),
            ("optimizer=3", "`optimizer` is a section"),
            ("steps=many", "steps"),
            ("sentinel.on_fault=pray", "pray"),
            ("lora.rank=4", "`lora` needs a base model: set `model.checkpoint`"),
        ] {
            let error = load(&[setting]).unwrap_err().to_string();
            assert!(error.contains(key), "{setting}: {error}");
        }
        let both: Table = "[model]\npreset = 'a'\ncheckpoint = 'b'".parse().unwrap();
        let error = TrainConfig::from_table(both, &[], None).unwrap_err().to_string();
        assert!(error.contains("more than one"), "{error}");
        let both: Table = "[data]\ntask = 'recall'\nfiles = [{ path = 'a.txt' }]".parse().unwrap();
        let error = TrainConfig::from_table(both, &[], None).unwrap_err().to_string();
        assert!(error.contains("both a task and files"), "{error}");
        let error = load(&["model.checkpoint=b", "model.time_steps=drawn"]).unwrap_err().to_string();
        assert!(error.contains("a checkpoint has its own"), "{error}");
        let last = load(&["model.preset=a", "model.checkpoint=b"]).unwrap().model;
        assert_eq!((last.preset, last.checkpoint), (None, Some("b".into())));
    }
}
