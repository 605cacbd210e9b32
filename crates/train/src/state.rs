//! Training checkpoints: everything that the next step depends on, written atomically.
//!
//! ```text
//! OUT/checkpoints/step-00000100/model/                  Hugging Face format: config.json, weights by contract, tokenizer
//!                               adapter/                instead of model/ in LoRA runs: PEFT format
//!                               optimizer.safetensors   masters and optimizer state
//!                               state.json              step, cursor, ledger, sentinel, configuration, checksums
//! ```
//! A checkpoint is written to a hidden sibling folder, flushed, and renamed; an obsolete one is renamed
//! before it is removed. So every folder called `step-*` is complete, whenever the process dies.
//!
//! If a step already has a checkpoint (after a rollback, or with other settings), the new one is first
//! written as `.new-<step>`. Then the old one is renamed to `.old-<step>`, the new one is renamed into place,
//! and the old one is removed. If the process dies in between, one of the two is complete, and the next run
//! restores it. A checkpoint equal to the existing one is not written.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use ballast_checkpoint::tensor_file::TensorFile;
use ballast_files::jobs::{Observer, Silent};
use ballast_files::look_at;
use ballast_files::regular::read_regular_text;
use ballast_files::staging::{Staging, create_folders, sync_folder};
use ballast_kernels::Rounding;
use ballast_model::{Config, Model, Precision, SaveOptions, Site};
use serde::{Deserialize, Serialize};

use crate::checksum::{TensorBytes, bytewise, parameters_checksum, tensors_of, tensors_of_optimizer};
use crate::cluster::Division;
use crate::config::{CheckpointsConfig, TrainConfig};
use crate::data::{Cursor, FileCursor};
use crate::error::{Error, Result};
use crate::ledger::Ledger;
use crate::optimizer::Optimizer;
use crate::sentinel::Sentinel;

pub use crate::checksum::weights_checksum;

/// Format version that this program writes.
const VERSION: u32 = 2;

/// Oldest format version that this program reads. Version 1 has checksums of another hash, which are not
/// compared.
const OLDEST: u32 = 1;

/// The state of a run without its tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Format version.
    pub version: u32,
    /// Number of steps.
    pub step: u64,
    /// Number of optimizer updates; skipped batches make none.
    pub updates: u32,
    /// Position in the training data, of the first group.
    pub cursor: Cursor,
    /// Positions of the other groups (`batch.groups`).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub other_cursors: Vec<Cursor>,
    /// Checksums of the protected tensors.
    pub ledger: Ledger,
    /// Fault-detection statistics.
    pub sentinel: Sentinel,
    /// Step and loss of the best evaluation.
    pub best: Option<(u64, f64)>,
    /// Start positions of steps that a rollback excludes, of the first group.
    #[serde(default)]
    pub left_out: Vec<Cursor>,
    /// The same of the other groups, by step.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left_out_others: Vec<Vec<Cursor>>,
    /// The file of held-out documents, if there is one.
    #[serde(default)]
    pub validation: Vec<FileCursor>,
    /// Checksum of the tokenizer files; absent in checkpoints of earlier versions.
    #[serde(default)]
    pub tokenizer: Option<u64>,
    /// Resolved configuration (TOML).
    pub config: String,
    /// Method of the two checksums of tensors.
    #[serde(default)]
    pub checksums: ChecksumMethod,
    /// Checksum of names and shapes of all trained parameters.
    pub parameters: String,
    /// Checksum of all weights and protected tensors.
    pub weights_checksum: String,
    /// Checksum of masters and optimizer state.
    pub optimizer_checksum: String,
}

/// Method of the checksums of tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ChecksumMethod {
    /// A hash of all bytes in sequence, as before this field existed.
    #[default]
    Bytes,
    /// A hash of the hashes of blocks, which several ranks can compute.
    Blocks,
}

impl State {
    /// The state of a model and optimizer; the caller fills in the other fields. All ranks call this.
    pub(crate) fn new(model: &Model, optimizer: &Optimizer, division: &Division) -> Result<State> {
        Ok(State {
            version: VERSION,
            step: 0,
            updates: optimizer.updates,
            cursor: Cursor::default(),
            other_cursors: Vec::new(),
            left_out_others: Vec::new(),
            ledger: Ledger::default(),
            sentinel: Sentinel::default(),
            best: None,
            left_out: Vec::new(),
            validation: Vec::new(),
            tokenizer: None,
            config: String::new(),
            checksums: ChecksumMethod::Blocks,
            parameters: parameters_checksum(optimizer),
            weights_checksum: division.weights_checksum(model)?,
            optimizer_checksum: division.optimizer_checksum(optimizer, model)?,
        })
    }
}

impl State {
    /// Returns false for a state of format version 1, whose checksums cannot be compared.
    pub(crate) fn has_checksums(&self) -> bool {
        self.version >= 2
    }

    /// Positions in the training data, of all groups.
    pub(crate) fn cursors(&self) -> Vec<Cursor> {
        std::iter::once(&self.cursor).chain(&self.other_cursors).cloned().collect()
    }

    /// Start positions of steps that a rollback excludes, of all groups.
    pub(crate) fn all_left_out(&self) -> Vec<Vec<Cursor>> {
        let others = |step: usize| self.left_out_others.get(step).into_iter().flatten().cloned();
        let all =
            |(step, first): (usize, &Cursor)| std::iter::once(first.clone()).chain(others(step)).collect();
        self.left_out.iter().enumerate().map(all).collect()
    }

    /// Configuration of the run, as a table.
    pub(crate) fn config_table(&self) -> Result<toml::Table, toml::de::Error> {
        config_of_version(self.version, &self.config)
    }

    /// The state without checksums of files. Those of tensors stay: they are not compared.
    fn without_checksums(mut self) -> State {
        let others = self.left_out_others.iter_mut().flatten().chain(&mut self.other_cursors);
        let cursors = self.left_out.iter_mut().chain([&mut self.cursor]).chain(others);
        let files = cursors.flat_map(|cursor| &mut cursor.files).chain(&mut self.validation);
        files.for_each(|file| file.content = None);
        self.tokenizer = None;
        self
    }

    /// Returns true if a run continues from both states in the same way. Check counts and the path of the
    /// run's folder do not matter.
    fn is_equivalent(&self, other: &State) -> bool {
        let essence = |state: &State| {
            let mut config = state.config.parse::<toml::Table>().ok();
            config.as_mut().map(|table| table.remove("out"));
            (config, State { ledger: Ledger::default(), config: String::new(), ..state.clone() })
        };
        essence(self) == essence(other)
    }
}

/// The checkpoints of a run, with a lock against a second run in the same folder.
pub struct Store {
    folder: PathBuf,
    /// Held by the process that writes.
    _lock: Option<File>,
}

impl Store {
    /// Opens or creates the folder of a run.
    pub fn open(out: &Path) -> Result<Store> {
        let folder = out.join("checkpoints");
        create_folders(&folder).map_err(Error::io(&folder, "create"))?;
        let path = out.join(".lock");
        let lock = File::create(&path).map_err(Error::io(&path, "create"))?;
        if lock.try_lock().is_err() {
            return Err(Error::Busy { out: out.to_path_buf() });
        }
        let store = Store { folder, _lock: Some(lock) };
        store.clean_up();
        Ok(store)
    }

    /// The folder of a run that rank 0 has opened, on another rank.
    pub(crate) fn of_first(out: &Path) -> Store {
        Store { folder: out.join("checkpoints"), _lock: None }
    }

    /// The folder of the checkpoints.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Steps with a checkpoint, ascending.
    pub fn steps(&self) -> Vec<u64> {
        self.all_steps().unwrap_or_default()
    }

    /// Steps with a checkpoint, ascending; an error if the folder cannot be listed.
    pub(crate) fn all_steps(&self) -> Result<Vec<u64>> {
        steps_in(&self.folder)
    }

    /// The newest checkpoint: its step and the folder of its model or adapters.
    pub fn newest(&self) -> Option<(u64, PathBuf)> {
        let step = self.steps().pop()?;
        let path = self.path(step);
        let adapter = path.join("adapter");
        Some((step, if adapter.is_dir() { adapter } else { path.join("model") }))
    }

    /// The folder of a step's checkpoint.
    pub fn path(&self, step: u64) -> PathBuf {
        self.folder.join(format!("step-{step:08}"))
    }

    /// Writes a checkpoint; `files` go beside the weights. Older checkpoints stay as they are. One of the
    /// same step is replaced once the new one is complete, and kept if both are equivalent.
    ///
    /// All ranks call this, and each writes its share; it succeeds on all of them or on none.
    pub(crate) fn save(
        &self,
        state: &mut State,
        model: &Model,
        optimizer: &Optimizer,
        files: &[(String, Vec<u8>)],
        observer: &dyn Observer,
        division: &Division,
    ) -> Result<PathBuf> {
        let target = self.path(state.step);
        let ranks = &division.ranks;
        let staging = ranks.on_first(|| self.open_staging(state, &target))?.flatten();
        let opened = staging.as_ref().map(|staging| staging.folder().to_string_lossy().into_owned());
        let Some(folder) = ranks.value_of_first(ranks.world.is_first().then_some(&opened))? else {
            return Ok(target);
        };
        let folder = match &staging {
            Some(staging) => staging.folder().to_path_buf(),
            None => PathBuf::from(folder),
        };
        let weights = folder.join("weights.safetensors");
        let shared = division.divides_weights() && model.params.adapters().is_empty();
        if shared {
            division.write_weights(model, &weights)?;
        }
        let weights = shared.then_some(&*weights);
        ranks.on_first(|| self.save_model(&folder, state, model, files, observer, weights))?;
        division.write_optimizer(optimizer, model, &folder.join("optimizer.safetensors"))?;
        ranks.on_first(|| staging.map_or(Ok(()), |staging| self.commit(staging, state)))?;
        Ok(target)
    }

    /// Begins a checkpoint; `None` if an equivalent one exists.
    fn open_staging(&self, state: &State, target: &Path) -> Result<Option<Staging>> {
        let exists = target.exists();
        if exists && read_state(target).is_ok_and(|old| old.is_equivalent(state)) {
            return Ok(None);
        }
        let whole = if exists { self.hidden("new", state.step) } else { target.to_path_buf() };
        Ok(Some(Staging::new(&whole, false, false, &[])?))
    }

    /// Writes the model or its adapters. `weights` is the file that the ranks have written, if they share the weights.
    fn save_model(
        &self,
        folder: &Path,
        state: &mut State,
        model: &Model,
        files: &[(String, Vec<u8>)],
        observer: &dyn Observer,
        weights: Option<&Path>,
    ) -> Result {
        if !model.params.adapters().is_empty() {
            return Ok(model.write_adapters(&folder.join("adapter"), false)?);
        }
        let to = folder.join("model");
        model.save_with(&to, &SaveOptions { files, weights, ..SaveOptions::default() }, observer)?;
        if let Some(weights) = weights {
            fs::remove_file(weights).map_err(Error::io(weights, "remove"))?;
        }
        state.ledger.check_saved(&to)
    }

    /// Completes a checkpoint.
    fn commit(&self, staging: Staging, state: &State) -> Result {
        let json = serde_json::to_vec_pretty(state).map_err(|error| Error::Syntax(error.to_string()))?;
        write_file(&staging.folder().join("state.json"), &json)?;
        let exists = self.path(state.step).exists();
        staging.commit(&Silent)?;
        if exists {
            self.replace(state.step)?;
        }
        Ok(())
    }

    /// Replaces the old checkpoint of a step by the new one.
    fn replace(&self, step: u64) -> Result {
        let (target, new, old) = (self.path(step), self.hidden("new", step), self.hidden("old", step));
        let _ = fs::remove_dir_all(&old);
        fs::rename(&target, &old).map_err(Error::io(&target, "rename"))?;
        if let Err(error) = fs::rename(&new, &target) {
            let _ = fs::rename(&old, &target);
            return Err(Error::io(&new, "rename into place")(error));
        }
        // The rename must survive a power cut before the old checkpoint is removed.
        sync_folder(&self.folder).map_err(Error::io(&self.folder, "flush"))?;
        fs::remove_dir_all(&old).map_err(Error::io(&old, "remove"))
    }

    fn hidden(&self, kind: &str, step: u64) -> PathBuf {
        self.folder.join(format!(".{kind}-{step:08}"))
    }

    /// Removes the checkpoints that the configuration does not keep.
    pub(crate) fn prune(&self, config: &CheckpointsConfig, best: Option<u64>) -> Result {
        let steps = self.all_steps()?;
        let newest = steps.len().saturating_sub(config.keep_last);
        for step in &steps[..newest] {
            let kept = config.keep_every > 0 && step.is_multiple_of(config.keep_every)
                || config.keep_best && best == Some(*step);
            if !kept {
                self.remove(*step)?;
            }
        }
        Ok(())
    }

    fn remove(&self, step: u64) -> Result {
        let path = self.path(step);
        let away = self.hidden("removed", step);
        let _ = fs::remove_dir_all(&away);
        fs::rename(&path, &away).map_err(Error::io(&path, "rename"))?;
        fs::remove_dir_all(&away).map_err(Error::io(&away, "remove"))
    }

    /// Removes leftovers of killed runs; the lock keeps others out. An interrupted replacement is finished:
    /// with the new checkpoint, which is complete once it has its name, else with the old one.
    fn clean_up(&self) {
        for kind in ["new", "old"] {
            for step in steps_named(&self.folder, &format!(".{kind}-")).unwrap_or_default() {
                if !self.path(step).exists() {
                    let _ = fs::rename(self.hidden(kind, step), self.path(step));
                }
            }
        }
        let Ok(entries) = fs::read_dir(&self.folder) else { return };
        for entry in entries.flatten() {
            if entry.file_name().to_string_lossy().starts_with('.') {
                let _ = fs::remove_dir_all(entry.path()).or_else(|_| fs::remove_file(entry.path()));
            }
        }
    }
}

/// Steps with a checkpoint in this folder, ascending.
pub(crate) fn steps_in(folder: &Path) -> Result<Vec<u64>> {
    steps_named(folder, "step-")
}

fn steps_named(folder: &Path, prefix: &str) -> Result<Vec<u64>> {
    let mut steps: Vec<u64> = Vec::new();
    if look_at(folder)?.is_none() {
        return Ok(steps);
    }
    for entry in fs::read_dir(folder).map_err(Error::io(folder, "list"))? {
        let entry = entry.map_err(Error::io(folder, "list"))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some(step) = name.strip_prefix(prefix).and_then(|step| step.parse().ok()) else { continue };
        if look_at(&entry.path())?.is_some_and(|found| found.is_dir()) {
            steps.push(step);
        }
    }
    steps.sort_unstable();
    Ok(steps)
}

/// Writes a file atomically; an old one stays until the new one is complete.
pub(crate) fn replace_file(path: &Path, bytes: &[u8]) -> Result {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let new = path.with_file_name(format!(".{name}.new"));
    let written = write_file(&new, bytes);
    let renamed = written.and_then(|()| fs::rename(&new, path).map_err(Error::io(path, "replace")));
    let renamed =
        renamed.and_then(|()| sync_folder(path.parent().unwrap_or(path)).map_err(Error::io(path, "flush")));
    if renamed.is_err() {
        let _ = fs::remove_file(&new);
    }
    renamed
}

fn write_file(path: &Path, bytes: &[u8]) -> Result {
    let mut file = File::create(path).map_err(Error::io(path, "create"))?;
    file.write_all(bytes).map_err(Error::io(path, "write"))?;
    file.sync_all().map_err(Error::io(path, "flush"))
}

/// Sites that presets round and did not always round. A saved configuration names them, so one that does not is of
/// an earlier program, and its run keeps them in f32.
const LATER_SITES: [Site; 3] = [Site::Probabilities, Site::AttentionGradient, Site::LossGradient];

/// The configuration as a checkpoint has it.
pub(crate) fn saved_config(config: &TrainConfig, precision: &Precision) -> Result<String> {
    let mut config = config.clone();
    for site in LATER_SITES.into_iter().filter(|_| config.precision.preset != "f32") {
        let rounding = match precision.site(site) {
            Rounding::F32 => "f32",
            Rounding::Bf16 => "bf16",
            Rounding::F16 => "f16",
        };
        config.precision.sites.entry(site.name().into()).or_insert(rounding.into());
    }
    config.to_toml()
}

/// Reads a saved configuration. A run keeps the sites that its preset had when it began: the preset `bf16` of format
/// version 1 has the residual stream in bf16.
fn config_of_version(version: u32, config: &str) -> Result<toml::Table, toml::de::Error> {
    let mut table: toml::Table = config.parse()?;
    let Some(precision) = table.get_mut("precision").and_then(toml::Value::as_table_mut) else {
        return Ok(table);
    };
    let preset = precision.get("preset").and_then(toml::Value::as_str);
    let (lowered, bf16) = (preset.is_some_and(|preset| preset != "f32"), preset == Some("bf16"));
    let sites = precision.entry("sites").or_insert(toml::Table::new().into());
    let Some(sites) = sites.as_table_mut() else { return Ok(table) };
    if version == 1 && bf16 {
        sites.entry(Site::Residual.name()).or_insert("bf16".into());
    }
    for site in LATER_SITES.into_iter().filter(|_| lowered) {
        sites.entry(site.name()).or_insert("f32".into());
    }
    Ok(table)
}

/// Reads the state of a checkpoint.
pub(crate) fn read_state(checkpoint: &Path) -> Result<State> {
    let path = checkpoint.join("state.json");
    parse_state(&read_regular_text(&path).map_err(Error::io(&path, "read"))?, &path)
}

/// Parses the text of state.json; errors name `path`.
pub fn parse_state(text: &str, path: &Path) -> Result<State> {
    let refuse = |problem: String| Error::Resume { path: path.into(), problem };
    let state: State = serde_json::from_str(text).map_err(|error| {
        refuse(format!("not the state of a run: {error}; go back to an earlier checkpoint"))
    })?;
    if !(OLDEST..=VERSION).contains(&state.version) {
        let problem = format!(
            "format version {} cannot be read, this program reads {OLDEST} to {VERSION}; use the program that wrote it",
            state.version
        );
        return Err(refuse(problem));
    }
    Ok(if state.has_checksums() { state } else { state.without_checksums() })
}

/// Restores weights, masters and optimizer state. Returns an error unless they are exactly what was saved.
pub(crate) fn restore(
    checkpoint: &Path,
    state: &State,
    model: &mut Model,
    optimizer: &mut Optimizer,
    division: &Division,
) -> Result {
    let refuse = |path: PathBuf, problem: &str| Err(Error::Resume { path, problem: problem.into() });
    let compares = state.has_checksums();
    if compares && state.parameters != parameters_checksum(optimizer) {
        let problem = "it belongs to another model, or to other trained parameters; resume with the configuration that the \
                       run was started with";
        return refuse(checkpoint.join("state.json"), problem);
    }
    if model.params.adapters().is_empty() {
        let shares = division.shares(model);
        model.reload_shares(&checkpoint.join("model"), shares.as_deref())?;
        check_config(&checkpoint.join("model/config.json"), model)?;
    } else {
        model.drop_adapters();
        model.read_adapters(&checkpoint.join("adapter"))?;
    }
    let agrees = |tensors: Vec<TensorBytes<'_>>, divided: bool, saved: &str| -> Result<bool> {
        Ok(match state.checksums {
            _ if !compares => true,
            // This checksum needs all elements in one process.
            ChecksumMethod::Bytes => divided || bytewise(&tensors) == saved,
            ChecksumMethod::Blocks => division.checksum(&tensors, divided)? == saved,
        })
    };
    if !agrees(tensors_of(model), division.divides_weights(), &state.weights_checksum)? {
        return refuse(
            checkpoint.join("model"),
            "the weights are not those that were saved (checksum mismatch); go back to an earlier checkpoint",
        );
    }
    let path = checkpoint.join("optimizer.safetensors");
    let file = TensorFile::open(&path)?;
    let (found, wanted) = (file.names().count(), optimizer.saved(model).count());
    if found != wanted {
        let problem = format!(
            "it has {found} tensors, expected {wanted}; resume with the configuration that the run was started with"
        );
        return refuse(path, &problem);
    }
    // First the checks that name the element.
    let refused = |error: Error| match error {
        Error::Diverged(problem) => Error::Resume { path: path.clone(), problem },
        error => error,
    };
    optimizer
        .restore(model, &mut |name, dtype, shape, range| Ok(file.range(name, dtype, shape, range)?))
        .map_err(refused)?;
    optimizer.updates = state.updates;
    optimizer.check(model).map_err(refused)?;
    let tensors = tensors_of_optimizer(optimizer, model);
    if !agrees(tensors, division.divides_updates(), &state.optimizer_checksum)? {
        return refuse(
            path,
            "the optimizer state is not what was saved (checksum mismatch); go back to an earlier checkpoint",
        );
    }
    Ok(())
}

/// Returns an error if config.json describes other computations on parameters of the same names and shapes.
fn check_config(path: &Path, model: &Model) -> Result {
    let text = read_regular_text(path).map_err(Error::io(path, "read"))?;
    let refuse = |problem: String| Error::Resume { path: path.into(), problem };
    let json = serde_json::from_str(&text).map_err(|error| refuse(format!("not JSON: {error}")))?;
    if Config::parse(&json, path)? != model.config {
        let problem = "it belongs to another model than the configured one; resume with the configuration that the run was \
                       started with";
        return Err(refuse(problem.into()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder_with(parent: &Path, name: &str, content: &str) {
        fs::create_dir_all(parent.join(name)).unwrap();
        fs::write(parent.join(name).join("state.json"), content).unwrap();
    }

    fn found(parent: &Path) -> Vec<(String, String)> {
        let mut all: Vec<(String, String)> = fs::read_dir(parent)
            .unwrap()
            .flatten()
            .map(|entry| {
                let content = fs::read_to_string(entry.path().join("state.json")).unwrap();
                (entry.file_name().to_string_lossy().into_owned(), content)
            })
            .collect();
        all.sort();
        all
    }

    #[test]
    fn a_run_that_died_while_it_replaced_a_checkpoint_has_a_whole_one() {
        let step = "step-00000004";
        for (left, kept) in [
            // The new one is not whole.
            (&[(step, "old"), (".new-00000004.ballast-partial-7", "half")][..], "old"),
            // It is whole, and the old one is still in its place, was moved away, or is to be removed.
            (&[(step, "old"), (".new-00000004", "new")], "old"),
            (&[(".old-00000004", "old"), (".new-00000004", "new")], "new"),
            (&[(".old-00000004", "old"), (step, "new")], "new"),
            (&[(".old-00000004", "old")], "old"),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let checkpoints = folder.path().join("checkpoints");
            left.iter().for_each(|(name, content)| folder_with(&checkpoints, name, content));
            let store = Store::open(folder.path()).unwrap();
            assert_eq!(found(&checkpoints), [(step.to_string(), kept.to_string())], "{left:?}");
            assert_eq!(store.steps(), [4]);
        }
    }

    #[test]
    fn a_checkpoint_is_replaced_only_by_one_that_is_there() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path()).unwrap();
        let checkpoints = folder.path().join("checkpoints");
        folder_with(&checkpoints, "step-00000004", "old");
        assert!(store.replace(4).is_err());
        assert_eq!(found(&checkpoints), [("step-00000004".to_string(), "old".to_string())]);
        folder_with(&checkpoints, ".new-00000004", "new");
        store.replace(4).unwrap();
        assert_eq!(found(&checkpoints), [("step-00000004".to_string(), "new".to_string())]);
    }

    #[test]
    fn a_run_keeps_the_sites_that_its_preset_had_when_it_began() {
        let mut config = TrainConfig::default();
        let model = serde_json::from_str(include_str!("../presets/hybrid.json")).unwrap();
        let model = Config::parse(&model, Path::new("hybrid.json")).unwrap();
        for preset in ["bf16", "megatron", "nemo", "maxtext-default", "hf-bf16", "f32"] {
            config.precision.preset = preset.into();
            let precision = Precision::preset(preset, &model).unwrap();
            for site in LATER_SITES {
                let read = |config: &str| {
                    let table = config_of_version(VERSION, config).unwrap();
                    let site = table["precision"]["sites"].get(site.name()).and_then(toml::Value::as_str);
                    site.unwrap_or("f32").to_string()
                };
                let lowered = precision.site(site) == Rounding::Bf16;
                let saved = saved_config(&config, &precision).unwrap();
                assert_eq!(read(&saved), if lowered { "bf16" } else { "f32" }, "{preset} {site:?}");
                assert_eq!(read(&config.to_toml().unwrap()), "f32", "{preset} {site:?}: an earlier program");
            }
        }
        assert_eq!(config_of_version(1, "steps = 3").unwrap()["steps"].as_integer(), Some(3));
    }

    #[test]
    fn a_bf16_run_of_format_version_1_keeps_its_residual_stream_in_bf16() {
        let residual = |version: u32, config: &str| {
            let table = config_of_version(version, config).unwrap();
            let sites = table["precision"].get("sites").and_then(|sites| sites.get("residual"));
            sites.and_then(toml::Value::as_str).map(String::from)
        };
        let bf16 = "[precision]\npreset = \"bf16\"";
        assert_eq!(residual(1, bf16).as_deref(), Some("bf16"));
        assert_eq!(residual(2, bf16), None);
        assert_eq!(residual(1, "[precision]\npreset = \"f32\""), None);
        let raised = format!("{bf16}\n[precision.sites]\nresidual = \"f32\"");
        assert_eq!(residual(1, &raised).as_deref(), Some("f32"), "a site that was set stays");
    }

    #[test]
    fn a_file_that_cannot_be_replaced_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        replace_file(&path, b"old").unwrap();
        fs::create_dir(folder.path().join(".a.new")).unwrap();
        assert!(replace_file(&path, b"new").is_err());
        assert_eq!(fs::read(&path).unwrap(), b"old");
        fs::remove_dir(folder.path().join(".a.new")).unwrap();
        replace_file(&path, b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
    }
}
