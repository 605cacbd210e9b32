//! `_native.ops`: the kernels on tensors of torch. A function takes its outputs, which the caller has
//! allocated, then the inputs, then settings, and last the number of threads. python/ballast/ops registers
//! them with torch and calls them by the names of their parameters, so these are the signature of an op.

// A parameter is an argument of an op by its name; a struct would hide them from `inspect.signature`.
#![allow(clippy::too_many_arguments)]

#[allow(unsafe_code)]
mod arguments;
mod attention;
mod conv;
mod gated_delta_rule;
mod indexer;
mod linear_cross_entropy;
mod norm;
mod packing;
mod threads;

use pyo3::prelude::*;

/// Adds the module `ops` to `module`.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let ops = PyModule::new(module.py(), "ops")?;
    ops.add_function(wrap_pyfunction!(attention::attention_forward, &ops)?)?;
    ops.add_function(wrap_pyfunction!(attention::attention_backward, &ops)?)?;
    ops.add_function(wrap_pyfunction!(conv::conv_forward, &ops)?)?;
    ops.add_function(wrap_pyfunction!(conv::conv_backward, &ops)?)?;
    ops.add_function(wrap_pyfunction!(gated_delta_rule::gated_delta_rule_forward, &ops)?)?;
    ops.add_function(wrap_pyfunction!(gated_delta_rule::gated_delta_rule_backward, &ops)?)?;
    ops.add_function(wrap_pyfunction!(gated_delta_rule::gated_delta_rule_steps, &ops)?)?;
    ops.add_function(wrap_pyfunction!(indexer::indexer_topk, &ops)?)?;
    ops.add_function(wrap_pyfunction!(indexer::indexer_loss, &ops)?)?;
    ops.add_function(wrap_pyfunction!(linear_cross_entropy::linear_cross_entropy, &ops)?)?;
    ops.add_function(wrap_pyfunction!(norm::gated_rms_norm_forward, &ops)?)?;
    ops.add_function(wrap_pyfunction!(norm::gated_rms_norm_backward, &ops)?)?;
    module.add_submodule(&ops)
}
