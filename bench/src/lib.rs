//! What the benchmarks share: made-up inputs, one piece of work per kernel, medians, memory.

#![forbid(unsafe_code)]

pub mod cases;
pub mod measure;
