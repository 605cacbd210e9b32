//! Q8_0: blocks of 32 elements, each with a scale.
//!
//! ```text
//! block   f16 d | 32 x i8 q        x = d q
//! d = max |x| / 127 in f32, q = x (1 / d) rounded to nearest, ties away from zero; d is then rounded to f16
//! ```

use half::f16;

/// Number of elements of a block.
pub(crate) const BLOCK: usize = 32;

/// Number of bytes of a block.
pub(crate) const BLOCK_BYTES: usize = 34;

/// Quantizes whole blocks. Returns the number of finite elements in blocks whose scale exceeds the range of
/// f16, or that have a value which is not finite.
///
/// # Panics
/// If the lengths do not match.
pub(crate) fn quantize(source: &[f32], target: &mut [u8]) -> u64 {
    assert_eq!(source.len() / BLOCK * BLOCK_BYTES, target.len());
    let mut lost = 0;
    for (block, out) in source.chunks_exact(BLOCK).zip(target.chunks_exact_mut(BLOCK_BYTES)) {
        // As integers, magnitudes have the same order, and NaN is above infinity.
        let largest = block.iter().fold(0, |largest: u32, x| largest.max(x.to_bits() & 0x7fff_ffff));
        let scale = f32::from_bits(largest) / 127.0;
        let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
        let stored = f16::from_f32(scale);
        if !stored.is_finite() {
            lost += block.iter().filter(|x| x.is_finite()).count().max(1) as u64;
        }
        let (head, values) = out.split_at_mut(2);
        head.copy_from_slice(&stored.to_le_bytes());
        for (q, x) in values.iter_mut().zip(block) {
            *q = rounded(x * inverse) as u8;
        }
    }
    lost
}

/// Rounds to nearest, ties away from zero, for magnitudes below 2^22. `f32::round` calls a function on older CPUs,
/// and the loop would not vectorize.
#[inline(always)]
fn rounded(x: f32) -> i32 {
    // The value below one half: with one half itself, the largest value below it would become one.
    const HALF: f32 = f32::from_bits(0x3eff_ffff);
    (x + HALF.copysign(x)) as i32
}

/// Restores the elements of whole blocks.
///
/// # Panics
/// If the lengths do not match.
pub fn dequantize(source: &[u8], target: &mut [f32]) {
    assert_eq!(source.len() / BLOCK_BYTES * BLOCK, target.len());
    for (block, out) in source.chunks_exact(BLOCK_BYTES).zip(target.chunks_exact_mut(BLOCK)) {
        let scale = f16::from_le_bytes([block[0], block[1]]).to_f32();
        for (x, q) in out.iter_mut().zip(&block[2..]) {
            *x = scale * (*q as i8) as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_has_a_half_precision_scale_and_rounds_to_nearest() {
        let mut block = [0f32; BLOCK];
        (block[0], block[1], block[2], block[3]) = (127.0, -0.5, 0.49, 2.5);
        let mut bytes = [0; BLOCK_BYTES];
        assert_eq!(quantize(&block, &mut bytes), 0);
        assert_eq!(f16::from_le_bytes([bytes[0], bytes[1]]), f16::ONE);
        let q: Vec<i8> = bytes[2..].iter().map(|q| *q as i8).collect();
        assert_eq!(q[..5], [127, -1, 0, 3, 0]);
    }

    #[test]
    fn rounding_is_that_of_the_standard_library() {
        for i in -2600..=2600 {
            let x = i as f32 / 20.0;
            for bits in [x.to_bits().saturating_sub(1), x.to_bits(), x.to_bits() + 1] {
                let x = f32::from_bits(bits);
                assert!(x.is_nan() || rounded(x) as f32 == x.round(), "{x:?}");
            }
        }
        assert_eq!((rounded(0.49999997), rounded(0.5), rounded(-126.5)), (0, 1, -127));
    }

    #[test]
    fn restored_values_are_within_half_a_step() {
        let source: Vec<f32> = (0..96).map(|i| ((i * 37 % 91) as f32 - 45.0) * 0.013).collect();
        let mut bytes = vec![0; 96 / BLOCK * BLOCK_BYTES];
        quantize(&source, &mut bytes);
        let mut back = vec![0.0; 96];
        dequantize(&bytes, &mut back);
        for (block, (source, back)) in source.chunks(BLOCK).zip(back.chunks(BLOCK)).enumerate() {
            let step = source.iter().fold(0f32, |m, x| m.max(x.abs())) / 127.0;
            for (x, y) in source.iter().zip(back) {
                // Half a step, and the rounding of the scale to 11 bits.
                assert!(
                    (x - y).abs() <= 0.5 * step + x.abs() / 2048.0 + step * 1e-3,
                    "block {block}: {x} {y}"
                );
            }
        }
    }

    #[test]
    fn a_zero_block_stays_zero_and_an_infinite_scale_is_counted() {
        let mut bytes = [1; BLOCK_BYTES];
        assert_eq!(quantize(&[0.0; BLOCK], &mut bytes), 0);
        assert_eq!(bytes, [0; BLOCK_BYTES]);
        assert_eq!(quantize(&[1e8; BLOCK], &mut bytes), 32);
        let mut block = [1.0; BLOCK];
        block[7] = f32::NAN;
        assert_eq!(quantize(&block, &mut bytes), 31);
    }
}
