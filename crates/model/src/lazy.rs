//! A checkpoint whose parameters are read when they are wanted, a layer at a time.

use std::path::Path;
use std::sync::Arc;

use ballast_checkpoint::layout::{self, Layout};
use ballast_checkpoint::{Checkpoint, View};
use ballast_contract::Dtype;
use rayon::prelude::*;

use crate::config::Config;
use crate::error::Result;
use crate::load::{canonical, full_name, open, read_f32, sort};
use crate::model::Model;
use crate::params::{Params, Protected, Spec, Specs, Weight};
use crate::precision::Precision;

/// A checkpoint that fits its configuration, with nothing of it in memory yet.
pub struct LazyCheckpoint {
    /// What the model is.
    pub config: Config,
    /// Its parameters without their values.
    pub specs: Specs,
    /// Remarks on the checkpoint for the user.
    pub warnings: Vec<String>,
    /// In the order of the specs.
    views: Vec<View>,
    /// What stands before the names of the specs.
    prefix: String,
}

impl LazyCheckpoint {
    /// Opens a checkpoint in any layout; missing, extra and misshapen tensors are an error that lists them.
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

    /// A parameter's name in the Hugging Face layout.
    pub fn full_name(&self, spec: &Spec) -> String {
        full_name(&self.prefix, spec)
    }

    /// The values of those parameters that are wanted, in f32, all bits; the others are empty.
    pub fn read(&self, wanted: impl Fn(&Spec) -> bool + Sync) -> Result<Params> {
        let one = |(spec, view): (&Spec, &View)| if wanted(spec) { read_f32(view) } else { Ok(Vec::new()) };
        let (weights, protected) = self.views.split_at(self.specs.weights.len());
        let weights: Result<Vec<Weight>> =
            (self.specs.weights.par_iter().zip(weights)).map(|pair| Ok(Weight::F32(one(pair)?))).collect();
        let protected: Result<Vec<Protected>> =
            (self.specs.protected.iter().zip(protected)).map(|pair| Ok(Protected::new(one(pair)?))).collect();
        Ok(Params { weights: weights?, protected: protected?, adapters: Vec::new() })
    }

    /// What the checkpoint stores each protected tensor in.
    pub fn protected_dtypes(&self) -> impl Iterator<Item = (&Spec, Dtype)> {
        let views = &self.views[self.specs.weights.len()..];
        self.specs.protected.iter().zip(views).map(|(spec, view)| (spec, view.dtype))
    }

    /// The model in this precision, with no values: [`Model::hold`] gives it those of the step at hand.
    pub fn model(&self, precision: Precision) -> Result<Model> {
        Model::build(self.config.clone(), precision)
    }
}

impl Model {
    /// Takes these values in the place of all it has, in its own precision: for a [`crate::LayerwiseRun`], which needs those of one
    /// layer at a time.
    pub fn hold(&mut self, values: &Params) {
        self.params = values.clone();
        self.set_precision(self.precision().clone());
    }
}
