//! Training in mixed precision: data, optimizers, the protected-tensor check, fault detection, checkpoints
//! and resume.
//!
//! ```
//! let config = ballast_train::TrainConfig::embedded(&["batch.accumulation=4".into()])?;
//! assert_eq!(config.batch.accumulation, 4);
//! assert!(config.to_toml()?.contains("[batch]"));
//! # Ok::<(), ballast_train::Error>(())
//! ```

#![forbid(unsafe_code)]

mod checksum;
pub mod cluster;
mod compute;
pub mod config;
pub mod data;
pub mod error;
mod evaluate;
mod faults;
mod gradients;
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
mod tensorboard;
mod trainer;

pub use config::TrainConfig;
pub use error::{Error, Result};
pub use run::{Summary, Watcher};
pub use trainer::{Attempt, Trainer};
