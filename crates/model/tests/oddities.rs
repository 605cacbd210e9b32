//! Features of single architectures: leaving one out changes the logits or is an error. golden.rs checks
//! their values.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;

use ballast_checkpoint::Checkpoint;
use ballast_model::{Model, Precision};
use serde_json::{Value, json};

use crate::common::{batch, error, golden, with_config};

/// A model, the feature or the expected words of the error, and a change of its config.json.
type Case = (&'static str, &'static str, fn(&mut Value));

/// Returns the relative error of the logits against transformers after a change of config.json.
fn distance(name: &str, change: impl FnOnce(&mut Value)) -> f64 {
    let folder = with_config(name, change);
    let model = Model::load(folder.path(), |_| Ok(Precision::f32())).unwrap();
    error(&model.logits(&batch(name), None).unwrap(), &golden(name).f32("logits").unwrap().values).0
}

/// Returns the error of loading a model after a change of config.json.
fn refusal(name: &str, change: impl FnOnce(&mut Value)) -> String {
    let folder = with_config(name, change);
    Model::load(folder.path(), |_| Ok(Precision::f32())).unwrap_err().to_string()
}

#[test]
fn settings_that_change_the_logits() {
    let cases: [Case; 16] = [
        ("gemma2", "attention soft cap", |c| c["attn_logit_softcapping"] = json!(0.5)),
        ("gemma2", "final soft cap", |c| c["final_logit_softcapping"] = Value::Null),
        ("gemma2", "query scale", |c| c["query_pre_attn_scalar"] = json!(64)),
        ("gemma2", "sliding window", |c| c["sliding_window"] = json!(29)),
        ("gemma3", "bases by layer type", |c| {
            c["rope_parameters"]["sliding_attention"]["rope_theta"] = json!(1e6);
        }),
        ("gemma3", "linear scaling of full layers", |c| {
            c["rope_parameters"]["full_attention"] =
                json!({"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0});
        }),
        ("gemma3", "order of layer types", |c| c["layer_types"][0] = json!("full_attention")),
        ("gemma4_dense", "proportional rotation", |c| {
            c["rope_parameters"]["full_attention"] = json!({"rope_theta": 1e6, "rope_type": "default"});
        }),
        ("gemma4_dense", "part that rotates", |c| {
            c["rope_parameters"]["full_attention"]["partial_rotary_factor"] = json!(1.0);
        }),
        ("gemma4_moe", "experts of a token", |c| c["top_k_experts"] = json!(3)),
        ("qwen3_5", "part that rotates", |c| c["rope_parameters"]["partial_rotary_factor"] = json!(0.25)),
        ("qwen3_5", "base", |c| c["rope_parameters"]["rope_theta"] = json!(1e2)),
        ("qwen3_5", "eps", |c| c["rms_norm_eps"] = json!(1e-2)),
        ("qwen3_next", "normalized weights", |c| c["norm_topk_prob"] = json!(false)),
        ("qwen3_5_moe", "experts of a token", |c| c["num_experts_per_tok"] = json!(3)),
        ("deepseek_v32", "scaling of the experts", |c| c["routed_scaling_factor"] = json!(1.0)),
    ];
    for (name, what, change) in cases {
        let distance = distance(name, change);
        assert!(distance > 1e-4, "{name}: {what} makes no difference ({distance:e})");
    }
}

#[test]
fn structure_that_the_tensors_show() {
    let cases: [Case; 7] = [
        ("gemma4_dense", "layers.5.self_attn.v_proj.weight", |c| c["attention_k_eq_v"] = json!(false)),
        ("gemma4_dense", "layers.5.self_attn.q_proj.weight", |c| c["per_layer_config"] = json!({})),
        ("gemma4_ple", "layers.9.self_attn.k_proj.weight", |c| c["num_kv_shared_layers"] = json!(0)),
        ("gemma4_ple", "layers.9.mlp.up_proj.weight", |c| c["use_double_wide_mlp"] = json!(false)),
        ("gemma4_ple", "layers.0.per_layer_input_gate.weight", |c| {
            c["hidden_size_per_layer_input"] = json!(0)
        }),
        ("gemma4_moe", "layers.0.router.per_expert_scale", |c| c["enable_moe_block"] = json!(false)),
        ("qwen3_next", "layers.1.mlp.gate.weight", |c| c["mlp_only_layers"] = json!([])),
    ];
    for (name, tensor, change) in cases {
        let refusal = refusal(name, change);
        assert!(refusal.contains(tensor), "{name}: no {tensor} in {refusal}");
    }
}

/// Sets every value of a stored F32 tensor.
fn overwrite(folder: &Path, tensor: &str, value: f32) {
    let checkpoint = Checkpoint::open(folder).unwrap();
    let t = checkpoint.tensors.iter().find(|t| t.name == tensor).unwrap();
    let data: Vec<u8> = (0..t.bytes / 4).flat_map(|_| value.to_le_bytes()).collect();
    let file = OpenOptions::new().write(true).open(&checkpoint.files[t.file].path).unwrap();
    file.write_all_at(&data, t.begin).unwrap();
}

#[test]
fn tensors_that_nothing_else_shows() {
    let cases = [
        ("gemma4_dense", "model.layers.2.layer_scalar", 0.5),
        ("gemma4_moe", "model.layers.2.router.per_expert_scale", 2.0),
        ("gemma4_moe", "model.layers.2.router.scale", 0.0),
        ("gemma4_ple", "model.layers.3.post_per_layer_input_norm.weight", 0.0),
        ("gemma4_ple", "model.embed_tokens_per_layer.weight", 0.0),
        ("gemma4_ple", "model.per_layer_projection_norm.weight", 0.0),
        ("qwen3_5", "model.layers.0.linear_attn.dt_bias", 3.0),
        ("qwen3_5", "model.layers.1.linear_attn.A_log", 3.0),
        ("qwen3_5", "model.layers.2.linear_attn.norm.weight", 3.0),
        ("deepseek_v32", "model.layers.0.self_attn.indexer.k_norm.bias", 5.0),
    ];
    for (name, tensor, value) in cases {
        let folder = with_config(name, |_| {});
        overwrite(folder.path(), tensor, value);
        let model = Model::load(folder.path(), |_| Ok(Precision::f32())).unwrap();
        let logits = model.logits(&batch(name), None).unwrap();
        let (distance, _) = error(&logits, &golden(name).f32("logits").unwrap().values);
        assert!(distance > 1e-4, "{name}: {tensor} makes no difference ({distance:e})");
    }
}

#[test]
fn impossible_settings_are_refused_by_name() {
    let cases: [Case; 9] = [
        ("qwen3_5", "`num_key_value_heads` must divide 4, got 3", |c| c["num_key_value_heads"] = json!(3)),
        ("qwen3_5", "`linear_conv_kernel_dim` must be 2 to 8, got 9", |c| {
            c["linear_conv_kernel_dim"] = json!(9)
        }),
        ("qwen3_5", "`hidden_act` is \"relu\"", |c| c["hidden_act"] = json!("relu")),
        ("qwen3_5", "`layer_types` has 3 entries for 4 layers", |c| {
            c["layer_types"] = json!(["linear_attention", "full_attention", "full_attention"]);
        }),
        ("qwen3_5", "`rope_parameters.rope_type` is \"spiral\"", |c| {
            c["rope_parameters"]["rope_type"] = json!("spiral");
        }),
        ("qwen3_5_moe", "`num_experts_per_tok` must be at most the number of experts (8), got 9", |c| {
            c["num_experts_per_tok"] = json!(9)
        }),
        ("gemma2", "`attn_logit_softcapping` must be above 0, got -1", |c| {
            c["attn_logit_softcapping"] = json!(-1)
        }),
        ("gemma4_ple", "`num_kv_shared_layers` must be below num_hidden_layers (10), got 10", |c| {
            c["num_kv_shared_layers"] = json!(10)
        }),
        ("deepseek_v32", "`n_group` must divide 8, got 3", |c| c["n_group"] = json!(3)),
    ];
    for (name, words, change) in cases {
        let refusal = refusal(name, change);
        assert!(refusal.contains("config.json: ") && refusal.contains(words), "{name}: {refusal}");
    }
    // Unknown fields are accepted.
    let folder = with_config("qwen3_5", |c| c["a_new_field"] = json!({"of": "tomorrow"}));
    Model::load(folder.path(), |_| Ok(Precision::f32())).unwrap();
}
