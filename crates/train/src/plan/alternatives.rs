//! Settings with which a run fits, where those that are given do not.
//!
//! ```text
//! fewest ranks first, then twice as many; on so many the fastest, then slower ones that cost less
//!
//! changed last     storage of moments, which changes the result of a run beyond the order of sums
//!                  ranks that share a sequence
//!                  recomputation
//! changed freely   division of tensors and messages under way: they cost time alone, which is counted
//! ```

use ballast_model::{Model, Precision, Recompute, memory};
use serde::Serialize;

use super::blueprint::Blueprint;
use super::cluster::Fullest;
use super::time::Rates;
use crate::config::{Change, MomentStorage, Shard, TrainConfig, changes};
use crate::error::Result;
use crate::setup;

/// Numbers of ranks for which alternatives are listed: the fewest that fit, and twice as many.
const RANK_COUNTS: usize = 2;

/// Largest factor by which an alternative has more ranks.
const MOST_MORE_RANKS: usize = 256;

const SHARDS: [Shard; 4] = [Shard::None, Shard::Optimizer, Shard::Gradients, Shard::Weights];

const LEVELS: [Recompute; 3] = [Recompute::None, Recompute::Selective, Recompute::Full];

/// From the most bytes to the fewest.
const MOMENTS: [MomentStorage; 3] = [MomentStorage::F32, MomentStorage::Bf16, MomentStorage::Bits8];

/// Other settings with which a run fits.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Alternative {
    /// Number of ranks.
    pub ranks: usize,
    /// Settings that differ, as `key=value`.
    pub settings: Vec<String>,
    /// Bytes of the fullest rank.
    pub bytes: u64,
    /// Seconds of a step.
    pub seconds: f64,
}

/// Settings that fit, before the best are chosen.
struct Candidate {
    config: TrainConfig,
    bytes: u64,
    seconds: f64,
}

/// Search for the settings of one run.
struct Search<'a> {
    config: &'a TrainConfig,
    model: &'a Model,
    precision: Precision,
    rates: &'a Rates,
    limit: u64,
    /// Memory of the program and its code.
    program: u64,
}

impl Alternative {
    /// Settings with which a run fits into `limit` bytes per rank, on the fewest ranks first, and the fastest first
    /// for each number of ranks. That number changes the groups of a step, and its micro-batches, where they cannot
    /// be divided over so many.
    pub fn find(
        config: &TrainConfig,
        model: &Model,
        ranks: usize,
        rates: &Rates,
        limit: u64,
    ) -> Result<Vec<Alternative>> {
        let precision = setup::precision(config, &model.config)?;
        let program = memory::with_all_code().unwrap_or(0);
        let search = Search { config, model, precision, rates, limit, program };
        let (mut found, mut counts) = (Vec::new(), 0);
        let factors = std::iter::successors(Some(1), |factor| Some(2 * factor));
        for ranks in factors.take_while(|factor| *factor <= MOST_MORE_RANKS).map(|factor| factor * ranks) {
            let fitting = best(search.on(ranks)?);
            counts += usize::from(!fitting.is_empty());
            for Candidate { config: other, bytes, seconds } in fitting {
                found.push(Alternative { ranks, settings: differences(config, &other)?, bytes, seconds });
            }
            if counts == RANK_COUNTS {
                break;
            }
        }
        Ok(found)
    }
}

impl Candidate {
    /// Seconds of a token: the number of ranks that share a sequence may change the tokens of a step.
    fn pace(&self) -> f64 {
        let batch = &self.config.batch;
        self.seconds / (batch.sequences * batch.accumulation * self.config.data.sequence_length) as f64
    }

    /// Costs of the settings other than time.
    fn price(&self) -> (Option<usize>, usize, Recompute) {
        let moments = MOMENTS.iter().position(|known| *known == self.config.optimizer.moments);
        (moments, self.config.cluster.context, self.config.precision.recompute)
    }
}

impl Search<'_> {
    /// All settings that fit on so many ranks.
    fn on(&self, ranks: usize) -> Result<Vec<Candidate>> {
        let (config, mut found) = (self.config, Vec::new());
        let contexts = std::iter::successors(Some(config.cluster.context), |context| Some(2 * context));
        let most = ranks.min(config.batch.sequences.saturating_mul(config.data.sequence_length));
        for context in contexts.take_while(|context| *context <= most).filter(|c| ranks.is_multiple_of(*c)) {
            for level in LEVELS.into_iter().filter(|level| *level >= config.precision.recompute) {
                let mut other = config.clone();
                (other.cluster.context, other.precision.recompute) = (context, level);
                adapt_groups(&mut other, ranks);
                self.with_level(&other, ranks, &mut found)?;
            }
        }
        Ok(found)
    }

    /// Adds the settings that fit with this context and level of recomputation, on which activations depend.
    fn with_level(&self, config: &TrainConfig, ranks: usize, found: &mut Vec<Candidate>) -> Result {
        let shards: Vec<Shard> = match ranks {
            1 => vec![config.cluster.shard],
            _ => SHARDS.into_iter().filter(|shard| *shard >= config.cluster.shard).collect(),
        };
        let mut activations = None;
        for shard in shards {
            let variants = lean_variants(config, shard, ranks);
            let mut blueprint = Blueprint::new(&variants[0], self.model, &self.precision, ranks)?;
            let activations = match &activations {
                Some(activations) => activations,
                None => activations.insert(blueprint.sample_activations()?),
            };
            // From the leanest on, without which the others need not be tried.
            for (index, variant) in variants.iter().enumerate().rev() {
                // Neither the moments nor the window change who owns what.
                blueprint.config = variant;
                let bytes = Fullest::of(&blueprint, activations, self.program)?.needed();
                if bytes <= self.limit {
                    let seconds = blueprint.time(self.rates)?.total;
                    found.push(Candidate { config: variant.clone(), bytes, seconds });
                } else if index + 1 == variants.len() {
                    break;
                }
            }
        }
        Ok(())
    }
}

/// The configuration with this division and all smaller moments and windows, the leanest last. One rank has no
/// messages, and adapters have no moments but those of f32.
fn lean_variants(config: &TrainConfig, shard: Shard, ranks: usize) -> Vec<TrainConfig> {
    let given = config.optimizer.moments;
    let moments = MOMENTS.into_iter().skip_while(|moments| *moments != given);
    let moments = moments.take(if config.lora.is_some() { 1 } else { MOMENTS.len() });
    let halved = |window: &usize| (*window > 0).then_some(window / 2);
    let windows: Vec<usize> = std::iter::successors(Some(config.cluster.window), halved).collect();
    let windows = if ranks == 1 { &windows[..1] } else { &windows };
    let mut variants = Vec::new();
    for moments in moments {
        for window in windows {
            let mut other = config.clone();
            (other.cluster.shard, other.cluster.window, other.optimizer.moments) = (shard, *window, moments);
            variants.push(other);
        }
    }
    variants
}

/// The candidates from the fastest on; a slower one only if it costs less than all before it.
fn best(mut candidates: Vec<Candidate>) -> Vec<Candidate> {
    // Of equals, the settings that are nearest to those given.
    let order = |candidate: &Candidate| {
        let cluster = &candidate.config.cluster;
        (candidate.price(), std::cmp::Reverse(cluster.window), cluster.shard)
    };
    candidates.sort_by(|a, b| a.pace().total_cmp(&b.pace()).then_with(|| order(a).cmp(&order(b))));
    let mut kept: Vec<Candidate> = Vec::new();
    for candidate in candidates {
        if kept.last().is_none_or(|faster| candidate.price() < faster.price()) {
            kept.push(candidate);
        }
    }
    kept
}

/// Gives a run as many groups as ranks need, and micro-batches to fill them.
fn adapt_groups(config: &mut TrainConfig, ranks: usize) {
    let data_ranks = ranks / config.cluster.context;
    let batch = &mut config.batch;
    if !ballast_cluster::fits_tree(batch.groups, data_ranks) {
        batch.groups = data_ranks;
        batch.accumulation = batch.accumulation.next_multiple_of(data_ranks);
    }
}

/// The settings of `other` that differ from `config`.
fn differences(config: &TrainConfig, other: &TrainConfig) -> Result<Vec<String>> {
    let setting = |change: Change| {
        // A bare word is a string for --set.
        let value = change.new.map(|value| value.as_str().map_or(value.to_string(), String::from));
        format!("{}={}", change.key.name, value.unwrap_or_default())
    };
    Ok(changes(config, other)?.into_iter().map(setting).collect())
}
