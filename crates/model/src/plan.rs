//! How much memory a step takes, without running it: from the same structs that the layers keep.

use ballast_kernels::Element;
use ballast_kernels::linear_cross_entropy::logits_len;
use half::bf16;
use serde::Serialize;

use crate::config::{Config, Mixer};
use crate::error::Result;
use crate::layers::Keep;
use crate::model::{LossOptions, Model, Recompute};
use crate::precision::{Precision, Storage};

/// Bytes that a step with backward takes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Plan {
    /// Parameters, protected ones included.
    pub parameters: usize,
    /// Those of them that are protected, in f32.
    pub protected: usize,
    /// f32 gradients.
    pub gradients: usize,
    /// Kept for backward in layers with linear attention.
    pub linear_layers: usize,
    /// Kept for backward in layers with softmax attention.
    pub softmax_layers: usize,
    /// Kept for backward in layers with latent attention.
    pub latent_layers: usize,
    /// Kept for backward outside the layers.
    pub around: usize,
    /// Logits of one slice of tokens.
    pub logits: usize,
    /// Working memory of all threads.
    pub scratch: usize,
}

impl Plan {
    /// Everything that is kept for backward.
    pub fn kept(&self) -> usize {
        self.linear_layers + self.softmax_layers + self.latent_layers + self.around
    }

    /// Everything.
    pub fn total(&self) -> usize {
        self.parameters + self.gradients + self.kept() + self.logits + self.scratch
    }

    /// The plan of a step on these sequences.
    pub fn new(
        config: &Config,
        precision: &Precision,
        cu_seqlens: &[usize],
        recompute: Recompute,
    ) -> Result<Plan> {
        let model = Model::build(config.clone(), precision.clone())?;
        Ok(match precision.activations {
            Storage::F32 => model.plan::<f32>(cu_seqlens, recompute),
            Storage::Bf16 => model.plan::<bf16>(cu_seqlens, recompute),
        })
    }
}

impl Recompute {
    /// What the layers keep.
    pub(crate) fn keep(self) -> Keep {
        match self {
            Recompute::None => Keep::Everything,
            Recompute::Selective => Keep::Selective,
            Recompute::Full => Keep::Nothing,
        }
    }
}

impl Model {
    /// The plan of a step on these sequences.
    pub(crate) fn plan<A: Element>(&self, cu_seqlens: &[usize], recompute: Recompute) -> Plan {
        let tokens = cu_seqlens.last().copied().unwrap_or(0);
        let stream = tokens * self.config.hidden * size_of::<A>();
        let learned: usize = self.specs.all().filter(|spec| spec.trainable).map(|spec| spec.len()).sum();
        let mut plan = Plan {
            parameters: self.specs.bytes(self.precision().params),
            protected: self.specs.protected.iter().map(|spec| 4 * spec.len()).sum(),
            gradients: 4 * learned,
            around: stream + 4 * tokens + self.own_inputs_bytes::<A>(tokens),
            logits: 4 * logits_len(
                self.config.vocabulary,
                tokens,
                &self.loss_options(&LossOptions::default()),
            ),
            scratch: 4 * self.scratch_len::<A>(tokens) * rayon::current_num_threads(),
            ..Plan::default()
        };
        for (layer, shape) in self.layers().iter().zip(&self.config.layers) {
            let kept = match recompute {
                Recompute::Full => stream,
                _ => layer.saved_bytes::<A>(&self.config, self.precision(), cu_seqlens, recompute.keep()),
            };
            match shape.mixer {
                Mixer::Linear(_) => plan.linear_layers += kept,
                Mixer::Softmax(_) => plan.softmax_layers += kept,
                Mixer::Latent(_) => plan.latent_layers += kept,
            }
        }
        plan
    }
}
