//! Protected tensors keep their bits through casts, files and presets, except where a preset rounds them.

use std::sync::Arc;

use ballast_checkpoint::Checkpoint;
use ballast_checkpoint::convert::{self, ConvertOptions};
use ballast_checkpoint::layout::{LayoutRequest, Naming};
use ballast_contract::{Architecture, Dtype, Registry};
use ballast_files::jobs::Silent;
use ballast_kernels::Rounding;
use ballast_model::precision::{PRESETS, Storage};
use ballast_model::probe::Recorder;
use ballast_model::{Model, Precision, Site};

use crate::common::{self, MODELS, batch, error, fixture, folder, load};

fn bits(model: &Model) -> Vec<u32> {
    let tensors = model.specs.protected.iter().zip(model.params.protected());
    tensors.flat_map(|(_, tensor)| tensor.values().iter().map(|x| x.to_bits())).collect()
}

#[test]
fn the_types_protect_what_the_strict_policy_protects() {
    let registry = Registry::builtin();
    let policy = registry.policy("strict").unwrap();
    for name in MODELS {
        let model = load(name, "f32");
        let checkpoint = Checkpoint::open(&folder(name)).unwrap();
        let architecture = Architecture::from_config(checkpoint.config.as_ref().unwrap(), &registry.families);
        let policy = architecture.map_or(policy.clone(), |a| policy.for_architecture(&a));
        let protects =
            |spec: &ballast_model::params::Spec| policy.rule_for(&format!("model.{}", spec.name)).is_some();
        for spec in &model.specs.protected {
            assert!(protects(spec), "{name}: {} is protected by its type but by no rule", spec.name);
        }
        for spec in &model.specs.weights {
            assert!(!protects(spec), "{name}: {} is protected by a rule but not by its type", spec.name);
        }
    }
}

#[test]
fn protected_bits_survive_every_preset_cast_save_and_load_but_the_ones_meant_to_round_them() {
    for name in ["qwen3_next", "qwen3_5", "qwen3_5_moe", "gemma4_moe"] {
        let original = bits(&load(name, "f32"));
        assert!(
            original.iter().any(|bits| bits & 0xffff != 0),
            "{name}: protected tensors must not be exact in bf16"
        );
        for (preset, _) in PRESETS {
            let mut model = load(name, preset);
            let rounded = bits(&model) != original;
            let leaves_some_out = model.specs.protected.iter().any(|spec| {
                let policy = model.precision().policy();
                policy.rule_for(&format!("model.{}", spec.name)).is_none()
            });
            let expected = leaves_some_out && model.precision().params == Storage::Bf16;
            assert_eq!(rounded, expected, "{name} {preset}");
            // Bits survive a cast to bf16 and back, and a file.
            let before = bits(&model);
            model.params.cast(Storage::Bf16);
            model.params.cast(Storage::F32);
            assert_eq!(bits(&model), before, "{name} {preset}: cast");
            let folder = tempfile::tempdir().unwrap();
            let saved = folder.path().join("saved");
            model.save(&saved, false, &Silent).unwrap();
            let again = Model::load(&saved, |_| Ok(Precision::f32())).unwrap();
            assert_eq!(bits(&again), before, "{name} {preset}: file");
        }
    }
}

#[test]
fn a_whole_model_cast_gives_other_logits_than_ours() {
    let (name, batch) = ("qwen3_5", batch("qwen3_5"));
    let exact = load(name, "f32").logits(&batch, None).unwrap();
    let logits = |preset| load(name, preset).logits(&batch, None).unwrap();
    assert_ne!(logits("bf16"), logits("hf-bf16"));
    let (ours, _) = error(&logits("bf16"), &exact);
    let (theirs, _) = error(&logits("hf-bf16"), &exact);
    println!("logits against f32: bf16 {ours:.3}, hf-bf16 {theirs:.3}");
}

#[test]
fn a_saved_model_is_the_checkpoint_it_came_from() {
    let folder = tempfile::tempdir().unwrap();
    let sources =
        [folder_of("models/qwen3_next"), folder_of("models/gemma4_ple"), folder_of("release/qwen3_5")];
    for (i, source) in sources.into_iter().enumerate() {
        // The preset matches the stored type, so that loading rounds nothing.
        let stored = Checkpoint::open(&source).unwrap();
        let mostly_bf16 = stored.tensors.iter().any(|t| t.dtype == Dtype::Bf16);
        let preset = if mostly_bf16 { "bf16" } else { "f32" };
        let model = Model::load(&source, |config| Precision::preset(preset, config)).unwrap();
        let target = folder.path().join(i.to_string());
        model.save(&target, false, &Silent).unwrap();
        let saved = Checkpoint::open(&target).unwrap();
        let names = |checkpoint: &Checkpoint| {
            let mut names: Vec<String> = checkpoint.tensors.iter().map(|t| t.name.clone()).collect();
            names.sort();
            names
        };
        assert_eq!(names(&saved), names(&stored), "tensor names, including vision and MTP");
        for tensor in &stored.tensors {
            let read = |checkpoint: &Checkpoint| {
                let t = checkpoint.tensors.iter().find(|t| t.name == tensor.name).unwrap();
                let mut data = vec![0; t.bytes as usize];
                checkpoint.files[t.file].read_at(&mut data, t.begin).unwrap();
                (t.dtype, t.shape.clone(), data)
            };
            let (before, after) = (read(&stored), read(&saved));
            // The released checkpoint stores dt_bias in BF16; the strict contract makes it F32.
            if before.0 == after.0 {
                assert!(before == after, "{}", tensor.name);
            } else {
                assert!(tensor.name.ends_with("dt_bias") && after.0 == Dtype::F32, "{}", tensor.name);
            }
        }
    }
}

fn folder_of(name: &str) -> std::path::PathBuf {
    fixture(name)
}

#[test]
fn every_layout_gives_the_same_bits_of_logits() {
    for name in ["qwen3_next", "qwen3_5", "qwen3_5_moe"] {
        let batch = batch(name);
        let expected = load(name, "f32").logits(&batch, None).unwrap();
        let source = Arc::new(Checkpoint::open(&folder(name)).unwrap());
        for (naming, ranks) in [(Naming::Nemo, 1), (Naming::Megatron, 1), (Naming::Megatron, 2)] {
            let options = ConvertOptions {
                layout: LayoutRequest {
                    naming: Some(naming),
                    ranks: Some(ranks),
                    ..LayoutRequest::default()
                },
                ..ConvertOptions::new(Registry::builtin().policy("strict").unwrap())
            };
            let folder = tempfile::tempdir().unwrap();
            let target = folder.path().join("converted");
            let plan = convert::plan(&source, &options).unwrap();
            convert::execute(&source, plan, &target, &options, &Silent).unwrap();
            let model = Model::load(&target, |_| Ok(Precision::f32())).unwrap();
            assert!(model.logits(&batch, None).unwrap() == expected, "{name} {naming:?} {ranks}");
        }
    }
}

#[test]
fn tensors_that_do_not_fit_are_all_listed() {
    let folder = common::with_config("qwen3_5", |config| {
        config["num_hidden_layers"] = 5.into();
        config["layer_types"] = serde_json::Value::Null;
        config["intermediate_size"] = 90.into();
    });
    let error = Model::load(folder.path(), |_| Ok(Precision::f32())).unwrap_err().to_string();
    assert!(error.contains("missing") && error.contains("of the wrong shape"), "{error}");
    assert!(error.contains("model.layers.4.input_layernorm.weight"), "{error}");
    assert!(
        error.contains("model.layers.0.mlp.down_proj.weight: shape must be [48, 90], got [48, 96]"),
        "{error}"
    );
    let folder = common::with_config("qwen3_5", |config| {
        config["num_hidden_layers"] = 3.into();
        config["layer_types"] = serde_json::Value::Null;
    });
    let error = Model::load(folder.path(), |_| Ok(Precision::f32())).unwrap_err().to_string();
    assert!(error.contains("extra") && error.contains("model.layers.3.self_attn.q_proj.weight"), "{error}");
}

#[test]
fn a_site_is_lowered_by_its_name_and_nothing_else_is() {
    let mut precision = Precision::f32();
    for site in Site::ALL {
        precision.set_site(site.name(), "f16").unwrap();
        let lowered = precision.sites().filter(|(_, rounding)| *rounding != Rounding::F32);
        assert_eq!(lowered.collect::<Vec<_>>(), [(site, Rounding::F16)]);
        precision.set_site(site.name(), "f32").unwrap();
    }
    assert_eq!(precision, Precision::f32());
    let error = precision.set_site("a_log", "bf16").unwrap_err().to_string();
    assert!(error.contains("\"a_log\"") && error.contains("decay_gate"), "{error}");
    assert!(precision.set_site("beta", "fp8").unwrap_err().to_string().contains("\"fp8\""));
}

#[test]
fn a_lowered_site_is_first_seen_where_it_is_said_to_be() {
    for (name, sites) in [
        (
            "qwen3_5_moe",
            &["gate_projections", "decay_gate", "beta", "l2norm", "qk_product", "logits", "residual"][..],
        ),
        ("gemma3", &["qk_product", "logits", "norms", "loss", "residual"]),
        ("deepseek_v32", &["indexer_logits", "router", "norms", "loss"]),
    ] {
        for site in sites {
            let record = |precision: &Precision| {
                let model = Model::load(&folder(name), |_| Ok(precision.clone())).unwrap();
                let mut recorder = Recorder { pattern: Some("*".into()), ..Recorder::default() };
                model.logits(&batch(name), Some(&mut recorder)).unwrap();
                recorder.seen
            };
            let mut precision = Precision::f32();
            precision.set_site(site, "bf16").unwrap();
            let (plain, lowered) = (record(&Precision::f32()), record(&precision));
            let first = plain.iter().zip(&lowered).find(|(a, b)| a.values != b.values);
            let (first, _) = first.unwrap_or_else(|| panic!("{name}: {site} changes nothing"));
            assert!(
                Site::behind(&first.site).contains(&Site::named(site).unwrap()),
                "{name}: {site} is seen at {}",
                first.site
            );
            assert_eq!(Site::behind(&format!("d.{}", first.site)), Site::behind(&first.site));
        }
    }
    for site in ["param.layers.0.linear_attn.A_log", "layers.0.mixer.out", "layers.0.linear_attn.norm"] {
        assert!(Site::behind(site).is_empty(), "{site}");
    }
    for site in ["embed", "d.embed", "layers.0.middle", "layers.0.out", "d.layers.7.out"] {
        assert_eq!(Site::behind(site), [Site::Residual], "{site}");
    }
}

#[test]
fn a_preset_says_what_it_computes_in_bf16() {
    let phrases = [
        (Site::GateProjections, "a, b"),
        (Site::QkProduct, "qk product"),
        (Site::Logits, "attention logits"),
        (Site::Probabilities, "probabilities"),
        (Site::Router, "router's logits"),
        (Site::Residual, "residual stream"),
        (Site::AttentionGradient, "two backward factors"),
        (Site::LossGradient, "two backward factors"),
    ];
    let config = load("qwen3_5", "f32").config;
    for (name, words) in PRESETS.into_iter().filter(|(name, _)| *name != "hf-bf16") {
        let precision = Precision::preset(name, &config).unwrap();
        for site in Site::ALL {
            let said = phrases.iter().any(|(other, phrase)| *other == site && words.contains(phrase));
            assert_eq!(said, precision.site(site) == Rounding::Bf16, "{name}: {}: {words}", site.name());
        }
    }
}
