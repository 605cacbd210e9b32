//! The tensors of the optimizer as a checkpoint has them.
//!
//! ```text
//! master.<parameter>      F32, whatever its storage in memory
//! m.<parameter>, ...      F32, BF16, or U8 with m.scale.<parameter> in F32
//! ```

use std::borrow::Cow;
use std::ops::Range;

use ballast_contract::Dtype;
use ballast_kernels::adamw::BLOCK;
use ballast_kernels::moments::GROUP;
use ballast_kernels::remainder::Remainders;
use ballast_model::Model;
use ballast_model::params::Weight;
use half::bf16;

use super::stored::{Master, Stored};
use super::{Optimizer, Place, Slot, held};
use crate::error::{Error, Result};

/// A tensor of the optimizer as a checkpoint has it: the elements that this process updates.
pub struct SavedTensor<'a> {
    /// Name.
    pub name: String,
    /// Type.
    pub dtype: Dtype,
    /// Shape of the whole tensor.
    pub shape: Vec<usize>,
    /// First element that this process has.
    pub begin: usize,
    /// The weight whose elements the ranks may share.
    pub weight: Option<usize>,
    /// Bytes for [`BLOCK`] elements of the parameter.
    pub(crate) block_bytes: usize,
    source: Source<'a>,
}

enum Source<'a> {
    Bytes(&'a [u8]),
    Split(&'a [bf16], &'a Remainders),
}

impl SavedTensor<'_> {
    /// The content, which may have to be made.
    pub fn bytes(&self) -> Cow<'_, [u8]> {
        match &self.source {
            Source::Bytes(bytes) => Cow::Borrowed(bytes),
            Source::Split(rounded, remainders) => {
                let mut values = vec![0f32; rounded.len()];
                remainders.join(&mut values, rounded);
                Cow::Owned(bytemuck::cast_slice(&values).to_vec())
            }
        }
    }
}

/// Reads elements of a tensor of a checkpoint: name, type, shape, range.
pub(crate) type Read<'a> = &'a mut dyn FnMut(&str, Dtype, &[usize], Range<usize>) -> Result<Vec<u8>>;

impl Optimizer {
    /// All tensors to save.
    pub fn saved<'a>(&'a self, model: &'a Model) -> impl Iterator<Item = SavedTensor<'a>> {
        self.slots.iter().flat_map(|slot| slot.saved(model))
    }

    /// Name, shape and values of all state tensors and masters.
    pub fn tensors(&self, model: &Model) -> Vec<(String, Vec<usize>, Vec<f32>)> {
        let mut all = Vec::new();
        for slot in &self.slots {
            for tensor in &slot.state {
                let name = format!("{}.{}", tensor.kind.prefix, slot.name);
                all.push((name, tensor.shape.clone(), tensor.values.to_f32().into_owned()));
            }
            if slot.master.is_some() {
                all.push((
                    format!("master.{}", slot.name),
                    slot.shape.clone(),
                    slot.value(model).to_f32().into_owned(),
                ));
            }
        }
        all
    }

    /// Fills all tensors from a checkpoint. The model has its weights already.
    pub(crate) fn restore(&mut self, model: &Model, read: Read<'_>) -> Result {
        self.slots.iter_mut().try_for_each(|slot| slot.restore(model, read))
    }
}

impl Slot {
    fn saved<'a>(&'a self, model: &'a Model) -> Vec<SavedTensor<'a>> {
        let weight = if let Place::Weight(weight) = self.place { Some(weight) } else { None };
        let tensor = |name: String, dtype, shape: &[usize], begin, block_bytes, source| SavedTensor {
            name,
            dtype,
            shape: shape.to_vec(),
            begin,
            weight,
            block_bytes,
            source,
        };
        let mut all = Vec::new();
        for state in &self.state {
            let name = format!("{}.{}", state.kind.prefix, self.name);
            // A state tensor of another shape than its parameter is never divided.
            let begin = if state.values.len() == self.range.len() { self.range.start } else { 0 };
            let mut add = |dtype, block_bytes, bytes| {
                let source = Source::Bytes(bytes);
                all.push(tensor(name.clone(), dtype, &state.shape, begin, block_bytes, source));
            };
            match &state.values {
                Stored::F32(values) => add(Dtype::F32, 4 * BLOCK, bytemuck::cast_slice(values)),
                Stored::Bf16(values) => add(Dtype::Bf16, 2 * BLOCK, bytemuck::cast_slice(values)),
                Stored::Bits8 { codes, scales, .. } => {
                    add(Dtype::U8, BLOCK, codes);
                    let source = Source::Bytes(bytemuck::cast_slice(scales));
                    let shape = [scales_of(&state.shape)];
                    let name = scale_name(state.kind.prefix, &self.name);
                    all.push(tensor(name, Dtype::F32, &shape, begin / GROUP, 4 * BLOCK / GROUP, source));
                }
            }
        }
        let source = match (&self.master, self.place) {
            (Some(Master::F32(values)), _) => Some(Source::Bytes(bytemuck::cast_slice(values))),
            (Some(Master::Beside(remainders)), Place::Weight(i)) => match &model.params.weights()[i] {
                Weight::Bf16(rounded) => Some(Source::Split(&rounded[held(rounded.len(), self)], remainders)),
                Weight::F32(_) => None,
            },
            _ => None,
        };
        let master = source.map(|source| {
            let name = format!("master.{}", self.name);
            tensor(name, Dtype::F32, &self.shape, self.range.start, 4 * BLOCK, source)
        });
        all.extend(master);
        all
    }

    fn restore(&mut self, model: &Model, read: Read<'_>) -> Result {
        for state in &mut self.state {
            let name = format!("{}.{}", state.kind.prefix, self.name);
            let len = state.values.len();
            let range = if len == self.range.len() { self.range.clone() } else { 0..len };
            match &mut state.values {
                Stored::F32(values) => bytemuck::cast_slice_mut(values).copy_from_slice(&read(
                    &name,
                    Dtype::F32,
                    &state.shape,
                    range,
                )?),
                Stored::Bf16(values) => bytemuck::cast_slice_mut(values).copy_from_slice(&read(
                    &name,
                    Dtype::Bf16,
                    &state.shape,
                    range,
                )?),
                Stored::Bits8 { codes, scales, .. } => {
                    codes.copy_from_slice(&read(&name, Dtype::U8, &state.shape, range.clone())?);
                    // An empty range has no scale, also where it begins inside a group.
                    let first = range.start / GROUP;
                    let groups = first..first + scales.len();
                    let (name, shape) =
                        (scale_name(state.kind.prefix, &self.name), [scales_of(&state.shape)]);
                    let bytes = read(&name, Dtype::F32, &shape, groups)?;
                    bytemuck::cast_slice_mut(scales).copy_from_slice(&bytes);
                }
            }
        }
        let Some(master) = &mut self.master else { return Ok(()) };
        let name = format!("master.{}", self.name);
        let bytes = read(&name, Dtype::F32, &self.shape, self.range.clone())?;
        let values: Vec<f32> = bytemuck::allocation::pod_collect_to_vec(&bytes);
        match master {
            Master::F32(own) => own.copy_from_slice(&values),
            Master::Beside(remainders) => {
                let mut rounded = vec![bf16::ZERO; values.len()];
                *remainders = Remainders::split(&mut rounded, &values);
                let Place::Weight(i) = self.place else { return Ok(()) };
                let Weight::Bf16(own) = &model.params.weights()[i] else { return Ok(()) };
                let range = self.range.clone();
                let own = if own.len() == rounded.len() { &own[..] } else { &own[range] };
                if let Some(at) = (0..own.len()).find(|at| own[*at].to_bits() != rounded[*at].to_bits()) {
                    return Err(Error::Diverged(format!(
                        "{name} is {} at element {}, which is not the weight's {}; go back to an earlier checkpoint",
                        values[at],
                        self.range.start + at,
                        own[at]
                    )));
                }
            }
        }
        Ok(())
    }
}

fn scale_name(prefix: &str, parameter: &str) -> String {
    format!("{prefix}.scale.{parameter}")
}

/// Number of scales of a tensor of this shape.
fn scales_of(shape: &[usize]) -> usize {
    shape.iter().product::<usize>().div_ceil(GROUP)
}
