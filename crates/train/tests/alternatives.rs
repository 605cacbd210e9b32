//! Settings that the planner suggests for a run that does not fit.
//!
//! The models are large and without values, so that the memory of this program does not matter.

use ballast_train::plan::{Alternative, ClusterPlan, Rates};
use ballast_train::{TrainConfig, setup};

const GIB: u64 = 1 << 30;

const RATES: Rates = Rates { flops: 5e12, bandwidth: 12.5e9, latency: 5e-6 };

/// Memory by which this program may grow from one plan to the next.
const MARGIN: u64 = 32 << 20;

/// A run of a model of examples/models.
fn of_model(model: &str, settings: &[&str]) -> TrainConfig {
    let path = format!("{}/../../examples/models/{model}", env!("CARGO_MANIFEST_DIR"));
    let given = [format!("model.checkpoint={path:?}"), "data.sequence_length=8192".into()];
    let settings: Vec<String> = given.into_iter().chain(settings.iter().map(|s| s.to_string())).collect();
    TrainConfig::from_table(Default::default(), &settings, None).unwrap()
}

fn plan(config: &TrainConfig, ranks: usize) -> ClusterPlan {
    ClusterPlan::new(config, &setup::outline(config).unwrap(), ranks, &RATES).unwrap()
}

/// Alternatives on as many ranks, the first ones.
fn on_same_ranks(config: &TrainConfig, ranks: usize, limit: u64) -> Vec<Alternative> {
    assert!(plan(config, ranks).needed() > limit, "the run fits as it is");
    let model = setup::outline(config).unwrap();
    let found = Alternative::find(config, &model, ranks, &RATES, limit).unwrap();
    assert!(found.iter().all(|other| other.bytes <= limit), "{found:?}");
    let these: Vec<Alternative> = found.into_iter().take_while(|other| other.ranks == ranks).collect();
    assert!(these.is_sorted_by_key(|other| other.seconds), "{these:?}");
    these
}

const DIVIDED: [&str; 4] =
    ["batch.groups=4", "batch.accumulation=4", "cluster.shard=weights", "precision.recompute=full"];

#[test]
fn a_run_that_fits_without_messages_under_way_is_told_so() {
    let run = |window| of_model("qwen3.5-4b", &[&DIVIDED[..], &["optimizer.moments=8bit", window]].concat());
    let limit = plan(&run("cluster.window=0"), 4).needed() + MARGIN;
    let found = on_same_ranks(&run("cluster.window=2"), 4, limit);
    let without = found.iter().find(|other| other.settings == ["cluster.window=0"]);
    assert!(without.is_some(), "{found:?}");
}

#[test]
fn a_run_that_fits_with_smaller_moments_is_told_so() {
    let of = |more: &[&str]| of_model("qwen3.5-0.8b", &[&["precision.recompute=full"], more].concat());
    let limit = plan(&of(&["optimizer.moments=bf16"]), 1).needed() + MARGIN;
    let found = on_same_ranks(&of(&["batch.accumulation=1"]), 1, limit);
    assert!(found.iter().any(|other| other.settings == ["optimizer.moments=bf16"]), "{found:?}");
    // Moments are the last to change: they are not suggested where something else is faster.
    let slower = of(&["precision.recompute=none", "batch.accumulation=1"]);
    let limit = plan(&of(&["batch.accumulation=1"]), 1).needed() + MARGIN;
    let found = on_same_ranks(&slower, 1, limit);
    assert!(found.iter().any(|other| other.settings == ["precision.recompute=full"]), "{found:?}");
}

#[test]
fn a_large_model_waits_for_messages_rather_than_share_its_sequences() {
    let settings = ["batch.groups=64", "batch.accumulation=64", "lora.rank=16"];
    let config = of_model("qwen3.5-397b-a17b", &settings);
    let found = on_same_ranks(&config, 64, 64 * GIB);
    let (first, shares) = (&found[0], |other: &Alternative| {
        other.settings.iter().any(|setting| setting.starts_with("cluster.context"))
    });
    assert!(!shares(first) && first.settings.contains(&"cluster.window=0".into()), "{found:?}");
}
