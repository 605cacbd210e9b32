//! Bytes that a rank sends in a step, as [`ballast_cluster::Traffic`] counts them.

use std::collections::BTreeMap;

use ballast_cluster::Kind;
use ballast_kernels::adamw::BLOCK;
use ballast_model::Plan;
use ballast_model::params::Part;

use super::blueprint::Blueprint;
use crate::error::Result;
use crate::gradients::LOSSES;

impl Blueprint<'_> {
    /// Bytes that each rank sends in a step, by kind. Not counted: evaluations, samples, checkpoints, and the check of
    /// the protected tensors every `ledger.every` steps.
    pub(super) fn sent(&self) -> Result<Vec<BTreeMap<Kind, u64>>> {
        let context = self.config.cluster.context;
        let parts: Vec<BTreeMap<Kind, u64>> = (0..context)
            .map(|part| {
                self.with_step(part, |step| Ok(Plan::sent(&self.model.config, self.precision, step)?))
            })
            .collect::<Result<_>>()?;
        Ok((0..self.ranks).map(|rank| self.sent_by(rank, &parts[self.context_part(rank)])).collect())
    }

    /// Bytes that a rank sends, of which `in_context` are sent for a micro-batch within its sequences.
    fn sent_by(&self, rank: usize, in_context: &BTreeMap<Kind, u64>) -> BTreeMap<Kind, u64> {
        if self.is_solo() {
            return BTreeMap::new();
        }
        let others = (self.ranks - 1) as u64;
        let mut sent = BTreeMap::from([
            (Kind::Gradients, self.sent_gradients(rank)),
            (Kind::Weights, others * self.sent_weights(rank) as u64),
            (Kind::Scalars, others * self.sent_scalars(rank) as u64),
            // Length and content of "null": the protected tensors are in order before the step.
            (Kind::Setup, others * (8 + 4)),
        ]);
        let micro_batches = (self.rounds() * self.per_group()) as u64;
        for (kind, bytes) in in_context {
            *sent.entry(*kind).or_default() += micro_batches * bytes;
        }
        sent.retain(|_, bytes| *bytes > 0);
        sent
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
        self.model_parts().map(bytes).sum()
    }

    /// Bytes of scalars that go to each other rank: token counts, losses, norms of blocks, the flag of a bad update,
    /// the checksum of the protected tensors.
    fn sent_scalars(&self, rank: usize) -> usize {
        let losses = LOSSES * 8 * self.rounds() * self.per_group();
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
}
