//! Parses Hugging Face's config.json into one description of a decoder, the same for all model families.
//!
//! A model is an embedding, layers, a norm and an output head. A layer is a mixer (linear attention, softmax
//! attention, or latent attention with an indexer) and a feed-forward part (dense, experts, or both), each
//! behind a norm, in Gemma with another norm after it. The differences between families are data, so one set
//! of layers runs them all.

mod deepseek;
mod fields;
mod gemma;
mod keys;
mod qwen;
mod rope;

use std::path::Path;

use ballast_kernels::glu::Activation;
use serde_json::{Value, json};

use crate::error::{Error, Result};
use fields::Fields;
pub use rope::Rope;

/// Description of a decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// `model_type` of the text part.
    pub model_type: String,
    /// V: vocabulary size.
    pub vocabulary: usize,
    /// H: hidden size.
    pub hidden: usize,
    /// Epsilon inside the square root of every norm.
    pub eps: f32,
    /// True if norms multiply by 1 + w, false if by w.
    pub one_plus_norms: bool,
    /// Factor of the embeddings, applied before rounding to the weight's type.
    pub embedding_scale: f32,
    /// Token whose embedding gets no gradient from lookups, as torch's `padding_idx`.
    pub padding: Option<u32>,
    /// True if the output head shares the embedding's weight.
    pub tied: bool,
    /// Soft cap c of the logits: c tanh(x/c).
    pub final_cap: Option<f32>,
    /// Activation function of the gated feed-forward parts.
    pub activation: Activation,
    /// Longest sequence that the model supports (`max_position_embeddings`).
    pub max_positions: usize,
    /// True if a norm also follows the mixer and the feed-forward part.
    pub norms_after: bool,
    /// True if each layer's output is multiplied by a stored scalar.
    pub layer_scalar: bool,
    /// Second embedding that feeds every layer (Gemma 4).
    pub per_layer_inputs: Option<PerLayerInputs>,
    /// Coefficient of the load-balancing loss of the experts, used in training.
    pub router_aux_loss: f32,
    /// Standard deviation of the matrices of a newly initialized model.
    pub initializer_range: f32,
    /// Layers, first to last.
    pub layers: Vec<Layer>,
}

/// A second embedding with a slice for each layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PerLayerInputs {
    /// Vocabulary size of the second embedding.
    pub vocabulary: usize,
    /// P: width of one layer's slice.
    pub width: usize,
}

/// One layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Layer {
    /// Token mixer.
    pub mixer: Mixer,
    /// Intermediate width of the dense feed-forward part, if the layer has one.
    pub dense: Option<usize>,
    /// Mixture of experts, if the layer has one.
    pub experts: Option<Experts>,
}

/// Token mixer.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // the types are documented
pub enum Mixer {
    Linear(LinearAttention),
    Softmax(Attention),
    Latent(LatentAttention),
}

/// Linear attention: a short convolution, then the gated delta rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearAttention {
    /// Number of q and k heads.
    pub key_heads: usize,
    /// Number of v heads.
    pub value_heads: usize,
    /// Width of a q or k head.
    pub key_dim: usize,
    /// Width of a v head.
    pub value_dim: usize,
    /// Kernel width of the convolution.
    pub conv_width: usize,
}

/// Softmax attention.
#[derive(Clone, Debug, PartialEq)]
pub struct Attention {
    /// Number of q heads.
    pub heads: usize,
    /// Number of k and v heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Rotary embedding of q and k.
    pub rope: Rope,
    /// Factor of q.k before the softmax.
    pub scale: f32,
    /// Sliding window W: query i attends to keys i - W < j <= i.
    pub window: Option<usize>,
    /// Soft cap c of the attention logits: c tanh(x/c).
    pub soft_cap: Option<f32>,
    /// True if q_proj also computes an output gate beside each head's query.
    pub gated: bool,
    /// True if q and k are normalized before the rotary embedding.
    pub qk_norm: bool,
    /// Source of the values.
    pub values: Values,
    /// True if the projections have a bias.
    pub bias: bool,
    /// Layer whose keys and values this layer uses instead of its own.
    pub shared_from: Option<usize>,
}

/// Source of the values of softmax attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Values {
    /// Output of v_proj.
    Projected,
    /// Output of v_proj, then a norm without weight.
    Normed,
    /// Output of k_proj before k's norm and rotary embedding, then a norm without weight.
    KeysNormed,
}

/// Multi-head latent attention: compressed keys and values, restricted to the keys that an indexer selects.
#[derive(Clone, Debug, PartialEq)]
pub struct LatentAttention {
    /// Number of heads.
    pub heads: usize,
    /// Width of the compressed query.
    pub q_rank: usize,
    /// Width of the compressed keys and values.
    pub kv_rank: usize,
    /// Width of the part of a head's query and key without rotary embedding.
    pub nope_dim: usize,
    /// Width of the part with rotary embedding; all heads share the key's.
    pub rope_dim: usize,
    /// Width of a head's value.
    pub value_dim: usize,
    /// Rotary embedding of the attention, interleaved.
    pub rope: Rope,
    /// Rotary embedding of the indexer, half-split.
    pub indexer_rope: Rope,
    /// Factor of q.k before the softmax.
    pub scale: f32,
    /// Number of indexer heads.
    pub index_heads: usize,
    /// Width of the indexer's heads and of its single key.
    pub index_dim: usize,
    /// Number of keys selected for a query.
    pub index_topk: usize,
    /// True if the first projections and the last one have a bias.
    pub bias: bool,
}

/// A mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Experts {
    /// E: number of experts.
    pub count: usize,
    /// Number of experts for each token.
    pub top_k: usize,
    /// Intermediate width of an expert.
    pub intermediate: usize,
    /// Selection of the experts of a token.
    pub router: Router,
    /// Shared expert, applied to every token.
    pub shared: Option<SharedExpert>,
}

/// Selection of the experts of a token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Router {
    /// Softmax of the logits of mlp.gate.
    Softmax {
        /// True if the weights of a token are normalized to a sum of 1.
        normalize: bool,
    },
    /// Sigmoid scores, a bias used for selection only, groups selected first (DeepSeek).
    SigmoidGroups {
        /// Number of expert groups.
        groups: usize,
        /// Number of groups selected for a token.
        kept_groups: usize,
        /// True if the weights of a token are divided by their sum.
        normalize: bool,
        /// Factor of the weights.
        scaling: f32,
    },
    /// Softmax on the normalized residual stream, with a scale per dimension and per expert (Gemma 4).
    Normed,
}

/// Shared expert, applied to every token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedExpert {
    /// Intermediate width.
    pub intermediate: usize,
    /// True if a gate multiplies its output.
    pub gated: bool,
}

/// Supported values of `model_type`. A type that also exists with the suffix `_text` wraps a `text_config`.
pub const MODEL_TYPES: [&str; 11] = [
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_text",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "gemma4",
    "gemma4_text",
    "deepseek_v32",
];

impl Config {
    /// Parses config.json; errors name `file`.
    pub fn parse(config: &Value, file: &Path) -> Result<Config> {
        Ok(Config::parse_all(config, file)?.0)
    }

    /// Lists the keys of config.json that have no effect here and are not known to be harmless, as sorted
    /// paths such as `text_config.foo`. Fails if the file is invalid.
    pub fn unknown_keys(config: &Value, file: &Path) -> Result<Vec<String>> {
        Ok(Config::parse_all(config, file)?.1)
    }

    fn parse_all(config: &Value, file: &Path) -> Result<(Config, Vec<String>)> {
        let top = Fields::new(file, config)?;
        let text = top.object("text_config")?;
        let wrapped = text.is_some();
        let fields = text.unwrap_or_else(|| top.clone());
        let top_type = top.text("model_type")?;
        let model_type = match fields.text("model_type")? {
            Some(model_type) => model_type,
            None => top_type.ok_or_else(|| fields.error("model_type", "is missing"))?,
        };
        if let Some(around) = top_type
            && wrapped
            && model_type != around
            && model_type.strip_suffix("_text") != Some(around)
        {
            let problem = format!("is {around:?}, which cannot wrap a text model of type {model_type:?}");
            return Err(top.error("model_type", problem));
        }
        keys::check_common(&top)?;
        keys::check_common(&fields)?;
        let mut config = match model_type {
            "qwen3_next" | "qwen3_5_text" | "qwen3_5_moe_text" => qwen::parse(&fields, model_type),
            "gemma2" | "gemma3_text" | "gemma4_text" => gemma::parse(&fields, model_type, wrapped),
            "deepseek_v32" => deepseek::parse(&fields),
            _ => Err(fields.error(
                "model_type",
                format!("is {model_type:?}, which is not supported; use one of: {}", MODEL_TYPES.join(", ")),
            )),
        }?;
        if model_type != "gemma4_text" {
            fields.only("per_layer_config", json!({}))?;
        }
        if wrapped && top.get("tie_word_embeddings").is_some() {
            let tied = top.flag("tie_word_embeddings", config.tied)?;
            if fields.contains("tie_word_embeddings") && tied != config.tied {
                let problem = format!("is {tied}, but `text_config.tie_word_embeddings` is {}", config.tied);
                return Err(top.error("tie_word_embeddings", problem));
            }
            config.tied = tied;
        }
        let unknown = keys::unknown(&top, model_type, wrapped);
        Ok((config, unknown))
    }

    /// Returns true if a layer has an indexer.
    pub fn has_indexer(&self) -> bool {
        self.layers.iter().any(|layer| matches!(layer.mixer, Mixer::Latent(_)))
    }
}

impl Layer {
    /// Returns the module name of the mixer.
    pub(crate) fn mixer_name(&self) -> &'static str {
        match self.mixer {
            Mixer::Linear(_) => "linear_attn",
            Mixer::Softmax(_) | Mixer::Latent(_) => "self_attn",
        }
    }
}

/// Reads `pad_token_id`: `default` if it is missing, `None` if it is null.
fn padding(fields: &Fields<'_>, default: Option<u32>, vocabulary: usize) -> Result<Option<u32>> {
    let field = "pad_token_id";
    if !fields.contains(field) {
        return Ok(default);
    }
    match fields.whole(field)? {
        Some(id) if id >= vocabulary => {
            Err(fields.error(field, format!("must be below vocab_size ({vocabulary}), got {id}")))
        }
        id => Ok(id.map(|id| id as u32)),
    }
}

/// Reads `initializer_range`; 0 means the default, as in transformers.
fn initializer_range(fields: &Fields<'_>) -> Result<f32> {
    let range = fields.number("initializer_range")?.filter(|range| *range != 0.0);
    Ok(range.unwrap_or(0.02) as f32)
}

/// Checks that `part` divides `whole`; errors name `field`, which holds `part`.
fn check_heads(fields: &Fields<'_>, whole: usize, part: usize, field: &str) -> Result {
    if part > 0 && whole.is_multiple_of(part) {
        return Ok(());
    }
    Err(fields.error(field, format!("must divide {whole}, got {part}")))
}

/// Checks that a token can have `top_k` of `count` experts.
fn check_top_k(fields: &Fields<'_>, count: usize, top_k: usize, field: &str) -> Result {
    if top_k <= count {
        return Ok(());
    }
    Err(fields.error(field, format!("must be at most the number of experts ({count}), got {top_k}")))
}

fn unsupported_layer(fields: &Fields<'_>, kind: &str, known: &str) -> Error {
    fields.error("layer_types", format!("has {kind:?}, which is not supported; use {known}"))
}
