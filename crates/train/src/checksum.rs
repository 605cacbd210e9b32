//! Checksums of tensors and files: xxh3 with 64 bits.
//!
//! They find accidents (a flipped bit, another file), not attacks, so the lighter of the two candidates is
//! enough: unlike blake3, xxh3 has no build script, and it reads at the speed of memory.

use ballast_cluster::Kind;
use ballast_kernels::adamw::BLOCK;
use ballast_model::Model;
use ballast_model::params::Weight;
use rayon::prelude::*;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::cluster::{Ranks, Shards};
use crate::error::Result;
use crate::optimizer::{Optimizer, Place};

/// The checksum of the bits of a tensor.
pub fn checksum(values: &[f32]) -> u64 {
    xxh3_64(bytemuck::cast_slice(values))
}

/// A tensor, or the elements of it that this rank has.
struct Tensor<'a> {
    /// Index of the weight whose elements the ranks share.
    shared: Option<usize>,
    bytes: &'a [u8],
    /// Bytes of an element.
    width: usize,
}

/// All weights, adapters and protected tensors of a model, in order.
fn tensors_of(model: &Model) -> Vec<Tensor<'_>> {
    let whole = |bytes| Tensor { shared: None, bytes, width: 4 };
    let mut tensors: Vec<Tensor<'_>> = Vec::new();
    tensors.extend(model.params.weights().iter().enumerate().map(|(i, weight)| match weight {
        Weight::F32(values) => Tensor { shared: Some(i), bytes: bytemuck::cast_slice(values), width: 4 },
        Weight::Bf16(values) => Tensor { shared: Some(i), bytes: bytemuck::cast_slice(values), width: 2 },
    }));
    let adapters = model.params.adapters().iter().flatten();
    tensors.extend(
        adapters.flat_map(|adapter| [&adapter.a, &adapter.b]).map(|x| whole(bytemuck::cast_slice(x))),
    );
    let protected = model.params.protected().iter();
    tensors.extend(protected.map(|tensor| whole(bytemuck::cast_slice(tensor.values()))));
    tensors
}

/// All masters and state tensors of an optimizer, in order.
fn tensors_of_optimizer(optimizer: &Optimizer) -> Vec<Tensor<'_>> {
    optimizer
        .slots_and_tensors()
        .map(|(slot, _, _, values)| {
            let shared = if let Place::Weight(weight) = slot.place { Some(weight) } else { None };
            Tensor { shared, bytes: bytemuck::cast_slice(values), width: 4 }
        })
        .collect()
}

/// The checksum of all weights, adapters and protected tensors of a model, in order.
pub fn weights_checksum(model: &Model) -> String {
    of_blocks(&tensors_of(model))
}

/// [`weights_checksum`] of a model whose weights the ranks share.
pub(crate) fn divided_weights_checksum(model: &Model, ranks: &Ranks, shards: &Shards) -> Result<String> {
    of_shared(&tensors_of(model), ranks, shards)
}

/// The checksum of all masters and state tensors of an optimizer, in order.
pub(crate) fn optimizer_checksum(optimizer: &Optimizer) -> String {
    of_blocks(&tensors_of_optimizer(optimizer))
}

/// [`optimizer_checksum`] of an optimizer whose state the ranks share.
pub(crate) fn divided_optimizer_checksum(
    optimizer: &Optimizer,
    ranks: &Ranks,
    shards: &Shards,
) -> Result<String> {
    of_shared(&tensors_of_optimizer(optimizer), ranks, shards)
}

/// Checksums that hash all bytes in sequence, as in checkpoints of earlier programs.
pub(crate) mod bytewise {
    use super::{Model, Optimizer, of_all, tensors_of, tensors_of_optimizer};

    pub(crate) fn weights_checksum(model: &Model) -> String {
        of_all(tensors_of(model).iter().map(|tensor| tensor.bytes))
    }

    pub(crate) fn optimizer_checksum(optimizer: &Optimizer) -> String {
        of_all(tensors_of_optimizer(optimizer).iter().map(|tensor| tensor.bytes))
    }
}

/// Checksums of the blocks of a tensor.
fn blocks(tensor: &Tensor<'_>) -> Vec<u64> {
    tensor.bytes.par_chunks(BLOCK * tensor.width).map(xxh3_64).collect()
}

/// The checksum of tensors, from the checksums of their blocks, which several ranks can compute.
fn of_blocks(tensors: &[Tensor<'_>]) -> String {
    let sums: Vec<Vec<u64>> = tensors.iter().map(blocks).collect();
    of_all(sums.iter().map(|sums| bytemuck::cast_slice(sums)))
}

/// The checksum of tensors of which this rank has some elements.
fn of_shared(tensors: &[Tensor<'_>], ranks: &Ranks, shards: &Shards) -> Result<String> {
    let mut sums: Vec<Vec<u64>> = tensors.iter().map(blocks).collect();
    let shared: Vec<(usize, usize)> =
        tensors.iter().enumerate().filter_map(|(at, tensor)| Some((at, tensor.shared?))).collect();
    let own: Vec<u64> = shared.iter().flat_map(|(at, _)| &sums[*at]).copied().collect();
    let all = ranks.world.all_gather_any(Kind::Setup, bytemuck::cast_slice(&own).to_vec())?;
    let all = all.iter().map(|bytes| bytemuck::allocation::pod_collect_to_vec(bytes)).collect();
    let weights: Vec<usize> = shared.iter().map(|(_, weight)| *weight).collect();
    for ((at, _), whole) in shared.iter().zip(shards.join_blocks(&weights, all)) {
        sums[*at] = whole;
    }
    Ok(of_all(sums.iter().map(|sums| bytemuck::cast_slice(sums))))
}

/// The checksum of the names and shapes of all learned parameters.
pub(crate) fn parameters_checksum(optimizer: &Optimizer) -> String {
    let mut all = Vec::new();
    for slot in &optimizer.slots {
        all.push(slot.name.as_bytes().to_vec());
        all.push(slot.shape.iter().flat_map(|size| (*size as u64).to_le_bytes()).collect());
    }
    of_all(all.iter().map(Vec::as_slice))
}

/// The lengths go in as well, so that a byte cannot move from one part to the next.
fn of_all<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> String {
    let mut hasher = Xxh3::new();
    for part in parts {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    format!("{:016x}", hasher.digest())
}

/// The checksum of a stream of bytes. How it is cut into pieces makes no difference.
#[derive(Clone, Default)]
pub(crate) struct Content {
    hasher: Xxh3,
    /// Number of bytes so far.
    pub(crate) length: u64,
}

impl Content {
    /// Adds the next bytes.
    pub(crate) fn add(&mut self, bytes: &[u8]) {
        self.hasher.update(bytes);
        self.length += bytes.len() as u64;
    }

    /// The checksum of all bytes so far.
    pub(crate) fn checksum(&self) -> u64 {
        self.hasher.digest()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn checksum(bytes: &[u8]) -> u64 {
        let mut content = Content::default();
        content.add(bytes);
        content.checksum()
    }

    proptest! {
        #[test]
        fn cuts_make_no_difference(bytes: Vec<u8>, cuts: Vec<usize>) {
            let mut content = Content::default();
            let mut rest = &bytes[..];
            for cut in cuts {
                let (piece, after) = rest.split_at(cut % (rest.len() + 1));
                content.add(piece);
                rest = after;
            }
            content.add(rest);
            prop_assert_eq!(content.checksum(), checksum(&bytes));
        }

        #[test]
        fn a_changed_byte_changes_the_checksum(bytes in prop::collection::vec(any::<u8>(), 1..100), at: usize, change in 1u8..) {
            let mut other = bytes.clone();
            other[at % bytes.len()] ^= change;
            prop_assert_ne!(checksum(&other), checksum(&bytes));
        }
    }

    #[test]
    fn order_and_length_matter() {
        assert_ne!(checksum(b"abcdefgh12345678"), checksum(b"12345678abcdefgh"));
        assert_ne!(checksum(b""), checksum(b"\0"));
        assert_ne!(checksum(b"a\0"), checksum(b"a"));
    }
}
