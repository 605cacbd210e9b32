//! The ledger of protected tensors: what they are, that nobody but the optimiser changed them, and that forward reads them.
//!
//! A checksum of every protected tensor's bits is noted after each update. A check compares it with the bits as they are
//! now, with the bits that a forward reads (its probe shows them where the layers take them), and, after a save, with the
//! bits and the type in the file. A tensor that the precision's policy leaves out is entered as rounded: the run asked
//! for that.

use std::collections::BTreeMap;
use std::path::Path;

use ballast_checkpoint::Checkpoint;
use ballast_checkpoint::tensor_file::TensorFile;
use ballast_contract::Dtype;
use ballast_model::params::{Protected, Spec};
use ballast_model::{Batch, Model, Precision, Probe};
use serde::{Deserialize, Serialize};

use crate::checksum::checksum;
use crate::error::{Error, Result};
use crate::optimizer::is_rounded;

/// The ledger of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Ledger {
    /// By tensor, in the order of the model.
    pub entries: Vec<Entry>,
    /// Steps since the beginning whose tensors were the noted ones.
    pub clean_steps: u64,
    /// Steps since the beginning.
    pub steps: u64,
    /// Sites that were raised to f32 by the sentinel: step and site.
    pub escalations: Vec<(u64, String)>,
    /// What happened, when: built, cast, step, saved, loaded.
    pub occasions: BTreeMap<String, u64>,
}

/// One protected tensor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// As in the checkpoint.
    pub name: String,
    /// `f32`, or `bf16 by policy` for one that the policy leaves out.
    pub dtype: String,
    /// Of the bits, when the run began.
    pub first: u64,
    /// Of the bits, after the last update.
    pub last: u64,
    /// Checks that were passed.
    pub checks: u64,
    /// Those of them in which a forward read exactly these bits, in f32.
    pub live: u64,
    /// Those of them that read the bits and the type back from a file.
    pub saved: u64,
    /// Share of the values that bf16 could not hold.
    pub beyond_bf16: f64,
}

fn beyond_bf16(values: &[f32]) -> f64 {
    values.iter().filter(|x| x.to_bits() & 0xffff != 0).count() as f64 / values.len().max(1) as f64
}

impl Ledger {
    /// The ledger of a model as it is now, which is to run in `precision`.
    pub fn new(model: &Model, precision: &Precision) -> Ledger {
        let entry = |(spec, tensor): (&Spec, &Protected)| {
            let sum = checksum(tensor.values());
            Entry {
                name: model.parameter_name(spec),
                dtype: dtype_of(precision, spec).into(),
                first: sum,
                last: sum,
                checks: 0,
                live: 0,
                saved: 0,
                beyond_bf16: beyond_bf16(tensor.values()),
            }
        };
        let entries = model.specs.protected.iter().zip(model.params.protected()).map(entry).collect();
        Ledger { entries, ..Ledger::default() }
    }

    /// Notes a cast: tensors that the policy leaves out are rounded, and no other may change.
    pub fn cast(&mut self, model: &Model) {
        for ((entry, spec), tensor) in
            self.entries.iter_mut().zip(&model.specs.protected).zip(model.params.protected())
        {
            entry.dtype = dtype_of(model.precision(), spec).into();
            if entry.dtype != "f32" {
                (entry.first, entry.last) = (checksum(tensor.values()), checksum(tensor.values()));
            }
        }
    }

    /// Tensors that are f32.
    pub fn f32_tensors(&self) -> usize {
        self.entries.iter().filter(|entry| entry.dtype == "f32").count()
    }

    /// `54 protected tensors: f32 for 300/300 steps`.
    pub fn summary(&self) -> String {
        let (all, f32s) = (self.entries.len(), self.f32_tensors());
        let steps = format!("for {}/{} steps", self.clean_steps, self.steps);
        match all - f32s {
            0 => format!("{all} protected tensors: f32 {steps}"),
            rounded => format!(
                "{all} protected tensors: {f32s} f32 {steps}, {rounded} bf16 because the policy asks for it"
            ),
        }
    }

    /// Compares the tensors as they are now with what was noted.
    pub fn check(&mut self, model: &Model, occasion: &str) -> Result {
        for (entry, tensor) in self.entries.iter_mut().zip(model.params.protected()) {
            let now = checksum(tensor.values());
            if now != entry.last {
                return Err(broken(
                    entry,
                    occasion,
                    format!("its bits are {now:016x}, noted were {:016x}", entry.last),
                ));
            }
            entry.checks += 1;
            entry.beyond_bf16 = beyond_bf16(tensor.values());
        }
        self.clean_steps = self.steps;
        *self.occasions.entry(occasion.into()).or_default() += 1;
        Ok(())
    }

    /// Runs a forward over one token and compares what the layers read.
    pub fn check_live(&mut self, model: &Model, occasion: &str) -> Result {
        struct Reader(BTreeMap<String, (&'static str, u64)>);
        impl Probe for Reader {
            fn wants(&self, site: &str) -> bool {
                site.starts_with("param.")
            }
            fn see(&mut self, site: &str, dtype: &'static str, _: &[usize], values: &[f32]) {
                self.0.insert(site.trim_start_matches("param.").into(), (dtype, checksum(values)));
            }
        }
        let mut reader = Reader(BTreeMap::new());
        model.logits(&Batch::packed(vec![0, 0], vec![0, 2])?, Some(&mut reader))?;
        for (entry, spec) in self.entries.iter_mut().zip(&model.specs.protected) {
            match reader.0.get(&spec.name) {
                Some(("F32", sum)) if *sum == entry.last => entry.live += 1,
                Some((dtype, sum)) => {
                    let problem = format!(
                        "forward read {dtype} with the bits {sum:016x}, noted were F32 {:016x}",
                        entry.last
                    );
                    return Err(broken(entry, occasion, problem));
                }
                None => return Err(broken(entry, occasion, "forward did not read it".into())),
            }
        }
        Ok(())
    }

    /// Compares with what a saved model holds.
    pub fn check_saved(&mut self, model: &Path) -> Result {
        let checkpoint = Checkpoint::open_consistent(model)?;
        for entry in &mut self.entries {
            let Some(stored) = checkpoint.tensors.iter().find(|tensor| tensor.name == entry.name) else {
                return Err(broken(entry, "save", "the file does not have it".into()));
            };
            if stored.dtype != Dtype::F32 && entry.dtype == "f32" {
                return Err(broken(entry, "save", format!("the file stores it in {}", stored.dtype)));
            }
            let file = TensorFile::open(&checkpoint.files[stored.file].path)?;
            if checksum(&file.f32(&entry.name)?.values) != entry.last {
                return Err(broken(entry, "save", "the file has other bits".into()));
            }
            entry.saved += 1;
        }
        *self.occasions.entry("save".into()).or_default() += 1;
        Ok(())
    }

    /// Replaces checksums that were made with another hash: the first ones by those of `begun`, the ledger of the run when
    /// it was built, the last ones by those of the model.
    pub(crate) fn replace_checksums(&mut self, begun: &Ledger, model: &Model) {
        let tensors = begun.entries.iter().zip(model.params.protected());
        for (entry, (begun, tensor)) in self.entries.iter_mut().zip(tensors) {
            (entry.first, entry.last) = (begun.first, checksum(tensor.values()));
        }
    }

    /// Notes the tensors after an update.
    pub fn note(&mut self, model: &Model) {
        for (entry, tensor) in self.entries.iter_mut().zip(model.params.protected()) {
            entry.last = checksum(tensor.values());
        }
        self.steps += 1;
    }
}

fn dtype_of(precision: &Precision, spec: &Spec) -> &'static str {
    if is_rounded(precision, spec) { "bf16 by policy" } else { "f32" }
}

fn broken(entry: &Entry, occasion: &str, problem: String) -> Error {
    Error::Diverged(format!("the ledger does not hold at {occasion}: {}: {problem}", entry.name))
}
