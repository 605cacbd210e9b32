//! Saving of a model, and gradients under the names of its checkpoint.
//!
//! Tensors in memory are presented as a checkpoint in this crate's layout; conversion to other layouts and
//! writing are those of every other checkpoint.

use std::path::Path;
use std::sync::Arc;

use ballast_checkpoint::MemoryTensor;
use ballast_checkpoint::convert::{self, ConvertOptions, ConvertReport, config_with_dtype};
use ballast_checkpoint::layout::{self, Form, Layout, LayoutRequest, Naming, Ranks};
use ballast_checkpoint::{Checkpoint, View};
use ballast_contract::Dtype;
use ballast_files::jobs::Observer;
use serde_json::Value;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::load::{Source, canonical, full_name, read_f32};
use crate::model::Model;
use crate::params::{Grads, Spec, Weight};
use crate::precision::Storage;

/// A tensor with its name and shape.
#[derive(Clone, Debug, PartialEq)]
pub struct NamedTensor {
    /// Name in the checkpoint.
    pub name: String,
    /// Shape.
    pub shape: Vec<usize>,
    /// Values.
    pub values: Vec<f32>,
}

/// Options of [`Model::save_with`].
#[derive(Clone, Copy, Debug, Default)]
pub struct SaveOptions<'a> {
    /// config.json to write, which must describe the same model; by default [`Model::config_json`].
    pub config: Option<&'a Value>,
    /// Names and contents of more files to write beside the weights, such as the tokenizer's.
    pub files: &'a [(String, Vec<u8>)],
    /// Safetensors file with all weights under their [`Model::parameter_name`]s, for a model that holds only its
    /// share of them.
    pub weights: Option<&'a Path>,
    /// Replace an existing checkpoint at the destination.
    pub force: bool,
}

impl Model {
    /// Gradients under the names of the checkpoint that the model was loaded from; experts in the given form,
    /// or by default in the checkpoint's.
    pub fn named_grads(&self, grads: &Grads, experts: Option<Form>) -> Result<Vec<NamedTensor>> {
        let tensors = self.specs.all().zip(grads.all()).filter(|(_, gradient)| !gradient.is_empty());
        let memory = tensors.map(|(spec, gradient)| {
            self.memory_tensor(spec, Dtype::F32, bytemuck::cast_slice(gradient).to_vec())
        });
        let source = self.source()?;
        let checkpoint = Arc::new(Checkpoint::in_memory(&source.checkpoint, memory.collect(), &[])?);
        let to =
            Layout { experts: source.layout.experts.and(experts).or(source.layout.experts), ..hf(source) };
        let views: Vec<View> = layout::relayout(&checkpoint, &canonical(&source.layout), &to)?.concat();
        let named = |view: &View| {
            let shape = view.shape.iter().map(|d| *d as usize).collect();
            Ok(NamedTensor { name: view.name.clone(), shape, values: read_f32(view)? })
        };
        let mut all = views.iter().map(named).collect::<Result<Vec<NamedTensor>>>()?;
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }

    /// Name of a parameter in the Hugging Face layout, with split projections and fused experts, as in
    /// memory.
    pub fn parameter_name(&self, spec: &Spec) -> String {
        full_name(self.source.as_ref().map_or("model.", |source| &source.prefix), spec)
    }

    /// config.json of the model: that of its checkpoint, with the current storage type of the weights, and
    /// untied if the checkpoint's embedding and head differ.
    pub fn config_json(&self) -> Result<Value> {
        let mut config = self.source()?.checkpoint.config.clone().unwrap_or_default();
        if Config::parse(&config, Path::new("config.json"))?.tied != self.config.tied {
            config["tie_word_embeddings"] = self.config.tied.into();
            if let Some(text) = config.get_mut("text_config").filter(|text| text.is_object()) {
                text["tie_word_embeddings"] = self.config.tied.into();
            }
        }
        Ok(config_with_dtype(config, self.dtype()))
    }

    /// Paths of config.json keys that are ignored here and not known to be harmless.
    pub fn unknown_config_keys(&self) -> Vec<String> {
        let Ok(source) = self.source() else { return Vec::new() };
        let unknown = |config| Config::unknown_keys(config, &source.checkpoint.config_path()).ok();
        source.checkpoint.config.as_ref().and_then(unknown).unwrap_or_default()
    }

    /// Writes the model atomically, in the layout that it was loaded from and with the tensors that
    /// checkpoint carries beside it; a new model in the layout of transformers. Adapters are not written.
    pub fn save(&self, destination: &Path, force: bool, observer: &dyn Observer) -> Result<ConvertReport> {
        self.save_with(destination, &SaveOptions { force, ..SaveOptions::default() }, observer)
    }

    /// [`Model::save`] with another config.json, or with more files. All of them appear together.
    pub fn save_with(
        &self,
        destination: &Path,
        options: &SaveOptions<'_>,
        observer: &dyn Observer,
    ) -> Result<ConvertReport> {
        let config = options.config.cloned().map_or_else(|| self.config_json(), Ok)?;
        let file = Path::new("config.json");
        if Config::parse(&config, file)? != self.config {
            let problem = "does not describe the model to be saved".into();
            return Err(Error::Config { file: file.into(), field: "config.json".into(), problem });
        }
        let source = self.source()?;
        let held = self.specs.weights.iter().zip(&self.params.weights).filter(|_| options.weights.is_none());
        let weights = held.map(|(spec, weight)| match weight {
            Weight::F32(values) => {
                self.memory_tensor(spec, Dtype::F32, bytemuck::cast_slice(values).to_vec())
            }
            Weight::Bf16(values) => {
                self.memory_tensor(spec, Dtype::Bf16, bytemuck::cast_slice(values).to_vec())
            }
        });
        let protected = self.specs.protected.iter().zip(&self.params.protected).map(|(spec, tensor)| {
            self.memory_tensor(spec, Dtype::F32, bytemuck::cast_slice(tensor.values()).to_vec())
        });
        let carried: Vec<&str> = source.carried.iter().map(|view| view.name.as_str()).collect();
        let memory = weights.chain(protected).collect();
        let mut checkpoint = Checkpoint::in_memory(&source.checkpoint, memory, &carried)?;
        if let Some(file) = options.weights {
            checkpoint.add_tensors_of(file)?;
        }
        checkpoint.config = Some(config);
        let checkpoint = Arc::new(checkpoint);
        let convert_options = ConvertOptions {
            layout: LayoutRequest {
                naming: Some(source.layout.naming),
                projections: source.layout.projections,
                experts: source.layout.experts,
                ranks: Some(source.layout.ranks.tensor),
                expert_ranks: Some(source.layout.ranks.expert),
                zero_centered_gamma: Some(source.layout.zero_centered_gamma),
            },
            force: options.force,
            files: options.files.to_vec(),
            ..ConvertOptions::new(self.precision().policy())
        };
        let plan = convert::plan(&checkpoint, &convert_options)?;
        Ok(convert::execute(&checkpoint, plan, destination, &convert_options, observer)?)
    }

    /// Makes [`Model::save`] write the Hugging Face layout, whatever the model was loaded from.
    pub fn save_as_hf(&mut self) {
        if let Some(source) = &mut self.source {
            source.layout = hf(source);
        }
    }

    fn dtype(&self) -> Dtype {
        match self.precision().params {
            Storage::F32 => Dtype::F32,
            Storage::Bf16 => Dtype::Bf16,
        }
    }

    fn source(&self) -> Result<&Source> {
        self.source.as_ref().ok_or_else(|| Error::Input("the model was not loaded from a checkpoint".into()))
    }

    fn memory_tensor(&self, spec: &Spec, dtype: Dtype, data: Vec<u8>) -> MemoryTensor {
        let shape = spec.shape.iter().map(|d| *d as u64).collect();
        MemoryTensor { name: self.parameter_name(spec), dtype, shape, data }
    }
}

/// Layout of the checkpoint with Hugging Face names.
fn hf(source: &Source) -> Layout {
    Layout { naming: Naming::Hf, ranks: Ranks::ONE, ..source.layout.clone() }
}
