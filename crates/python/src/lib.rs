//! `ballast._native`: the native module of the Python package `ballast`. It has plain functions and handles; the
//! names, types and documentation for users are in python/ballast.

#![deny(unsafe_code)] // allowed where tensors become slices: ops::arguments

mod command;
mod contract;
mod errors;
mod ops;

/// The native module of the Python package.
#[pyo3::pymodule]
mod _native {
    use ballast_contract::holder;
    use pyo3::prelude::*;

    #[pymodule_export]
    use super::command::{call, run};
    #[pymodule_export]
    use super::contract::{Policy, has_contract, is_param_key, route_param_key, strip_holder_key};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        ballast_kernels::simd::check_setting().map_err(pyo3::exceptions::PyValueError::new_err)?;
        module.add("VERSION", env!("CARGO_PKG_VERSION"))?;
        module.add("HOLDER_NAME", holder::HOLDER_NAME)?;
        module.add("FP32_GDN_PARAM_NAMES", holder::FP32_GDN_PARAM_NAMES.to_vec())?;
        module.add("CONTRACT_ARCHITECTURES", holder::CONTRACT_ARCHITECTURES.to_vec())?;
        super::ops::register(module)
    }
}
