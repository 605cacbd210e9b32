//! Parses arbitrary text as the state of a run. An accepted one survives a round trip through JSON.

#![no_main]

use std::path::Path;

use ballast_train::state::parse_state;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let path = Path::new("state.json");
    let Ok(state) = parse_state(text, path) else { return };
    let written = serde_json::to_string(&state).expect("what was JSON is JSON");
    let again = parse_state(&written, path).expect("it was accepted");
    assert_eq!(serde_json::to_string(&again).expect("JSON"), written);
});
