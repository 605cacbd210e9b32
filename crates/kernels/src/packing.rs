//! Packed sequences: sequences of any lengths, end to end. A batch is a packing of equal lengths.

use crate::error::{KernelError, Result, check};

/// Returns the number of tokens; an error unless the offsets start with 0 and never decrease.
pub fn check_cu_seqlens(cu_seqlens: &[usize]) -> Result<usize, KernelError> {
    check(cu_seqlens.first() == Some(&0), || "cu_seqlens must start with 0".into())?;
    check(cu_seqlens.windows(2).all(|w| w[0] <= w[1]), || "cu_seqlens must not decrease".into())?;
    Ok(cu_seqlens[cu_seqlens.len() - 1])
}

/// Returns the number of keys if `before` of them precede the first query of the first sequence.
pub(crate) fn check_before(before: usize, cu_seqlens: &[usize]) -> Result<usize, KernelError> {
    check(before == 0 || cu_seqlens.len() > 1, || {
        format!("{before} keys before the first sequence need a sequence")
    })?;
    let tokens = cu_seqlens.last().copied().unwrap_or(0);
    before
        .checked_add(tokens)
        .ok_or_else(|| KernelError::Shape(format!("too many keys: {before} + {tokens}")))
}
