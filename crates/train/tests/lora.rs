//! Adapters: nothing else changes, they resume with the same bits, and merging gives the same logits.

use ballast_model::{Batch, Model, Precision};
use ballast_train::{TrainConfig, Trainer};

use crate::common::{Listener, config, run};

fn adapted(folder: &std::path::Path, name: &str, extra: &[&str]) -> TrainConfig {
    let base = folder.join("base");
    if !base.exists() {
        run(config(&base, &["steps=3", "precision.preset=f32"]));
    }
    let checkpoint = format!("model.checkpoint={:?}", base.join("model").display().to_string());
    let mut settings = vec![
        "steps=6",
        "precision.preset=f32",
        "lora.rank=4",
        "lora.alpha=8",
        "optimizer.learning_rate=1e-2",
        checkpoint.as_str(),
    ];
    settings.extend(extra);
    let out = folder.join(name);
    let mut small: Vec<String> = vec![
        format!("out={:?}", out.display().to_string()),
        "data.task=recall".into(),
        "data.sequence_length=64".into(),
        "batch.accumulation=1".into(),
        "evaluation.batches=1".into(),
        "samples.count=1".into(),
        "checkpoints.every=0".into(),
    ];
    small.extend(settings.iter().map(|s| s.to_string()));
    TrainConfig::from_table(Default::default(), &small, None).unwrap()
}

#[test]
fn only_adapters_change_and_merged_they_are_what_they_were_applied() {
    let folder = tempfile::tempdir().unwrap();
    let (trainer, listener, summary) = run(adapted(folder.path(), "run", &[]));
    assert_eq!(listener.losses().len(), 6);
    let base = Model::load(&folder.path().join("base/model"), |_| Ok(Precision::f32())).unwrap();
    assert!(base.params.weights() == trainer.model.params.weights(), "weights stay");
    let bits = |model: &Model| -> Vec<Vec<u32>> {
        model.params.protected().iter().map(|p| p.values().iter().map(|x| x.to_bits()).collect()).collect()
    };
    assert_eq!(bits(&base), bits(&trainer.model), "protected tensors stay");
    let adapters: Vec<_> = trainer.model.params.adapters().iter().flatten().collect();
    assert!(
        adapters.len() > 8 && adapters.iter().all(|low| low.b.iter().any(|b| *b != 0.0)),
        "every B has moved"
    );
    let adapter = summary.model.unwrap();
    assert!(adapter.ends_with("adapter"));
    let batch = Batch::packed((40..90).collect(), vec![0, 20, 50]).unwrap();
    let applied = trainer.model.logits(&batch, None).unwrap();
    let mut merged = base;
    merged.read_adapters(&adapter).unwrap();
    assert!(merged.logits(&batch, None).unwrap() == applied, "what was written is what was trained");
    assert_eq!(merged.merge_adapters().unwrap(), adapters.len());
    let logits = merged.logits(&batch, None).unwrap();
    let far = logits.iter().zip(&applied).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
    assert!(far > 0.0 && far < 1e-4, "{far}");
}

#[test]
fn adapters_resume_with_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, heard, _) = run(adapted(folder.path(), "whole", &[]));
    let first = Listener::stopping_after(3);
    Trainer::new(adapted(folder.path(), "halves", &[])).unwrap().run(&first).unwrap();
    let mut second = Trainer::resume(&folder.path().join("halves"), &[]).unwrap();
    let rest = Listener::default();
    second.run(&rest).unwrap();
    let losses: Vec<u64> = first.losses().into_iter().chain(rest.losses()).collect();
    assert_eq!(losses, heard.losses());
    assert!(second.model.params.adapters() == whole.model.params.adapters());
}

#[test]
fn a_target_that_does_not_exist_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let config = adapted(folder.path(), "run", &["lora.targets=[\"nothing_proj\"]"]);
    let error = Trainer::new(config).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("adapter") || error.contains("module"), "{error}");
}
