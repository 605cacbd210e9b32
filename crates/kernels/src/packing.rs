//! Packed sequences: sequences of any lengths, end to end. A batch is a packing of equal lengths.

use crate::error::{KernelError, Result, check};

/// Returns the number of tokens; an error unless the offsets start with 0 and never decrease.
pub fn check_cu_seqlens(cu_seqlens: &[usize]) -> Result<usize, KernelError> {
    check(cu_seqlens.first() == Some(&0), || "cu_seqlens must start with 0".into())?;
    check(cu_seqlens.windows(2).all(|w| w[0] <= w[1]), || "cu_seqlens must not decrease".into())?;
    Ok(cu_seqlens[cu_seqlens.len() - 1])
}
