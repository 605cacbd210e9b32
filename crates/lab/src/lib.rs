//! Measures the cost of precision choices on a model: the same input runs in an f64 reference and under
//! several policies, and outputs, inner tensors and gradients are compared.
//!
//! [`Study`] runs a comparison and returns [`Findings`], the results as plain data.
//!
//! ```
//! use ballast_lab::{Choice, embedded};
//! use ballast_model::LazyCheckpoint;
//!
//! let folder = embedded::write(tempfile::tempdir()?)?;
//! let model = LazyCheckpoint::open(folder.path())?;
//! let choices = Choice::defaults(&model.config, &model.specs)?;
//! assert!(choices.iter().any(|choice| choice.name == "bf16"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

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
