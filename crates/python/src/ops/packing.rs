//! Offsets of the sequences of a batch or a packing.

use pyo3::prelude::*;

use super::arguments::{Arguments, Tensor};
use crate::errors::UsageError;

/// Returns the given offsets, which must end with the number of tokens, or those of `batch` sequences of `tokens`
/// tokens.
pub fn offsets(
    arguments: &mut Arguments,
    cu_seqlens: Option<&Tensor<'_>>,
    batch: usize,
    tokens: usize,
) -> PyResult<Vec<usize>> {
    let all = batch
        .checked_mul(tokens)
        .ok_or_else(|| UsageError::new_err(format!("too many tokens: {batch} x {tokens}")))?;
    let Some(cu_seqlens) = cu_seqlens else {
        return Ok((0..=batch).map(|i| i * tokens).collect());
    };
    let given: &[i64] = arguments.input("cu_seqlens", cu_seqlens)?;
    let offsets: Vec<usize> = given
        .iter()
        .map(|offset| usize::try_from(*offset))
        .collect::<Result<_, _>>()
        .map_err(|_| UsageError::new_err("cu_seqlens must not be negative"))?;
    let found = ballast_kernels::packing::check_cu_seqlens(&offsets)
        .map_err(|error| UsageError::new_err(error.to_string()))?;
    if found != all {
        return Err(UsageError::new_err(format!(
            "cu_seqlens must end with the number of tokens, {all}, got {found}"
        )));
    }
    Ok(offsets)
}
