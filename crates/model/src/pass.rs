//! Passes: the order in which forward and backward visit the parts of a model, and the hooks around a visit.
//!
//! ```text
//! forward            embedding, layer 0, 1, ..., n-1, head
//! backward           head, layer n-1, ..., 1, 0, embedding
//! forward_backward   forward without its last visit, then backward: the backward of the head computes the
//!                    loss too, some tokens at a time, so that the logits of all tokens never exist
//!
//! a visit            hooks.before     the weights that it reads must be in the model;
//!                                     those of the next visit may be in flight
//!                    the part runs    its tensors are shown to the probe
//!                    hooks.after      its weights are no longer needed
//!                    hooks.complete   the gradients of its parameters are final, bucket by bucket (backward)
//! ```
//! This is the only place with that order. A model that is whole in memory has no hooks (`&Model`); a run
//! with divided weights gathers them in `before` and drops them in `after`, and sends gradients in
//! `complete`, while backward continues. A comparison of several runs in lockstep takes the visits one by
//! one, each as a step of a [`LayerwiseRun`]; plans of memory and time count along the same visits.

use ballast_kernels::linear_cross_entropy::Loss;

use crate::batch::Batch;
use crate::error::{Error, Result};
use crate::layerwise::LayerwiseRun;
use crate::model::{LossOptions, Model, Recompute, StepLoss};
use crate::params::{Bucket, Grads, Part};
use crate::probe::Probe;

/// Direction of a visit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Direction {
    Forward,
    Backward,
}

/// One part of a model in one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Visit {
    /// The part.
    pub part: Part,
    /// The direction.
    pub direction: Direction,
}

impl Visit {
    /// Visits of a forward through this number of layers.
    pub fn forward(layers: usize) -> impl Iterator<Item = Visit> {
        Part::all(layers).map(|part| Visit { part, direction: Direction::Forward })
    }

    /// Visits of a backward, after any forward.
    pub fn backward(layers: usize) -> impl Iterator<Item = Visit> {
        Part::all(layers).rev().map(|part| Visit { part, direction: Direction::Backward })
    }

    /// Visits of a forward and backward.
    pub fn forward_backward(layers: usize) -> impl Iterator<Item = Visit> {
        let forward = |part| Visit { part, direction: Direction::Forward };
        Part::before_head(layers).map(forward).chain(Visit::backward(layers))
    }

    /// Returns the parts whose weights the visit reads: a tied head reads those of the embedding.
    pub fn reads(self, tied: bool) -> impl Iterator<Item = Part> {
        let embedding = (tied && self.part == Part::Head).then_some(Part::Embedding);
        embedding.into_iter().chain([self.part])
    }

    /// Returns the part of the next visit, to gather its weights during this one. The head, most often the
    /// largest part, is not gathered ahead.
    pub fn next(self, layers: usize) -> Option<Part> {
        use Direction::{Backward, Forward};
        match (self.direction, self.part) {
            (Forward, Part::Embedding) => (layers > 0).then_some(Part::Layer(0)),
            (Forward, Part::Layer(index)) => (index + 1 < layers).then_some(Part::Layer(index + 1)),
            (Backward, Part::Head) => layers.checked_sub(1).map(Part::Layer),
            (Backward, Part::Layer(0)) => Some(Part::Embedding),
            (Backward, Part::Layer(index)) => Some(Part::Layer(index - 1)),
            (Forward, Part::Head) | (Backward, Part::Embedding) => None,
        }
    }

    /// Returns the parts that the visit reads, each with the part whose weights can be gathered during its use: the
    /// other one that the visit reads, or [`Visit::next`].
    pub fn fetches(self, layers: usize, tied: bool) -> impl Iterator<Item = (Part, Option<Part>)> {
        let others = self.reads(tied).skip(1).map(Some).chain([self.next(layers)]);
        self.reads(tied).zip(others)
    }
}

/// Hooks of a pass, by the holder of the model. Each does nothing by default.
pub trait Hooks {
    /// Error of the hooks.
    type Error: From<Error>;

    /// The model. Between `before` and `after` it has the weights that the visit reads; its configuration never
    /// changes.
    fn model(&self) -> &Model;

    /// Runs before a visit.
    fn before(&mut self, _visit: Visit) -> Result<(), Self::Error> {
        Ok(())
    }

    /// Runs after a visit.
    fn after(&mut self, _visit: Visit) -> Result<(), Self::Error> {
        Ok(())
    }

    /// Receives every bucket of gradients that a visit has made final.
    fn complete(&mut self, _bucket: Bucket<'_>) {}
}

/// A model that is whole in memory.
impl Hooks for &Model {
    type Error = Error;

    fn model(&self) -> &Model {
        self
    }
}

/// Runs `part` at each visit, with the hooks around it.
fn drive<H: Hooks>(
    hooks: &mut H,
    visits: impl Iterator<Item = Visit>,
    grads: &mut Grads,
    mut part: impl FnMut(&Model, &mut Grads, Visit) -> Result,
) -> Result<(), H::Error> {
    for visit in visits {
        hooks.before(visit)?;
        part(hooks.model(), grads, visit)?;
        hooks.after(visit)?;
        if visit.direction == Direction::Backward {
            grads.finish(visit.part, &mut |bucket| hooks.complete(bucket));
        }
    }
    Ok(())
}

/// Runs forward and backward. Returns the losses and adds to `grads` the gradients of the language loss's sum
/// times its scale, of the indexers' losses and of the routers' loss.
pub fn forward_backward<H: Hooks>(
    hooks: &mut H,
    grads: &mut Grads,
    batch: &Batch,
    options: &LossOptions,
    recompute: Recompute,
    mut probe: Option<&mut dyn Probe>,
) -> Result<StepLoss, H::Error> {
    let model = hooks.model();
    let visits = Visit::forward_backward(model.config.layers.len());
    let mut run = LayerwiseRun::new(model, batch, Some(recompute), *options)?;
    drive(hooks, visits, grads, |model, grads, visit| match visit.direction {
        Direction::Forward => run.forward(model, visit.part, reborrow(&mut probe)),
        Direction::Backward => run.backward(model, grads, visit.part, reborrow(&mut probe)),
    })?;
    Ok(run.losses())
}

/// Computes the loss, without gradients. Without a batch, nothing runs but the hooks: a rank takes part in the
/// passes of others.
pub fn loss<H: Hooks>(
    hooks: &mut H,
    batch: Option<&Batch>,
    options: &LossOptions,
    probe: Option<&mut dyn Probe>,
) -> Result<Option<Loss>, H::Error> {
    forward(hooks, batch, options, probe, |run, model, probe| run.loss(model, probe))
}

/// Runs a forward; `head` computes what is wanted of the head.
pub(crate) fn forward<H: Hooks, R>(
    hooks: &mut H,
    batch: Option<&Batch>,
    options: &LossOptions,
    mut probe: Option<&mut dyn Probe>,
    head: impl Fn(&LayerwiseRun<'_>, &Model, Option<&mut dyn Probe>) -> Result<R>,
) -> Result<Option<R>, H::Error> {
    let model = hooks.model();
    let visits = Visit::forward(model.config.layers.len());
    // What is trained beside the language loss has no part in a forward.
    let options = LossOptions { indexer: None, balance: None, ..*options };
    let mut run = batch.map(|batch| LayerwiseRun::new(model, batch, None, options)).transpose()?;
    let mut result = None;
    drive(hooks, visits, &mut Grads::default(), |model, _, visit| {
        let Some(run) = &mut run else { return Ok(()) };
        match visit.part {
            Part::Head => result = Some(head(run, model, reborrow(&mut probe))?),
            part => run.forward(model, part, reborrow(&mut probe))?,
        }
        Ok(())
    })?;
    Ok(result)
}

/// A probe for one visit.
fn reborrow<'p>(probe: &'p mut Option<&mut dyn Probe>) -> Option<&'p mut dyn Probe> {
    match probe {
        Some(probe) => Some(&mut **probe),
        None => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_visits_every_part_and_gathers_ahead_what_comes_next_but_the_head() {
        for layers in 0..4 {
            let visits: Vec<Visit> = Visit::forward_backward(layers).collect();
            assert_eq!(visits.len(), 2 * layers + 3);
            for pair in visits.windows(2) {
                let next = Some(pair[1].part).filter(|part| *part != Part::Head);
                assert!(pair[0].next(layers) == next || layers == 0, "{pair:?}");
            }
            assert!(Visit::forward(layers).last().unwrap().next(layers).is_none());
            assert!(Visit::backward(layers).last().unwrap().next(layers).is_none());
        }
        let head = Visit { part: Part::Head, direction: Direction::Forward };
        assert_eq!(head.reads(true).collect::<Vec<_>>(), [Part::Embedding, Part::Head]);
        assert_eq!(head.reads(false).collect::<Vec<_>>(), [Part::Head]);
    }
}
