//! Storage of masters and optimizer state. An update reads and writes them in f32; what takes fewer bits is widened
//! block by block.
//!
//! ```text
//! weight, f32              the model's own value
//! weight, bf16, master     the model's value and a Remainders beside it: exact, 2 bytes
//! weight, bf16, no master  the model's value: every update is rounded
//! state                    f32, bf16, or 8 bits with a scale per group (optimizer.moments)
//! ```

use std::borrow::Cow;

use ballast_kernels::Element;
use ballast_kernels::adamw::BLOCK;
use ballast_kernels::moments::{GROUP, Noise, load_8bit, store_8bit, store_bf16};
use ballast_kernels::remainder::{RemainderBlock, Remainders};
use half::bf16;
use rayon::prelude::*;

use super::rule::{BadElement, Step, UpdateRule};
use crate::config::MomentStorage;
use crate::error::Result;
use ballast_model::precision::Storage;

/// The f32 value of a parameter that the model stores rounded.
#[derive(Clone, Debug)]
pub enum Master {
    /// The values themselves.
    F32(Vec<f32>),
    /// The bits that the model's bf16 weight lacks.
    Beside(Remainders),
}

impl Master {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Master::F32(values) => values.len(),
            Master::Beside(remainders) => remainders.len(),
        }
    }

    /// Returns true if there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of memory.
    pub fn bytes(&self) -> usize {
        match self {
            Master::F32(values) => 4 * values.len(),
            Master::Beside(remainders) => remainders.bytes(),
        }
    }
}

/// Values of a state tensor.
#[derive(Clone, Debug, PartialEq)]
pub enum Stored {
    /// f32.
    F32(Vec<f32>),
    /// bf16.
    Bf16(Vec<bf16>),
    /// 8 bits; see [`ballast_kernels::moments`].
    Bits8 {
        /// A code for each element.
        codes: Vec<u8>,
        /// A scale for each group of [`GROUP`] elements.
        scales: Vec<f32>,
        /// True if values may be negative.
        signed: bool,
    },
}

impl Stored {
    /// `len` values of 0; `signed` if they may become negative.
    pub(super) fn zeros(storage: MomentStorage, len: usize, signed: bool) -> Stored {
        match storage {
            MomentStorage::F32 => Stored::F32(vec![0.0; len]),
            MomentStorage::Bf16 => Stored::Bf16(vec![bf16::ZERO; len]),
            MomentStorage::Bits8 => {
                Stored::Bits8 { codes: vec![0; len], scales: vec![0.0; len.div_ceil(GROUP)], signed }
            }
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Stored::F32(values) => values.len(),
            Stored::Bf16(values) => values.len(),
            Stored::Bits8 { codes, .. } => codes.len(),
        }
    }

    /// Returns true if there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of memory.
    pub fn bytes(&self) -> usize {
        match self {
            Stored::F32(values) => 4 * values.len(),
            Stored::Bf16(values) => 2 * values.len(),
            Stored::Bits8 { codes, scales, .. } => codes.len() + 4 * scales.len(),
        }
    }

    /// Bytes of `len` elements.
    pub(crate) fn bytes_of(storage: MomentStorage, len: usize) -> usize {
        match storage {
            MomentStorage::F32 => 4 * len,
            MomentStorage::Bf16 => 2 * len,
            MomentStorage::Bits8 => len + 4 * len.div_ceil(GROUP),
        }
    }

    /// Name of the type, for tables.
    pub fn dtype(&self) -> &'static str {
        match self {
            Stored::F32(_) => "f32",
            Stored::Bf16(_) => "bf16",
            Stored::Bits8 { .. } => "8 bits",
        }
    }

    /// All values in f32.
    pub fn to_f32(&self) -> Cow<'_, [f32]> {
        match self {
            Stored::F32(values) => Cow::Borrowed(values),
            other => {
                let mut values = vec![0.0; other.len()];
                values
                    .par_chunks_mut(GROUP)
                    .enumerate()
                    .for_each(|(group, values)| other.load(values, group * GROUP));
                Cow::Owned(values)
            }
        }
    }

    /// Widens the elements from `begin` on, a multiple of [`GROUP`].
    fn load(&self, values: &mut [f32], begin: usize) {
        let range = begin..begin + values.len();
        match self {
            Stored::F32(all) => values.copy_from_slice(&all[range]),
            Stored::Bf16(all) => bf16::load(values, &all[range]),
            Stored::Bits8 { codes, scales, signed } => {
                let groups = values.chunks_mut(GROUP).zip(codes[range].chunks(GROUP));
                for ((values, codes), scale) in groups.zip(&scales[begin / GROUP..]) {
                    load_8bit(values, codes, *scale, *signed);
                }
            }
        }
    }

    /// Blocks of [`BLOCK`] elements, of which the last may be shorter.
    fn blocks_mut(&mut self) -> Vec<StoredBlock<'_>> {
        match self {
            Stored::F32(values) => values.chunks_mut(BLOCK).map(StoredBlock::F32).collect(),
            Stored::Bf16(values) => values.chunks_mut(BLOCK).map(StoredBlock::Bf16).collect(),
            Stored::Bits8 { codes, scales, signed } => {
                let blocks = codes.chunks_mut(BLOCK).zip(scales.chunks_mut(BLOCK / GROUP));
                blocks.map(|(codes, scales)| StoredBlock::Bits8 { codes, scales, signed: *signed }).collect()
            }
        }
    }
}

/// A block of a state tensor.
enum StoredBlock<'a> {
    F32(&'a mut [f32]),
    Bf16(&'a mut [bf16]),
    Bits8 { codes: &'a mut [u8], scales: &'a mut [f32], signed: bool },
}

impl StoredBlock<'_> {
    fn load(&self, values: &mut [f32]) {
        match self {
            StoredBlock::F32(own) => values.copy_from_slice(own),
            StoredBlock::Bf16(own) => bf16::load(values, own),
            StoredBlock::Bits8 { codes, scales, signed } => {
                let groups = values.chunks_mut(GROUP).zip(codes.chunks(GROUP)).zip(&**scales);
                groups.for_each(|((values, codes), scale)| load_8bit(values, codes, *scale, *signed));
            }
        }
    }

    /// Rounds the values; `first` is the index of the first element, for the noise.
    fn store(&mut self, values: &[f32], noise: Noise, first: usize) {
        match self {
            StoredBlock::F32(own) => own.copy_from_slice(values),
            StoredBlock::Bf16(own) => store_bf16(own, values, noise, first),
            StoredBlock::Bits8 { codes, scales, signed } => {
                let groups = codes.chunks_mut(GROUP).zip(values.chunks(GROUP)).zip(scales.iter_mut());
                for (group, ((codes, values), scale)) in groups.enumerate() {
                    *scale = store_8bit(codes, values, *signed, noise, first + group * GROUP);
                }
            }
        }
    }
}

/// The value of a parameter, where an update finds it.
pub(super) enum Value<'a> {
    /// f32, and a rounded copy.
    F32(&'a mut [f32], Option<&'a mut [bf16]>),
    /// bf16 with the bits that it lacks.
    Split(&'a mut [bf16], &'a mut Remainders),
    /// bf16 alone.
    Bf16(&'a mut [bf16]),
}

enum ValueBlock<'a> {
    F32(&'a mut [f32], Option<&'a mut [bf16]>),
    Split(&'a mut [bf16], RemainderBlock<'a>),
    Bf16(&'a mut [bf16]),
}

impl<'a> Value<'a> {
    /// The same value, to be looked at.
    fn by_ref(&self) -> ValueRef<'_> {
        match self {
            Value::F32(values, _) => ValueRef::F32(values),
            Value::Split(rounded, remainders) => ValueRef::Split(rounded, remainders),
            Value::Bf16(rounded) => ValueRef::Bf16(rounded),
        }
    }

    fn blocks(self) -> Vec<ValueBlock<'a>> {
        match self {
            Value::F32(values, None) => values.chunks_mut(BLOCK).map(|x| ValueBlock::F32(x, None)).collect(),
            Value::F32(values, Some(copy)) => {
                let blocks = values.chunks_mut(BLOCK).zip(copy.chunks_mut(BLOCK));
                blocks.map(|(values, copy)| ValueBlock::F32(values, Some(copy))).collect()
            }
            Value::Split(rounded, remainders) => {
                let remainders: Vec<RemainderBlock<'a>> = remainders.blocks_mut().collect();
                let blocks = rounded.chunks_mut(BLOCK).zip(remainders);
                blocks.map(|(rounded, remainder)| ValueBlock::Split(rounded, remainder)).collect()
            }
            Value::Bf16(rounded) => rounded.chunks_mut(BLOCK).map(ValueBlock::Bf16).collect(),
        }
    }

    fn set(self, values: &[f32]) {
        match self {
            Value::F32(own, copy) => {
                own.copy_from_slice(values);
                copy.into_iter().for_each(|copy| bf16::store(copy, values));
            }
            Value::Split(rounded, remainders) => *remainders = Remainders::split(rounded, values),
            Value::Bf16(rounded) => bf16::store(rounded, values),
        }
    }
}

impl ValueBlock<'_> {
    fn load(&self, values: &mut [f32]) {
        match self {
            ValueBlock::F32(own, _) => values.copy_from_slice(own),
            ValueBlock::Split(rounded, remainder) => remainder.join(values, rounded),
            ValueBlock::Bf16(rounded) => bf16::load(values, rounded),
        }
    }

    fn store(&mut self, values: &[f32]) {
        match self {
            ValueBlock::F32(own, copy) => {
                own.copy_from_slice(values);
                copy.iter_mut().for_each(|copy| bf16::store(copy, values));
            }
            ValueBlock::Split(rounded, remainder) => remainder.split(rounded, values),
            ValueBlock::Bf16(rounded) => bf16::store(rounded, values),
        }
    }
}

/// Working memory for a block: its value and its state.
fn buffers(states: usize) -> Vec<Vec<f32>> {
    vec![vec![0.0; BLOCK]; 1 + states]
}

/// Number of f32 of working memory that a block needs, for each thread.
pub(crate) fn block_workspace(states: usize) -> usize {
    (1 + states) * BLOCK
}

/// Updates a parameter and its state. `noise` has one source for each state tensor.
pub(super) fn update(
    rule: &dyn UpdateRule,
    value: Value<'_>,
    state: &mut [&mut Stored],
    step: &Step<'_>,
    noise: &[Noise],
    workspace: &mut [f32],
) -> Result {
    let is_f32 = |stored: &&mut Stored| matches!(stored, Stored::F32(_));
    match value {
        Value::F32(values, copy) if state.iter().all(is_f32) => {
            let mut state: Vec<&mut [f32]> =
                state.iter_mut().filter_map(|stored| as_f32_mut(stored)).collect();
            rule.update(values, copy, &mut state, step, workspace)
        }
        value if rule.is_divisible() => update_blocks(rule, value, state, step, noise),
        value => {
            let mut values = value.by_ref().to_f32().into_owned();
            let mut wide: Vec<Vec<f32>> = state.iter().map(|stored| stored.to_f32().into_owned()).collect();
            let mut slices: Vec<&mut [f32]> = wide.iter_mut().map(Vec::as_mut_slice).collect();
            rule.update(&mut values, None, &mut slices, step, workspace)?;
            value.set(&values);
            for ((stored, values), noise) in state.iter_mut().zip(&wide).zip(noise) {
                let blocks: Vec<StoredBlock<'_>> = stored.blocks_mut();
                let numbered = blocks.into_par_iter().zip(values.par_chunks(BLOCK)).enumerate();
                numbered.for_each(|(at, (mut block, values))| block.store(values, *noise, at * BLOCK));
            }
            Ok(())
        }
    }
}

fn as_f32_mut(stored: &mut Stored) -> Option<&mut [f32]> {
    match stored {
        Stored::F32(values) => Some(values),
        _ => None,
    }
}

fn update_blocks(
    rule: &dyn UpdateRule,
    value: Value<'_>,
    state: &mut [&mut Stored],
    step: &Step<'_>,
    noise: &[Noise],
) -> Result {
    let mut by_block: Vec<(ValueBlock<'_>, Vec<StoredBlock<'_>>)> =
        value.blocks().into_iter().map(|block| (block, Vec::new())).collect();
    for stored in state {
        for ((_, blocks), block) in by_block.iter_mut().zip(stored.blocks_mut()) {
            blocks.push(block);
        }
    }
    let gradients = step.gradient.par_chunks(BLOCK);
    by_block.into_par_iter().zip(gradients).enumerate().try_for_each_init(
        || buffers(noise.len()),
        |buffers, (at, ((mut value, mut state), gradient))| {
            let mut slices: Vec<&mut [f32]> =
                buffers.iter_mut().map(|buffer| &mut buffer[..gradient.len()]).collect();
            let Some((values, wide)) = slices.split_first_mut() else { return Ok(()) };
            value.load(values);
            state.iter().zip(wide.iter_mut()).for_each(|(block, wide)| block.load(wide));
            rule.update(values, None, wide, &Step { gradient, ..*step }, &mut [])?;
            value.store(values);
            for ((block, wide), noise) in state.iter_mut().zip(wide.iter()).zip(noise) {
                block.store(wide, *noise, at * BLOCK);
            }
            Ok(())
        },
    )
}

/// The value of a parameter, to be looked at.
pub(super) enum ValueRef<'a> {
    F32(&'a [f32]),
    Split(&'a [bf16], &'a Remainders),
    Bf16(&'a [bf16]),
}

impl ValueRef<'_> {
    /// All values in f32.
    pub(super) fn to_f32(&self) -> Cow<'_, [f32]> {
        match self {
            ValueRef::F32(values) => Cow::Borrowed(values),
            ValueRef::Split(rounded, remainders) => {
                let mut values = vec![0.0; rounded.len()];
                remainders.join(&mut values, rounded);
                Cow::Owned(values)
            }
            ValueRef::Bf16(rounded) => {
                let mut values = vec![0.0; rounded.len()];
                bf16::load(&mut values, rounded);
                Cow::Owned(values)
            }
        }
    }

    fn load(&self, values: &mut [f32], begin: usize) {
        let range = begin..begin + values.len();
        match self {
            ValueRef::F32(own) => values.copy_from_slice(&own[range]),
            ValueRef::Split(rounded, remainders) => remainders.join_from(values, rounded, begin),
            ValueRef::Bf16(rounded) => bf16::load(values, &rounded[range]),
        }
    }

    fn len(&self) -> usize {
        match self {
            ValueRef::F32(values) => values.len(),
            ValueRef::Split(rounded, _) | ValueRef::Bf16(rounded) => rounded.len(),
        }
    }
}

/// The first element that [`update`] would leave non-finite, and its present value.
pub(super) fn bad_element(
    rule: &dyn UpdateRule,
    value: &ValueRef<'_>,
    state: &[&Stored],
    step: &Step<'_>,
    storage: Storage,
) -> Result<Option<(f32, BadElement)>> {
    let is_f32 = matches!(value, ValueRef::F32(_)) && state.iter().all(|s| matches!(s, Stored::F32(_)));
    if is_f32 || !rule.is_divisible() {
        let (values, state): (_, Vec<Cow<'_, [f32]>>) =
            (value.to_f32(), state.iter().map(|stored| stored.to_f32()).collect());
        let state: Vec<&[f32]> = state.iter().map(|values| &**values).collect();
        let found = rule.bad_element(&values, &state, step, storage)?;
        return Ok(found.map(|bad| (values[bad.element], bad)));
    }
    let blocks = (0..value.len()).into_par_iter().step_by(BLOCK);
    let found = blocks.map_init(
        || buffers(state.len()),
        |buffers, begin| {
            let gradient = &step.gradient[begin..value.len().min(begin + BLOCK)];
            let mut slices: Vec<&mut [f32]> =
                buffers.iter_mut().map(|buffer| &mut buffer[..gradient.len()]).collect();
            let Some((values, wide)) = slices.split_first_mut() else { return Ok(None) };
            value.load(values, begin);
            state.iter().zip(wide.iter_mut()).for_each(|(stored, wide)| stored.load(wide, begin));
            let wide: Vec<&[f32]> = wide.iter().map(|wide| &**wide).collect();
            let bad = rule.bad_element(values, &wide, &Step { gradient, ..*step }, storage)?;
            Ok(bad.map(|bad| (values[bad.element], BadElement { element: begin + bad.element, ..bad })))
        },
    );
    // Errors are the same in every block.
    found.find_map_first(Result::transpose).transpose()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_every_storage_come_back_and_have_their_bytes() {
        let n = BLOCK + GROUP + 7;
        let source: Vec<f32> = (0..n).map(|i| (i % 8) as f32).collect();
        for (storage, bytes) in [
            (MomentStorage::F32, 4 * n),
            (MomentStorage::Bf16, 2 * n),
            (MomentStorage::Bits8, n + 4 * n.div_ceil(GROUP)),
        ] {
            for signed in [true, false] {
                let mut stored = Stored::zeros(storage, n, signed);
                assert!(stored.to_f32().iter().all(|x| *x == 0.0));
                for (at, mut block) in stored.blocks_mut().into_iter().enumerate() {
                    let end = n.min((at + 1) * BLOCK);
                    block.store(&source[at * BLOCK..end], Noise::new(1), at * BLOCK);
                }
                assert_eq!((stored.bytes(), Stored::bytes_of(storage, n)), (bytes, bytes));
                for (x, y) in source.iter().zip(stored.to_f32().iter()) {
                    assert!((x - y).abs() <= 0.13 * x, "{storage:?} {x} {y}");
                }
            }
        }
    }
}
