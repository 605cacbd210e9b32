#![doc = include_str!("../README.md")]
// Outputs, then inputs, then sizes: the grammar of a kernel's arguments; indices are its mathematics;
// constants are written with the digits they were computed with.
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
pub mod moments;
pub mod muon;
pub mod norm;
pub mod packing;
mod partition;
pub mod remainder;
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
