//! Checkpoints are lost never, rewritten only when they would differ, and what a run says about them is true.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use ballast_model::params::Weight;
use ballast_train::metrics::{MetricsEntry, read};
use ballast_train::{Error, TrainConfig, Trainer};

use crate::common::{Listener, config, run};

/// Every file below a folder: which file it is, and its content.
fn files(folder: &Path) -> BTreeMap<PathBuf, (u64, Vec<u8>)> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path));
        } else {
            found.insert(path.clone(), (fs::metadata(&path).unwrap().ino(), fs::read(&path).unwrap()));
        }
    }
    found
}

fn stopped_after(config: TrainConfig, steps: usize) -> ballast_train::Summary {
    Trainer::new(config).unwrap().run(&Listener::stopping_after(steps)).unwrap()
}

#[test]
fn a_run_that_is_stopped_right_after_it_was_resumed_rewrites_no_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    stopped_after(config(&out, &["steps=8"]), 3);
    let before = files(&out.join("checkpoints"));
    // Under another name of the same folder, too.
    for out in [out.clone(), folder.path().join(".").join("run")] {
        let mut trainer = Trainer::resume(&out, &[]).unwrap();
        let summary = trainer.run(&Listener::stopping_after(0)).unwrap();
        assert!(summary.stopped && summary.save_failure.is_none());
        assert_eq!(summary.checkpoint.unwrap().0, 3);
    }
    assert!(files(&out.join("checkpoints")) == before, "a file was replaced");
}

#[test]
fn a_checkpoint_that_would_differ_is_replaced_by_a_whole_one() {
    let folder = tempfile::tempdir().unwrap();
    stopped_after(config(folder.path(), &["steps=8"]), 3);
    let mut trainer = Trainer::resume(folder.path(), &["steps=9".into()]).unwrap();
    trainer.run(&Listener::stopping_after(0)).unwrap();
    drop(trainer);
    let names: Vec<String> = fs::read_dir(folder.path().join("checkpoints"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    assert_eq!(names, ["step-00000003"]);
    assert_eq!(Trainer::resume(folder.path(), &[]).unwrap().config.steps, 9);
}

#[test]
fn a_checkpoint_whose_replacement_cannot_be_written_stays() {
    let folder = tempfile::tempdir().unwrap();
    stopped_after(config(folder.path(), &["steps=8"]), 3);
    let checkpoint = folder.path().join("checkpoints/step-00000003");
    let before = files(&checkpoint);
    let mut trainer = Trainer::resume(folder.path(), &["steps=9".into()]).unwrap();
    // In the way of the new one.
    fs::write(folder.path().join("checkpoints/.new-00000003"), "x").unwrap();
    let summary = trainer.run(&Listener::stopping_after(0)).unwrap();
    assert!(summary.save_failure.is_some());
    assert!(files(&checkpoint) == before, "the only checkpoint was touched");
    drop(trainer);
    assert_eq!(Trainer::resume(folder.path(), &[]).unwrap().step, 3);
}

#[test]
fn a_stopped_run_names_the_checkpoint_that_exists_or_none() {
    let folder = tempfile::tempdir().unwrap();
    for (name, settings, kept) in
        [("some", &["checkpoints.every=2", "steps=9"][..], Some(4)), ("none", &["steps=9"], None)]
    {
        let out = folder.path().join(name);
        let mut trainer = Trainer::new(config(&out, settings)).unwrap();
        let listener = Listener::stopping_after(5);
        // In the way of the last one.
        fs::create_dir_all(out.join("checkpoints")).unwrap();
        fs::write(out.join("checkpoints/step-00000005"), "x").unwrap();
        fs::write(out.join("checkpoints/.new-00000005"), "x").unwrap();
        let summary = trainer.run(&listener).unwrap();
        assert!(summary.stopped && summary.step == 5);
        assert!(summary.save_failure.is_some(), "{name}");
        assert_eq!(summary.checkpoint.map(|(step, _)| step), kept, "{name}");
        assert!(summary.model.is_none_or(|model| model.join("config.json").is_file()), "{name}");
        assert!(
            listener.events().iter().any(|(what, text)| what == "save failed" && text.contains("step 5"))
        );
    }
}

#[test]
fn a_stopped_run_of_adapters_names_their_folder() {
    let folder = tempfile::tempdir().unwrap();
    run(config(&folder.path().join("base"), &["steps=1", "precision.preset=f32"]));
    let base = format!("model.checkpoint={:?}", folder.path().join("base/model").display().to_string());
    let settings = [&base, "lora.rank=2", "precision.preset=f32", "steps=5"];
    let summary = stopped_after(config(&folder.path().join("run"), &settings), 2);
    let model = summary.model.unwrap();
    assert!(model.join("adapter_config.json").is_file(), "{}", model.display());
}

#[test]
fn a_report_that_cannot_be_written_keeps_nothing_else_from_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    fs::create_dir_all(out.join("report.html")).unwrap();
    let (_, listener, summary) = run(config(&out, &["steps=2"]));
    assert!(summary.report.is_none());
    assert!(summary.model.unwrap().join("model.safetensors").is_file());
    assert!(
        listener.events().iter().any(|(what, text)| what == "report failed" && text.contains("report.html"))
    );
}

#[test]
fn the_fault_is_what_a_run_ends_with_though_neither_report_nor_batch_can_be_written() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    fs::create_dir_all(out.join("report.html")).unwrap();
    fs::write(out.join("faults"), "in the way").unwrap();
    let mut trainer = Trainer::new(config(&out, &["precision.preset=f32"])).unwrap();
    let Weight::F32(values) = &mut trainer.model.params.weights_mut()[0] else { panic!() };
    values.fill(f32::NAN);
    let error = trainer.run(&Listener::default()).unwrap_err();
    assert!(matches!(error, Error::Diverged(_)), "{error}");
    let text = error.to_string();
    assert!(text.contains("is the first site") && text.contains("could not be saved"), "{text}");
}

#[test]
fn after_a_rollback_metrics_and_samples_have_every_step_once() {
    let folder = tempfile::tempdir().unwrap();
    let settings = [
        "model.preset=hybrid-moe",
        "precision.preset=f32",
        "data.sequence_length=32",
        "batch.sequences=1",
        "steps=24",
        "checkpoints.every=6",
        "evaluation.every=1",
        "samples.count=1",
        "samples.every=1",
        "sentinel.fault_limit=30",
        "sentinel.on_fault=rollback",
        "optimizer.learning_rate=1e-4",
        "tensorboard=true",
    ];
    let mut trainer = Trainer::new(config(folder.path(), &settings)).unwrap();
    // Only some batches are faulty: those with a certain bracket.
    let at = trainer.model.specs.weights.iter().position(|spec| spec.name == "embed_tokens.weight").unwrap();
    let Weight::F32(values) = &mut trainer.model.params.weights_mut()[at] else { panic!() };
    values[b'{' as usize * 96] = f32::NAN;
    // There is nothing to go back to before the first checkpoint.
    for _ in 0..20 {
        if trainer.step < 3 {
            let _ = trainer.attempt(&mut |_| {});
        }
    }
    trainer.run(&Listener::stopping_after(0)).unwrap();
    assert_eq!(trainer.store.steps(), [3]);
    let listener = Listener::default();
    let summary = trainer.run(&listener).unwrap();
    let back: Vec<_> = listener.events().into_iter().filter(|(what, _)| what == "rollback").collect();
    assert!(!back.is_empty());
    let steps = |records: &[MetricsEntry]| -> Vec<u64> {
        records
            .iter()
            .filter(|record| matches!(record, MetricsEntry::Step(_)))
            .map(MetricsEntry::step)
            .collect()
    };
    let told = steps(&listener.records.lock().unwrap().borrow());
    assert!(told.len() > 21, "some steps were taken twice: {told:?}");
    let records = read(&folder.path().join("metrics.jsonl")).unwrap();
    let counted = steps(&records);
    assert!(counted.is_sorted_by(|a, b| a < b) && counted.last() == Some(&24), "{counted:?}");
    let measured: Vec<u64> = records
        .iter()
        .filter(|record| matches!(record, MetricsEntry::Evaluation(_)))
        .map(MetricsEntry::step)
        .collect();
    assert!(measured.is_sorted_by(|a, b| a < b), "{measured:?}");
    let samples: Vec<u64> = summary.samples.iter().map(|sample| sample.step).collect();
    assert!(samples.is_sorted_by(|a, b| a < b), "{samples:?}");
    // The losses that count are those of the second time.
    let last_told = |step: u64| -> Option<u64> {
        let records = listener.records.lock().unwrap();
        let loss = |record: &MetricsEntry| match record {
            MetricsEntry::Step(found) if found.step == step => Some(found.loss.to_bits()),
            _ => None,
        };
        records.borrow().iter().rev().find_map(loss)
    };
    for record in &records {
        if let MetricsEntry::Step(step) = record {
            assert!(
                last_told(step.step).is_none_or(|loss| loss == step.loss.to_bits()),
                "step {}",
                step.step
            );
        }
    }
}
