//! config.json of Hugging Face as one description of a decoder, whatever the family.
//!
//! A model is an embedding, layers, a norm and an output head. A layer is a mixer (linear attention, softmax
//! attention, or latent attention with an indexer) and a feed-forward part (dense, experts, or both), each behind a
//! norm, in Gemma with another one after it. What families differ in is data here, so that one set of layers runs
//! them all.

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

/// A decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// `model_type` of the text part.
    pub model_type: String,
    /// V
    pub vocabulary: usize,
    /// H
    pub hidden: usize,
    /// Inside the root of every norm.
    pub eps: f32,
    /// Whether norms multiply by 1 + w; else by w.
    pub one_plus_norms: bool,
    /// What embeddings are multiplied by, before rounding to the weight's type.
    pub embedding_scale: f32,
    /// The token whose embedding is not learned where it is looked up, as torch's `padding_idx` has it.
    pub padding: Option<u32>,
    /// Whether the output head is the embedding.
    pub tied: bool,
    /// c tanh(x/c) on the logits.
    pub final_cap: Option<f32>,
    /// The gated unit of the feed-forward parts.
    pub activation: Activation,
    /// Longest sequence that the model was made for.
    pub max_positions: usize,
    /// Whether a norm follows the mixer and the feed-forward part too.
    pub norms_after: bool,
    /// Whether a layer's output is multiplied by a stored number.
    pub layer_scalar: bool,
    /// Inputs of their own for every layer.
    pub per_layer_inputs: Option<PerLayerInputs>,
    /// Coefficient of the experts' balance loss, for training.
    pub router_aux_loss: f32,
    /// Standard deviation of a new model's matrices.
    pub initializer_range: f32,
    /// The layers.
    pub layers: Vec<Layer>,
}

/// A second embedding, of which every layer gets its part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PerLayerInputs {
    /// Entries of the second embedding.
    pub vocabulary: usize,
    /// P: width for one layer.
    pub width: usize,
}

/// One layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Layer {
    /// What mixes tokens.
    pub mixer: Mixer,
    /// Width inside the dense feed-forward part, if there is one.
    pub dense: Option<usize>,
    /// The experts, if there are any.
    pub experts: Option<Experts>,
}

/// What mixes tokens.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // the types are documented
pub enum Mixer {
    Linear(LinearAttention),
    Softmax(Attention),
    Latent(LatentAttention),
}

/// The gated delta rule behind a convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearAttention {
    /// Heads of q and k.
    pub key_heads: usize,
    /// Heads of v.
    pub value_heads: usize,
    /// Width of a head of q and k.
    pub key_dim: usize,
    /// Width of a head of v.
    pub value_dim: usize,
    /// Taps of the convolution.
    pub conv_width: usize,
}

/// Softmax attention.
#[derive(Clone, Debug, PartialEq)]
pub struct Attention {
    /// Heads of q.
    pub heads: usize,
    /// Heads of k and v.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Rotation of q and k.
    pub rope: Rope,
    /// What q.k is multiplied by.
    pub scale: f32,
    /// Query i sees i - W < j <= i.
    pub window: Option<usize>,
    /// c tanh(x/c) on the attention logits.
    pub soft_cap: Option<f32>,
    /// Whether q_proj gives a gate for the output beside each head's query.
    pub gated: bool,
    /// Whether q and k are normed before they rotate.
    pub qk_norm: bool,
    /// What the values are, and whether they are normed.
    pub values: Values,
    /// Whether the projections have a bias.
    pub bias: bool,
    /// The layer whose keys and values this one uses instead of its own.
    pub shared_from: Option<usize>,
}

/// Where the values of an attention come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Values {
    /// v_proj.
    Projected,
    /// v_proj, then a norm without weight.
    Normed,
    /// k_proj as it is before norm and rotation, then a norm without weight.
    KeysNormed,
}

/// Attention over compressed keys and values, on the keys that an indexer selects.
#[derive(Clone, Debug, PartialEq)]
pub struct LatentAttention {
    /// Heads.
    pub heads: usize,
    /// Width of the compressed query.
    pub q_rank: usize,
    /// Width of the compressed keys and values.
    pub kv_rank: usize,
    /// Part of a head's query and key that does not rotate.
    pub nope_dim: usize,
    /// Part that rotates; the key's is shared by all heads.
    pub rope_dim: usize,
    /// Width of a head's value.
    pub value_dim: usize,
    /// Rotation of the attention, interleaved.
    pub rope: Rope,
    /// Rotation of the indexer, half-split.
    pub indexer_rope: Rope,
    /// What q.k is multiplied by.
    pub scale: f32,
    /// Heads of the indexer.
    pub index_heads: usize,
    /// Width of the indexer's heads and of its one key.
    pub index_dim: usize,
    /// Keys that a query keeps.
    pub index_topk: usize,
    /// Whether the first projections and the last have a bias.
    pub bias: bool,
}

/// A mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Experts {
    /// E
    pub count: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// Width inside an expert.
    pub intermediate: usize,
    /// How experts are chosen.
    pub router: Router,
    /// The expert that every token has.
    pub shared: Option<SharedExpert>,
}

/// How experts are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Router {
    /// Softmax of mlp.gate's logits.
    Softmax {
        /// Whether the weights of a token are brought to a sum of 1.
        normalise: bool,
    },
    /// Sigmoid with a bias for the choice, groups first (DeepSeek).
    SigmoidGroups {
        /// Groups of experts.
        groups: usize,
        /// Groups that are kept.
        kept_groups: usize,
        /// Whether the weights of a token are divided by their sum.
        normalise: bool,
        /// What weights are multiplied by.
        scaling: f32,
    },
    /// Softmax on the normed residual, with a scale for each dimension and each expert (Gemma 4).
    Normed,
}

/// The expert that every token has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedExpert {
    /// Width inside.
    pub intermediate: usize,
    /// Whether its output is multiplied by a gate.
    pub gated: bool,
}

/// Values of `model_type` that can be run; those without `_text` wrap a `text_config`.
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
    /// Reads config.json; `file` is named in errors.
    pub fn parse(config: &Value, file: &Path) -> Result<Config> {
        Ok(Config::parse_all(config, file)?.0)
    }

    /// The paths of the keys of a config.json that have no effect here and that are not known to be harmless:
    /// `text_config.foo`, in order. An error if the file cannot be used.
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
            let problem =
                format!("is {around:?}, which is not known to hold a text model of type {model_type:?}");
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
                format!("is {model_type:?}, which is not supported; known: {}", MODEL_TYPES.join(", ")),
            )),
        }?;
        if model_type != "gemma4_text" {
            fields.only("per_layer_config", json!({}))?;
        }
        if wrapped && top.get("tie_word_embeddings").is_some() {
            let tied = top.flag("tie_word_embeddings", config.tied)?;
            if fields.says("tie_word_embeddings") && tied != config.tied {
                let problem = format!("is {tied}, and `text_config.tie_word_embeddings` is {}", config.tied);
                return Err(top.error("tie_word_embeddings", problem));
            }
            config.tied = tied;
        }
        let unknown = keys::unknown(&top, model_type, wrapped);
        Ok((config, unknown))
    }

    /// Layers that have an indexer.
    pub fn has_indexer(&self) -> bool {
        self.layers.iter().any(|layer| matches!(layer.mixer, Mixer::Latent(_)))
    }
}

impl Layer {
    /// The name of the mixer's module.
    pub fn mixer_name(&self) -> &'static str {
        match self.mixer {
            Mixer::Linear(_) => "linear_attn",
            Mixer::Softmax(_) | Mixer::Latent(_) => "self_attn",
        }
    }
}

/// The token whose embedding is not learned; `default` where the file names none, none where it says null.
fn padding(fields: &Fields<'_>, default: Option<u32>, vocabulary: usize) -> Result<Option<u32>> {
    let field = "pad_token_id";
    if !fields.says(field) {
        return Ok(default);
    }
    match fields.whole(field)? {
        Some(id) if id >= vocabulary => {
            Err(fields.error(field, format!("is {id}, outside the vocabulary of {vocabulary}")))
        }
        id => Ok(id.map(|id| id as u32)),
    }
}

/// 0 stands for the default there, as in transformers.
fn initializer_range(fields: &Fields<'_>) -> Result<f32> {
    let range = fields.number("initializer_range")?.filter(|range| *range != 0.0);
    Ok(range.unwrap_or(0.02) as f32)
}

/// `part` heads must divide `whole` heads.
fn check_heads(fields: &Fields<'_>, whole: usize, part: usize, field: &str) -> Result {
    if part > 0 && whole.is_multiple_of(part) {
        return Ok(());
    }
    Err(fields.error(field, format!("is {part}, which does not divide {whole} heads")))
}

fn experts_fit(fields: &Fields<'_>, count: usize, top_k: usize, field: &str) -> Result {
    if top_k <= count { Ok(()) } else { Err(fields.error(field, format!("is {top_k} of {count} experts"))) }
}

fn unsupported_layer(fields: &Fields<'_>, kind: &str, known: &str) -> Error {
    fields.error("layer_types", format!("has {kind:?}, which is not supported; known: {known}"))
}
