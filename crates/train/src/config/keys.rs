//! The configuration schema: every key with its help text. An unknown key is an error that names the nearest
//! known one.

use strsim::levenshtein;
use toml::{Table, Value};

use crate::error::{Error, Result};

/// All keys and their help texts.
pub const KEYS: &[(&str, &str)] = &[
    ("out", "output folder: checkpoints, model, metrics.jsonl, report.html"),
    ("seed", "random seed of new weights, document order and the embedded task"),
    ("steps", "number of optimizer steps"),
    ("model.preset", "embedded architecture with random weights: see `ballast train --help`"),
    ("model.config", "config.json of an architecture, with random weights"),
    ("model.checkpoint", "checkpoint to start from, in any layout, or hf://ORG/NAME[@REVISION]"),
    ("model.tokenizer", "folder with tokenizer.json, if it is not beside the model"),
    (
        "model.time_steps",
        "dt_bias of a new model: ones (all heads forget fast), or drawn (some heads remember for long)",
    ),
    ("model.freeze", "patterns of parameters that are not trained; * stands for any characters"),
    ("lora.rank", "train adapters of this rank instead of the weights"),
    ("lora.alpha", "adapter scale: alpha / rank"),
    ("lora.targets", "modules that get an adapter, by the end of their names"),
    ("precision.preset", "storage and compute types: f32, bf16, megatron, nemo, maxtext-default, hf-bf16"),
    ("precision.sites", "compute type of single sites, as a table: logits = \"f16\""),
    ("precision.recompute", "activations that backward recomputes instead of keeping: none, selective, full"),
    ("data.task", "embedded task instead of files: recall"),
    (
        "data.files",
        "training files, a list of { path, weight }: .txt, or .jsonl with text, messages, or prompt and completion",
    ),
    ("data.validation", "file of held-out documents"),
    ("data.validation_fraction", "fraction of the documents to hold out, without a validation file"),
    ("data.sequence_length", "most tokens of a sequence; longer documents are cut"),
    (
        "data.packing",
        "packed: documents concatenated, state reset between them; padded: one document per sequence",
    ),
    ("data.train_roles", "roles whose messages are trained on"),
    ("data.shuffle", "shuffle the documents in each epoch"),
    ("data.add_eos", "end every document with the tokenizer's end token"),
    ("data.document_separator", "line that separates the documents of a .txt file"),
    ("batch.sequences", "sequences per micro-batch"),
    ("batch.accumulation", "gradient accumulation: micro-batches per step, weighted by tokens"),
    (
        "batch.groups",
        "groups of micro-batches whose gradients are summed as a tree; ranks divide the groups, so bits depend on this number and not on the ranks",
    ),
    (
        "cluster.shard",
        "state divided over the ranks: none, optimizer, gradients (and optimizer), weights (and both)",
    ),
    ("cluster.context", "ranks that share the tokens of a micro-batch, for long sequences"),
    (
        "cluster.window",
        "parts of the model whose messages are on their way during backward; fewer take less memory, 0 waits for each",
    ),
    (
        "cluster.timeout",
        "seconds of silence after which a rank that others wait for ends the run; computing is not silence",
    ),
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
    (
        "optimizer.moments",
        "storage of the moments of weights: f32, bf16 or 8bit; fewer bits are rounded at random, from the seed",
    ),
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
    ("schedule.kind", "shape after the warm-up: cosine, linear, constant"),
    ("schedule.warmup", "warm-up steps, at most the steps of the run"),
    ("schedule.floor", "final learning rate as a fraction of the peak"),
    ("loss.z_loss", "coefficient of the z-loss: the squared log-sum-exp of the logits"),
    ("loss.label_smoothing", "probability that is spread over the vocabulary"),
    ("loss.balance", "coefficient of the load-balancing loss of the routers"),
    ("loss.indexer_scale", "coefficient of the indexer loss; 0: indexers are not trained"),
    ("loss.indexer_stage", "indexer training stage: dense (warm-up: only indexers are trained) or sparse"),
    ("evaluation.every", "steps between evaluations on held-out data; 0: only at the end"),
    ("evaluation.batches", "micro-batches per evaluation; 0: no evaluation"),
    ("samples.every", "steps between sample answers; 0: only at the end"),
    ("samples.count", "number of sample answers; 0: none"),
    ("samples.tokens", "most tokens of a sample answer"),
    ("checkpoints.every", "steps between checkpoints; 0: only at the end"),
    ("checkpoints.keep_last", "number of newest checkpoints to keep"),
    ("checkpoints.keep_best", "keep the checkpoint with the lowest held-out loss"),
    ("checkpoints.keep_every", "keep the checkpoint of every this many steps; 0: none"),
    (
        "ledger.every",
        "steps between checks that forward reads the protected tensors in f32; 0: only at start and end",
    ),
    ("sentinel.on_fault", "action on a NaN or infinity: abort, skip, rollback, escalate"),
    ("sentinel.fault_limit", "number of faults after which the run stops, whatever on_fault is"),
    (
        "sentinel.spike_sigma",
        "standard deviations above the mean that make a loss or gradient norm a spike; 0: never",
    ),
    ("sentinel.on_spike", "action on a spike: report, skip"),
    ("sentinel.spike_limit", "with skip: consecutive spikes after which the run stops (exit code 5)"),
    ("tensorboard", "write event files for TensorBoard"),
];

/// Returns an error for the first key that is not in [`KEYS`].
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
                    "{place}`{path}` is a section; set `{path}.<key>` instead"
                )));
            }
            _ => {
                let path = first_leaf(&path, value);
                let near = nearest(&path);
                return Err(Error::Config(format!("{place}`{path}` is unknown; did you mean `{near}`?")));
            }
        }
    }
    Ok(())
}

/// The path of the first value in an unknown section: more helpful than the section alone.
fn first_leaf(path: &str, value: &Value) -> String {
    match value.as_table().and_then(|table| table.iter().next()) {
        Some((key, inner)) => first_leaf(&format!("{path}.{key}"), inner),
        None => path.into(),
    }
}

/// The known key with the smallest edit distance.
fn nearest(path: &str) -> &'static str {
    fn last(key: &str) -> &str {
        key.rsplit('.').next().unwrap_or_default()
    }
    // The last part finds a key in the wrong section.
    let distance = |key: &str| levenshtein(path, key).min(1 + levenshtein(last(path), last(key)));
    KEYS.iter().map(|(key, _)| *key).min_by_key(|key| distance(key)).unwrap_or("steps")
}

/// Applies `a.b=c` to the table; c is TOML or a bare word.
pub(super) fn apply(table: &mut Table, setting: &str) -> Result {
    let Some((path, text)) = setting.split_once('=') else {
        return Err(Error::Config(format!("--set {setting:?}: expected a key, `=` and a value")));
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
    // A new source of the model replaces the old one.
    const SOURCES: [&str; 3] = ["preset", "config", "checkpoint"];
    if path.trim().starts_with("model.") && SOURCES.contains(&last) {
        SOURCES.iter().for_each(|source| drop(inner.remove(*source)));
    }
    inner.insert(last.into(), value);
    Ok(())
}
