//! Runs over several ranks, which are threads here: the same bits for any number of them.

use std::path::{Path, PathBuf};

use ballast_cluster::threads;
use ballast_train::Trainer;

use crate::common::{Listener, config};

/// Files whose bytes must not depend on the ranks.
const FILES: [&str; 2] = ["model/model.safetensors", "model/config.json"];

/// The same of a run with adapters.
const ADAPTER_FILES: [&str; 2] = ["adapter/adapter_model.safetensors", "adapter/adapter_config.json"];

/// Content of the finished model and of the last checkpoint's optimizer state, and the losses.
type Outcome = (Vec<Vec<u8>>, Vec<u64>, String);

fn outcome(out: &Path, steps: u64, listener: &Listener, evaluation: String) -> Outcome {
    let optimizer = format!("checkpoints/step-{steps:08}/optimizer.safetensors");
    let files = if out.join("adapter").exists() { ADAPTER_FILES } else { FILES };
    let files = files.iter().map(|file| out.join(file)).chain([out.join(optimizer)]);
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

#[test]
fn several_micro_batches_per_group_and_muon_have_the_same_bits() {
    let settings =
        with(&["steps=3", "batch.accumulation=8", "data.sequence_length=32", "optimizer.kind=muon"]);
    compare(&settings, &[2, 4], &["none", "gradients", "weights"]);
}

#[test]
fn experts_and_shared_layers_have_the_same_bits() {
    let experts =
        ["steps=3", "model.preset=hybrid-moe", "loss.balance=0.01", "precision.recompute=selective"];
    compare(&with(&experts), &[4], &["gradients", "weights"]);
    let indexer = ["steps=3", "model.preset=deepseek", "loss.indexer_scale=1.0", "precision.recompute=full"];
    compare(&with(&indexer), &[2], &["optimizer", "weights"]);
    compare(&with(&["steps=3", "model.preset=gemma"]), &[4], &["weights"]);
}

#[test]
fn the_number_of_messages_on_their_way_changes_no_bit() {
    for window in ["cluster.window=0", "cluster.window=7"] {
        compare(&with(&["steps=3", window]), &[2], &["none", "optimizer", "weights"]);
    }
}

#[test]
fn moments_in_fewer_bits_have_the_same_bits() {
    compare(&with(&["steps=3", "optimizer.moments=8bit"]), &[2, 4], &["none", "gradients", "weights"]);
    compare(&with(&["steps=3", "optimizer.moments=bf16", "optimizer.kind=muon"]), &[2], &["optimizer"]);
}

/// Makes a model to adapt; the setting that names it.
fn base_of_adapters(folder: &Path) -> String {
    train(&folder.join("base"), 1, &["steps=3"]);
    format!("model.checkpoint={:?}", folder.join("base/model").display().to_string())
}

#[test]
fn adapters_have_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let base = base_of_adapters(folder.path());
    compare(&with(&["steps=3", "lora.rank=4", &base]), &[2, 4], &["none", "gradients", "weights"]);
}

#[test]
fn groups_that_are_no_power_of_two_can_have_a_rank_each() {
    let settings = ["batch.groups=3", "batch.accumulation=3", "batch.sequences=1", "steps=3"];
    compare(&settings, &[3], &["none", "weights"]);
}

#[test]
fn ranks_that_do_not_fit_are_refused_with_numbers_that_do() {
    let folder = tempfile::tempdir().unwrap();
    let errors = threads::run(3, |world| {
        let config = config(folder.path(), &with(&["steps=1"]));
        Trainer::new_on(config, world).map(|_| ()).unwrap_err().to_string()
    });
    assert!(errors.iter().all(|error| error.contains("it allows 1, 2, 4 ranks")), "{errors:?}");
    let errors = threads::run(3, |world| {
        let config = config(folder.path(), &with(&["steps=1", "cluster.context=2"]));
        Trainer::new_on(config, world).map(|_| ()).unwrap_err().to_string()
    });
    assert!(errors[1].contains("`cluster.context` 2 must divide the number of ranks, got 3"), "{errors:?}");
    let uneven =
        ballast_train::TrainConfig::embedded(&["batch.groups=4".into(), "batch.accumulation=6".into()]);
    assert!(uneven.unwrap_err().to_string().contains("must be a multiple of `batch.groups` 4, got 6"));
}

/// Trains until the listener of the first rank stops it, then resumes on the other numbers of ranks.
#[test]
fn a_run_goes_on_with_the_same_bits_on_any_number_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let settings = with(&["steps=7"]);
    let whole = train(&folder.path().join("whole"), 1, &settings);
    let out = folder.path().join("moved");
    let stopped = |ranks: usize, shard: &str, resumed: bool, after: Option<usize>| {
        let shard = format!("cluster.shard={shard}");
        let mut all = threads::run(ranks, |world| {
            let settings: Vec<&str> = settings.iter().copied().chain([&*shard]).collect();
            let mut trainer = match resumed {
                true => Trainer::resume_on(&out, std::slice::from_ref(&shard), world).unwrap(),
                false => Trainer::new_on(config(&out, &settings), world).unwrap(),
            };
            // Only one rank is told to stop.
            let stops = trainer.ranks.world.is_first().then_some(after).flatten();
            let listener = Listener { stop_after: stops, ..Listener::default() };
            let summary = trainer.run(&listener).unwrap();
            (outcome_of(&summary), listener.losses())
        });
        all.remove(0)
    };
    fn outcome_of(summary: &ballast_train::Summary) -> (u64, bool) {
        (summary.step, summary.stopped)
    }
    let mut losses = Vec::new();
    for (ranks, shard, after) in [(4, "weights", Some(2)), (1, "none", Some(2)), (2, "gradients", None)] {
        let ((step, stopped), more) = stopped(ranks, shard, !losses.is_empty(), after);
        assert_eq!(stopped, after.is_some(), "{ranks}");
        losses.extend(more);
        assert_eq!(step as usize, losses.len());
    }
    assert_eq!(losses, whole.1);
    for (file, content) in FILES.iter().zip(&whole.0) {
        assert!(std::fs::read(out.join(file)).unwrap() == *content, "{file}");
    }
}

/// A rank whose part of a tensor is empty restores nothing of it.
#[test]
fn every_storage_of_moments_resumes_on_every_division() {
    let folder = tempfile::tempdir().unwrap();
    for moments in ["f32", "bf16", "8bit"] {
        let moments_setting = format!("optimizer.moments={moments}");
        let settings = with(&["steps=2", "evaluation.batches=0", &moments_setting]);
        let whole = train(&folder.path().join(moments), 1, &settings);
        for (ranks, shard) in [2, 4].into_iter().flat_map(|ranks| SHARDS.map(|shard| (ranks, shard))) {
            let place = format!("{moments}-{ranks}-{shard}");
            let out = folder.path().join(&place);
            let mut trainer = Trainer::new(config(&out, &settings)).unwrap();
            let stopped = trainer.run(&Listener { stop_after: Some(1), ..Listener::default() }).unwrap();
            assert!(stopped.stopped, "{place}");
            drop(trainer); // and its lock
            let shard = format!("cluster.shard={shard}");
            threads::run(ranks, |world| {
                let mut trainer = Trainer::resume_on(&out, std::slice::from_ref(&shard), world).unwrap();
                trainer.run(&Listener::default()).unwrap();
                trainer.ranks.world.barrier().unwrap();
            });
            let optimizer = "checkpoints/step-00000002/optimizer.safetensors";
            for (file, content) in FILES.iter().chain([&optimizer]).zip(&whole.0) {
                assert!(std::fs::read(out.join(file)).unwrap() == *content, "{place}: {file}");
            }
        }
    }
}

#[test]
fn threads_of_a_rank_make_no_difference() {
    let folder = tempfile::tempdir().unwrap();
    let settings = with(&["steps=3", "cluster.shard=weights"]);
    let models: Vec<Vec<u8>> = [1, 3]
        .iter()
        .map(|count| {
            let out = folder.path().join(count.to_string());
            threads::run(2, |world| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(*count).build().unwrap();
                pool.install(|| {
                    let mut trainer = Trainer::new_on(config(&out, &settings), world).unwrap();
                    trainer.run(&Listener::default()).unwrap();
                });
            });
            std::fs::read(out.join(FILES[0])).unwrap()
        })
        .collect();
    assert!(models[0] == models[1]);
}

#[test]
fn ranks_that_were_started_differently_are_refused_with_the_difference() {
    let folder = tempfile::tempdir().unwrap();
    let start = |settings: fn(usize) -> &'static str| {
        threads::run(2, |world| {
            let setting = settings(world.rank());
            let config = config(folder.path(), &with(&["steps=1", setting]));
            Trainer::new_on(config, world).map(|_| ()).unwrap_err().to_string()
        })
    };
    for error in start(|rank| ["optimizer.learning_rate=1e-3", "optimizer.learning_rate=2e-3"][rank]) {
        assert!(error.contains("rank 1 differs from rank 0 in `optimizer.learning_rate`: 0.002"), "{error}");
    }
    for error in start(|rank| ["seed=1", "seed=2"][rank]) {
        assert!(error.contains("rank 1 differs from rank 0 in `seed`: 2, but 1 on rank 0"), "{error}");
    }
}

#[test]
fn a_value_that_is_not_finite_on_one_rank_stops_all_and_names_the_rank() {
    for shard in SHARDS {
        let folder = tempfile::tempdir().unwrap();
        let shard_setting = format!("cluster.shard={shard}");
        let errors = threads::run(2, |world| {
            let settings = with(&["steps=3", &shard_setting]);
            let mut trainer = Trainer::new_on(config(folder.path(), &settings), world).unwrap();
            let before = trainer.model.params.protected().to_vec();
            if trainer.ranks.world.rank() == 1 {
                let at = trainer
                    .model
                    .specs
                    .protected
                    .iter()
                    .position(|spec| spec.name.ends_with("norm.weight"))
                    .unwrap();
                let tensor = &mut trainer.model.params.protected_mut()[at];
                tensor.values_mut()[0] = f32::NAN;
                trainer.ledger =
                    ballast_train::ledger::Ledger::new(&trainer.model, &trainer.model.precision().clone());
            }
            let error = trainer.run(&Listener::default()).map(|_| ()).unwrap_err().to_string();
            if trainer.ranks.world.rank() == 0 {
                assert!(trainer.model.params.protected() == before, "the update was not applied");
            }
            error
        });
        for error in &errors {
            assert!(error.contains("rank 1, micro-batch 1: ") && error.contains("norm"), "{shard}: {error}");
        }
        assert!(folder.path().join("faults/step-00000001.safetensors").exists());
    }
}

#[test]
fn a_protected_tensor_that_differs_on_one_rank_is_named_with_the_rank() {
    let folder = tempfile::tempdir().unwrap();
    let errors = threads::run(4, |world| {
        let mut trainer = Trainer::new_on(config(folder.path(), &with(&["steps=3"])), world).unwrap();
        trainer.attempt(&mut |_| {}).unwrap();
        if trainer.ranks.world.rank() == 2 {
            let values = trainer.model.params.protected_mut()[0].values_mut();
            values[0] = f32::from_bits(values[0].to_bits() ^ 1);
            trainer.ledger =
                ballast_train::ledger::Ledger::new(&trainer.model, &trainer.model.precision().clone());
        }
        trainer.attempt(&mut |_| {}).map(|_| ()).unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.contains("on rank 2, but") && error.contains("on 3 of 4 ranks"), "{error}");
    }
}

/// Ranks that share sequences add in another order than one rank does, so the losses agree to rounding; but the
/// bits depend on `cluster.context` alone, not on the number of ranks.
#[test]
fn ranks_that_share_sequences_train_like_one() {
    for preset in ["hybrid", "hybrid-moe", "gemma", "deepseek", "adapters"] {
        let folder = tempfile::tempdir().unwrap();
        let preset_setting = match preset {
            "adapters" => base_of_adapters(folder.path()),
            preset => format!("model.preset={preset}"),
        };
        let mut settings = vec!["batch.groups=2", "batch.accumulation=2", "steps=4", "evaluation.batches=3"];
        settings.extend(["precision.preset=f32", &*preset_setting]);
        match preset {
            "hybrid-moe" => settings.push("loss.balance=0.01"),
            "deepseek" => settings.push("loss.indexer_scale=1.0"),
            "adapters" => settings.push("lora.rank=4"),
            _ => {}
        }
        let alone = train(&folder.path().join("alone"), 1, &settings);
        settings.push("cluster.context=2");
        let two = train(&folder.path().join("two"), 2, &settings);
        for (step, (a, b)) in alone.1.iter().zip(&two.1).enumerate() {
            let (a, b) = (f64::from_bits(*a), f64::from_bits(*b));
            assert!((a - b).abs() < 2e-5 * a, "{preset}, step {step}: {a} {b}");
        }
        for (ranks, shard) in
            [(4, "cluster.shard=none"), (4, "cluster.shard=weights"), (2, "cluster.shard=weights")]
        {
            settings.push(shard);
            let several = train(&folder.path().join(format!("{ranks}-{shard}")), ranks, &settings);
            settings.pop();
            assert!(several == two, "{preset}: {ranks} ranks, {shard}");
        }
    }
}
