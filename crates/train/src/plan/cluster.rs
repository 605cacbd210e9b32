//! The plan of a run on a cluster that may not be here.

use ballast_cluster::Kind;
use ballast_model::{Model, Plan, memory};
use serde::Serialize;

use super::blueprint::Blueprint;
use super::memory::MemoryPlan;
use super::time::{Rates, StepTime};
use crate::config::TrainConfig;
use crate::error::{Error, Result};
use crate::setup;

/// Memory that MPI takes on a rank. Open MPI 4.1.4 on one machine took 8 to 11 MiB at its start on 2 to 8 ranks, and
/// up to 1 MiB more after messages of all sizes (resident memory of a program that does nothing else).
const MPI_BYTES: u64 = 12 << 20;

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

impl ClusterPlan {
    /// The plan of a run on `ranks` ranks. `model` may be without values: see [`setup::outline`].
    pub fn new(config: &TrainConfig, model: &Model, ranks: usize, rates: &Rates) -> Result<ClusterPlan> {
        let precision = setup::precision(config, &model.config)?;
        let blueprint = Blueprint::new(config, model, &precision, ranks)?;
        let Fullest { rank, memory, loading } =
            Fullest::of(&blueprint, &blueprint.sample_activations()?, memory::with_all_code().unwrap_or(0))?;
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
pub(super) struct Fullest {
    rank: usize,
    memory: MemoryPlan,
    loading: u64,
}

impl Blueprint<'_> {
    /// The parts of [`Blueprint::sample_parts`] with their activations.
    pub(super) fn sample_activations(&self) -> Result<Vec<(usize, Plan)>> {
        self.sample_parts().into_iter().map(|part| Ok((part, self.activations(part)?))).collect()
    }
}

impl Fullest {
    /// The fullest rank, with the activations of some parts of a sequence and the memory of the program.
    pub(super) fn of(
        blueprint: &Blueprint<'_>,
        activations: &[(usize, Plan)],
        program: u64,
    ) -> Result<Fullest> {
        let mpi = if blueprint.is_solo() { 0 } else { MPI_BYTES };
        let mut fullest: Option<Fullest> = None;
        for (part, activations) in activations {
            for rank in blueprint.fullest(CANDIDATES, *part) {
                let mut memory = blueprint.memory(activations, rank);
                memory.rows.insert(0, ("the program and its code".into(), program));
                if mpi > 0 {
                    memory.rows.insert(1, ("MPI".into(), mpi));
                }
                let loading = program + mpi + blueprint.loading(activations, rank);
                let candidate = Fullest { rank, memory, loading };
                if fullest.as_ref().is_none_or(|fullest| fullest.needed() < candidate.needed()) {
                    fullest = Some(candidate);
                }
            }
        }
        fullest.ok_or_else(|| Error::Ranks("a run needs at least one rank".into()))
    }

    /// Bytes that the rank needs: in a step, or while the model is made.
    pub(super) fn needed(&self) -> u64 {
        self.memory.total().max(self.loading)
    }
}
