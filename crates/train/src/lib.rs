//! Training in mixed precision that can be proved: data, optimiser, ledger, sentinel, save and resume.

#![forbid(unsafe_code)]
// Outputs, then inputs, then sizes: the grammar of the kernels.
#![allow(clippy::too_many_arguments)]

pub mod checksum;
pub mod config;
pub mod data;
pub mod error;
mod evaluate;
pub mod ledger;
pub mod metrics;
pub mod optimizer;
pub mod places;
pub mod plan;
mod preview;
pub mod report;
mod run;
pub mod schedule;
pub mod sentinel;
pub mod setup;
pub mod state;
pub mod task;
pub mod tensorboard;
mod trainer;

pub use config::TrainConfig;
pub use error::{Error, Result};
pub use run::{Summary, Watcher};
pub use trainer::{Attempt, Trainer};
