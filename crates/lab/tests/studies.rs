//! Whole studies on golden models.

use std::fs;

use ballast_checkpoint::tensor_file::{Named, write_f32};
use ballast_lab::dump::Dump;
use ballast_lab::experiment::Arithmetic;
use ballast_lab::{Choice, More, Training};
use ballast_model::probe::Recorder;
use ballast_model::{LazyCheckpoint, LossOptions, Model, Precision, Recompute};

use crate::common::{MODELS, batch, defaults, folder, golden, run, study};

#[test]
fn every_model_has_a_whole_study() {
    for name in MODELS {
        let (findings, choices) = study(name, Arithmetic::F64, true, |study| {
            let choices = defaults(study.checkpoint);
            let names: Vec<String> = choices.iter().map(|choice| choice.name.clone()).collect();
            (study.choices(choices, More::default()).unwrap(), names)
        });
        assert_eq!(findings.runs.len(), choices.len() + 1, "{name}");
        let floor = run(&findings, "f32");
        // f32 is at the floor: qwen3_5 amplifies rounding most (see the model's golden test).
        assert!(floor.kl.max < 1e-8 && floor.top1_agreement == 1.0, "{name}: {:?}", floor.kl);
        let limit = if name == "qwen3_5" { 4e-4 } else { 1e-4 };
        assert!(floor.gradient_error.unwrap() < limit, "{name}: {:?}", floor.gradient_error);
        let checkpoint = LazyCheckpoint::open(&folder(name)).unwrap();
        let model = checkpoint.model(Precision::f32()).unwrap();
        let learned =
            model.specs.all().filter(|spec| spec.trainable && !spec.name.contains("indexer")).count();
        for found in &findings.runs {
            let compared = found.gradients.iter().filter(|g| !g.tensor.contains("indexer")).count();
            assert_eq!(compared, learned, "{name} {}", found.name);
            assert_eq!(found.by_layer.len(), findings.layers, "{name} {}", found.name);
            assert!(found.loss.is_finite() && !found.by_position.is_empty(), "{name} {}", found.name);
            assert_eq!(found.sites.len(), floor.sites.len(), "{name} {}", found.name);
        }
        let kl = |choice: &str| run(&findings, choice).kl.mean;
        assert!(kl("hf-bf16") > 10.0 * kl("f32") && kl("bf16") > 10.0 * kl("f32"), "{name}");
        assert!(findings.runs.is_sorted_by(|a, b| a.kl.mean >= b.kl.mean), "{name}: most damage first");
        assert!(!findings.answers.is_empty(), "{name}");
    }
}

#[test]
fn loss_and_gradients_are_those_of_a_plain_run() {
    let name = "qwen3_next";
    let findings = study(name, Arithmetic::F32, true, |study| {
        study
            .choices(
                vec![Choice::parse("hf-bf16", &study.checkpoint.config, &study.checkpoint.specs).unwrap()],
                More::default(),
            )
            .unwrap()
    });
    let batch = batch(name);
    let backward = |preset: &str| {
        let model = Model::load(&folder(name), |config| Precision::preset(preset, config)).unwrap();
        let mut grads = model.grads();
        let loss = model
            .forward_backward(&mut grads, &batch, &LossOptions::default(), Recompute::None, None)
            .unwrap();
        (model, grads, loss.language.sum / loss.language.tokens as f64)
    };
    let (model, exact, loss) = backward("f32");
    assert!((findings.reference.loss - loss).abs() < 1e-6);
    let (_, lowered, loss) = backward("hf-bf16");
    let found = run(&findings, "hf-bf16");
    assert!((found.loss - loss).abs() < 1e-6);
    for (spec, (a, b)) in model.specs.all().zip(lowered.all().zip(exact.all())) {
        let Some(reported) = found.gradients.iter().find(|g| g.tensor == spec.name) else { continue };
        let apart: f64 = a.iter().zip(b).map(|(a, b)| (*a as f64 - *b as f64).powi(2)).sum();
        let size: f64 = b.iter().map(|b| (*b as f64).powi(2)).sum();
        let error = (apart / size).sqrt();
        assert!(
            (reported.error - error).abs() <= 1e-6 * error,
            "{}: {} and {error}",
            spec.name,
            reported.error
        );
    }
}

#[test]
fn the_same_study_twice_gives_the_same_findings() {
    let once = || {
        study("gemma4_moe", Arithmetic::F64, true, |study| {
            let mut findings = study.choices(defaults(study.checkpoint), More::default()).unwrap();
            (findings.seconds, findings.peak_memory_bytes) = (0.0, None);
            serde_json::to_string(&findings).unwrap()
        })
    };
    assert_eq!(once(), once());
}

#[test]
fn decoding_shows_what_is_rounded_at_every_token() {
    let decode = |model: &str, policies: &[&str]| {
        study(model, Arithmetic::F32, false, |study| {
            let hybrid = LazyCheckpoint::open(&folder("qwen3_5")).unwrap();
            let choice = |name: &&str| Choice::parse(name, &hybrid.config, &hybrid.specs).unwrap();
            let more = More { decoding: true, ..More::default() };
            study.choices(policies.iter().map(choice).collect(), more).unwrap()
        })
    };
    let findings = decode("qwen3_5", &["state", "A_log", "hf-bf16"]);
    let decoded = |name: &str| findings.decoding.iter().find(|run| run.name == name).unwrap();
    assert!(findings.decoding.is_sorted_by(|a, b| a.kl.mean >= b.kl.mean));
    assert_eq!(findings.decoding.len(), 3);
    for one in &findings.decoding {
        assert!(one.kl.mean > 0.0 && one.kl.mean <= one.kl.max && one.top1_agreement > 0.5, "{}", one.name);
        let places: Vec<(usize, usize)> =
            one.by_position.iter().map(|place| (place.from, place.to)).collect();
        assert_eq!(places, [(0, 1), (1, 2), (2, 4), (4, 8), (8, 16), (16, 32)], "{}", one.name);
    }
    // A prefill of 29 tokens is shorter than a chunk, so its state is never rounded.
    assert_eq!(run(&findings, "state").kl.max, 0.0);
    // A tensor that is rounded once costs the same in prefill and decoding.
    let ratio = decoded("A_log").kl.mean / run(&findings, "A_log").kl.mean;
    assert!((0.99..1.01).contains(&ratio), "{ratio}");
    assert!(findings.answers.iter().any(|answer| answer.question.contains("while decoding")));
    // Without a state nothing is rounded: the bits are the same.
    let without = decode("gemma2", &["state"]);
    assert_eq!((without.decoding[0].kl.max, without.decoding[0].top1_agreement), (0.0, 1.0));
}

#[test]
fn training_steps_show_drift_only_where_something_is_rounded() {
    let findings = study("qwen3_5", Arithmetic::F32, false, |study| {
        let choice =
            |name: &str| Choice::parse(name, &study.checkpoint.config, &study.checkpoint.specs).unwrap();
        let training = Training { steps: 4, learning_rate: 1e-3 };
        study
            .choices(
                vec![choice("hf-bf16"), choice("A_log")],
                More { training: Some(training), ..More::default() },
            )
            .unwrap()
    });
    let training = findings.training.unwrap();
    assert_eq!(training.reference.len(), 4);
    assert!(training.reference[3] < training.reference[0], "it learns");
    let drift = |name: &str| training.runs.iter().find(|run| run.name == name).unwrap();
    assert_eq!((drift("f32").drift, drift("f32").protected_drift), (0.0, Some(0.0)));
    assert!(drift("A_log").drift > 0.0 && drift("A_log").drift < drift("hf-bf16").drift);
    assert!(training.runs.iter().all(|run| run.losses.len() == 4 && run.not_finite.is_none()));
    let order: Vec<&str> = training.runs.iter().map(|run| run.name.as_str()).collect();
    assert_eq!(order, findings.runs.iter().map(|run| run.name.as_str()).collect::<Vec<_>>());
}

#[test]
fn two_checkpoints_part_where_they_differ() {
    let (name, folder_of) = ("qwen3_next", tempfile::tempdir().unwrap());
    let changed = folder_of.path().join("changed");
    let mut model = Model::load(&folder(name), |_| Ok(Precision::f32())).unwrap();
    let at = model.specs.weights.iter().position(|spec| spec.name == "layers.2.mlp.gate.weight").unwrap();
    match &mut model.params.weights_mut()[at] {
        ballast_model::params::Weight::F32(values) => values[0] += 0.01,
        ballast_model::params::Weight::Bf16(_) => unreachable!("it was loaded in f32"),
    }
    model.save(&changed, false, &ballast_files::jobs::Silent).unwrap();
    study(name, Arithmetic::F64, true, |study| {
        let same = study.compare("itself", &LazyCheckpoint::open(&folder(name)).unwrap()).unwrap();
        assert_eq!((same.runs[0].first_difference.as_deref(), same.runs[0].kl.max), (None, 0.0));
        assert_eq!(same.runs[0].gradient_error, Some(0.0));
        let other = study.compare("changed", &LazyCheckpoint::open(&changed).unwrap()).unwrap();
        assert_eq!(other.runs[0].first_difference.as_deref(), Some("layers.2.mlp.router"));
        assert!(other.runs[0].kl.max > 0.0 && other.runs[0].gradient_error.unwrap() > 0.0);
        let error = study.compare("gemma", &LazyCheckpoint::open(&folder("gemma2")).unwrap()).unwrap_err();
        assert!(error.to_string().contains("describes another model"), "{error}");
    });
}

#[test]
fn tensors_of_another_framework_part_where_they_differ() {
    let (name, folder_of) = ("qwen3_5", tempfile::tempdir().unwrap());
    let model = Model::load(&folder(name), |_| Ok(Precision::f32())).unwrap();
    let mut recorder = Recorder { pattern: Some("layers.*,embed,norm,logits".into()), seen: vec![] };
    model.logits(&batch(name), Some(&mut recorder)).unwrap();
    recorder.seen.retain(|seen| !seen.site.ends_with("self_attn.logits"));
    let write = |file: &str, seen: &[ballast_model::probe::Seen]| {
        let named: Vec<Named<'_>> =
            seen.iter().map(|s| (s.site.as_str(), &s.shape[..], &s.values[..])).collect();
        write_f32(&folder_of.path().join(file), &named, &[], true).unwrap();
    };
    write("a.safetensors", &recorder.seen);
    study(name, Arithmetic::F64, false, |study| {
        let open = || Dump::open(folder_of.path(), study.checkpoint.config.vocabulary).unwrap();
        let same = study.dump("dump", open(), 1e-4).unwrap();
        assert_eq!(same.runs[0].first_difference, None);
        assert_eq!(
            same.runs[0].sites.len(),
            recorder.seen.len() - 1,
            "all but the logits, which are compared as outputs"
        );
        assert!(same.runs[0].kl.max < 1e-8);
        let off = recorder.seen.iter_mut().find(|seen| seen.site == "layers.1.linear_attn.beta").unwrap();
        off.values.iter_mut().for_each(|x| *x *= 1.01);
        write("a.safetensors", &recorder.seen);
        let other = study.dump("dump", open(), 1e-4).unwrap();
        assert_eq!(other.runs[0].first_difference.as_deref(), Some("layers.1.linear_attn.beta"));
    });
}

/// Golden files serve as dumps: transformers wrote logits and gradients by its names.
#[test]
fn transformers_own_values_agree_on_every_model() {
    for name in MODELS {
        study(name, Arithmetic::F64, true, |study| {
            let file = folder(name).join("golden.safetensors");
            // Some files have one tensor per expert, and Qwen3-Next fuses projections that we split; these
            // names are unknown to us. All others are compared.
            let is_shared = |tensor: &str| {
                !["experts.", "in_proj_qkvz.", "in_proj_ba."].iter().any(|part| tensor.contains(part))
            };
            let golden = golden(name);
            let gradients =
                golden.names().filter(|name| name.starts_with("grad.") && is_shared(name)).count();
            let dump = Dump::open(&file, study.checkpoint.config.vocabulary).unwrap();
            let findings = study.dump("golden", dump, 1e-3).unwrap();
            let run = &findings.runs[0];
            assert_eq!(run.first_difference, None, "{name}");
            let compared = run.gradients.iter().filter(|gradient| is_shared(&gradient.tensor)).count();
            assert_eq!(compared, gradients, "{name}");
            assert!(run.kl.max < 1e-6 && run.top1_agreement == 1.0, "{name}: {:?}", run.kl);
            assert!(run.gradients.iter().all(|gradient| gradient.error < 4e-4), "{name}");
        });
    }
}

#[test]
fn a_dump_of_another_input_is_refused_and_other_names_are_told() {
    let folder_of = tempfile::tempdir().unwrap();
    let (zeros, file) = (vec![0.0; 58 * 64], folder_of.path().join("a.safetensors"));
    study("qwen3_5", Arithmetic::F32, true, |study| {
        let dump = |tensors: &[Named<'_>]| {
            write_f32(&file, tensors, &[], true).unwrap();
            study.dump("dump", Dump::open(&file, 160).unwrap(), 1e-3)
        };
        let short = dump(&[("layers.0.out", &[3], &zeros[..3])]).unwrap_err().to_string();
        assert!(
            short.contains("layers.0.out has 3 elements") && short.contains("same model and input"),
            "{short}"
        );
        let gradient = dump(&[("grad.model.norm.weight", &[5], &zeros[..5])]).unwrap_err().to_string();
        assert!(gradient.contains("grad.norm.weight has 5 elements"), "{gradient}");
        // The norm of a layer is not the last norm, although its name ends the same.
        let norm: Vec<f32> = vec![1.0; 24];
        let name = "grad.model.layers.0.linear_attn.norm.weight";
        let findings = dump(&[(name, &[24], &norm), ("other", &[1], &[1.0])]).unwrap();
        let compared: Vec<&str> = findings.runs[0].gradients.iter().map(|g| g.tensor.as_str()).collect();
        assert_eq!(compared, ["layers.0.linear_attn.norm.weight"]);
        assert_eq!(
            findings.runs[0].first_difference.as_deref(),
            Some("grad.layers.0.linear_attn.norm.weight")
        );
        assert_eq!(findings.notes, ["Not compared: 1 tensor (other)."]);
        assert!(findings.runs[0].loss.is_nan() && findings.runs[0].kl.mean.is_nan(), "no logits, no figures");
    });
}

#[test]
fn a_dump_without_a_single_known_tensor_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    write_f32(&folder.path().join("a.safetensors"), &[("other", &[1], &[1.0])], &[], false).unwrap();
    study("qwen3_5", Arithmetic::F32, false, |study| {
        let dump = Dump::open(folder.path(), 160).unwrap();
        let error = study.dump("dump", dump, 1e-3).unwrap_err().to_string();
        assert!(error.contains("no tensor has the name"), "{error}");
    });
    assert!(Dump::open(&folder.path().join("nowhere"), 160).is_err());
    fs::remove_file(folder.path().join("a.safetensors")).unwrap();
    assert!(Dump::open(folder.path(), 160).err().unwrap().to_string().contains("no safetensors file"));
}

#[test]
fn a_run_can_be_stopped() {
    struct Stopped;
    impl ballast_files::jobs::Observer for Stopped {
        fn cancelled(&self) -> bool {
            true
        }
    }
    study("gemma2", Arithmetic::F32, false, |study| {
        let stopped = ballast_lab::Study { observer: &Stopped, input: study.input.clone(), ..*study };
        assert!(stopped.choices(vec![], More::default()).unwrap_err().to_string().contains("interrupted"));
    });
}
