//! f32 values as their bf16 rounding and the 16 bits that it lacks: a master weight that costs two bytes beside the
//! model's bf16 weight instead of four.
//!
//! The bits of x and of its rounding r, as integers:
//! ```text
//! d = bits(x) - 2^16 bits(r),    -2^15 <= d <= 2^15
//! ```
//! for either sign, for subnormal numbers, and where x is rounded to infinity: rounding adds 0 or 1 to the upper half
//! of the bits. i16 holds all of these but one: d = 2^15, an x halfway between two bf16 numbers that is rounded
//! towards zero, because the nearer to zero is even. Such an x is one of 131,072 bit patterns; its d is stored as
//! -2^15, and its index in a list of its block. A NaN stays a NaN; its payload may change.
//!
//! # Example
//! ```
//! use ballast_kernels::remainder::Remainders;
//! use half::bf16;
//!
//! let master = [0.1, -3.0e-41, f32::MAX];
//! let mut weights = [bf16::ZERO; 3];
//! let remainders = Remainders::split(&mut weights, &master);
//! let mut again = [0.0; 3];
//! remainders.join(&mut again, &weights);
//! assert_eq!(again, master);
//! ```

use half::bf16;
use rayon::prelude::*;

use crate::Element;
use crate::adamw::BLOCK;
use crate::simd::simd_fn;

/// Remainders of f32 values beside their bf16 roundings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Remainders {
    low: Vec<i16>,
    /// For each block of [`BLOCK`] elements, the indices in it of remainders of 2^15, ascending.
    halves: Vec<Vec<u16>>,
}

/// The remainders of one block.
#[derive(Debug)]
pub struct RemainderBlock<'a> {
    low: &'a mut [i16],
    halves: &'a mut Vec<u16>,
}

impl Remainders {
    /// Rounds `values` \[n\] into `rounded` \[n\] and returns what that loses.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn split(rounded: &mut [bf16], values: &[f32]) -> Remainders {
        let mut all =
            Remainders { low: vec![0; values.len()], halves: vec![Vec::new(); values.len().div_ceil(BLOCK)] };
        assert_eq!(rounded.len(), values.len(), "a rounding for every value");
        let blocks = rounded.par_chunks_mut(BLOCK).zip(values.par_chunks(BLOCK));
        all.blocks_mut().zip(blocks).for_each(|(mut block, (rounded, values))| block.split(rounded, values));
        all
    }

    /// Writes the values to `values` \[n\], from their roundings \[n\].
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn join(&self, values: &mut [f32], rounded: &[bf16]) {
        assert_eq!((values.len(), rounded.len()), (self.len(), self.len()), "a value for every remainder");
        let stored = self.low.par_chunks(BLOCK).zip(&self.halves);
        values
            .par_chunks_mut(BLOCK)
            .zip(rounded.par_chunks(BLOCK))
            .zip(stored)
            .for_each(|((values, rounded), (low, halves))| join(values, rounded, low, halves));
    }

    /// Writes the values from `begin` on, a multiple of [`BLOCK`], to `values`, which are at most a block; `rounded` has all
    /// roundings.
    pub fn join_from(&self, values: &mut [f32], rounded: &[bf16], begin: usize) {
        let range = begin..begin + values.len();
        join(values, &rounded[range.clone()], &self.low[range], &self.halves[begin / BLOCK]);
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.low.len()
    }

    /// Returns true if there are no values.
    pub fn is_empty(&self) -> bool {
        self.low.is_empty()
    }

    /// Bytes of memory, without the entries of the lists: one for 131,072 values or so.
    pub fn bytes(&self) -> usize {
        Remainders::bytes_of(self.len())
    }

    /// [`Remainders::bytes`] of `len` values.
    pub const fn bytes_of(len: usize) -> usize {
        2 * len + size_of::<Vec<u16>>() * len.div_ceil(BLOCK)
    }

    /// The blocks of [`BLOCK`] elements, of which the last may be shorter.
    pub fn blocks_mut(&mut self) -> impl IndexedParallelIterator<Item = RemainderBlock<'_>> {
        let blocks = self.low.par_chunks_mut(BLOCK).zip(self.halves.par_iter_mut());
        blocks.map(|(low, halves)| RemainderBlock { low, halves })
    }
}

impl RemainderBlock<'_> {
    /// Writes the values of the block, from their roundings.
    pub fn join(&self, values: &mut [f32], rounded: &[bf16]) {
        join(values, rounded, self.low, self.halves);
    }

    /// Rounds the values of the block and keeps what that loses.
    pub fn split(&mut self, rounded: &mut [bf16], values: &[f32]) {
        bf16::store(rounded, values);
        self.halves.clear();
        if low_bits(self.low, rounded, values) {
            let is_half = |i: &usize| difference(values[*i], rounded[*i]) == 1 << 15;
            self.halves.extend((0..values.len()).filter(is_half).map(|i| i as u16));
        }
    }
}

/// bits(x) - 2^16 bits(r).
#[inline(always)]
fn difference(x: f32, rounded: bf16) -> i32 {
    x.to_bits().wrapping_sub(u32::from(rounded.to_bits()) << 16) as i32
}

fn join(values: &mut [f32], rounded: &[bf16], low: &[i16], halves: &[u16]) {
    add_low_bits(values, rounded, low);
    for i in halves {
        let i = usize::from(*i);
        values[i] = f32::from_bits((u32::from(rounded[i].to_bits()) << 16) + (1 << 15));
    }
}

simd_fn! {
    /// Stores the lower bits; returns true if one of the differences is 2^15.
    fn low_bits(low: &mut [i16], rounded: &[bf16], values: &[f32]) -> bool {
        let mut any = false;
        for ((low, rounded), x) in low.iter_mut().zip(rounded).zip(values) {
            let d = difference(*x, *rounded);
            *low = d as i16;
            any |= d == 1 << 15;
        }
        any
    }
}

simd_fn! {
    fn add_low_bits(values: &mut [f32], rounded: &[bf16], low: &[i16]) {
        for ((x, rounded), low) in values.iter_mut().zip(rounded).zip(low) {
            let upper = u32::from(rounded.to_bits()) << 16;
            *x = f32::from_bits(upper.wrapping_add(i32::from(*low) as u32));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Bits of values after a split and a join; the roundings must be those of bf16.
    fn round_trip(values: &[f32]) -> Vec<u32> {
        let mut rounded = vec![bf16::ONE; values.len()];
        let remainders = Remainders::split(&mut rounded, values);
        for (rounded, x) in rounded.iter().zip(values) {
            assert_eq!(rounded.to_bits(), bf16::from_f32(*x).to_bits(), "{x:e}");
        }
        let mut again = vec![7.0; values.len()];
        remainders.join(&mut again, &rounded);
        again.into_iter().map(f32::to_bits).collect()
    }

    #[test]
    fn every_lower_half_of_chosen_upper_halves_comes_back() {
        // Zero, subnormal numbers, even and odd upper halves, both signs, the largest numbers, infinity.
        for upper in [0x0000u32, 0x0001, 0x007f, 0x0080, 0x3f80, 0x3f81, 0x7f7e, 0x7f7f] {
            for sign in [0, 0x8000_0000] {
                let values: Vec<f32> =
                    (0..1 << 16).map(|low| f32::from_bits(sign | upper << 16 | low)).collect();
                let bits: Vec<u32> = values.iter().map(|x| x.to_bits()).collect();
                assert_eq!(round_trip(&values), bits, "{upper:x}");
            }
        }
        let infinite = [f32::INFINITY, f32::NEG_INFINITY];
        assert_eq!(round_trip(&infinite), infinite.map(f32::to_bits));
        assert!(round_trip(&[f32::NAN, -f32::NAN]).into_iter().all(|bits| f32::from_bits(bits).is_nan()));
    }

    proptest! {
        #[test]
        fn any_finite_bits_come_back(bits in prop::collection::vec(any::<u32>(), 0..300), halves: bool) {
            let half = |bits: u32| if halves { bits & 0xffff_0000 | 0x8000 } else { bits };
            let values: Vec<f32> =
                bits.into_iter().map(|bits| f32::from_bits(half(bits))).filter(|x| x.is_finite()).collect();
            let expected: Vec<u32> = values.iter().map(|x| x.to_bits()).collect();
            prop_assert_eq!(round_trip(&values), expected);
        }
    }

    #[test]
    fn blocks_are_independent_and_their_lists_are_renewed() {
        let half = f32::from_bits(0x3f80_8000);
        let mut values = vec![1.5; BLOCK + 3];
        (values[BLOCK - 1], values[BLOCK]) = (half, half);
        let mut rounded = vec![bf16::ZERO; values.len()];
        let mut remainders = Remainders::split(&mut rounded, &values);
        assert_eq!(remainders.halves, [vec![(BLOCK - 1) as u16], vec![0]]);
        assert!(remainders.bytes() < 2 * values.len() + 100);
        values[BLOCK - 1] = 2.0;
        let blocks = rounded.par_chunks_mut(BLOCK).zip(values.par_chunks(BLOCK));
        remainders.blocks_mut().zip(blocks).for_each(|(mut block, (rounded, values))| {
            block.split(rounded, values);
            let mut again = vec![0.0; values.len()];
            block.join(&mut again, rounded);
            assert_eq!(again, values);
        });
        assert_eq!(remainders.halves, [vec![], vec![0]]);
    }
}
