//! Enums of the configuration: keys whose values are one of a few names.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Initialization of `dt_bias` in a new model: see [`ballast_model::Model::draw_time_steps`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TimeSteps {
    /// All ones.
    Ones,
    /// Random time steps.
    Drawn,
}

/// State that is divided over the ranks; each level includes the ones before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Shard {
    /// Every rank has everything.
    None,
    /// Masters and optimizer state.
    Optimizer,
    /// Gradients.
    Gradients,
    /// Weights.
    Weights,
}

/// Writes the name in the configuration.
impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// Storage of the moments of weights. Those of protected tensors and adapters are always f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MomentStorage {
    /// 4 bytes.
    #[serde(rename = "f32")]
    F32,
    /// 2 bytes.
    #[serde(rename = "bf16")]
    Bf16,
    /// 1 byte, and a scale for each group.
    #[serde(rename = "8bit")]
    Bits8,
}

/// Writes the name in the configuration.
impl fmt::Display for MomentStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// Optimizer of the matrices inside the layers; AdamW has everything else.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerKind {
    /// AdamW.
    AdamW,
    /// Muon.
    Muon,
}

/// Shape of the schedule after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScheduleKind {
    /// Half a cosine.
    Cosine,
    /// A straight line.
    Linear,
    /// The peak.
    Constant,
}

/// Action on a non-finite value. The update is never applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnFault {
    /// Stop with exit code 5.
    Abort,
    /// Skip the batch.
    Skip,
    /// Return to the last checkpoint, and skip the batch.
    Rollback,
    /// Repeat the step with the site in f32, and keep it in f32.
    Escalate,
}

/// Action on a spike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnSpike {
    /// Report it.
    Report,
    /// Report it and skip the batch.
    Skip,
}
