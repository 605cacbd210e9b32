//! Results of a study as plain data, written as lab.json and drawn by [`crate::report`].
//!
//! The error of a tensor a is `RMS(a - b) / RMS(b)` with b the reference's, unless stated otherwise. What was
//! not measured (decay in a model without linear attention) is an empty list or `None`. If a dump has no
//! logits, loss, perplexity, KL and agreement are NaN. Non-finite values are `null` in JSON.

use serde::Serialize;

/// Results of a study.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Findings {
    /// Path of the model, as given.
    pub model: String,
    /// `model_type` of its configuration.
    pub model_type: String,
    /// Number of parameters.
    pub parameters: u64,
    /// Number of layers.
    pub layers: usize,
    /// Input.
    pub input: Input,
    /// Reference run.
    pub reference: Reference,
    /// Runs, the largest mean KL first; non-finite runs come before all others. The run `f32` is the floor:
    /// the cost of f32 arithmetic itself.
    pub runs: Vec<Run>,
    /// Protected tensors as stored in the checkpoint.
    pub protected: Vec<ProtectedTensor>,
    /// Decay by layer and head of linear attention, in the reference.
    pub decays: Vec<Decay>,
    /// Range of attention logits by layer, in the reference.
    pub attention: Vec<LogitRange>,
    /// Memory of the q/k norm inside and outside the kernel, by sequence length; empty without linear
    /// attention.
    pub l2norm: Vec<L2NormBytes>,
    /// Results of the training steps, if requested.
    pub training: Option<Training>,
    /// Decoding under each policy compared with f32, the largest mean KL first; empty if not requested.
    pub decoding: Vec<DecodingRun>,
    /// Answers to the published questions.
    pub answers: Vec<Answer>,
    /// Notes on how to read the numbers.
    pub notes: Vec<String>,
    /// Wall time of the study in seconds.
    pub seconds: f64,
    /// Peak memory of the process.
    pub peak_memory_bytes: Option<u64>,
}

/// Input of a study.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Input {
    /// Source: a file, the embedded text, or the embedded task.
    pub source: String,
    /// Number of tokens.
    pub tokens: usize,
    /// Number of sequences.
    pub sequences: usize,
    /// Length of the longest sequence.
    pub longest: usize,
    /// Number of tokens with a target.
    pub predicted: usize,
}

/// Reference run.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Reference {
    /// `f64` or `f32`.
    pub arithmetic: String,
    /// Mean loss of the tokens with a target.
    pub loss: f64,
    /// exp(loss)
    pub perplexity: f64,
}

/// Kind of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A preset, such as the behavior of a framework.
    #[default]
    Preset,
    /// One protected tensor rounded, everything else in f32.
    Tensor,
    /// One operation in a lower precision, everything else in f32.
    Site,
    /// Several choices at once.
    Several,
    /// Another checkpoint, in the reference's arithmetic.
    Checkpoint,
    /// Another framework's tensors.
    Dump,
}

/// Results of one policy relative to the reference.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Run {
    /// Name, as in `--policies`: `hf-bf16`, `A_log`, `logits=f16`.
    pub name: String,
    /// Short description.
    pub what: String,
    /// Kind of the run.
    pub kind: Kind,
    /// Mean loss.
    pub loss: f64,
    /// exp(loss)
    pub perplexity: f64,
    /// Loss minus the reference's.
    pub loss_difference: f64,
    /// KL(reference || this) of the output distributions per token, in nats.
    pub kl: Spread,
    /// Share of tokens with the same top-1 next token as the reference.
    pub top1_agreement: f64,
    /// First tensor, in the order of computation, whose bits differ from the f32 run. For another checkpoint
    /// or a dump: the first tensor whose error exceeds the tolerance, gradients last. `None` if there is
    /// none.
    pub first_difference: Option<String>,
    /// First tensor with a non-finite value where the reference is finite.
    pub not_finite: Option<NotFinite>,
    /// Error of the residual stream after each layer.
    pub by_layer: Vec<LayerError>,
    /// Error of every named tensor, in the order of computation.
    pub sites: Vec<SiteError>,
    /// Errors by position in the sequence.
    pub by_position: Vec<PositionError>,
    /// Decay errors by layer and head of linear attention.
    pub decay: Vec<DecayError>,
    /// Errors of attention logits by layer.
    pub attention: Vec<AttentionError>,
    /// Errors of chosen keys by layer with an indexer.
    pub indexer: Vec<IndexerError>,
    /// Gradient errors by parameter; empty without backward.
    pub gradients: Vec<GradientError>,
    /// Error of all gradients of the language loss together.
    pub gradient_error: Option<f64>,
    /// Error of the gradients of the indexer loss; `None` without indexers.
    pub indexer_gradient_error: Option<f64>,
}

impl Findings {
    /// Returns true if a run has the outputs of f32 and other gradients.
    pub fn changes_gradients_alone(&self, run: &Run) -> bool {
        let floor = self.runs.iter().find(|run| run.name == "f32");
        run.first_difference.is_none() && floor.is_some_and(|f32| f32.gradient_error != run.gradient_error)
    }
}

impl Run {
    /// Returns true if outputs were compared; a dump may have no logits, and its agreement is NaN.
    pub fn has_outputs(&self) -> bool {
        !self.top1_agreement.is_nan()
    }
}

/// Mean, 99th percentile and maximum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct Spread {
    pub mean: f64,
    pub p99: f64,
    pub max: f64,
}

impl Spread {
    /// Sort key of runs: the mean, or infinity if it is non-finite.
    pub fn damage(&self) -> f64 {
        if self.mean.is_finite() { self.mean } else { f64::INFINITY }
    }
}

/// Non-finite values of a tensor.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct NotFinite {
    /// Name of the tensor.
    pub site: String,
    /// Number of non-finite values.
    pub count: usize,
    /// Storage type of the tensor.
    pub dtype: String,
}

/// Error after a layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct LayerError {
    pub layer: usize,
    pub error: f64,
}

/// Error of a named tensor.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SiteError {
    /// Name, such as `layers.3.linear_attn.g`.
    pub site: String,
    /// Storage type.
    pub dtype: String,
    /// RMS(a - b) / RMS(b)
    pub error: f64,
    /// Largest difference.
    pub max_abs: f64,
    /// Largest value of the reference.
    pub largest: f64,
}

/// Errors of tokens at positions `from..to` of their sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct PositionError {
    /// First position.
    pub from: usize,
    /// Position after the last.
    pub to: usize,
    /// Error of the hidden states that the output head reads.
    pub hidden: f64,
    /// RMS over layers of the error of the delta rule's outputs; `None` without linear attention.
    pub recurrence: Option<f64>,
    /// Mean KL divergence.
    pub kl: f64,
}

/// Decay of a head in the reference.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Decay {
    /// Layer.
    pub layer: usize,
    /// Head.
    pub head: usize,
    /// exp(A_log)
    pub rate: f64,
    /// Mean of -g over tokens: decay of the state per token, in nats.
    pub per_token: f64,
    /// Half-life of the state in tokens: ln 2 / per_token.
    pub half_life: f64,
}

/// Error of a head's decay under a policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct DecayError {
    /// Layer.
    pub layer: usize,
    /// Head.
    pub head: usize,
    /// exp(A_log) of this run / the reference's - 1.
    pub rate_error: f64,
    /// Mean of -g of this run / the reference's - 1.
    pub per_token_error: f64,
    /// Half-life in tokens: ln 2 / mean of -g.
    pub half_life: f64,
}

/// Range of a layer's attention logits in the reference.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct LogitRange {
    /// Layer.
    pub layer: usize,
    /// Smallest logit.
    pub min: f64,
    /// Largest logit.
    pub max: f64,
    /// Largest |logit|.
    pub largest: f64,
    /// Distance of neighboring bf16 numbers at `largest`.
    pub bf16_ulp: f64,
    /// Distance of neighboring f16 numbers at `largest`; `None` beyond the range of f16.
    pub f16_ulp: Option<f64>,
    /// Histogram: lower edges of equally wide bins from `min` to `max`, and counts.
    pub histogram: Vec<(f64, u64)>,
    /// Sampled queries, over all heads.
    pub rows: usize,
}

/// Error of a layer's attention logits under a policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct AttentionError {
    /// Layer.
    pub layer: usize,
    /// Largest |logit| of this run.
    pub largest: f64,
    /// Largest difference of a logit.
    pub max_abs: f64,
    /// Share of softmax rows with another top key.
    pub top_key_changed: f64,
    /// Share of rows in which several keys tie for the largest logit.
    pub ties: f64,
}

/// Error of an indexer's choice under a policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct IndexerError {
    /// Layer.
    pub layer: usize,
    /// Mean share of the reference's keys that are chosen too, over queries with more keys than the indexer
    /// takes.
    pub overlap: f64,
    /// Share of these queries with exactly the same keys.
    pub same: f64,
    /// Number of these queries.
    pub queries: usize,
}

/// Error of a parameter's gradient.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct GradientError {
    /// Name of the parameter.
    pub tensor: String,
    /// RMS(a - b) / RMS(b)
    pub error: f64,
    /// Cosine similarity with the reference's gradient.
    pub cosine: f64,
}

/// A protected tensor in the checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ProtectedTensor {
    /// Name.
    pub name: String,
    /// Storage type.
    pub dtype: String,
    /// Number of elements.
    pub elements: u64,
    /// Number of elements that are not exact in bf16.
    pub beyond_bf16: u64,
    /// Largest relative change of an element by rounding to bf16.
    pub bf16_error: f64,
}

/// Bytes saved for backward for q, k and their norm, over all layers with linear attention.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct L2NormBytes {
    /// Sequence length in tokens.
    pub tokens: usize,
    /// With the norm inside the kernel: q and k once.
    pub inside: u64,
    /// With the norm outside: also normalized q and k and the norm factors.
    pub outside: u64,
}

/// A few training steps in f32 and under each policy.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Training {
    /// Number of steps.
    pub steps: usize,
    /// Learning rate of AdamW.
    pub learning_rate: f64,
    /// Loss before each step in the f32 run.
    pub reference: Vec<f64>,
    /// Runs in the order of [`Findings::runs`].
    pub runs: Vec<TrainingRun>,
}

/// Training under a policy.
#[derive(Clone, Debug, Default, Serialize)]
pub struct TrainingRun {
    /// Name of the policy.
    pub name: String,
    /// Loss before each step.
    pub losses: Vec<f64>,
    /// Drift of the parameters a from those of the f32 run b: |a - b| / |b - start|.
    pub drift: f64,
    /// Drift of the protected tensors alone; `None` without any.
    pub protected_drift: Option<f64>,
    /// Step with the first non-finite loss or gradient, counted from 1; training ends there.
    pub not_finite: Option<usize>,
}

/// Decoding under a policy, compared with decoding in f32.
#[derive(Clone, Debug, Default, Serialize)]
pub struct DecodingRun {
    /// Name of the policy.
    pub name: String,
    /// KL(f32 || this) of the output distributions per token, in nats.
    pub kl: Spread,
    /// Share of tokens with the same top-1 next token as f32.
    pub top1_agreement: f64,
    /// Errors by position in the sequence.
    pub by_position: Vec<PositionDivergence>,
}

/// Mean KL divergence of tokens at positions `from..to` of their sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct PositionDivergence {
    pub from: usize,
    pub to: usize,
    pub kl: f64,
}

/// Answer to a published question for this model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Answer {
    /// The question.
    pub question: String,
    /// Short answer.
    pub short: String,
    /// Explanation with numbers.
    pub text: String,
}
