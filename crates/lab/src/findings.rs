//! What a run of the lab found: plain data, written as lab.json, drawn by [`crate::report`].
//!
//! An error of a tensor is `RMS(a - b) / RMS(b)` with b the reference's, unless it is said otherwise. What was not measured
//! (a model without linear attention has no decay) is an empty list or `None`; where another framework's files have no logits,
//! loss, perplexity, KL and agreement are no numbers. A value that is non-finite is `null` in JSON.

use serde::Serialize;

/// Everything.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Findings {
    /// What was looked at, as it was asked for.
    pub model: String,
    /// `model_type` of its configuration.
    pub model_type: String,
    /// Elements of all parameters.
    pub parameters: u64,
    /// Layers.
    pub layers: usize,
    /// What it read.
    pub input: Input,
    /// The run that all others are compared with.
    pub reference: Reference,
    /// The runs, the one with most damage (mean KL divergence; non-finite comes first) first. The one called `f32` is the
    /// floor: what f32 arithmetic itself costs.
    pub runs: Vec<Run>,
    /// Protected tensors, as the checkpoint stores them.
    pub protected: Vec<ProtectedTensor>,
    /// By layer and head of linear attention, in the reference.
    pub decays: Vec<Decay>,
    /// By layer of softmax and latent attention, in the reference.
    pub attention: Vec<LogitRange>,
    /// What the q/k norm inside the kernel saves, by length; empty without linear attention.
    pub l2norm: Vec<L2NormBytes>,
    /// What a few training steps showed, if there were any.
    pub training: Option<Training>,
    /// The input token by token under each policy beside f32, the one with most damage first; empty if it was not asked for.
    pub decoding: Vec<DecodingRun>,
    /// The published questions, answered for this model.
    pub answers: Vec<Answer>,
    /// What a reader must know to read the figures right.
    pub notes: Vec<String>,
    /// Time of the whole, in seconds.
    pub seconds: f64,
    /// Most memory that the process had.
    pub peak_memory_bytes: Option<u64>,
}

/// What the model read.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Input {
    /// A file, or the embedded text.
    pub source: String,
    /// Tokens in all.
    pub tokens: usize,
    /// Sequences.
    pub sequences: usize,
    /// Tokens of the longest.
    pub longest: usize,
    /// Tokens with a target.
    pub predicted: usize,
}

/// The run that others are compared with.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Reference {
    /// `f64` or `f32`.
    pub arithmetic: String,
    /// Mean loss of the tokens with a target.
    pub loss: f64,
    /// exp(loss)
    pub perplexity: f64,
}

/// What a policy changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A preset: what a framework does.
    #[default]
    Preset,
    /// One protected tensor rounded, everything else f32.
    Tensor,
    /// One operation in a narrower type, everything else f32.
    Site,
    /// Several at once, as asked for.
    Several,
    /// Another checkpoint, in the reference's arithmetic.
    Checkpoint,
    /// Another framework's tensors.
    Dump,
}

/// One policy against the reference.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Run {
    /// As it is asked for: `hf-bf16`, `A_log`, `logits=f16`.
    pub name: String,
    /// What it does, in a few words.
    pub what: String,
    /// What it changes.
    pub kind: Kind,
    /// Mean loss.
    pub loss: f64,
    /// exp(loss)
    pub perplexity: f64,
    /// Loss minus the reference's.
    pub loss_difference: f64,
    /// KL(reference || this) of the output distributions, over tokens, in nats.
    pub kl: Spread,
    /// Share of tokens whose likeliest next token is the reference's.
    pub top1_agreement: f64,
    /// The first tensor, in the order in which they are made, whose bits differ from the run in f32; for another checkpoint or
    /// another framework's tensors, the first that is farther from the reference than it may be, gradients last. `None`: none.
    pub first_difference: Option<String>,
    /// The first tensor with a value that is non-finite where the reference has only finite ones.
    pub not_finite: Option<NotFinite>,
    /// Error of the residual stream after each layer.
    pub by_layer: Vec<LayerError>,
    /// Error of every named tensor, in the order in which they are made.
    pub sites: Vec<SiteError>,
    /// By position in the sequence.
    pub by_position: Vec<PositionError>,
    /// By layer and head of linear attention.
    pub decay: Vec<DecayError>,
    /// By layer of softmax and latent attention.
    pub attention: Vec<AttentionError>,
    /// By layer with an indexer.
    pub indexer: Vec<IndexerError>,
    /// By parameter; empty without backward.
    pub gradients: Vec<GradientError>,
    /// Of all gradients of the language loss together: RMS of the differences / RMS.
    pub gradient_error: Option<f64>,
    /// The same of the gradients that indexers have of their own loss; `None` without indexers.
    pub indexer_gradient_error: Option<f64>,
}

impl Run {
    /// Whether its outputs were compared: a dump may have no logits, and then there is no share of any tokens.
    pub fn has_outputs(&self) -> bool {
        !self.top1_agreement.is_nan()
    }
}

/// Mean, 99th percentile, largest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct Spread {
    pub mean: f64,
    pub p99: f64,
    pub max: f64,
}

impl Spread {
    /// What runs are ordered by: the mean, and what is non-finite is worse than all else.
    pub fn damage(&self) -> f64 {
        if self.mean.is_finite() { self.mean } else { f64::INFINITY }
    }
}

/// A value that is non-finite.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct NotFinite {
    /// Where.
    pub site: String,
    /// How many values there are.
    pub count: usize,
    /// What the tensor is stored in.
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
    /// Such as `layers.3.linear_attn.g`.
    pub site: String,
    /// What it is stored in.
    pub dtype: String,
    /// RMS(a - b) / RMS(b)
    pub error: f64,
    /// Largest difference.
    pub max_abs: f64,
    /// Largest value of the reference.
    pub largest: f64,
}

/// Error of tokens whose position in their sequence is in `from..to`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct PositionError {
    /// First position.
    pub from: usize,
    /// Position after the last.
    pub to: usize,
    /// Error of the hidden states that the output head reads.
    pub hidden: f64,
    /// Error of the recurrence: of the delta rule's outputs, over all layers with it; `None` without them.
    pub recurrence: Option<f64>,
    /// Mean KL divergence.
    pub kl: f64,
}

/// The decay of a head in the reference.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Decay {
    /// Layer.
    pub layer: usize,
    /// Head.
    pub head: usize,
    /// exp(A_log)
    pub rate: f64,
    /// Mean of -g over the tokens: what the state loses per token, in nats.
    pub per_token: f64,
    /// Tokens after which a state has lost half: ln 2 / per_token.
    pub half_life: f64,
}

/// What a policy makes of a head's decay.
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
    /// ln 2 / mean of -g.
    pub half_life: f64,
}

/// Attention logits of a layer in the reference.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct LogitRange {
    /// Layer.
    pub layer: usize,
    /// Smallest.
    pub min: f64,
    /// Largest.
    pub max: f64,
    /// Largest |logit|.
    pub largest: f64,
    /// Distance of neighbours at `largest` in bf16.
    pub bf16_ulp: f64,
    /// Distance of neighbours at `largest` in f16; `None`: it is beyond f16's range.
    pub f16_ulp: Option<f64>,
    /// The logits' distribution: lower edges of equally wide bins from `min` to `max`, and how many are in each.
    pub histogram: Vec<(f64, u64)>,
    /// Queries that were looked at, over all heads.
    pub rows: usize,
}

/// What a policy makes of a layer's attention.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct AttentionError {
    /// Layer.
    pub layer: usize,
    /// Largest |logit| of this run.
    pub largest: f64,
    /// Largest difference of a logit.
    pub max_abs: f64,
    /// Share of softmax rows whose largest key is another one.
    pub top_key_changed: f64,
    /// Share of rows where several keys share the largest logit, as rounding makes them.
    pub ties: f64,
}

/// What a policy makes of an indexer's choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct IndexerError {
    /// Layer.
    pub layer: usize,
    /// Mean share of the reference's chosen keys that are chosen too, over queries that have a choice.
    pub overlap: f64,
    /// Share of queries with exactly the same keys.
    pub same: f64,
    /// Queries that have a choice.
    pub queries: usize,
}

/// Error of a parameter's gradient.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct GradientError {
    /// The parameter.
    pub tensor: String,
    /// RMS(a - b) / RMS(b)
    pub error: f64,
    /// Cosine of the angle between the two.
    pub cosine: f64,
}

/// A protected tensor in the checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ProtectedTensor {
    /// Name.
    pub name: String,
    /// What it is stored in.
    pub dtype: String,
    /// Elements.
    pub elements: u64,
    /// Those that bf16 cannot hold.
    pub beyond_bf16: u64,
    /// Largest relative change of an element by rounding to bf16.
    pub bf16_error: f64,
}

/// What is kept for backward of q, k and their norm, over all layers with linear attention, at a length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct L2NormBytes {
    /// Tokens.
    pub tokens: usize,
    /// With the norm inside the kernel: q and k, once.
    pub inside: u64,
    /// With it outside: normalised q and k and the factors beside them.
    pub outside: u64,
}

/// The same few training steps under the reference in f32 and under each policy.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Training {
    /// Steps.
    pub steps: usize,
    /// Learning rate of AdamW.
    pub learning_rate: f64,
    /// Loss before each step in f32.
    pub reference: Vec<f64>,
    /// By policy, in the order of [`Findings::runs`].
    pub runs: Vec<TrainingRun>,
}

/// A policy in training.
#[derive(Clone, Debug, Default, Serialize)]
pub struct TrainingRun {
    /// The policy.
    pub name: String,
    /// Loss before each step.
    pub losses: Vec<f64>,
    /// How far the parameters are from those of the reference, for how far those moved: |a - b| / |b - start|.
    pub drift: f64,
    /// The same for protected tensors alone; `None` without any.
    pub protected_drift: Option<f64>,
    /// The step at which a loss or gradient was non-finite, counted from one; training ends there.
    pub not_finite: Option<usize>,
}

/// A policy that decodes, beside f32 that does.
#[derive(Clone, Debug, Default, Serialize)]
pub struct DecodingRun {
    /// The policy.
    pub name: String,
    /// KL(f32 || this) of the output distributions, over tokens, in nats.
    pub kl: Spread,
    /// Share of tokens whose likeliest next token is f32's.
    pub top1_agreement: f64,
    /// By position in the sequence.
    pub by_position: Vec<PositionDivergence>,
}

/// Mean KL divergence of tokens whose position in their sequence is in `from..to`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct PositionDivergence {
    pub from: usize,
    pub to: usize,
    pub kl: f64,
}

/// A published question, answered for this model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Answer {
    /// The question.
    pub question: String,
    /// Yes, no, or not here.
    pub short: String,
    /// The answer in words, with figures.
    pub text: String,
}
