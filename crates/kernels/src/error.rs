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

/// An error that says why a shape is impossible, unless `holds`.
pub(crate) fn check(holds: bool, why: impl FnOnce() -> String) -> Result {
    if holds { Ok(()) } else { Err(KernelError::Shape(why())) }
}
