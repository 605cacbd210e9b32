//! Passes of a run: the model, and where its weights and gradients are. Weights may be divided over the ranks:
//! then each part of the model is gathered ahead of its use, while the part before it is computed, and dropped after
//! it.

use std::borrow::Cow;

use ballast_kernels::linear_cross_entropy::Loss;
use ballast_model::params::{Bucket, Grads, Part};
use ballast_model::pass::{self, Hooks, Visit};
use ballast_model::{Batch, LossOptions, Model, Probe, Recompute, StepLoss};

use crate::cluster::{Ranks, Resident, Shards};
use crate::error::{Error, Result};

/// The model of a run, and where its weights are.
pub(crate) struct Engine<'a> {
    pub(crate) model: &'a mut Model,
    pub(crate) resident: &'a mut Resident,
    pub(crate) ranks: &'a Ranks,
    /// The division of the weights, if they are divided.
    pub(crate) shards: Option<&'a Shards>,
    pub(crate) recompute: Recompute,
    /// Receives the buckets of gradients that are final, if anything does.
    pub(crate) complete: Option<&'a mut dyn FnMut(Bucket<'_>)>,
}

/// Weights are gathered before a visit and dropped after it; gradients are sent while backward continues.
impl Hooks for Engine<'_> {
    type Error = Error;

    fn model(&self) -> &Model {
        self.model
    }

    fn before(&mut self, visit: Visit) -> Result {
        let (layers, tied) = (self.layers(), self.model.config.tied);
        visit.fetches(layers, tied).try_for_each(|(part, next)| self.fetch(part, next))
    }

    fn after(&mut self, _: Visit) -> Result {
        self.resident.release(self.model);
        Ok(())
    }

    fn complete(&mut self, bucket: Bucket<'_>) {
        if let Some(complete) = &mut self.complete {
            complete(bucket);
        }
    }
}

impl Engine<'_> {
    /// Runs forward and backward of this rank's part of a batch, and adds to `grads`. The language and indexer losses
    /// are those of the part.
    pub(crate) fn forward_backward(
        &mut self,
        grads: &mut Grads,
        batch: &Batch,
        options: &LossOptions,
        probe: Option<&mut dyn Probe>,
    ) -> Result<StepLoss> {
        if batch.tokens() < self.ranks.context.size() {
            return Err(Error::config(
                "cluster.context",
                format!(
                    "a micro-batch of {} tokens cannot be divided over {} ranks (cluster.context); set a smaller cluster.context or \
                 a larger data.sequence_length",
                    batch.tokens(),
                    self.ranks.context.size()
                ),
            ));
        }
        let (batch, recompute) = (part_of_rank(batch, self.ranks)?, self.recompute);
        pass::forward_backward(self, grads, &batch, options, recompute, probe)
    }

    /// The loss of this rank's part of a batch. Without a batch, only serves the other ranks, which need the
    /// weights of this one.
    pub(crate) fn loss(
        &mut self,
        batch: Option<&Batch>,
        probe: Option<&mut dyn Probe>,
    ) -> Result<Option<Loss>> {
        let batch = batch.map(|batch| part_of_rank(batch, self.ranks)).transpose()?;
        pass::loss(self, batch.as_deref(), &LossOptions::default(), probe)
    }

    /// Runs `work` on the model with all its weights, on every rank.
    pub(crate) fn with_whole_model<R>(&mut self, work: impl FnOnce(&Model) -> Result<R>) -> Result<R> {
        for part in Part::all(self.layers()) {
            self.fetch(part, None)?;
        }
        let result = work(self.model);
        self.resident.release(self.model);
        result
    }

    fn layers(&self) -> usize {
        self.model.config.layers.len()
    }

    /// Makes a part whole, and starts to gather the `next` one.
    fn fetch(&mut self, part: Part, next: Option<Part>) -> Result {
        let Some(shards) = self.shards else { return Ok(()) };
        self.resident.start(self.model, part, self.ranks, shards)?;
        if let Some(next) = next.filter(|_| self.ranks.window > 0) {
            self.resident.start(self.model, next, self.ranks, shards)?;
        }
        self.resident.fetch(self.model, part, self.ranks, shards)
    }
}

/// The tokens of a batch that this rank computes: all of a batch with fewer tokens than ranks.
fn part_of_rank<'b>(batch: &'b Batch, ranks: &Ranks) -> Result<Cow<'b, Batch>> {
    match ranks.context.size() {
        1 => Ok(Cow::Borrowed(batch)),
        parts if batch.tokens() < parts => Ok(Cow::Borrowed(batch)),
        parts => Ok(Cow::Owned(batch.part(ranks.context.rank(), parts)?)),
    }
}
