//! Injected faults are found at the right site before an update, and handled as configured.

use ballast_checkpoint::tensor_file::TensorFile;
use ballast_model::Site;
use ballast_model::params::Weight;
use ballast_train::state::weights_checksum;
use ballast_train::{Attempt, Trainer};

use crate::common::{self, Listener, config, run};

/// Sets an element of a weight of the model.
fn poison(trainer: &mut Trainer, name: &str, element: usize, value: f32) {
    let at = trainer.model.specs.weights.iter().position(|spec| spec.name == name).unwrap();
    match &mut trainer.model.params.weights_mut()[at] {
        Weight::F32(values) => values[element] = value,
        Weight::Bf16(values) => values[element] = half::bf16::from_f32(value),
    }
}

/// The error of a step that must not be taken; parameters and optimizer stay as they are.
fn fault(trainer: &mut Trainer) -> String {
    let before = (weights_checksum(&trainer.model), trainer.optimizer.updates, trainer.step);
    let mut events = Vec::new();
    let error = trainer.attempt(&mut |event| events.push(event)).unwrap_err().to_string();
    assert_eq!((weights_checksum(&trainer.model), trainer.optimizer.updates, trainer.step), before);
    assert!(events.iter().any(|event| event.what == "fault"));
    error
}

#[test]
fn an_infinite_weight_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let mut trainer = Trainer::new(config(folder.path(), &[])).unwrap();
    poison(&mut trainer, "layers.2.mlp.up_proj.weight", 5, f32::INFINITY);
    let error = fault(&mut trainer);
    assert!(error.contains("param.layers.2.mlp.up_proj.weight is the first site"), "{error}");
    assert!(
        error.contains("1 of ") && error.contains("0 NaN, 1 infinite") && error.contains("BF16"),
        "{error}"
    );
    assert!(error.contains("forward") && error.contains("layer 2"), "{error}");
    let saved = TensorFile::open(&folder.path().join("faults/step-00000001.safetensors")).unwrap();
    let ids = saved.integers("input_ids").unwrap();
    assert_eq!(ids.shape, [1, ids.values.len()]);
    assert_eq!(saved.integers("cu_seqlens").unwrap().values.last(), Some(&(ids.values.len() as i64)));
    assert!(saved.integers("labels").unwrap().values.iter().any(|label| *label >= 0));
}

#[test]
fn a_nan_in_the_embedding_of_a_token_is_found_with_its_document() {
    let folder = tempfile::tempdir().unwrap();
    let settings = ["model.preset=hybrid-moe", "precision.preset=f32"];
    let mut trainer = Trainer::new(config(folder.path(), &settings)).unwrap();
    poison(&mut trainer, "embed_tokens.weight", b'?' as usize * 96, f32::NAN);
    let error = fault(&mut trainer);
    assert!(error.contains(": embed is the first site") && error.contains("NaN"), "{error}");
    assert!(error.contains("document recall, line "), "{error}");
}

/// Makes queries so large that their logits overflow f16 but not f32.
fn with_large_logits(mut trainer: Trainer) -> Trainer {
    for (spec, weight) in trainer.model.specs.weights.clone().iter().zip(trainer.model.params.weights_mut()) {
        if let (true, Weight::F32(values)) = (spec.name.ends_with("q_norm.weight"), weight) {
            values.fill(1e5);
        }
    }
    trainer
}

#[test]
fn logits_that_overflow_in_f16_stop_the_run_or_are_raised() {
    let folder = tempfile::tempdir().unwrap();
    let start = |name: &str, on_fault: &str| {
        let on_fault = format!("sentinel.on_fault={on_fault}");
        let settings = [
            "model.preset=gemma",
            "precision.preset=f32",
            "precision.sites.logits=f16",
            "steps=3",
            "optimizer.learning_rate=1e-5",
            &on_fault,
        ];
        with_large_logits(Trainer::new(config(&folder.path().join(name), &settings)).unwrap())
    };
    let error = fault(&mut start("abort", "abort"));
    assert!(error.contains("layers.0.self_attn.logits is the first site"), "{error}");
    assert!(error.contains("before it layers.0.self_attn."), "ranges of its inputs: {error}");
    let mut trainer = start("escalate", "escalate");
    let listener = Listener::default();
    let summary = trainer.run(&listener).unwrap();
    assert_eq!((summary.step, trainer.ledger.escalations.as_slice()), (3, &[(1, "logits".to_string())][..]));
    assert!(
        listener.events().iter().any(|(what, text)| what == "escalate" && text.contains("logits in f32"))
    );
    assert_eq!(trainer.model.precision().site(Site::Logits), ballast_kernels::Rounding::F32);
    // An escalated site stays in f32 after a resume.
    drop(trainer);
    let resumed = Trainer::resume(&folder.path().join("escalate"), &["steps=4".into()]).unwrap();
    assert_eq!(resumed.model.precision().site(Site::Logits), ballast_kernels::Rounding::F32);
}

#[test]
fn a_fault_that_no_lowered_site_explains_ends_even_with_escalate() {
    let folder = tempfile::tempdir().unwrap();
    let mut trainer = Trainer::new(config(folder.path(), &["sentinel.on_fault=escalate"])).unwrap();
    poison(&mut trainer, "norm.weight", 0, f32::NAN);
    let error = fault(&mut trainer);
    assert!(error.contains("No site in lower precision leads there"), "{error}");
}

/// A run in which only some batches are faulty: those with a certain bracket.
fn with_some_faulty_batches(out: &std::path::Path, on_fault: &str) -> Trainer {
    let on_fault = format!("sentinel.on_fault={on_fault}");
    let settings = [
        "model.preset=hybrid-moe",
        "precision.preset=f32",
        "data.sequence_length=32",
        "batch.sequences=1",
        "steps=12",
        "checkpoints.every=1",
        "evaluation.batches=0",
        "samples.count=0",
        "sentinel.fault_limit=30",
        &on_fault,
    ];
    let mut trainer = Trainer::new(config(out, &settings)).unwrap();
    poison(&mut trainer, "embed_tokens.weight", b'{' as usize * 96, f32::NAN);
    trainer
}

#[test]
fn faulty_batches_are_skipped() {
    let folder = tempfile::tempdir().unwrap();
    let mut trainer = with_some_faulty_batches(folder.path(), "skip");
    let summary = trainer.run(&Listener::default()).unwrap();
    assert_eq!(summary.step, 12);
    assert!(trainer.sentinel.skipped > 0 && trainer.sentinel.skipped == trainer.sentinel.faults);
}

#[test]
fn a_rollback_goes_to_the_last_checkpoint_and_leaves_the_batch_out() {
    let folder = tempfile::tempdir().unwrap();
    let (skipped, back) = (folder.path().join("skip"), folder.path().join("back"));
    let mut expected = with_some_faulty_batches(&skipped, "skip");
    expected.run(&Listener::default()).unwrap();
    let mut trainer = with_some_faulty_batches(&back, "rollback");
    // There is nothing to go back to before the first step.
    while trainer.attempt(&mut |_| {}).is_err() {}
    let listener = Listener::default();
    let summary = trainer.run(&listener).unwrap();
    assert_eq!(summary.step, 12);
    assert!(listener.events().iter().any(|(what, _)| what == "rollback"));
    assert_eq!(
        weights_checksum(&trainer.model),
        weights_checksum(&expected.model),
        "the same batches were left out"
    );
}

#[test]
fn more_faults_than_the_limit_end_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let mut trainer =
        Trainer::new(config(folder.path(), &["sentinel.on_fault=skip", "sentinel.fault_limit=2"])).unwrap();
    poison(&mut trainer, "norm.weight", 0, f32::NAN);
    let error = trainer.run(&Listener::default()).unwrap_err().to_string();
    assert!(error.contains("Fault limit (2) exceeded"), "{error}");
    assert!(folder.path().join("report.html").exists(), "a report of the run that failed");
}

#[test]
fn a_decay_rate_that_is_none_is_refused_at_load_with_the_fix() {
    let folder = tempfile::tempdir().unwrap();
    let (mut trainer, ..) = run(config(&folder.path().join("a"), &["steps=1"]));
    let at = trainer.model.specs.protected.iter().position(|spec| spec.name.ends_with("A_log")).unwrap();
    trainer.model.params.protected_mut()[at].values_mut()[1] = f32::NEG_INFINITY;
    let broken = folder.path().join("broken");
    trainer.model.save(&broken, false, &ballast_files::jobs::Silent).unwrap();
    let checkpoint = format!("model.checkpoint={:?}", broken.display().to_string());
    let tokenizer = format!("model.tokenizer={:?}", folder.path().join("a/model").display().to_string());
    let error = Trainer::new(config(&folder.path().join("b"), &[&checkpoint, &tokenizer]))
        .map(|_| ())
        .unwrap_err()
        .to_string();
    assert!(error.contains("A_log is -inf at element 1") && error.contains("ballast repair"), "{error}");
}

#[test]
fn a_protected_tensor_that_somebody_else_changed_stops_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let mut trainer = Trainer::new(config(folder.path(), &[])).unwrap();
    assert!(matches!(trainer.attempt(&mut |_| {}).unwrap(), Attempt::Taken(_)));
    let values = trainer.model.params.protected_mut()[0].values_mut();
    ballast_kernels::Rounding::Bf16.round_all(values);
    let error = trainer.attempt(&mut |_| {}).map(|_| ()).unwrap_err().to_string();
    assert!(
        error.contains("protected-tensor check failed after step") && error.contains("expected"),
        "{error}"
    );
}

#[test]
fn a_moment_that_is_not_finite_is_never_saved() {
    let folder = tempfile::tempdir().unwrap();
    let mut trainer = Trainer::new(config(folder.path(), &["steps=2", "checkpoints.every=1"])).unwrap();
    common::set_state(&mut trainer.optimizer.slots[3].state[0], 7, f32::NAN);
    let name = trainer.optimizer.slots[3].name.clone();
    let error = trainer.run(&Listener::default()).unwrap_err().to_string();
    assert!(
        error.contains("first moment") && error.contains(&name) && error.contains("element 7"),
        "{error}"
    );
    assert!(trainer.store.steps().is_empty());
}
