//! What the benchmarks share: made-up inputs, one piece of work per kernel, medians, memory.

pub mod cases;
pub mod measure;
