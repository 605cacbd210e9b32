//! Sums of gradients over groups and ranks, bucket by bucket, overlapping backward.
//!
//! At most `cluster.window` buckets are in flight at once, which bounds the memory of their messages.

use std::collections::VecDeque;
use std::ops::Range;

use ballast_cluster::{Kind, ReduceScatter, TreeSum};
use ballast_model::params::{Bucket, Grads, ParameterKind};

use super::{Ranks, Shards};
use crate::error::{Error, Result};

/// The sum of the gradients of one step.
pub(crate) struct Reducer<'a> {
    ranks: &'a Ranks,
    /// By bucket and rank.
    parts: Vec<Vec<Range<usize>>>,
    /// Sum over the rounds of this rank's part of each bucket.
    sums: Vec<TreeSum>,
    under_way: VecDeque<(usize, ReduceScatter)>,
    failure: Option<Error>,
}

impl<'a> Reducer<'a> {
    pub(crate) fn new(ranks: &'a Ranks, shards: &Shards, grads: &Grads) -> Reducer<'a> {
        let parts = shards.bucket_parts(grads);
        let sums = parts.iter().map(|_| TreeSum::default()).collect();
        Reducer { ranks, parts, sums, under_way: VecDeque::new(), failure: None }
    }

    /// Starts to sum a bucket that is final for this round. Takes its memory where gradients are divided.
    pub(crate) fn add(&mut self, bucket: Bucket<'_>) {
        let Bucket { index, kind, values, .. } = bucket;
        if self.ranks.is_solo() {
            self.sums[index].push(std::mem::take(values));
            return;
        }
        let (world, inner) = (&self.ranks.world, self.ranks.context.size());
        let started = world.start_reduce_scatter(Kind::Gradients, values, &self.parts[index], inner);
        if self.ranks.shard.divides_gradients() && kind == ParameterKind::Weights {
            *values = Vec::new();
        }
        let waited = started.map_err(Error::from).and_then(|started| {
            self.under_way.push_back((index, started));
            self.wait_for_all_but(self.ranks.window)
        });
        if let Err(error) = waited {
            self.failure = self.failure.take().or(Some(error));
        }
    }

    /// Waits until only `left` buckets are in flight.
    fn wait_for_all_but(&mut self, left: usize) -> Result {
        while self.under_way.len() > left {
            let Some((bucket, started)) = self.under_way.pop_front() else { break };
            let sum = self.ranks.world.finish_reduce_scatter(started)?;
            self.sums[bucket].push(sum);
        }
        Ok(())
    }

    /// Waits for the buckets of a round.
    pub(crate) fn finish_round(&mut self) -> Result {
        if let Some(error) = self.failure.take() {
            return Err(error);
        }
        self.wait_for_all_but(0)
    }

    /// Moves the sums into `grads`: this rank's range of divided buckets, the others whole.
    pub(crate) fn finish(self, grads: &mut Grads) -> Result {
        let Reducer { ranks, parts, sums, .. } = self;
        let kinds: Vec<ParameterKind> = grads.layout().map(|(_, kind, _)| kind).collect();
        let mut gathers = VecDeque::new();
        let finish = |grads: &mut Grads, (bucket, gather): (usize, _)| -> Result {
            let all = ranks.world.finish_all_gather(gather)?;
            let len = parts[bucket].iter().map(|part| part.end).max().unwrap_or(0);
            let mut whole = vec![0f32; len];
            for (part, bytes) in parts[bucket].iter().zip(&all) {
                bytemuck::cast_slice_mut(&mut whole[part.clone()]).copy_from_slice(bytes);
            }
            grads.set_share(bucket, 0, whole);
            Ok(())
        };
        for (bucket, sum) in sums.into_iter().enumerate() {
            let Some(own) = sum.finish() else { continue };
            let part = &parts[bucket][ranks.world.rank()];
            if ranks.is_solo() || kinds[bucket] == ParameterKind::Weights && ranks.shard.divides_updates() {
                grads.set_share(bucket, part.start, own);
                continue;
            }
            let lens: Vec<usize> = parts[bucket].iter().map(|part| 4 * part.len()).collect();
            let own = bytemuck::cast_slice(&own).to_vec();
            gathers.push_back((bucket, ranks.world.start_all_gather(Kind::Gradients, own, &lens)?));
            if gathers.len() > ranks.window {
                gathers.pop_front().map_or(Ok(()), |gather| finish(grads, gather))?;
            }
        }
        gathers.into_iter().try_for_each(|gather| finish(grads, gather))
    }
}
