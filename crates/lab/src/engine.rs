//! What carries a run, step by step: the f64 reference, or a model in some precision. Both show their tensors in f64.
//!
//! A step has the parameters of its part and no others: [`Part`].

use std::collections::HashMap;
use std::ops::Range;

use ballast_model::params::{Grads, Params, Spec, Specs, Weight};
use ballast_model::{Batch, Model, Pass, Precision, Probe, Recompute, Stored, Ties};

use crate::dump::Dump;
use crate::error::Result;
use crate::reference::Reference;

/// Which parameters a step needs.
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
    /// Whether a parameter belongs here; a tied head is the embedding.
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

/// A tensor of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Site {
    /// Such as `layers.3.linear_attn.g`.
    pub name: String,
    /// What it is stored in.
    pub dtype: &'static str,
    /// Its values.
    pub values: Vec<f64>,
}

/// The largest number of indexer scores that are looked at.
pub const MOST_SCORES: usize = 1 << 24;

/// A gradient by its parameter's name.
pub type Gradient = (String, Vec<f64>);

/// What carries a run.
pub enum Engine<'b> {
    /// f64.
    Exact(Box<Reference>),
    /// A model.
    Model(Box<Running<'b>>),
    /// Nothing: its tensors are read from files.
    Dump(Box<Dump>),
}

/// A model on its way.
pub struct Running<'b> {
    model: Model,
    pass: Option<Pass<'b>>,
    batch: &'b Batch,
    backward: bool,
}

impl<'b> Engine<'b> {
    /// The reference in f64; `backward`: whether gradients will be wanted.
    pub fn exact(stored: &Stored, batch: &Batch, backward: bool) -> Result<Engine<'b>> {
        Ok(Engine::Exact(Box::new(Reference::new(&stored.config, batch, Ties::Earliest, backward)?)))
    }

    /// A model in this precision.
    pub fn model(
        stored: &Stored,
        batch: &'b Batch,
        precision: Precision,
        backward: bool,
    ) -> Result<Engine<'b>> {
        let model = stored.model(precision)?;
        Ok(Engine::Model(Box::new(Running { model, pass: None, batch, backward })))
    }

    /// Embedding.
    pub fn begin(&mut self, specs: &Specs, values: &Params) -> Result<Vec<Site>> {
        let mut sites = Sites::default();
        match self {
            Engine::Dump(dump) => return dump.sites(Part::Embedding),
            Engine::Exact(reference) => reference.embed(&by_name(specs, values), &mut sites.shown())?,
            Engine::Model(running) => {
                running.model.hold(values);
                let recompute = running.backward.then_some(Recompute::Full);
                running.pass = Some(Pass::begin(&running.model, running.batch, recompute, Some(&mut sites))?);
            }
        }
        Ok(sites.seen)
    }

    /// Layer `index`.
    pub fn layer(&mut self, index: usize, specs: &Specs, values: &Params) -> Result<Vec<Site>> {
        let mut sites = Sites::default();
        match self {
            Engine::Dump(dump) => return dump.sites(Part::Layer(index)),
            Engine::Exact(reference) => {
                reference.layer(index, &by_name(specs, values), &mut sites.shown())?
            }
            Engine::Model(running) => {
                running.model.hold(values);
                let Running { model, pass, batch, .. } = &mut **running;
                sites.scores = batch.tokens() * batch.tokens() <= MOST_SCORES;
                pass.as_mut().expect("it has begun").forward(model, index, Some(&mut sites))?;
            }
        }
        Ok(sites.seen)
    }

    /// Whether it has logits to show.
    pub fn has_logits(&self) -> bool {
        !matches!(self, Engine::Dump(dump) if !dump.has_logits())
    }

    /// The last norm; `values` are the head's, which [`Engine::logits`] uses too.
    pub fn norm(&mut self, specs: &Specs, values: &Params) -> Result<Vec<Site>> {
        let mut sites = Sites::default();
        match self {
            Engine::Dump(dump) => return dump.sites(Part::Head),
            Engine::Exact(reference) => reference.norm(&by_name(specs, values), &mut sites.shown())?,
            Engine::Model(running) => {
                running.model.hold(values);
                let Running { model, pass, .. } = &mut **running;
                pass.as_mut().expect("it has begun").logits(model, 0..0, Some(&mut sites))?;
                sites.seen.retain(|site| site.name == "norm");
            }
        }
        Ok(sites.seen)
    }

    /// Logits [rows, V].
    pub fn logits(&mut self, rows: Range<usize>, specs: &Specs, values: &Params) -> Result<Vec<f64>> {
        match self {
            Engine::Dump(dump) => dump.logits(rows),
            Engine::Exact(reference) => reference.logits(rows, &by_name(specs, values)),
            Engine::Model(running) => {
                running.model.hold(values);
                let Running { model, pass, .. } = &mut **running;
                let logits = pass.as_mut().expect("it has begun").logits(model, rows, None)?;
                Ok(widen(&logits))
            }
        }
    }

    /// Lets the parameters of the last step go, so that only one run has any at a time.
    pub fn release(&mut self) {
        if let Engine::Model(running) = self {
            running.model.params = Params::default();
        }
    }

    /// What the run uses for a protected tensor of the part that it holds; `values` are the checkpoint's.
    pub fn protected(&self, name: &str, specs: &Specs, values: &Params) -> Option<Vec<f64>> {
        let index = specs.protected.iter().position(|spec| spec.name == name)?;
        Some(widen(match self {
            Engine::Dump(_) => return None,
            Engine::Exact(_) => values.protected()[index].values(),
            Engine::Model(running) => running.model.params.protected()[index].values(),
        }))
    }

    /// Loss, and back through head and last norm.
    pub fn turn(&mut self, specs: &Specs, values: &Params) -> Result<Vec<Gradient>> {
        let mut gradients = Vec::new();
        match self {
            Engine::Dump(dump) => return dump.gradients(Part::Head, &names(specs, Part::Head)),
            Engine::Exact(reference) => {
                let mut take = |name: &str, values: Vec<f64>| gradients.push((name.to_string(), values));
                reference.loss(&by_name(specs, values), Some(&mut take))?;
            }
            Engine::Model(running) => {
                let mut grads = running.grads(values, Part::Head);
                let Running { model, pass, .. } = &mut **running;
                pass.as_mut().expect("it has begun").turn(model, &mut grads, None)?;
                gradients = named(&model.specs, grads);
            }
        }
        Ok(gradients)
    }

    /// Back through layer `index`.
    pub fn layer_backward(&mut self, index: usize, specs: &Specs, values: &Params) -> Result<Vec<Gradient>> {
        let mut gradients = Vec::new();
        match self {
            Engine::Dump(dump) => {
                return dump.gradients(Part::Layer(index), &names(specs, Part::Layer(index)));
            }
            Engine::Exact(reference) => {
                let mut take = |name: &str, values: Vec<f64>| gradients.push((name.to_string(), values));
                reference.layer_backward(index, &by_name(specs, values), &mut take)?;
            }
            Engine::Model(running) => {
                let mut grads = running.grads(values, Part::Layer(index));
                let Running { model, pass, .. } = &mut **running;
                pass.as_mut().expect("it has begun").backward(model, &mut grads, index, None)?;
                gradients = named(&model.specs, grads);
            }
        }
        Ok(gradients)
    }

    /// Back to the embedding.
    pub fn arrive(&mut self, specs: &Specs, values: &Params) -> Result<Vec<Gradient>> {
        let mut gradients = Vec::new();
        match self {
            Engine::Dump(dump) => return dump.gradients(Part::Embedding, &names(specs, Part::Embedding)),
            Engine::Exact(reference) => {
                let mut take = |name: &str, values: Vec<f64>| gradients.push((name.to_string(), values));
                reference.embed_backward(&by_name(specs, values), &mut take)?;
            }
            Engine::Model(running) => {
                let mut grads = running.grads(values, Part::Embedding);
                let Running { model, pass, .. } = &mut **running;
                pass.take().expect("it has begun").arrive(model, &mut grads, None)?;
                gradients = named(&model.specs, grads);
            }
        }
        Ok(gradients)
    }
}

impl Running<'_> {
    /// Holds a part's values; zero gradients for it.
    fn grads(&mut self, values: &Params, part: Part) -> Grads {
        self.model.hold(values);
        let tied = self.model.config.tied;
        self.model.grads_of(|spec| part.has(spec, tied))
    }
}

/// The names of a part's parameters, a tied head's among them.
fn names(specs: &Specs, part: Part) -> Vec<&str> {
    specs.all().filter(|spec| part.has(spec, false)).map(|spec| spec.name.as_str()).collect()
}

/// Keeps what is shown; parameters, attention logits and scores of long inputs are left out.
#[derive(Default)]
struct Sites {
    seen: Vec<Site>,
    /// Whether the indexer's scores are few enough.
    scores: bool,
}

impl Sites {
    fn shown(&mut self) -> impl FnMut(&str, &[usize], &[f64]) + '_ {
        |name, _, values| self.seen.push(Site { name: name.into(), dtype: "f64", values: values.to_vec() })
    }
}

impl Probe for Sites {
    fn wants(&self, site: &str) -> bool {
        let large = site.ends_with("self_attn.logits") || !self.scores && site.ends_with("indexer.scores");
        !site.starts_with("param.") && !site.starts_with("d.") && !large
    }

    fn see(&mut self, site: &str, dtype: &'static str, _: &[usize], values: &[f32]) {
        self.seen.push(Site { name: site.into(), dtype, values: widen(values) });
    }
}

fn widen(values: &[f32]) -> Vec<f64> {
    values.iter().map(|x| *x as f64).collect()
}

/// The values of a part by their names.
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
    let all = specs.all().zip(grads.weights.iter().chain(&grads.protected));
    all.filter(|(_, gradient)| !gradient.is_empty()).map(|(s, g)| (s.name.clone(), widen(g))).collect()
}
