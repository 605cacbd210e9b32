//! Detection of f32 values that were rounded to fewer bits before they were stored.

use half::{bf16, f16};
use serde::Serialize;

/// A float type narrower than f32.
///
/// Types of 8 bits need no variant: their values are bf16 values too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)] // the names are the documentation
pub enum Narrow {
    Bf16,
    F16,
    Tf32,
}

impl Narrow {
    /// All types, in the order in which they are tried.
    pub const ALL: [Narrow; 3] = [Narrow::Bf16, Narrow::F16, Narrow::Tf32];

    /// Returns the name in a report.
    pub fn name(self) -> &'static str {
        match self {
            Narrow::Bf16 => "bf16",
            Narrow::F16 => "f16",
            Narrow::Tf32 => "tf32",
        }
    }

    /// Rounds to nearest even.
    pub fn round(self, x: f32) -> f32 {
        match self {
            Narrow::Bf16 => bf16::from_f32(x).to_f32(),
            Narrow::F16 => f16::from_f32(x).to_f32(),
            Narrow::Tf32 if x.is_finite() => {
                let bits = x.to_bits();
                f32::from_bits((bits + 0xfff + ((bits >> 13) & 1)) & !0x1fff)
            }
            Narrow::Tf32 => x,
        }
    }

    /// Returns true if the type represents `x` exactly; a NaN has no bits to lose.
    pub fn represents(self, x: f32) -> bool {
        match self {
            _ if x.is_nan() => true,
            Narrow::Bf16 => x.to_bits() & 0xffff == 0,
            Narrow::F16 => f16::from_f32(x).to_f32().to_bits() == x.to_bits(),
            Narrow::Tf32 => x.to_bits() & 0x1fff == 0,
        }
    }

    /// Returns half the distance between adjacent values at `x`: the bound of a rounding error.
    pub fn half_step(self, x: f32) -> f64 {
        let (significant_bits, least_exponent) = match self {
            Narrow::Bf16 => (8, -126),
            Narrow::F16 => (11, -14),
            Narrow::Tf32 => (11, -126),
        };
        let exponent = ((x.to_bits() >> 23) & 0xff) as i32 - 127;
        2f64.powi(exponent.max(least_exponent) - significant_bits)
    }
}

impl std::fmt::Display for Narrow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// The types that represent all values of a tensor, which is examined in one or several parts.
#[derive(Clone, Copy, Debug)]
pub struct Fit {
    values: u64,
    beyond: [u64; Narrow::ALL.len()],
    range: (f32, f32),
}

impl Default for Fit {
    fn default() -> Fit {
        Fit { values: 0, beyond: [0; 3], range: (f32::INFINITY, f32::NEG_INFINITY) }
    }
}

impl Fit {
    /// Examines values.
    pub fn of(values: &[f32]) -> Fit {
        let mut fit = Fit { values: values.len() as u64, ..Fit::default() };
        for &x in values {
            for (beyond, narrow) in fit.beyond.iter_mut().zip(Narrow::ALL) {
                *beyond += !narrow.represents(x) as u64;
            }
            fit.range = (fit.range.0.min(x), fit.range.1.max(x));
        }
        fit
    }

    /// Adds the values of another part.
    pub fn add(&mut self, other: &Fit) {
        self.values += other.values;
        for (sum, beyond) in self.beyond.iter_mut().zip(other.beyond) {
            *sum += beyond;
        }
        self.range = (self.range.0.min(other.range.0), self.range.1.max(other.range.1));
    }

    /// Number of values that a type cannot represent.
    pub fn beyond(&self, narrow: Narrow) -> u64 {
        self.beyond[narrow as usize]
    }

    /// Returns the first type that represents all values; none if there is no value.
    pub fn narrowest(&self) -> Option<Narrow> {
        Narrow::ALL.into_iter().find(|narrow| self.values > 0 && self.beyond(*narrow) == 0)
    }

    /// Returns the type that the values look rounded to. A constant tensor (all ones, all zeros) is an initial
    /// value and proves no rounding.
    pub fn rounded_to(&self) -> Option<Narrow> {
        self.narrowest().filter(|_| self.range.0 < self.range.1)
    }
}

/// Returns the type that the values of a tensor look rounded to: they are not all the same, and it represents
/// all of them exactly.
///
/// ```
/// use ballast_contract::rounded::{Narrow, rounded_to};
/// assert_eq!(rounded_to(&[0.5, 1.25]), Some(Narrow::Bf16));
/// assert_eq!(rounded_to(&[0.5, 1.0 + 2f32.powi(-10)]), Some(Narrow::F16));
/// assert_eq!(rounded_to(&[0.1, 0.2]), None);
/// assert_eq!(rounded_to(&[1.0, 1.0]), None);
/// ```
pub fn rounded_to(values: &[f32]) -> Option<Narrow> {
    Fit::of(values).rounded_to()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn() -> impl Iterator<Item = f32> {
        (1..2000u32).map(|i| (i as f32 * 0.618_034).fract() * 8.0 - 4.0)
    }

    #[test]
    fn rounded_values_are_recognized_and_others_are_not() {
        let all: Vec<f32> = drawn().collect();
        assert_eq!(rounded_to(&all), None);
        for narrow in Narrow::ALL {
            let rounded: Vec<f32> = all.iter().map(|x| narrow.round(*x)).collect();
            assert!(rounded.iter().all(|x| narrow.represents(*x)));
            // All but the smallest of these are f16 values too: TF32 has its bits and a larger range.
            let expected = if narrow == Narrow::Tf32 { Narrow::F16 } else { narrow };
            let near_zero: Vec<f32> = rounded.iter().map(|x| x * 2f32.powi(-40)).collect();
            assert_eq!(
                rounded_to(&near_zero),
                Some(if narrow == Narrow::F16 { Narrow::Tf32 } else { narrow })
            );
            let normal: Vec<f32> = rounded.into_iter().filter(|x| x.abs() > 1e-4).collect();
            assert_eq!(rounded_to(&normal), Some(expected));
            // One value with more bits is enough.
            assert_eq!(rounded_to(&[&normal[..], &[1.0 + 2f32.powi(-20)]].concat()), None);
        }
    }

    #[test]
    fn constants_nan_and_no_values_prove_nothing() {
        for values in [&[][..], &[1.0], &[0.0; 7], &[-0.0, 0.0], &[f32::NAN, f32::NAN], &[1.0, f32::NAN]] {
            assert_eq!(rounded_to(values), None, "{values:?}");
        }
        assert_eq!(Fit::of(&[1.0; 3]).narrowest(), Some(Narrow::Bf16));
        assert_eq!(Fit::of(&[]).narrowest(), None);
    }

    #[test]
    fn parts_give_the_result_of_the_whole() {
        let values = [0.5, 1.0 + 2f32.powi(-10), 0.5, 0.5];
        let mut fit = Fit::default();
        for part in values.chunks(2) {
            fit.add(&Fit::of(part));
        }
        assert_eq!(fit.rounded_to(), Some(Narrow::F16));
        assert_eq!((fit.beyond(Narrow::Bf16), fit.beyond(Narrow::F16)), (1, 0));
    }

    #[test]
    fn half_a_step_is_half_the_distance_to_the_next_value() {
        for x in [1.0f32, 1.5, 2.0, -2.7, 0.3, 1e-3, 1e-6] {
            let here = bf16::from_f32(x);
            let next = bf16::from_bits(here.to_bits() + 1);
            assert_eq!(Narrow::Bf16.half_step(x), (next.to_f64() - here.to_f64()).abs() / 2.0, "{x}");
            let here = f16::from_f32(x);
            let next = f16::from_bits(here.to_bits() + 1);
            assert_eq!(Narrow::F16.half_step(x), (next.to_f64() - here.to_f64()).abs() / 2.0, "{x}");
        }
        assert_eq!(Narrow::Tf32.half_step(1e-6), Narrow::Bf16.half_step(1e-6) / 8.0);
    }
}
