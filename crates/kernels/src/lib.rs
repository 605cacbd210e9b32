//! The mathematics of hybrid Gated-DeltaNet models on a CPU.
//!
//! Slices in, slices out: no model, no file, no allocation that the caller cannot see. One operation, one
//! module: its maths in the header, a plain reference, the fast path, its backward, its scratch, its tests.
//!
//! Conventions:
//! - outputs first, then inputs, then sizes; a gradient has its tensor's name with a `d`;
//! - tensors are row-major; shapes stand at the top of a function;
//! - storage is f32 or bf16 ([`Element`]), arithmetic is f32, parameter gradients accumulate in f32;
//! - the same bits for any number of threads: work is divided by the shape alone, and no sum depends on an
//!   order that threads decide.

// Outputs, then inputs, then sizes: the grammar of a kernel's arguments; indices are its mathematics; constants are
// written with the digits they were computed with.
#![allow(clippy::too_many_arguments, clippy::needless_range_loop, clippy::excessive_precision)]

pub mod adamw;
pub mod attention;
pub mod conv;
pub mod element;
pub mod elementwise;
pub mod embedding;
pub mod error;
pub mod gated_delta_rule;
pub mod glu;
pub mod indexer;
pub mod linear;
pub mod linear_cross_entropy;
pub mod matmul;
pub mod moe;
pub mod muon;
pub mod norm;
pub mod packing;
mod partition;
pub mod rotary;
pub mod rounding;
pub mod scratch;
mod shared;
pub mod simd;
#[cfg(test)]
mod testing;

pub use element::Element;
pub use error::{KernelError, Result};
pub use rounding::Rounding;
pub use scratch::Scratch;
