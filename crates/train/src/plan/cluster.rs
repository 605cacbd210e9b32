//! The plan of a run on a cluster that may not be here.

use ballast_cluster::Kind;
use ballast_model::{Model, memory};
use serde::Serialize;

use super::blueprint::Blueprint;
use super::memory::MemoryPlan;
use super::time::{Rates, StepTime};
use crate::config::{RecomputeLevel, Shard, TrainConfig};
use crate::error::{Error, Result};
use crate::setup;

/// Number of alternatives that are looked for.
const ALTERNATIVES: usize = 5;

/// Largest factor by which an alternative has more ranks.
const MOST_MORE_RANKS: usize = 256;

/// Ranks whose memory is computed to find the fullest.
const CANDIDATES: usize = 4;

/// Bytes sent in a step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Sent {
    /// Kind of message: gradients, weights and others.
    pub kind: &'static str,
    /// Bytes of the rank that sends most.
    pub rank_bytes: u64,
    /// Bytes of all ranks.
    pub all_bytes: u64,
}

/// Memory, messages and time of a run on some number of ranks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ClusterPlan {
    /// Number of ranks.
    pub ranks: usize,
    /// The rank that needs most memory.
    pub fullest_rank: usize,
    /// Its memory.
    pub memory: MemoryPlan,
    /// Its peak memory while the model is read or drawn.
    pub loading_bytes: u64,
    /// Bytes sent in a step, by kind.
    pub sent: Vec<Sent>,
    /// Time of a step.
    pub time: StepTime,
    /// Tokens of a step, over all ranks.
    pub tokens: u64,
}

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

impl ClusterPlan {
    /// The plan of a run on `ranks` ranks. `model` may be without values: see [`setup::outline`].
    pub fn new(config: &TrainConfig, model: &Model, ranks: usize, rates: &Rates) -> Result<ClusterPlan> {
        let precision = setup::precision(config, &model.config)?;
        let blueprint = Blueprint::new(config, model, &precision, ranks)?;
        let Fullest { rank, memory, loading } = Fullest::of(&blueprint)?;
        let by_rank = blueprint.sent()?;
        let sent = |kind: &Kind| {
            let bytes = || by_rank.iter().map(|sent| sent.get(kind).copied().unwrap_or(0));
            Sent { kind: kind.name(), rank_bytes: bytes().max().unwrap_or(0), all_bytes: bytes().sum() }
        };
        let batch = &config.batch;
        Ok(ClusterPlan {
            ranks,
            fullest_rank: rank,
            memory,
            loading_bytes: loading,
            sent: Kind::COUNTED.iter().map(sent).filter(|sent| sent.all_bytes > 0).collect(),
            time: blueprint.time(rates)?,
            tokens: (batch.sequences * batch.accumulation * config.data.sequence_length) as u64,
        })
    }

    /// Bytes that the fullest rank needs: in a step, or while the model is made.
    pub fn needed(&self) -> u64 {
        self.memory.total().max(self.loading_bytes)
    }
}

/// The rank that needs most memory.
struct Fullest {
    rank: usize,
    memory: MemoryPlan,
    loading: u64,
}

impl Fullest {
    fn of(blueprint: &Blueprint<'_>) -> Result<Fullest> {
        let program = memory::with_all_code().unwrap_or(0);
        let mut fullest: Option<Fullest> = None;
        for part in blueprint.sample_parts() {
            let activations = blueprint.activations(part)?;
            for rank in blueprint.fullest(CANDIDATES, part) {
                let mut memory = blueprint.memory(&activations, rank);
                memory.rows.insert(0, ("the program and its code".into(), program));
                let loading = program + blueprint.loading(&activations, rank);
                let candidate = Fullest { rank, memory, loading };
                if fullest.as_ref().is_none_or(|fullest| fullest.needed() < candidate.needed()) {
                    fullest = Some(candidate);
                }
            }
        }
        fullest.ok_or_else(|| Error::Config("a run needs at least one rank".into()))
    }

    fn needed(&self) -> u64 {
        self.memory.total().max(self.loading)
    }
}

impl Alternative {
    /// Settings with which a run fits into `limit` bytes per rank: the same ranks first, with more divided, more
    /// recomputed, longer sequences shared; then more ranks. The number of ranks changes the groups of a step, and
    /// its micro-batches, where they cannot be divided over so many.
    pub fn find(
        config: &TrainConfig,
        model: &Model,
        ranks: usize,
        rates: &Rates,
        limit: u64,
    ) -> Result<Vec<Alternative>> {
        let precision = setup::precision(config, &model.config)?;
        let shards = [Shard::None, Shard::Optimizer, Shard::Gradients, Shard::Weights];
        let levels = [RecomputeLevel::None, RecomputeLevel::Selective, RecomputeLevel::Full];
        let mut found = Vec::new();
        let factors = std::iter::successors(Some(1), |factor| Some(2 * factor));
        for ranks in factors.take_while(|factor| *factor <= MOST_MORE_RANKS).map(|factor| factor * ranks) {
            let contexts = std::iter::successors(Some(config.cluster.context), |context| Some(2 * context));
            let most = ranks.min(config.batch.sequences.saturating_mul(config.data.sequence_length));
            for context in
                contexts.take_while(|context| *context <= most).filter(|c| ranks.is_multiple_of(*c))
            {
                for level in levels.into_iter().filter(|level| *level >= config.precision.recompute) {
                    for shard in shards.into_iter().filter(|shard| *shard >= config.cluster.shard) {
                        let mut other = config.clone();
                        (other.cluster.shard, other.cluster.context) = (shard, context);
                        other.precision.recompute = level;
                        adapt_groups(&mut other, ranks);
                        let blueprint = Blueprint::new(&other, model, &precision, ranks)?;
                        let bytes = Fullest::of(&blueprint)?.needed();
                        if bytes <= limit {
                            let (settings, seconds) =
                                (differences(config, &other), blueprint.time(rates)?.total);
                            found.push(Alternative { ranks, settings, bytes, seconds });
                            // A stronger division would fit as well.
                            break;
                        }
                    }
                    if found.len() == ALTERNATIVES {
                        return Ok(found);
                    }
                }
            }
        }
        Ok(found)
    }
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
fn differences(config: &TrainConfig, other: &TrainConfig) -> Vec<String> {
    let name = |shard: Shard| format!("{shard:?}").to_lowercase();
    let level = |level: RecomputeLevel| format!("{level:?}").to_lowercase();
    let settings = |config: &TrainConfig| {
        [
            format!("cluster.shard={}", name(config.cluster.shard)),
            format!("precision.recompute={}", level(config.precision.recompute)),
            format!("cluster.context={}", config.cluster.context),
            format!("batch.groups={}", config.batch.groups),
            format!("batch.accumulation={}", config.batch.accumulation),
        ]
    };
    let (before, after) = (settings(config), settings(other));
    after.into_iter().zip(before).filter(|(after, before)| after != before).map(|(after, _)| after).collect()
}
