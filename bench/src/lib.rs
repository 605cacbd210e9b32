//! Shared code of the benchmarks: inputs, one case per kernel, medians, memory.

pub mod cases;
pub mod measure;
