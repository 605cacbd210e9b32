//! Context of a layer while it runs: tape, weights, observer, batch.

use std::sync::Arc;

use ballast_model::config::{Mixer, Rope};
use ballast_model::{Batch, Config, Ties};

use super::ops::{self, Gamma, Rotation};
use super::tape::{Param, Tape, Value};
use super::{Backward, Sites, Weights};
use crate::{Error, Result};

/// Configuration and batch of a run.
#[derive(Debug)]
pub struct Setting {
    pub config: Config,
    pub batch: Batch,
    pub ties: Ties,
    pub backward: Backward,
    rotations: Vec<(Rope, Arc<Rotation>)>,
}

impl Setting {
    pub fn new(config: &Config, batch: &Batch, ties: Ties, backward: Backward) -> Result<Setting> {
        let rotations = Vec::new();
        let mut setting = Setting { config: config.clone(), batch: batch.clone(), ties, backward, rotations };
        for layer in &config.layers {
            let ropes = match &layer.mixer {
                Mixer::Linear(_) => vec![],
                Mixer::Softmax(attention) => vec![attention.rope],
                Mixer::Latent(attention) => vec![attention.rope, attention.indexer_rope],
            };
            for rope in ropes {
                if setting.find(&rope).is_none() {
                    setting.rotations.push((rope, Arc::new(Rotation::new(&rope, &batch.positions)?)));
                }
            }
        }
        Ok(setting)
    }

    fn find(&self, rope: &Rope) -> Option<&Arc<Rotation>> {
        self.rotations.iter().find(|(known, _)| known == rope).map(|(_, rotation)| rotation)
    }

    /// Sines and cosines of a rotary embedding of the configuration.
    pub fn rotation(&self, rope: &Rope) -> Result<Arc<Rotation>> {
        let problem =
            || Error::Input(format!("no layer of the configuration uses the rotary embedding {rope:?}"));
        self.find(rope).cloned().ok_or_else(problem)
    }

    pub fn tokens(&self) -> usize {
        self.batch.ids.len()
    }
}

/// One forward through a part of the model.
pub struct LayerRun<'w, 's> {
    pub setting: Arc<Setting>,
    pub tape: Tape<'w>,
    /// Losses of single layers.
    pub indexer_losses: Vec<Value>,
    weights: Weights<'s, 'w>,
    sites: Option<Sites<'s>>,
    /// Prefix of parameter and site names: empty, or `layers.3.`
    prefix: String,
}

impl<'w, 's> LayerRun<'w, 's> {
    pub fn new(
        setting: &Arc<Setting>,
        recording: bool,
        weights: Weights<'s, 'w>,
        sites: Option<Sites<'s>>,
        layer: Option<usize>,
    ) -> LayerRun<'w, 's> {
        let prefix = layer.map_or(String::new(), |layer| format!("layers.{layer}."));
        let (setting, tape) = (setting.clone(), Tape::new(recording));
        LayerRun { setting, tape, indexer_losses: Vec::new(), weights, sites, prefix }
    }

    /// Returns true if this run computes gradients of indexers.
    pub fn trains_indexers(&self) -> bool {
        self.tape.is_recording() && self.setting.backward == Backward::WithIndexers
    }

    /// Returns the parameter of this name, which must have `len` elements.
    pub fn param(&self, name: &str, len: usize) -> Result<Param<'w>> {
        let name = format!("{}{name}", self.prefix);
        let values = (self.weights)(&name);
        if values.len() != len {
            return Err(Error::Input(format!("{name} has {} elements, expected {len}", values.len())));
        }
        Ok(Param::new(name, values))
    }

    /// Applies the linear layer of this name to x [tokens, inputs].
    pub fn linear(&mut self, x: &Value, name: &str, inputs: usize, outputs: usize) -> Result<Value> {
        let weight = self.param(&format!("{name}.weight"), inputs * outputs)?;
        Ok(ops::linear(&mut self.tape, x, &weight, inputs))
    }

    /// Applies a linear layer, with its bias if `bias`.
    pub fn affine(
        &mut self,
        x: &Value,
        name: &str,
        inputs: usize,
        outputs: usize,
        bias: bool,
    ) -> Result<Value> {
        let y = self.linear(x, name, inputs, outputs)?;
        if !bias {
            return Ok(y);
        }
        let bias = self.param(&format!("{name}.bias"), outputs)?;
        Ok(ops::add_bias(&mut self.tape, &y, &bias))
    }

    /// Applies the norm of this name over rows of `width`, in the form of the model's norms.
    pub fn norm(&mut self, x: &Value, name: &str, width: usize) -> Result<Value> {
        self.norm_with(x, name, width, self.setting.config.eps)
    }

    pub fn norm_with(&mut self, x: &Value, name: &str, width: usize, eps: f32) -> Result<Value> {
        let weight = self.param(&format!("{name}.weight"), width)?;
        let one_plus = self.setting.config.one_plus_norms;
        let gamma = if one_plus { Gamma::OnePlus(weight) } else { Gamma::Plain(weight) };
        Ok(ops::rms_norm(&mut self.tape, x, gamma, eps as f64, width))
    }

    /// Returns true if there is an observer.
    pub fn is_watched(&self) -> bool {
        self.sites.is_some()
    }

    /// Shows the observer a tensor [tokens, ...].
    pub fn see(&mut self, name: &str, values: &[f64]) {
        let tokens = self.setting.tokens();
        self.show(name, &[tokens, values.len() / tokens.max(1)], values);
    }

    /// Shows the observer a tensor of this shape.
    pub fn show(&mut self, name: &str, shape: &[usize], values: &[f64]) {
        if let Some(sites) = &mut self.sites {
            sites(&format!("{}{name}", self.prefix), shape, values);
        }
    }
}
