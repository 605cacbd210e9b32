//! Data from files to micro-batches: what comes out, in which order, what is trained on, and what is refused.

mod files;
mod identity;
mod masks;
mod packing;
mod refused;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ballast_train::Result;
use ballast_train::data::{DataConfig, DataFile, Document, Documents, Files, Split, TextEncoder};
use serde_json::{Value, json};
use tempfile::TempDir;

/// A model's folder: a byte-level tokenizer of 160 tokens and a template in the style of ChatML.
fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/text/qwen3_5")
}

fn text() -> Arc<TextEncoder> {
    Arc::new(TextEncoder::load(&fixture()).unwrap())
}

/// A folder of data files.
struct Data(TempDir);

impl Data {
    fn new(files: &[(&str, &[u8])]) -> Data {
        let data = Data(tempfile::tempdir().unwrap());
        for (name, content) in files {
            std::fs::write(data.path(name), content).unwrap();
        }
        data
    }

    /// Lines with the texts `0`, `1`, ...
    fn numbered(name: &str, lines: usize) -> Data {
        let text: String = (0..lines).map(|n| format!("{}\n", json!({ "text": n.to_string() }))).collect();
        Data::new(&[(name, text.as_bytes())])
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// These files, nothing held out.
    fn config(&self, names: &[&str]) -> DataConfig {
        let file = |name: &&str| DataFile { path: self.path(name), weight: 1.0 };
        DataConfig {
            files: names.iter().map(file).collect(),
            validation_fraction: 0.0,
            ..DataConfig::default()
        }
    }
}

fn train(config: &DataConfig, seed: u64) -> Result<Files> {
    Files::open(config, Split::Train, text(), seed)
}

fn take(documents: &mut dyn Documents, n: usize) -> Vec<Document> {
    (0..n).map(|_| documents.next().unwrap()).collect()
}

fn all(files: &Files) -> Vec<Document> {
    (0..files.len()).map(|number| files.document(number).unwrap()).collect()
}

fn lines(documents: &[Document]) -> Vec<u64> {
    documents.iter().map(|document| document.origin.number).collect()
}

fn decode(ids: &[u32]) -> String {
    text().tokenizer.decode(ids, false).unwrap()
}

/// The text with what is trained on in brackets.
fn marked(document: &Document) -> String {
    let mut out = String::new();
    let mut at = 0;
    for run in document.trained.chunk_by(|a, b| a == b) {
        let words = decode(&document.ids[at..at + run.len()]);
        out += &if run[0] { format!("⟦{words}⟧") } else { words };
        at += run.len();
    }
    out
}

/// A line with these messages.
fn chat(messages: &[(&str, &str)]) -> Value {
    let message = |(role, content): &(&str, &str)| json!({"role": role, "content": content});
    json!({"messages": messages.iter().map(message).collect::<Vec<_>>()})
}
