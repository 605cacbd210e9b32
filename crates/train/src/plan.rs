//! What a run takes in memory, before it runs.

use ballast_model::precision::Storage;
use ballast_model::{Model, Plan, Precision, Step, memory};
use serde::Serialize;

use crate::config::TrainConfig;
use crate::error::Result;
use crate::optimizer::is_rounded;
use crate::setup::{is_learned, is_target};

/// Bytes by what they are for.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MemoryPlan {
    /// What, how many bytes; those that take none are left out.
    pub rows: Vec<(String, u64)>,
}

impl MemoryPlan {
    /// Of a full micro-batch whose sequences are as long as they may be.
    pub fn of(config: &TrainConfig, model: &Model, precision: &Precision) -> Result<MemoryPlan> {
        let length = config.data.sequence_length;
        // A hidden state of every token is the least that a step keeps; the list of sequences is not even made for more than fits.
        let tokens = (config.batch.sequences as u64).saturating_mul(length as u64);
        let least = tokens.saturating_mul((model.config.hidden * precision.activations.bytes()) as u64);
        memory::check("a micro-batch of this run", least)?;
        let ends: Vec<usize> = (0..=config.batch.sequences).map(|i| i * length).collect();
        let targets = |module: &str| is_target(config, module);
        let step = Step {
            loss: config.loss.options(),
            learned: &|spec| is_learned(config, &model.parameter_name(spec)),
            adapters: config.lora.as_ref().map(|lora| (lora.rank, &targets as &dyn Fn(&str) -> bool)),
            ..Step::new(&ends, config.precision.recompute.into())
        };
        let plan = Plan::new(&model.config, precision, &step)?;
        let learned = |spec: &&ballast_model::params::Spec| {
            spec.trainable && is_learned(config, &model.parameter_name(spec))
        };
        let rounded_weights = precision.params == Storage::Bf16;
        let weights = model.specs.weights.iter().filter(|spec| rounded_weights && learned(spec));
        let protected =
            model.specs.protected.iter().filter(|spec| is_rounded(precision, spec) && learned(spec));
        let masters = if config.optimizer.masters {
            weights.chain(protected).map(|spec| 4 * spec.len()).sum()
        } else {
            0
        };
        let rows = [
            ("weights", plan.parameters - plan.protected),
            ("protected tensors, f32", plan.protected),
            ("adapters, f32", plan.adapters),
            ("masters, f32", masters),
            ("moments, f32", 2 * plan.gradients),
            ("gradients, f32", plan.gradients),
            ("kept for backward: linear attention", plan.linear_layers),
            ("kept for backward: softmax attention", plan.softmax_layers),
            ("kept for backward: latent attention", plan.latent_layers),
            ("kept for backward: outside the layers", plan.around),
            ("alive for a moment", plan.transient),
            ("scratch of all threads", plan.scratch),
        ];
        let some = rows.into_iter().filter(|(_, bytes)| *bytes > 0);
        Ok(MemoryPlan { rows: some.map(|(what, bytes)| (what.to_string(), bytes as u64)).collect() })
    }

    /// All of it.
    pub fn total(&self) -> u64 {
        self.rows.iter().map(|(_, bytes)| bytes).sum()
    }
}
