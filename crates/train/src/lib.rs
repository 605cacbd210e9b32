//! Training in mixed precision that can be proved: data, optimiser, ledger, sentinel, save and resume.

// Outputs, then inputs, then sizes: the grammar of the kernels.
#![allow(clippy::too_many_arguments)]

pub mod data;
pub mod error;
pub mod metrics;
pub mod report;
pub mod tensorboard;

pub use error::{Error, Result};
