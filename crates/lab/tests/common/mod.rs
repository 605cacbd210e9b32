//! Helpers of the lab's tests.

use std::path::{Path, PathBuf};

use ballast_checkpoint::tensor_file::TensorFile;
use ballast_files::jobs::Silent;
use ballast_lab::experiment::Arithmetic;
use ballast_lab::findings::{Findings, Run};
use ballast_lab::{Choice, Study, input};
use ballast_model::{Batch, LazyCheckpoint};

/// The tiny models.
pub const MODELS: [&str; 10] = [
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "gemma2",
    "gemma3",
    "gemma4_dense",
    "gemma4_moe",
    "gemma4_ple",
    "deepseek_v32",
    "deepseek_v32_yarn",
];

pub fn folder(model: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models").join(model)
}

pub fn golden(model: &str) -> TensorFile {
    TensorFile::open(&folder(model).join("golden.safetensors")).unwrap()
}

pub fn ids(model: &str) -> Vec<u32> {
    golden(model).integers("input_ids").unwrap().values.iter().map(|id| *id as u32).collect()
}

/// Golden batch: two sequences of 29 tokens.
pub fn batch(model: &str) -> Batch {
    Batch::rows(ids(model), 29).unwrap()
}

/// Runs `work` with a study of a golden model.
pub fn study<R>(
    model: &str,
    reference: Arithmetic,
    gradients: bool,
    work: impl FnOnce(&Study<'_>) -> R,
) -> R {
    let (path, batch) = (folder(model), batch(model));
    let checkpoint = LazyCheckpoint::open(&path).unwrap();
    let input = input::describe(&batch, "the golden batch".into());
    work(&Study {
        path: &path,
        checkpoint: &checkpoint,
        batch: &batch,
        input,
        reference,
        gradients,
        observer: &Silent,
    })
}

/// Default choices of a model.
pub fn defaults(checkpoint: &LazyCheckpoint) -> Vec<Choice> {
    Choice::defaults(&checkpoint.config, &checkpoint.specs).unwrap()
}

pub fn run<'f>(findings: &'f Findings, name: &str) -> &'f Run {
    findings.runs.iter().find(|run| run.name == name).unwrap_or_else(|| panic!("no run {name}"))
}
