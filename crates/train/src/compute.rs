//! Runs of the model in a step. The weights may be divided over the ranks: then each part of the model is
//! gathered ahead of its use, while the part before it is computed, and dropped after it.

use std::borrow::Cow;

use ballast_kernels::linear_cross_entropy::Loss;
use ballast_model::params::{Bucket, Grads, Part};
use ballast_model::{Batch, LayerwiseRun, LossOptions, Model, Probe, Recompute, StepLoss};

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
}

impl Engine<'_> {
    /// Runs forward and backward of this rank's part of a batch, adds to `grads`, and hands every bucket to
    /// `finished` when it is final. The language and indexer losses are those of the part.
    pub(crate) fn forward_backward(
        &mut self,
        grads: &mut Grads,
        batch: &Batch,
        options: &LossOptions,
        mut probe: Option<&mut dyn Probe>,
        finished: &mut dyn FnMut(Bucket<'_>),
    ) -> Result<StepLoss> {
        if batch.tokens() < self.ranks.context.size() {
            return Err(Error::Config(format!(
                "a micro-batch of {} tokens cannot be divided over {} ranks (cluster.context); set a smaller cluster.context or \
                 a larger data.sequence_length",
                batch.tokens(),
                self.ranks.context.size()
            )));
        }
        let batch = &*own_part(batch, self.ranks)?;
        if self.shards.is_none() {
            let (model, recompute) = (&*self.model, self.recompute);
            return Ok(model.forward_backward_by_bucket(grads, batch, options, recompute, probe, finished)?);
        }
        let last = self.layers();
        let mut run = self.begin(batch, Some(self.recompute), options, reborrow(&mut probe))?;
        for layer in 0..last {
            self.fetch(Part::Layer(layer), (layer + 1 < last).then_some(Part::Layer(layer + 1)))?;
            run.forward(self.model, layer, reborrow(&mut probe))?;
            self.resident.release(self.model);
        }
        self.fetch_head(last.checked_sub(1).map(Part::Layer))?;
        let language = run.loss_backward(self.model, grads, reborrow(&mut probe))?;
        self.resident.release(self.model);
        grads.finish(Part::Head, finished);
        for layer in (0..last).rev() {
            let next = if layer > 0 { Part::Layer(layer - 1) } else { Part::Embedding };
            self.fetch(Part::Layer(layer), Some(next))?;
            run.backward(self.model, grads, layer, reborrow(&mut probe))?;
            self.resident.release(self.model);
            grads.finish(Part::Layer(layer), finished);
        }
        let (indexer, balance) = run.layer_losses();
        self.fetch(Part::Embedding, None)?;
        run.embedding_backward(self.model, grads, probe)?;
        self.resident.release(self.model);
        grads.finish(Part::Embedding, finished);
        Ok(StepLoss { language, indexer, balance })
    }

    /// The loss of this rank's part of a batch. Without a batch, only serves the other ranks, which need the
    /// weights of this one.
    pub(crate) fn loss(
        &mut self,
        batch: Option<&Batch>,
        probe: Option<&mut dyn Probe>,
    ) -> Result<Option<Loss>> {
        let (options, mut probe) = (LossOptions::default(), probe);
        let batch = batch.map(|batch| own_part(batch, self.ranks)).transpose()?;
        if self.shards.is_none() {
            return Ok(batch.map(|batch| self.model.loss(&batch, &options, probe)).transpose()?);
        }
        let last = self.layers();
        let mut run = match &batch {
            Some(batch) => Some(self.begin(batch, None, &options, reborrow(&mut probe))?),
            None => {
                self.fetch(Part::Embedding, (last > 0).then_some(Part::Layer(0)))?;
                self.resident.release(self.model);
                None
            }
        };
        for layer in 0..last {
            self.fetch(Part::Layer(layer), (layer + 1 < last).then_some(Part::Layer(layer + 1)))?;
            if let Some(run) = &mut run {
                run.forward(self.model, layer, reborrow(&mut probe))?;
            }
            self.resident.release(self.model);
        }
        self.fetch_head(None)?;
        let loss = match (&run, probe) {
            (Some(run), Some(probe)) => {
                run.norm(self.model, probe)?;
                Some(run.loss(self.model)?)
            }
            (Some(run), None) => Some(run.loss(self.model)?),
            (None, _) => None,
        };
        self.resident.release(self.model);
        Ok(loss)
    }

    /// Runs `work` on the model with all its weights, on every rank.
    pub(crate) fn with_whole_model<R>(&mut self, work: impl FnOnce(&Model) -> Result<R>) -> Result<R> {
        if self.shards.is_some() {
            let parts = (0..self.layers()).map(Part::Layer).chain([Part::Embedding, Part::Head]);
            for part in parts.collect::<Vec<_>>() {
                self.fetch(part, None)?;
            }
        }
        let result = work(self.model);
        self.resident.release(self.model);
        result
    }

    fn layers(&self) -> usize {
        self.model.config.layers.len()
    }

    /// Runs the embedding, and starts to gather the first layer.
    fn begin<'b>(
        &mut self,
        batch: &'b Batch,
        recompute: Option<Recompute>,
        options: &LossOptions,
        probe: Option<&mut dyn Probe>,
    ) -> Result<LayerwiseRun<'b>> {
        self.fetch(Part::Embedding, (self.layers() > 0).then_some(Part::Layer(0)))?;
        let run = LayerwiseRun::begin(self.model, batch, recompute, *options, probe)?;
        self.resident.release(self.model);
        Ok(run)
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

    /// Makes the head whole: with the embedding, if they are tied.
    fn fetch_head(&mut self, next: Option<Part>) -> Result {
        if self.model.config.tied {
            self.fetch(Part::Embedding, Some(Part::Head))?;
        }
        self.fetch(Part::Head, next)
    }
}

/// The tokens of a batch that this rank computes: all of a batch with fewer tokens than ranks.
fn own_part<'b>(batch: &'b Batch, ranks: &Ranks) -> Result<Cow<'b, Batch>> {
    match ranks.context.size() {
        1 => Ok(Cow::Borrowed(batch)),
        parts if batch.tokens() < parts => Ok(Cow::Borrowed(batch)),
        parts => Ok(Cow::Owned(batch.part(ranks.context.rank(), parts)?)),
    }
}

/// A probe for one call.
fn reborrow<'p>(probe: &'p mut Option<&mut dyn Probe>) -> Option<&'p mut dyn Probe> {
    match probe {
        Some(probe) => Some(&mut **probe),
        None => None,
    }
}
