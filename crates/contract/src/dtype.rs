//! The element types of the safetensors format, and those of GGUF that Ballast writes.

use std::fmt;

/// An element type of the safetensors format, or a block type of GGUF.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)] // the names are the documentation
pub enum Dtype {
    Bool,
    F4,
    F6E2M3,
    F6E3M2,
    U8,
    I8,
    F8E5M2,
    F8E4M3,
    F8E8M0,
    F8E4M3Fnuz,
    F8E5M2Fnuz,
    Q8_0,
    I16,
    U16,
    F16,
    Bf16,
    I32,
    U32,
    F32,
    C64,
    F64,
    I64,
    U64,
}

/// Name in the file and width in bits of every element type.
const TABLE: [(Dtype, &str, u64); 23] = [
    (Dtype::Bool, "BOOL", 8),
    (Dtype::F4, "F4", 4),
    (Dtype::F6E2M3, "F6_E2M3", 6),
    (Dtype::F6E3M2, "F6_E3M2", 6),
    (Dtype::U8, "U8", 8),
    (Dtype::I8, "I8", 8),
    (Dtype::F8E5M2, "F8_E5M2", 8),
    (Dtype::F8E4M3, "F8_E4M3", 8),
    (Dtype::F8E8M0, "F8_E8M0", 8),
    (Dtype::F8E4M3Fnuz, "F8_E4M3FNUZ", 8),
    (Dtype::F8E5M2Fnuz, "F8_E5M2FNUZ", 8),
    (Dtype::Q8_0, "Q8_0", 8),
    (Dtype::I16, "I16", 16),
    (Dtype::U16, "U16", 16),
    (Dtype::F16, "F16", 16),
    (Dtype::Bf16, "BF16", 16),
    (Dtype::I32, "I32", 32),
    (Dtype::U32, "U32", 32),
    (Dtype::F32, "F32", 32),
    (Dtype::C64, "C64", 64),
    (Dtype::F64, "F64", 64),
    (Dtype::I64, "I64", 64),
    (Dtype::U64, "U64", 64),
];

impl Dtype {
    /// All element types, narrowest first.
    pub fn all() -> impl Iterator<Item = Dtype> {
        TABLE.iter().map(|row| row.0)
    }

    /// Returns the type with this name in a file.
    pub fn from_name(name: &str) -> Option<Dtype> {
        TABLE.iter().find(|row| row.1 == name).map(|row| row.0)
    }

    /// Returns the name in a file.
    pub fn name(self) -> &'static str {
        TABLE[self as usize].1
    }

    /// Width of one element in bits.
    pub fn bits(self) -> u64 {
        TABLE[self as usize].2
    }

    /// Number of elements and bytes of a block, for types that store a scale for each block of elements.
    pub fn block(self) -> Option<(u64, u64)> {
        (self == Dtype::Q8_0).then_some((32, 34))
    }

    /// Width of one element in bytes; `None` for types narrower than a byte and for block types.
    pub fn bytes(self) -> Option<u64> {
        if self.block().is_some() {
            return None;
        }
        self.bits().is_multiple_of(8).then(|| self.bits() / 8)
    }

    /// Number of bytes of `elements` elements; `None` if it overflows or is not a whole number.
    pub fn bytes_for(self, elements: u64) -> Option<u64> {
        if let Some((block, bytes)) = self.block() {
            return elements.is_multiple_of(block).then(|| (elements / block).checked_mul(bytes))?;
        }
        let bits = elements.checked_mul(self.bits())?;
        bits.is_multiple_of(8).then_some(bits / 8)
    }

    /// Returns true for the floats that need no scale: F16, BF16, F32 and F64.
    pub fn is_plain_float(self) -> bool {
        matches!(self, Dtype::F16 | Dtype::Bf16 | Dtype::F32 | Dtype::F64)
    }

    /// Returns true for types that need a scale: floats of at most 8 bits, and block types.
    pub fn is_scaled_float(self) -> bool {
        use Dtype::*;
        matches!(self, F4 | F6E2M3 | F6E3M2 | F8E5M2 | F8E4M3 | F8E8M0 | F8E4M3Fnuz | F8E5M2Fnuz | Q8_0)
    }

    /// Returns true if `other` can represent every value of `self`.
    pub fn widens_exactly_to(self, other: Dtype) -> bool {
        use Dtype::*;
        self == other || matches!((self, other), (F16 | Bf16, F32 | F64) | (F32, F64))
    }

    /// Returns the narrowest type that can represent every value of both, for plain floats.
    pub fn promote(self, other: Dtype) -> Option<Dtype> {
        [self, other, Dtype::F32]
            .into_iter()
            .find(|d| self.widens_exactly_to(*d) && other.widens_exactly_to(*d))
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl serde::Serialize for Dtype {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> serde::Deserialize<'de> for Dtype {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
        Dtype::from_name(&name).ok_or_else(|| serde::de::Error::custom(format!("unknown dtype {name:?}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_dtype_stands_at_its_own_row_and_parses_back() {
        for (i, dtype) in Dtype::all().enumerate() {
            assert_eq!(dtype as usize, i);
            assert_eq!(Dtype::from_name(dtype.name()), Some(dtype));
        }
        assert_eq!(Dtype::all().count(), 23);
    }

    #[test]
    fn sub_byte_types_need_whole_bytes() {
        assert_eq!(Dtype::F4.bytes_for(3), None);
        assert_eq!(Dtype::F4.bytes_for(4), Some(2));
        assert_eq!(Dtype::F6E2M3.bytes_for(4), Some(3));
        assert_eq!(Dtype::F32.bytes_for(u64::MAX), None);
    }

    #[test]
    fn blocks_need_whole_blocks() {
        assert_eq!(Dtype::Q8_0.bytes_for(64), Some(68));
        assert_eq!(Dtype::Q8_0.bytes_for(63), None);
        assert_eq!(Dtype::Q8_0.bytes_for(u64::MAX - 31), None);
        assert_eq!(Dtype::Q8_0.bytes(), None);
    }

    #[test]
    fn promotion_never_loses_a_value() {
        assert_eq!(Dtype::F16.promote(Dtype::Bf16), Some(Dtype::F32));
        assert_eq!(Dtype::Bf16.promote(Dtype::Bf16), Some(Dtype::Bf16));
        assert_eq!(Dtype::Bf16.promote(Dtype::F32), Some(Dtype::F32));
        assert_eq!(Dtype::F64.promote(Dtype::F32), Some(Dtype::F64));
        assert_eq!(Dtype::I8.promote(Dtype::F32), None);
    }
}
