//! Shared code of the tests of whole models.

use std::fs;
use std::path::{Path, PathBuf};

use ballast_checkpoint::tensor_file::TensorFile;
use ballast_model::{Batch, Model, Precision};

/// Tiny models of all families.
pub const MODELS: [&str; 9] = [
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "gemma2",
    "gemma3",
    "gemma4_dense",
    "gemma4_moe",
    "gemma4_ple",
    "deepseek_v32",
];

pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name)
}

pub fn folder(model: &str) -> PathBuf {
    fixture("models").join(model)
}

pub fn golden(model: &str) -> TensorFile {
    TensorFile::open(&folder(model).join("golden.safetensors")).unwrap()
}

pub fn load(model: &str, preset: &str) -> Model {
    Model::load(&folder(model), |config| Precision::preset(preset, config)).unwrap()
}

/// Returns RMS(a-b) / (RMS(b) + 1e-8) and the largest difference.
pub fn error(got: &[f32], expected: &[f32]) -> (f64, f64) {
    assert_eq!(got.len(), expected.len());
    let rms = |sum: f64| (sum / expected.len().max(1) as f64).sqrt();
    let difference = |(a, b): (&f32, &f32)| (*a as f64 - *b as f64).abs();
    let squares: f64 = got.iter().zip(expected).map(difference).map(|d| d * d).sum();
    let size: f64 = expected.iter().map(|b| *b as f64 * *b as f64).sum();
    let largest = got.iter().zip(expected).map(difference).fold(0.0, f64::max);
    (rms(squares) / (rms(size) + 1e-8), largest)
}

/// Ids of the golden batch, 58 in all.
pub fn ids(model: &str) -> Vec<u32> {
    golden(model).integers("input_ids").unwrap().values.iter().map(|id| *id as u32).collect()
}

/// Golden batch: two rows of 29.
pub fn batch(model: &str) -> Batch {
    Batch::rows(ids(model), 29).unwrap()
}

/// Copy of a model with a changed config.json.
pub fn with_config(model: &str, change: impl FnOnce(&mut serde_json::Value)) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    let from = folder(model);
    fs::copy(from.join("model.safetensors"), copy.path().join("model.safetensors")).unwrap();
    let mut config: serde_json::Value =
        serde_json::from_slice(&fs::read(from.join("config.json")).unwrap()).unwrap();
    change(&mut config);
    fs::write(copy.path().join("config.json"), config.to_string()).unwrap();
    copy
}
