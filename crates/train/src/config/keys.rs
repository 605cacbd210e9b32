//! The schema of a configuration: every key with what it means. A key that is not in it is an error that names the nearest one.

use strsim::levenshtein;
use toml::{Table, Value};

use crate::error::{Error, Result};

/// Every key and what it means.
pub const KEYS: &[(&str, &str)] = &[
    ("out", "folder of the run: checkpoints, model, metrics.jsonl, report.html"),
    ("seed", "of everything that is drawn: weights, order of documents, task"),
    ("steps", "steps of the optimiser"),
    ("model.preset", "an embedded architecture with random weights: see `ballast train --help`"),
    ("model.config", "a config.json: that architecture with random weights"),
    ("model.checkpoint", "a checkpoint in any layout to start from"),
    ("model.tokenizer", "folder with tokenizer.json, where it is not beside the model"),
    (
        "model.time_steps",
        "dt_bias of a new model: ones (forgets fast), or drawn so that some heads remember for long",
    ),
    ("model.freeze", "patterns (* for any characters) of parameters that are not learned"),
    ("lora.rank", "train adapters of this rank instead of the weights"),
    ("lora.alpha", "their scale is alpha / rank"),
    ("lora.targets", "the modules that get one, by the end of their names"),
    ("precision.preset", "f32, bf16, megatron, nemo, maxtext-default, hf-bf16"),
    ("precision.sites", "table of sites that compute in another type: logits = \"f16\""),
    ("precision.recompute", "none, selective, full: what is made anew in backward instead of kept"),
    ("data.task", "an embedded task instead of files: recall"),
    ("data.files", "list of { path, weight }: .txt, or .jsonl with text, messages or prompt and completion"),
    ("data.validation", "file of held-out documents"),
    ("data.validation_fraction", "else this share of the documents is held out"),
    ("data.sequence_length", "longest sequence; longer documents are cut"),
    (
        "data.packing",
        "packed: documents end to end, state reset between them; padded: a document per sequence",
    ),
    ("data.train_roles", "whose messages are trained on"),
    ("data.shuffle", "documents in another order in each epoch"),
    ("data.add_eos", "end every document with the tokenizer's end token"),
    ("data.document_separator", "a line that separates the documents of a .txt file"),
    ("batch.sequences", "sequences of a micro-batch"),
    ("batch.accumulation", "micro-batches of a step; their gradients are weighted by tokens"),
    ("optimizer.kind", "adamw, or muon: Muon for the matrices inside the layers, AdamW for everything else"),
    ("optimizer.learning_rate", "peak learning rate of the schedule"),
    ("optimizer.beta1", "AdamW: decay of the first moment"),
    ("optimizer.beta2", "AdamW: decay of the second moment"),
    ("optimizer.eps", "AdamW: term added to the root of the second moment"),
    (
        "optimizer.weight_decay",
        "AdamW: weight decay of matrices; norms, biases and protected tensors never decay",
    ),
    ("optimizer.clip", "largest global gradient norm; larger gradients are scaled down; 0: no clipping"),
    ("optimizer.masters", "keep f32 masters of bf16 weights; false rounds every update to bf16"),
    ("optimizer.muon.lr_ratio", "Muon: its learning rate as a multiple of optimizer.learning_rate"),
    (
        "optimizer.muon.adjust_lr",
        "Muon: factor of the learning rate by shape: match_rms_adamw, original, spectral_unclamped",
    ),
    ("optimizer.muon.momentum", "Muon: decay of the momentum"),
    ("optimizer.muon.nesterov", "Muon: use Nesterov momentum"),
    ("optimizer.muon.weight_decay", "Muon: weight decay of its matrices"),
    ("optimizer.muon.eps", "Muon: smallest norm that the momentum is divided by"),
    ("optimizer.muon.ns_steps", "Muon: number of Newton-Schulz steps, at most 99"),
    ("optimizer.muon.ns_coefficients", "Muon: the three coefficients of a Newton-Schulz step"),
    ("schedule.kind", "after the warm-up: cosine, linear, constant"),
    ("schedule.warmup", "steps from 0 to the learning rate; all of a run that has fewer"),
    ("schedule.floor", "the last learning rate, as a share of the largest"),
    ("loss.z_loss", "coefficient of the squared log-sum of the logits"),
    ("loss.label_smoothing", "share of the target that is spread over the vocabulary"),
    ("loss.balance", "coefficient of the routers' balance loss"),
    ("loss.indexer_scale", "factor of the indexers' loss; 0: they are not trained, and stay as they are"),
    ("loss.indexer_stage", "dense (warm-up: nothing else learns) or sparse"),
    ("evaluation.every", "steps between measurements on held-out data; 0: only at the end"),
    ("evaluation.batches", "micro-batches that are measured; 0: none at all"),
    ("samples.every", "steps between samples; 0: only at the end"),
    ("samples.count", "samples each time; 0: none"),
    ("samples.tokens", "longest answer"),
    ("checkpoints.every", "steps between checkpoints; 0: only at the end"),
    ("checkpoints.keep_last", "how many of the newest stay"),
    ("checkpoints.keep_best", "the one with the lowest held-out loss stays"),
    ("checkpoints.keep_every", "those of every so many steps stay; 0: none"),
    (
        "ledger.every",
        "steps between proofs that forward reads the f32 tensors; 0: only at the beginning and the end",
    ),
    ("sentinel.on_fault", "something is not finite: abort, skip, rollback, escalate"),
    ("sentinel.fault_limit", "after so many faults the run stops, whatever on_fault says"),
    ("sentinel.spike_sigma", "loss or gradient norm so many deviations above the mean is a spike; 0: never"),
    ("sentinel.on_spike", "report, skip"),
    ("sentinel.spike_limit", "with skip: after so many spikes in a row the run stops (exit code 5)"),
    ("tensorboard", "write event files for TensorBoard"),
];

/// An error for the first key that is not in [`KEYS`].
pub(super) fn check_keys(table: &Table, above: &str, place: &str) -> Result {
    for (key, value) in table {
        let path = if above.is_empty() { key.clone() } else { format!("{above}.{key}") };
        let known = KEYS.iter().any(|(name, _)| *name == path);
        let section = KEYS
            .iter()
            .any(|(name, _)| name.strip_prefix(path.as_str()).is_some_and(|rest| rest.starts_with('.')));
        match value {
            Value::Table(inner) if section => check_keys(inner, &path, place)?,
            _ if known => {}
            _ if section => {
                return Err(Error::Config(format!(
                    "{place}`{path}` is a section; what it holds is `{path}.<key>`"
                )));
            }
            _ => {
                let path = first_leaf(&path, value);
                let near = nearest(&path);
                return Err(Error::Config(format!(
                    "{place}`{path}` is not known; the nearest key is `{near}`"
                )));
            }
        }
    }
    Ok(())
}

/// The path of the first value in an unknown section, which says more than the section alone.
fn first_leaf(path: &str, value: &Value) -> String {
    match value.as_table().and_then(|table| table.iter().next()) {
        Some((key, inner)) => first_leaf(&format!("{path}.{key}"), inner),
        None => path.into(),
    }
}

/// The known key with the fewest changes.
fn nearest(path: &str) -> &'static str {
    fn last(key: &str) -> &str {
        key.rsplit('.').next().unwrap_or_default()
    }
    // A key in the wrong section is found by its last part.
    let distance = |key: &str| levenshtein(path, key).min(1 + levenshtein(last(path), last(key)));
    KEYS.iter().map(|(key, _)| *key).min_by_key(|key| distance(key)).unwrap_or("steps")
}

/// Puts `a.b=c` into the table; c is TOML, or a bare word.
pub(super) fn apply(table: &mut Table, setting: &str) -> Result {
    let Some((path, text)) = setting.split_once('=') else {
        return Err(Error::Config(format!("--set {setting:?}: a key, `=`, and a value were expected")));
    };
    let parsed = format!("value = {text}").parse::<Table>().ok();
    let value = parsed.and_then(|mut table| table.remove("value")).unwrap_or(Value::String(text.into()));
    let mut keys: Vec<&str> = path.trim().split('.').collect();
    let last = keys.pop().unwrap_or_default();
    let mut inner = table;
    for key in keys {
        let entry = inner.entry(key).or_insert_with(|| Value::Table(Table::new()));
        inner = entry
            .as_table_mut()
            .ok_or_else(|| Error::Config(format!("--set {setting:?}: `{key}` is not a section")))?;
    }
    // One source of a model takes the place of another.
    const SOURCES: [&str; 3] = ["preset", "config", "checkpoint"];
    if path.trim().starts_with("model.") && SOURCES.contains(&last) {
        SOURCES.iter().for_each(|source| drop(inner.remove(*source)));
    }
    inner.insert(last.into(), value);
    Ok(())
}
