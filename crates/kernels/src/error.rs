//! Shapes that do not fit together.

/// Shorthand for results of this crate.
pub type Result<T = (), E = KernelError> = std::result::Result<T, E>;

/// An argument that cannot be worked with.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KernelError {
    /// A slice of the wrong length.
    #[error("{name} has {found} elements where the shape makes {expected}")]
    Length {
        /// The argument.
        name: &'static str,
        /// What the shape makes.
        expected: usize,
        /// What was given.
        found: usize,
    },
    /// A size or setting that the operation cannot have.
    #[error("{0}")]
    Shape(String),
    /// Gradients whose norm is not finite: clipping by it would spread it.
    #[error("the norm of the gradients is {0}")]
    Norm(String),
}

/// An error unless the slice is as long as its shape says.
pub(crate) fn check_len<T>(name: &'static str, slice: &[T], expected: usize) -> Result {
    if slice.len() == expected {
        Ok(())
    } else {
        Err(KernelError::Length { name, expected, found: slice.len() })
    }
}

/// Number of elements of a shape; an error where it does not fit in a `usize`. A size of 0 hides nothing: the other sizes
/// must still fit, so every product of some sizes of a shape that passed fits as well, and offsets made of them do not wrap.
pub(crate) fn elements<const N: usize>(name: &'static str, shape: [usize; N]) -> Result<usize> {
    let product = shape.iter().filter(|size| **size > 0).try_fold(1usize, |all, size| all.checked_mul(*size));
    match product {
        Some(product) => Ok(if shape.contains(&0) { 0 } else { product }),
        None => Err(KernelError::Shape(format!(
            "{name}: the shape {shape:?} has more elements than memory can hold"
        ))),
    }
}

/// Returns an error unless the slice has exactly the elements of its shape.
pub(crate) fn check_shape<T, const N: usize>(name: &'static str, slice: &[T], shape: [usize; N]) -> Result {
    check_len(name, slice, elements(name, shape)?)
}

/// An error that says why a shape is impossible, unless `holds`.
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
