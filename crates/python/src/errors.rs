//! The exceptions of `ballast.errors`.

pyo3::import_exception!(ballast.errors, UsageError);
