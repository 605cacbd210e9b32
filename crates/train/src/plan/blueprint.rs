//! A run on several ranks without values: who owns what.

use std::collections::BTreeMap;
use std::ops::Range;

use ballast_model::params::{Grads, ParameterKind, Part};
use ballast_model::precision::Storage;
use ballast_model::{Model, Plan, Precision, Step};

use crate::cluster::{Shards, data_ranks};
use crate::config::{Shard, TrainConfig};
use crate::error::{Error, Result};
use crate::setup::{is_learned, is_target};
use crate::trainer::shards_of;

/// Most sequences of a micro-batch that a plan lists.
const MOST_SEQUENCES: usize = 1 << 24;

/// A bucket of gradients.
pub(super) struct BucketShape {
    pub(super) part: Part,
    pub(super) kind: ParameterKind,
    /// Number of elements.
    pub(super) len: usize,
    /// Elements whose sum each rank gets.
    pub(super) parts: Vec<Range<usize>>,
}

/// A run on `ranks` ranks.
pub(super) struct Blueprint<'a> {
    pub(super) config: &'a TrainConfig,
    pub(super) precision: &'a Precision,
    /// The model, without values; its adapters have none either.
    pub(super) model: Model,
    /// True for each protected tensor that is learned.
    pub(super) learned_protected: Vec<bool>,
    pub(super) ranks: usize,
    pub(super) data_ranks: usize,
    pub(super) shards: Shards,
    pub(super) grads: Grads,
    pub(super) buckets: Vec<BucketShape>,
    /// Bytes of the weights that each rank owns, by part of the model.
    owned: BTreeMap<Part, Owned>,
}

/// Bytes of the weights of a part that each rank owns.
#[derive(Default)]
struct Owned {
    all: Vec<usize>,
    learned: Vec<usize>,
}

impl<'a> Blueprint<'a> {
    /// The division of a run; `model` gives configuration and names, and may be without values.
    pub(super) fn new(
        config: &'a TrainConfig,
        model: &Model,
        precision: &'a Precision,
        ranks: usize,
    ) -> Result<Blueprint<'a>> {
        let data_ranks = data_ranks(ranks, config)?;
        if config.batch.sequences > MOST_SEQUENCES {
            return Err(Error::config(
                "batch.sequences",
                format!(
                    "`batch.sequences` must be at most {MOST_SEQUENCES} for a plan, got {}",
                    config.batch.sequences
                ),
            ));
        }
        let mut outline = Model::outline(model.config.clone())?;
        if let Some(lora) = &config.lora {
            outline.outline_adapters(&|module| is_target(config, module), lora.rank)?;
        }
        let learned = |spec: &ballast_model::params::Spec| is_learned(config, &model.parameter_name(spec));
        let grads = Grads::outline(&outline.specs, &outline.params, learned);
        let shards = shards_of(config, &outline.config, &outline.specs, 0, ranks);
        let buckets = grads
            .layout()
            .zip(shards.bucket_parts(&grads))
            .map(|((part, kind, len), parts)| BucketShape { part, kind, len, parts })
            .collect();
        let learned_protected =
            outline.specs.protected.iter().map(|spec| spec.trainable && learned(spec)).collect();
        let mut blueprint = Blueprint {
            config,
            precision,
            model: outline,
            learned_protected,
            ranks,
            data_ranks,
            shards,
            grads,
            buckets,
            owned: BTreeMap::new(),
        };
        blueprint.owned = blueprint.model_parts().map(|part| (part, blueprint.count_owned(part))).collect();
        Ok(blueprint)
    }

    /// Parts of a sequence that stand for all in plans of memory and time, which differ little between them.
    pub(super) fn sample_parts(&self) -> Vec<usize> {
        match self.config.cluster.context {
            few @ 0..=4 => (0..few).collect(),
            many => vec![0, many / 2, many - 1],
        }
    }

    /// Most bytes that a rank sends within its sequences for each layer, forward and backward.
    pub(super) fn exchanges(&self) -> Result<Vec<[usize; 2]>> {
        let mut exchanges = vec![[0; 2]; self.model.config.layers.len()];
        if self.config.cluster.context == 1 {
            return Ok(exchanges);
        }
        for part in self.sample_parts() {
            let sent =
                self.with_step(part, |step| Plan::sent_by_layer(&self.model.config, self.precision, step))?;
            for (most, layer) in exchanges.iter_mut().zip(sent) {
                *most = [most[0].max(layer.forward), most[1].max(layer.backward)];
            }
        }
        Ok(exchanges)
    }

    fn count_owned(&self, part: Part) -> Owned {
        let mut owned = Owned { all: vec![0; self.ranks], learned: vec![0; self.ranks] };
        for weight in self.weights_of(part) {
            for rank in 0..self.ranks {
                let bytes = self.storage().bytes() * self.shards.range(weight, rank).len();
                owned.all[rank] += bytes;
                owned.learned[rank] += if self.is_learned(weight) { bytes } else { 0 };
            }
        }
        owned
    }

    pub(super) fn is_solo(&self) -> bool {
        self.ranks == 1
    }

    pub(super) fn shard(&self) -> Shard {
        self.config.cluster.shard_on(self.ranks)
    }

    /// Returns true if the weights are gathered part by part.
    pub(super) fn divides_weights(&self) -> bool {
        self.shard().divides_weights()
    }

    /// Returns true if each rank updates its own elements of the weights.
    pub(super) fn divides_updates(&self) -> bool {
        self.shard().divides_updates()
    }

    /// Number of groups that a rank computes in sequence.
    pub(super) fn rounds(&self) -> usize {
        self.config.batch.groups / self.data_ranks
    }

    /// Micro-batches of a group.
    pub(super) fn per_group(&self) -> usize {
        self.config.batch.accumulation / self.config.batch.groups
    }

    /// Index of the part of its sequences that a rank computes.
    pub(super) fn context_part(&self, rank: usize) -> usize {
        rank % self.config.cluster.context
    }

    /// Calls `plan` with a micro-batch of full sequences, of which a rank computes this part.
    pub(super) fn with_step<R>(&self, part: usize, plan: impl FnOnce(&Step<'_>) -> R) -> R {
        let (config, length) = (self.config, self.config.data.sequence_length);
        let ends: Vec<usize> = (0..=config.batch.sequences).map(|i| i * length).collect();
        let targets = |module: &str| is_target(config, module);
        plan(&Step {
            part: Some((part, config.cluster.context)),
            loss: config.loss.options(),
            adapters: config.lora.as_ref().map(|lora| (lora.rank, &targets as &dyn Fn(&str) -> bool)),
            ..Step::new(&ends, config.precision.recompute)
        })
    }

    /// Layers of the model.
    pub(super) fn layers(&self) -> usize {
        self.model.config.layers.len()
    }

    /// The parts of the model, in the order of the forward.
    pub(super) fn model_parts(&self) -> impl Iterator<Item = Part> + use<> {
        Part::all(self.layers())
    }

    /// The weights of a part, by their place in the specs.
    pub(super) fn weights_of(&self, part: Part) -> impl Iterator<Item = usize> {
        let specs = &self.model.specs.weights;
        (0..specs.len()).filter(move |weight| specs[*weight].part == part)
    }

    /// Bytes of a part's weights that each rank owns.
    pub(super) fn owned(&self, part: Part) -> &[usize] {
        self.owned.get(&part).map_or(&[], |owned| &owned.all)
    }

    /// Bytes of a part's learned weights that each rank owns.
    pub(super) fn owned_learned(&self, part: Part) -> &[usize] {
        self.owned.get(&part).map_or(&[], |owned| &owned.learned)
    }

    /// The ranks that own most, at most `count`, among those that compute this part of their sequences.
    pub(super) fn fullest(&self, count: usize, part: usize) -> Vec<usize> {
        let owned = |rank: usize| -> usize {
            let bytes = |owned: &Owned| owned.all[rank] + owned.learned[rank];
            self.owned.values().map(bytes).sum()
        };
        let mut ranks: Vec<usize> = (part..self.ranks).step_by(self.config.cluster.context).collect();
        ranks.sort_by_key(|rank| std::cmp::Reverse(owned(*rank)));
        ranks.truncate(count);
        ranks
    }

    pub(super) fn is_learned(&self, weight: usize) -> bool {
        self.grads.weight_place(weight).is_some()
    }

    pub(super) fn storage(&self) -> Storage {
        self.precision.params
    }

    /// The buckets in the order in which backward completes them.
    pub(super) fn in_backward_order(&self) -> Vec<&BucketShape> {
        let mut buckets: Vec<&BucketShape> = self.buckets.iter().collect();
        buckets.sort_by_key(|bucket| (std::cmp::Reverse(bucket.part), bucket.kind));
        buckets
    }

    /// Returns true if a bucket ends divided over the ranks, a part on each; the others are gathered after the sum.
    pub(super) fn stays_divided(&self, bucket: &BucketShape) -> bool {
        bucket.kind == ParameterKind::Weights && self.divides_updates()
    }
}
