//! Keys of config.json that the parser does not read: unsupported, known to be harmless, or unknown.
//!
//! The parser records every key that it reads ([`Fields::unread`]), so there is no table of used keys that
//! could go stale. A key that changes the computation and is implemented for a single value is checked by
//! [`check_common`] or by its family. Every other key is harmless by the tables below, or reported to the
//! user as unknown.

use serde_json::{Value, json};

use super::fields::{Fields, Unread};
use crate::error::Result;

/// Keys that do not change what the text model computes, in any family.
const HARMLESS: &[&str] = &[
    // bookkeeping
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_experts_implementation",
    "_name_or_path",
    "allow_global_per_layer_attribute_access",
    "architectures",
    "attn_implementation",
    "dtype",
    "experts_implementation",
    "finetuning_task",
    "id2label",
    "label2id",
    "model_type",
    "name_or_path",
    "num_labels",
    "prefix",
    "problem_type",
    "serialize_explicit_per_layer_config",
    "task_specific_params",
    "tokenizer_class",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    // what calls return, and how they run
    "cache_implementation",
    "chunk_size_feed_forward",
    "gradient_checkpointing",
    "is_decoder",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pretraining_tp",
    "return_dict",
    "tf_legacy_loss",
    "use_bfloat16",
    "use_cache",
    // special tokens
    "bos_token_id",
    "decoder_start_token_id",
    "eos_token_id",
    "sep_token_id",
    // generation
    "bad_words_ids",
    "begin_suppress_tokens",
    "do_sample",
    "diversity_penalty",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "length_penalty",
    "max_length",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_scores",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict_in_generate",
    "suppress_tokens",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
    // read elsewhere, or settings of parts that are copied but not run
    "initializer_range",
    "mtp_num_hidden_layers",
    "mtp_use_dedicated_embeddings",
    "num_nextn_predict_layers",
];

/// Keys beside a `text_config`, for parts that are not run.
const HARMLESS_AROUND: &[&str] = &[
    "audio_config",
    "audio_token_id",
    "boa_token_id",
    "boi_token_id",
    "boi_token_index",
    "eoa_token_id",
    "eoa_token_index",
    "eoi_token_id",
    "eoi_token_index",
    "image_token_id",
    "image_token_index",
    "mm_tokens_per_image",
    "pad_token_id",
    "video_token_id",
    "vision_config",
    "vision_end_token_id",
    "vision_soft_tokens_per_image",
    "vision_start_token_id",
];

/// Keys without effect in one family, as (prefix of the model type, key).
const HARMLESS_IN: &[(&str, &str)] = &[
    // derived from other keys
    ("deepseek", "ep_size"),
    ("deepseek", "first_k_dense_replace"),
    ("deepseek", "head_dim"),
    ("deepseek", "qk_head_dim"),
    ("gemma3", "_sliding_window_pattern"),
    ("gemma3", "sliding_window_pattern"),
    ("gemma4", "moe_intermediate_size"),
    ("gemma4", "num_experts"),
    ("gemma4", "sliding_window"),
    ("gemma4", "top_k_experts"),
    ("gemma4", "use_double_wide_mlp"),
    ("gemma4", "vocab_size_per_layer_input"),
    ("gemma", "sliding_window"),
    ("qwen", "full_attention_interval"),
    // the linear layers compute in f32 anyway
    ("qwen", "mamba_ssm_dtype"),
];

/// Keys of rotary settings for the axes of images; in a text, all axes have the same position.
const HARMLESS_ROTARY: &[&str] = &["mrope_interleaved", "mrope_section"];

/// Refuses values that describe an unsupported kind of model, in any family.
pub(super) fn check_common(fields: &Fields<'_>) -> Result {
    fields.only("add_cross_attention", false)?;
    fields.only("is_causal", true)?;
    fields.only("is_encoder_decoder", false)?;
    fields.only("pruned_heads", json!({}))?;
    fields.only("tie_encoder_decoder", false)?;
    if fields.get("quantization_config").is_some() {
        let problem = "describes quantized weights, but there are none in F8_E4M3, the only supported kind; dequantize the \
             checkpoint and remove it";
        return Err(fields.error("quantization_config", problem));
    }
    Ok(())
}

/// Lists the keys that were not read and are not known to be harmless, as sorted paths.
pub(super) fn unknown(top: &Fields<'_>, model_type: &str, wrapped: bool) -> Vec<String> {
    let unread = top.unread().into_iter().filter(|key| !harmless(key, model_type, wrapped));
    let mut paths: Vec<String> = unread.map(|key| format!("{}{}", key.prefix, key.key)).collect();
    paths.sort_unstable();
    paths
}

fn harmless(unread: &Unread<'_>, model_type: &str, wrapped: bool) -> bool {
    let Unread { prefix, key, value } = unread;
    let inner = prefix.strip_prefix("text_config.").unwrap_or(prefix);
    if inner.starts_with("rope_parameters.") || inner.starts_with("rope_scaling.") {
        // Settings of a layer type that the model does not have.
        let by_type = ["full_attention", "sliding_attention"].contains(key) && value.is_object();
        let has_types =
            model_type == "gemma4_text" || model_type == "gemma3_text" && inner == "rope_parameters.";
        return HARMLESS_ROTARY.contains(key) || by_type && has_types;
    }
    let around = wrapped && prefix.is_empty();
    // Dropout is not implemented; a rate of 0 is what runs.
    let no_dropout = key.ends_with("dropout") && value.as_f64() == Some(0.0);
    let of_family = |(family, harmless): &(&str, &str)| model_type.starts_with(family) && harmless == key;
    no_dropout
        || matches!(value, Value::Null)
        || HARMLESS.contains(key)
        || around && HARMLESS_AROUND.contains(key)
        || !around && HARMLESS_IN.iter().any(of_family)
}
