//! New models.

use std::collections::BTreeSet;
use std::fs;

use ballast_checkpoint::Checkpoint;
use ballast_files::jobs::Silent;
use ballast_model::params::{Init, Spec};
use ballast_model::precision::Storage;
use ballast_model::{Model, Precision, SaveOptions};
use serde_json::Value;

use crate::common::{self, MODELS, folder};

fn json(model: &str) -> Value {
    serde_json::from_slice(&fs::read(folder(model).join("config.json")).unwrap()).unwrap()
}

fn new(model: &str, preset: &str, seed: u64) -> Model {
    Model::init(&json(model), |config| Precision::preset(preset, config), seed).unwrap()
}

/// Every parameter in f32.
fn values(model: &Model) -> Vec<(&Spec, Vec<f32>)> {
    let weights = model.params.weights().iter().map(|weight| weight.to_f32());
    let protected = model.params.protected().iter().map(|tensor| tensor.values().to_vec());
    model.specs.all().zip(weights.chain(protected)).collect()
}

fn same(a: &Model, b: &Model) -> bool {
    a.params.weights() == b.params.weights() && a.params.protected() == b.params.protected()
}

fn names(checkpoint: &Checkpoint) -> BTreeSet<&str> {
    checkpoint.tensors.iter().map(|tensor| tensor.name.as_str()).collect()
}

#[test]
fn a_new_model_is_saved_under_the_names_of_transformers_and_loads_with_the_same_bits() {
    for name in MODELS {
        for preset in ["f32", "bf16"] {
            let model = new(name, preset, 7);
            let home = tempfile::tempdir().unwrap();
            let saved = home.path().join("saved");
            model.save(&saved, false, &Silent).unwrap();
            let again = Model::load(&saved, |config| Precision::preset(preset, config)).unwrap();
            assert!(same(&model, &again), "{name} {preset}");
            let (ours, theirs) =
                (Checkpoint::open(&saved).unwrap(), Checkpoint::open(&folder(name)).unwrap());
            assert_eq!(names(&ours), names(&theirs), "{name}");
            let config = ours.config.as_ref().unwrap();
            assert_eq!(config["architectures"], json(name)["architectures"], "{name}");
            assert_eq!(config["dtype"], if preset == "f32" { "float32" } else { "bfloat16" }, "{name}");
        }
    }
}

#[test]
fn a_model_initialised_in_f32_and_cast_is_the_one_initialised_in_bf16() {
    for name in MODELS {
        let mut model = new(name, "f32", 3);
        model.set_precision(Precision::bf16());
        assert!(same(&model, &new(name, "bf16", 3)), "{name}");
    }
}

#[test]
fn neither_threads_nor_other_tensors_change_what_is_drawn_and_the_seed_does() {
    let on = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| new("qwen3_5_moe", "f32", 5))
    };
    let one = on(1);
    assert!(same(&on(2), &one) && same(&on(7), &one));
    assert!(!same(&new("qwen3_5_moe", "f32", 6), &one));
    // The dense model has other tensors, and linear attention of the same shape.
    let (dense, name) = (new("qwen3_5", "f32", 5), "layers.2.linear_attn.in_proj_qkv.weight");
    let of = |model: &Model| values(model).into_iter().find(|(spec, _)| spec.name == name).unwrap().1;
    assert_eq!(of(&dense), of(&one));
}

#[test]
fn drawn_time_steps_are_small_and_touch_nothing_else() {
    let mut model = new("qwen3_5", "f32", 11);
    let plain = new("qwen3_5", "f32", 11);
    assert_eq!(model.draw_time_steps(11), 3);
    let mut steps = Vec::new();
    for ((spec, now), (_, then)) in values(&model).into_iter().zip(values(&plain)) {
        if spec.name.ends_with("dt_bias") {
            steps.extend(now.iter().map(|x| (*x as f64).exp().ln_1p()));
        } else {
            assert_eq!(now, then, "{}", spec.name);
        }
    }
    assert!(steps.iter().all(|dt| (0.000_999..0.1001).contains(dt)), "{steps:?}");
    assert!(steps.iter().any(|dt| *dt < 0.01) && steps.iter().any(|dt| *dt > 0.01), "{steps:?}");
    let again = values(&model).into_iter().map(|(_, values)| values).collect::<Vec<_>>();
    model.draw_time_steps(11);
    assert_eq!(again, values(&model).into_iter().map(|(_, values)| values).collect::<Vec<_>>());
    assert_eq!(new("gemma2", "f32", 1).draw_time_steps(1), 0);
}

#[test]
fn every_parameter_starts_as_its_spec_says() {
    for name in MODELS {
        let model = new(name, "f32", 11);
        let mut normal = 0;
        for (spec, values) in values(&model) {
            let context = format!("{name}: {}", spec.name);
            match spec.init {
                Init::Zeros => assert!(values.iter().all(|x| *x == 0.0), "{context}"),
                Init::Ones => assert!(values.iter().all(|x| *x == 1.0), "{context}"),
                Init::ALog => {
                    assert!(values.iter().all(|x| (0.01f32.ln()..=16f32.ln()).contains(x)), "{context}");
                }
                Init::Normal | Init::Embedding => {
                    let drawn: Vec<f32> = match (spec.init, model.config.padding) {
                        (Init::Embedding, Some(padding)) => {
                            let (width, padding) = (spec.shape[1], padding as usize);
                            let row = padding * width..(padding + 1) * width;
                            assert!(values[row.clone()].iter().all(|x| *x == 0.0), "{context}");
                            [&values[..row.start], &values[row.end..]].concat()
                        }
                        _ => values,
                    };
                    let n = drawn.len() as f64;
                    let mean = drawn.iter().map(|x| *x as f64).sum::<f64>() / n;
                    let square = drawn.iter().map(|x| *x as f64 * *x as f64).sum::<f64>() / n;
                    // Five standard errors of each.
                    assert!(mean.abs() < 5.0 * 0.02 / n.sqrt(), "{context}: mean {mean}");
                    let error = 5.0 * (2.0 / n).sqrt();
                    assert!((square / 0.0004 - 1.0).abs() < error, "{context}: variance {square}");
                    normal += 1;
                }
            }
        }
        assert!(normal > 5, "{name}");
    }
}

#[test]
fn the_configuration_sets_the_deviation() {
    let mut config = json("gemma2");
    config["initializer_range"] = 0.5.into();
    let wide = Model::init(&config, |_| Ok(Precision::f32()), 1).unwrap();
    let usual = new("gemma2", "f32", 1);
    for ((spec, wide), (_, usual)) in values(&wide).iter().zip(values(&usual)) {
        if spec.init == Init::Normal {
            assert!(wide.iter().zip(&usual).all(|(a, b)| (a - 25.0 * b).abs() <= 1e-6 * a.abs()));
        }
    }
}

#[test]
fn of_a_configuration_with_vision_the_text_model_is_made() {
    let path = common::fixture("release/qwen3_5/config.json");
    let config: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    let model = Model::init(&config, |_| Ok(Precision::bf16()), 1).unwrap();
    assert_eq!(model.precision().params, Storage::Bf16);
    let json = model.config_json().unwrap();
    assert_eq!((json["model_type"].as_str(), json.get("vision_config")), (Some("qwen3_5_text"), None));
    assert_eq!(model.parameter_name(&model.specs.weights[0]), "model.embed_tokens.weight");
    let home = tempfile::tempdir().unwrap();
    model.save(&home.path().join("saved"), false, &Silent).unwrap();
}

#[test]
fn a_config_of_another_model_is_not_written_beside_this_one() {
    let model = new("qwen3_5", "f32", 1);
    let home = tempfile::tempdir().unwrap();
    let mut config = model.config_json().unwrap();
    config["note"] = "ours".into();
    let save = |name: &str, config: &Value| {
        let options = SaveOptions { config: Some(config), ..SaveOptions::default() };
        model.save_with(&home.path().join(name), &options, &Silent)
    };
    save("a", &config).unwrap();
    let written = Checkpoint::open(&home.path().join("a")).unwrap().config.unwrap();
    assert_eq!(written["note"], "ours");
    config["rms_norm_eps"] = 0.1.into();
    let Err(error) = save("b", &config) else { panic!("it was written") };
    assert!(error.to_string().contains("does not describe the model"), "{error}");
    assert!(!home.path().join("b").exists());
}

#[test]
fn more_files_appear_with_the_model_or_neither_does() {
    let model = new("qwen3_5", "f32", 1);
    let home = tempfile::tempdir().unwrap();
    let save = |name: &str, files: &[&str]| {
        let files: Vec<(String, Vec<u8>)> =
            files.iter().map(|file| (file.to_string(), b"{}".into())).collect();
        let options = SaveOptions { files: &files, ..SaveOptions::default() };
        model
            .save_with(&home.path().join(name), &options, &Silent)
            .map(|_| ())
            .map_err(|error| error.to_string())
    };
    save("a", &["tokenizer.json"]).unwrap();
    assert_eq!(fs::read(home.path().join("a/tokenizer.json")).unwrap(), b"{}");
    let error = save("b", &["tokenizer.json", "none/vocab.json"]).unwrap_err();
    assert!(error.contains("b/none/vocab.json: cannot write"), "{error}");
    let error = save("c.safetensors", &["tokenizer.json"]).unwrap_err();
    assert!(error.contains("tokenizer.json cannot be written beside the single file"), "{error}");
    let left: Vec<_> = fs::read_dir(home.path()).unwrap().flatten().map(|entry| entry.file_name()).collect();
    assert_eq!(left, ["a"]);
}
