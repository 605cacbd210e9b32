//! Loads arbitrary text as tokenizer.json, tokenizer_config.json and generation_config.json, separated by lines
//! of three equals signs. What is accepted encodes a text, decodes it and streams it.

#![no_main]

use std::path::PathBuf;
use std::sync::OnceLock;

use ballast_model::text::{ChatTemplate, GenerationSettings, Tokenizer};
use libfuzzer_sys::fuzz_target;

const FILES: [&str; 3] = ["tokenizer.json", "tokenizer_config.json", "generation_config.json"];

const TEXT: &str = "The cat, 10 € and 😀 of\n\nit: <eos> a\u{301}";

fn folder() -> &'static PathBuf {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = std::env::temp_dir().join(format!("ballast-fuzz-tokenizer-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("the folder can be made");
        folder
    })
}

fuzz_target!(|text: &str| {
    let folder = folder();
    let mut parts = text.split("\n===\n");
    for name in FILES {
        std::fs::write(folder.join(name), parts.next().unwrap_or("{}")).expect("the folder can be written");
    }
    let _ = ChatTemplate::load(folder);
    let Ok(tokenizer) = Tokenizer::load(folder) else { return };
    let _ = GenerationSettings::load(folder, &tokenizer);
    let Ok((ids, ends)) = tokenizer.encode_with_ends(TEXT, true) else { return };
    assert_eq!(ids.len(), ends.len());
    assert!(ends.iter().all(|end| *end <= TEXT.len()));
    let _ = tokenizer.decode(&ids, false);
    let mut stream = tokenizer.stream();
    for id in ids {
        if stream.push(id).is_err() {
            return;
        }
    }
    let _ = stream.finish();
});
