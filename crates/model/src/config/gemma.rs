//! Parser of the Gemma family: gemma2, gemma3_text, gemma4_text.

use std::collections::BTreeMap;

use ballast_kernels::glu::Activation;
use serde_json::Value;

use super::fields::Fields;
use super::{
    Attention, Config, Experts, Layer, Mixer, PerLayerInputs, Router, Values, check_heads, check_top_k,
    padding, rope, unsupported_layer,
};
use crate::error::Result;

const FULL: &str = "full_attention";
const SLIDING: &str = "sliding_attention";
const KNOWN: &str = "sliding_attention, full_attention";

/// Parses a Gemma configuration; `wrapped` is true for the text part of a vision model.
pub(super) fn parse(fields: &Fields<'_>, model_type: &str, wrapped: bool) -> Result<Config> {
    let generation = match model_type {
        "gemma2" => 2,
        "gemma3_text" => 3,
        _ => 4,
    };
    fields.one_of("hidden_activation", &["gelu_pytorch_tanh"])?;
    fields.one_of("hidden_act", &["gelu_pytorch_tanh"])?;
    causal(fields, generation)?;
    fields.only("mlp_bias", false)?;
    let layers = fields.layers(if generation == 4 { 30 } else { 26 })?;
    let hidden = fields.count("hidden_size", 2304)?;
    let types = layer_types(fields, generation, layers)?;
    let shared = if generation == 4 { fields.whole("num_kv_shared_layers")?.unwrap_or(0) } else { 0 };
    if shared >= layers {
        return Err(fields.error(
            "num_kv_shared_layers",
            format!("must be below num_hidden_layers ({layers}), got {shared}"),
        ));
    }
    let first_shared = layers - shared;
    let experts = experts(fields, generation)?;
    let intermediate = fields.count("intermediate_size", 9216)?;
    let double = generation == 4 && fields.flag("use_double_wide_mlp", false)?;
    let widths = head_widths(fields, generation, &types)?;
    let by_type = |kind| match types.iter().position(|other| *other == kind) {
        Some(first) => attention(fields, generation, kind, widths[first]).map(Some),
        None => Ok(None),
    };
    let (full, sliding) = (by_type(FULL)?, by_type(SLIDING)?);
    let layer = |i: usize| {
        let of_type = if types[i] == FULL { &full } else { &sliding };
        let Some(of_type) = of_type else { return Err(unsupported_layer(fields, types[i], KNOWN)) };
        let mut attention = of_type.clone();
        if shared > 0 && i >= first_shared {
            let source = types[..first_shared].iter().rposition(|kind| *kind == types[i]);
            let Some(source) = source else {
                let problem =
                    format!("leaves layer {i} ({}) no earlier layer of its type to share with", types[i]);
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
        padding: padding(fields, Some(0), vocabulary)?,
        tied: fields.flag("tie_word_embeddings", true)?,
        // Gemma 3 with vision does not cap its logits.
        final_cap: if generation == 3 && wrapped {
            None
        } else {
            cap(fields, "final_logit_softcapping", (generation == 2).then_some(30.0))?
        },
        activation: Activation::GeluTanh,
        max_positions: max_positions(fields, generation)?,
        norms_after: true,
        layer_scalar: generation == 4,
        per_layer_inputs: (per_layer_width > 0)
            .then(|| -> Result<PerLayerInputs> {
                let vocabulary = fields.count("vocab_size_per_layer_input", 262144)?;
                Ok(PerLayerInputs { vocabulary, width: per_layer_width })
            })
            .transpose()?,
        router_aux_loss: 0.0,
        initializer_range: super::initializer_range(fields)?,
        layers: (0..layers).map(layer).collect::<Result<_>>()?,
    })
}

fn experts(fields: &Fields<'_>, generation: usize) -> Result<Option<Experts>> {
    if generation < 4 || !fields.flag("enable_moe_block", false)? {
        return Ok(None);
    }
    let count = fields.required("num_experts")?;
    let top_k = fields.required("top_k_experts")?;
    check_top_k(fields, count, top_k, "top_k_experts")?;
    let intermediate = fields.required("moe_intermediate_size")?;
    Ok(Some(Experts { count, top_k, intermediate, router: Router::Normed, shared: None }))
}

fn max_positions(fields: &Fields<'_>, generation: usize) -> Result<usize> {
    fields.count("max_position_embeddings", if generation == 2 { 8192 } else { 131072 })
}

/// Reads a soft cap; null turns it off.
fn cap(fields: &Fields<'_>, field: &str, default: Option<f64>) -> Result<Option<f32>> {
    let found = fields.positive_or_none(field)?;
    let said = fields.contains(field);
    Ok(found.or(default.filter(|_| !said)).map(|cap| cap as f32))
}

/// Fails unless attention is causal.
fn causal(fields: &Fields<'_>, generation: usize) -> Result {
    let field = "use_bidirectional_attention";
    match fields.get(field) {
        None | Some(Value::Bool(false)) => Ok(()),
        // Only image tokens attend to each other; a text has none.
        Some(Value::String(text)) if generation == 4 && text == "vision" => Ok(()),
        Some(value) => Err(fields.error(field, format!("is {value}; only causal models are supported"))),
    }
}

fn layer_types<'a>(fields: &Fields<'a>, generation: usize, layers: usize) -> Result<Vec<&'a str>> {
    let mut types = match fields.texts("layer_types", layers)? {
        Some(types) => types,
        None => {
            let pattern = match generation {
                2 => 2,
                3 => fields.count("sliding_window_pattern", 6)?,
                _ => 6,
            };
            // Transformers ignores these keys: accept only the value that it uses instead.
            for ignored in ["sliding_window_pattern", "_sliding_window_pattern"] {
                fields.only(ignored, pattern)?;
            }
            let kind = |i: usize| if (i + 1).is_multiple_of(pattern) { FULL } else { SLIDING };
            (0..layers).map(kind).collect()
        }
    };
    if let Some(other) = types.iter().find(|kind| ![FULL, SLIDING].contains(kind)) {
        return Err(unsupported_layer(fields, other, KNOWN));
    }
    if generation == 4 {
        types[layers - 1] = FULL;
    }
    Ok(types)
}

/// Width of a head, and number of k and v heads.
type Widths = (usize, usize);

/// Returns the widths of every layer; layers of the same type must have the same widths.
fn head_widths(fields: &Fields<'_>, generation: usize, types: &[&str]) -> Result<Vec<Widths>> {
    let kv_heads = fields.count("num_key_value_heads", 4)?;
    let head_dim = fields.count("head_dim", 256)?;
    let mut widths = vec![(head_dim, kv_heads); types.len()];
    if generation < 4 {
        return Ok(widths);
    }
    if fields.contains("per_layer_config") {
        for (layer, own) in per_layer(fields, types.len())? {
            widths[layer] = (own.count("head_dim", head_dim)?, own.count("num_key_value_heads", kv_heads)?);
        }
    } else {
        let head_dim = fields.count("global_head_dim", 512)?;
        let kv_heads = match fields.flag("attention_k_eq_v", false)? {
            true => fields.whole("num_global_key_value_heads")?.unwrap_or(kv_heads),
            false => kv_heads,
        };
        types.iter().zip(&mut widths).filter(|(kind, _)| **kind == FULL).for_each(|(_, width)| {
            *width = (head_dim, kv_heads);
        });
    }
    for (layer, kind) in types.iter().enumerate() {
        let first = types.iter().position(|other| other == kind).unwrap_or(layer);
        if widths[layer] != widths[first] {
            let problem = format!("gives layers {first} and {layer}, both {kind}, different head shapes");
            return Err(fields.error("per_layer_config", problem));
        }
    }
    Ok(widths)
}

/// Reads `per_layer_config`, settings of single layers. Keys are layer numbers, possibly padded with zeros.
fn per_layer<'a>(fields: &Fields<'a>, layers: usize) -> Result<BTreeMap<usize, Fields<'a>>> {
    let mut found = BTreeMap::new();
    let Some(all) = fields.object("per_layer_config")? else { return Ok(found) };
    for key in all.keys() {
        let number = key.parse::<usize>().ok().filter(|_| key.bytes().all(|byte| byte.is_ascii_digit()));
        let Some(layer) = number.filter(|layer| *layer < layers) else {
            return Err(all.error(key, format!("is not a layer number; use 0 to {}", layers - 1)));
        };
        let Some(own) = all.object(key)? else { return Err(all.error(key, "is not an object")) };
        if let Some(other) =
            own.keys().find(|name| !["head_dim", "num_key_value_heads"].contains(&name.as_str()))
        {
            let problem = "cannot differ by layer; only head_dim and num_key_value_heads can";
            return Err(own.error(other, problem));
        }
        if found.insert(layer, own).is_some() {
            return Err(all.error(key, format!("names layer {layer} a second time")));
        }
    }
    Ok(found)
}

fn attention(
    fields: &Fields<'_>,
    generation: usize,
    kind: &str,
    (head_dim, kv_heads): Widths,
) -> Result<Attention> {
    let full = kind == FULL;
    let heads = fields.count("num_attention_heads", 8)?;
    let k_eq_v = generation == 4 && fields.flag("attention_k_eq_v", false)? && full;
    check_heads(fields, heads, kv_heads, "num_key_value_heads")?;
    if head_dim > 512 {
        return Err(fields.error("head_dim", format!("must be at most 512, got {head_dim}")));
    }
    let family = rope::Family {
        theta: 1e4,
        partial: 1.0,
        rotates_part: false,
        max_positions: max_positions(fields, generation)?,
    };
    let rope = match generation {
        2 => rope::flat(fields, &[FULL, SLIDING], head_dim, &family)?,
        3 => rope::gemma3(fields, full, head_dim, &family)?,
        _ => rope::gemma4(fields, full, head_dim, &family)?,
    };
    let window = if full {
        None
    } else {
        Some(fields.count("sliding_window", if generation == 4 { 512 } else { 4096 })?)
    };
    Ok(Attention {
        heads,
        kv_heads,
        head_dim,
        rope,
        scale: if generation == 4 {
            1.0
        } else {
            fields.positive("query_pre_attn_scalar", 256.0)?.powf(-0.5) as f32
        },
        window,
        // Gemma 3 has the field but ignores it.
        soft_cap: if generation == 2 { cap(fields, "attn_logit_softcapping", Some(50.0))? } else { None },
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
