//! The precision contract: which tensors must be f32, in which architecture, and why.
//!
//! Data and pure functions, no I/O.
//!
//! - [`dtype`]: the element types of the safetensors format.
//! - [`family`]: the architecture of a checkpoint, from its `config.json` or its tensor names.
//! - [`rules`]: the table of tensors that must be f32, and the policies that select from it.
//! - [`holder`]: the `_fp32_params` convention: recognize, route, strip, upcast, force.
//! - [`pattern`]: patterns over tensor names.
//! - [`role`]: the role of a tensor in a model, by its name.
//! - [`rounded`]: f32 values that were rounded to bf16, f16 or fewer bits before.

#![forbid(unsafe_code)]

pub mod dtype;
pub mod family;
pub mod holder;
mod kind;
pub mod pattern;
mod releases;
pub mod role;
pub mod rounded;
pub mod rules;
mod structure;

pub use dtype::Dtype;
pub use family::{Architecture, Family};
pub use kind::ErrorKind;
pub use releases::Release;
pub use role::Role;
pub use rules::{Policy, Registry, Rule};

/// The examples of README.md, run as tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
