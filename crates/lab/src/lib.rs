//! What each precision choice costs on a model: the same input under a reference and under several policies, compared.
//!
//! [`Findings`] is everything that a run of the lab found, as plain data.

#![forbid(unsafe_code)]
// Outputs, then inputs, then sizes: the grammar of the kernels.
#![allow(clippy::too_many_arguments)]

mod answers;
pub mod choices;
mod decoding;
pub mod dump;
pub mod embedded;
mod engine;
pub mod error;
pub mod experiment;
mod facts;
pub mod findings;
pub mod input;
mod measure;
pub mod reference;
pub mod report;
mod study;
mod training;

pub use choices::Choice;
pub use error::{Error, Result};
pub use findings::Findings;
pub use study::{More, Study, Training};
