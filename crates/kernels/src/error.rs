//! Errors: shapes that do not match, settings out of range.

/// Result of a kernel.
pub type Result<T = (), E = KernelError> = std::result::Result<T, E>;

/// An invalid argument.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KernelError {
    /// A slice of the wrong length.
    #[error("{name} must have {expected} elements, got {found}")]
    Length {
        /// Name of the argument.
        name: &'static str,
        /// Number of elements that the shape has.
        expected: usize,
        /// Number of elements of the slice.
        found: usize,
    },
    /// A size or setting out of range.
    #[error("{0}")]
    Shape(String),
    /// Gradients with a non-finite norm.
    #[error("gradient norm is non-finite: {0}")]
    Norm(String),
}

/// Returns an error unless the slice has `expected` elements.
pub(crate) fn check_len<T>(name: &'static str, slice: &[T], expected: usize) -> Result {
    if slice.len() == expected {
        Ok(())
    } else {
        Err(KernelError::Length { name, expected, found: slice.len() })
    }
}

/// Number of elements of a shape; an error if it does not fit in a `usize`. The product of the non-zero sizes
/// must fit too, so the product of any sizes of a checked shape fits, and offsets computed from them do not
/// wrap.
pub(crate) fn elements<const N: usize>(name: &'static str, shape: [usize; N]) -> Result<usize> {
    let product = shape.iter().filter(|size| **size > 0).try_fold(1usize, |all, size| all.checked_mul(*size));
    match product {
        Some(product) => Ok(if shape.contains(&0) { 0 } else { product }),
        None => {
            Err(KernelError::Shape(format!("{name}: shape {shape:?} has more elements than memory can hold")))
        }
    }
}

/// Returns an error unless the slice has exactly the elements of its shape.
pub(crate) fn check_shape<T, const N: usize>(name: &'static str, slice: &[T], shape: [usize; N]) -> Result {
    check_len(name, slice, elements(name, shape)?)
}

/// Returns the error `why` unless `holds`.
pub(crate) fn check(holds: bool, why: impl FnOnce() -> String) -> Result {
    if holds { Ok(()) } else { Err(KernelError::Shape(why())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_whose_elements_cannot_be_counted_is_refused_also_beside_a_size_of_zero() {
        let huge = 1 << 33;
        assert_eq!(elements("x", [2, 3, 4]), Ok(24));
        assert_eq!(elements("x", [0, huge]), Ok(0));
        for shape in [[huge, huge, 1], [huge, huge, 0], [0, huge, huge]] {
            assert!(matches!(elements("x", shape), Err(KernelError::Shape(_))), "{shape:?}");
            assert!(check_shape::<f32, 3>("x", &[], shape).is_err(), "{shape:?}");
        }
    }
}
