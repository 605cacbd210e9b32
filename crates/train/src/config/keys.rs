//! The table of all configuration keys. An entry is all there is to know about a key:
//!
//! ```text
//! /// Meaning.
//! key: type = default, range => rule on resume;
//! ```
//!
//! From it come the field of the section's struct with its documentation and default, the name under which TOML and
//! `--set` know it, the check of type and range with its error, the list of `ballast train --keys`, the decision when
//! a run is resumed, and docs/configuration.md. The range is of numbers and may be left out, as can a
//! `#[serde(...)]` between meaning and key. The rules are explained at [`OnResume`].
//!
//! A macro by example makes the structs, because then a field without a key, or a key without a field, cannot be
//! written. A list beside handwritten structs is plainer for a first look, but it repeats every name, type and
//! meaning, and only tests hold the two together. A derive would need a crate of procedural macros for one use.
//! Everything else (reading TOML, nearest names, checks, resume, pages) is plain code over [`KEYS`].

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use ballast_kernels::muon::AdjustLr;
use ballast_model::{IndexerStage, Recompute};
use serde::{Deserialize, Serialize};
use toml::Value;

use super::choices::{MomentStorage, OnFault, OnSpike, OptimizerKind, ScheduleKind, Shard, TimeSteps};
use super::key::{ANY, Key, Kind, above, at_least, between, from_to_below, sections};
use super::resume::OnResume::{Applies, ChangesMeasure, MustKeep, Refused};
use crate::data::{DataFile, Packing};

/// Most tokens of a step: far beyond practice, and small enough that no derived size overflows.
pub(super) const MOST_STEP_TOKENS: u64 = 1 << 32;

const ARCHITECTURE: &str = "the architecture";
const TRAINED: &str = "the trained parameters";
const ORDER: &str = "it determines the order of the documents";
const STORED: &str = "weights and masters were saved in the old types";
const TOKENS: &str = "it determines the tokens that are trained on";
pub(super) const SPLIT: &str = "it determines the held-out documents";

sections! {
    /// Configuration of a run.
    TrainConfig "" {
        /// Output folder: checkpoints, model, metrics.jsonl, report.html.
        #[serde(serialize_with = "as_text")]
        out: PathBuf = "runs/default".into() => Refused("a resumed run keeps its output folder");
        /// Random seed of new weights, document order and the embedded task.
        seed: u64 = 1, at_least(0) => Refused("it determines weights, held-out documents and document order");
        /// Number of optimizer steps.
        steps: u64 = 1000, at_least(1) => Applies;
        /// Write event files for TensorBoard.
        tensorboard: bool = false => Applies;
        section model: ModelConfig;
        section lora: Option<LoraConfig>;
        section precision: PrecisionConfig;
        section data: DataConfig;
        section batch: BatchConfig;
        section cluster: ClusterConfig;
        section optimizer: OptimizerConfig;
        section schedule: ScheduleConfig;
        section loss: LossConfig;
        section evaluation: EvaluationConfig;
        section samples: SamplesConfig;
        section checkpoints: CheckpointsConfig;
        section ledger: LedgerConfig;
        section sentinel: SentinelConfig;
    }

    /// The model.
    ModelConfig "model." {
        /// Embedded architecture with random weights, one of those listed below.
        preset: Option<String> = None => MustKeep(ARCHITECTURE);
        /// config.json of an architecture, with random weights.
        config: Option<PathBuf> = None => MustKeep(ARCHITECTURE);
        /// Checkpoint to start from, in any layout, or `hf://ORG/NAME[@REVISION]`.
        checkpoint: Option<PathBuf> = None => MustKeep("the weights");
        /// Folder with tokenizer.json, if it is not beside the model.
        tokenizer: Option<PathBuf> = None => MustKeep("the tokenizer");
        /// `dt_bias` of a new model: ones (fast decay in every head) or drawn (random time steps, some with long
        /// memory).
        time_steps: TimeSteps = TimeSteps::Ones => Refused("it applies to new weights only");
        /// Patterns of parameters that are not trained; `*` stands for any characters.
        freeze: Vec<String> = vec![] => MustKeep(TRAINED);
    }

    /// LoRA adapters.
    LoraConfig "lora." {
        /// Train adapters of this rank instead of the weights; any key of `lora` turns adapters on.
        rank: usize = 16, between(1, 1 << 16) => MustKeep(TRAINED);
        /// Adapter scale: alpha / rank.
        alpha: f32 = 32.0 => Refused("it scales the trained adapters");
        /// Modules that get an adapter, by the end of their names.
        targets: Vec<String> = ADAPTED.map(String::from).to_vec() => MustKeep(TRAINED);
    }

    /// Storage types, compute types and recomputation.
    PrecisionConfig "precision." {
        /// Storage and compute types: `f32`, `bf16`, `megatron`, `nemo`, `maxtext-default` or `hf-bf16`.
        preset: String = "bf16".into() => Refused(STORED);
        /// Activations that backward recomputes instead of keeping; the bits are the same.
        recompute: Recompute = Recompute::None => Applies;
        /// Compute types of single sites, for example `{ logits = "f16" }`.
        sites: BTreeMap<String, String> = BTreeMap::new() => Applies;
    }

    /// Files, held-out documents, and packing into sequences.
    DataConfig "data." {
        /// Embedded task instead of files: recall.
        task: Option<String> = None => Refused("the run would continue on other data");
        /// Training files: .txt, or .jsonl with text, messages, or prompt and completion. The weight is the relative
        /// frequency of a file's documents.
        files: Vec<DataFile> = vec![] => MustKeep("the content of the files; weights may change");
        /// File of held-out documents.
        validation: Option<PathBuf> = None => MustKeep("the content of the file");
        /// Fraction of each training file's documents that is held out if there is no validation file.
        validation_fraction: f64 = 0.05, from_to_below(0, 1) => Refused(SPLIT);
        /// Maximum sequence length in tokens; a longer document continues in the next sequence (packed) or is truncated
        /// (padded).
        sequence_length: usize = 2048, at_least(2) => ChangesMeasure;
        /// Packing: packed (documents concatenated, state reset between them) or padded (one document per sequence).
        packing: Packing = Packing::Packed => Refused(ORDER);
        /// Roles whose messages are trained on.
        train_roles: Vec<String> = vec!["assistant".into()] => Refused(TOKENS);
        /// Shuffle the documents in each epoch; otherwise they come in file order.
        shuffle: bool = true => Refused(ORDER);
        /// End texts and completions with the tokenizer's end token; conversations end as their template says.
        add_eos: bool = true => Refused(TOKENS);
        /// Line that separates the documents of a .txt file; without it, a file is one document.
        document_separator: Option<String> = None => Refused(ORDER);
    }

    /// Batch size.
    BatchConfig "batch." {
        /// Sequences per micro-batch.
        sequences: usize = 1, at_least(1) => ChangesMeasure;
        /// Gradient accumulation: micro-batches per step, weighted by tokens.
        accumulation: usize = 8, at_least(1) => Applies;
        /// Groups of micro-batches whose gradients are summed as a tree. Ranks divide the groups, so the bits depend
        /// on this number and not on the ranks.
        groups: usize = 1, at_least(1) => Refused(ORDER);
    }

    /// Division of a run over several processes.
    ClusterConfig "cluster." {
        /// State divided over the ranks; each level includes the ones before it.
        shard: Shard = Shard::None => Applies;
        /// Number of ranks that share the tokens of a micro-batch, for long sequences.
        context: usize = 1, at_least(1) => Refused("it fixes the summation order");
        /// Layers whose gradient messages may be in flight during backward; 0: blocking.
        window: usize = 2, at_least(0) => Applies;
        /// Seconds without an answer after which a rank counts as lost and the run ends; ranks answer while they compute.
        timeout: u64 = 600, at_least(1) => Applies;
    }

    /// Optimizer, clipping and masters.
    OptimizerConfig "optimizer." {
        /// Optimizer of the matrices inside the layers; AdamW updates everything else.
        kind: OptimizerKind = OptimizerKind::AdamW => Refused("the optimizer state was saved for the old optimizer");
        /// Peak learning rate of the schedule.
        learning_rate: f64 = 1e-4, above(0) => Applies;
        /// AdamW: decay of the first moment.
        beta1: f64 = 0.9, from_to_below(0, 1) => Applies;
        /// AdamW: decay of the second moment.
        beta2: f64 = 0.95, from_to_below(0, 1) => Applies;
        /// AdamW: term added to the root of the second moment.
        eps: f64 = 1e-8, above(0) => Applies;
        /// AdamW: weight decay of matrices; norms, biases and protected tensors never decay.
        weight_decay: f64 = 0.01, at_least(0) => Applies;
        /// Maximum global gradient norm; larger gradients are scaled down; 0: no clipping.
        clip: f64 = 1.0, at_least(0) => Applies;
        /// Keep f32 masters of bf16 weights; false rounds every update to bf16.
        masters: bool = true => Refused(STORED);
        /// Storage of the moments of weights; fewer bits are rounded stochastically, from the seed.
        moments: MomentStorage = MomentStorage::F32 => Refused("the optimizer state was saved in that type");
        section muon: MuonConfig;
    }

    /// Settings of Muon; see [`ballast_kernels::muon`].
    MuonConfig "optimizer.muon." {
        /// Muon: its learning rate as a multiple of `optimizer.learning_rate`.
        lr_ratio: f64 = 1.0, above(0) => Applies;
        /// Muon: factor of the learning rate by the shape of a matrix.
        adjust_lr: AdjustLr = AdjustLr::default() => Applies;
        /// Muon: decay of the momentum.
        momentum: f64 = 0.95, from_to_below(0, 1) => Applies;
        /// Muon: use Nesterov momentum.
        nesterov: bool = true => Applies;
        /// Muon: weight decay of its matrices.
        weight_decay: f64 = 0.1, at_least(0) => Applies;
        /// Muon: minimum norm that the momentum is divided by.
        eps: f64 = 1e-7, above(0) => Applies;
        /// Muon: number of Newton-Schulz steps.
        ns_steps: usize = 5, between(0, 99) => Applies;
        /// Muon: the three coefficients of a Newton-Schulz step.
        ns_coefficients: [f64; 3] = [3.4445, -4.775, 2.0315] => Applies;
    }

    /// Learning-rate schedule.
    ScheduleConfig "schedule." {
        /// Shape after the warm-up.
        kind: ScheduleKind = ScheduleKind::Cosine => Applies;
        /// Number of warm-up steps; limited to the steps of the run.
        warmup: u64 = 20, at_least(0) => Applies;
        /// Final learning rate as a fraction of the peak.
        floor: f64 = 0.1, between(0, 1) => Applies;
    }

    /// The loss.
    LossConfig "loss." {
        /// Coefficient of the z-loss: the squared log-sum-exp of the logits.
        z_loss: f32 = 0.0, at_least(0) => Applies;
        /// Label smoothing factor.
        label_smoothing: f32 = 0.0, from_to_below(0, 1) => Applies;
        /// Coefficient of the load-balancing loss of the routers.
        balance: f32 = 0.0, at_least(0) => Applies;
        /// Coefficient of the indexer loss; 0: indexers are not trained.
        indexer_scale: f32 = 0.0, at_least(0) => MustKeep(TRAINED);
        /// Indexer training stage: dense (warm-up: only indexers are trained) or sparse.
        indexer_stage: IndexerStage = IndexerStage::Sparse => MustKeep(TRAINED);
    }

    /// Evaluation on held-out data.
    EvaluationConfig "evaluation." {
        /// Steps between evaluations on held-out data; 0: only at the end.
        every: u64 = 50, at_least(0) => Applies;
        /// Micro-batches per evaluation; 0: no evaluation.
        batches: usize = 4, at_least(0) => ChangesMeasure;
    }

    /// Sample answers.
    SamplesConfig "samples." {
        /// Steps between sample answers; 0: only at the end.
        every: u64 = 0, at_least(0) => Applies;
        /// Number of sample answers; 0: none.
        count: usize = 6, between(0, 1 << 10) => Applies;
        /// Maximum number of tokens of a sample answer.
        tokens: usize = 32, between(0, MOST_STEP_TOKENS) => Applies;
    }

    /// Checkpoints that are written and kept.
    CheckpointsConfig "checkpoints." {
        /// Steps between checkpoints; 0: only at the end.
        every: u64 = 100, at_least(0) => Applies;
        /// Number of newest checkpoints to keep.
        keep_last: usize = 2, at_least(1) => Applies;
        /// Also keep the checkpoint with the lowest held-out loss.
        keep_best: bool = false => Applies;
        /// Also keep each checkpoint whose step is a multiple of this number; 0: off.
        keep_every: u64 = 0, at_least(0) => Applies;
    }

    /// Protected-tensor check.
    LedgerConfig "ledger." {
        /// Steps between checks that forward reads the protected tensors in f32; 0: only at start and end.
        every: u64 = 10, at_least(0) => Applies;
    }

    /// Fault and spike handling.
    SentinelConfig "sentinel." {
        /// Action on a NaN or infinity.
        on_fault: OnFault = OnFault::Abort => Applies;
        /// Maximum number of faults with skip, rollback or escalate; one more ends the run (exit code 5).
        fault_limit: u64 = 10, at_least(0) => Applies;
        /// Standard deviations above the mean that make a loss or gradient norm a spike; 0: never.
        spike_sigma: f64 = 8.0, at_least(0) => Applies;
        /// Action on a spike.
        on_spike: OnSpike = OnSpike::Report => Applies;
        /// Maximum number of consecutive spikes with skip; one more ends the run (exit code 5).
        spike_limit: u64 = 10, at_least(1) => Applies;
    }
}

/// Modules with adapters by default.
const ADAPTED: [&str; 7] = ["q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj"];

/// Serializes the folder of a run as text. A name that is not UTF-8 has no exact form in TOML; a resumed run
/// uses the folder that it was given.
fn as_text<S: serde::Serializer>(path: &Path, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&path.to_string_lossy())
}
