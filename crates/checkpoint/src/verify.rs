//! Reads a written checkpoint back through the inverse mapping and compares it with its source.
//!
//! Every source tensor must come back as its own bits; where the dtype was changed, as its own rounding to
//! the new dtype; where a gamma was shifted by one, to within the rounding of that shift, and those that
//! moved are counted.

use std::path::Path;
use std::sync::Arc;

use ballast_contract::Dtype;
use serde::Serialize;

use crate::cast::{self, Buffer};
use crate::convert::stored_by_name;
use crate::error::{Error, Result};
use crate::jobs::{self, CHUNK_BYTES, Observer};
use crate::layout::{Layout, relayout};
use crate::open::Checkpoint;
use crate::view::View;

/// What the comparison found; an outright difference is an error instead.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Verification {
    /// Source tensors that came back with the same bits.
    pub same_bits: usize,
    /// Source tensors that came back as their exact value in a wider dtype.
    pub same_values: usize,
    /// Source tensors that came back as their rounding to the narrower dtype that was asked for.
    pub rounded: usize,
    /// Shifted tensors in which values moved, and how many of how many.
    pub moved: Vec<MovedValues>,
}

/// Values that the shift to zero-centred gamma moved.
#[derive(Clone, Debug, Serialize)]
pub struct MovedValues {
    /// The tensor.
    pub tensor: String,
    /// How many values moved.
    pub values: u64,
    /// Of how many.
    pub elements: u64,
    /// The largest move.
    pub max_abs: f32,
}

/// A tensor as it was meant, and as it reads back.
pub(crate) struct Pair {
    pub(crate) source: View,
    pub(crate) back: View,
}

/// Compares the checkpoint at `staged`, written in layout `to`, with `source`, which is in layout `from`.
pub fn against_source(
    source: &Arc<Checkpoint>,
    from: &Layout,
    staged: &Path,
    to: &Layout,
    observer: &dyn Observer,
) -> Result<Verification> {
    let written = Arc::new(Checkpoint::open_consistent(staged)?);
    let detected = Layout::detect(&written);
    if &detected != to && detected.naming != to.naming {
        return Err(Error::Verification(format!("the layout reads back as {detected:?}, not {to:?}")));
    }
    let back = relayout(&written, to, from)?;
    let mut expected = stored_by_name(source);
    let mut pairs = Vec::new();
    for (rank, views) in back.into_iter().enumerate() {
        for back in views {
            let Some(source) = expected.remove(&(rank, back.name.clone())) else {
                return Err(Error::Verification(format!(
                    "{} is in the destination, but not in the source",
                    back.name
                )));
            };
            if source.shape != back.shape {
                let message =
                    format!("{}: shape {:?} came back as {:?}", back.name, source.shape, back.shape);
                return Err(Error::Verification(message));
            }
            pairs.push(Pair { source, back });
        }
    }
    if let Some((_, name)) = expected.keys().next() {
        return Err(Error::Verification(format!("{name} is in the source, but not in the destination")));
    }
    check(pairs, observer)
}

/// Compares every pair, value by value.
pub(crate) fn check(pairs: Vec<Pair>, observer: &dyn Observer) -> Result<Verification> {
    observer.phase("verifying", pairs.iter().map(|p| p.source.bytes()).sum());
    let work: Vec<(usize, std::ops::Range<u64>)> = pairs
        .iter()
        .enumerate()
        .flat_map(|(i, p)| {
            let widest = p.source.unit_bytes().max(p.back.unit_bytes());
            jobs::pieces(p.source.units(), widest, CHUNK_BYTES).map(move |range| (i, range))
        })
        .collect();
    let bytes = |(i, range): &(usize, std::ops::Range<u64>)| {
        (range.end - range.start) * pairs[*i].source.unit_bytes()
    };
    let moved = jobs::run(&work, observer, bytes, |(i, range), w| {
        let Pair { source, back } = &pairs[*i];
        source.read(range.clone(), &mut w.a, &mut w.scratch)?;
        back.read(range.clone(), &mut w.b, &mut w.scratch)?;
        let mut expected = &w.a;
        if source.dtype != back.dtype {
            cast::convert(w.a.as_ref(), source.dtype, w.scratch.resize(w.b.as_ref().len()), back.dtype);
            expected = &w.scratch;
        }
        if expected.as_ref() == w.b.as_ref() {
            return Ok((0, 0f32));
        }
        // Only a shifted gamma may differ, and only by the rounding of the shift.
        match moved_values(back, expected, &w.b) {
            Some(moved) => Ok(moved),
            None => Err(Error::Verification(format!("{} does not read back as it was", source.name))),
        }
    })?;

    let mut counts = vec![(0, 0f32); pairs.len()];
    for ((i, _), (values, max_abs)) in work.iter().zip(moved) {
        counts[*i] = (counts[*i].0 + values, counts[*i].1.max(max_abs));
    }
    let mut verification = Verification::default();
    for (Pair { source, back }, (values, max_abs)) in pairs.into_iter().zip(counts) {
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
    Ok(verification)
}

/// How many values of a shifted tensor moved and by how much at most; `None` when that is not the
/// rounding of the shift.
fn moved_values(back: &View, expected: &Buffer, got: &Buffer) -> Option<(u64, f32)> {
    if back.shift == 0 {
        return None;
    }
    let (expected, got): (&[f32], &[f32]) =
        (bytemuck::cast_slice(expected.as_ref()), bytemuck::cast_slice(got.as_ref()));
    // What the shift is stored in decides its resolution.
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
