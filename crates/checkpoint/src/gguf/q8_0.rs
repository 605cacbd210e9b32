//! Q8_0: blocks of 32 elements, each with a scale.
//!
//! ```text
//! block   f16 d | 32 x i8 q        x = d q
//! d = max |x| / 127 in f32, q = x (1 / d) rounded to nearest, ties away from zero; d is then rounded to f16
//! ```

use half::f16;

/// Number of elements of a block.
pub const BLOCK: usize = 32;

/// Number of bytes of a block.
pub const BLOCK_BYTES: usize = 34;

/// Quantizes whole blocks. Returns the number of finite elements in blocks whose scale exceeds the range of
/// f16, or that have a value which is not finite.
///
/// # Panics
/// If the lengths do not match.
pub fn quantize(source: &[f32], target: &mut [u8]) -> u64 {
    assert_eq!(source.len() / BLOCK * BLOCK_BYTES, target.len());
    let mut lost = 0;
    for (block, out) in source.chunks_exact(BLOCK).zip(target.chunks_exact_mut(BLOCK_BYTES)) {
        let largest = block.iter().fold(0f32, |largest, x| largest.max(x.abs()));
        let scale = largest / 127.0;
        let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
        let stored = f16::from_f32(scale);
        if stored.is_infinite() || block.iter().any(|x| !x.is_finite()) {
            lost += block.iter().filter(|x| x.is_finite()).count().max(1) as u64;
        }
        let (head, values) = out.split_at_mut(2);
        head.copy_from_slice(&stored.to_le_bytes());
        for (q, x) in values.iter_mut().zip(block) {
            *q = (x * inverse).round() as i8 as u8;
        }
    }
    lost
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
