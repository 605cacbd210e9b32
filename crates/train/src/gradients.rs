//! Gradients and losses of a step, over all its micro-batches and ranks.

use ballast_cluster::Kind;
use ballast_kernels::adamw::block_squares;
use ballast_model::LossOptions;
use ballast_model::params::Bucket;

use crate::cluster::{Ranks, Reducer};
use crate::config::TrainConfig;
use crate::data::MicroBatch;
use crate::error::Result;
use crate::optimizer::{Norms, Place, gradient};
use crate::trainer::Trainer;

/// Number of losses of a micro-batch, which the ranks send each other.
pub(crate) const LOSSES: usize = 4;

/// Losses of a step, per token.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Losses {
    /// The minimized loss, with label smoothing and z-loss.
    pub(crate) language: f64,
    /// -ln p(target), without them.
    pub(crate) cross_entropy: f64,
    pub(crate) indexer: f64,
    pub(crate) balance: f64,
}

impl Losses {
    pub(crate) fn is_finite(&self) -> bool {
        self.language.is_finite() && self.indexer.is_finite() && self.balance.is_finite()
    }
}

/// Tokens of a step, over all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Totals {
    /// Tokens.
    pub(crate) tokens: u64,
    /// Tokens with a loss.
    pub(crate) counted: u64,
}

impl Totals {
    /// The tokens of this rank's micro-batches and those of the other ranks.
    pub(crate) fn of(batches: &[MicroBatch], ranks: &Ranks) -> Result<Totals> {
        let sum = |count: fn(&MicroBatch) -> usize| batches.iter().map(count).sum::<usize>() as f64;
        let own = [sum(|batch| batch.batch.tokens()), sum(|batch| batch.batch.counted())];
        let [tokens, counted] = ranks.sum_counts(own)?;
        Ok(Totals { tokens: tokens as u64, counted: counted as u64 })
    }
}

/// Loss options of each micro-batch, weighted so that the step is one mean over its tokens.
pub(crate) fn step_options(
    config: &TrainConfig,
    totals: Totals,
) -> impl Fn(&MicroBatch) -> LossOptions + use<> {
    let Totals { tokens, counted } = totals;
    let loss = config.loss.options();
    move |batch| {
        let mut options = loss;
        options.scale = Some(1.0 / counted.max(1) as f32);
        let share = batch.batch.tokens() as f32 / tokens.max(1) as f32;
        if let Some(indexer) = &mut options.indexer {
            indexer.scale *= share;
        }
        if let Some(balance) = &mut options.balance {
            *balance *= share;
        }
        options
    }
}

impl Trainer {
    /// Losses and gradient norms of a step; `batches` are this rank's micro-batches. Changes nothing but the
    /// gradients.
    pub(crate) fn gradients(&mut self, batches: &[MicroBatch], totals: Totals) -> Result<(Losses, Norms)> {
        let options = step_options(&self.config, totals);
        let per_group = self.config.batch.accumulation / self.config.batch.groups;
        let single = self.ranks.is_solo() && self.config.batch.groups == 1;
        let (ranks, shards) = (self.ranks.clone(), self.shards.clone());
        let mut reducer = Reducer::new(&ranks, &shards, &self.grads);
        let mut parts = Vec::with_capacity(LOSSES * batches.len());
        for group in batches.chunks(per_group) {
            self.grads.clear();
            for (index, batch) in group.iter().enumerate() {
                let is_last = index + 1 == group.len() && !single;
                let mut add = |bucket: Bucket<'_>| reducer.add(bucket);
                let (mut engine, grads, ..) = self.split();
                engine.complete = if is_last { Some(&mut add) } else { None };
                let loss = engine.forward_backward(grads, &batch.batch, &options(batch), None)?;
                let language = loss.language;
                parts.extend([language.sum, loss.indexer, loss.balance, language.cross_entropy]);
            }
            reducer.finish_round()?;
        }
        reducer.finish(&mut self.grads)?;
        Ok((self.sum_losses(&parts, totals)?, self.norms()?))
    }

    /// The losses of the step, from [`LOSSES`] values of each micro-batch of this rank.
    fn sum_losses(&self, own: &[f64], totals: Totals) -> Result<Losses> {
        let all = self.ranks.world.all_gather_f64(Kind::Scalars, own)?;
        let (groups, parts) = (self.config.batch.groups, self.ranks.context.size());
        let (data_ranks, per_group) = (self.ranks.data_ranks(), self.config.batch.accumulation / groups);
        let mut losses = Losses::default();
        for group in 0..groups {
            let (round, rank) = (group / data_ranks, group % data_ranks);
            let members = &all[rank * parts..(rank + 1) * parts];
            for index in 0..per_group {
                let at = LOSSES * (round * per_group + index);
                let sum = |which: usize| members.iter().map(|values| values[at + which]).sum::<f64>();
                losses.language += sum(0) / totals.counted.max(1) as f64;
                losses.indexer += sum(1);
                losses.balance += sum(2);
                losses.cross_entropy += sum(3) / totals.counted.max(1) as f64;
            }
        }
        Ok(losses)
    }

    /// Norms of the gradients, which the ranks may share.
    fn norms(&self) -> Result<Norms> {
        if !self.ranks.shard.divides_updates() {
            return Ok(self.optimizer.norms(&self.grads));
        }
        let slots = &self.optimizer.slots;
        let mut squares: Vec<Vec<f64>> =
            slots.iter().map(|slot| block_squares(gradient(&self.grads, slot.place))).collect();
        self.shards.gather_blocks(&self.ranks, &mut squares, |slot| match slots[slot].place {
            Place::Weight(weight) => Some(weight),
            _ => None,
        })?;
        Ok(self.optimizer.norms_of(&squares))
    }
}
