//! The precision contract: which tensors must be f32, in which architecture, and why.
//!
//! Pure data and pure functions; nothing here touches a file.
//!
//! - [`dtype`]: the element types that a checkpoint can hold.
//! - [`family`]: which architecture a `config.json` (or a set of tensor names) belongs to.
//! - [`rules`]: the table of intrinsically f32 tensors, and the policies that select from it.
//! - [`holder`]: the `_fp32_params` convention: recognise, route, strip, upcast, force.
//! - [`role`]: what a tensor is for, by its name.

#![forbid(unsafe_code)]

pub mod dtype;
pub mod family;
pub mod holder;
pub mod pattern;
pub mod role;
pub mod rules;

pub use dtype::Dtype;
pub use family::{Architecture, Family};
pub use role::Role;
pub use rules::{Policy, Registry, Rule};

/// The examples of README.md, run as tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
