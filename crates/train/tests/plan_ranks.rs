//! The plan of a run on several ranks against the run itself, on ranks that are threads.

use std::collections::BTreeMap;

use ballast_cluster::threads;
use ballast_train::plan::{ClusterPlan, MemoryPlan, Rates};
use ballast_train::{Attempt, TrainConfig, Trainer, setup};

use crate::common::{config, on_files};

const RATES: Rates = Rates { flops: 1e9, bandwidth: 1e9, latency: 1e-6 };

const SHARDS: [&str; 4] = ["none", "optimizer", "gradients", "weights"];

const STEP: [&str; 4] = ["batch.groups=4", "batch.accumulation=8", "batch.sequences=1", "ledger.every=0"];

fn with(settings: &[&str]) -> TrainConfig {
    let settings: Vec<&str> = STEP.iter().chain(settings).copied().collect();
    config(std::path::Path::new("unused"), &settings)
}

/// Bytes sent by all ranks in each of two steps, by kind; and the bytes of masters, state and gradients by rank.
type Real = (Vec<BTreeMap<String, u64>>, Vec<(usize, usize, usize)>);

fn real(config: &TrainConfig, ranks: usize) -> Real {
    let folder = tempfile::tempdir().unwrap();
    let config = TrainConfig { out: folder.path().join("run"), ..config.clone() };
    let mut all = threads::run(ranks, |world| {
        let mut trainer = Trainer::new_on(config.clone(), world).unwrap();
        let mut sent = Vec::new();
        for _ in 0..2 {
            let Attempt::Taken(step) = trainer.attempt(&mut |_| ()).unwrap() else { panic!("no step") };
            sent.push(step.ranks.map(|ranks| ranks.sent).unwrap_or_default());
        }
        (sent, trainer.optimizer_bytes())
    });
    let sent = std::mem::take(&mut all[0].0);
    (sent, all.into_iter().map(|(_, bytes)| bytes).collect())
}

fn planned(config: &TrainConfig, ranks: usize) -> BTreeMap<String, u64> {
    let model = setup::outline(config).unwrap();
    let plan = ClusterPlan::new(config, &model, ranks, &RATES).unwrap();
    plan.sent.into_iter().map(|sent| (sent.kind.to_string(), sent.all_bytes)).collect()
}

/// Rows whose name begins so, in bytes.
fn row(plan: &MemoryPlan, name: &str) -> u64 {
    plan.rows.iter().filter(|(what, _)| what.starts_with(name)).map(|(_, bytes)| bytes).sum()
}

fn compare(settings: &[&str]) {
    for ranks in [1, 2, 4] {
        for shard in SHARDS {
            let shard = format!("cluster.shard={shard}");
            let config = with(&[settings, &[&*shard]].concat());
            let place = format!("{ranks} ranks, {settings:?}, {shard}");
            let (sent, bytes) = real(&config, ranks);
            for step in sent {
                assert_eq!(step, planned(&config, ranks), "{place}");
            }
            let model = setup::outline(&config).unwrap();
            let precision = setup::precision(&config, &model.config).unwrap();
            for (rank, (masters, states, _)) in bytes.into_iter().enumerate() {
                let plan = MemoryPlan::for_rank(&config, &model, &precision, rank, ranks).unwrap();
                assert_eq!(row(&plan, "masters"), masters as u64, "{place}, rank {rank}");
                assert_eq!(
                    row(&plan, "moments") + row(&plan, "momentum"),
                    states as u64,
                    "{place}, rank {rank}"
                );
            }
        }
    }
}

#[test]
fn bytes_and_optimizer_memory_of_bf16_runs_are_those_of_the_plan() {
    compare(&["precision.preset=bf16"]);
    compare(&["precision.preset=bf16", "optimizer.moments=8bit"]);
}

#[test]
fn bytes_and_optimizer_memory_of_f32_runs_with_frozen_weights_are_those_of_the_plan() {
    compare(&["precision.preset=f32", "model.preset=hybrid-moe", "model.freeze=[\"*mlp*\"]"]);
}

#[test]
fn bytes_and_optimizer_memory_with_muon_are_those_of_the_plan() {
    compare(&["optimizer.kind=muon", "model.preset=gemma"]);
}

/// The plan has full sequences, so the data is one long document.
#[test]
fn bytes_of_runs_that_share_sequences_are_those_of_the_plan() {
    let folder = tempfile::tempdir().unwrap();
    let text = "look up the value behind a key ".repeat(2000);
    for (preset, more) in [
        ("hybrid", "precision.recompute=full"),
        ("hybrid-moe", "loss.balance=0.01"),
        ("gemma", "precision.recompute=selective"),
        ("deepseek", "loss.indexer_scale=1.0"),
    ] {
        for (ranks, context, shard) in [(2, 2, "none"), (4, 2, "gradients"), (4, 4, "weights")] {
            let of_run = [
                more.to_string(),
                format!("model.preset={preset}"),
                format!("cluster.context={context}"),
                format!("cluster.shard={shard}"),
                "data.sequence_length=64".into(),
            ];
            let settings: Vec<&str> = STEP.into_iter().chain(of_run.iter().map(String::as_str)).collect();
            let config = on_files(folder.path(), "unused", &[("long.txt", &text)], &settings);
            for step in real(&config, ranks).0 {
                assert_eq!(step, planned(&config, ranks), "{preset}, {ranks} ranks, context {context}");
            }
        }
    }
}

#[test]
fn one_process_needs_gradient_buffers_for_its_groups() {
    let plan = |groups: &str| {
        let config = with(&[groups]);
        let model = setup::outline(&config).unwrap();
        let precision = setup::precision(&config, &model.config).unwrap();
        MemoryPlan::of(&config, &model, &precision).unwrap()
    };
    for (groups, more) in
        [("batch.groups=1", 0), ("batch.groups=2", 1), ("batch.groups=4", 2), ("batch.groups=8", 3)]
    {
        let plan = plan(groups);
        assert_eq!(row(&plan, "gradient sums"), more * row(&plan, "gradients"), "{groups}");
        assert!(row(&plan, "gradients") > 0);
    }
}

#[test]
fn every_division_needs_less_memory_of_its_own_kind() {
    let plan = |shard: &str, ranks: usize| {
        let config = with(&["batch.accumulation=4", &format!("cluster.shard={shard}")]);
        let model = setup::outline(&config).unwrap();
        ClusterPlan::new(&config, &model, ranks, &RATES).unwrap()
    };
    let alone = plan("none", 1).memory;
    let [none, optimizer, gradients, weights] = SHARDS.map(|shard| plan(shard, 4).memory);
    assert_eq!(row(&none, "moments"), row(&alone, "moments"));
    assert!(row(&optimizer, "moments") < row(&none, "moments") / 3);
    assert_eq!(row(&optimizer, "gradients"), row(&none, "gradients"));
    assert!(row(&gradients, "gradients") < row(&optimizer, "gradients"));
    assert_eq!(row(&gradients, "weights"), row(&none, "weights"));
    assert!(row(&weights, "weights, own share") < row(&gradients, "weights") / 3);
    assert!(row(&weights, "weights gathered") > 0 && row(&alone, "messages") == 0);
}

#[test]
fn time_falls_with_ranks_and_messages_are_partly_hidden() {
    let time = |shard: &str, ranks: usize| {
        let config = with(&[&format!("cluster.shard={shard}")]);
        let model = setup::outline(&config).unwrap();
        ClusterPlan::new(&config, &model, ranks, &RATES).unwrap().time
    };
    for shard in SHARDS {
        let (one, two, four) = (time(shard, 1), time(shard, 2), time(shard, 4));
        assert_eq!((one.messages, one.waiting, one.total), (0.0, 0.0, one.compute));
        assert!((two.flops - one.flops / 2.0).abs() < 1e-6 * one.flops);
        assert!((four.flops - one.flops / 4.0).abs() < 1e-6 * one.flops);
        assert!(two.waiting < two.messages, "{shard}: {two:?}");
        assert!((two.total - two.compute - two.waiting).abs() < 1e-9, "{shard}: {two:?}");
    }
}
