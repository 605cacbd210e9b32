//! Engines of a run: the f64 reference, a model in some precision, or the files of a dump. All show their
//! tensors in f64.
//!
//! Each visit of a [pass](ballast_model::pass) is one call, with the parameters of its [`Part`] only.

use std::collections::HashMap;
use std::ops::Range;

use ballast_model::params::{Grads, Params, Part, Specs, Weight};
use ballast_model::{
    Batch, Config, IndexerLoss, IndexerStage, LayerwiseRun, LazyCheckpoint, LossOptions, Model, Precision,
    Probe, Recompute, Ties,
};

use crate::dump::Dump;
use crate::error::Result;
use crate::reference::{Backward, Reference, shows_scores};

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
    run: LayerwiseRun<'b>,
    /// Shows indexer scores.
    scores: bool,
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
        let recompute = (backward != Backward::None).then_some(Recompute::Full);
        let indexer = sparse_loss(&model.config).filter(|_| backward == Backward::WithIndexers);
        let options = LossOptions { indexer, ..LossOptions::default() };
        let run = LayerwiseRun::new(&model, batch, recompute, options)?;
        Ok(Engine::Model(Box::new(Running { model, run, scores: shows_scores(batch) })))
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
                let Running { model, run, scores } = &mut **running;
                model.hold(values);
                sites.scores = *scores;
                run.forward(model, part, Some(&mut sites))?;
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
                Ok(widen(&running.run.logits(&running.model, rows, None)?))
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
                let Running { model, run, .. } = &mut **running;
                model.hold(values);
                let tied = checkpoint.config.tied;
                let mut grads = model.grads_of(|spec| spec.is_read_by(part, tied));
                run.backward(model, &mut grads, part, None)?;
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
