//! Checksums of tensors and files: xxh3 with 64 bits.
//!
//! They find accidents (a flipped bit, another file), not attacks, so the lighter of the two candidates is
//! enough: unlike blake3, xxh3 has no build script, and it reads at the speed of memory.

use std::borrow::Cow;

use ballast_kernels::adamw::BLOCK;
use ballast_model::Model;
use ballast_model::params::Weight;
use rayon::prelude::*;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::optimizer::{Optimizer, SavedTensor};

/// The checksum of the bits of a tensor.
pub fn checksum(values: &[f32]) -> u64 {
    xxh3_64(bytemuck::cast_slice(values))
}

/// The bytes of a tensor, or those of the elements that this rank has.
pub(crate) enum TensorBytes<'a> {
    /// A tensor of the model: the weight that the ranks may share, bytes of an element, bytes.
    Model(Option<usize>, usize, &'a [u8]),
    /// A tensor of the optimizer.
    Optimizer(SavedTensor<'a>),
}

impl TensorBytes<'_> {
    /// The weight that the tensor belongs to; the ranks may share its elements.
    pub(crate) fn weight(&self) -> Option<usize> {
        match self {
            TensorBytes::Model(weight, ..) => *weight,
            TensorBytes::Optimizer(tensor) => tensor.weight,
        }
    }

    /// Bytes for [`BLOCK`] elements of the parameter.
    fn block_bytes(&self) -> usize {
        match self {
            TensorBytes::Model(_, width, _) => BLOCK * width,
            TensorBytes::Optimizer(tensor) => tensor.block_bytes,
        }
    }

    fn bytes(&self) -> Cow<'_, [u8]> {
        match self {
            TensorBytes::Model(_, _, bytes) => Cow::Borrowed(bytes),
            TensorBytes::Optimizer(tensor) => tensor.bytes(),
        }
    }
}

/// All weights, adapters and protected tensors of a model, in order.
pub(crate) fn tensors_of(model: &Model) -> Vec<TensorBytes<'_>> {
    let whole = |values| TensorBytes::Model(None, 4, bytemuck::cast_slice(values));
    let mut tensors: Vec<TensorBytes<'_>> = Vec::new();
    tensors.extend(model.params.weights().iter().enumerate().map(|(i, weight)| match weight {
        Weight::F32(values) => TensorBytes::Model(Some(i), 4, bytemuck::cast_slice(values)),
        Weight::Bf16(values) => TensorBytes::Model(Some(i), 2, bytemuck::cast_slice(values)),
    }));
    let adapters = model.params.adapters().iter().flatten();
    tensors.extend(adapters.flat_map(|adapter| [&adapter.a, &adapter.b]).map(|values| whole(values)));
    tensors.extend(model.params.protected().iter().map(|tensor| whole(tensor.values())));
    tensors
}

/// All masters and state tensors of an optimizer, in order.
pub(crate) fn tensors_of_optimizer<'a>(optimizer: &'a Optimizer, model: &'a Model) -> Vec<TensorBytes<'a>> {
    optimizer.saved(model).map(TensorBytes::Optimizer).collect()
}

/// The checksum of all weights, adapters and protected tensors of a model, in order.
pub fn weights_checksum(model: &Model) -> String {
    of_blocks(&blocks(&tensors_of(model)))
}

/// The checksum of tensors that hashes all bytes in sequence, as in checkpoints of earlier programs.
pub(crate) fn bytewise(tensors: &[TensorBytes<'_>]) -> String {
    of_all(tensors.iter().map(TensorBytes::bytes))
}

/// Checksums of the blocks of each tensor.
pub(crate) fn blocks(tensors: &[TensorBytes<'_>]) -> Vec<Vec<u64>> {
    let blocks = |tensor: &TensorBytes<'_>| -> Vec<u64> {
        tensor.bytes().par_chunks(tensor.block_bytes()).map(xxh3_64).collect()
    };
    tensors.iter().map(blocks).collect()
}

/// The checksum of tensors, from the checksums of their blocks.
pub(crate) fn of_blocks(blocks: &[Vec<u64>]) -> String {
    of_all(blocks.iter().map(|blocks| Cow::Borrowed(bytemuck::cast_slice(blocks))))
}

/// The checksum of the names and shapes of all learned parameters.
pub(crate) fn parameters_checksum(optimizer: &Optimizer) -> String {
    let mut all = Vec::new();
    for slot in &optimizer.slots {
        all.push(slot.name.as_bytes().to_vec());
        all.push(slot.shape.iter().flat_map(|size| (*size as u64).to_le_bytes()).collect());
    }
    of_all(all.iter().map(|part| Cow::Borrowed(&part[..])))
}

/// The lengths go in as well, so that a byte cannot move from one part to the next.
fn of_all<'a>(parts: impl IntoIterator<Item = Cow<'a, [u8]>>) -> String {
    let mut hasher = Xxh3::new();
    for part in parts {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(&part);
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
