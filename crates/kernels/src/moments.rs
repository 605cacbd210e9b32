//! Optimizer moments in fewer bits than f32, rounded at random so that small changes are kept on average.
//!
//! ```text
//! bf16     sign, 8 exponent and 7 mantissa bits
//! 8 bits   scale * 2^(e - top) (1 + m / 8), or 0; one f32 scale for GROUP elements
//!          signed:   sign, e of 4 bits, m of 3 bits     (first moment, momentum)
//!          unsigned: e of 5 bits, m of 3 bits           (second moment)
//! ```
//! Rounding adds uniform noise below the last kept bit and cuts: a value between two numbers becomes either with a
//! probability that makes the mean exact. The noise is a hash of a key and the index of the element, so an update can be
//! repeated with the same bits on any number of threads and after a resume.
//!
//! The smallest number of 8 bits is 2^(1 - top) of the group's largest. A smaller value becomes it or 0, again with
//! the right mean; an unsigned one becomes it always, because AdamW divides by the root of the second moment.

use half::bf16;

use crate::simd::simd_fn;

/// Elements that share a scale.
pub const GROUP: usize = 256;

/// Source of noise: a hash of a key and a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Noise {
    key: u32,
    /// Position of element 0.
    begin: usize,
}

impl Noise {
    /// The noise of a key.
    pub fn new(key: u64) -> Noise {
        Noise { key: mix((key >> 32) as u32 ^ mix(key as u32)), begin: 0 }
    }

    /// The same noise for elements that begin at this position.
    pub fn starting_at(self, begin: usize) -> Noise {
        Noise { begin, ..self }
    }

    /// 32 uniform bits for element `index`.
    #[inline(always)]
    fn bits(self, index: usize) -> u32 {
        mix(((self.begin + index) as u32).wrapping_mul(0x9e37_79b9) ^ self.key)
    }
}

/// A hash of 32 bits: every bit of the result depends on every bit of `x`.
#[inline(always)]
fn mix(mut x: u32) -> u32 {
    x ^= x >> 16;
    x = x.wrapping_mul(0x7feb_352d);
    x ^= x >> 15;
    x = x.wrapping_mul(0x846c_a68b);
    x ^ (x >> 16)
}

simd_fn! {
    /// Rounds `source` to `target`, both \[n\]; `first` is the index of the first element, for the noise.
    pub fn store_bf16(target: &mut [bf16], source: &[f32], noise: Noise, first: usize) {
        for (i, (target, x)) in target.iter_mut().zip(source).enumerate() {
            let bits = x.to_bits();
            let raised = bits.wrapping_add(noise.bits(first + i) & 0xffff);
            // A finite value stays finite; infinities and NaNs stay what they are.
            let exponent = 0x7f80_0000;
            let keeps = raised & exponent == exponent;
            *target = bf16::from_bits((if keeps { bits } else { raised } >> 16) as u16);
        }
    }
}

/// Largest exponent code, and bits of the codes without sign.
const fn top(signed: bool) -> u32 {
    if signed { 15 } else { 31 }
}

/// Writes the codes of a group of at most [`GROUP`] elements and returns its scale; `first` is the index of the first
/// element, for the noise. Values must be finite, and not negative unless `signed`.
pub fn store_8bit(codes: &mut [u8], source: &[f32], signed: bool, noise: Noise, first: usize) -> f32 {
    let largest = source.iter().fold(0f32, |most, x| most.max(x.abs()));
    // The largest code stands for scale * 1.875.
    let scale = largest / 1.875;
    // A subnormal scale has no exact reciprocal in f32: such a group is as good as zero.
    if scale < f32::MIN_POSITIVE {
        codes.fill(0);
        return 0.0;
    }
    encode(codes, source, f64::from(scale), signed, noise, first);
    scale
}

simd_fn! {
    fn encode(codes: &mut [u8], source: &[f32], scale: f64, signed: bool, noise: Noise, first: usize) {
        // An f32 exponent of 127 (a value of 1) becomes the code `top`.
        let offset = (127 - top(signed)) << 23;
        let least = f32::from_bits(offset + (1 << 23));
        let most = if signed { 0x7f } else { 0xff };
        for (i, (code, x)) in codes.iter_mut().zip(source).enumerate() {
            let y = (f64::from(x.abs()) / scale) as f32;
            let random = noise.bits(first + i);
            let raised = y.to_bits().wrapping_add(random & 0xf_ffff).wrapping_sub(offset) >> 20;
            // Below the smallest number: it or zero.
            let is_kept = y > 0.0 && (!signed || (random >> 8) as f32 * least < y * (1 << 24) as f32);
            let magnitude = if y >= least { raised.min(most) } else if is_kept { 8 } else { 0 };
            let sign = if signed && x.is_sign_negative() { 0x80 } else { 0 };
            *code = (magnitude | sign) as u8;
        }
    }
}

simd_fn! {
    /// Writes the values of a group: `target` and `codes` have the same length.
    pub fn load_8bit(target: &mut [f32], codes: &[u8], scale: f32, signed: bool) {
        let offset = (127 - top(signed)) << 23;
        for (x, code) in target.iter_mut().zip(codes) {
            let magnitude = u32::from(if signed { *code & 0x7f } else { *code });
            let value = f32::from_bits((magnitude << 20) + offset) * scale;
            let value = if magnitude == 0 { 0.0 } else { value };
            *x = if signed && *code & 0x80 != 0 { -value } else { value };
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::Values;

    fn round_trip(source: &[f32], signed: bool, key: u64) -> Vec<f32> {
        let mut codes = vec![0; source.len()];
        let scale = store_8bit(&mut codes, source, signed, Noise::new(key), 0);
        let mut again = vec![7.0; source.len()];
        load_8bit(&mut again, &codes, scale, signed);
        again
    }

    #[test]
    fn numbers_of_the_format_are_kept() {
        for signed in [true, false] {
            let most = if signed { 0x7f } else { 0xff };
            let codes: Vec<u8> = (8..=most).chain(if signed { 0x88..=0xff } else { 0..=0 }).collect();
            let mut values = vec![0.0; codes.len()];
            load_8bit(&mut values, &codes, 0.75, signed);
            assert_eq!(round_trip(&values, signed, 3), values);
        }
    }

    #[test]
    fn rounding_is_right_on_average() {
        const KEYS: u64 = 20_000;
        let source = [1.0, -0.3, 0.017, 1.1e-5, -0.99, 0.0, 3e-6];
        for signed in [true, false] {
            let source: Vec<f32> = source.iter().map(|x| if signed { *x } else { f32::abs(*x) }).collect();
            let mut sums = vec![0.0; source.len()];
            for key in 0..KEYS {
                let values = round_trip(&source, signed, key);
                sums.iter_mut().zip(values).for_each(|(sum, x)| *sum += f64::from(x) / KEYS as f64);
            }
            for (mean, x) in sums.into_iter().zip(&source) {
                // Signed values below the smallest number, 6e-5 here, have the largest spread.
                let spread = (f64::from(*x).abs() * 0.125).max(if signed { 6e-5 } else { 0.0 });
                let bound = 5.0 * spread / (KEYS as f64).sqrt() + 1e-12;
                assert!((mean - f64::from(*x)).abs() < bound, "{signed} {x}: {mean}");
            }
        }
    }

    #[test]
    fn a_positive_second_moment_is_never_zero() {
        let values = round_trip(&[1.0, 1e-9, 1e-30, 0.0], false, 1);
        assert!(values[1] > 0.0 && values[2] > 0.0 && values[3] == 0.0, "{values:?}");
        assert_eq!(round_trip(&[0.0; 5], false, 1), [0.0; 5]);
        assert_eq!(round_trip(&[1e-40, 0.0], true, 1), [0.0; 2]);
    }

    proptest! {
        #[test]
        fn errors_are_at_most_one_step(seed: u64, key: u64, n in 1usize..=GROUP, size in 1e-20f64..1e20) {
            let source: Vec<f32> = Values::new(seed).take(n, size).into_iter().map(|x| x as f32).collect();
            let most = source.iter().fold(0f32, |most, x| most.max(x.abs()));
            for (x, y) in source.iter().zip(round_trip(&source, true, key)) {
                prop_assert!((x - y).abs() <= 0.126 * x.abs() + 6.2e-5 * most, "{} {}", x, y);
            }
            let mut rounded = vec![bf16::ZERO; n];
            store_bf16(&mut rounded, &source, Noise::new(key), 5);
            for (x, y) in source.iter().zip(rounded) {
                prop_assert!((x - y.to_f32()).abs() <= x.abs() / 128.0, "{} {}", x, y);
            }
        }
    }

    #[test]
    fn bf16_is_right_on_average_and_keeps_what_has_no_neighbor() {
        const KEYS: u64 = 20_000;
        let x = 1.0 + 0.3 / 128.0;
        let mut target = [bf16::ZERO];
        let mut up = 0;
        for key in 0..KEYS {
            store_bf16(&mut target, &[x], Noise::new(key), 17);
            up += u64::from(target[0].to_f32() > 1.0);
        }
        assert!((up as f64 / KEYS as f64 - 0.3).abs() < 0.02, "{up}");
        for x in [f32::MAX, f32::MIN, f32::INFINITY, 0.0, -0.0, 1.5, f32::from_bits(0x10000)] {
            store_bf16(&mut target, &[x], Noise::new(4), 0);
            let cut = bf16::from_bits((x.to_bits() >> 16) as u16);
            assert_eq!(target[0].to_bits(), cut.to_bits(), "{x}");
        }
    }

    #[test]
    fn the_noise_of_neighboring_keys_and_elements_is_independent() {
        let ones = |f: &dyn Fn(u64) -> u32| {
            let total: u32 = (0..1000).map(|i| f(i).count_ones()).sum();
            (total as f64 - 16_000.0).abs() < 5.0 * (32_000f64 / 4.0).sqrt()
        };
        assert!(ones(&|i| Noise::new(i).bits(3)) && ones(&|i| Noise::new(3).bits(i as usize)));
        assert!(ones(&|i| Noise::new(i).bits(3) ^ Noise::new(i + 1).bits(3)));
        assert!(ones(&|i| Noise::new(3).bits(i as usize) ^ Noise::new(3).bits(i as usize + 1)));
    }
}
