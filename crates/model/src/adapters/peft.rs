//! Adapters on disk, as PEFT has them: adapter_config.json and adapter_model.safetensors.
//!
//! A module's matrices are `base_model.model.<module>.lora_A.weight` [rank, in] and `.lora_B.weight` [out, rank].

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::Path;

use ballast_checkpoint::Error as CheckpointError;
use ballast_checkpoint::staging::Staging;
use ballast_checkpoint::tensor_file::{Named, TensorFile, write_f32};
use serde_json::{Value, json};

use crate::error::{Error, Result};
use crate::model::Model;
use crate::params::Adapter;

const CONFIG: &str = "adapter_config.json";
const TENSORS: &str = "adapter_model.safetensors";
const PREFIX: &str = "base_model.model.";

impl Model {
    /// Writes the adapters into a new folder that PEFT reads. Whole, or not at all.
    pub fn write_adapters(&self, folder: &Path, force: bool) -> Result {
        let adapters: Vec<(String, &Adapter, &[usize])> = self
            .specs
            .weights
            .iter()
            .zip(&self.params.adapters)
            .filter_map(|(spec, low)| Some((self.module(spec), low.as_ref()?, &spec.shape[..])))
            .collect();
        let Some((_, first, _)) = adapters.first() else {
            return Err(Error::Input("the model has no adapters that could be written".into()));
        };
        let config = json!({
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": null,
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
        Ok(staging.commit()?)
    }

    /// Reads adapters that PEFT or [`Model::write_adapters`] wrote, and says how many there are.
    pub fn read_adapters(&mut self, folder: &Path) -> Result<usize> {
        if !self.params.adapters.is_empty() {
            return Err(Error::Input("the model has adapters already; merge them first".into()));
        }
        let (rank, scale) = settings(&folder.join(CONFIG))?;
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
                    .error(name, "it belongs to no module of this model that can carry one")
                    .into());
            };
            let shape = &self.specs.weights[at].shape;
            let matrix = |part: &str, shape: [usize; 2]| -> Result<Vec<f32>> {
                let name = format!("{PREFIX}{module}.{part}.weight");
                let array = file.f32(&name)?;
                if array.shape != shape {
                    let problem = format!("its shape is {:?} where {shape:?} is expected", array.shape);
                    return Err(file.error(&name, problem).into());
                }
                Ok(array.values)
            };
            let (a, b) = (matrix("lora_A", [rank, shape[1]])?, matrix("lora_B", [shape[0], rank])?);
            adapters[at] = Some(Adapter { a, b, rank, scale });
        }
        self.params.adapters = adapters;
        Ok(self.params.adapters.iter().flatten().count())
    }
}

/// Rank and scale; an error for what these adapters cannot do.
fn settings(path: &Path) -> Result<(usize, f32)> {
    let fail =
        |field: &str, problem: String| Error::Config { file: path.into(), field: field.into(), problem };
    let text = fs::read(path).map_err(CheckpointError::io(path, "read"))?;
    let config: Value = serde_json::from_slice(ballast_checkpoint::encoding::without_mark(&text))
        .map_err(|e| fail(CONFIG, format!("is not JSON: {e}")))?;
    let plain = [
        ("peft_type", json!("LORA")),
        ("bias", json!("none")),
        ("fan_in_fan_out", json!(false)),
        ("use_rslora", json!(false)),
        ("use_dora", json!(false)),
        ("rank_pattern", json!({})),
        ("alpha_pattern", json!({})),
        ("modules_to_save", json!([])),
        ("layer_replication", json!([])),
    ];
    for (field, expected) in plain {
        match config.get(field) {
            None | Some(Value::Null) => {}
            Some(found) if *found == expected => {}
            Some(found) => return Err(fail(field, format!("is {found}; only {expected} can be read"))),
        }
    }
    let rank = config.get("r").and_then(Value::as_u64).filter(|rank| (1..1 << 20).contains(rank));
    let rank = rank.ok_or_else(|| fail("r", "is missing, or no rank".into()))? as usize;
    let alpha = config.get("lora_alpha").and_then(Value::as_f64).filter(|alpha| alpha.is_finite());
    let alpha = alpha.ok_or_else(|| fail("lora_alpha", "is missing, or no number".into()))?;
    Ok((rank, (alpha / rank as f64) as f32))
}
