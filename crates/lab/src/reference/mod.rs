//! Reference decoder in f64: a slow, plain second implementation that everything else is compared with.
//!
//! ```text
//! embed -> layer 0, 1, 2, ... -> norm -> logits or loss          loss -> layer_backward ..., 2, 1, 0 -> embed_backward
//! ```
//! It repeats the formulas of the model's layers: products in f64, the delta rule token by token, gradients
//! from a tape that lives for one layer. It uses only three functions of the kernels: the f64 matrix product,
//! the rotary frequencies, and the choice of keys by score. Between layers only the residual stream is kept,
//! plus every layer's input if backward follows, which runs the layer again. It asks only for the weights of
//! the current part, so a model that does not fit in memory can be compared layer by layer.
//!
//! Weights are f32 as stored, or widened to f32, and so are the numbers of the configuration (eps, scales,
//! inverse frequencies). Experts and keys are chosen by f64 scores.

mod layer_run;
mod layers;
mod loss;
mod ops;
mod product;
mod tape;

use std::sync::Arc;

use ballast_kernels::packing::check_cu_seqlens;
use ballast_model::config::{Mixer, PerLayerInputs};
use ballast_model::{Batch, Config, Ties};

use crate::{Error, Result};
use layer_run::{LayerRun, Setting};
use layers::{KeyValues, Links};
use tape::Value;

/// Source of parameters: values by the names of [`ballast_model::params::Spec`] (`embed_tokens.weight`,
/// `layers.0.linear_attn.A_log`, `lm_head.weight`, ...). It may return an empty slice for an unknown name.
pub(crate) type Weights<'a, 'w> = &'a dyn Fn(&str) -> &'w [f32];

/// Observes a named tensor: site, shape, values. Names, order and shapes are those of a
/// [`ballast_model::Probe`] in a forward, without parameters, attention logits, and more than 2^24 indexer
/// scores.
pub(crate) type Sites<'a> = &'a mut dyn FnMut(&str, &[usize], &[f64]);

/// Receives the gradient of a parameter: name, values. A parameter that the loss does not reach has none,
/// such as an indexer's without [`Backward::WithIndexers`].
pub(crate) type Gradients<'a> = &'a mut dyn FnMut(&str, Vec<f64>);

/// Loss whose gradients are computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backward {
    /// No gradients.
    #[default]
    None,
    /// The mean language loss.
    Language,
    /// The mean language loss plus, in every layer with an indexer, the indexer loss (sparse stage, factor
    /// 1).
    WithIndexers,
}

/// Returns true if the indexer scores of a batch are few enough to be shown.
pub(crate) fn shows_scores(batch: &Batch) -> bool {
    batch.tokens().saturating_pow(2) <= 1 << 24
}

/// A run of the reference over a batch.
pub struct Reference {
    setting: Arc<Setting>,
    stage: Stage,
    /// Residual stream [tokens, H]
    x: Arc<Vec<f64>>,
    /// Output of the last norm [tokens, H]
    hidden: Vec<f64>,
    /// Input of each layer, if backward follows
    inputs: Vec<Arc<Vec<f64>>>,
    /// Per-layer inputs [tokens, L, P]
    per_layer_inputs: Vec<f64>,
    /// k and v that other layers share, by layer
    key_values: Vec<Option<[Arc<Vec<f64>>; 2]>>,
    /// Gradients of x, per_layer_inputs and key_values
    dx: Vec<f64>,
    d_per_layer_inputs: Vec<f64>,
    d_key_values: Vec<Option<[Vec<f64>; 2]>>,
}

/// Progress of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Nothing ran yet.
    New,
    /// The input of this layer is computed.
    Before(usize),
    /// The last norm is computed.
    Normed,
    /// The gradient of this layer's input is computed.
    Back(usize),
    /// All gradients are computed.
    Done,
}

impl Reference {
    /// Creates a run over a batch.
    pub fn new(config: &Config, batch: &Batch, ties: Ties, backward: Backward) -> Result<Reference> {
        check_batch(config, batch)?;
        let layers = config.layers.len();
        Ok(Reference {
            setting: Arc::new(Setting::new(config, batch, ties, backward)?),
            stage: Stage::New,
            x: Arc::default(),
            hidden: Vec::new(),
            inputs: Vec::new(),
            per_layer_inputs: Vec::new(),
            key_values: vec![None; layers],
            dx: Vec::new(),
            d_per_layer_inputs: Vec::new(),
            d_key_values: vec![None; layers],
        })
    }

    /// Computes the embedding and the per-layer inputs.
    pub fn embed(&mut self, weights: Weights<'_, '_>, sites: Sites<'_>) -> Result {
        self.expect(Stage::New, "embed")?;
        let mut pass = LayerRun::new(&self.setting, false, weights, Some(sites), None);
        let (x, per_layer_inputs) = embedded(&mut pass)?;
        self.x = x.share();
        self.per_layer_inputs = per_layer_inputs.map_or(Vec::new(), |inputs| inputs.to_vec());
        self.stage = Stage::Before(0);
        Ok(())
    }

    /// Runs a layer forward: 0, 1, 2, ... in order.
    pub fn layer(&mut self, index: usize, weights: Weights<'_, '_>, sites: Sites<'_>) -> Result {
        self.expect(Stage::Before(index), "layer")?;
        self.check_layer(index)?;
        let mut pass = LayerRun::new(&self.setting, false, weights, Some(sites), Some(index));
        let (x, mut links) = self.enter(&mut pass, index, self.x.clone());
        let out = layers::layer(&mut pass, index, &x, &mut links)?;
        if self.is_shared(index) {
            self.key_values[index] = links.key_values.map(|kv| [kv.k.share(), kv.v.share()]);
        }
        let before = std::mem::replace(&mut self.x, out.share());
        if self.keeps() {
            self.inputs.push(before);
        }
        self.stage = Stage::Before(index + 1);
        Ok(())
    }

    /// Computes the last norm.
    pub fn norm(&mut self, weights: Weights<'_, '_>, sites: Sites<'_>) -> Result {
        self.expect(Stage::Before(self.layers()), "norm")?;
        let mut pass = LayerRun::new(&self.setting, false, weights, Some(sites), None);
        let x = pass.tape.leaf(self.x.clone());
        let hidden = pass.norm(&x, "norm", self.setting.config.hidden)?;
        pass.see("norm", &hidden);
        self.hidden = hidden.to_vec();
        self.stage = Stage::Normed;
        Ok(())
    }

    /// Runs a layer backward, the last layer first.
    pub fn layer_backward(
        &mut self,
        index: usize,
        weights: Weights<'_, '_>,
        gradients: Gradients<'_>,
    ) -> Result {
        self.expect(Stage::Back(index + 1), "layer_backward")?;
        let mut pass = LayerRun::new(&self.setting, true, weights, None, Some(index));
        let (x, mut links) = self.enter(&mut pass, index, self.inputs[index].clone());
        let entered = links.clone();
        let out = layers::layer(&mut pass, index, &x, &mut links)?;
        let mut seeds: Vec<(&Value, &[f64])> = vec![(&out, &self.dx)];
        // Gradients from later layers that share this layer's keys and values.
        if let (Some(used), Some([dk, dv])) = (&links.key_values, &self.d_key_values[index]) {
            seeds.extend([(&used.k, &dk[..]), (&used.v, &dv[..])]);
        }
        seeds.extend(pass.indexer_losses.iter().map(|loss| (loss, &[1.0][..])));
        let mut sums = pass.tape.backward(&seeds);
        self.d_key_values[index] = None;
        if let (Some(source), Some(kv)) = (self.source(index), &entered.key_values) {
            let new = [sums.take(&kv.k), sums.take(&kv.v)];
            match &mut self.d_key_values[source] {
                Some(sum) => sum.iter_mut().zip(&new).for_each(|(sum, new)| tape::add(sum, new)),
                none => *none = Some(new),
            }
        }
        if let (Some(shape), Some(input)) = (self.setting.config.per_layer_inputs, &entered.per_layer_input) {
            let all = self.layers() * shape.width;
            self.d_per_layer_inputs.resize(self.per_layer_inputs.len(), 0.0);
            let rows = self.d_per_layer_inputs.chunks_mut(all);
            for (row, new) in rows.zip(sums.take(input).chunks(shape.width)) {
                row[index * shape.width..][..shape.width].copy_from_slice(new);
            }
        }
        self.dx = sums.take(&x);
        self.inputs.pop();
        self.stage = Stage::Back(index);
        sums.into_parameters().into_iter().for_each(|(name, gradient)| gradients(&name, gradient));
        Ok(())
    }

    /// Computes the gradients of the embedding.
    pub fn embed_backward(&mut self, weights: Weights<'_, '_>, gradients: Gradients<'_>) -> Result {
        self.expect(Stage::Back(0), "embed_backward")?;
        let mut pass = LayerRun::new(&self.setting, true, weights, None, None);
        let (x, per_layer_inputs) = embedded(&mut pass)?;
        let mut seeds: Vec<(&Value, &[f64])> = vec![(&x, &self.dx)];
        if let Some(inputs) = &per_layer_inputs {
            seeds.push((inputs, &self.d_per_layer_inputs));
        }
        let sums = pass.tape.backward(&seeds);
        self.stage = Stage::Done;
        sums.into_parameters().into_iter().for_each(|(name, gradient)| gradients(&name, gradient));
        Ok(())
    }

    fn keeps(&self) -> bool {
        self.setting.backward != Backward::None
    }

    fn layers(&self) -> usize {
        self.setting.config.layers.len()
    }

    fn expect(&self, stage: Stage, call: &str) -> Result {
        if self.stage == stage {
            return Ok(());
        }
        Err(Error::Input(format!("{call} was called at stage {:?}, expected {stage:?}", self.stage)))
    }

    fn check_layer(&self, index: usize) -> Result {
        if index < self.layers() {
            return Ok(());
        }
        Err(Error::Input(format!("no layer {index}: the model has {} layers", self.layers())))
    }

    /// Puts the inputs of a layer on its tape.
    fn enter(&self, pass: &mut LayerRun<'_, '_>, index: usize, x: Arc<Vec<f64>>) -> (Value, Links) {
        let x = pass.tape.leaf(x);
        let per_layer_input = self.setting.config.per_layer_inputs.map(|PerLayerInputs { width, .. }| {
            let rows = self.per_layer_inputs.chunks(self.layers() * width);
            let part = rows.flat_map(|row| &row[index * width..][..width]).copied().collect();
            pass.tape.leaf(Arc::new(part))
        });
        let kv = self.source(index).and_then(|source| self.key_values[source].clone());
        let key_values = kv.map(|[k, v]| KeyValues { k: pass.tape.leaf(k), v: pass.tape.leaf(v) });
        (x, Links { per_layer_input, key_values })
    }

    /// Layer whose keys and values a layer shares.
    fn source(&self, index: usize) -> Option<usize> {
        match &self.setting.config.layers[index].mixer {
            Mixer::Softmax(attention) => attention.shared_from,
            _ => None,
        }
    }

    fn is_shared(&self, index: usize) -> bool {
        (0..self.layers()).any(|layer| self.source(layer) == Some(index))
    }
}

/// Embeddings [tokens, H] and, if the model has them, per-layer inputs [tokens, L, P].
fn embedded(pass: &mut LayerRun<'_, '_>) -> Result<(Value, Option<Value>)> {
    let setting = pass.setting.clone();
    let config = &setting.config;
    let table = pass.param("embed_tokens.weight", config.vocabulary * config.hidden)?;
    let (ids, factor) = (&setting.batch.ids, config.embedding_scale as f64);
    let x = ops::embedding(&mut pass.tape, &table, ids, config.padding, factor, config.hidden);
    pass.see("embed", &x);
    let inputs =
        config.per_layer_inputs.map(|shape| layers::per_layer_inputs(pass, &x, shape)).transpose()?;
    Ok((x, inputs))
}

fn check_batch(config: &Config, batch: &Batch) -> Result {
    batch.check(config.vocabulary)?;
    if let Some(inputs) = config.per_layer_inputs {
        Batch { targets: Vec::new(), ..batch.clone() }.check(inputs.vocabulary)?;
    }
    let tokens = check_cu_seqlens(&batch.cu_seqlens).map_err(ballast_model::Error::from)?;
    let lengths = [batch.ids.len(), batch.targets.len(), batch.positions.len()];
    if lengths != [tokens; 3] {
        return Err(Error::Input(format!(
            "ids, targets and positions have {lengths:?} entries for {tokens} tokens"
        )));
    }
    Ok(())
}
