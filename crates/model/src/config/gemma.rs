//! gemma2, gemma3_text, gemma4_text.

use ballast_kernels::glu::Activation;

use super::fields::Fields;
use super::{
    Attention, Config, Experts, Layer, Mixer, PerLayerInputs, Router, Values, check_heads, experts_fit, rope,
    unsupported_layer,
};
use crate::error::Result;

const FULL: &str = "full_attention";
const SLIDING: &str = "sliding_attention";

pub(super) fn parse(fields: Fields<'_>, model_type: &str) -> Result<Config> {
    let generation = match model_type {
        "gemma2" => 2,
        "gemma3_text" => 3,
        _ => 4,
    };
    fields.one_of("hidden_activation", &["gelu_pytorch_tanh"])?;
    fields.one_of("hidden_act", &["gelu_pytorch_tanh"])?;
    if let Some(value) = fields.get("use_bidirectional_attention")
        && value.as_str() == Some("all")
    {
        return Err(
            fields.error("use_bidirectional_attention", "is \"all\": only causal models are supported")
        );
    }
    let layers = fields.layers(if generation == 4 { 30 } else { 26 })?;
    let hidden = fields.count("hidden_size", 2304)?;
    let types = layer_types(fields, generation, layers)?;
    let shared = fields.whole("num_kv_shared_layers")?.unwrap_or(0);
    if shared >= layers {
        return Err(fields.error("num_kv_shared_layers", format!("is {shared} of {layers} layers")));
    }
    let first_shared = layers - shared;
    let experts = if generation == 4 && fields.flag("enable_moe_block", false)? {
        let count = fields.count("num_experts", 128)?;
        let top_k = fields.count("top_k_experts", 8)?;
        experts_fit(fields, count, top_k, "top_k_experts")?;
        let intermediate = fields.count("moe_intermediate_size", 704)?;
        Some(Experts { count, top_k, intermediate, router: Router::Normed, shared: None })
    } else {
        None
    };
    let intermediate = fields.count("intermediate_size", 9216)?;
    let double = fields.flag("use_double_wide_mlp", false)?;
    let layer = |i: usize| {
        let mut attention = attention(fields, generation, types[i], i)?;
        if shared > 0 && i >= first_shared {
            let source = types[..first_shared].iter().rposition(|kind| *kind == types[i]);
            let Some(source) = source else {
                let problem = format!("leaves layer {i} ({}) no layer to share with", types[i]);
                return Err(fields.error("num_kv_shared_layers", problem));
            };
            attention.shared_from = Some(source);
        }
        let wide = if double && attention.shared_from.is_some() { 2 } else { 1 };
        Ok(Layer { mixer: Mixer::Softmax(attention), dense: Some(wide * intermediate), experts })
    };
    let per_layer_width =
        if generation == 4 { fields.whole("hidden_size_per_layer_input")?.unwrap_or(256) } else { 0 };
    let vocabulary = fields.count("vocab_size", [256000, 262208, 262144][generation - 2])?;
    Ok(Config {
        model_type: model_type.into(),
        vocabulary,
        hidden,
        eps: fields.positive("rms_norm_eps", 1e-6)? as f32,
        one_plus_norms: generation < 4,
        embedding_scale: (hidden as f64).sqrt() as f32,
        padding: fields.whole("pad_token_id")?.map(|id| id as u32),
        tied: fields.flag("tie_word_embeddings", true)?,
        final_cap: cap(fields, "final_logit_softcapping", (generation == 2).then_some(30.0))?,
        activation: Activation::GeluTanh,
        max_positions: max_positions(fields, generation)?,
        norms_after: true,
        layer_scalar: generation == 4,
        per_layer_inputs: (per_layer_width > 0)
            .then(|| -> Result<PerLayerInputs> {
                let vocabulary = fields.count("vocab_size_per_layer_input", vocabulary)?;
                Ok(PerLayerInputs { vocabulary, width: per_layer_width })
            })
            .transpose()?,
        router_aux_loss: 0.0,
        initializer_range: super::initializer_range(fields)?,
        layers: (0..layers).map(layer).collect::<Result<_>>()?,
    })
}

fn max_positions(fields: Fields<'_>, generation: usize) -> Result<usize> {
    fields.count("max_position_embeddings", if generation == 2 { 8192 } else { 131072 })
}

/// A cap that the file can switch off with null.
fn cap(fields: Fields<'_>, field: &str, default: Option<f64>) -> Result<Option<f32>> {
    let found = fields.positive_or_none(field)?;
    let said = fields.says(field);
    Ok(found.or(default.filter(|_| !said)).map(|cap| cap as f32))
}

fn layer_types<'a>(fields: Fields<'a>, generation: usize, layers: usize) -> Result<Vec<&'a str>> {
    let types = match fields.texts("layer_types", layers)? {
        Some(types) => types,
        None => {
            let field = if fields.get("_sliding_window_pattern").is_some() {
                "_sliding_window_pattern"
            } else {
                "sliding_window_pattern"
            };
            let pattern = fields.count(field, if generation == 2 { 2 } else { 6 })?;
            let kind = |i: usize| if (i + 1).is_multiple_of(pattern) { FULL } else { SLIDING };
            let mut types: Vec<&str> = (0..layers).map(kind).collect();
            if generation == 4 {
                types[layers - 1] = FULL;
            }
            types
        }
    };
    match types.iter().find(|kind| ![FULL, SLIDING].contains(kind)) {
        Some(other) => Err(unsupported_layer(fields, other, "sliding_attention, full_attention")),
        None => Ok(types),
    }
}

fn attention(fields: Fields<'_>, generation: usize, kind: &str, layer: usize) -> Result<Attention> {
    let full = kind == FULL;
    let heads = fields.count("num_attention_heads", 8)?;
    let mut kv_heads = fields.count("num_key_value_heads", 4)?;
    let mut head_dim = fields.count("head_dim", 256)?;
    let k_eq_v = generation == 4 && fields.flag("attention_k_eq_v", false)? && full;
    if generation == 4 {
        match fields.object("per_layer_config", "per_layer_config.")? {
            Some(all) => {
                if let Some(own) = all.object(&layer.to_string(), "per_layer_config.<layer>.")? {
                    head_dim = own.count("head_dim", head_dim)?;
                    kv_heads = own.count("num_key_value_heads", kv_heads)?;
                }
            }
            None if full => {
                head_dim = fields.count("global_head_dim", 512)?;
                if k_eq_v {
                    kv_heads = fields.count("num_global_key_value_heads", kv_heads)?;
                }
            }
            None => {}
        }
    }
    check_heads(fields, heads, kv_heads, "num_key_value_heads")?;
    if head_dim > 512 {
        return Err(fields.error("head_dim", format!("is {head_dim}; at most 512")));
    }
    let default = rope::Default {
        theta: if full && generation > 2 { 1e6 } else { 1e4 },
        partial: if full && generation == 4 { 0.25 } else { 1.0 },
        proportional: full && generation == 4,
        max_positions: max_positions(fields, generation)?,
    };
    let window = fields.count("sliding_window", if generation == 4 { 512 } else { 4096 })?;
    Ok(Attention {
        heads,
        kv_heads,
        head_dim,
        rope: rope::parse(fields, (generation > 2).then_some(kind), head_dim, default)?,
        scale: if generation == 4 {
            1.0
        } else {
            fields.positive("query_pre_attn_scalar", 256.0)?.powf(-0.5) as f32
        },
        window: (!full).then_some(window),
        soft_cap: if generation == 4 {
            None
        } else {
            cap(fields, "attn_logit_softcapping", (generation == 2).then_some(50.0))?
        },
        gated: false,
        qk_norm: generation > 2,
        values: match generation {
            4 if k_eq_v => Values::KeysNormed,
            4 => Values::Normed,
            _ => Values::Projected,
        },
        bias: fields.flag("attention_bias", false)?,
        shared_from: None,
    })
}
