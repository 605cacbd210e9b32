//! config.json is read as in transformers: compares with fixtures/config/cases.json, written by
//! fixtures/config/make.py.

use std::path::Path;

use ballast_model::Config;
use ballast_model::config::{Mixer, Rope, Router};
use serde_json::{Value, json};

/// Cases that transformers runs but Ballast rejects, with a part of the error.
const REFUSED_HERE: [(&str, &str); 10] = [
    ("gemma2: bidirectional", "only causal"),
    ("gemma3: bidirectional", "only causal"),
    ("gemma4: bidirectional, all", "only causal"),
    ("gemma2: a pattern of 3, six layers", "only 2"),
    ("gemma2: an underscored pattern of 3, six layers", "only 2"),
    ("gemma3: an underscored pattern of 3, six layers", "only 6"),
    ("gemma4: a pattern of 3, six layers", "only 6"),
    ("gemma4: an underscored pattern of 3, six layers", "only 6"),
    ("gemma3: scaling with the older name", "name it `rope_type`"),
    ("deepseek: mscale of a linear type", "only 0"),
];

fn cases() -> Vec<Value> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/config/cases.json");
    serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap()
}

fn parse(config: &Value) -> Result<Config, String> {
    Config::parse(config, Path::new("config.json")).map_err(|error| error.to_string())
}

fn unknown(config: &Value) -> Vec<String> {
    Config::unknown_keys(config, Path::new("config.json")).unwrap()
}

/// Reads a fixture's config.json.
fn fixture(name: &str) -> Value {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name).join("config.json");
    serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap()
}

/// Reads a fixture's config.json and changes some values; `Value::Null` sets a field to null.
fn changed(name: &str, changes: Value) -> Value {
    let mut config = fixture(name);
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
}

fn check_rope(case: &str, rope: &Rope, expected: &Value) {
    let rotary = rope.rotary().unwrap();
    let frequencies: Vec<f64> =
        expected["inv_freq"].as_array().unwrap().iter().map(|f| f.as_f64().unwrap()).collect();
    assert_eq!(rotary.inv_freq().len(), frequencies.len(), "{case}: dimensions that rotate");
    for (ours, theirs) in rotary.inv_freq().iter().zip(&frequencies) {
        assert!(
            (*ours as f64 - theirs).abs() <= 1e-5 * theirs,
            "{case}: {:?} {frequencies:?}",
            rotary.inv_freq()
        );
    }
    let factor = expected["attention_factor"].as_f64().unwrap();
    assert!((rotary.attention_factor() as f64 - factor).abs() < 1e-6, "{case}: attention factor {factor}");
}

#[test]
fn every_configuration_means_what_transformers_makes_of_it_or_is_refused() {
    let cases = cases();
    assert!(cases.len() > 200);
    for case in &cases {
        let name = case["name"].as_str().unwrap();
        let config = parse(&case["config"]);
        let refused = case["refused"] == json!(true);
        if let Some((_, words)) = REFUSED_HERE.iter().find(|(here, _)| *here == name) {
            let error = config.expect_err(name);
            assert!(error.contains(words), "{name}: {error}");
            continue;
        }
        if refused {
            assert!(config.is_err(), "{name}: must be rejected, transformers cannot run it");
            continue;
        }
        let config = config.unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(json!(config.padding), case["padding"], "{name}: padding");
        for (layer, expected) in config.layers.iter().zip(case["layers"].as_array().unwrap()) {
            let scale = |scale: f32| {
                let expected = expected["scale"].as_f64().unwrap();
                assert!((scale as f64 - expected).abs() < 1e-6, "{name}: scale {scale} {expected}");
            };
            match &layer.mixer {
                Mixer::Linear(_) => assert!(expected.is_null(), "{name}"),
                Mixer::Softmax(attention) => {
                    check_rope(name, &attention.rope, expected);
                    scale(attention.scale);
                    assert_eq!(json!(attention.window), expected["window"], "{name}: window");
                    let keys = json!([attention.kv_heads * attention.head_dim, config.hidden]);
                    assert_eq!(keys, expected["keys"], "{name}: shape of k_proj");
                }
                Mixer::Latent(attention) => {
                    check_rope(name, &attention.rope, expected);
                    check_rope(name, &attention.indexer_rope, expected);
                    scale(attention.scale);
                }
            }
        }
        if let Some(experts) = case["experts"].as_u64() {
            let last = config.layers.last().unwrap().experts.unwrap();
            assert_eq!(last.count as u64, experts, "{name}: experts");
            assert!(matches!(last.router, Router::SigmoidGroups { .. }));
        }
    }
    for (here, _) in REFUSED_HERE {
        assert!(cases.iter().any(|case| case["name"] == here), "no case {here}");
    }
}

#[test]
fn layer_keys_of_gemma_4_may_be_padded_with_zeros() {
    let plain = parse(&fixture("models/gemma4_ple")).unwrap();
    let padded = json!({"per_layer_config": {"005": {"head_dim": 32}, "09": {"head_dim": 32}}});
    assert_eq!(parse(&changed("models/gemma4_ple", padded)).unwrap(), plain);
    for (changes, words) in [
        (json!({"10": {"head_dim": 32}}), "`per_layer_config.10` is not a layer number; use 0 to 9"),
        (json!({"-1": {"head_dim": 32}}), "`per_layer_config.-1` is not a layer number"),
        (json!({"5": {"head_dim": 32}, "05": {"head_dim": 32}}), "names layer 5 a second time"),
        (
            json!({"5": {"intermediate_size": 7}}),
            "`per_layer_config.5.intermediate_size` cannot differ by layer",
        ),
        (json!({"5": 7}), "`per_layer_config.5` is not an object"),
    ] {
        let error = parse(&changed("models/gemma4_ple", json!({"per_layer_config": changes}))).unwrap_err();
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn gemma_3_has_no_cap_on_attention_logits_and_none_on_logits_beside_vision() {
    let capped = changed(
        "models/gemma3",
        json!({"attn_logit_softcapping": 20.0, "final_logit_softcapping": 30.0, "pad_token_id": null}),
    );
    let config = parse(&capped).unwrap();
    assert!(
        config.layers.iter().all(|layer| matches!(&layer.mixer, Mixer::Softmax(a) if a.soft_cap.is_none()))
    );
    assert_eq!((config.final_cap, config.padding), (Some(30.0), None));
    assert_eq!(unknown(&capped), ["attn_logit_softcapping"]);
    let wrapped = json!({"model_type": "gemma3", "text_config": capped, "vision_config": {}});
    assert_eq!(parse(&wrapped).unwrap().final_cap, None);
    assert_eq!(
        unknown(&wrapped),
        ["text_config.attn_logit_softcapping", "text_config.final_logit_softcapping"]
    );
}

#[test]
fn keys_that_are_neither_used_nor_harmless_are_named_with_their_path() {
    for name in [
        "deepseek_v32",
        "deepseek_v32_yarn",
        "gemma2",
        "gemma3",
        "gemma4_dense",
        "gemma4_moe",
        "gemma4_ple",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_next",
    ] {
        assert_eq!(unknown(&fixture(&format!("models/{name}"))), Vec::<String>::new(), "{name}");
    }
    assert_eq!(unknown(&fixture("release/qwen3_5")), Vec::<String>::new());
    let mut wrapped = fixture("release/qwen3_5");
    wrapped["a_new_field"] = json!(1);
    wrapped["nothing"] = Value::Null;
    wrapped["text_config"]["attention_dropout"] = json!(0.1);
    wrapped["text_config"]["alibi"] = json!(true);
    wrapped["text_config"]["rope_parameters"]["factor"] = json!(8.0);
    assert_eq!(
        unknown(&wrapped),
        [
            "a_new_field",
            "text_config.alibi",
            "text_config.attention_dropout",
            "text_config.rope_parameters.factor"
        ]
    );
    // A second copy of a setting is accepted only if its value is equal.
    let copies = json!({"rope_theta": 1e7, "partial_rotary_factor": 0.5});
    assert_eq!(unknown(&changed("models/qwen3_5", copies)), Vec::<String>::new());
    let others = json!({"rope_theta": 1e6, "partial_rotary_factor": 0.25});
    assert_eq!(unknown(&changed("models/qwen3_5", others)), ["partial_rotary_factor", "rope_theta"]);
    // Rotary settings that transformers ignores are reported.
    let by_type = json!({"rope_scaling": {"full_attention": {"rope_type": "linear", "factor": 8.0}}});
    assert_eq!(unknown(&changed("models/gemma3", by_type)), ["rope_scaling.full_attention"]);
    let flat =
        json!({"rope_parameters": {"rope_type": "linear", "factor": 8.0}, "partial_rotary_factor": 0.5});
    assert_eq!(
        unknown(&changed("models/gemma3", flat)),
        ["partial_rotary_factor", "rope_parameters.factor", "rope_parameters.rope_type"]
    );
    let both = json!({"rope_scaling": {"type": "linear", "factor": 8.0, "beta_fast": 3}});
    assert_eq!(
        unknown(&changed("models/gemma2", both)),
        ["rope_parameters.rope_theta", "rope_parameters.rope_type", "rope_scaling.beta_fast"]
    );
}

#[test]
fn values_that_are_not_implemented_are_refused_by_name() {
    for (name, changes, words) in [
        ("qwen3_5", json!({"attn_output_gate": false}), "`attn_output_gate` is false"),
        ("qwen3_5", json!({"use_sliding_window": true}), "`use_sliding_window` is true"),
        ("qwen3_5", json!({"is_causal": false}), "`is_causal` is false"),
        ("qwen3_5", json!({"per_layer_config": {"1": {"head_dim": 8}}}), "`per_layer_config` is"),
        ("qwen3_5", json!({"quantization_config": {"bits": 4}}), "quantized weights"),
        ("qwen3_5", json!({"hidden_size": null}), "`hidden_size` is null"),
        ("qwen3_5", json!({"pad_token_id": 160}), "`pad_token_id` must be below vocab_size (160), got 160"),
        ("qwen3_5_moe", json!({"norm_topk_prob": false}), "`norm_topk_prob` is false"),
        ("qwen3_5_moe", json!({"mlp_only_layers": [1]}), "`mlp_only_layers` is [1]"),
        ("gemma4_moe", json!({"num_experts": null}), "`num_experts` is missing"),
        ("deepseek_v32", json!({"num_key_value_heads": 2}), "`num_key_value_heads` is 2"),
        ("deepseek_v32", json!({"moe_layer_freq": 2}), "`moe_layer_freq` is 2"),
        ("deepseek_v32", json!({"mlp_bias": true}), "`mlp_bias` is true"),
        (
            "deepseek_v32",
            json!({"layer_types": ["indexed_attention", "full_attention", "indexed_attention"]}),
            "`layer_types` has \"full_attention\"",
        ),
    ] {
        let error = parse(&changed(&format!("models/{name}"), changes)).unwrap_err();
        assert!(error.contains(words), "{name}: {error}");
    }
    let mut wrapped = fixture("release/qwen3_5");
    wrapped["model_type"] = json!("llava");
    let error = parse(&wrapped).unwrap_err();
    assert!(error.contains("`model_type` is \"llava\", which cannot wrap a text model"), "{error}");
    let mut wrapped = fixture("release/qwen3_5");
    wrapped["tie_word_embeddings"] = json!(false);
    let error = parse(&wrapped).unwrap_err();
    assert!(error.contains("`tie_word_embeddings` is false, but `text_config.tie_word_embeddings` is true"));
}
