//! Rules for configuration keys that change when a run is resumed.

use toml::{Table, Value};

use super::{KEYS, TrainConfig};
use crate::error::{Error, Result};

/// Rule for a key that changes when a run is resumed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnResume {
    /// The new value applies from the next step.
    Applies,
    /// The new value applies, and the best held-out loss is discarded, because losses are no longer
    /// comparable.
    ChangesMeasure,
    /// The new value applies if it leads to the same content as before, which is checked: a moved file, for
    /// example.
    MustAgree,
    /// The new value is an error, for this reason.
    Refused(&'static str),
}

use OnResume::{Applies, ChangesMeasure, MustAgree, Refused};

/// Rule for a key of [`KEYS`]. A key without a rule is refused.
pub fn on_resume(key: &str) -> OnResume {
    const ORDER: &str = "it determines the order of the documents";
    match key {
        "out" => Refused("a resumed run stays in its folder"),
        "seed" => Refused("it determines weights, held-out documents and document order"),
        "model.time_steps" => Refused("it applies to new weights, and the run has its own"),
        "lora.alpha" => Refused("it scales the trained adapters"),
        "precision.preset" | "optimizer.masters" => {
            Refused("weights and masters were saved in their present types")
        }
        "data.task" => Refused("the run would continue on other data"),
        "data.validation_fraction" => Refused("it determines the held-out documents"),
        "data.packing" | "data.shuffle" | "data.document_separator" | "batch.groups" => Refused(ORDER),
        "cluster.shard" | "cluster.window" | "cluster.timeout" => Applies,
        "cluster.context" => Refused("the sums of the run would have another order"),
        "data.train_roles" | "data.add_eos" => Refused("the run was trained on other tokens"),
        "model.preset" | "model.config" | "model.checkpoint" | "model.tokenizer" | "model.freeze" => {
            MustAgree
        }
        "lora.rank" | "lora.targets" | "data.validation" => MustAgree,
        // Paths must lead to the same content; weights apply.
        "data.files" => MustAgree,
        // The set of trained parameters must agree; other changes apply.
        "loss.indexer_scale" | "loss.indexer_stage" => MustAgree,
        "data.sequence_length" | "batch.sequences" | "evaluation.batches" => ChangesMeasure,
        "steps" | "tensorboard" | "precision.sites" | "precision.recompute" | "batch.accumulation" => Applies,
        "optimizer.learning_rate" | "optimizer.beta1" | "optimizer.beta2" | "optimizer.eps" => Applies,
        "optimizer.weight_decay" | "optimizer.clip" => Applies,
        "optimizer.kind" => Refused("the optimizer state was saved for that optimizer"),
        "optimizer.moments" => Refused("the optimizer state was saved in that type"),
        "optimizer.muon.lr_ratio" | "optimizer.muon.adjust_lr" | "optimizer.muon.momentum" => Applies,
        "optimizer.muon.nesterov" | "optimizer.muon.weight_decay" | "optimizer.muon.eps" => Applies,
        "optimizer.muon.ns_steps" | "optimizer.muon.ns_coefficients" => Applies,
        "schedule.kind" | "schedule.warmup" | "schedule.floor" => Applies,
        "loss.z_loss" | "loss.label_smoothing" | "loss.balance" => Applies,
        "evaluation.every" | "samples.every" | "samples.count" | "samples.tokens" => Applies,
        "checkpoints.every" | "checkpoints.keep_last" | "checkpoints.keep_best" => Applies,
        "checkpoints.keep_every" | "ledger.every" => Applies,
        "sentinel.on_fault" | "sentinel.fault_limit" | "sentinel.spike_sigma" => Applies,
        "sentinel.on_spike" | "sentinel.spike_limit" => Applies,
        _ => Refused("the run was saved with another value"),
    }
}

/// Returns an error for changes between a saved configuration and the new one that are not allowed; else true
/// if held-out losses are still comparable.
pub(crate) fn check_resume(saved: &TrainConfig, new: &TrainConfig) -> Result<bool> {
    let table = |config: &TrainConfig| -> Result<Table> {
        let parsed = config.to_toml()?.parse::<Table>();
        parsed.map_err(|error| Error::Config(format!("the configuration as TOML: {error}")))
    };
    let (before, after) = (table(saved)?, table(new)?);
    let mut comparable = true;
    for (key, _) in KEYS {
        let (old, new) = (value_of(&before, key), value_of(&after, key));
        if old == new {
            continue;
        }
        let rule = match on_resume(key) {
            // Without the file, the held-out documents come from the training files.
            MustAgree if *key == "data.validation" && old.is_some() != new.is_some() => {
                Refused("it determines the held-out documents")
            }
            rule => rule,
        };
        match rule {
            Refused(reason) => {
                let shown = |value: Option<&Value>| value.map_or("nothing".into(), Value::to_string);
                return Err(Error::Config(format!(
                    "`{key}` cannot change from {} to {} when a run is resumed: {reason}; keep the old value or start a new run",
                    shown(old),
                    shown(new)
                )));
            }
            ChangesMeasure => comparable = false,
            Applies | MustAgree => {}
        }
    }
    Ok(comparable)
}

fn value_of<'t>(table: &'t Table, key: &str) -> Option<&'t Value> {
    match key.split_once('.') {
        Some((section, rest)) => value_of(table.get(section)?.as_table()?, rest),
        None => table.get(key),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_has_a_rule_of_its_own() {
        for (key, _) in KEYS {
            assert_ne!(on_resume(key), on_resume("a key that nobody has thought about"), "{key}");
        }
    }
}
