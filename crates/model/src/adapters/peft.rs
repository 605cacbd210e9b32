//! Reads and writes adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.
//!
//! A module's matrices are `base_model.model.<module>.lora_A.weight` [rank, in] and `.lora_B.weight` [out,
//! rank].

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::Path;

use ballast_checkpoint::tensor_file::{Named, TensorFile, write_f32};
use ballast_files::Error as CheckpointError;
use ballast_files::jobs::Silent;
use ballast_files::regular::read_regular;
use ballast_files::staging::Staging;
use serde_json::{Value, json};

use super::AdapterSettings;
use crate::error::{Error, Result};
use crate::model::Model;
use crate::params::Adapter;

const CONFIG: &str = "adapter_config.json";
const TENSORS: &str = "adapter_model.safetensors";
const PREFIX: &str = "base_model.model.";

impl Model {
    /// Writes the adapters atomically into a new folder that PEFT can read.
    pub fn write_adapters(&self, folder: &Path, force: bool) -> Result {
        let adapters: Vec<(String, &Adapter, &[usize])> = self
            .specs
            .weights
            .iter()
            .zip(&self.params.adapters)
            .filter_map(|(spec, low)| Some((self.module(spec), low.as_ref()?, &spec.shape[..])))
            .collect();
        let Some((_, first, _)) = adapters.first() else {
            return Err(Error::Input("the model has no adapters to write".into()));
        };
        let config = json!({
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base_path(),
            "r": first.rank,
            "lora_alpha": (first.scale as f64 * first.rank as f64) as f32,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": false,
            "init_lora_weights": true,
            "inference_mode": true,
            "use_rslora": false,
            "use_dora": false,
            "target_modules": adapters.iter().map(|(module, ..)| module).collect::<Vec<_>>(),
        });
        let mut tensors = Vec::new();
        for (module, low, shape) in &adapters {
            tensors.push((format!("{PREFIX}{module}.lora_A.weight"), [low.rank, shape[1]], &low.a[..]));
            tensors.push((format!("{PREFIX}{module}.lora_B.weight"), [shape[0], low.rank], &low.b[..]));
        }
        let named: Vec<Named<'_>> =
            tensors.iter().map(|(name, shape, values)| (&name[..], &shape[..], *values)).collect();
        let staging = Staging::new(folder, false, force, &[])?;
        let path = staging.folder().join(CONFIG);
        fs::write(&path, format!("{config:#}\n")).map_err(CheckpointError::io(&path, "write"))?;
        File::open(&path).and_then(|file| file.sync_all()).map_err(CheckpointError::io(&path, "flush"))?;
        write_f32(&staging.folder().join(TENSORS), &named, &[("format".into(), "pt".into())], false)?;
        Ok(staging.commit(&Silent)?)
    }

    /// Reads adapters written by PEFT or [`Model::write_adapters`], and returns their number.
    pub fn read_adapters(&mut self, folder: &Path) -> Result<usize> {
        if !self.params.adapters.is_empty() {
            return Err(Error::Input("the model already has adapters; merge them first".into()));
        }
        let AdapterSettings { rank, scale } = settings(&folder.join(CONFIG))?;
        let file = TensorFile::open(&folder.join(TENSORS))?;
        let places = self.specs.weights.iter().enumerate().filter(|(_, spec)| self.refusal(spec).is_none());
        let places: BTreeMap<String, usize> = places.map(|(at, spec)| (self.module(spec), at)).collect();
        let mut adapters = vec![None; self.specs.weights.len()];
        for name in file.names() {
            let module = name.strip_prefix(PREFIX).and_then(|name| {
                name.strip_suffix(".lora_A.weight").or_else(|| name.strip_suffix(".lora_B.weight"))
            });
            let Some((module, at)) = module.and_then(|module| Some((module, *places.get(module)?))) else {
                return Err(file
                    .error(name, "no module of this model that can have an adapter has this name")
                    .into());
            };
            let shape = &self.specs.weights[at].shape;
            let matrix = |part: &str, shape: [usize; 2]| -> Result<Vec<f32>> {
                let name = format!("{PREFIX}{module}.{part}.weight");
                let array = file.f32(&name)?;
                if array.shape != shape {
                    let problem = format!("shape must be {shape:?}, got {:?}", array.shape);
                    return Err(file.error(&name, problem).into());
                }
                Ok(array.values)
            };
            let (a, b) = (matrix("lora_A", [rank, shape[1]])?, matrix("lora_B", [shape[0], rank])?);
            adapters[at] = Some(Adapter { a, b, rank, scale });
        }
        let count = adapters.iter().flatten().count();
        if count == 0 {
            let path = folder.join(TENSORS);
            return Err(Error::Input(format!("{}: no adapters in this file", path.display())));
        }
        self.params.adapters = adapters;
        Ok(count)
    }

    /// Returns the absolute path of the base model, from which PEFT loads it.
    fn base_path(&self) -> Option<String> {
        let root = &self.source.as_ref()?.checkpoint.root;
        let folder = if root.is_file() { root.parent()? } else { root };
        let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
        Some(folder.canonicalize().ok()?.to_string_lossy().into_owned())
    }
}

impl AdapterSettings {
    /// Reads adapter_config.json in the folder of an adapter.
    pub fn read(folder: &Path) -> Result<AdapterSettings> {
        settings(&folder.join(CONFIG))
    }
}

/// Reads adapter_config.json.
fn settings(path: &Path) -> Result<AdapterSettings> {
    let text = read_regular(path).map_err(CheckpointError::io(path, "read"))?;
    let config: Value =
        serde_json::from_slice(ballast_files::encoding::without_mark(&text)).map_err(|error| {
            Error::Config {
                file: path.into(),
                field: CONFIG.into(),
                problem: format!("is not JSON: {error}"),
            }
        })?;
    AdapterSettings::parse(&config, path)
}
