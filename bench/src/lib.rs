//! Shared code of the benchmarks: inputs, one case per kernel, medians, memory.

#![forbid(unsafe_code)]

pub mod cases;
pub mod measure;
