//! Parses arbitrary text as the configuration of a run. Accepted ones survive a round trip through TOML and
//! have finite learning rates; their memory is planned without running anything, or rejected.

#![no_main]

use std::sync::LazyLock;

use ballast_model::Model;
use ballast_train::plan::MemoryPlan;
use ballast_train::schedule::learning_rate;
use ballast_train::{TrainConfig, setup};
use libfuzzer_sys::fuzz_target;

/// Plans with an embedded architecture; files that a configuration names are not read.
static MODEL: LazyLock<Model> =
    LazyLock::new(|| setup::model(&TrainConfig::default()).expect("the embedded model"));

fuzz_target!(|text: &str| {
    // Lines after `---` are settings, as for --set.
    let (file, settings) = text.split_once("\n---\n").unwrap_or((text, ""));
    let settings: Vec<String> = settings.lines().map(String::from).collect();
    let Ok(table) = file.parse() else { return };
    let Ok(config) = TrainConfig::from_table(table, &settings, None) else { return };
    let written = config.to_toml().expect("what was TOML is TOML");
    let again = TrainConfig::from_table(written.parse().expect("TOML"), &[], None).expect("it was accepted");
    assert_eq!(again, config);
    for step in [1, 2, config.steps / 2, config.steps] {
        let (peak, steps) = (config.optimizer.learning_rate, config.steps);
        assert!(learning_rate(&config.schedule, peak, step.max(1), steps).is_finite());
    }
    let Ok(precision) = setup::precision(&config, &MODEL.config) else { return };
    if let Ok(plan) = MemoryPlan::of(&config, &MODEL, &precision) {
        assert!(plan.total() > 0);
    }
});
