//! What a run takes in memory, before it runs.

use ballast_model::Plan;
use serde::Serialize;

use crate::error::Result;
use crate::trainer::Trainer;

/// Bytes by what they are for.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MemoryPlan {
    /// What, how many bytes; those that take none are left out.
    pub rows: Vec<(String, u64)>,
}

impl MemoryPlan {
    /// Of the largest micro-batch that a run can have: full, with a single sequence as long as it may be.
    pub fn new(trainer: &Trainer) -> Result<MemoryPlan> {
        let config = &trainer.config;
        let length = config.data.sequence_length;
        let ends: Vec<usize> = (0..=config.batch.sequences).map(|i| i * length).collect();
        let model = &trainer.model;
        let plan = Plan::new(&model.config, model.precision(), &ends, trainer.recompute())?;
        let (masters, moments, gradients) = trainer.optimizer_bytes();
        let rows = [
            ("weights", plan.parameters - plan.protected),
            ("protected tensors, f32", plan.protected),
            ("masters, f32", masters),
            ("moments, f32", moments),
            ("gradients, f32", gradients),
            ("kept for backward: linear attention", plan.linear_layers),
            ("kept for backward: softmax attention", plan.softmax_layers),
            ("kept for backward: latent attention", plan.latent_layers),
            ("kept for backward: outside the layers", plan.around),
            ("logits of a slice", plan.logits),
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
