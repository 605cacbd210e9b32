//! The protected-tensor check: only the optimizer changes protected tensors, and forward reads them in f32.
//!
//! The ledger holds a checksum of every protected tensor, updated after each optimizer step. A check compares
//! it with the tensor in memory, with the tensor that a forward reads (seen by a probe where the layers take
//! it), and, after a save, with bits and type in the file. A tensor that the precision's policy leaves out is
//! listed as rounded.

use std::collections::BTreeMap;
use std::path::Path;

use ballast_checkpoint::Checkpoint;
use ballast_checkpoint::tensor_file::TensorFile;
use ballast_cluster::Kind;
use ballast_contract::Dtype;
use ballast_model::params::{Protected, Spec};
use ballast_model::{Batch, Model, Precision, Probe};
use serde::{Deserialize, Serialize};

use crate::checksum::checksum;
use crate::cluster::Ranks;
use crate::error::{Error, Result};
use crate::optimizer::is_rounded;

/// Checksums and check counts of all protected tensors of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Ledger {
    /// One entry per protected tensor, in the model's order.
    pub entries: Vec<Entry>,
    /// Number of steps that passed the check.
    pub clean_steps: u64,
    /// Number of steps.
    pub steps: u64,
    /// Sites that were escalated to f32: step and site.
    pub escalations: Vec<(u64, String)>,
    /// Number of checks by occasion: build, cast, step, save, load, end.
    pub occasions: BTreeMap<String, u64>,
}

/// One protected tensor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// Name, as in the checkpoint.
    pub name: String,
    /// `f32`, or `bf16 by policy` for one that the policy leaves out.
    pub dtype: String,
    /// Checksum when the run began.
    pub first: u64,
    /// Checksum after the last update.
    pub last: u64,
    /// Number of passed checks.
    pub checks: u64,
    /// Number of checks in which a forward read exactly these bits in f32.
    pub live: u64,
    /// Number of checks that read bits and type back from a file.
    pub saved: u64,
    /// Fraction of values that bf16 cannot represent.
    pub beyond_bf16: f64,
}

fn beyond_bf16(values: &[f32]) -> f64 {
    values.iter().filter(|x| x.to_bits() & 0xffff != 0).count() as f64 / values.len().max(1) as f64
}

impl Ledger {
    /// The ledger of a model with its present values, which will run in `precision`.
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

    /// Records a cast: tensors that the policy leaves out are rounded; no other may change.
    pub(crate) fn cast(&mut self, model: &Model) {
        for ((entry, spec), tensor) in
            self.entries.iter_mut().zip(&model.specs.protected).zip(model.params.protected())
        {
            entry.dtype = dtype_of(model.precision(), spec).into();
            if entry.dtype != "f32" {
                (entry.first, entry.last) = (checksum(tensor.values()), checksum(tensor.values()));
            }
        }
    }

    /// Number of tensors in f32.
    pub fn f32_tensors(&self) -> usize {
        self.entries.iter().filter(|entry| entry.dtype == "f32").count()
    }

    /// Returns a one-line summary: `54 protected tensors: f32 for 300/300 steps`.
    pub fn summary(&self) -> String {
        let (all, f32s) = (self.entries.len(), self.f32_tensors());
        let steps = format!("for {}/{} steps", self.clean_steps, self.steps);
        match all - f32s {
            0 => format!("{all} protected tensors: f32 {steps}"),
            rounded => format!(
                "{all} protected tensors: {f32s} f32 {steps}, {rounded} rounded to bf16 by the precision policy"
            ),
        }
    }

    /// Compares the tensors in memory with their checksums.
    pub fn check(&mut self, model: &Model, occasion: &str) -> Result {
        for (entry, tensor) in self.entries.iter_mut().zip(model.params.protected()) {
            let now = checksum(tensor.values());
            if now != entry.last {
                return Err(broken(
                    entry,
                    occasion,
                    format!(
                        "changed outside the optimizer: checksum {now:016x}, expected {:016x}",
                        entry.last
                    ),
                ));
            }
            entry.checks += 1;
            entry.beyond_bf16 = beyond_bf16(tensor.values());
        }
        self.clean_steps = self.steps;
        *self.occasions.entry(occasion.into()).or_default() += 1;
        Ok(())
    }

    /// Runs a forward over two tokens, which shows what it reads to a probe, and compares it with the checksums.
    pub(crate) fn check_live(
        &mut self,
        protected: &[Spec],
        occasion: &str,
        forward: &mut dyn FnMut(&Batch, &mut dyn Probe) -> Result,
    ) -> Result {
        /// Type and checksum of the protected tensors that were read.
        struct Reader<'a>(BTreeMap<&'a str, Option<(&'static str, u64)>>);
        impl Probe for Reader<'_> {
            fn wants(&self, site: &str) -> bool {
                site.strip_prefix("param.").is_some_and(|name| self.0.contains_key(name))
            }
            fn see(&mut self, site: &str, dtype: &'static str, _: &[usize], values: &[f32]) {
                if let Some(read) = self.0.get_mut(site.trim_start_matches("param.")) {
                    *read = Some((dtype, checksum(values)));
                }
            }
        }
        let mut reader = Reader(protected.iter().map(|spec| (spec.name.as_str(), None)).collect());
        forward(&Batch::packed(vec![0, 0], vec![0, 2])?, &mut reader)?;
        for (entry, spec) in self.entries.iter_mut().zip(protected) {
            match reader.0[spec.name.as_str()] {
                Some(("F32", sum)) if sum == entry.last => entry.live += 1,
                Some((dtype, sum)) => {
                    let problem = format!(
                        "forward read {dtype} with checksum {sum:016x}, expected F32 with {:016x}",
                        entry.last
                    );
                    return Err(broken(entry, occasion, problem));
                }
                None => return Err(broken(entry, occasion, "forward did not read it".into())),
            }
        }
        Ok(())
    }

    /// Compares the checksums of all ranks, and names the rank that differs.
    pub(crate) fn check_ranks(&self, ranks: &Ranks) -> Result {
        if ranks.is_solo() {
            return Ok(());
        }
        let own: Vec<u64> = self.entries.iter().map(|entry| entry.last).collect();
        let digest = xxhash_rust::xxh3::xxh3_64(bytemuck::cast_slice(&own));
        let bytes = digest.to_le_bytes().to_vec();
        let all = ranks.world.all_gather(Kind::Scalars, bytes, &vec![8; ranks.size()])?;
        if all.iter().all(|other| *other == all[0]) {
            return Ok(());
        }
        let all = ranks.exchange(Kind::Scalars, &own)?;
        let mut problem = String::from("the ranks have different checksums");
        for (at, entry) in self.entries.iter().enumerate() {
            let sums: Vec<u64> = all.iter().map(|sums| sums[at]).collect();
            let votes = |sum: u64| sums.iter().filter(|other| **other == sum).count();
            // The value of most ranks counts; of two equal halves, that of the first rank.
            let Some(usual) = sums.iter().copied().rev().max_by_key(|sum| votes(*sum)) else { continue };
            if let Some(rank) = sums.iter().position(|sum| *sum != usual) {
                problem = format!(
                    "{} has the checksum {:016x} on rank {rank}, but {usual:016x} on {} of {} ranks",
                    entry.name,
                    sums[rank],
                    votes(usual),
                    ranks.size()
                );
                break;
            }
        }
        Err(Error::Diverged(format!("protected-tensor check failed after an update: {problem}")))
    }

    /// Compares the tensors of a saved model with their checksums.
    pub(crate) fn check_saved(&mut self, model: &Path) -> Result {
        let checkpoint = Checkpoint::open_consistent(model)?;
        for entry in &mut self.entries {
            let Some(stored) = checkpoint.tensors.iter().find(|tensor| tensor.name == entry.name) else {
                return Err(broken(entry, "save", "missing in the saved file".into()));
            };
            if stored.dtype != Dtype::F32 && entry.dtype == "f32" {
                return Err(broken(
                    entry,
                    "save",
                    format!("stored as {} in the saved file, expected F32", stored.dtype),
                ));
            }
            let file = TensorFile::open(&checkpoint.files[stored.file].path)?;
            if checksum(&file.f32(&entry.name)?.values) != entry.last {
                return Err(broken(entry, "save", "the saved file has other bits".into()));
            }
            entry.saved += 1;
        }
        *self.occasions.entry("save".into()).or_default() += 1;
        Ok(())
    }

    /// Replaces checksums that were made with another hash: the first ones by those of `begun`, the ledger of
    /// the run when it was built, the last ones by those of the model.
    pub(crate) fn replace_checksums(&mut self, begun: &Ledger, model: &Model) {
        let tensors = begun.entries.iter().zip(model.params.protected());
        for (entry, (begun, tensor)) in self.entries.iter_mut().zip(tensors) {
            (entry.first, entry.last) = (begun.first, checksum(tensor.values()));
        }
    }

    /// Records the tensors after an update.
    pub(crate) fn note(&mut self, model: &Model) {
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
    Error::Diverged(format!("protected-tensor check failed after {occasion}: {}: {problem}", entry.name))
}
