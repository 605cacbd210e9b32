//! Conversions between plain float types, on raw little-endian bytes.
//!
//! Widening is exact. Narrowing rounds once, to nearest even, and counts the finite values that became
//! infinite, which the caller treats as an error.

use ballast_contract::Dtype;
use half::{bf16, f16};

use crate::q8_0;

#[cfg(target_endian = "big")]
compile_error!("safetensors data is little endian, and is used in place");

/// A byte buffer whose start is aligned for every element type.
#[derive(Default)]
pub struct Buffer {
    words: Vec<u64>,
    bytes: usize,
}

impl Buffer {
    /// Resizes the buffer to `bytes`; the content is unspecified.
    pub fn resize(&mut self, bytes: usize) -> &mut [u8] {
        let words = bytes.div_ceil(8);
        if self.words.len() < words {
            self.words.resize(words, 0);
        }
        self.bytes = bytes;
        self.as_mut()
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.bytes]
    }
}

impl AsMut<[u8]> for Buffer {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.bytes]
    }
}

/// Rounds f32 bits to bf16 bits, to nearest even; a NaN stays a NaN.
#[inline(always)]
pub fn bf16_bits(bits: u32) -> u16 {
    let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
    let nan = ((bits >> 16) | 0x40) as u16;
    if bits & 0x7fff_ffff > 0x7f80_0000 { nan } else { rounded }
}

/// Rounds `x` to bf16.
#[inline(always)]
pub fn bf16_round(x: f32) -> f32 {
    f32::from_bits((bf16_bits(x.to_bits()) as u32) << 16)
}

/// Returns true if [`convert`] supports the pair.
pub fn supported(from: Dtype, to: Dtype) -> bool {
    from == to || from.is_plain_float() && (to.is_plain_float() || to == Dtype::Q8_0)
}

/// Converts all of `source` into `target`, which has exactly the needed length; both are aligned as in a
/// [`Buffer`]. Returns the number of finite values that became infinite.
///
/// # Panics
/// If the pair is not [`supported`], or the lengths do not match.
pub fn convert(source: &[u8], from: Dtype, target: &mut [u8], to: Dtype) -> u64 {
    use Dtype::{Bf16, F8E8M0, F16, F32, F64, Q8_0};
    if to == Q8_0 && from != Q8_0 {
        if from == F32 {
            return q8_0::quantize(bytemuck::cast_slice(source), target);
        }
        let mut wide = Buffer::default();
        wide.resize(target.len() / q8_0::BLOCK_BYTES * q8_0::BLOCK * 4);
        let overflowed = convert(source, from, wide.as_mut(), F32);
        return overflowed + convert(wide.as_ref(), F32, target, Q8_0);
    }
    fn each<A: bytemuck::AnyBitPattern, B: bytemuck::Pod>(
        source: &[u8],
        target: &mut [u8],
        f: impl Fn(A) -> B,
    ) {
        let source: &[A] = bytemuck::cast_slice(source);
        let target: &mut [B] = bytemuck::cast_slice_mut(target);
        assert_eq!(source.len(), target.len());
        for (t, s) in target.iter_mut().zip(source) {
            *t = f(*s);
        }
    }
    match (from, to) {
        _ if from == to => target.copy_from_slice(source),
        (Bf16, F32) => each(source, target, |x: u16| (x as u32) << 16),
        (F16, F32) => each(source, target, |x: f16| x.to_f32()),
        (F32, Bf16) => each(source, target, bf16_bits),
        (F32, F16) => each(source, target, f16::from_f32),
        (Bf16, F16) => each(source, target, |x: bf16| f16::from_f32(x.to_f32())),
        (F16, Bf16) => each(source, target, |x: f16| bf16::from_f32(x.to_f32())),
        (Bf16, F64) => each(source, target, |x: bf16| x.to_f64()),
        (F16, F64) => each(source, target, |x: f16| x.to_f64()),
        (F32, F64) => each(source, target, |x: f32| x as f64),
        (F8E8M0, F32) => each(source, target, e8m0_to_f32),
        (F64, F32) => each(source, target, |x: f64| x as f32),
        (F64, Bf16) => each(source, target, |x: f64| bf16_bits(to_odd_f32(x).to_bits())),
        (F64, F16) => each(source, target, |x: f64| f16::from_f32(to_odd_f32(x))),
        _ => panic!("no conversion from {from} to {to}"),
    }
    if from.widens_exactly_to(to) {
        return 0;
    }
    count_infinite(target, to) - count_infinite(source, from)
}

/// Returns the value of a scale in F8_E8M0: a power of two, or NaN.
fn e8m0_to_f32(code: u8) -> f32 {
    if code == 255 { f32::NAN } else { 2f64.powi(code as i32 - 127) as f32 }
}

/// Rounds f64 to f32 to odd, so that a second rounding to 16 bits gives the result of a single one. (The
/// `half` crate drops the low 32 bits of an f64 before it rounds.)
fn to_odd_f32(x: f64) -> f32 {
    let near = x as f32;
    if near as f64 == x || x.is_nan() || near.is_infinite() {
        return near;
    }
    let bits = near.to_bits();
    // Towards zero, then the last bit set: the value lies strictly between two f32.
    let truncated = if (near as f64).abs() > x.abs() { bits - 1 } else { bits };
    f32::from_bits(truncated | 1)
}

/// Returns the number of infinite elements.
fn count_infinite(data: &[u8], dtype: Dtype) -> u64 {
    match dtype {
        Dtype::Bf16 => count(data, |x: u16| x & 0x7fff == 0x7f80),
        Dtype::F16 => count(data, |x: u16| x & 0x7fff == 0x7c00),
        Dtype::F32 => count(data, |x: u32| x & 0x7fff_ffff == 0x7f80_0000),
        Dtype::F64 => count(data, |x: u64| x << 1 == 0x7ff0_0000_0000_0000 << 1),
        _ => 0,
    }
}

/// Returns the number of infinite or NaN elements; 0 for types that have neither.
pub fn count_non_finite(data: &[u8], dtype: Dtype) -> u64 {
    match dtype {
        Dtype::Bf16 => count(data, |x: u16| x & 0x7f80 == 0x7f80),
        Dtype::F16 => count(data, |x: u16| x & 0x7c00 == 0x7c00),
        Dtype::F32 => count(data, |x: u32| x & 0x7f80_0000 == 0x7f80_0000),
        Dtype::F64 => count(data, |x: u64| x & 0x7ff0_0000_0000_0000 == 0x7ff0_0000_0000_0000),
        Dtype::C64 => count(data, |x: u32| x & 0x7f80_0000 == 0x7f80_0000),
        Dtype::F8E5M2 => count(data, |x: u8| x & 0x7c == 0x7c),
        Dtype::F8E4M3 => count(data, |x: u8| x & 0x7f == 0x7f),
        Dtype::F8E4M3Fnuz | Dtype::F8E5M2Fnuz => count(data, |x: u8| x == 0x80),
        Dtype::F8E8M0 => count(data, |x: u8| x == 0xff),
        Dtype::Q8_0 => {
            let scale = |block: &[u8]| f16::from_le_bytes([block[0], block[1]]);
            let blocks = data.chunks_exact(q8_0::BLOCK_BYTES);
            blocks.filter(|block| !scale(block).is_finite()).count() as u64 * q8_0::BLOCK as u64
        }
        _ => 0,
    }
}

fn count<T: bytemuck::AnyBitPattern>(data: &[u8], counts: impl Fn(T) -> bool) -> u64 {
    // Blocks keep the inner counter narrow, so that the loop vectorises.
    let data: &[T] = bytemuck::cast_slice(data);
    data.chunks(1 << 12).map(|block| block.iter().map(|x| counts(*x) as u32).sum::<u32>() as u64).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(source: &[u8], from: Dtype, to: Dtype) -> (Vec<u8>, u64) {
        let mut input = Buffer::default();
        input.resize(source.len()).copy_from_slice(source);
        let elements = source.len() as u64 / from.bytes().unwrap();
        let mut output = Buffer::default();
        output.resize((elements * to.bytes().unwrap()) as usize);
        let overflowed = convert(input.as_ref(), from, output.as_mut(), to);
        (output.as_ref().to_vec(), overflowed)
    }

    #[test]
    fn every_bf16_value_survives_f32_and_back() {
        let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        let (wide, _) = run(&all, Dtype::Bf16, Dtype::F32);
        let (back, overflowed) = run(&wide, Dtype::F32, Dtype::Bf16);
        assert_eq!(overflowed, 0);
        for (i, (a, b)) in all.chunks(2).zip(back.chunks(2)).enumerate() {
            let (a, b) = (u16::from_le_bytes([a[0], a[1]]), u16::from_le_bytes([b[0], b[1]]));
            // A signalling NaN comes back quiet; everything else is the same bits.
            let expected = if bf16::from_bits(a).is_nan() { a | 0x40 } else { a };
            assert_eq!(b, expected, "value {i:#x}");
        }
    }

    #[test]
    fn narrowing_agrees_with_the_half_crate_for_values_around_every_bf16() {
        for high in 0..=u16::MAX {
            for low in [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let bits = ((high as u32) << 16) | low;
                let expected = bf16::from_f32(f32::from_bits(bits));
                assert_eq!(bf16_bits(bits), expected.to_bits(), "{bits:#x}");
            }
        }
    }

    #[test]
    fn overflow_is_counted_and_infinity_is_not_overflow() {
        let values = [1.0f32, 70000.0, f32::INFINITY, f32::NAN, -1e6, f32::MAX];
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        assert_eq!(run(&bytes, Dtype::F32, Dtype::F16).1, 3);
        assert_eq!(run(&bytes, Dtype::F32, Dtype::Bf16).1, 1);
        assert_eq!(run(&bytes, Dtype::F32, Dtype::F64).1, 0);
        assert_eq!(run(&1e300f64.to_le_bytes(), Dtype::F64, Dtype::F32).1, 1);
    }

    #[test]
    fn non_finite_values_are_counted_in_every_float_type() {
        let nan_inf = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, 0.0];
        let bytes: Vec<u8> = nan_inf.iter().flat_map(|x| x.to_le_bytes()).collect();
        assert_eq!(count_non_finite(&bytes, Dtype::F32), 3);
        for (dtype, expected) in [(Dtype::F64, 3), (Dtype::Bf16, 4), (Dtype::F16, 4)] {
            let (data, _) = run(&bytes, Dtype::F32, dtype);
            assert_eq!(count_non_finite(&data, dtype), expected, "{dtype}");
        }
        assert_eq!(count_non_finite(&[0x7c, 0x7b, 0xfe], Dtype::F8E5M2), 2);
        assert_eq!(count_non_finite(&[0x7f, 0x7e, 0xff], Dtype::F8E4M3), 2);
        assert_eq!(count_non_finite(&[0x80, 0x7f], Dtype::F8E4M3Fnuz), 1);
    }

    #[test]
    fn f64_is_rounded_once() {
        // 1 + 2^-8 + 2^-40 lies just above a bf16 tie: rounding through f32 would land on the tie and go
        // down.
        let x = 1.0 + 2f64.powi(-8) + 2f64.powi(-40);
        let (bytes, _) = run(&x.to_le_bytes(), Dtype::F64, Dtype::Bf16);
        assert_eq!(bf16::from_le_bytes([bytes[0], bytes[1]]).to_f64(), 1.0 + 2f64.powi(-7));
    }
}
