//! Parses arbitrary bytes as adapter_config.json. Accepted files have only keys that are supported or known
//! to be harmless, and usable numbers.

#![no_main]

use std::path::Path;

use ballast_model::AdapterSettings;
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

/// Keys that may have any value because they are supported or have no effect; independent of the parser's own
/// list.
const FREE: &str = "r lora_alpha lora_dropout auto_mapping base_model_name_or_path corda_config ensure_weight_tying eva_config \
    exclude_modules inference_mode layers_pattern layers_to_transform loftq_config lora_ga_config megatron_core merge_weights \
    peft_version qalora_group_size revision runtime_config target_modules task_type unsloth_fixed unsloth_version";

fuzz_target!(|text: &[u8]| {
    let Ok(json) = serde_json::from_slice::<Value>(text) else { return };
    let Ok(settings) = AdapterSettings::parse(&json, Path::new("adapter_config.json")) else { return };
    assert!(settings.rank > 0 && settings.scale.is_finite());
    let off = |value: &Value| {
        matches!(value, Value::Null | Value::Bool(false))
            || value.as_array().is_some_and(Vec::is_empty)
            || value.as_object().is_some_and(|map| map.is_empty())
    };
    for (key, value) in json.as_object().expect("an object was accepted") {
        let fine = match key.as_str() {
            "peft_type" => value.is_null() || *value == "LORA",
            "bias" => value.is_null() || *value == "none",
            "use_rslora" => value.is_null() || value.is_boolean(),
            "init_lora_weights" => match value {
                Value::String(start) => {
                    ["gaussian", "eva", "orthogonal", "mica"].contains(&start.to_lowercase().as_str())
                }
                _ => value.is_null() || value.is_boolean(),
            },
            key => FREE.split_whitespace().any(|free| free == key) || off(value),
        };
        assert!(fine, "{key} = {value} was accepted");
    }
});
