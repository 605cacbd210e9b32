//! Hybrid Gated-DeltaNet language models on a CPU: config.json to layers, forward, backward, decode.
//!
//! [`Config`] describes a decoder of any family; [`Model`] has its layers and parameters; [`Precision`] sets
//! the types of storage and arithmetic. A layer holds the [`params::Id`]s of its parameters; its forward
//! returns what its backward needs.
//!
//! The feature `text` (on by default) adds tokenizers, chat templates and generation.

mod adapters;
pub mod batch;
pub mod config;
mod context;
mod decode;
pub mod error;
mod grads;
mod init;
mod layers;
mod layerwise;
mod lazy;
pub mod limits;
mod load;
pub mod memory;
mod model;
pub mod params;
pub mod pass;
mod plan;
pub mod precision;
pub mod probe;
mod random;
mod run;
mod save;
mod site;
#[cfg(feature = "text")]
pub mod text;

pub use adapters::AdapterSettings;
pub use ballast_kernels::indexer::Ties;
pub use batch::{Batch, BatchPart};
pub use config::Config;
pub use decode::{PREFILL_TOKENS, Session};
pub use error::{Error, Result};
pub use layerwise::LayerwiseRun;
pub use lazy::LazyCheckpoint;
pub use model::{IndexerLoss, IndexerStage, LossOptions, Model, Recompute, StepLoss};
pub use plan::{LayerSent, Plan, Step, Targets};
pub use precision::Precision;
pub use probe::Probe;
pub use save::{NamedTensor, SaveOptions};
pub use site::Site;

/// The examples of README.md, run as tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
