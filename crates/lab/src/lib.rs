//! What each precision choice costs on a model: the same input under a reference and under several policies, compared.
//!
//! [`Findings`] is everything that a run of the lab found, as plain data.

// Outputs, then inputs, then sizes: the grammar of the kernels.
#![allow(clippy::too_many_arguments)]

pub mod findings;
pub mod reference;
pub mod report;

pub use findings::Findings;
