//! Weights that are divided over the ranks: gathered part by part of the model, ahead of use, and dropped after it.

use std::collections::VecDeque;

use ballast_cluster::{Gather, Kind};
use ballast_model::Model;
use ballast_model::params::{Part, Weight};
use ballast_model::precision::Storage;
use half::bf16;

use super::{Ranks, Shards};
use crate::error::Result;

/// The weights that are whole at the moment, and the gathers in flight. Between uses, the model holds this rank's
/// range of each weight.
#[derive(Default)]
pub(crate) struct Resident {
    /// This rank's ranges of the weights that are whole in the model.
    own: Vec<(usize, Weight)>,
    /// Gathers that were started, with their part.
    under_way: Vec<(Part, Gather)>,
}

/// The bytes of a weight.
fn bytes_of(weight: &Weight) -> &[u8] {
    match weight {
        Weight::F32(values) => bytemuck::cast_slice(values),
        Weight::Bf16(values) => bytemuck::cast_slice(values),
    }
}

/// The weights of a part of the model.
fn members(model: &Model, part: Part) -> Vec<usize> {
    let specs = &model.specs.weights;
    (0..specs.len()).filter(|weight| specs[*weight].part == part).collect()
}

/// Bytes of some weights that each rank has.
fn lens(shards: &Shards, weights: &[usize], storage: Storage) -> Vec<usize> {
    let len = |rank: usize| weights.iter().map(|weight| shards.range(*weight, rank).len()).sum::<usize>();
    (0..shards.ranks()).map(|rank| storage.bytes() * len(rank)).collect()
}

/// Whole weights from the bytes of all ranks.
fn assemble(model: &Model, shards: &Shards, weights: &[usize], all: &[Vec<u8>]) -> Vec<Weight> {
    let storage = model.precision().params;
    let mut at = vec![0; shards.ranks()];
    let whole = |weight: &usize| {
        let len = model.specs.weights[*weight].len();
        let mut whole = match storage {
            Storage::F32 => Weight::F32(vec![0.0; len]),
            Storage::Bf16 => Weight::Bf16(vec![bf16::ZERO; len]),
        };
        for (rank, at) in at.iter_mut().enumerate() {
            let range = shards.range(*weight, rank);
            let bytes = &all[rank][*at..*at + storage.bytes() * range.len()];
            *at += bytes.len();
            match &mut whole {
                Weight::F32(values) => bytemuck::cast_slice_mut(&mut values[range]).copy_from_slice(bytes),
                Weight::Bf16(values) => bytemuck::cast_slice_mut(&mut values[range]).copy_from_slice(bytes),
            }
        }
        whole
    };
    weights.iter().map(whole).collect()
}

impl Resident {
    /// Starts to gather a part, unless its gather is in flight.
    pub(crate) fn start(&mut self, model: &Model, part: Part, ranks: &Ranks, shards: &Shards) -> Result {
        if self.under_way.iter().any(|(other, _)| *other == part) {
            return Ok(());
        }
        let weights = members(model, part);
        let own =
            weights.iter().flat_map(|weight| bytes_of(&model.params.weights()[*weight])).copied().collect();
        let lens = lens(shards, &weights, model.precision().params);
        self.under_way.push((part, ranks.world.start_all_gather(Kind::Weights, own, &lens)?));
        Ok(())
    }

    /// Makes the weights of a part whole in the model.
    pub(crate) fn fetch(&mut self, model: &mut Model, part: Part, ranks: &Ranks, shards: &Shards) -> Result {
        self.start(model, part, ranks, shards)?;
        let Some(at) = self.under_way.iter().position(|(other, _)| *other == part) else { return Ok(()) };
        let (_, gather) = self.under_way.remove(at);
        let all = ranks.world.finish_all_gather(gather)?;
        let weights = members(model, part);
        let whole = assemble(model, shards, &weights, &all);
        for (weight, whole) in weights.into_iter().zip(whole) {
            let own = std::mem::replace(&mut model.params.weights_mut()[weight], whole);
            self.own.push((weight, own));
        }
        Ok(())
    }

    /// Drops the whole weights of the model again.
    pub(crate) fn release(&mut self, model: &mut Model) {
        for (weight, own) in self.own.drain(..) {
            model.params.weights_mut()[weight] = own;
        }
    }
}

/// Gathers the updated ranges of the `learned` weights, so that every rank has them whole.
pub(crate) fn gather_updates(
    model: &mut Model,
    learned: &dyn Fn(usize) -> bool,
    ranks: &Ranks,
    shards: &Shards,
) -> Result {
    let mut parts: Vec<Part> = model.specs.weights.iter().map(|spec| spec.part).collect();
    parts.sort_unstable();
    parts.dedup();
    let mut gathers = VecDeque::new();
    let finish = |model: &mut Model, (weights, gather): (Vec<usize>, Gather)| -> Result {
        let all = ranks.world.finish_all_gather(gather)?;
        let whole = assemble(model, shards, &weights, &all);
        for (weight, whole) in weights.into_iter().zip(whole) {
            model.params.weights_mut()[weight] = whole;
        }
        Ok(())
    };
    for part in parts {
        let weights: Vec<usize> =
            members(model, part).into_iter().filter(|weight| learned(*weight)).collect();
        let storage = model.precision().params;
        let mut own = Vec::new();
        for weight in &weights {
            let range = shards.own(*weight);
            let bytes = bytes_of(&model.params.weights()[*weight]);
            own.extend_from_slice(&bytes[storage.bytes() * range.start..storage.bytes() * range.end]);
        }
        let lens = lens(shards, &weights, storage);
        gathers.push_back((weights, ranks.world.start_all_gather(Kind::Weights, own, &lens)?));
        if gathers.len() > ranks.window {
            gathers.pop_front().map_or(Ok(()), |gather| finish(model, gather))?;
        }
    }
    gathers.into_iter().try_for_each(|gather| finish(model, gather))
}
