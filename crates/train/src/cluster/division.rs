//! Tensors that the ranks of a run hold together: their checksums and their files.

use std::ops::Range;
use std::path::Path;

use ballast_checkpoint::tensor_file::{Described, SharedFile};
use ballast_contract::Dtype;
use ballast_model::Model;
use ballast_model::params::Weight;
use ballast_model::precision::Storage;

use super::{Ranks, Shards};
use crate::checksum::{self, TensorBytes};
use crate::error::{Error, Result};
use crate::optimizer::{Optimizer, SavedTensor};

/// Division of a run's tensors over its ranks.
#[derive(Clone, Debug)]
pub(crate) struct Division {
    pub(crate) ranks: Ranks,
    pub(crate) shards: Shards,
}

impl Division {
    pub(crate) fn divides_weights(&self) -> bool {
        self.ranks.shard.divides_weights()
    }

    pub(crate) fn divides_updates(&self) -> bool {
        self.ranks.shard.divides_updates()
    }

    /// [`checksum::weights_checksum`], also of a model whose weights the ranks share.
    pub(crate) fn weights_checksum(&self, model: &Model) -> Result<String> {
        self.checksum(&checksum::tensors_of(model), self.divides_weights())
    }

    /// The checksum of all masters and state tensors of an optimizer, in order.
    pub(crate) fn optimizer_checksum(&self, optimizer: &Optimizer, model: &Model) -> Result<String> {
        self.checksum(&checksum::tensors_of_optimizer(optimizer, model), self.divides_updates())
    }

    /// The checksum of tensors, whose weights the ranks share if `divided`.
    pub(crate) fn checksum(&self, tensors: &[TensorBytes<'_>], divided: bool) -> Result<String> {
        let mut blocks = checksum::blocks(tensors);
        if divided {
            self.shards.gather_blocks(&self.ranks, &mut blocks, |at| tensors[at].weight())?;
        }
        Ok(checksum::of_blocks(&blocks))
    }

    /// The elements of each weight that this rank holds, if the weights are divided.
    pub(crate) fn shares(&self, model: &Model) -> Option<Vec<Range<usize>>> {
        let own = |weight| self.shards.own(weight);
        self.divides_weights().then(|| (0..model.specs.weights.len()).map(own).collect())
    }

    /// Writes the weights of a model of which every rank holds its share into one file.
    pub(crate) fn write_weights(&self, model: &Model, path: &Path) -> Result {
        let names: Vec<String> = model.specs.weights.iter().map(|spec| model.parameter_name(spec)).collect();
        let dtype = match model.precision().params {
            Storage::F32 => Dtype::F32,
            Storage::Bf16 => Dtype::Bf16,
        };
        let tensors: Vec<Described<'_>> = names
            .iter()
            .zip(&model.specs.weights)
            .map(|(name, spec)| (&name[..], dtype, &spec.shape[..]))
            .collect();
        self.write_together(path, &tensors, &mut |file| {
            for (index, weight) in model.params.weights().iter().enumerate() {
                let begin = (model.precision().params.bytes() * self.shards.own(index).start) as u64;
                match weight {
                    Weight::F32(values) => file.write(index, begin, bytemuck::cast_slice(values))?,
                    Weight::Bf16(values) => file.write(index, begin, bytemuck::cast_slice(values))?,
                }
            }
            Ok(())
        })
    }

    /// Writes masters and optimizer state; every rank writes its share.
    pub(crate) fn write_optimizer(&self, optimizer: &Optimizer, model: &Model, path: &Path) -> Result {
        let all: Vec<SavedTensor<'_>> = optimizer.saved(model).collect();
        let tensors: Vec<Described<'_>> =
            all.iter().map(|tensor| (&tensor.name[..], tensor.dtype, &tensor.shape[..])).collect();
        let is_first = self.ranks.world.is_first();
        self.write_together(path, &tensors, &mut |file| {
            for (index, tensor) in all.iter().enumerate() {
                // Tensors that every rank has are written by the first.
                let own = tensor.weight.is_some() && self.divides_updates();
                if own || is_first {
                    let begin = tensor.dtype.bits() / 8 * tensor.begin as u64;
                    file.write(index, begin, &tensor.bytes())?;
                }
            }
            Ok(())
        })
    }

    /// Writes a file of tensors on all ranks: the first creates it, then all fill it in.
    fn write_together(
        &self,
        path: &Path,
        tensors: &[Described<'_>],
        fill: &mut dyn FnMut(&SharedFile) -> Result,
    ) -> Result {
        let created = self.ranks.on_first(|| Ok(SharedFile::create(path, tensors)?))?;
        let write = || {
            let file = created.map_or_else(|| SharedFile::open(path, tensors), Ok)?;
            fill(&file)?;
            Ok::<_, Error>(file.finish()?)
        };
        self.ranks.all_succeeded(write())
    }
}
