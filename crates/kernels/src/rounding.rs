//! Precision of a single site: f32, or results rounded to bf16 or f16.
//!
//! Low precision is emulated: the operation runs in f32 and its result is rounded, as on hardware with an f32
//! accumulator. The values stay in f32 slices, so one kernel serves all precisions.

use crate::simd::simd_fn;

/// Type that results are rounded to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rounding {
    /// No rounding.
    #[default]
    F32,
    /// 8 bits of significand, the range of f32.
    Bf16,
    /// 11 bits of significand; values from 65520 on become infinite.
    F16,
}

impl Rounding {
    /// Rounds to nearest even.
    pub fn round(self, x: f32) -> f32 {
        match self {
            Rounding::F32 => x,
            Rounding::Bf16 => to_bf16(x),
            Rounding::F16 => to_f16(x),
        }
    }

    /// Distance between neighboring values at `x`; `None` if `x` is out of range.
    pub fn ulp(self, x: f64) -> Option<f64> {
        let (digits, smallest, limit) = match self {
            Rounding::F32 => (23, -126, f32::MAX as f64),
            Rounding::Bf16 => (7, -126, f32::MAX as f64),
            Rounding::F16 => (10, -14, 65504.0),
        };
        if !x.is_finite() || x.abs() > limit {
            return None;
        }
        let exponent = if x == 0.0 { smallest } else { (x.abs().log2().floor() as i32).max(smallest) };
        Some(2f64.powi(exponent - digits))
    }

    /// Rounds all of `values`.
    pub fn round_all(self, values: &mut [f32]) {
        match self {
            Rounding::F32 => {}
            Rounding::Bf16 => all_to_bf16(values),
            Rounding::F16 => all_to_f16(values),
        }
    }
}

#[inline(always)]
pub(crate) fn to_bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) & 0xffff_0000;
    f32::from_bits(if x.is_nan() { bits } else { rounded })
}

#[inline(always)]
pub(crate) fn to_f16(x: f32) -> f32 {
    let bits = x.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    let normal = (magnitude + 0xfff + ((magnitude >> 13) & 1)) & !0x1fff;
    // 65536 and above overflow.
    let normal = if normal >= 0x4780_0000 { 0x7f80_0000 } else { normal };
    // Below 2^-14 the step is 2^-24, which is that of an f32 just above one half.
    let subnormal = ((f32::from_bits(magnitude) + 0.5) - 0.5).to_bits();
    let rounded = if magnitude < 0x3880_0000 { subnormal } else { normal };
    f32::from_bits(if x.is_nan() { bits } else { rounded | (bits & 0x8000_0000) })
}

simd_fn! {
    fn all_to_bf16(values: &mut [f32]) {
        for x in values {
            *x = to_bf16(*x);
        }
    }
}

simd_fn! {
    fn all_to_f16(values: &mut [f32]) {
        for x in values {
            *x = to_f16(*x);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    #[test]
    fn neighbours_are_two_apart_at_256_in_bf16() {
        assert_eq!(Rounding::Bf16.ulp(256.0), Some(2.0));
        assert_eq!(Rounding::Bf16.ulp(-511.0), Some(2.0));
        assert_eq!(Rounding::Bf16.ulp(512.0), Some(4.0));
        assert_eq!(Rounding::F16.ulp(1.0), Some(2f64.powi(-10)));
        assert_eq!(Rounding::F16.ulp(70000.0), None);
        assert_eq!(Rounding::F32.ulp(1.5), Some(f32::EPSILON as f64));
    }

    #[test]
    fn a_rounded_number_moves_by_half_an_ulp_at_most() {
        for i in 1..2000 {
            let x = (i as f32 * 0.005).exp2() - 0.9;
            for dtype in [Rounding::Bf16, Rounding::F16] {
                let moved = (dtype.round(x) as f64 - x as f64).abs();
                assert!(moved <= 0.5 * dtype.ulp(x as f64).unwrap(), "{x}");
            }
        }
    }

    #[test]
    fn rounding_agrees_with_the_half_crate_all_over_f32() {
        let mut compared = 0;
        for bits in (0..=u32::MAX).step_by(1009).chain((0..=u16::MAX as u32).flat_map(|high| {
            [0u32, 1, 0xfff, 0x1000, 0x1001, 0x3000, 0x7fff, 0x8000, 0x8001, 0xffff]
                .map(|low| high << 16 | low)
        })) {
            let x = f32::from_bits(bits);
            for (got, expected) in [
                (Rounding::Bf16.round(x), bf16::from_f32(x).to_f32()),
                (Rounding::F16.round(x), f16::from_f32(x).to_f32()),
                (Rounding::F32.round(x), x),
            ] {
                assert!(got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan(), "{x:e}");
                compared += 1;
            }
        }
        assert!(compared > 10_000_000);
    }

    #[test]
    fn a_slice_is_rounded_as_its_values_are() {
        let values: Vec<f32> = (0..100).map(|i| (i as f32 * 0.7).sin() * 10f32.powi(i % 12 - 6)).collect();
        for precision in [Rounding::F32, Rounding::Bf16, Rounding::F16] {
            let mut all = values.clone();
            precision.round_all(&mut all);
            assert!(all.iter().zip(&values).all(|(a, x)| a.to_bits() == precision.round(*x).to_bits()));
        }
    }
}
