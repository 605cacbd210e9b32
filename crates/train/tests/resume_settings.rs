//! Settings of a resumed run: applied from the next step on, or refused. None is recorded and ignored.

use std::path::Path;

use ballast_train::config::{KEYS, OnResume};
use ballast_train::metrics::MetricsEntry;
use ballast_train::{TrainConfig, Trainer};

use crate::common::{Listener, config, on_files, run};

enum Expected {
    /// It applies.
    Applies,
    /// It is refused with these words.
    Refused(&'static str),
}
use Expected::{Applies, Refused};

fn quoted(path: &Path) -> String {
    format!("{:?}", path.display().to_string())
}

/// A run that was stopped after two steps.
fn stopped(config: TrainConfig) -> std::path::PathBuf {
    let out = config.out.clone();
    let summary = Trainer::new(config).unwrap().run(&Listener::stopping_after(2)).unwrap();
    assert!(summary.stopped && summary.save_failure.is_none());
    out
}

fn value_of(config: &TrainConfig, key: &str) -> Option<toml::Value> {
    let table: toml::Table = config.to_toml().unwrap().parse().unwrap();
    key.split('.').try_fold(toml::Value::Table(table), |value, part| value.get(part).cloned())
}

#[test]
fn every_key_applies_or_is_refused_when_a_run_is_resumed() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let lines = "{\"text\": \"some words to learn\"}\n{\"text\": \"and some more of them\"}\n".repeat(4);
    let other = lines.replace("words", "sword");
    let task = stopped(config(&path("task"), &["steps=4"]));
    std::fs::write(path("held-out.jsonl"), &lines).unwrap();
    let validation = format!("data.validation={}", quoted(&path("held-out.jsonl")));
    let files = stopped(on_files(folder.path(), "files", &[("a.jsonl", &lines)], &[&validation]));
    let (base, ..) = run(config(&path("base"), &["steps=1", "precision.preset=f32"]));
    drop(base);
    let checkpoint = format!("model.checkpoint={}", quoted(&path("base/model")));
    let lora = ["lora.rank=2", "precision.preset=f32", "steps=4", checkpoint.as_str()];
    let lora = stopped(config(&path("lora"), &lora));
    // Another tokenizer, other data of the same size, other base weights; and copies of what there was.
    std::fs::create_dir(path("other-tokenizer")).unwrap();
    let json = ballast_train::task::tokenizer_json();
    std::fs::write(path("other-tokenizer/tokenizer.json"), format!("{json} ")).unwrap();
    std::fs::write(
        path("other-tokenizer/tokenizer_config.json"),
        ballast_train::task::tokenizer_config_json(),
    )
    .unwrap();
    std::fs::create_dir(path("same-tokenizer")).unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(path("tokenizer").join(name), path("same-tokenizer").join(name)).unwrap();
    }
    std::fs::write(path("other.jsonl"), &other).unwrap();
    std::fs::write(path("copy.jsonl"), &lines).unwrap();
    run(config(&path("other-base"), &["steps=2", "precision.preset=f32"]));
    let mut architecture: serde_json::Value = serde_json::from_str(
        &std::fs::read_to_string(files.join("checkpoints/step-00000002/model/config.json")).unwrap(),
    )
    .unwrap();
    architecture["rms_norm_eps"] = serde_json::json!(1e-3);
    std::fs::write(path("config.json"), architecture.to_string()).unwrap();
    let data_files = |name: &str| format!("[{{ path = {} }}]", quoted(&path(name)));

    let cases: Vec<(&str, &Path, String, Expected)> = vec![
        ("out", &task, quoted(&path("elsewhere")), Refused("`out` cannot change")),
        ("seed", &task, "2".into(), Refused("`seed` cannot change from 1 to 2")),
        ("steps", &task, "6".into(), Applies),
        ("steps", &task, "1".into(), Refused("`steps` is 1, and the run has taken 2 already")),
        ("model.preset", &task, "gemma".into(), Refused("belongs to another model")),
        ("model.config", &files, quoted(&path("config.json")), Refused("belongs to another model")),
        (
            "model.checkpoint",
            &lora,
            quoted(&path("other-base/model")),
            Refused("the weights are not those that were saved"),
        ),
        ("model.tokenizer", &files, quoted(&path("other-tokenizer")), Refused("another tokenizer")),
        ("model.tokenizer", &files, quoted(&path("same-tokenizer")), Applies),
        ("model.time_steps", &task, "drawn".into(), Refused("`model.time_steps` cannot change")),
        ("model.freeze", &task, "[\"*mlp*\"]".into(), Refused("other trained parameters")),
        ("lora.rank", &lora, "3".into(), Refused("other trained parameters")),
        ("lora.alpha", &lora, "5.0".into(), Refused("`lora.alpha` cannot change from 32.0 to 5.0")),
        ("lora.targets", &lora, "[\"q_proj\"]".into(), Refused("other trained parameters")),
        ("precision.preset", &task, "f32".into(), Refused("`precision.preset` cannot change")),
        ("precision.sites", &task, "{ logits = \"f16\" }".into(), Applies),
        ("precision.recompute", &task, "full".into(), Applies),
        ("data.task", &task, "chess".into(), Refused("`data.task` cannot change")),
        ("data.files", &files, data_files("other.jsonl"), Refused("its content has changed")),
        ("data.files", &files, data_files("copy.jsonl"), Applies),
        ("data.validation", &files, quoted(&path("other.jsonl")), Refused("its content has changed")),
        ("data.validation", &files, quoted(&path("copy.jsonl")), Applies),
        ("data.validation", &task, quoted(&path("copy.jsonl")), Refused("`data.validation` cannot change")),
        (
            "data.validation_fraction",
            &task,
            "0.5".into(),
            Refused("`data.validation_fraction` cannot change"),
        ),
        ("data.sequence_length", &task, "32".into(), Applies),
        ("data.packing", &task, "padded".into(), Refused("`data.packing` cannot change")),
        ("data.train_roles", &task, "[\"user\"]".into(), Refused("`data.train_roles` cannot change")),
        ("data.shuffle", &task, "false".into(), Refused("`data.shuffle` cannot change")),
        ("data.add_eos", &task, "false".into(), Refused("`data.add_eos` cannot change")),
        (
            "data.document_separator",
            &task,
            "x".into(),
            Refused("`data.document_separator` cannot change from nothing"),
        ),
        ("batch.sequences", &task, "3".into(), Applies),
        ("batch.accumulation", &task, "2".into(), Applies),
        ("batch.groups", &task, "2".into(), Refused("must be a multiple of `batch.groups` 2, got 1")),
        ("cluster.shard", &task, "optimizer".into(), Applies),
        ("cluster.context", &task, "2".into(), Refused("`cluster.context` cannot change from 1 to 2")),
        ("cluster.window", &task, "0".into(), Applies),
        ("cluster.timeout", &task, "60".into(), Applies),
        ("optimizer.learning_rate", &task, "1e-5".into(), Applies),
        ("optimizer.beta1", &task, "0.5".into(), Applies),
        ("optimizer.beta2", &task, "0.5".into(), Applies),
        ("optimizer.eps", &task, "1e-6".into(), Applies),
        ("optimizer.weight_decay", &task, "0.5".into(), Applies),
        ("optimizer.clip", &task, "0.5".into(), Applies),
        ("optimizer.moments", &task, "bf16".into(), Refused("the optimizer state was saved in that type")),
        ("optimizer.kind", &task, "muon".into(), Refused("`optimizer.kind` cannot change")),
        ("optimizer.muon.lr_ratio", &task, "0.5".into(), Applies),
        ("optimizer.muon.adjust_lr", &task, "original".into(), Applies),
        ("optimizer.muon.momentum", &task, "0.5".into(), Applies),
        ("optimizer.muon.nesterov", &task, "false".into(), Applies),
        ("optimizer.muon.weight_decay", &task, "0.5".into(), Applies),
        ("optimizer.muon.eps", &task, "1e-6".into(), Applies),
        ("optimizer.muon.ns_steps", &task, "3".into(), Applies),
        ("optimizer.muon.ns_coefficients", &task, "[1.5, -0.5, 0.0]".into(), Applies),
        ("optimizer.masters", &task, "false".into(), Refused("`optimizer.masters` cannot change")),
        ("schedule.kind", &task, "linear".into(), Applies),
        ("schedule.warmup", &task, "3".into(), Applies),
        ("schedule.floor", &task, "0.5".into(), Applies),
        ("loss.z_loss", &task, "0.5".into(), Applies),
        ("loss.label_smoothing", &task, "0.5".into(), Applies),
        ("loss.balance", &task, "0.5".into(), Applies),
        ("loss.indexer_scale", &task, "0.5".into(), Applies),
        ("loss.indexer_stage", &task, "dense".into(), Applies),
        ("evaluation.every", &task, "3".into(), Applies),
        ("evaluation.batches", &task, "3".into(), Applies),
        ("samples.every", &task, "3".into(), Applies),
        ("samples.count", &task, "1".into(), Applies),
        ("samples.tokens", &task, "3".into(), Applies),
        ("checkpoints.every", &task, "3".into(), Applies),
        ("checkpoints.keep_last", &task, "3".into(), Applies),
        ("checkpoints.keep_best", &task, "true".into(), Applies),
        ("checkpoints.keep_every", &task, "3".into(), Applies),
        ("ledger.every", &task, "3".into(), Applies),
        ("sentinel.on_fault", &task, "skip".into(), Applies),
        ("sentinel.fault_limit", &task, "3".into(), Applies),
        ("sentinel.spike_sigma", &task, "3.0".into(), Applies),
        ("sentinel.on_spike", &task, "skip".into(), Applies),
        ("sentinel.spike_limit", &task, "3".into(), Applies),
        ("tensorboard", &task, "true".into(), Applies),
    ];
    for key in KEYS {
        assert!(cases.iter().any(|(case, ..)| *case == key.name), "{} is not tested", key.name);
    }
    let saved = |out: &Path| (out.to_path_buf(), Trainer::resume(out, &[]).unwrap().config.clone());
    let saved: std::collections::BTreeMap<_, _> = [saved(&task), saved(&files), saved(&lora)].into();
    for (key, out, value, expected) in cases {
        let before = value_of(&saved[out], key);
        let resumed = Trainer::resume(out, &[format!("{key}={value}")]);
        match (expected, resumed) {
            (Applies, Ok(trainer)) => {
                assert_ne!(value_of(&trainer.config, key), before, "{key}");
                let rule = KEYS.iter().find(|known| known.name == key).unwrap().on_resume;
                assert!(!matches!(rule, OnResume::Refused(_)), "{key}");
            }
            (Refused(words), Err(error)) => assert!(error.to_string().contains(words), "{key}: {error}"),
            (Applies, Err(error)) => panic!("{key}={value} was refused: {error}"),
            (Refused(_), Ok(_)) => panic!("{key}={value} was accepted"),
        }
    }
    // The same value again is no change.
    Trainer::resume(&task, &["seed=1".into(), "data.packing=packed".into()]).unwrap();
}

#[test]
fn the_best_loss_is_forgotten_where_losses_cannot_be_compared() {
    let folder = tempfile::tempdir().unwrap();
    stopped(config(folder.path(), &["steps=4", "evaluation.every=1"]));
    assert!(Trainer::resume(folder.path(), &[]).unwrap().best.is_some());
    assert!(Trainer::resume(folder.path(), &["steps=9".into()]).unwrap().best.is_some());
    assert!(Trainer::resume(folder.path(), &["data.sequence_length=32".into()]).unwrap().best.is_none());
}

fn learning_rates(listener: &Listener) -> Vec<f64> {
    let rate = |record: &MetricsEntry| match record {
        MetricsEntry::Step(step) => Some(step.learning_rate),
        _ => None,
    };
    listener.records.lock().unwrap().borrow().iter().filter_map(rate).collect()
}

#[test]
fn more_or_fewer_steps_do_not_change_the_warm_up() {
    let folder = tempfile::tempdir().unwrap();
    let settings = [
        "optimizer.learning_rate=1.0e-3",
        "schedule.kind=constant",
        "samples.count=0",
        "evaluation.batches=0",
    ];
    let rates = |name: &str, first: &[&str], then: u64, stop: usize| {
        let out = folder.path().join(name);
        let listener = Listener { stop_after: Some(stop), ..Listener::default() };
        Trainer::new(config(&out, &[&settings[..], first].concat())).unwrap().run(&listener).unwrap();
        let rest = Listener::default();
        Trainer::resume(&out, &[format!("steps={then}")]).unwrap().run(&rest).unwrap();
        [learning_rates(&listener), learning_rates(&rest)].concat()
    };
    // A warm-up that is longer than the run is all of it, and over when the run is: it does not begin again.
    let longer = rates("longer", &["steps=4", "schedule.warmup=20"], 6, 9);
    assert_eq!(longer, [0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3]);
    // A run that is made shorter while it warms up does not climb faster.
    let shorter = rates("shorter", &["steps=20", "schedule.warmup=10"], 4, 2);
    assert_eq!(shorter, [0.1e-3, 0.2e-3, 1e-3 * 3.0 / 10.0, 0.4e-3]);
}
