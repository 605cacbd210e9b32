//! Training checkpoints: everything that the next step depends on, whole or not there at all.
//!
//! ```text
//! OUT/checkpoints/step-00000100/model/                  Hugging Face's form: config.json, weights by contract, tokenizer
//!                               adapter/                in its place where adapters are trained: PEFT's form
//!                               optimizer.safetensors   masters and moments
//!                               state.json              step, cursor, ledger, sentinel, configuration, checksums
//! ```
//! A checkpoint is written into a hidden sibling folder, flushed, and renamed. One that is superseded is renamed away before it
//! is removed. So every folder called `step-*` is complete, whenever the process dies.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use ballast_checkpoint::jobs::Observer;
use ballast_checkpoint::staging::Staging;
use ballast_checkpoint::tensor_file::{Named, TensorFile, write_f32};
use ballast_model::Model;
use ballast_model::params::Weight;
use serde::{Deserialize, Serialize};

use crate::config::CheckpointsConfig;
use crate::data::Cursor;
use crate::error::{Error, Result};
use crate::ledger::{Ledger, checksum};
use crate::optimizer::Optimizer;
use crate::sentinel::Sentinel;

/// The format that this version writes.
const VERSION: u32 = 1;

/// What is not a tensor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Of the format.
    pub version: u32,
    /// Steps that were taken.
    pub step: u64,
    /// Updates of the optimiser; batches that were left out make none.
    pub updates: u32,
    /// Where the training data is.
    pub cursor: Cursor,
    /// Of the protected tensors.
    pub ledger: Ledger,
    /// Running statistics.
    pub sentinel: Sentinel,
    /// Step and loss of the best measurement on held-out data so far.
    pub best: Option<(u64, f64)>,
    /// Where batches begin that a rollback leaves out.
    #[serde(default)]
    pub left_out: Vec<Cursor>,
    /// The resolved configuration, as TOML.
    pub config: String,
    /// Of all that is learned: names and shapes.
    pub parameters: String,
    /// Of the weights' bits, protected ones included.
    pub weights_checksum: String,
    /// Of the optimiser's bits.
    pub optimizer_checksum: String,
}

impl State {
    /// For this model and optimiser; the rest is filled in by the caller.
    pub fn new(model: &Model, optimizer: &Optimizer) -> State {
        State {
            version: VERSION,
            step: 0,
            updates: optimizer.updates,
            cursor: Cursor::default(),
            ledger: Ledger::default(),
            sentinel: Sentinel::default(),
            best: None,
            left_out: Vec::new(),
            config: String::new(),
            parameters: fingerprint(optimizer),
            weights_checksum: weights_checksum(model),
            optimizer_checksum: optimizer_checksum(optimizer),
        }
    }
}

fn fingerprint(optimizer: &Optimizer) -> String {
    let words = optimizer.slots.iter().flat_map(|slot| {
        let name = slot.name.bytes().map(|b| b as f32);
        name.chain(slot.shape.iter().map(|d| *d as f32)).collect::<Vec<f32>>()
    });
    format!("{:016x}", checksum(&words.collect::<Vec<f32>>()))
}

/// Of all bits, in order.
pub fn weights_checksum(model: &Model) -> String {
    let mut sums = Vec::new();
    for weight in model.params.weights() {
        sums.push(match weight {
            Weight::F32(values) => checksum(values),
            Weight::Bf16(values) => values.iter().fold(0xcbf2_9ce4_8422_2325, |hash: u64, x| {
                (hash ^ x.to_bits() as u64).wrapping_mul(0x100_0000_01b3)
            }),
        });
    }
    sums.extend(
        model.params.adapters().iter().flatten().flat_map(|low| [checksum(&low.a), checksum(&low.b)]),
    );
    sums.extend(model.params.protected().iter().map(|tensor| checksum(tensor.values())));
    combined(&sums)
}

fn optimizer_checksum(optimizer: &Optimizer) -> String {
    let sums: Vec<u64> = optimizer.tensors().map(|(_, _, values)| checksum(values)).collect();
    combined(&sums)
}

fn combined(sums: &[u64]) -> String {
    let sum = sums.iter().fold(0u64, |all, sum| all.rotate_left(5).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ sum);
    format!("{sum:016x}")
}

/// The folder of a run: its checkpoints, and a lock that keeps a second run out.
pub struct Store {
    folder: PathBuf,
    _lock: File,
}

impl Store {
    /// Opens or makes the folder of a run.
    pub fn open(out: &Path) -> Result<Store> {
        let folder = out.join("checkpoints");
        fs::create_dir_all(&folder).map_err(Error::io(&folder, "create"))?;
        let path = out.join(".lock");
        let lock = File::create(&path).map_err(Error::io(&path, "create"))?;
        if lock.try_lock().is_err() {
            let problem =
                format!("{}: another run is writing there; wait for it, or set another `out`", out.display());
            return Err(Error::Config(problem));
        }
        let store = Store { folder, _lock: lock };
        store.remove_leftovers();
        Ok(store)
    }

    /// Steps that have a checkpoint, ascending.
    pub fn steps(&self) -> Vec<u64> {
        let Ok(entries) = fs::read_dir(&self.folder) else { return Vec::new() };
        let step = |name: String| name.strip_prefix("step-")?.parse().ok();
        let mut steps: Vec<u64> = entries
            .flatten()
            .filter_map(|entry| step(entry.file_name().to_string_lossy().into_owned()))
            .collect();
        steps.sort_unstable();
        steps
    }

    /// The folder of a step's checkpoint.
    pub fn path(&self, step: u64) -> PathBuf {
        self.folder.join(format!("step-{step:08}"))
    }

    /// Writes a checkpoint; `files` go beside the weights. The old ones stay as they are, whatever happens.
    pub fn save(
        &self,
        state: &mut State,
        model: &Model,
        optimizer: &Optimizer,
        files: &[(String, Vec<u8>)],
        observer: &dyn Observer,
    ) -> Result<PathBuf> {
        let target = self.path(state.step);
        if target.exists() {
            self.remove(state.step)?;
        }
        let staging = Staging::new(&target, false, false, &[])?;
        let folder = staging.folder();
        if model.params.adapters().is_empty() {
            let weights = folder.join("model");
            model.save(&weights, false, observer)?;
            for (name, bytes) in files {
                write_file(&weights.join(name), bytes)?;
            }
            state.ledger.check_saved(&weights)?;
        } else {
            model.write_adapters(&folder.join("adapter"), false)?;
        }
        let names: Vec<String> = optimizer.tensors().map(|(name, _, _)| name).collect();
        let tensors: Vec<Named<'_>> = optimizer
            .tensors()
            .zip(&names)
            .map(|((_, shape, values), name)| (name.as_str(), shape, values))
            .collect();
        write_f32(&folder.join("optimizer.safetensors"), &tensors, &[], false)?;
        let json = serde_json::to_vec_pretty(state).map_err(|error| Error::Config(error.to_string()))?;
        write_file(&folder.join("state.json"), &json)?;
        staging.commit()?;
        Ok(target)
    }

    /// Removes those that the configuration does not keep.
    pub fn prune(&self, config: &CheckpointsConfig, best: Option<u64>) -> Result {
        let steps = self.steps();
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

    /// Removes the checkpoints of later steps: a run that goes back takes other ones.
    pub fn remove_after(&self, step: u64) -> Result {
        self.steps().into_iter().filter(|other| *other > step).try_for_each(|other| self.remove(other))
    }

    fn remove(&self, step: u64) -> Result {
        let path = self.path(step);
        let away = self.folder.join(format!(".removed-{step}"));
        let _ = fs::remove_dir_all(&away);
        fs::rename(&path, &away).map_err(Error::io(&path, "rename"))?;
        fs::remove_dir_all(&away).map_err(Error::io(&away, "remove"))
    }

    /// What runs that died have left; nobody else writes here.
    fn remove_leftovers(&self) {
        let Ok(entries) = fs::read_dir(&self.folder) else { return };
        for entry in entries.flatten() {
            if entry.file_name().to_string_lossy().starts_with('.') {
                let _ = fs::remove_dir_all(entry.path());
            }
        }
    }
}

fn write_file(path: &Path, bytes: &[u8]) -> Result {
    let mut file = File::create(path).map_err(Error::io(path, "create"))?;
    file.write_all(bytes).map_err(Error::io(path, "write"))?;
    file.sync_all().map_err(Error::io(path, "flush"))
}

/// The state of a checkpoint.
pub fn read_state(checkpoint: &Path) -> Result<State> {
    let path = checkpoint.join("state.json");
    let text = fs::read_to_string(&path).map_err(Error::io(&path, "read"))?;
    let refuse = |problem: String| Error::Resume { path: path.clone(), problem };
    let state: State =
        serde_json::from_str(&text).map_err(|error| refuse(format!("not the state of a run: {error}")))?;
    if state.version != VERSION {
        return Err(refuse(format!("its version is {}, this program reads {VERSION}", state.version)));
    }
    Ok(state)
}

/// Puts weights, masters and moments back, and refuses what is not exactly what was saved.
pub fn restore(checkpoint: &Path, state: &State, model: &mut Model, optimizer: &mut Optimizer) -> Result {
    let refuse = |path: PathBuf, problem: &str| Err(Error::Resume { path, problem: problem.into() });
    if state.parameters != fingerprint(optimizer) {
        let problem = "it belongs to another model, or to other parameters that are learned; resume with the configuration \
                       that it was made with";
        return refuse(checkpoint.join("state.json"), problem);
    }
    if model.params.adapters().is_empty() {
        model.reload(&checkpoint.join("model"))?;
    } else {
        model.drop_adapters();
        model.read_adapters(&checkpoint.join("adapter"))?;
    }
    if state.weights_checksum != weights_checksum(model) {
        return refuse(
            checkpoint.join("model"),
            "the weights are not those that were saved; go back to an earlier checkpoint",
        );
    }
    let path = checkpoint.join("optimizer.safetensors");
    let file = TensorFile::open(&path)?;
    for (name, shape, values) in optimizer.tensors_mut() {
        let stored = file.f32(&name)?;
        if stored.shape != shape {
            return Err(file
                .error(&name, format!("it is {:?} where {shape:?} is expected", stored.shape))
                .into());
        }
        values.copy_from_slice(&stored.values);
    }
    optimizer.updates = state.updates;
    // The likely causes first: they say where.
    optimizer.check().map_err(|error| Error::Resume { path: path.clone(), problem: error.to_string() })?;
    if state.optimizer_checksum != optimizer_checksum(optimizer) {
        return refuse(path, "the optimiser's state is not what was saved; go back to an earlier checkpoint");
    }
    Ok(())
}
