//! Memory of a run, computed before it starts.

use ballast_model::precision::Storage;
use ballast_model::{Model, Plan, Precision, Step, memory};
use serde::Serialize;

use crate::config::TrainConfig;
use crate::error::Result;
use crate::optimizer::{Role, UpdateRule, adapter_rule, is_rounded, rule_for, state_bytes};
use crate::setup::{is_learned, is_target};

/// Bytes by purpose.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MemoryPlan {
    /// Purpose and bytes; rows without bytes are left out.
    pub rows: Vec<(String, u64)>,
}

impl MemoryPlan {
    /// The plan of a run whose micro-batches are full and whose sequences have the largest length.
    pub fn of(config: &TrainConfig, model: &Model, precision: &Precision) -> Result<MemoryPlan> {
        let length = config.data.sequence_length;
        // The smallest need, a hidden state per token, is checked before a list of sequences is made.
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
        // State of the optimizers, by its name.
        let mut states: Vec<(String, usize)> = Vec::new();
        let mut workspace = 0;
        let mut add = |rule: &dyn UpdateRule, shape: &[usize]| {
            workspace = rule.workspace().max(workspace);
            let (name, bytes) = (format!("{}, f32", rule.state_name()), state_bytes(rule, shape));
            match states.iter_mut().find(|(known, _)| *known == name) {
                Some((_, all)) => *all += bytes,
                None => states.push((name, bytes)),
            }
        };
        for (specs, role) in [(&model.specs.weights, Role::Weight), (&model.specs.protected, Role::Protected)]
        {
            for spec in specs.iter().filter(learned) {
                add(&*rule_for(&config.optimizer, &model.config, spec, role), &spec.shape);
            }
        }
        add(&adapter_rule(&config.optimizer, true), &[plan.adapters / 4]);
        let before = [
            ("weights", plan.parameters - plan.protected),
            ("protected tensors, f32", plan.protected),
            ("adapters, f32", plan.adapters),
            ("masters, f32", masters),
        ];
        let after = [
            ("gradients, f32", plan.gradients),
            ("saved for backward: linear attention", plan.linear_layers),
            ("saved for backward: softmax attention", plan.softmax_layers),
            ("saved for backward: latent attention", plan.latent_layers),
            ("saved for backward: outside the layers", plan.around),
            ("temporary tensors", plan.transient),
            ("scratch of all threads", plan.scratch),
            ("optimizer workspace", 4 * workspace),
        ];
        let named = |(name, bytes): (&str, usize)| (name.to_string(), bytes);
        let rows = before.into_iter().map(named).chain(states).chain(after.into_iter().map(named));
        let some = rows.filter(|(_, bytes)| *bytes > 0);
        Ok(MemoryPlan { rows: some.map(|(name, bytes)| (name, bytes as u64)).collect() })
    }

    /// Sum of all rows.
    pub fn total(&self) -> u64 {
        self.rows.iter().map(|(_, bytes)| bytes).sum()
    }
}
