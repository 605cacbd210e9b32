//! The optimizer's fp32 master weights beside a model, matched by name.
//!
//! Megatron's `torch_dist` stores the master of tensor NAME as `optimizer.state.fp32_param.NAME`, with
//! `chained_N.` in front if several optimizers are chained. Its legacy format stores masters as lists without
//! names; they are not matched.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use ballast_contract::rounded::{Fit, Narrow};
use ballast_contract::{Dtype, Policy};
use ballast_files::Result;
use ballast_files::jobs::{self, CHUNK_BYTES, Observer};

use crate::open::{Checkpoint, StoredTensor};

/// A tensor's values compared with those of its master.
#[derive(Clone, Copy, Default)]
pub(crate) struct Comparison {
    /// Number of values that are neither the master's nor its rounding to a type of fewer bits.
    pub(crate) differing: u64,
    /// Types of fewer bits that represent the tensor's values, and the master's.
    values: Fit,
    masters: Fit,
}

impl Comparison {
    /// Returns true if a type of fewer bits represents the tensor's values, but not the master's.
    pub(crate) fn lost_bits(&self) -> bool {
        self.values.narrowest().is_some_and(|narrow| self.masters.beyond(narrow) > 0)
    }
}

/// Returns the name of the tensor whose master `name` is.
fn master_of(name: &str) -> Option<&str> {
    let chained = name.strip_prefix("chained_").and_then(|rest| rest.split_once('.'));
    let own = match chained {
        Some((number, rest)) if number.bytes().all(|b| b.is_ascii_digit()) => rest,
        _ => name,
    };
    own.strip_prefix("optimizer.state.fp32_param.")
}

/// Returns the masters of those tensors that `is_wanted`: numbers of tensors with their masters' places.
///
/// A master has the shape of its tensor and is F32; a name with several masters has none.
pub(crate) fn find(
    checkpoint: &Checkpoint,
    is_wanted: impl Fn(&StoredTensor) -> bool,
) -> BTreeMap<usize, &StoredTensor> {
    let mut by_name: HashMap<&str, Option<&StoredTensor>> = HashMap::new();
    for master in &checkpoint.state {
        if let Some(name) = master_of(&master.name) {
            by_name.entry(name).and_modify(|known| *known = None).or_insert(Some(master));
        }
    }
    // The state of several ranks does not say whose it is.
    let tensors = checkpoint.tensors.iter().enumerate().filter(|_| checkpoint.ranks == 1);
    tensors
        .filter(|(_, t)| is_wanted(t))
        .filter_map(|(number, t)| Some((number, by_name.get(t.name.as_str()).copied().flatten()?)))
        .filter(|(number, master)| {
            master.dtype == Dtype::F32 && master.shape == checkpoint.tensors[*number].shape
        })
        .collect()
}

/// Compares tensors in BF16 or F32 with their masters.
pub(crate) fn compare(
    checkpoint: &Checkpoint,
    masters: &BTreeMap<usize, &StoredTensor>,
    observer: &dyn Observer,
) -> Result<BTreeMap<usize, Comparison>> {
    if masters.is_empty() {
        return Ok(BTreeMap::new());
    }
    let pieces = |master: &StoredTensor| jobs::pieces(master.elements(), 4, CHUNK_BYTES);
    let work: Vec<(usize, &StoredTensor, Range<u64>)> = masters
        .iter()
        .flat_map(|(number, master)| pieces(master).map(move |range| (*number, *master, range)))
        .collect();
    let bytes = |(_, _, range): &(usize, &StoredTensor, Range<u64>)| 4 * (range.end - range.start);
    observer.phase("comparing masters", work.iter().map(bytes).sum());
    let parts = jobs::run(&work, observer, bytes, |(number, master, range), w| {
        checkpoint.read_f32(&checkpoint.tensors[*number], range, &mut w.a, &mut w.scratch)?;
        checkpoint.read_f32(master, range, &mut w.b, &mut w.scratch)?;
        Ok(compare_values(bytemuck::cast_slice(w.a.as_ref()), bytemuck::cast_slice(w.b.as_ref())))
    })?;
    let mut found: BTreeMap<usize, Comparison> = BTreeMap::new();
    for ((number, ..), part) in work.iter().zip(parts) {
        let sum = found.entry(*number).or_default();
        sum.differing += part.differing;
        sum.values.add(&part.values);
        sum.masters.add(&part.masters);
    }
    Ok(found)
}

fn compare_values(values: &[f32], masters: &[f32]) -> Comparison {
    let mut sum = Comparison { differing: 0, values: Fit::of(values), masters: Fit::of(masters) };
    for (x, master) in values.iter().zip(masters) {
        let is_same = |rounded: f32| rounded.to_bits() == x.to_bits();
        let known = is_same(*master) || Narrow::ALL.iter().any(|narrow| is_same(narrow.round(*master)));
        sum.differing += !(known || x.is_nan() && master.is_nan()) as u64;
    }
    sum
}

/// Returns the checkpoint with its masters in place of the protected tensors that have one, and the names of
/// these tensors; none if no protected tensor has a master.
pub(crate) fn in_place(
    checkpoint: &Checkpoint,
    policy: &Policy,
) -> Option<(Arc<Checkpoint>, HashSet<String>)> {
    let found = find(checkpoint, |t| policy.rule_for(&t.name).is_some());
    let mut replaced = checkpoint.derived();
    let mut names = HashSet::new();
    for (number, master) in found {
        let name = checkpoint.tensors[number].name.clone();
        names.insert(name.clone());
        replaced.tensors[number] = StoredTensor { name, ..master.clone() };
    }
    (!names.is_empty()).then(|| (Arc::new(replaced), names))
}

#[cfg(test)]
mod tests {
    use ballast_files::cast;

    use super::*;

    #[test]
    fn masters_are_known_by_megatrons_names_alone() {
        let name = "decoder.layers.0.self_attention.A_log";
        for prefix in ["optimizer.state.fp32_param.", "chained_1.optimizer.state.fp32_param."] {
            assert_eq!(master_of(&format!("{prefix}{name}")), Some(name));
        }
        for other in
            ["optimizer.state.exp_avg.", "optimizer.fp32_from_fp16_params.0.", "chained_x.optimizer.", ""]
        {
            assert_eq!(master_of(&format!("{other}{name}")), None);
        }
    }

    #[test]
    fn a_value_differs_if_it_is_neither_the_master_nor_its_rounding() {
        let master = 1.001f32;
        let rounded = cast::bf16_round(master);
        let next = f32::from_bits(rounded.to_bits() + 0x1_0000);
        let sum = compare_values(&[master, rounded, next, f32::NAN], &[master, master, master, f32::NAN]);
        assert_eq!(
            (sum.differing, sum.values.beyond(Narrow::Bf16), sum.masters.beyond(Narrow::Bf16)),
            (1, 1, 3)
        );
    }
}
