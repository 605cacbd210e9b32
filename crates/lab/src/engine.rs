//! Engines of a run: the f64 reference, a model in some precision, or the files of a dump. All show their
//! tensors in f64.
//!
//! Each step has the parameters of its [`Part`] only.

use std::collections::HashMap;
use std::ops::Range;

use ballast_model::params::{Grads, Params, Spec, Specs, Weight};
use ballast_model::{
    Batch, Config, IndexerLoss, IndexerStage, LayerwiseRun, LazyCheckpoint, LossOptions, Model, Precision,
    Probe, Recompute, Ties,
};

use crate::dump::Dump;
use crate::error::Result;
use crate::reference::{Backward, Reference, shows_scores};

/// A part of the model, with the parameters that one step needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Everything before the layers.
    Embedding,
    /// One layer.
    Layer(usize),
    /// The last norm and the output head.
    Head,
}

impl Part {
    /// Returns true if a parameter belongs to this part; a tied head is the embedding.
    pub fn has(self, spec: &Spec, tied: bool) -> bool {
        let layer = spec.name.strip_prefix("layers.").and_then(|rest| rest.split_once('.')?.0.parse().ok());
        let is_head = spec.name == "norm.weight" || spec.name.starts_with("lm_head.");
        match self {
            Part::Layer(index) => layer == Some(index),
            Part::Embedding => layer.is_none() && !is_head,
            Part::Head => is_head || tied && spec.name == "embed_tokens.weight",
        }
    }
}

/// The tensor of a named site in a run.
#[derive(Clone, Debug, PartialEq)]
pub struct SiteTensor {
    /// Name, such as `layers.3.linear_attn.g`.
    pub name: String,
    /// Storage type.
    pub dtype: &'static str,
    /// Its values.
    pub values: Vec<f64>,
}

/// Name of a parameter and its gradient.
pub type Gradient = (String, Vec<f64>);

/// Engine of a run.
pub enum Engine<'b> {
    /// The f64 reference.
    Exact(Box<Reference>),
    /// A model in some precision.
    Model(Box<Running<'b>>),
    /// Tensors read from files.
    Dump(Box<Dump>),
}

/// A model in progress.
pub struct Running<'b> {
    model: Model,
    pass: Option<LayerwiseRun<'b>>,
    batch: &'b Batch,
    backward: Backward,
}

impl<'b> Engine<'b> {
    /// Creates the f64 reference.
    pub fn exact(
        checkpoint: &LazyCheckpoint,
        batch: &Batch,
        ties: Ties,
        backward: Backward,
    ) -> Result<Engine<'b>> {
        Ok(Engine::Exact(Box::new(Reference::new(&checkpoint.config, batch, ties, backward)?)))
    }

    /// Creates a model in this precision.
    pub fn model(
        checkpoint: &LazyCheckpoint,
        batch: &'b Batch,
        ties: Ties,
        precision: Precision,
        backward: Backward,
    ) -> Result<Engine<'b>> {
        let mut model = checkpoint.model(precision)?;
        model.set_ties(ties);
        Ok(Engine::Model(Box::new(Running { model, pass: None, batch, backward })))
    }

    /// Runs one part forward: the embedding, then each layer, then the last norm.
    pub fn forward(
        &mut self,
        part: Part,
        checkpoint: &LazyCheckpoint,
        values: &Params,
    ) -> Result<Vec<SiteTensor>> {
        let mut sites = Sites::default();
        match self {
            Engine::Dump(dump) => return dump.sites(part),
            Engine::Exact(reference) => {
                let (weights, mut see) = (by_name(&checkpoint.specs, values), sites.shown());
                match part {
                    Part::Embedding => reference.embed(&weights, &mut see),
                    Part::Layer(index) => reference.layer(index, &weights, &mut see),
                    Part::Head => reference.norm(&weights, &mut see),
                }?;
            }
            Engine::Model(running) => {
                running.model.hold(values);
                sites.scores = shows_scores(running.batch);
                running.forward(part, &mut sites)?;
            }
        }
        Ok(sites.seen)
    }

    /// Returns true if the engine has logits.
    pub fn has_logits(&self) -> bool {
        !matches!(self, Engine::Dump(dump) if !dump.has_logits())
    }

    /// Returns logits [rows, V] after all parts ran forward; `values` are the head's.
    pub fn logits(
        &mut self,
        rows: Range<usize>,
        checkpoint: &LazyCheckpoint,
        values: &Params,
    ) -> Result<Vec<f64>> {
        match self {
            Engine::Dump(dump) => dump.logits(rows),
            Engine::Exact(reference) => reference.logits(rows, &by_name(&checkpoint.specs, values)),
            Engine::Model(running) => {
                running.model.hold(values);
                let (model, pass) = running.begun();
                Ok(widen(&pass.logits(model, rows)?))
            }
        }
    }

    /// Runs one part backward: the head first, the embedding last.
    pub fn backward(
        &mut self,
        part: Part,
        checkpoint: &LazyCheckpoint,
        values: &Params,
    ) -> Result<Vec<Gradient>> {
        let mut gradients = Vec::new();
        match self {
            Engine::Dump(dump) => return dump.gradients(part, checkpoint),
            Engine::Exact(reference) => {
                let weights = by_name(&checkpoint.specs, values);
                let mut take = |name: &str, values: Vec<f64>| gradients.push((name.to_string(), values));
                match part {
                    Part::Head => reference.loss(&weights, Some(&mut take)).map(drop),
                    Part::Layer(index) => reference.layer_backward(index, &weights, &mut take),
                    Part::Embedding => reference.embed_backward(&weights, &mut take),
                }?;
            }
            Engine::Model(running) => {
                running.model.hold(values);
                let tied = checkpoint.config.tied;
                let mut grads = running.model.grads_of(|spec| part.has(spec, tied));
                running.backward(part, &mut grads)?;
                gradients = named(&checkpoint.specs, grads);
            }
        }
        Ok(gradients)
    }

    /// Drops the parameters of the last step, so that only one run holds any at a time.
    pub fn release(&mut self) {
        if let Engine::Model(running) = self {
            running.model.params = Params::default();
        }
    }

    /// Returns the run's values of a protected tensor of the current part; `values` are the checkpoint's.
    pub fn protected(&self, name: &str, checkpoint: &LazyCheckpoint, values: &Params) -> Option<Vec<f64>> {
        let index = checkpoint.specs.protected.iter().position(|spec| spec.name == name)?;
        Some(widen(match self {
            Engine::Dump(_) => return None,
            Engine::Exact(_) => values.protected()[index].values(),
            Engine::Model(running) => running.model.params.protected()[index].values(),
        }))
    }
}

impl<'b> Running<'b> {
    fn begun(&mut self) -> (&Model, &mut LayerwiseRun<'b>) {
        (&self.model, self.pass.as_mut().expect("the embedding comes first"))
    }

    fn forward(&mut self, part: Part, sites: &mut Sites) -> Result {
        match part {
            Part::Embedding => {
                let recompute = (self.backward != Backward::None).then_some(Recompute::Full);
                let with_indexers = self.backward == Backward::WithIndexers;
                let indexer = sparse_loss(&self.model.config).filter(|_| with_indexers);
                let options = LossOptions { indexer, ..LossOptions::default() };
                self.pass =
                    Some(LayerwiseRun::begin(&self.model, self.batch, recompute, options, Some(sites))?);
            }
            Part::Layer(index) => {
                let (model, pass) = self.begun();
                pass.forward(model, index, Some(sites))?;
            }
            Part::Head => {
                let (model, pass) = self.begun();
                pass.norm(model, sites)?;
            }
        }
        Ok(())
    }

    fn backward(&mut self, part: Part, grads: &mut Grads) -> Result {
        let (model, pass) = self.begun();
        match part {
            Part::Head => pass.loss_backward(model, grads, None).map(drop)?,
            Part::Layer(index) => pass.backward(model, grads, index, None)?,
            Part::Embedding => {
                let pass = self.pass.take().expect("begun above");
                pass.embedding_backward(&self.model, grads, None)?;
            }
        }
        Ok(())
    }
}

/// Indexer loss of the lab (sparse stage, scale 1); `None` for a model without indexers.
pub fn sparse_loss(config: &Config) -> Option<IndexerLoss> {
    config.has_indexer().then_some(IndexerLoss { scale: 1.0, stage: IndexerStage::Sparse })
}

/// Probe that collects tensors; parameters, attention logits and indexer scores of long inputs are left out.
#[derive(Default)]
struct Sites {
    seen: Vec<SiteTensor>,
    /// Collects indexer scores.
    scores: bool,
}

impl Sites {
    fn shown(&mut self) -> impl FnMut(&str, &[usize], &[f64]) + '_ {
        |name, _, values| {
            self.seen.push(SiteTensor { name: name.into(), dtype: "f64", values: values.to_vec() })
        }
    }
}

impl Probe for Sites {
    fn wants(&self, site: &str) -> bool {
        let large = site.ends_with("self_attn.logits") || !self.scores && site.ends_with("indexer.scores");
        !site.starts_with("param.") && !site.starts_with("d.") && !large
    }

    fn see(&mut self, site: &str, dtype: &'static str, _: &[usize], values: &[f32]) {
        self.seen.push(SiteTensor { name: site.into(), dtype, values: widen(values) });
    }
}

fn widen(values: &[f32]) -> Vec<f64> {
    values.iter().map(|x| *x as f64).collect()
}

/// Looks up the values of a part by name.
fn by_name<'v>(specs: &'v Specs, values: &'v Params) -> impl Fn(&str) -> &'v [f32] + 'v {
    let weights = specs.weights.iter().zip(values.weights()).map(|(spec, weight)| match weight {
        Weight::F32(values) => (spec.name.as_str(), &values[..]),
        Weight::Bf16(_) => unreachable!("stored parameters are read in f32"),
    });
    let protected =
        specs.protected.iter().zip(values.protected()).map(|(s, p)| (s.name.as_str(), p.values()));
    let all: HashMap<&str, &[f32]> = weights.chain(protected).collect();
    move |name| all.get(name).copied().unwrap_or(&[])
}

fn named(specs: &Specs, grads: Grads) -> Vec<Gradient> {
    let all = specs.all().zip(grads.all());
    all.filter(|(_, gradient)| !gradient.is_empty()).map(|(s, g)| (s.name.clone(), widen(g))).collect()
}
