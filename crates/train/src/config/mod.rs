//! Run configuration: defaults, then a TOML file, then `--set a.b=c`, then flags.
//!
//! [`KEYS`] is the schema.

mod keys;
mod resume;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use ballast_checkpoint::encoding::text_without_mark;
use ballast_checkpoint::regular::read_regular_text;
use ballast_model::{IndexerLoss, IndexerStage, LossOptions, Recompute};
use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use crate::data::DataConfig;
use crate::error::{Error, Result};

pub use keys::KEYS;
use keys::{apply, check_keys};
pub(crate) use resume::check_resume;
pub use resume::{OnResume, on_resume};

/// Configuration of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs)] // KEYS documents the fields
pub struct TrainConfig {
    #[serde(serialize_with = "as_text")]
    pub out: PathBuf,
    pub seed: u64,
    pub steps: u64,
    pub tensorboard: bool,
    pub model: ModelConfig,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lora: Option<LoraConfig>,
    pub precision: PrecisionConfig,
    pub data: DataConfig,
    pub batch: BatchConfig,
    pub cluster: ClusterConfig,
    pub optimizer: OptimizerConfig,
    pub schedule: ScheduleConfig,
    pub loss: LossConfig,
    pub evaluation: EvaluationConfig,
    pub samples: SamplesConfig,
    pub checkpoints: CheckpointsConfig,
    pub ledger: LedgerConfig,
    pub sentinel: SentinelConfig,
}

/// Serializes the folder of a run as text. A name that is not UTF-8 has no exact form in TOML; a resumed run
/// uses the folder that it was given.
fn as_text<S: serde::Serializer>(path: &Path, to: S) -> std::result::Result<S::Ok, S::Error> {
    to.serialize_str(&path.to_string_lossy())
}

/// The model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs)]
pub struct ModelConfig {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preset: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<PathBuf>,
    pub time_steps: TimeSteps,
    pub freeze: Vec<String>,
}

/// Initialization of `dt_bias` in a new model: see [`ballast_model::Model::draw_time_steps`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum TimeSteps {
    #[default]
    Ones,
    Drawn,
}

/// LoRA adapters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs)]
pub struct LoraConfig {
    pub rank: usize,
    pub alpha: f32,
    pub targets: Vec<String>,
}

/// Storage types, compute types and recomputation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs)]
pub struct PrecisionConfig {
    pub preset: String,
    pub recompute: RecomputeLevel,
    pub sites: BTreeMap<String, String>,
}

/// Recomputation level; see [`Recompute`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum RecomputeLevel {
    #[default]
    None,
    Selective,
    Full,
}

impl From<RecomputeLevel> for Recompute {
    fn from(level: RecomputeLevel) -> Recompute {
        match level {
            RecomputeLevel::None => Recompute::None,
            RecomputeLevel::Selective => Recompute::Selective,
            RecomputeLevel::Full => Recompute::Full,
        }
    }
}

/// Batch size.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs)]
pub struct BatchConfig {
    pub sequences: usize,
    pub accumulation: usize,
    pub groups: usize,
}

/// Division of a run over several processes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs)]
pub struct ClusterConfig {
    pub shard: Shard,
    pub context: usize,
    pub window: usize,
    pub timeout: u64,
}

/// State that is divided over the ranks; each level includes the ones before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Shard {
    /// Every rank has everything.
    #[default]
    None,
    /// Masters and optimizer state.
    Optimizer,
    /// Gradients.
    Gradients,
    /// Weights.
    Weights,
}

/// Optimizer, clipping and masters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs)]
pub struct OptimizerConfig {
    pub kind: OptimizerKind,
    pub learning_rate: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
    pub clip: f64,
    pub masters: bool,
    pub moments: MomentStorage,
    pub muon: MuonConfig,
}

/// Storage of the moments of weights. Those of protected tensors and adapters are always f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum MomentStorage {
    #[default]
    #[serde(rename = "f32")]
    F32,
    #[serde(rename = "bf16")]
    Bf16,
    #[serde(rename = "8bit")]
    Bits8,
}

impl MomentStorage {
    /// Name in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            MomentStorage::F32 => "f32",
            MomentStorage::Bf16 => "bf16",
            MomentStorage::Bits8 => "8bit",
        }
    }
}

/// Optimizer of the matrices inside the layers; AdamW has everything else.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum OptimizerKind {
    #[default]
    AdamW,
    Muon,
}

/// Settings of Muon; see [`ballast_kernels::muon`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs)]
pub struct MuonConfig {
    pub lr_ratio: f64,
    pub adjust_lr: LrAdjustment,
    pub momentum: f64,
    pub nesterov: bool,
    pub weight_decay: f64,
    pub eps: f64,
    pub ns_steps: usize,
    pub ns_coefficients: [f64; 3],
}

/// Factor of Muon's learning rate by the shape of a matrix; see [`ballast_kernels::muon::AdjustLr`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum LrAdjustment {
    #[serde(rename = "original")]
    Original,
    #[default]
    #[serde(rename = "match_rms_adamw")]
    MatchRmsAdamW,
    #[serde(rename = "spectral_unclamped")]
    SpectralUnclamped,
}

/// Learning-rate schedule.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs)]
pub struct ScheduleConfig {
    pub kind: ScheduleKind,
    pub warmup: u64,
    pub floor: f64,
}

/// Shape of the schedule after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum ScheduleKind {
    Cosine,
    Linear,
    Constant,
}

/// The loss.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs)]
pub struct LossConfig {
    pub z_loss: f32,
    pub label_smoothing: f32,
    pub balance: f32,
    pub indexer_scale: f32,
    pub indexer_stage: Stage,
}

/// Training stage of the indexers; see [`IndexerStage`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum Stage {
    Dense,
    Sparse,
}

/// Evaluation on held-out data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs)]
pub struct EvaluationConfig {
    pub every: u64,
    pub batches: usize,
}

/// Sample answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs)]
pub struct SamplesConfig {
    pub every: u64,
    pub count: usize,
    pub tokens: usize,
}

/// Checkpoints that are written and kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs)]
pub struct CheckpointsConfig {
    pub every: u64,
    pub keep_last: usize,
    pub keep_best: bool,
    pub keep_every: u64,
}

/// Protected-tensor check.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs)]
pub struct LedgerConfig {
    pub every: u64,
}

/// Fault and spike handling.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs)]
pub struct SentinelConfig {
    pub on_fault: OnFault,
    pub fault_limit: u64,
    pub spike_sigma: f64,
    pub on_spike: OnSpike,
    pub spike_limit: u64,
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

/// Largest rank of an adapter.
const MOST_RANK: u64 = 1 << 16;

/// Most samples at once.
const MOST_SAMPLES: u64 = 1 << 10;

/// Most Newton-Schulz steps of Muon, as in torch.optim.Muon.
const MOST_NS_STEPS: u64 = 99;

/// Most tokens of a step: far beyond practice, and small enough that no derived size overflows.
const MOST_STEP_TOKENS: u64 = 1 << 32;

/// Configuration of `ballast train` without arguments: the embedded hybrid on the embedded task.
pub const EMBEDDED: &str = include_str!("../../presets/default.toml");

impl Default for TrainConfig {
    fn default() -> TrainConfig {
        TrainConfig {
            out: "runs/default".into(),
            seed: 1,
            steps: 1000,
            tensorboard: false,
            model: ModelConfig::default(),
            lora: None,
            precision: PrecisionConfig::default(),
            data: DataConfig::default(),
            batch: BatchConfig::default(),
            cluster: ClusterConfig::default(),
            optimizer: OptimizerConfig::default(),
            schedule: ScheduleConfig::default(),
            loss: LossConfig::default(),
            evaluation: EvaluationConfig::default(),
            samples: SamplesConfig::default(),
            checkpoints: CheckpointsConfig::default(),
            ledger: LedgerConfig::default(),
            sentinel: SentinelConfig::default(),
        }
    }
}

impl Default for LoraConfig {
    fn default() -> LoraConfig {
        let targets = ["q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj"];
        LoraConfig { rank: 16, alpha: 32.0, targets: targets.map(String::from).to_vec() }
    }
}

impl Default for PrecisionConfig {
    fn default() -> PrecisionConfig {
        PrecisionConfig {
            preset: "bf16".into(),
            recompute: RecomputeLevel::default(),
            sites: BTreeMap::new(),
        }
    }
}

impl Default for BatchConfig {
    fn default() -> BatchConfig {
        BatchConfig { sequences: 1, accumulation: 8, groups: 1 }
    }
}

impl Default for ClusterConfig {
    fn default() -> ClusterConfig {
        ClusterConfig { shard: Shard::None, context: 1, window: 2, timeout: 600 }
    }
}

impl Default for OptimizerConfig {
    fn default() -> OptimizerConfig {
        OptimizerConfig {
            kind: OptimizerKind::AdamW,
            learning_rate: 1e-4,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.01,
            clip: 1.0,
            masters: true,
            moments: MomentStorage::F32,
            muon: MuonConfig::default(),
        }
    }
}

impl Default for MuonConfig {
    fn default() -> MuonConfig {
        MuonConfig {
            lr_ratio: 1.0,
            adjust_lr: LrAdjustment::default(),
            momentum: 0.95,
            nesterov: true,
            weight_decay: 0.1,
            eps: 1e-7,
            ns_steps: 5,
            ns_coefficients: [3.4445, -4.775, 2.0315],
        }
    }
}

impl Default for ScheduleConfig {
    fn default() -> ScheduleConfig {
        ScheduleConfig { kind: ScheduleKind::Cosine, warmup: 20, floor: 0.1 }
    }
}

impl Default for LossConfig {
    fn default() -> LossConfig {
        LossConfig {
            z_loss: 0.0,
            label_smoothing: 0.0,
            balance: 0.0,
            indexer_scale: 0.0,
            indexer_stage: Stage::Sparse,
        }
    }
}

impl Default for EvaluationConfig {
    fn default() -> EvaluationConfig {
        EvaluationConfig { every: 50, batches: 4 }
    }
}

impl Default for SamplesConfig {
    fn default() -> SamplesConfig {
        SamplesConfig { every: 0, count: 6, tokens: 32 }
    }
}

impl Default for CheckpointsConfig {
    fn default() -> CheckpointsConfig {
        CheckpointsConfig { every: 100, keep_last: 2, keep_best: false, keep_every: 0 }
    }
}

impl Default for LedgerConfig {
    fn default() -> LedgerConfig {
        LedgerConfig { every: 10 }
    }
}

impl Default for SentinelConfig {
    fn default() -> SentinelConfig {
        SentinelConfig {
            on_fault: OnFault::Abort,
            fault_limit: 10,
            spike_sigma: 8.0,
            on_spike: OnSpike::Report,
            spike_limit: 10,
        }
    }
}

impl LossConfig {
    /// Returns true if the loss has parts that a held-out loss does not have.
    pub(crate) fn has_other_parts(&self) -> bool {
        self.z_loss > 0.0 || self.label_smoothing > 0.0
    }

    /// The model's loss options, without the scale of a step.
    pub fn options(&self) -> LossOptions {
        let stage = match self.indexer_stage {
            Stage::Dense => IndexerStage::Dense,
            Stage::Sparse => IndexerStage::Sparse,
        };
        LossOptions {
            z_loss: self.z_loss,
            label_smoothing: self.label_smoothing,
            indexer: (self.indexer_scale > 0.0).then_some(IndexerLoss { scale: self.indexer_scale, stage }),
            balance: (self.balance > 0.0).then_some(self.balance),
            ..LossOptions::default()
        }
    }
}

/// An error of the TOML parser on one line, with the line number in `text` first if it is known.
pub(crate) fn one_line(error: &toml::de::Error, text: &str) -> String {
    let before = error.span().and_then(|span| text.get(..span.start));
    let line =
        before.map(|before| format!("line {}: ", before.matches('\n').count() + 1)).unwrap_or_default();
    let whole = error.to_string();
    let message = if text.is_empty() { whole.trim_end() } else { error.message() };
    format!("{line}{}", message.replace('\n', " "))
}

impl TrainConfig {
    /// Loads a file and applies `a.b=c` settings.
    pub fn load(file: &Path, settings: &[String]) -> Result<TrainConfig> {
        let text = read_regular_text(file).map_err(Error::io(file, "read"))?;
        let text = text_without_mark(&text);
        let table =
            text.parse().map_err(|e| Error::Config(format!("{}: {}", file.display(), one_line(&e, text))))?;
        TrainConfig::from_table(table, settings, Some(file))
    }

    /// Loads [`EMBEDDED`] and applies settings.
    pub fn embedded(settings: &[String]) -> Result<TrainConfig> {
        let table =
            EMBEDDED.parse().map_err(|error| Error::Config(format!("embedded configuration: {error}")))?;
        TrainConfig::from_table(table, settings, None)
    }

    /// Makes a configuration from a table that was read from `file`, and applies settings.
    pub fn from_table(mut table: Table, settings: &[String], file: Option<&Path>) -> Result<TrainConfig> {
        let place = file.map(|file| format!("{}: ", file.display())).unwrap_or_default();
        check_keys(&table, "", &place)?;
        for setting in settings {
            apply(&mut table, setting)?;
        }
        check_keys(&table, "", "--set ")?;
        let config: TrainConfig = Value::Table(table)
            .try_into()
            .map_err(|e| Error::Config(format!("{place}{}", one_line(&e, ""))))?;
        config.check()?;
        Ok(config)
    }

    /// Serializes to TOML that [`TrainConfig::load`] reads.
    pub fn to_toml(&self) -> Result<String> {
        toml::to_string(self)
            .map_err(|error| Error::Config(format!("cannot write the configuration as TOML: {error}")))
    }

    /// Returns an error that names the first key with an invalid value.
    pub fn check(&self) -> Result {
        let refuse = |key: &str, problem: String| Err(Error::Config(format!("`{key}` {problem}")));
        let at_least_one = [
            ("steps", self.steps),
            ("batch.sequences", self.batch.sequences as u64),
            ("batch.accumulation", self.batch.accumulation as u64),
            ("batch.groups", self.batch.groups as u64),
            ("cluster.context", self.cluster.context as u64),
            ("cluster.timeout", self.cluster.timeout),
            ("checkpoints.keep_last", self.checkpoints.keep_last as u64),
            ("lora.rank", self.lora.as_ref().map_or(1, |lora| lora.rank as u64)),
            ("sentinel.spike_limit", self.sentinel.spike_limit),
        ];
        if let Some((key, _)) = at_least_one.iter().find(|(_, value)| *value == 0) {
            return refuse(key, "must be at least 1, got 0".into());
        }
        let at_most = [
            ("lora.rank", self.lora.as_ref().map_or(1, |lora| lora.rank as u64), MOST_RANK),
            ("samples.count", self.samples.count as u64, MOST_SAMPLES),
            ("optimizer.muon.ns_steps", self.optimizer.muon.ns_steps as u64, MOST_NS_STEPS),
            ("samples.tokens", self.samples.tokens as u64, MOST_STEP_TOKENS),
        ];
        if let Some((key, value, most)) = at_most.iter().find(|(_, value, most)| value > most) {
            return refuse(key, format!("must be at most {most}, got {value}"));
        }
        let (batch, length) = (&self.batch, self.data.sequence_length);
        if !batch.accumulation.is_multiple_of(batch.groups) {
            return refuse(
                "batch.accumulation",
                format!(
                    "must be a multiple of `batch.groups` {}, got {}: every group has as many micro-batches",
                    batch.groups, batch.accumulation
                ),
            );
        }
        let tokens = batch.sequences.checked_mul(batch.accumulation).and_then(|n| n.checked_mul(length));
        if tokens.is_none_or(|tokens| tokens as u64 > MOST_STEP_TOKENS) {
            return refuse(
                "batch.sequences",
                format!(
                    "{} x `batch.accumulation` {} x `data.sequence_length` {length}: a step must have at most {MOST_STEP_TOKENS} tokens",
                    batch.sequences, batch.accumulation
                ),
            );
        }
        let o = &self.optimizer;
        for (key, value, valid) in [
            ("optimizer.learning_rate", o.learning_rate, o.learning_rate > 0.0),
            ("optimizer.beta1", o.beta1, (0.0..1.0).contains(&o.beta1)),
            ("optimizer.beta2", o.beta2, (0.0..1.0).contains(&o.beta2)),
            ("optimizer.eps", o.eps, o.eps > 0.0),
            ("optimizer.weight_decay", o.weight_decay, o.weight_decay >= 0.0),
            ("optimizer.clip", o.clip, o.clip >= 0.0),
            ("optimizer.muon.lr_ratio", o.muon.lr_ratio, o.muon.lr_ratio > 0.0),
            ("optimizer.muon.momentum", o.muon.momentum, (0.0..1.0).contains(&o.muon.momentum)),
            ("optimizer.muon.weight_decay", o.muon.weight_decay, o.muon.weight_decay >= 0.0),
            ("optimizer.muon.eps", o.muon.eps, o.muon.eps > 0.0),
            ("schedule.floor", self.schedule.floor, (0.0..=1.0).contains(&self.schedule.floor)),
            ("loss.z_loss", self.loss.z_loss as f64, self.loss.z_loss >= 0.0),
            (
                "loss.label_smoothing",
                self.loss.label_smoothing as f64,
                (0.0..1.0).contains(&self.loss.label_smoothing),
            ),
            ("loss.balance", self.loss.balance as f64, self.loss.balance >= 0.0),
            ("loss.indexer_scale", self.loss.indexer_scale as f64, self.loss.indexer_scale >= 0.0),
            ("sentinel.spike_sigma", self.sentinel.spike_sigma, self.sentinel.spike_sigma >= 0.0),
        ] {
            if !valid || !value.is_finite() {
                return refuse(key, format!("cannot be {value}"));
            }
        }
        if let Some(value) = o.muon.ns_coefficients.iter().find(|value| !value.is_finite()) {
            return refuse("optimizer.muon.ns_coefficients", format!("cannot hold {value}"));
        }
        if self.data.sequence_length < 2 {
            return refuse(
                "data.sequence_length",
                "must be at least 2: one token to read, one to predict".into(),
            );
        }
        let m = &self.model;
        let sources = [m.preset.is_some(), m.config.is_some(), m.checkpoint.is_some()];
        if sources.iter().filter(|given| **given).count() > 1 {
            return refuse("model", "has more than one of preset, config and checkpoint; give one".into());
        }
        if m.time_steps == TimeSteps::Drawn && m.checkpoint.is_some() {
            return refuse("model.time_steps", "applies to new models; a checkpoint has its own".into());
        }
        if self.lora.is_some() && m.checkpoint.is_none() {
            return refuse(
                "lora",
                "adapts a trained model, and `model.checkpoint` names none; set it".into(),
            );
        }
        if self.data.task.is_some() && !self.data.files.is_empty() {
            return refuse("data", "has both a task and files; give one".into());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(settings: &[&str]) -> Result<TrainConfig> {
        let settings: Vec<String> = settings.iter().map(|s| s.to_string()).collect();
        TrainConfig::from_table(Table::new(), &settings, None)
    }

    /// Paths of all values in a table that are no tables.
    fn leaves(table: &Table, above: &str, found: &mut Vec<String>) {
        for (key, value) in table {
            let path = if above.is_empty() { key.clone() } else { format!("{above}.{key}") };
            match value {
                Value::Table(inner) if path != "precision.sites" => leaves(inner, &path, found),
                _ => found.push(path),
            }
        }
    }

    #[test]
    fn the_schema_has_every_field_and_no_other() {
        let path = Some(PathBuf::from("x"));
        let mut config = TrainConfig { lora: Some(LoraConfig::default()), ..TrainConfig::default() };
        config.model = ModelConfig {
            preset: Some("x".into()),
            config: path.clone(),
            checkpoint: path.clone(),
            tokenizer: path.clone(),
            time_steps: TimeSteps::Drawn,
            freeze: vec![],
        };
        config.data.validation = path;
        config.data.document_separator = Some("x".into());
        config.data.task = Some("recall".into());
        let mut found = Vec::new();
        leaves(&config.to_toml().unwrap().parse().unwrap(), "", &mut found);
        let mut known: Vec<String> = KEYS.iter().map(|(key, _)| key.to_string()).collect();
        found.sort();
        known.sort();
        assert_eq!(found, known);
    }

    #[test]
    fn settings_come_after_the_file_and_bare_words_are_text() {
        let file: Table = "steps = 5\n[optimizer]\nlearning_rate = 1e-4".parse().unwrap();
        let settings = ["steps=7".into(), "precision.preset=f32".into(), "precision.sites.logits=f16".into()];
        let config = TrainConfig::from_table(file, &settings, None).unwrap();
        assert_eq!((config.steps, config.optimizer.learning_rate), (7, 1e-4));
        assert_eq!(config.precision.preset, "f32");
        assert_eq!(config.precision.sites["logits"], "f16");
        let again: Table = config.to_toml().unwrap().parse().unwrap();
        assert_eq!(TrainConfig::from_table(again, &[], None).unwrap(), config);
    }

    #[test]
    fn an_unknown_key_names_the_nearest_one() {
        for (setting, expected) in [
            ("optimiser.learning_rate=1", "`optimizer.learning_rate`"),
            ("learning_rate=1", "`optimizer.learning_rate`"),
            ("step=1", "`steps`"),
            ("checkpoints.evry=1", "`checkpoints.every`"),
        ] {
            let error = load(&[setting]).unwrap_err().to_string();
            assert!(error.contains("is unknown") && error.contains(expected), "{error}");
        }
    }

    #[test]
    fn values_that_make_no_sense_are_refused_by_key() {
        for (setting, key) in [
            ("steps=0", "`steps`"),
            ("optimizer.learning_rate=nan", "`optimizer.learning_rate`"),
            ("optimizer.beta2=1.0", "`optimizer.beta2`"),
            ("optimizer.kind=lion", "lion"),
            ("optimizer.muon.momentum=1.0", "`optimizer.muon.momentum`"),
            ("optimizer.muon.ns_steps=100", "`optimizer.muon.ns_steps` must be at most 99, got 100"),
            ("optimizer.muon.ns_coefficients=[1, nan, 0]", "`optimizer.muon.ns_coefficients`"),
            ("optimizer.muon.adjust_lr=half", "half"),
            ("data.sequence_length=1", "`data.sequence_length`"),
            ("optimizer=3", "`optimizer` is a section"),
            ("steps=many", "steps"),
            ("sentinel.on_fault=pray", "pray"),
            ("lora.rank=4", "`model.checkpoint` names none"),
        ] {
            let error = load(&[setting]).unwrap_err().to_string();
            assert!(error.contains(key), "{setting}: {error}");
        }
        let both: Table = "[model]\npreset = 'a'\ncheckpoint = 'b'".parse().unwrap();
        let error = TrainConfig::from_table(both, &[], None).unwrap_err().to_string();
        assert!(error.contains("more than one"), "{error}");
        let both: Table = "[data]\ntask = 'recall'\nfiles = [{ path = 'a.txt' }]".parse().unwrap();
        let error = TrainConfig::from_table(both, &[], None).unwrap_err().to_string();
        assert!(error.contains("both a task and files"), "{error}");
        let error = load(&["model.checkpoint=b", "model.time_steps=drawn"]).unwrap_err().to_string();
        assert!(error.contains("a checkpoint has its own"), "{error}");
        let last = load(&["model.preset=a", "model.checkpoint=b"]).unwrap().model;
        assert_eq!((last.preset, last.checkpoint), (None, Some("b".into())));
    }
}
