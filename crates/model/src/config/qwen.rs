//! Parser of the Qwen family: qwen3_next, qwen3_5_text, qwen3_5_moe_text.

use ballast_kernels::glu::Activation;
use serde_json::json;

use super::fields::Fields;
use super::{
    Attention, Config, Experts, Layer, LinearAttention, Mixer, Router, SharedExpert, Values, check_heads,
    check_top_k, padding, rope, unsupported_layer,
};
use crate::error::Result;

const FULL: &str = "full_attention";
const LINEAR: &str = "linear_attention";
const LAYER_TYPES: [&str; 2] = [LINEAR, FULL];

pub(super) fn parse(fields: &Fields<'_>, model_type: &str) -> Result<Config> {
    let next = model_type == "qwen3_next";
    let moe = model_type != "qwen3_5_text";
    let (hidden, intermediate, layers, kv_heads) = match model_type {
        "qwen3_next" => (2048, 5632, 48, 2),
        "qwen3_5_text" => (4096, 12288, 32, 4),
        _ => (2048, 0, 40, 2),
    };
    fields.one_of("hidden_act", &["silu"])?;
    let hidden = fields.count("hidden_size", hidden)?;
    let layers = fields.layers(layers)?;
    let max_positions = fields.count("max_position_embeddings", 32768)?;
    let head_dim = fields.count("head_dim", 256)?;
    let family = rope::Family { theta: 10000.0, partial: 0.25, rotates_part: true, max_positions };
    fields.only("attn_output_gate", true)?;
    fields.only("use_sliding_window", false)?;
    fields.only("mlp_bias", false)?;
    let attention = Attention {
        heads: fields.count("num_attention_heads", 16)?,
        kv_heads: fields.count("num_key_value_heads", kv_heads)?,
        head_dim,
        rope: rope::flat(fields, &LAYER_TYPES, head_dim, &family)?,
        scale: (head_dim as f32).powf(-0.5),
        window: None,
        soft_cap: None,
        gated: true,
        qk_norm: true,
        values: Values::Projected,
        bias: fields.flag("attention_bias", false)?,
        shared_from: None,
    };
    check_heads(fields, attention.heads, attention.kv_heads, "num_key_value_heads")?;
    let linear = linear_attention(fields)?;
    let mixture = if moe { Some(experts(fields, next)?) } else { None };
    let dense = if moe && !next { None } else { Some(fields.count("intermediate_size", intermediate)?) };
    let step = fields.count("decoder_sparse_step", 1)?;
    let dense_only = fields.wholes("mlp_only_layers")?;
    if !next {
        fields.only("decoder_sparse_step", 1)?;
        fields.only("mlp_only_layers", json!([]))?;
        fields.only("norm_topk_prob", true)?;
    }
    let vocabulary = fields.count("vocab_size", if next { 151936 } else { 248320 })?;
    let interval = fields.count("full_attention_interval", 4)?;
    let types = fields.texts("layer_types", layers)?;
    let layer = |i: usize| {
        let kind = match &types {
            Some(types) => types[i],
            None if (i + 1).is_multiple_of(interval) => FULL,
            None => LINEAR,
        };
        let mixer = match kind {
            FULL => Mixer::Softmax(attention.clone()),
            LINEAR => Mixer::Linear(linear),
            other => return Err(unsupported_layer(fields, other, &LAYER_TYPES.join(", "))),
        };
        let sparse = mixture.filter(|_| !next || !dense_only.contains(&i) && (i + 1).is_multiple_of(step));
        Ok(Layer { mixer, dense: if sparse.is_some() { None } else { dense }, experts: sparse })
    };
    Ok(Config {
        model_type: model_type.into(),
        vocabulary,
        hidden,
        eps: fields.positive("rms_norm_eps", 1e-6)? as f32,
        one_plus_norms: true,
        embedding_scale: 1.0,
        padding: padding(fields, None, vocabulary)?,
        tied: fields.flag("tie_word_embeddings", false)?,
        final_cap: None,
        activation: Activation::Silu,
        max_positions,
        norms_after: false,
        layer_scalar: false,
        per_layer_inputs: None,
        router_aux_loss: fields.number("router_aux_loss_coef")?.unwrap_or(0.001) as f32,
        initializer_range: super::initializer_range(fields)?,
        layers: (0..layers).map(layer).collect::<Result<_>>()?,
    })
}

fn linear_attention(fields: &Fields<'_>) -> Result<LinearAttention> {
    let linear = LinearAttention {
        key_heads: fields.count("linear_num_key_heads", 16)?,
        value_heads: fields.count("linear_num_value_heads", 32)?,
        key_dim: fields.count("linear_key_head_dim", 128)?,
        value_dim: fields.count("linear_value_head_dim", 128)?,
        conv_width: fields.count("linear_conv_kernel_dim", 4)?,
    };
    check_heads(fields, linear.value_heads, linear.key_heads, "linear_num_key_heads")?;
    if !(2..=8).contains(&linear.conv_width) {
        return Err(
            fields.error("linear_conv_kernel_dim", format!("must be 2 to 8, got {}", linear.conv_width))
        );
    }
    Ok(linear)
}

fn experts(fields: &Fields<'_>, next: bool) -> Result<Experts> {
    let (experts, per_token) = if next { (512, 10) } else { (256, 8) };
    let count = fields.count("num_experts", experts)?;
    let top_k = fields.count("num_experts_per_tok", per_token)?;
    check_top_k(fields, count, top_k, "num_experts_per_tok")?;
    let intermediate = fields.count("shared_expert_intermediate_size", 512)?;
    Ok(Experts {
        count,
        top_k,
        intermediate: fields.count("moe_intermediate_size", 512)?,
        router: Router::Softmax { normalize: !next || fields.flag("norm_topk_prob", true)? },
        shared: Some(SharedExpert { intermediate, gated: true }),
    })
}
