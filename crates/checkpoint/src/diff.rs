//! Comparison of two checkpoints, tensor by tensor, across layouts and dtypes.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use ballast_contract::{Dtype, Role};
use ballast_files::jobs::{self, CHUNK_BYTES, Observer};
use ballast_files::{Result, cast};
use ballast_hub::RemoteSummary;
use serde::Serialize;

use crate::layout::{Form, Layout, Naming, Ranks, relayout};
use crate::open::Checkpoint;
use crate::remote::with_readers;
use crate::view::View;

/// The result of comparing a tensor of A with its counterpart in B.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "verdict", rename_all = "kebab-case")]
pub enum Verdict {
    /// Same dtype and bits.
    SameBits,
    /// Same values in another dtype.
    SameValues,
    /// One is the rounding of the other to its narrower dtype.
    SameAfterRounding(Measure),
    /// Different values.
    Different(Measure),
    /// Different shapes.
    OtherShape,
    /// Missing in B.
    OnlyInA,
    /// Missing in A.
    OnlyInB,
}

/// The difference between two tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Measure {
    /// Number of elements that differ.
    pub differing: u64,
    /// Largest absolute difference; infinite if only one value is finite.
    pub max_abs: f64,
    /// Largest difference in units in the last place of the coarser dtype.
    pub max_ulp: u64,
    /// RMS(a-b) / (RMS(b) + 1e-8).
    pub relative_rms: f64,
}

/// One tensor of a comparison.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct TensorDiff {
    /// Name in the layout of the comparison.
    pub tensor: String,
    /// Tensor-parallel rank, if both are compared by rank.
    pub rank: usize,
    /// Role.
    pub role: Role,
    /// dtype in A.
    pub a: Option<Dtype>,
    /// dtype in B.
    pub b: Option<Dtype>,
    /// Result.
    #[serde(flatten)]
    pub verdict: Verdict,
}

/// The result of a comparison.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct DiffReport {
    /// Layout of A.
    pub a: Layout,
    /// Layout of B.
    pub b: Layout,
    /// Number of elements compared.
    pub elements: u64,
    /// All tensors of A and B.
    pub tensors: Vec<TensorDiff>,
    /// Bytes and requests that servers were asked for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub remote: Vec<RemoteSummary>,
}

impl TensorDiff {
    /// Returns true if the tensor counts as different at this tolerance of the relative RMS.
    pub fn differs(&self, tolerance: f64, strict_dtype: bool) -> bool {
        match &self.verdict {
            Verdict::SameBits => false,
            Verdict::SameValues => strict_dtype,
            Verdict::SameAfterRounding(m) | Verdict::Different(m) => {
                let within = m.relative_rms <= tolerance && tolerance > 0.0;
                strict_dtype && self.a != self.b || !within
            }
            _ => true,
        }
    }
}

/// Compares `a` with `b`.
pub fn diff(a: &Arc<Checkpoint>, b: &Arc<Checkpoint>, observer: &dyn Observer) -> Result<DiffReport> {
    let (layout_a, layout_b) = (Layout::detect(a), Layout::detect(b));
    let (views_a, views_b) = common_views(a, &layout_a, b, &layout_b)?;
    let mut in_b: HashMap<(usize, String), View> =
        views_b.into_iter().map(|(r, v)| ((r, v.name.clone()), v)).collect();
    let mut rows = Vec::new();
    let mut pairs = Vec::new();
    for (rank, view_a) in views_a {
        let role = Role::of(&view_a.name);
        let view_b = in_b.remove(&(rank, view_a.name.clone()));
        let verdict = match &view_b {
            None => Verdict::OnlyInA,
            Some(view_b) if view_b.shape != view_a.shape => Verdict::OtherShape,
            Some(_) => Verdict::SameBits,
        };
        let comparable = verdict == Verdict::SameBits;
        let b = view_b.as_ref().map(|v| v.dtype);
        rows.push(TensorDiff { tensor: view_a.name.clone(), rank, role, a: Some(view_a.dtype), b, verdict });
        if let (true, Some(view_b)) = (comparable, view_b) {
            pairs.push((rows.len() - 1, view_a, view_b));
        }
    }
    let mut only_in_b: Vec<_> = in_b.into_iter().collect();
    only_in_b.sort_by(|x, y| x.0.cmp(&y.0));
    for ((rank, tensor), view) in only_in_b {
        let role = Role::of(&tensor);
        rows.push(TensorDiff { tensor, rank, role, a: None, b: Some(view.dtype), verdict: Verdict::OnlyInB });
    }
    let tallies = with_readers(&[a, b], || compare(&pairs, observer))?;
    let mut elements = 0;
    for ((row, view_a, view_b), tally) in pairs.iter().zip(tallies) {
        elements += view_a.elements();
        rows[*row].verdict = tally.verdict(view_a.dtype, view_b.dtype);
    }
    let remote = [a, b].iter().filter_map(|checkpoint| Some(checkpoint.remote.as_ref()?.summary())).collect();
    Ok(DiffReport { a: layout_a, b: layout_b, elements, tensors: rows, remote })
}

type RankedViews = Vec<(usize, View)>;

/// Returns the tensors of both in one layout: their own if they share it, else hf. Prefixes of nested models
/// are removed.
fn common_views(
    a: &Arc<Checkpoint>,
    la: &Layout,
    b: &Arc<Checkpoint>,
    lb: &Layout,
) -> Result<(RankedViews, RankedViews)> {
    let unprefixed = |l: &Layout| Layout { prefix: String::new(), ..l.clone() };
    let same = unprefixed(la) == unprefixed(lb);
    let packed = la.naming == Naming::Megatron || lb.naming == Naming::Megatron;
    let views = |c: &Arc<Checkpoint>, own: &Layout| -> Result<RankedViews> {
        let form = |x: Option<Form>, y: Option<Form>| {
            if x == y && !packed { x } else { x.or(y).map(|_| Form::Split) }
        };
        let common = Layout {
            naming: Naming::Hf,
            projections: form(la.projections, lb.projections),
            experts: form(la.experts, lb.experts),
            ranks: Ranks::ONE,
            ..own.clone()
        };
        let ranks = relayout(c, own, if same { own } else { &common })?;
        let plain = |v: View| match v.name.strip_prefix("model.language_model.") {
            Some(rest) => {
                let name = format!("model.{rest}");
                v.renamed(name)
            }
            None => v,
        };
        let ranked = ranks.into_iter().enumerate();
        Ok(ranked.flat_map(|(rank, views)| views.into_iter().map(move |v| (rank, plain(v)))).collect())
    };
    Ok((views(a, la)?, views(b, lb)?))
}

/// Sums over the chunks of a comparison.
#[derive(Clone, Copy, Default)]
struct Tally {
    /// Number of elements whose values differ.
    differing: u64,
    /// Number of elements that differ even if both are rounded to the coarser dtype.
    differing_rounded: u64,
    /// Number of elements with equal values but different bits (signs of zero, NaN payloads).
    other_bits: u64,
    max_abs: f64,
    max_ulp: u64,
    square_difference: f64,
    square_b: f64,
    elements: u64,
}

impl Tally {
    fn add(&mut self, other: &Tally) {
        self.differing += other.differing;
        self.differing_rounded += other.differing_rounded;
        self.other_bits += other.other_bits;
        self.max_abs = self.max_abs.max(other.max_abs);
        self.max_ulp = self.max_ulp.max(other.max_ulp);
        self.square_difference += other.square_difference;
        self.square_b += other.square_b;
        self.elements += other.elements;
    }

    fn verdict(&self, a: Dtype, b: Dtype) -> Verdict {
        let n = (self.elements as f64).max(1.0);
        let rms = |squares: f64| (squares / n).sqrt();
        let measure = Measure {
            differing: self.differing.max(self.other_bits),
            max_abs: self.max_abs,
            max_ulp: self.max_ulp,
            relative_rms: rms(self.square_difference) / (rms(self.square_b) + 1e-8),
        };
        match (self.differing, self.other_bits) {
            (0, 0) if a == b => Verdict::SameBits,
            (0, _) if a != b => Verdict::SameValues,
            (0, _) => Verdict::Different(measure),
            _ if a != b && self.differing_rounded == 0 => Verdict::SameAfterRounding(measure),
            _ => Verdict::Different(measure),
        }
    }
}

fn compare(pairs: &[(usize, View, View)], observer: &dyn Observer) -> Result<Vec<Tally>> {
    let work: Vec<(usize, Range<u64>)> = pairs
        .iter()
        .enumerate()
        .flat_map(|(i, (_, a, b))| {
            jobs::pieces(a.units(), a.unit_bytes().max(b.unit_bytes()), CHUNK_BYTES)
                .map(move |range| (i, range))
        })
        .collect();
    let bytes = |(i, range): &(usize, Range<u64>)| (range.end - range.start) * pairs[*i].1.unit_bytes();
    observer.phase("comparing", work.iter().map(bytes).sum());
    let tallies = jobs::run(&work, observer, bytes, |(i, range), w| {
        let (_, a, b) = &pairs[*i];
        if a.dtype != b.dtype && !cast::supported(a.dtype, b.dtype) {
            // Not comparable as values: everything differs.
            let count = range.end - range.start;
            let infinite = Tally {
                differing: count,
                differing_rounded: count,
                max_abs: f64::INFINITY,
                ..Tally::default()
            };
            return Ok(Tally { elements: count, square_difference: f64::INFINITY, ..infinite });
        }
        a.read(range.clone(), &mut w.a, &mut w.scratch)?;
        b.read(range.clone(), &mut w.b, &mut w.scratch)?;
        if a.dtype == b.dtype && w.a.as_ref() == w.b.as_ref() {
            return Ok(Tally { elements: range.end - range.start, ..Tally::default() });
        }
        Ok(tally_values(w.a.as_ref(), a.dtype, w.b.as_ref(), b.dtype))
    })?;
    let mut totals = vec![Tally::default(); pairs.len()];
    for ((i, _), tally) in work.iter().zip(&tallies) {
        totals[*i].add(tally);
    }
    Ok(totals)
}

fn tally_values(a: &[u8], dtype_a: Dtype, b: &[u8], dtype_b: Dtype) -> Tally {
    let mut tally = Tally::default();
    if !dtype_a.is_plain_float() {
        let unit = dtype_a.bytes().unwrap_or(1) as usize;
        let differing = a.chunks(unit).zip(b.chunks(unit)).filter(|(x, y)| x != y).count() as u64;
        let elements = (a.len() / unit) as u64;
        return Tally {
            differing,
            differing_rounded: differing,
            elements,
            max_abs: f64::INFINITY,
            square_difference: f64::INFINITY,
            ..tally
        };
    }
    // F16 and BF16 have the same width; BF16 is coarser.
    let coarse = if (dtype_a.bits(), dtype_a != Dtype::Bf16) <= (dtype_b.bits(), dtype_b != Dtype::Bf16) {
        dtype_a
    } else {
        dtype_b
    };
    let (size_a, size_b) = (dtype_a.bits() as usize / 8, dtype_b.bits() as usize / 8);
    for (x, y) in a.chunks_exact(size_a).zip(b.chunks_exact(size_b)) {
        let other_bits = dtype_a == dtype_b && x != y;
        let (x, y) = (value(x, dtype_a), value(y, dtype_b));
        tally.elements += 1;
        tally.square_b += y * y;
        if x == y || x.is_nan() && y.is_nan() {
            tally.other_bits += other_bits as u64;
            continue;
        }
        let difference = (x - y).abs();
        let difference = if difference.is_nan() { f64::INFINITY } else { difference };
        let ulp = ordered(x, coarse).abs_diff(ordered(y, coarse));
        tally.differing += 1;
        tally.differing_rounded += (ulp > 0) as u64;
        tally.max_abs = tally.max_abs.max(difference);
        tally.max_ulp = tally.max_ulp.max(ulp);
        tally.square_difference += difference * difference;
    }
    tally
}

fn value(bytes: &[u8], dtype: Dtype) -> f64 {
    match (dtype, bytes) {
        (Dtype::Bf16, &[a, b]) => half::bf16::from_le_bytes([a, b]).to_f64(),
        (Dtype::F16, &[a, b]) => half::f16::from_le_bytes([a, b]).to_f64(),
        (Dtype::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]) as f64,
        (_, bytes) => bytes.try_into().map_or(f64::NAN, f64::from_le_bytes),
    }
}

/// Returns the index of `x`, rounded to `dtype`, among the values of that dtype: adjacent values differ by 1.
fn ordered(x: f64, dtype: Dtype) -> i64 {
    let (magnitude, negative) = match dtype {
        Dtype::Bf16 => {
            let bits = cast::bf16_bits((x as f32).to_bits());
            ((bits & 0x7fff) as i64, bits >> 15 == 1)
        }
        Dtype::F16 => {
            let bits = half::f16::from_f64(x).to_bits();
            ((bits & 0x7fff) as i64, bits >> 15 == 1)
        }
        Dtype::F32 => {
            let bits = (x as f32).to_bits();
            ((bits & 0x7fff_ffff) as i64, bits >> 31 == 1)
        }
        _ => ((x.to_bits() & (u64::MAX >> 1)) as i64, x.is_sign_negative()),
    };
    if negative { -magnitude } else { magnitude }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|x| x.to_le_bytes()).collect()
    }

    #[test]
    fn neighbours_are_one_ulp_apart_across_zero() {
        let smallest = f32::from_bits(1) as f64;
        assert_eq!(ordered(smallest, Dtype::F32) - ordered(-smallest, Dtype::F32), 2);
        assert_eq!(ordered(1.0, Dtype::Bf16) - ordered(1.0 - 1.0 / 256.0, Dtype::Bf16), 1);
        assert_eq!(ordered(f64::INFINITY, Dtype::F32) - ordered(f32::MAX as f64, Dtype::F32), 1);
    }

    #[test]
    fn a_rounded_copy_is_the_same_after_rounding_and_no_more() {
        let wide = [0.1f32, -2.7, 3.3e-20];
        let narrow: Vec<u8> = wide.iter().flat_map(|x| cast::bf16_bits(x.to_bits()).to_le_bytes()).collect();
        let verdict =
            tally_values(&bytes(&wide), Dtype::F32, &narrow, Dtype::Bf16).verdict(Dtype::F32, Dtype::Bf16);
        assert!(
            matches!(verdict, Verdict::SameAfterRounding(m) if m.max_ulp == 0 && m.differing == 3),
            "{verdict:?}"
        );
        let other = [0.2f32, -2.7, 3.3e-20];
        let verdict =
            tally_values(&bytes(&other), Dtype::F32, &narrow, Dtype::Bf16).verdict(Dtype::F32, Dtype::Bf16);
        assert!(matches!(verdict, Verdict::Different(m) if m.max_ulp == 128), "{verdict:?}");
    }

    #[test]
    fn a_value_that_is_finite_on_one_side_only_is_infinitely_far() {
        let tally = tally_values(&bytes(&[1.0, f32::NAN]), Dtype::F32, &bytes(&[1.0, 2.0]), Dtype::F32);
        assert_eq!((tally.differing, tally.max_abs), (1, f64::INFINITY));
        let both = tally_values(&bytes(&[f32::NAN]), Dtype::F32, &bytes(&[f32::NAN]), Dtype::F32);
        assert_eq!(both.differing, 0);
    }

    #[test]
    fn minus_zero_is_the_same_value_but_not_the_same_bits() {
        let tally = tally_values(&bytes(&[0.0]), Dtype::F32, &bytes(&[-0.0]), Dtype::F32);
        assert!(matches!(tally.verdict(Dtype::F32, Dtype::F32), Verdict::Different(m) if m.max_abs == 0.0));
    }
}
