//! What a run says about itself, a line of JSON for each event: `metrics.jsonl`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// One line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Record {
    /// A step of the optimiser.
    Step(Step),
    /// A measurement on held-out data.
    Evaluation(Evaluation),
    /// Something that a person should know: a fault, a spike, a rollback, a site that was raised, a failed save.
    Event(Event),
}

/// A step of the optimiser.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// From 1 on.
    pub step: u64,
    /// Mean loss per trained token.
    pub loss: f64,
    /// Of the indexers, where they are trained.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub indexer_loss: Option<f64>,
    /// Of the routers' balance, where it is asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub balance_loss: Option<f64>,
    /// Learning rate.
    pub learning_rate: f64,
    /// Norm of all gradients, before clipping.
    pub gradient_norm: f64,
    /// The same by group of parameters.
    pub group_norms: BTreeMap<String, f64>,
    /// Tokens that the step read.
    pub tokens: u64,
    /// Tokens that it was trained on.
    pub trained_tokens: u64,
    /// Seconds that the step took.
    pub seconds: f64,
    /// Most memory that the process has had, in bytes.
    pub peak_memory: u64,
}

/// A measurement on held-out data.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// After this many steps.
    pub step: u64,
    /// Mean loss per trained token.
    pub loss: f64,
    /// Share of trained tokens whose most likely prediction was right.
    pub accuracy: f64,
    /// Tokens that were judged.
    pub tokens: u64,
}

/// Something that a person should know.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// At this step.
    pub step: u64,
    /// `fault`, `spike`, `skip`, `rollback`, `escalate`, `save`, `resume`, ...
    pub what: String,
    /// In words.
    pub text: String,
}
