//! Storage types of tensors: f32, and bf16, which is widened on load and rounded once on store.

use half::bf16;

use crate::simd::{Level, level, simd_fn};

/// Storage type of a tensor. Arithmetic is always f32.
pub trait Element: bytemuck::Pod + Default + Send + Sync + PartialEq + std::fmt::Debug {
    /// Name in the safetensors format.
    const NAME: &'static str;
    /// Widens to f32, exactly.
    fn to_f32(self) -> f32;
    /// Rounds to nearest even.
    fn from_f32(x: f32) -> Self;
    /// Widens all of `source`.
    fn load(target: &mut [f32], source: &[Self]);
    /// Rounds all of `source`.
    fn store(target: &mut [Self], source: &[f32]);
    /// Returns the slice itself if it is f32.
    fn as_f32(slice: &[Self]) -> Option<&[f32]>;
    /// Returns the slice itself if it is f32.
    fn as_f32_mut(slice: &mut [Self]) -> Option<&mut [f32]>;
    /// Returns the slice itself if it is bf16.
    fn as_bf16(slice: &[Self]) -> Option<&[bf16]>;
}

impl Element for f32 {
    const NAME: &'static str = "F32";

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }

    #[inline(always)]
    fn from_f32(x: f32) -> f32 {
        x
    }

    fn load(target: &mut [f32], source: &[f32]) {
        target.copy_from_slice(source);
    }

    fn store(target: &mut [f32], source: &[f32]) {
        target.copy_from_slice(source);
    }

    fn as_f32(slice: &[f32]) -> Option<&[f32]> {
        Some(slice)
    }

    fn as_f32_mut(slice: &mut [f32]) -> Option<&mut [f32]> {
        Some(slice)
    }

    fn as_bf16(_: &[f32]) -> Option<&[bf16]> {
        None
    }
}

impl Element for bf16 {
    const NAME: &'static str = "BF16";

    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits((self.to_bits() as u32) << 16)
    }

    #[inline(always)]
    fn from_f32(x: f32) -> bf16 {
        bf16::from_bits(bf16_bits(x))
    }

    fn load(target: &mut [f32], source: &[bf16]) {
        widen_bf16(target, source);
    }

    fn store(target: &mut [bf16], source: &[f32]) {
        assert_eq!(target.len(), source.len());
        #[cfg(target_arch = "x86_64")]
        if level() >= Level::Avx512 {
            // SAFETY: this machine has the level.
            return unsafe { round_bf16_avx512(target, source) };
        }
        round_bf16(target, source);
    }

    fn as_f32(_: &[bf16]) -> Option<&[f32]> {
        None
    }

    fn as_f32_mut(_: &mut [bf16]) -> Option<&mut [f32]> {
        None
    }

    fn as_bf16(slice: &[bf16]) -> Option<&[bf16]> {
        Some(slice)
    }
}

/// Bits of x rounded to nearest even; a NaN stays a NaN.
#[inline(always)]
fn bf16_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
    let nan = ((bits >> 16) | 0x40) as u16;
    if bits & 0x7fff_ffff > 0x7f80_0000 { nan } else { rounded }
}

simd_fn! {
    fn widen_bf16(target: &mut [f32], source: &[bf16]) {
        assert_eq!(target.len(), source.len());
        for (t, s) in target.iter_mut().zip(source) {
            *t = s.to_f32();
        }
    }
}

/// [`round_bf16`], whose narrowing AVX2 has no instruction for.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn round_bf16_avx512(target: &mut [bf16], source: &[f32]) {
    use std::arch::x86_64::*;

    let (whole, rest) = source.as_chunks::<16>();
    let (narrow, narrow_rest) = target.split_at_mut(16 * whole.len());
    for (t, s) in narrow.as_chunks_mut::<16>().0.iter_mut().zip(whole) {
        // SAFETY: both have sixteen elements.
        unsafe {
            let x = _mm512_loadu_ps(s.as_ptr());
            let bits = _mm512_castps_si512(x);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
            let quiet = _mm512_mask_or_epi32(up, nan, bits, _mm512_set1_epi32(0x40_0000));
            let words = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(quiet));
            _mm256_storeu_si256(t.as_mut_ptr().cast(), words);
        }
    }
    for (t, s) in narrow_rest.iter_mut().zip(rest) {
        *t = half::bf16::from_bits(bf16_bits(*s));
    }
}

simd_fn! {
    fn round_bf16(target: &mut [bf16], source: &[f32]) {
        assert_eq!(target.len(), source.len());
        for (t, s) in target.iter_mut().zip(source) {
            *t = bf16::from_f32(*s);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_agrees_with_the_half_crate_around_every_bf16_value() {
        for high in 0..=u16::MAX {
            for low in [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let x = f32::from_bits(((high as u32) << 16) | low);
                assert_eq!(
                    <bf16 as Element>::from_f32(x).to_bits(),
                    half::bf16::from_f32(x).to_bits(),
                    "{x:e}"
                );
            }
        }
    }

    #[test]
    fn every_way_to_round_a_slice_gives_the_same_bits() {
        let around =
            |high: u16| [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff].map(|low| ((high as u32) << 16) | low);
        let all: Vec<f32> = (0..=u16::MAX).flat_map(around).map(f32::from_bits).collect();
        // Lengths with and without a rest.
        for part in [&all[..], &all[5..1000], &all[100_000..100_007], &[]] {
            let (mut chosen, mut plain) = (vec![bf16::ZERO; part.len()], vec![bf16::ZERO; part.len()]);
            bf16::store(&mut chosen, part);
            round_bf16(&mut plain, part);
            let differ = chosen.iter().zip(&plain).zip(part).find(|((a, b), _)| a.to_bits() != b.to_bits());
            assert_eq!(differ, None);
            let exact = part.iter().map(|x| <bf16 as Element>::from_f32(*x).to_bits());
            assert!(chosen.iter().map(|x| x.to_bits()).eq(exact));
        }
    }

    #[test]
    fn a_bf16_value_survives_load_and_store() {
        let all: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).filter(|x| !x.is_nan()).collect();
        let mut wide = vec![0.0; all.len()];
        let mut back = vec![bf16::ZERO; all.len()];
        bf16::load(&mut wide, &all);
        bf16::store(&mut back, &wide);
        assert!(all.iter().zip(&back).all(|(a, b)| a.to_bits() == b.to_bits()));
    }
}
