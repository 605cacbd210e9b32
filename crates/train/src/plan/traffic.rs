//! Bytes that a rank sends in a step, as [`ballast_cluster::Traffic`] counts them.

use std::collections::BTreeMap;

use ballast_cluster::Kind;
use ballast_kernels::adamw::BLOCK;
use ballast_model::config::{Layer, Mixer};
use ballast_model::params::Part;

use super::blueprint::Blueprint;

/// Bytes that a rank sends for one layer and micro-batch, where ranks share the sequences.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Exchange {
    /// Attention in the forward.
    pub(super) forward: f64,
    /// Attention in the backward.
    pub(super) backward: f64,
    /// States and tokens of the convolution, the same in forward and backward.
    pub(super) states: f64,
}

impl Blueprint<'_> {
    /// Bytes that a rank sends in a step, by kind. Not counted: evaluations, samples, checkpoints, and the check of
    /// the protected tensors every `ledger.every` steps.
    pub(super) fn sent(&self, rank: usize) -> BTreeMap<Kind, u64> {
        if self.is_solo() {
            return BTreeMap::new();
        }
        let others = (self.ranks - 1) as u64;
        let (attention, states) = self.sent_in_context();
        let kinds = [
            (Kind::Gradients, self.sent_gradients(rank)),
            (Kind::Weights, others * self.sent_weights(rank) as u64),
            (Kind::Attention, attention),
            (Kind::States, states),
            (Kind::Scalars, others * self.sent_scalars(rank) as u64),
            // Length and content of "null": the protected tensors are in order before the step.
            (Kind::Setup, others * (8 + 4)),
        ];
        kinds.into_iter().filter(|(_, bytes)| *bytes > 0).collect()
    }

    fn sent_gradients(&self, rank: usize) -> u64 {
        let (rounds, others) = (self.rounds(), self.ranks - 1);
        let bytes = |bucket: &super::blueprint::BucketShape| {
            let own = bucket.parts[rank].len();
            let gathered = if self.stays_divided(bucket) { 0 } else { others * own };
            4 * (rounds * (bucket.len - own) + gathered) as u64
        };
        self.buckets.iter().map(bytes).sum()
    }

    /// Bytes of weights that go to each other rank.
    fn sent_weights(&self, rank: usize) -> usize {
        let micro_batches = self.rounds() * self.per_group();
        let bytes = |part: Part| match (self.divides_weights(), part) {
            (true, Part::Embedding) => {
                // Forward, head, backward.
                let times = if self.model.config.tied { 3 } else { 2 };
                times * micro_batches * self.owned(part)[rank]
            }
            (true, Part::Layer(_)) => 2 * micro_batches * self.owned(part)[rank],
            (true, Part::Head) => micro_batches * self.owned(part)[rank],
            (false, _) if self.divides_updates() => self.owned_learned(part)[rank],
            (false, _) => 0,
        };
        self.model_parts().into_iter().map(bytes).sum()
    }

    /// Bytes of scalars that go to each other rank: token counts, losses, norms of blocks, the flag of a bad update,
    /// the checksum of the protected tensors.
    fn sent_scalars(&self, rank: usize) -> usize {
        let losses = 3 * 8 * self.rounds() * self.per_group();
        let blocks = |weight: usize| self.shards.range(weight, rank).len().div_ceil(BLOCK);
        let norms = match self.divides_updates() {
            true => {
                let learned = (0..self.model.specs.weights.len()).filter(|weight| self.is_learned(*weight));
                8 * learned.map(blocks).sum::<usize>() + 1
            }
            false => 0,
        };
        2 * 8 + losses + norms + 8
    }

    /// Bytes of attention and of states that a rank sends in a step.
    fn sent_in_context(&self) -> (u64, u64) {
        let micro_batches = (self.rounds() * self.per_group()) as f64;
        let (mut attention, mut states) = (0.0, 0.0);
        for layer in &self.model.config.layers {
            let exchange = self.exchange(layer);
            attention += micro_batches * (exchange.forward + exchange.backward);
            states += micro_batches * 2.0 * exchange.states;
        }
        (attention as u64, states as u64)
    }

    /// What the ranks of a sequence exchange for a layer: an estimate of the mean over the ranks, for sequences
    /// that cross every boundary.
    ///
    /// ```text
    /// full attention   tokens for heads: q, k, v and o forward; q, k, v, o, do, dq, dk and dv backward
    /// window           keys and values inside it from the rank before; backward again, and their gradients in f32
    /// latent           the latent rows and the indexer's keys to all later ranks; backward likewise
    /// delta rule       the state and the convolution's tokens before a boundary, and their gradients
    /// ```
    pub(super) fn exchange(&self, layer: &Layer) -> Exchange {
        let context = self.config.cluster.context;
        if context == 1 {
            return Exchange::default();
        }
        let (parts, bytes) = (context as f64, self.precision.activations.bytes() as f64);
        let tokens = self.own_sequences().last().copied().unwrap_or(0) as f64;
        let away = (parts - 1.0) / parts;
        match &layer.mixer {
            Mixer::Linear(shape) => {
                let (keys, values) = (shape.key_heads * shape.key_dim, shape.value_heads * shape.value_dim);
                let state = 4.0 * (shape.value_heads * shape.key_dim * shape.value_dim) as f64;
                let rows = ((shape.conv_width - 1) * (2 * keys + values)) as f64 * bytes;
                Exchange { states: away * (state + rows), ..Exchange::default() }
            }
            Mixer::Softmax(shape) => {
                let (q, kv) = (shape.heads * shape.head_dim, 2 * shape.kv_heads * shape.head_dim);
                if let Some(window) = shape.window {
                    let rows = away * tokens.min(window as f64) * kv as f64;
                    return Exchange { forward: bytes * rows, backward: (bytes + 4.0) * rows, states: 0.0 };
                }
                let q = away * tokens * q as f64;
                // A kv head whose query heads are on several ranks goes to all of them.
                let copies = (parts / shape.kv_heads as f64).max(1.0);
                let kv = away * tokens * kv as f64 * copies;
                Exchange {
                    forward: bytes * (2.0 * q + kv),
                    backward: bytes * (4.0 * q + kv) + 4.0 * kv,
                    states: 0.0,
                }
            }
            Mixer::Latent(shape) => {
                let width = (shape.kv_rank + shape.rope_dim + shape.index_dim) as f64;
                let rows = (parts - 1.0) / 2.0 * tokens * width;
                Exchange { forward: bytes * rows, backward: (bytes + 4.0) * rows, states: 0.0 }
            }
        }
    }
}
