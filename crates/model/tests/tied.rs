//! Checkpoints that store the output head although it is tied to the embedding.

use std::fs;
use std::path::Path;

use ballast_checkpoint::tensor_file::{Array, Named, TensorFile, write_f32};
use ballast_files::jobs::Silent;
use ballast_model::{LazyCheckpoint, Model, Precision};
use serde_json::{Value, json};

use crate::common::{batch, error, folder};

/// One model for each naming of embedding and head.
const MODELS: [&str; 6] = ["qwen3_5", "qwen3_5_moe", "qwen3_next", "gemma2", "gemma4_dense", "deepseek_v32"];

fn config(folder: &Path) -> Value {
    serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap()
}

/// Copies a model in F32 to the folder `base`, with `tie_word_embeddings` true and a stored head that differs
/// from the embedding by `change` in one value. `front` is the prefix of tensor names; unless it is `model.`,
/// the configuration is nested in `text_config`.
fn with_head(model: &str, change: f32, front: &str) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    let base = copy.path().join("base");
    fs::create_dir(&base).unwrap();
    let file = TensorFile::open(&folder(model).join("model.safetensors")).unwrap();
    let head = if front.ends_with(".model.") { "language_model.lm_head.weight" } else { "lm_head.weight" };
    let mut tensors: Vec<(String, Array<f32>)> = Vec::new();
    for name in file.names().filter(|name| *name != "lm_head.weight") {
        let renamed = name.replacen("model.", front, 1);
        if name == "model.embed_tokens.weight" {
            let mut array = file.f32(name).unwrap();
            array.values[7] += change;
            tensors.push((head.into(), array));
        }
        tensors.push((renamed, file.f32(name).unwrap()));
    }
    let named: Vec<Named<'_>> =
        tensors.iter().map(|(name, array)| (&name[..], &array.shape[..], &array.values[..])).collect();
    write_f32(&base.join("model.safetensors"), &named, &[], false).unwrap();
    let mut text = config(&folder(model));
    text["tie_word_embeddings"] = true.into();
    let config = match front {
        "model." => text,
        _ => json!({ "model_type": "gemma3", "tie_word_embeddings": true, "text_config": text }),
    };
    fs::write(base.join("config.json"), config.to_string()).unwrap();
    copy
}

fn load(folder: &Path) -> Model {
    Model::load(folder, |_| Ok(Precision::f32())).unwrap()
}

fn names(folder: &Path) -> Vec<String> {
    let file = TensorFile::open(&folder.join("model.safetensors")).unwrap();
    file.names()
        .filter(|name| name.contains("lm_head") || name.ends_with("embed_tokens.weight"))
        .map(Into::into)
        .collect()
}

#[test]
fn an_equal_head_is_the_embedding_and_is_written_once() {
    for model in MODELS {
        let copy = with_head(model, 0.0, "model.");
        let mut tied = load(&copy.path().join("base"));
        assert!(tied.config.tied && tied.warnings.is_empty(), "{model}");
        assert!(LazyCheckpoint::open(&copy.path().join("base")).unwrap().config.tied, "{model}");
        // If the embedding changes, as in training, the head changes with it.
        let at = tied.specs.weights.iter().position(|spec| spec.name == "embed_tokens.weight").unwrap();
        let mut values = tied.params.weights()[at].to_f32();
        values.iter_mut().for_each(|x| *x *= 1.5);
        tied.params.weights_mut()[at] = ballast_model::params::Weight::F32(values);
        let moved = tied.logits(&batch(model), None).unwrap();
        let saved = copy.path().join("saved");
        tied.save(&saved, false, &Silent).unwrap();
        assert_eq!(names(&saved), ["model.embed_tokens.weight"], "{model}");
        assert_eq!(config(&saved)["tie_word_embeddings"], true, "{model}");
        assert!(load(&saved).logits(&batch(model), None).unwrap() == moved, "{model}");
    }
}

#[test]
fn a_different_head_is_used_and_the_model_is_saved_untied() {
    for model in MODELS {
        let copy = with_head(model, 1.0, "model.");
        let untied = load(&copy.path().join("base"));
        assert!(!untied.config.tied, "{model}");
        let warning = untied.warnings.concat();
        for words in ["config.json", "lm_head.weight and model.embed_tokens.weight", "different values"] {
            assert!(warning.contains(words), "{warning}");
        }
        assert_eq!(LazyCheckpoint::open(&copy.path().join("base")).unwrap().warnings, untied.warnings);
        let logits = untied.logits(&batch(model), None).unwrap();
        let tied =
            load(&with_head(model, 0.0, "model.").path().join("base")).logits(&batch(model), None).unwrap();
        assert!(error(&logits, &tied).1 > 1e-3, "{model}: the stored head must change the logits");
        let saved = copy.path().join("saved");
        untied.save(&saved, false, &Silent).unwrap();
        assert_eq!(config(&saved)["tie_word_embeddings"], false, "{model}");
        let again = load(&saved);
        assert!(again.warnings.is_empty() && !again.config.tied, "{model}");
        assert!(again.logits(&batch(model), None).unwrap() == logits, "{model}");
    }
}

#[test]
fn heads_of_nested_models_are_found_under_both_of_their_names() {
    for (front, head) in [
        ("model.language_model.", "lm_head.weight"),
        ("language_model.model.", "language_model.lm_head.weight"),
    ] {
        let embedding = format!("{front}embed_tokens.weight");
        let copy = with_head("gemma3", 0.0, front);
        let tied = load(&copy.path().join("base"));
        tied.save(&copy.path().join("saved"), false, &Silent).unwrap();
        assert_eq!(names(&copy.path().join("saved")), [embedding.as_str()]);
        let copy = with_head("gemma3", 1.0, front);
        let untied = load(&copy.path().join("base"));
        assert!(!untied.config.tied && untied.warnings.concat().contains(head), "{:?}", untied.warnings);
        let saved = copy.path().join("saved");
        untied.save(&saved, false, &Silent).unwrap();
        let mut stored = names(&saved);
        stored.sort();
        let mut expected = [embedding.as_str(), head];
        expected.sort();
        assert_eq!(stored, expected);
        let config = config(&saved);
        assert_eq!(
            (&config["tie_word_embeddings"], &config["text_config"]["tie_word_embeddings"]),
            (&json!(false), &json!(false))
        );
        assert!(
            load(&saved).logits(&batch("gemma3"), None).unwrap()
                == untied.logits(&batch("gemma3"), None).unwrap()
        );
    }
}
