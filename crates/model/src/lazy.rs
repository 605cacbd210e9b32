//! Lazy checkpoints: parameters are read on demand, for example one layer at a time.

use std::path::Path;
use std::sync::Arc;

use ballast_checkpoint::layout::{self, Layout};
use ballast_checkpoint::{Checkpoint, View};
use ballast_contract::Dtype;
use ballast_files::encoding::text_without_mark;
use ballast_files::look_at;
use ballast_files::regular::read_regular_text;
use rayon::prelude::*;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::load::{canonical, full_name, open, read_f32, sort};
use crate::model::Model;
use crate::params::{Params, Protected, Spec, Specs, Weight};
use crate::precision::Precision;

/// A checkpoint whose tensors match its configuration; no values are in memory yet.
pub struct LazyCheckpoint {
    /// Model configuration.
    pub config: Config,
    /// Names and shapes of the parameters.
    pub specs: Specs,
    /// Warnings about the checkpoint, for the user.
    pub warnings: Vec<String>,
    /// Views of the parameters, in the order of the specs.
    views: Vec<View>,
    /// Prefix of the specs' names in the Hugging Face layout.
    prefix: String,
}

impl LazyCheckpoint {
    /// Opens a checkpoint in any layout. The error lists all missing, extra and misshapen tensors.
    pub fn open(path: &Path) -> Result<LazyCheckpoint> {
        let (checkpoint, config, warnings) = open(path)?;
        LazyCheckpoint::new(checkpoint, config, warnings)
    }

    fn new(checkpoint: Arc<Checkpoint>, config: Config, warnings: Vec<String>) -> Result<LazyCheckpoint> {
        let model = Model::build(config, Precision::f32())?;
        let layout = Layout::detect(&checkpoint);
        let views: Vec<View> = layout::relayout(&checkpoint, &layout, &canonical(&layout))?.concat();
        let (views, source) = sort(&model, views, checkpoint, layout)?;
        Ok(LazyCheckpoint {
            config: model.config,
            specs: model.specs,
            warnings,
            views,
            prefix: source.prefix,
        })
    }

    /// Returns a parameter's name in the Hugging Face layout.
    pub fn full_name(&self, spec: &Spec) -> String {
        full_name(&self.prefix, spec)
    }

    /// Reads the parameters for which `wanted` returns true, as exact f32 values; the others stay empty.
    pub fn read(&self, wanted: impl Fn(&Spec) -> bool + Sync) -> Result<Params> {
        let one = |(spec, view): (&Spec, &View)| if wanted(spec) { read_f32(view) } else { Ok(Vec::new()) };
        let (weights, protected) = self.views.split_at(self.specs.weights.len());
        let weights: Result<Vec<Weight>> =
            (self.specs.weights.par_iter().zip(weights)).map(|pair| Ok(Weight::F32(one(pair)?))).collect();
        let protected: Result<Vec<Protected>> =
            (self.specs.protected.iter().zip(protected)).map(|pair| Ok(Protected::new(one(pair)?))).collect();
        Ok(Params { weights: weights?, protected: protected?, adapters: Vec::new() })
    }

    /// Returns the type in which the checkpoint stores each protected tensor.
    pub fn protected_dtypes(&self) -> impl Iterator<Item = (&Spec, Dtype)> {
        let views = &self.views[self.specs.weights.len()..];
        self.specs.protected.iter().zip(views).map(|(spec, view)| (spec, view.dtype))
    }

    /// Builds the model in this precision without values; [`Model::hold`] sets those that the next step
    /// needs.
    pub fn model(&self, precision: Precision) -> Result<Model> {
        Model::build(self.config.clone(), precision)
    }
}

impl Model {
    /// Builds a model without values, for plans.
    pub fn outline(config: Config) -> Result<Model> {
        Model::build(config, Precision::f32())
    }

    /// Builds the model of a checkpoint without values, for plans. A folder with a config.json alone is enough.
    pub fn outline_at(path: &Path) -> Result<Model> {
        if let Some(config) = config_alone(path)? {
            return Model::outline(config);
        }
        let (checkpoint, config, warnings) = open(path)?;
        let mut model = Model::outline(config)?;
        let layout = Layout::detect(&checkpoint);
        let views: Vec<View> = layout::relayout(&checkpoint, &layout, &canonical(&layout))?.concat();
        let (_, source) = sort(&model, views, checkpoint, layout)?;
        (model.source, model.warnings) = (Some(source), warnings);
        Ok(model)
    }

    /// Replaces all parameters by these, converted to the model's precision. For a [`crate::LayerwiseRun`],
    /// which needs the parameters of one layer at a time.
    pub fn hold(&mut self, values: &Params) {
        self.params = values.clone();
        self.set_precision(self.precision().clone());
    }
}

/// The configuration of a folder that has a config.json, and neither tensors nor folders.
fn config_alone(folder: &Path) -> Result<Option<Config>> {
    let file = folder.join("config.json");
    let (Ok(text), Ok(entries)) = (read_regular_text(&file), std::fs::read_dir(folder)) else {
        return Ok(None);
    };
    // An entry that cannot be listed or looked at may hold tensors; the checkpoint is opened, which names it.
    let holds_tensors = |entry: std::io::Result<std::fs::DirEntry>| {
        let path = entry.map(|entry| entry.path()).unwrap_or_default();
        let is_tensors = path.extension().is_some_and(|end| end == "safetensors");
        is_tensors || !look_at(&path).is_ok_and(|found| found.is_some_and(|found| !found.is_dir()))
    };
    if entries.into_iter().any(holds_tensors) {
        return Ok(None);
    }
    let json = serde_json::from_str(text_without_mark(&text)).map_err(|error| Error::Config {
        file: file.clone(),
        field: "config.json".into(),
        problem: format!("is not JSON: {error}"),
    })?;
    Ok(Some(Config::parse(&json, &file)?))
}
