//! Exceptions of `ballast.errors`.

use ballast_ml::Failure;
use pyo3::PyErr;

pyo3::import_exception!(ballast.errors, CheckFailed);
pyo3::import_exception!(ballast.errors, UsageError);
pyo3::import_exception!(ballast.errors, InputError);
pyo3::import_exception!(ballast.errors, SpaceError);
pyo3::import_exception!(ballast.errors, NonFiniteError);

/// Returns the exception for a failed command, by its exit code.
pub(crate) fn exception(failure: Failure) -> PyErr {
    let args = (failure.message, failure.file, failure.tensor, failure.byte);
    match failure.code {
        1 => CheckFailed::new_err(args),
        2 => UsageError::new_err(args),
        4 => SpaceError::new_err(args),
        5 => NonFiniteError::new_err(args),
        _ => InputError::new_err(args),
    }
}
