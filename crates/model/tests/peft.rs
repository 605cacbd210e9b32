//! Adapters in PEFT's file format.

use std::fs;

use ballast_checkpoint::tensor_file::write_f32;
use serde_json::Value;

use crate::common::{MODELS, folder, load};

/// Saves an adapter of the tiny Qwen3.5 in a new folder.
fn adapter() -> (tempfile::TempDir, std::path::PathBuf) {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("adapter");
    let mut model = load("qwen3_5", "f32");
    model.add_adapters(&|module| module.ends_with("q_proj"), 4, 6.0, 1).unwrap();
    model.write_adapters(&path, false).unwrap();
    (home, path)
}

fn config(path: &std::path::Path) -> Value {
    serde_json::from_slice(&fs::read(path.join("adapter_config.json")).unwrap()).unwrap()
}

fn read_with(path: &std::path::Path, key: &str, value: Value) -> Result<f32, String> {
    let mut config = config(path);
    config[key] = value;
    fs::write(path.join("adapter_config.json"), config.to_string()).unwrap();
    let mut model = load("qwen3_5", "f32");
    model.read_adapters(path).map_err(|error| error.to_string())?;
    Ok(model.params.adapters().iter().flatten().next().unwrap().scale)
}

#[test]
fn an_adapter_names_its_base_model() {
    let (_home, path) = adapter();
    let base = folder("qwen3_5").canonicalize().unwrap();
    assert_eq!(config(&path)["base_model_name_or_path"], base.to_str().unwrap());
}

#[test]
fn an_adapter_that_is_no_plain_lora_is_refused_by_name() {
    for (key, value, words) in [
        ("init_lora_weights", "pissa".into(), "PiSSA"),
        ("init_lora_weights", "olora".into(), "OLoRA"),
        ("alora_invocation_tokens", vec![1, 2].into(), "aLoRA"),
        ("target_parameters", vec!["experts.down_proj"].into(), "target_parameters"),
        ("lora_bias", true.into(), "lora_bias"),
        ("an_option_of_tomorrow", 2.into(), "an_option_of_tomorrow"),
    ] {
        let (_home, path) = adapter();
        let error = read_with(&path, key, value).unwrap_err();
        assert!(error.contains(words) && error.contains("adapter_config.json"), "{error}");
    }
}

#[test]
fn a_rank_stabilized_adapter_is_scaled_by_the_root_of_its_rank() {
    let (_home, path) = adapter();
    assert_eq!(read_with(&path, "use_rslora", true.into()), Ok(3.0));
}

#[test]
fn a_file_without_adapters_is_refused() {
    let (_home, path) = adapter();
    fs::remove_file(path.join("adapter_model.safetensors")).unwrap();
    write_f32(&path.join("adapter_model.safetensors"), &[], &[], false).unwrap();
    let error = load("qwen3_5", "f32").read_adapters(&path).unwrap_err().to_string();
    assert!(error.contains("adapter_model.safetensors: no adapters in this file"), "{error}");
}

#[test]
fn modules_that_cannot_carry_an_adapter_are_listed_on_one_line() {
    for name in MODELS {
        let error = load(name, "f32").add_adapters(&|_| true, 2, 2.0, 1).unwrap_err().to_string();
        assert!(
            error.starts_with("these modules cannot have an adapter; exclude them: ")
                && !error.contains('\n'),
            "{error}"
        );
        assert!(error.matches(": ").count() <= 22, "at most 20 of them: {error}");
    }
}
