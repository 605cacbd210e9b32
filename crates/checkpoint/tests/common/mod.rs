//! Helpers for the integration tests: small checkpoints, written and read with the independent `safetensors`
//! crate.

#[cfg(feature = "hub")]
pub mod server;
#[cfg(feature = "hub")]
pub mod stage;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ballast_checkpoint::Checkpoint;
use ballast_checkpoint::convert::{ConvertOptions, ConvertReport, execute, plan};
use ballast_contract::{Policy, Registry};
use ballast_files::jobs::Silent;
use safetensors::tensor::{Dtype, TensorView};

/// The fixtures copied into the project.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name)
}

pub fn open(path: &Path) -> Arc<Checkpoint> {
    Arc::new(Checkpoint::open_consistent(path).unwrap())
}

pub fn policy(name: &str) -> Policy {
    Registry::builtin().policy(name).unwrap()
}

/// Returns options with a policy, reduced to the checkpoint's architecture as in the command.
pub fn options(checkpoint: &Checkpoint, policy_name: &str) -> ConvertOptions {
    let architecture = checkpoint.architecture(Registry::builtin()).unwrap();
    ConvertOptions::new(policy(policy_name).for_architecture(&architecture))
}

pub fn convert(source: &Arc<Checkpoint>, destination: &Path, options: &ConvertOptions) -> ConvertReport {
    let plan = plan(source, options).unwrap();
    execute(source, plan, destination, options, &Silent).unwrap()
}

/// A tensor for [`write_file`].
pub struct Tensor {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub data: Vec<u8>,
}

pub fn f32_tensor(name: &str, shape: &[usize], values: &[f32]) -> Tensor {
    let data = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    Tensor { name: name.into(), dtype: Dtype::F32, shape: shape.to_vec(), data }
}

pub fn write_file(path: &Path, tensors: &[Tensor]) {
    let views: Vec<(&str, TensorView)> = tensors
        .iter()
        .map(|t| (t.name.as_str(), TensorView::new(t.dtype, t.shape.clone(), &t.data).unwrap()))
        .collect();
    safetensors::serialize_to_file(views, None, path).unwrap();
}

/// Reads a file with the `safetensors` crate: name to dtype, shape and bytes.
pub fn read_file(path: &Path) -> BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)> {
    let bytes = std::fs::read(path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    file.iter()
        .map(|(name, t)| (name.to_string(), (t.dtype(), t.shape().to_vec(), t.data().to_vec())))
        .collect()
}

/// All tensors of a folder, through the `safetensors` crate.
pub fn read_folder(folder: &Path) -> BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)> {
    let mut all = BTreeMap::new();
    for entry in std::fs::read_dir(folder).unwrap().flatten() {
        if entry.path().extension().is_some_and(|e| e == "safetensors") {
            all.extend(read_file(&entry.path()));
        }
    }
    all
}

pub fn f32_values(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}
