//! Changes the configurations of real models. Every field that affects the computation must change the parsed
//! configuration, be rejected, or be reported as a key without effect; none is ignored silently.

#![no_main]

use std::path::Path;
use std::sync::LazyLock;

use ballast_model::Config;
use ballast_model::config::Mixer;
use libfuzzer_sys::fuzz_target;
use serde_json::{Map, Value, json};

/// Configurations to change.
const SEEDS: [&str; 10] = [
    include_str!("../../fixtures/models/qwen3_next/config.json"),
    include_str!("../../fixtures/models/qwen3_5/config.json"),
    include_str!("../../fixtures/models/qwen3_5_moe/config.json"),
    include_str!("../../fixtures/models/gemma2/config.json"),
    include_str!("../../fixtures/models/gemma3/config.json"),
    include_str!("../../fixtures/models/gemma4_ple/config.json"),
    include_str!("../../fixtures/models/gemma4_moe/config.json"),
    include_str!("../../fixtures/models/deepseek_v32_yarn/config.json"),
    include_str!("../../fixtures/release/qwen3_5/config.json"),
    include_str!("../seeds/config/gemma4_padded_keys"),
];

/// Fields that affect the computation, at any depth.
const RELEVANT: [&str; 81] = [
    "attention_bias",
    "attention_factor",
    "attention_k_eq_v",
    "attn_logit_softcapping",
    "attn_output_gate",
    "beta_fast",
    "beta_slow",
    "decoder_sparse_step",
    "enable_moe_block",
    "factor",
    "final_logit_softcapping",
    "first_k_dense_replace",
    "full_attention_interval",
    "global_head_dim",
    "head_dim",
    "hidden_act",
    "hidden_activation",
    "hidden_size",
    "hidden_size_per_layer_input",
    "index_head_dim",
    "index_n_heads",
    "index_topk",
    "intermediate_size",
    "is_causal",
    "kv_lora_rank",
    "layer_types",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "logit_scale",
    "max_position_embeddings",
    "mlp_bias",
    "mlp_layer_types",
    "model_type",
    "moe_intermediate_size",
    "moe_layer_freq",
    "mscale",
    "mscale_all_dim",
    "n_group",
    "n_routed_experts",
    "n_shared_experts",
    "norm_topk_prob",
    "num_attention_heads",
    "num_experts",
    "num_experts_per_tok",
    "num_global_key_value_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_kv_shared_layers",
    "num_local_experts",
    "original_max_position_embeddings",
    "pad_token_id",
    "partial_rotary_factor",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "query_pre_attn_scalar",
    "residual_multiplier",
    "rms_norm_eps",
    "rope_interleave",
    "rope_local_base_freq",
    "rope_theta",
    "rope_type",
    "routed_scaling_factor",
    "scoring_func",
    "shared_expert_intermediate_size",
    "sliding_window",
    "sliding_window_pattern",
    "tie_word_embeddings",
    "top_k_experts",
    "topk_group",
    "topk_method",
    "truncate",
    "type",
    "use_bidirectional_attention",
    "use_double_wide_mlp",
    "use_sliding_window",
    "v_head_dim",
    "vocab_size",
];

/// Objects that can contain a field.
const PLACES: [&[&str]; 9] = [
    &[],
    &["rope_parameters"],
    &["rope_scaling"],
    &["rope_parameters", "full_attention"],
    &["rope_parameters", "sliding_attention"],
    &["rope_scaling", "full_attention"],
    &["per_layer_config", "05"],
    &["per_layer_config", "11"],
    &["per_layer_config", "9"],
];

static VALUES: LazyLock<Vec<Value>> = LazyLock::new(|| {
    let text = r#"[null, true, false, 0, 1, 2, 3, 4, 8, 16, 32, 0.25, 0.5, 1.0, 1e4, 1e6, -1, "default", "linear", "yarn",
        "proportional", "silu", "gelu_pytorch_tanh", "vision", "all", "full_attention", "indexed_attention", [], {},
        ["full_attention", "sliding_attention"], ["sliding_attention", "full_attention"],
        ["linear_attention", "full_attention"], ["full_attention", "full_attention"]]"#;
    serde_json::from_str(text).expect("it is JSON")
});

fuzz_target!(|bytes: &[u8]| {
    let Some((seed, changes)) = bytes.split_first() else { return };
    let mut config: Value = serde_json::from_str(SEEDS[*seed as usize % SEEDS.len()]).expect("it is JSON");
    // The first byte after the seed selects the field to check, the others change the configuration.
    let (choice, changes) = changes.split_first().map_or((0, changes), |(choice, rest)| (*choice, rest));
    for change in changes.chunks_exact(3).take(8) {
        apply(text_part(&mut config), change);
    }
    check(&config, choice as usize);
});

fn text_part(config: &mut Value) -> &mut Map<String, Value> {
    let config = if config.get("text_config").is_some() { &mut config["text_config"] } else { config };
    config.as_object_mut().expect("it is an object")
}

/// Sets or removes a field or a whole object.
fn apply(object: &mut Map<String, Value>, change: &[u8]) {
    let place = PLACES[change[0] as usize % PLACES.len()];
    let field = RELEVANT[change[1] as usize % RELEVANT.len()];
    if change[2] == 255 {
        match place.first() {
            Some(whole) => object.remove(*whole),
            None => object.remove(field),
        };
        return;
    }
    let mut object = object;
    for step in place {
        let inner = object.entry(*step).or_insert_with(|| json!({}));
        if !inner.is_object() {
            *inner = json!({});
        }
        object = inner.as_object_mut().expect("it was made one");
    }
    object.insert(field.into(), VALUES[change[2] as usize % VALUES.len()].clone());
}

fn parse(config: &Value) -> Option<Config> {
    Config::parse(config, Path::new("config.json")).ok()
}

fn names(config: &Value, path: &str) -> bool {
    let unknown = Config::unknown_keys(config, Path::new("config.json")).unwrap_or_default();
    // An object that the parser did not read is reported as a whole.
    unknown.iter().any(|key| key == path || path.strip_prefix(key).is_some_and(|rest| rest.starts_with('.')))
}

/// Checks a relevant field of a valid configuration: another value must give another configuration, an error,
/// or a report of the field.
fn check(config: &Value, choice: usize) {
    let mut fields = Vec::new();
    collect(config, &mut Vec::new(), &mut fields);
    let Some(path) = fields.get(choice % fields.len().max(1)) else { return };
    let Some(parsed) = parse(config) else { return };
    let name = path.join(".");
    if has_no_effect(config, &parsed, path) || names(config, &name) {
        return;
    }
    let value = path.iter().fold(config, |value, step| &value[step.as_str()]);
    let seen = others(value).into_iter().any(|other| {
        let mut changed = config.clone();
        *path.iter().fold(&mut changed, |value, step| &mut value[step.as_str()]) = other;
        parse(&changed).is_none_or(|changed| changed != parsed) || names(&changed, &name)
    });
    assert!(seen, "`{name}` is {value}, and has no effect and is not named: {config}");
}

/// Returns the paths of all relevant fields that have a value.
fn collect(value: &Value, path: &mut Vec<String>, fields: &mut Vec<Vec<String>>) {
    let Some(object) = value.as_object() else { return };
    for (key, value) in object.iter().filter(|(key, _)| *key != "vision_config") {
        path.push(key.clone());
        if RELEVANT.contains(&key.as_str()) && !value.is_null() && !value.is_object() {
            fields.push(path.clone());
        }
        collect(value, path, fields);
        path.pop();
    }
}

/// Returns other values of the same kind.
fn others(value: &Value) -> Vec<Value> {
    match value {
        Value::Bool(flag) => vec![json!(!flag)],
        Value::String(_) => vec![json!("no such value")],
        Value::Array(items) => vec![json!(items[..items.len() / 2]), json!(["no such value"])],
        Value::Number(n) => match n.as_u64() {
            Some(n) => vec![json!(2 * n + 1), json!(n + 1), json!(1), json!(2 * n)],
            None => {
                let x = n.as_f64().unwrap_or(1.0);
                vec![json!(1.5 * x), json!(0.37), json!(2.0 * x + 1.0)]
            }
        },
        _ => vec![],
    }
}

/// Returns true for fields of a part that the model does not have, and fields that others in the same file
/// override.
fn has_no_effect(config: &Value, parsed: &Config, path: &[String]) -> bool {
    let text = config.get("text_config").unwrap_or(config);
    let says = |field: &str| text.get(field).is_some_and(|value| !value.is_null());
    let any = |has: fn(&ballast_model::config::Layer) -> bool| parsed.layers.iter().any(has);
    let softmax = any(|layer| matches!(layer.mixer, Mixer::Softmax(_)));
    let attends = softmax || any(|layer| matches!(layer.mixer, Mixer::Latent(_)));
    let (experts, dense) = (any(|layer| layer.experts.is_some()), any(|layer| layer.dense.is_some()));
    let sliding = any(|layer| matches!(&layer.mixer, Mixer::Softmax(a) if a.window.is_some()));
    let full = any(|layer| matches!(&layer.mixer, Mixer::Softmax(a) if a.window.is_none()));
    let shares = any(|layer| matches!(&layer.mixer, Mixer::Softmax(a) if a.shared_from.is_some()));
    let inside = |object: &str| path.iter().rev().skip(1).any(|step| step == object);
    let deepseek = parsed.model_type == "deepseek_v32";
    // Heads of Gemma 4's full layers have sizes of their own, and single layers can have others.
    let gemma4 = parsed.model_type.starts_with("gemma4");
    let own_sizes = |field: &str| {
        let layers = text.get("per_layer_config").and_then(Value::as_object);
        layers.is_some_and(|layers| {
            layers.values().filter(|layer| layer.get(field).is_some()).count() == parsed.layers.len()
        })
    };
    let sizes_of_full = gemma4 && !sliding && !says("per_layer_config");
    if inside("sliding_attention") && !sliding || inside("full_attention") && !full {
        return true;
    }
    if (inside("rope_parameters") || inside("rope_scaling")) && !attends {
        return true;
    }
    match path.last().map_or("", String::as_str) {
        field if field.starts_with("linear_") => !any(|layer| matches!(layer.mixer, Mixer::Linear(_))),
        "head_dim" => deepseek || !softmax || sizes_of_full || own_sizes("head_dim"),
        "num_key_value_heads" => {
            let global =
                text.get("attention_k_eq_v") == Some(&json!(true)) && says("num_global_key_value_heads");
            !attends || sizes_of_full && global || own_sizes("num_key_value_heads")
        }
        "num_attention_heads" | "attention_bias" | "rope_theta" => !attends,
        "partial_rotary_factor" | "original_max_position_embeddings" => !attends,
        "sliding_window" | "rope_local_base_freq" => !sliding,
        "full_attention_interval" | "sliding_window_pattern" => says("layer_types"),
        "first_k_dense_replace" => says("mlp_layer_types") || parsed.layers.len() <= 1,
        "intermediate_size" => !dense,
        "use_double_wide_mlp" => !shares,
        "decoder_sparse_step"
        | "norm_topk_prob"
        | "num_experts"
        | "num_experts_per_tok"
        | "top_k_experts"
        | "moe_intermediate_size"
        | "shared_expert_intermediate_size"
        | "n_routed_experts"
        | "n_shared_experts"
        | "num_local_experts"
        | "routed_scaling_factor"
        | "n_group"
        | "topk_group" => !experts,
        _ => false,
    }
}
