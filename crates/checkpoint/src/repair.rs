//! Restores the f32 bits of protected tensors from the checkpoint they were rounded from.
//!
//! A protected tensor that equals the bf16 rounding of the original's, value for value, was only rounded and
//! is restored. A tensor that differs in any other way was trained since and is kept.
//!
//! The optimizer's fp32 master weights of the original may have bits that its model has lost (`masters.rs`); the
//! report says which bits come from there.

use std::path::Path;
use std::sync::Arc;

use ballast_contract::rounded::{Fit, Narrow};
use ballast_contract::{Dtype, Policy};
use ballast_files::Result;
use ballast_files::jobs::Observer;
use ballast_files::staging::Staging;
use ballast_hub::RemoteSummary;
use serde::Serialize;

use crate::convert::copy_sidecars;
use crate::layout::{Layout, stored_views};
use crate::masters;
use crate::open::Checkpoint;
use crate::released::{Views, original_views, plain_name, read_f32, same_shape};
use crate::transfer::{Prepare, write_verified};
use crate::verify::{self, Verification};
use crate::view::View;
use crate::write::{DEFAULT_SHARD_BYTES, Output, WritePlan};

/// The outcome for a protected tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// Was rounded; has the original's bits again.
    Restored,
    /// Was rounded, as in the original; has the bits of the original's fp32 master weights.
    RestoredFromMaster,
    /// Already has the original's values.
    Intact,
    /// Was trained since; kept.
    Trained,
    /// Missing in the original, or not F32 there and without an fp32 master that has more bits.
    NoOriginal,
}

/// One protected tensor.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct RepairedTensor {
    /// Name in the checkpoint.
    pub tensor: String,
    /// dtype before the repair.
    pub was: Dtype,
    /// Outcome.
    pub outcome: Outcome,
    /// Number of values that are not the rounding of the original's.
    pub trained_values: u64,
    /// Number of values.
    pub elements: u64,
}

/// The result of a repair.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct RepairReport {
    /// Protected tensors.
    pub tensors: Vec<RepairedTensor>,
    /// Warnings: bits that do not come from the original's model.
    pub warnings: Vec<String>,
    /// Comparison of the destination with the planned content.
    pub verification: Verification,
    /// Bytes and requests that the original's server was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remote: Option<RemoteSummary>,
}

/// Repairs the protected tensors of `checkpoint` and writes the result to `destination`; without one, nothing
/// is written.
pub fn repair(
    checkpoint: &Arc<Checkpoint>,
    original: &Arc<Checkpoint>,
    destination: Option<&Path>,
    policy: &Policy,
    force: bool,
    observer: &dyn Observer,
) -> Result<RepairReport> {
    let layout = Layout::detect(checkpoint);
    let originals = original_views(original, &layout)?;
    let masters = master_views(original, &layout, policy)?;
    original.prefetch(original.tensors.iter().filter(|t| policy.rule_for(&t.name).is_some()))?;
    let mut tensors = Vec::new();
    let mut ranks = Vec::new();
    for (rank, views) in stored_views(checkpoint).into_iter().enumerate() {
        let mut outputs = Vec::new();
        for view in views {
            let protected = policy.rule_for(&view.name).is_some() && view.dtype.widens_exactly_to(Dtype::F32);
            if !protected {
                outputs.push(Output { dtype: view.dtype, view });
                continue;
            }
            let place = (rank, plain_name(&view.name));
            let (found, master) = (originals.get(&place), masters.get(&place));
            let (outcome, trained_values) =
                judge_with_master(&view, found, master).map_err(|e| e.of(&checkpoint.root))?;
            let (tensor, was, elements) = (view.name.clone(), view.dtype, view.elements());
            tensors.push(RepairedTensor { tensor, was, outcome, trained_values, elements });
            let source = match outcome {
                Outcome::Restored => found,
                Outcome::RestoredFromMaster => master,
                _ => None,
            };
            let source = source.map_or(view.clone(), |source| source.clone().renamed(view.name));
            outputs.push(Output { view: source, dtype: Dtype::F32 });
        }
        ranks.push(outputs);
    }
    let verification = match destination {
        Some(destination) => write(checkpoint, original, destination, ranks, force, observer)?,
        None => Verification::default(),
    };
    let remote = original.remote.as_ref().map(|remote| remote.summary());
    let warnings = master_warning(&tensors, original).into_iter().collect();
    Ok(RepairReport { tensors, warnings, verification, remote })
}

/// Returns the masters of the original's protected tensors in the layout of the checkpoint.
fn master_views(original: &Checkpoint, layout: &Layout, policy: &Policy) -> Result<Views> {
    let Some((replaced, names)) = masters::in_place(original, policy) else {
        return Ok(Views::new());
    };
    let mut views = original_views(&replaced, layout)?;
    views.retain(|_, view| view.sources().iter().all(|t| names.contains(&t.name)));
    Ok(views)
}

/// Returns a warning if bits come from master weights.
fn master_warning(tensors: &[RepairedTensor], original: &Checkpoint) -> Option<String> {
    let count = tensors.iter().filter(|t| t.outcome == Outcome::RestoredFromMaster).count();
    (count > 0).then(|| {
        format!(
            "the f32 bits of {count} tensors come from the optimizer's fp32 master weights in {}, not from its model, \
             which has lost them",
            original.root.display()
        )
    })
}

/// Judges a tensor by the original's, or by its master where the original's was rounded.
fn judge_with_master(view: &View, original: Option<&View>, master: Option<&View>) -> Result<(Outcome, u64)> {
    let by_model = judge(view, original)?;
    let Some(master) = master else { return Ok(by_model) };
    if original.map_or(Ok(false), has_f32_bits)? || !has_f32_bits(master)? {
        return Ok(by_model);
    }
    let by_master = judge(view, Some(master))?;
    Ok(match (by_model.0, by_master.0) {
        (_, Outcome::Restored) => (Outcome::RestoredFromMaster, 0),
        (Outcome::NoOriginal, _) => by_master,
        _ => by_model,
    })
}

/// Returns true if a tensor has values that no type of fewer bits represents, before a shift.
fn has_f32_bits(view: &View) -> Result<bool> {
    let stored = read_f32(&view.clone().shifted(-view.shift))?;
    Ok(Fit::of(bytemuck::cast_slice(&stored)).narrowest().is_none())
}

fn judge(view: &View, original: Option<&View>) -> Result<(Outcome, u64)> {
    let Some(original) = original.filter(|o| o.dtype == Dtype::F32) else {
        return Ok((Outcome::NoOriginal, 0));
    };
    same_shape(&view.name, &view.shape, original)?;
    let (have, truth) = (read_f32(view)?, read_f32(original)?);
    if have == truth && view.dtype == Dtype::F32 {
        return Ok((Outcome::Intact, 0));
    }
    // A shifted gamma may have been rounded before the shift.
    let shift = original.shift as f32;
    let unshifted = read_f32(&original.clone().shifted(-original.shift))?;
    let differing = |expected: &dyn Fn(usize) -> u32| {
        have.iter().enumerate().filter(|(i, bits)| **bits != expected(*i)).count() as u64
    };
    let trained = Narrow::ALL.map(|narrow| {
        let rounded = |bits: u32| narrow.round(f32::from_bits(bits));
        let here = differing(&|i| rounded(truth[i]).to_bits());
        here.min(differing(&|i| (rounded(unshifted[i]) + shift).to_bits()))
    });
    let trained = trained.into_iter().min().unwrap_or_default();
    Ok((if trained == 0 { Outcome::Restored } else { Outcome::Trained }, trained))
}

fn write(
    checkpoint: &Arc<Checkpoint>,
    original: &Arc<Checkpoint>,
    destination: &Path,
    ranks: Vec<Vec<Output>>,
    force: bool,
    observer: &dyn Observer,
) -> Result<Verification> {
    let single_file = destination.extension().is_some_and(|e| e == "safetensors");
    let staging =
        Staging::new(destination, single_file, force, &[checkpoint.paths(), original.paths()].concat())?;
    let planned: Vec<Vec<View>> = ranks.iter().map(|o| o.iter().map(|o| o.view.clone()).collect()).collect();
    let file_name = staging.file_name();
    let files = WritePlan::new(
        staging.folder(),
        file_name,
        ranks,
        checkpoint.expert_ranks,
        &checkpoint.metadata,
        DEFAULT_SHARD_BYTES,
    )?;
    staging.check_space(files.file_bytes() + checkpoint.sidecar_bytes()?)?;
    if !single_file {
        copy_sidecars(checkpoint, staging.folder(), None)?;
    }
    let pairs = || verify::pairs_with_planned(planned.clone(), &staging.staged());
    let verification = write_verified(&files, Prepare::Early, pairs, observer)?;
    for file in checkpoint.files.iter().chain(&original.files) {
        file.check_unchanged()?;
    }
    staging.commit(observer)?;
    Ok(verification)
}
