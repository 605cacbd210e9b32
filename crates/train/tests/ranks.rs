//! Runs over several ranks, which are threads here: the same bits for any number of them.

mod common;

use std::path::{Path, PathBuf};

use ballast_cluster::threads;
use ballast_train::Trainer;
use common::{Listener, config};

/// Files whose bytes must not depend on the ranks.
const FILES: [&str; 2] = ["model/model.safetensors", "model/config.json"];

/// Content of the finished model and of the last checkpoint's optimizer state, and the losses.
type Outcome = (Vec<Vec<u8>>, Vec<u64>, String);

fn outcome(out: &Path, steps: u64, listener: &Listener, evaluation: String) -> Outcome {
    let optimizer = format!("checkpoints/step-{steps:08}/optimizer.safetensors");
    let files = FILES.iter().map(|file| out.join(file)).chain([out.join(optimizer)]);
    let content =
        files.map(|file| std::fs::read(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display())));
    (content.collect(), listener.losses(), evaluation)
}

/// Trains on `ranks` ranks; the outcome of the first.
fn train(out: &Path, ranks: usize, settings: &[&str]) -> Outcome {
    let mut outcomes = threads::run(ranks, |world| {
        let is_first = world.is_first();
        let config = config(out, settings);
        let steps = config.steps;
        let mut trainer = Trainer::new_on(config, world).unwrap();
        let listener = Listener::default();
        let summary = trainer.run(&listener).unwrap();
        let evaluation = format!("{:?}", summary.evaluation);
        trainer.ranks.world.barrier().unwrap();
        assert!(is_first || listener.losses().is_empty(), "one rank reports");
        (is_first, outcome(out, steps, &listener, evaluation))
    });
    let (first, outcome) = outcomes.remove(0);
    assert!(first);
    for (_, other) in outcomes {
        assert_eq!(other.2, outcome.2, "every rank has the same evaluation");
    }
    outcome
}

fn compare(settings: &[&str], ranks: &[usize], shards: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: String| -> PathBuf { folder.path().join(name) };
    let alone = train(&path("alone".into()), 1, settings);
    assert!(alone.1.len() >= 3);
    for ranks in ranks {
        for shard in shards {
            let shard_setting = format!("cluster.shard={shard}");
            let settings: Vec<&str> = settings.iter().copied().chain([&*shard_setting]).collect();
            let several = train(&path(format!("{ranks}-{shard}")), *ranks, &settings);
            let place = format!("{ranks} ranks, {shard}, {settings:?}");
            assert_eq!(several.1, alone.1, "losses: {place}");
            assert_eq!(several.2, alone.2, "evaluation: {place}");
            for (index, (a, b)) in several.0.iter().zip(&alone.0).enumerate() {
                assert!(a == b, "file {index}: {place}");
            }
        }
    }
}

const SHARDS: [&str; 4] = ["none", "optimizer", "gradients", "weights"];

const STEP: [&str; 4] =
    ["batch.groups=4", "batch.accumulation=4", "batch.sequences=1", "evaluation.batches=3"];

fn with<'a>(more: &[&'a str]) -> Vec<&'a str> {
    STEP.iter().copied().chain(more.iter().copied()).collect()
}

#[test]
fn bf16_runs_have_the_same_bits_on_1_2_and_4_ranks_with_every_shard_setting() {
    compare(&with(&["steps=4", "precision.preset=bf16"]), &[2, 4], &SHARDS);
}

#[test]
fn f32_runs_have_the_same_bits_on_1_2_and_4_ranks_with_every_shard_setting() {
    compare(&with(&["steps=4", "precision.preset=f32"]), &[2, 4], &SHARDS);
}
