//! Memory plan: the bytes that a training step needs, computed from tensor shapes without running it.

use std::collections::BTreeMap;

use ballast_cluster::Kind;
use ballast_kernels::Element;
use ballast_kernels::linear_cross_entropy::linear_cross_entropy_workspace;
use half::bf16;
use serde::Serialize;

use crate::batch::{BatchPart, Sequences};
use crate::config::{Config, Mixer};
use crate::context::Sent;
use crate::error::Result;
use crate::layers::{Keep, Layer, Links, Stream};
use crate::model::{LossOptions, Model, Recompute};
use crate::params::Spec;
use crate::precision::{Precision, Storage};
use crate::site::Site;

/// Selects the modules that get an adapter, by their names in transformers.
pub type Targets<'a> = &'a dyn Fn(&str) -> bool;

/// A training step to plan the memory of.
#[derive(Clone, Copy)]
pub struct Step<'a> {
    /// Cumulative sequence lengths, as in [`crate::Batch::cu_seqlens`].
    pub cu_seqlens: &'a [usize],
    /// Part of the batch that this rank has, and the number of parts: see [`crate::Batch::part()`].
    pub part: Option<(usize, usize)>,
    /// Activations that backward recomputes.
    pub recompute: Recompute,
    /// Losses of the step.
    pub loss: LossOptions,
    /// Selects the parameters to train, among the trainable ones.
    pub learned: &'a dyn Fn(&Spec) -> bool,
    /// Rank of the adapters and the modules that get one, as in [`Model::add_adapters`].
    pub adapters: Option<(usize, Targets<'a>)>,
}

impl<'a> Step<'a> {
    /// Makes a step with the language loss only, all parameters trained and no adapters.
    pub fn new(cu_seqlens: &'a [usize], recompute: Recompute) -> Step<'a> {
        let loss = LossOptions::default();
        Step { cu_seqlens, part: None, recompute, loss, learned: &|_| true, adapters: None }
    }

    /// The part, and the cumulative lengths of its sequences.
    fn local(&self) -> Result<(Option<BatchPart>, Vec<usize>)> {
        let part = match self.part {
            Some((index, of)) if of > 1 => Some(BatchPart::new(self.cu_seqlens, 0, index, of)?),
            _ => None,
        };
        let local = part.as_ref().map_or_else(|| self.cu_seqlens.to_vec(), BatchPart::local);
        Ok((part, local))
    }
}

/// Bytes that a rank sends for a layer to the ranks that share its batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerSent {
    /// Kind of all these messages.
    pub kind: Kind,
    /// Bytes in the forward pass.
    pub forward: usize,
    /// Bytes in the backward pass, with what is recomputed.
    pub backward: usize,
}

/// Bytes that a training step needs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Plan {
    /// Parameters, including protected ones, without adapters.
    pub parameters: usize,
    /// Protected parameters, in f32; part of `parameters`.
    pub protected: usize,
    /// Adapters, in f32.
    pub adapters: usize,
    /// Gradients, in f32.
    pub gradients: usize,
    /// Activations saved for backward in layers with linear attention.
    pub linear_layers: usize,
    /// Activations saved for backward in layers with softmax attention.
    pub softmax_layers: usize,
    /// Activations saved for backward in layers with latent attention.
    pub latent_layers: usize,
    /// Activations saved for backward outside the layers.
    pub around: usize,
    /// Peak of temporary memory beyond the above: at the loss, with the logits of a slice of tokens, or in
    /// the backward of a layer, with the activations that it recomputes.
    pub transient: usize,
    /// Logits of one slice of tokens: part of the temporary memory at the loss.
    pub logits: usize,
    /// Scratch memory of all threads.
    pub scratch: usize,
}

impl Plan {
    /// Computes the memory plan of a step.
    pub fn new(config: &Config, precision: &Precision, step: &Step<'_>) -> Result<Plan> {
        let mut model = Model::build(config.clone(), precision.clone())?;
        if let Some((rank, targets)) = step.adapters {
            model.outline_adapters(targets, rank)?;
        }
        let (part, local) = step.local()?;
        let sequences = Sequences { cu_seqlens: &local, part: part.as_ref() };
        Ok(match precision.activations {
            Storage::F32 => model.plan::<f32>(step, sequences),
            Storage::Bf16 => model.plan::<bf16>(step, sequences),
        })
    }

    /// Computes the bytes that a rank sends in a step to the ranks that share its batch, by kind. The sum of
    /// the gradients over ranks is not included.
    pub fn sent(config: &Config, precision: &Precision, step: &Step<'_>) -> Result<BTreeMap<Kind, u64>> {
        let (part, _) = step.local()?;
        let mut all = BTreeMap::new();
        let mut add = |kind, bytes: usize| {
            if bytes > 0 {
                *all.entry(kind).or_default() += bytes as u64;
            }
        };
        for LayerSent { kind, forward, backward } in Plan::sent_by_layer(config, precision, step)? {
            add(kind, forward + backward);
        }
        let experts = config.layers.iter().find_map(|layer| layer.experts);
        if let (Some(part), Some(_), Some(experts)) = (&part, step.loss.balance, experts)
            && !step.loss.is_warm_up()
        {
            add(Kind::Scalars, (part.of() - 1) * 8 * (1 + 2 * experts.count));
        }
        Ok(all)
    }

    /// Computes what [`Plan::sent`] counts for the layers, one by one.
    pub fn sent_by_layer(config: &Config, precision: &Precision, step: &Step<'_>) -> Result<Vec<LayerSent>> {
        let model = Model::build(config.clone(), precision.clone())?;
        let (part, local) = step.local()?;
        let sequences = Sequences { cu_seqlens: &local, part: part.as_ref() };
        let stage = step.loss.indexer.map(|loss| loss.stage);
        let sent = |layer: &Layer| {
            let (kind, Sent { forward, backward }) = match precision.activations {
                Storage::F32 => layer.sent::<f32>(precision, sequences, stage),
                Storage::Bf16 => layer.sent::<bf16>(precision, sequences, stage),
            };
            let again = if step.recompute == Recompute::Full { forward } else { 0 };
            LayerSent { kind, forward, backward: again + backward }
        };
        Ok(model.layers().iter().map(sent).collect())
    }

    /// Returns the bytes of all activations saved for backward.
    pub fn kept(&self) -> usize {
        self.linear_layers + self.softmax_layers + self.latent_layers + self.around
    }

    /// Returns the bytes in total.
    pub fn total(&self) -> usize {
        self.parameters + self.adapters + self.gradients + self.kept() + self.transient + self.scratch
    }
}

impl Recompute {
    /// Returns what the layers save for backward.
    pub(crate) fn keep(self) -> Keep {
        match self {
            Recompute::None => Keep::Everything,
            Recompute::Selective => Keep::Selective,
            Recompute::Full => Keep::Nothing,
        }
    }
}

impl Model {
    fn plan<A: Element>(&self, step: &Step<'_>, sequences: Sequences<'_>) -> Plan {
        let Step { recompute, loss, .. } = *step;
        let tokens = sequences.tokens();
        let tensor = tokens * self.config.hidden * size_of::<A>();
        let stream =
            tokens * self.config.hidden * Stream::element_bytes(self.precision().site(Site::Residual));
        let learned = self.specs.all().filter(|spec| spec.trainable && (step.learned)(spec));
        let adapters = self.adapter_bytes();
        let logits = linear_cross_entropy_workspace(self.head.dims(), tokens, &self.loss_options(&loss));
        let mut plan = Plan {
            parameters: self.specs.bytes(self.precision().params),
            protected: self.specs.protected.iter().map(|spec| 4 * spec.len()).sum(),
            adapters,
            gradients: 4 * learned.map(Spec::len).sum::<usize>() + adapters,
            around: stream + 4 * tokens + self.per_layer_inputs_bytes::<A>(tokens),
            logits: 4 * logits,
            transient: 2 * tensor + 4 * logits,
            scratch: 4 * self.scratch_len::<A>(sequences) * rayon::current_num_threads(),
            ..Plan::default()
        };
        let stage = loss.indexer.map(|loss| loss.stage);
        // Backward frees the last stream, and what the layers after a layer have kept.
        let mut freed = stream;
        let links = Links::<A>::new(&self.config);
        for (index, (layer, shape)) in self.layers().iter().zip(&self.config.layers).enumerate().rev() {
            let saved = |keep| layer.saved_bytes::<A>(&self.config, self.precision(), sequences, keep, stage);
            let transient =
                |keep| layer.transient::<A>(&self.config, self.precision(), sequences, keep, stage);
            let (kept, alive) = match recompute {
                Recompute::Full => (stream, saved(Keep::Mixer) - stream + transient(Keep::Mixer)),
                _ => (saved(recompute.keep()), transient(recompute.keep())),
            };
            plan.transient = plan.transient.max(alive.saturating_sub(freed));
            freed += kept;
            // What layers share stays to the end.
            let linked =
                if links.is_shared(index) { layer.linked_bytes::<A>(tokens, recompute.keep()) } else { 0 };
            match shape.mixer {
                Mixer::Linear(_) => plan.linear_layers += kept,
                Mixer::Softmax(_) => plan.softmax_layers += kept + linked,
                Mixer::Latent(_) => plan.latent_layers += kept,
            }
        }
        plan
    }
}
