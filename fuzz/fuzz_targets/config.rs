//! Parses arbitrary bytes as config.json. Accepted files have layers and usable numbers.

#![no_main]

use std::path::Path;

use ballast_model::{Config, Precision};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &[u8]| {
    let Ok(json) = serde_json::from_slice(text) else { return };
    let Ok(config) = Config::parse(&json, Path::new("config.json")) else { return };
    assert!(!config.layers.is_empty() && config.vocabulary > 0 && config.hidden > 0);
    assert!(config.eps.is_finite() && config.embedding_scale.is_finite());
    for (name, _) in ballast_model::precision::PRESETS {
        Precision::preset(name, &config).expect("every preset suits every configuration");
    }
});
