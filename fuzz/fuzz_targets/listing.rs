//! Parses arbitrary bytes as a hub's list of files: an error, or names inside of the repository, sorted.

#![no_main]

use std::path::{Component, Path};

use ballast_hub::parse_listing;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &[u8]| {
    let Ok((commit, files)) = parse_listing(text) else { return };
    assert_eq!(commit.len(), 40);
    assert!(files.is_sorted());
    for file in files {
        assert!(Path::new(&file).components().all(|part| matches!(part, Component::Normal(_))), "{file:?}");
    }
});
