//! adapter_config.json of PEFT (0.21): every key is supported, known to have no effect here, or refused by
//! name.
//!
//! Some initializations (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) subtract the adapter's initial product from the
//! base weights. PEFT repeats that whenever it loads such an adapter. A and B are wrong without it, so they
//! are refused.

use std::path::Path;

use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// Settings needed to apply an adapter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdapterSettings {
    /// Number of rows of A and of columns of B.
    pub rank: usize,
    /// Factor of the product B A.
    pub scale: f32,
}

/// Keys that this reader uses.
const HONORED: [&str; 4] = ["r", "lora_alpha", "use_rslora", "init_lora_weights"];

/// Keys without effect when an adapter is applied: origin, training, initialization, and target modules,
/// which the tensor names already give.
const HARMLESS: [&str; 22] = [
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "merge_weights",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    "unsloth_fixed",
    "unsloth_version",
];

/// Initializations of A and B that do not change the base weights.
const PLAIN_INITS: [&str; 4] = ["gaussian", "eva", "orthogonal", "mica"];

/// Initializations that change the base weights, with the method's name.
const BASE_CHANGING_INITS: [(&str, &str); 5] =
    [("pissa", "PiSSA"), ("olora", "OLoRA"), ("corda", "CorDA"), ("loftq", "LoftQ"), ("lora_ga", "LoRA-GA")];

impl AdapterSettings {
    /// Parses adapter_config.json; errors name `file` and the first unsupported key.
    pub fn parse(config: &Value, file: &Path) -> Result<AdapterSettings> {
        let fail =
            |field: &str, problem: String| Error::Config { file: file.into(), field: field.into(), problem };
        let Some(config) = config.as_object() else {
            return Err(fail("adapter_config.json", "is not an object".into()));
        };
        for (key, value) in config {
            if let Some(problem) = problem(key, value) {
                return Err(fail(key, problem));
            }
        }
        let rank = config.get("r").and_then(Value::as_u64).filter(|rank| (1..1 << 20).contains(rank));
        let rank = rank.ok_or_else(|| fail("r", "must be an integer from 1 to 1048575".into()))?;
        let alpha = config.get("lora_alpha").and_then(Value::as_f64);
        let alpha = alpha.ok_or_else(|| fail("lora_alpha", "must be a number".into()))?;
        let divisor = if is_true(config, "use_rslora") { (rank as f64).sqrt() } else { rank as f64 };
        let scale = (alpha / divisor) as f32;
        if !scale.is_finite() {
            return Err(fail("lora_alpha", format!("is {alpha}, outside the range of f32")));
        }
        Ok(AdapterSettings { rank: rank as usize, scale })
    }
}

fn is_true(config: &Map<String, Value>, key: &str) -> bool {
    config.get(key) == Some(&Value::Bool(true))
}

/// Returns true if the value turns an option off.
fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    }
}

/// Returns the reason why a key of adapter_config.json is unsupported, or `None`.
fn problem(key: &str, value: &Value) -> Option<String> {
    let only = |expected: &str| Some(format!("is {value}; only {expected} is supported"));
    match key {
        "init_lora_weights" => init_problem(value),
        "use_rslora" if value.is_boolean() || value.is_null() => None,
        "use_rslora" => only("true or false"),
        "peft_type" if *value == "LORA" || value.is_null() => None,
        "peft_type" => only("\"LORA\""),
        "bias" if *value == "none" || value.is_null() => None,
        "bias" => only("\"none\""),
        _ if HONORED.contains(&key) || HARMLESS.contains(&key) || is_off(value) => None,
        "alora_invocation_tokens" => {
            refused("activated LoRA (aLoRA), which applies only from these tokens on")
        }
        "use_dora" => refused("DoRA, which rescales the rows of the weights"),
        "lora_bias" => refused("a bias in B"),
        "fan_in_fan_out" => refused("weights that are stored transposed"),
        "rank_pattern" | "alpha_pattern" => refused("a different rank or alpha for some modules"),
        "modules_to_save" => refused("fully trained modules"),
        "target_parameters" => refused("adapters on parameters outside linear layers"),
        "trainable_token_indices" => refused("fully trained token embeddings"),
        "layer_replication" => refused("layers that are used several times"),
        "use_qalora" => refused("QALoRA, which pools the inputs of A"),
        "use_bdlora" => refused("block-diagonal adapters"),
        "arrow_config" => refused("Arrow, which routes tokens among several adapters"),
        "kasa_config" => refused("KaSA, which takes singular values out of the base weights"),
        "monteclora_config" => refused("MonteCLoRA, which draws adapters at random"),
        "velora_config" => refused("VeLoRA, which compresses activations"),
        "megatron_config" => refused("layers of Megatron"),
        _ => Some(format!(
            "is {value}; this key is unknown and may change what the adapter computes; remove it if it does not"
        )),
    }
}

fn refused(what: &str) -> Option<String> {
    Some(format!("requests {what}; only plain LoRA is supported"))
}

fn init_problem(value: &Value) -> Option<String> {
    let Value::String(start) = value else {
        let plain = value.is_boolean() || value.is_null();
        return (!plain).then(|| format!("is {value}, not an initialization"));
    };
    let name = start.to_lowercase();
    if PLAIN_INITS.contains(&name.as_str()) {
        return None;
    }
    Some(match BASE_CHANGING_INITS.iter().find(|(start, _)| name.starts_with(start)) {
        Some((_, method)) => format!(
            "is {start:?}: {method} changes the base weights before training, and this adapter needs the changed ones; convert it \
             to plain LoRA with PEFT's `path_initial_model_for_weight_conversion`, or merge it with PEFT"
        ),
        None => format!("is {start:?}, an unknown initialization"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(changes: Value) -> Result<AdapterSettings, String> {
        let mut config = json!({"peft_type": "LORA", "r": 4, "lora_alpha": 6});
        for (key, value) in changes.as_object().unwrap() {
            config[key] = value.clone();
        }
        AdapterSettings::parse(&config, Path::new("adapter_config.json")).map_err(|error| error.to_string())
    }

    #[test]
    fn plain_lora_settings_of_peft_are_read() {
        // LoraConfig().to_dict() of PEFT 0.21.
        let written = json!({
            "task_type": "CAUSAL_LM", "peft_type": "LORA", "auto_mapping": null, "peft_version": "0.21.2",
            "base_model_name_or_path": "base", "revision": null, "inference_mode": true, "r": 8,
            "target_modules": ["q_proj"], "exclude_modules": null, "lora_alpha": 16, "lora_dropout": 0.1,
            "fan_in_fan_out": false, "bias": "none", "use_rslora": false, "modules_to_save": null,
            "init_lora_weights": true, "layers_to_transform": [0, 1], "layers_pattern": null, "rank_pattern": {},
            "alpha_pattern": {}, "megatron_config": null, "megatron_core": "megatron.core",
            "trainable_token_indices": null, "loftq_config": {}, "eva_config": null, "corda_config": null,
            "lora_ga_config": null, "use_dora": false, "velora_config": null, "alora_invocation_tokens": null,
            "use_qalora": false, "qalora_group_size": 16, "monteclora_config": null, "layer_replication": null,
            "lora_bias": false, "target_parameters": null, "use_bdlora": null, "arrow_config": null,
            "kasa_config": null, "ensure_weight_tying": false,
        });
        assert_eq!(parse(written), Ok(AdapterSettings { rank: 8, scale: 2.0 }));
    }

    #[test]
    fn a_start_that_changes_the_base_weights_is_refused_by_name() {
        for (start, method) in [
            ("pissa", "PiSSA"),
            ("pissa_niter_16", "PiSSA"),
            ("olora", "OLoRA"),
            ("OLoRA", "OLoRA"),
            ("corda", "CorDA"),
            ("loftq", "LoftQ"),
            ("lora_ga", "LoRA-GA"),
        ] {
            let error = parse(json!({"init_lora_weights": start})).unwrap_err();
            let words = ["init_lora_weights", start, method, "path_initial_model_for_weight_conversion"];
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
        }
        assert!(parse(json!({"init_lora_weights": "new"})).unwrap_err().contains("unknown initialization"));
        assert!(parse(json!({"init_lora_weights": 3})).is_err());
        for plain in
            [json!(true), json!(false), json!("gaussian"), json!("eva"), json!("orthogonal"), json!("mica")]
        {
            assert!(parse(json!({"init_lora_weights": plain})).is_ok(), "{plain}");
        }
    }

    #[test]
    fn every_option_that_changes_the_mathematics_is_refused_by_name() {
        for (key, value) in [
            ("peft_type", json!("LOHA")),
            ("bias", json!("all")),
            ("fan_in_fan_out", json!(true)),
            ("use_dora", json!(true)),
            ("lora_bias", json!(true)),
            ("rank_pattern", json!({"q_proj": 2})),
            ("alpha_pattern", json!({"q_proj": 2})),
            ("modules_to_save", json!(["lm_head"])),
            ("layer_replication", json!([[0, 2], [1, 3]])),
            ("target_parameters", json!(["experts.down_proj"])),
            ("trainable_token_indices", json!([1, 2])),
            ("alora_invocation_tokens", json!([5, 6])),
            ("use_qalora", json!(true)),
            ("use_bdlora", json!({"nblocks": 2})),
            ("arrow_config", json!({"top_k": 2})),
            ("kasa_config", json!({"beta": 1e-4})),
            ("monteclora_config", json!({"samples": 2})),
            ("velora_config", json!({"scale": 1.0})),
            ("megatron_config", json!({"layers": 2})),
            ("use_rslora", json!("yes")),
            ("of_the_future", json!(0.5)),
        ] {
            let error = parse(json!({key: value})).unwrap_err();
            assert!(error.contains(&format!("adapter_config.json: `{key}` ")), "{error}");
        }
        assert!(parse(json!({"of_the_future": null, "another": false})).is_ok());
    }

    #[test]
    fn rank_and_scale_are_numbers_that_can_be_computed_with() {
        assert_eq!(parse(json!({})), Ok(AdapterSettings { rank: 4, scale: 1.5 }));
        assert_eq!(parse(json!({"use_rslora": true})), Ok(AdapterSettings { rank: 4, scale: 3.0 }));
        for bad in [json!({"r": 0}), json!({"r": -1}), json!({"r": 1 << 20}), json!({"r": null})] {
            assert!(parse(bad.clone()).unwrap_err().contains("`r`"), "{bad}");
        }
        for bad in [json!({"lora_alpha": null}), json!({"lora_alpha": 1e300}), json!({"lora_alpha": "8"})] {
            assert!(parse(bad.clone()).unwrap_err().contains("`lora_alpha`"), "{bad}");
        }
    }
}
