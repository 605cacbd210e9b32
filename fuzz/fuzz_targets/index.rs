//! Parses arbitrary bytes as an index. Accepted indexes name only files in their own folder and survive a
//! round trip.

#![no_main]

use std::path::{Component, Path};

use ballast_files::index::Index;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &[u8]| {
    let path = Path::new("model.safetensors.index.json");
    let Ok(index) = Index::parse(path, text) else { return };
    for shard in index.shards() {
        let parts: Vec<Component> = Path::new(shard).components().collect();
        assert!(matches!(parts[..], [Component::Normal(name)] if name == shard), "{shard:?} leads elsewhere");
    }
    let again = Index::parse(path, index.to_text().as_bytes()).expect("what was written parses");
    assert_eq!(again, index);
});
