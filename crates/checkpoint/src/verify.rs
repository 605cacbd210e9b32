//! Reads a written checkpoint back through the inverse mapping and compares it with its source.
//!
//! Every source tensor must read back with the same bits; after a change of dtype, as its rounding to the new
//! dtype; after a shift of gamma by one, within the rounding of the shift, and the changed values are
//! counted.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use ballast_contract::Dtype;
use ballast_files::cast::{self, Buffer};
use ballast_files::jobs::{self, CHUNK_BYTES, Workspace};
use ballast_files::{Error, Result};
use serde::Serialize;

use crate::layout::{Layout, Naming, is_extra_state, relayout, stored_by_name, usual_name};
use crate::open::Checkpoint;
use crate::view::View;

/// The result of a verification; any other difference is an error.
#[derive(Clone, Debug, Default, Serialize)]
#[non_exhaustive]
pub struct Verification {
    /// Number of source tensors with the same bits.
    pub same_bits: usize,
    /// Number of source tensors with the same values in a wider dtype.
    pub same_values: usize,
    /// Number of source tensors rounded to the requested dtype.
    pub rounded: usize,
    /// Shifted tensors with changed values.
    pub moved: Vec<MovedValues>,
}

/// Values that the shift to zero-centered gamma changed.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct MovedValues {
    /// Tensor.
    pub tensor: String,
    /// Number of changed values.
    pub values: u64,
    /// Number of values.
    pub elements: u64,
    /// Largest change.
    pub max_abs: f32,
}

/// A tensor as planned, and as it reads back.
pub(crate) struct Pair {
    pub(crate) source: View,
    pub(crate) back: View,
}

/// Pairs every tensor of `source` (in layout `from`) with its counterpart in the checkpoint at `staged` (in
/// layout `to`).
pub(crate) fn pairs_with_source(
    source: &Arc<Checkpoint>,
    from: &Layout,
    staged: &Path,
    to: &Layout,
) -> Result<Vec<Pair>> {
    let written = Arc::new(Checkpoint::open_consistent(staged)?);
    let detected = Layout::detect(&written);
    if detected.naming != to.naming {
        let problem = format!("layout reads back as {}, expected {}", detected.naming, to.naming);
        return Err(Error::Verification(problem));
    }
    let back = relayout(&written, to, from)?;
    let mut expected = stored_by_name(source);
    if from.naming == Naming::Megatron && from != to {
        expected =
            expected.into_iter().map(|((rank, name), view)| ((rank, usual_name(&name)), view)).collect();
    }
    let mut pairs = Vec::new();
    for (rank, views) in back.into_iter().enumerate() {
        for back in views {
            let Some(source) = expected.remove(&(rank, back.name.clone())) else {
                // Megatron's modules get the empty extra state that they expect.
                if back.elements() == 0 && is_extra_state(&back.name) {
                    continue;
                }
                return Err(Error::Verification(format!(
                    "{} is in the destination but not in the source",
                    back.name
                )));
            };
            if source.shape != back.shape {
                let message =
                    format!("{}: shape {:?} reads back as {:?}", back.name, source.shape, back.shape);
                return Err(Error::Verification(message));
            }
            pairs.push(Pair { source, back });
        }
    }
    // Empty extra state of Megatron's modules has no place in other layouts.
    expected.retain(|(_, name), view| view.elements() > 0 || !is_extra_state(name));
    if let Some((_, name)) = expected.keys().next() {
        return Err(Error::Verification(format!("{name} is in the source but not in the destination")));
    }
    Ok(pairs)
}

/// Pairs every planned tensor, by rank, with its counterpart in `staged`.
pub(crate) fn pairs_with_planned(planned: Vec<Vec<View>>, staged: &Path) -> Result<Vec<Pair>> {
    let written = Arc::new(Checkpoint::open_consistent(staged)?);
    let mut back = stored_by_name(&written);
    let mut pairs = Vec::new();
    for (rank, views) in planned.into_iter().enumerate() {
        for source in views {
            let Some(back) = back.remove(&(rank, source.name.clone())) else {
                return Err(Error::Verification(format!("{} is not in the destination", source.name)));
            };
            pairs.push(Pair { source, back });
        }
    }
    Ok(pairs)
}

/// A piece of a pair.
pub(crate) struct Chunk {
    pair: usize,
    range: Range<u64>,
}

/// The number of changed values of a chunk, and the largest change.
pub(crate) struct Moved {
    pair: usize,
    values: u64,
    max_abs: f32,
}

/// The pairs of a verification, chunk by chunk.
pub(crate) struct Verifier {
    pairs: Vec<Pair>,
}

impl Verifier {
    pub(crate) fn new(pairs: Vec<Pair>) -> Verifier {
        Verifier { pairs }
    }

    /// Returns the number of bytes of all source tensors.
    pub(crate) fn bytes(&self) -> u64 {
        self.pairs.iter().map(|p| p.source.bytes()).sum()
    }

    /// Returns the destination's files with the tensor of pair `pair`.
    pub(crate) fn files(&self, pair: usize) -> Vec<&Path> {
        self.pairs[pair].back.source_files()
    }

    pub(crate) fn pair_count(&self) -> usize {
        self.pairs.len()
    }

    /// Returns the chunks of pair `pair`.
    pub(crate) fn chunks(&self, pair: usize) -> impl Iterator<Item = Chunk> {
        let Pair { source, back } = &self.pairs[pair];
        // A chunk has whole blocks.
        let units = blocks(source, back).map_or(1, |(elements, _)| elements);
        let widest = units * source.unit_bytes().max(back.unit_bytes());
        let whole = move |range: Range<u64>| range.start * units..range.end * units;
        jobs::pieces(source.units() / units, widest, CHUNK_BYTES)
            .map(move |range| Chunk { pair, range: whole(range) })
    }

    /// Returns the number of source bytes of a chunk.
    pub(crate) fn chunk_bytes(&self, chunk: &Chunk) -> u64 {
        (chunk.range.end - chunk.range.start) * self.pairs[chunk.pair].source.unit_bytes()
    }

    /// Compares one chunk, value by value.
    pub(crate) fn check(&self, chunk: &Chunk, w: &mut Workspace) -> Result<Moved> {
        let Chunk { pair, range } = chunk;
        let Pair { source, back } = &self.pairs[*pair];
        source.read(range.clone(), &mut w.a, &mut w.scratch)?;
        let read_back = match blocks(source, back) {
            Some((elements, bytes)) => range.start / elements * bytes..range.end / elements * bytes,
            None => range.clone(),
        };
        back.read(read_back, &mut w.b, &mut w.scratch)?;
        let mut expected = &w.a;
        if source.dtype != back.dtype {
            cast::convert(w.a.as_ref(), source.dtype, w.scratch.resize(w.b.as_ref().len()), back.dtype);
            expected = &w.scratch;
        }
        if expected.as_ref() == w.b.as_ref() {
            return Ok(Moved { pair: *pair, values: 0, max_abs: 0.0 });
        }
        // Only a shifted gamma may differ, and only by the rounding of the shift.
        match moved_values(back, expected, &w.b) {
            Some((values, max_abs)) => Ok(Moved { pair: *pair, values, max_abs }),
            None => Err(Error::Verification(format!("{} reads back with different values", source.name))),
        }
    }

    /// Combines the results of all chunks.
    pub(crate) fn finish(self, results: &[Moved]) -> Verification {
        let mut counts = vec![(0, 0f32); self.pairs.len()];
        for moved in results {
            let (values, max_abs) = &mut counts[moved.pair];
            (*values, *max_abs) = (*values + moved.values, max_abs.max(moved.max_abs));
        }
        let mut verification = Verification::default();
        for (Pair { source, back }, (values, max_abs)) in self.pairs.into_iter().zip(counts) {
            if values > 0 {
                let elements = source.elements();
                verification.moved.push(MovedValues { tensor: source.name, values, elements, max_abs });
            } else if source.dtype == back.dtype {
                verification.same_bits += 1;
            } else if source.dtype.widens_exactly_to(back.dtype) {
                verification.same_values += 1;
            } else {
                verification.rounded += 1;
            }
        }
        verification
    }
}

/// Returns the elements and bytes of a block, if `back` has the elements of `source` in blocks.
fn blocks(source: &View, back: &View) -> Option<(u64, u64)> {
    back.dtype.block().filter(|_| source.dtype != back.dtype)
}

/// Returns the number of changed values of a shifted tensor and the largest change; `None` if a change
/// exceeds the rounding of the shift.
fn moved_values(back: &View, expected: &Buffer, got: &Buffer) -> Option<(u64, f32)> {
    if back.shift == 0 {
        return None;
    }
    let (expected, got): (&[f32], &[f32]) =
        (bytemuck::cast_slice(expected.as_ref()), bytemuck::cast_slice(got.as_ref()));
    // The stored dtype of the shifted tensor decides the resolution.
    let narrowest = back.sources().iter().map(|t| t.dtype).min()?;
    let resolution = match narrowest {
        Dtype::F32 => f32::EPSILON,
        Dtype::Bf16 => 1.0 / 128.0,
        _ => 1.0 / 1024.0,
    };
    let (mut moved, mut max_abs) = (0, 0f32);
    for (a, b) in expected.iter().zip(got) {
        let difference = (a - b).abs();
        if a.to_bits() != b.to_bits() && !(a.is_nan() && b.is_nan()) {
            let within = difference <= resolution * (1.0 + a.abs());
            if !within {
                return None;
            }
            moved += 1;
            max_abs = max_abs.max(difference);
        }
    }
    Some((moved, max_abs))
}
