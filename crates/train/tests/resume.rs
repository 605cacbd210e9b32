//! Save and resume: the same bits, and no partial files.

use std::fs;
use std::path::Path;

use ballast_train::state::weights_checksum;
use ballast_train::{Error, TrainConfig, Trainer};

use crate::common::{Listener, config, run};

fn pool(threads: usize) -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap()
}

#[test]
fn half_a_run_and_the_rest_with_other_threads_give_the_bits_of_a_whole_run() {
    for settings in [
        &["steps=8", "precision.preset=bf16"][..],
        &["steps=8", "precision.preset=hf-bf16", "batch.accumulation=2"],
    ] {
        let folder = tempfile::tempdir().unwrap();
        let (whole, heard, _) = pool(1).install(|| run(config(&folder.path().join("whole"), settings)));
        let halves = folder.path().join("halves");
        let first = Listener::stopping_after(4);
        pool(2).install(|| {
            let summary = Trainer::new(config(&halves, settings)).unwrap().run(&first).unwrap();
            assert!(summary.stopped && summary.step == 4);
        });
        let (second, rest) = pool(3).install(|| {
            let mut trainer = Trainer::resume(&halves, &[]).unwrap();
            let listener = Listener::default();
            trainer.run(&listener).unwrap();
            (trainer, listener)
        });
        let losses: Vec<u64> = first.losses().into_iter().chain(rest.losses()).collect();
        assert_eq!((losses.len(), &losses), (8, &heard.losses()));
        assert_eq!(weights_checksum(&second.model), weights_checksum(&whole.model));
        let values = |trainer: &Trainer| -> Vec<Vec<u32>> {
            trainer
                .optimizer
                .tensors(&trainer.model)
                .iter()
                .map(|(_, _, x)| x.iter().map(|x| x.to_bits()).collect())
                .collect()
        };
        assert!(values(&second) == values(&whole), "masters and moments");
        assert_eq!(
            second.ledger.entries.iter().map(|e| e.last).collect::<Vec<_>>(),
            whole.ledger.entries.iter().map(|e| e.last).collect::<Vec<_>>()
        );
        let model = |out: &str| fs::read(folder.path().join(out).join("model/model.safetensors")).unwrap();
        assert!(model("whole") == model("halves"), "the finished files");
        let metrics = ballast_train::metrics::read(&halves.join("metrics.jsonl")).unwrap();
        assert_eq!(
            metrics.iter().filter(|r| matches!(r, ballast_train::metrics::MetricsEntry::Step(_))).count(),
            8
        );
    }
}

#[test]
fn any_number_of_threads_gives_the_same_losses() {
    let folder = tempfile::tempdir().unwrap();
    let losses = |threads: usize| {
        let out = folder.path().join(threads.to_string());
        pool(threads).install(|| run(config(&out, &["steps=20"])).1.losses())
    };
    let one = losses(1);
    assert_eq!(one.len(), 20);
    assert_eq!(one, losses(2));
    assert_eq!(one, losses(4));
}

fn saved_run(out: &Path) -> TrainConfig {
    let config = config(out, &["steps=4", "checkpoints.every=2", "checkpoints.keep_last=5"]);
    run(config.clone());
    config
}

fn refused(out: &Path) -> String {
    Trainer::resume(out, &["steps=6".into()]).map(|_| ()).unwrap_err().to_string()
}

#[test]
fn broken_checkpoints_are_refused_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    saved_run(&out);
    let last = out.join("checkpoints/step-00000004");
    let optimizer = last.join("optimizer.safetensors");
    let bytes = fs::read(&optimizer).unwrap();
    let with = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut changed = bytes.clone();
        change(&mut changed);
        fs::write(&optimizer, changed).unwrap();
        refused(&out)
    };
    let truncated = with(&|bytes| bytes.truncate(bytes.len() / 2));
    assert!(truncated.contains("optimizer.safetensors"), "{truncated}");
    // The last eight bytes are values: one bit, then a NaN.
    let flipped = with(&|bytes| *bytes.last_mut().unwrap() ^= 1);
    assert!(flipped.contains("optimizer.safetensors") || flipped.contains("moment"), "{flipped}");
    let nan = with(&|bytes| {
        let end = bytes.len();
        bytes[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    });
    assert!(nan.contains("NaN") && nan.contains("element"), "{nan}");
    fs::write(&optimizer, &bytes).unwrap();
    let state = fs::read_to_string(last.join("state.json")).unwrap();
    fs::write(last.join("state.json"), &state[..state.len() / 2]).unwrap();
    assert!(refused(&out).contains("state.json: not the state of a run"));
    fs::write(last.join("state.json"), &state).unwrap();
    let weights = last.join("model/model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&weights, bytes).unwrap();
    let changed = refused(&out);
    assert!(changed.contains("model: the weights are not those that were saved"), "{changed}");
    fs::remove_dir_all(&last).unwrap();
    let trainer = Trainer::resume(&out, &["steps=6".into()]).unwrap();
    assert_eq!(trainer.step, 2, "the one before is whole");
}

#[test]
fn a_checkpoint_of_another_model_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (folder.path().join("a"), folder.path().join("b"));
    saved_run(&a);
    run(config(&b, &["steps=4", "model.preset=gemma"]));
    let other = Trainer::resume(&a, &["model.preset=gemma".into()]).map(|_| ()).unwrap_err().to_string();
    assert!(other.contains("it belongs to another model"), "{other}");
    let state = |out: &Path| out.join("checkpoints/step-00000004/state.json");
    fs::copy(state(&b), state(&a)).unwrap();
    let mixed = refused(&a);
    assert!(
        mixed.contains("tensors do not match config.json") && mixed.contains("self_attn.q_proj"),
        "{mixed}"
    );
    assert!(
        Trainer::resume(&folder.path().join("c"), &[])
            .map(|_| ())
            .unwrap_err()
            .to_string()
            .contains("no checkpoint")
    );
    let again = Trainer::new(config(&b, &[])).map(|_| ()).unwrap_err().to_string();
    assert!(again.contains("has checkpoints of a run"), "{again}");
}

#[test]
fn a_caller_can_tell_apart_why_a_run_does_not_start() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |settings: &[&str]| Trainer::new(config(folder.path(), settings)).err().unwrap();
    let first = Trainer::new(config(folder.path(), &[])).unwrap();
    assert!(matches!(refused(&[]), Error::Busy { out } if out == folder.path()));
    drop(first);
    Trainer::new(config(folder.path(), &[])).unwrap().run(&Listener::default()).unwrap();
    assert!(matches!(refused(&[]), Error::HasRun { out } if out == folder.path()));
    let ended = Trainer::resume(folder.path(), &["steps=1".into()]).err().unwrap();
    assert!(matches!(ended, Error::Config { key, .. } if key == "steps"));
    fs::remove_dir_all(folder.path().join("checkpoints")).unwrap();
    assert!(matches!(refused(&[]), Error::Exists { path } if path == folder.path().join("model")));
    let key = TrainConfig::embedded(&["batch.group=2".into()]).unwrap_err();
    assert!(matches!(key, Error::Config { key, .. } if key == "batch.group"));
    let text = TrainConfig::embedded(&["batch.groups".into()]).unwrap_err();
    assert!(matches!(text, Error::Syntax(_)));
}

#[test]
fn two_runs_never_write_into_one_folder() {
    let folder = tempfile::tempdir().unwrap();
    let _first = Trainer::new(config(folder.path(), &[])).unwrap();
    let second = Trainer::new(config(folder.path(), &[])).map(|_| ()).unwrap_err().to_string();
    assert!(second.contains("another run is writing there"), "{second}");
}

#[test]
fn the_newest_the_best_and_every_so_many_checkpoints_stay() {
    let folder = tempfile::tempdir().unwrap();
    let settings = [
        "steps=7",
        "checkpoints.every=1",
        "checkpoints.keep_last=2",
        "checkpoints.keep_every=3",
        "evaluation.every=1",
    ];
    let (trainer, ..) = run(config(folder.path(), &settings));
    assert_eq!(trainer.store.steps(), [3, 6, 7]);
    let leftovers: Vec<String> = fs::read_dir(folder.path().join("checkpoints"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .filter(|name| name.starts_with('.'))
        .collect();
    assert!(leftovers.is_empty(), "{leftovers:?}");
}

/// A checkpoint of format version 1, whose checksums were made with another hash.
#[test]
fn a_checkpoint_of_version_1_is_resumed_and_says_that_it_was_not_compared() {
    let folder = tempfile::tempdir().unwrap();
    // The residual stream as version 1 has it.
    let settings = ["steps=4", "precision.sites.residual=bf16"];
    let (whole, ..) = run(config(&folder.path().join("whole"), &settings));
    let out = folder.path().join("stopped");
    Trainer::new(config(&out, &settings)).unwrap().run(&Listener::stopping_after(2)).unwrap();
    let path = out.join("checkpoints/step-00000002/state.json");
    let mut state: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let write = |state: &serde_json::Value| std::fs::write(&path, state.to_string()).unwrap();
    assert_eq!(state["version"], 2);
    state["version"] = 3.into();
    write(&state);
    let error = Trainer::resume(&out, &[]).err().unwrap().to_string();
    assert!(error.contains("format version 3 cannot be read, this program reads 1 to 2"), "{error}");
    state["version"] = 1.into();
    for key in ["parameters", "weights_checksum", "optimizer_checksum"] {
        state[key] = "0123456789abcdef".into();
    }
    state["tokenizer"] = 7.into();
    for entry in state["ledger"]["entries"].as_array_mut().unwrap() {
        (entry["first"], entry["last"]) = (1.into(), 2.into());
    }
    write(&state);
    let mut second = Trainer::resume(&out, &[]).unwrap();
    let listener = Listener::default();
    second.run(&listener).unwrap();
    let told = listener.events();
    assert!(
        told.iter().any(|(what, text)| what == "resume" && text.contains("format version 1")),
        "{told:?}"
    );
    assert_eq!(weights_checksum(&second.model), weights_checksum(&whole.model));
    let sums =
        |trainer: &Trainer| -> Vec<_> { trainer.ledger.entries.iter().map(|e| (e.first, e.last)).collect() };
    assert_eq!(sums(&second), sums(&whole));
}
