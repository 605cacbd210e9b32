//! A run over several processes: the division of work and tensors.
//!
//! ```text
//! world rank     data * context + part of the sequence
//! step           G groups of micro-batches (batch.groups), each a stream of documents of its own
//! round i        data rank d computes group i D + d, for D data ranks
//! gradients      summed over the parts of a sequence, then over the groups, both as trees (ballast_cluster)
//! ```
//! The groups of a round are a subtree of the sum over all groups, so 1, 2 or 4 ranks give the same bits.
//!
//! `shard` divides the weights of each part of the model, and with them masters, optimizer state and
//! gradients, into contiguous ranges, one per rank. Protected tensors and adapters are small: every rank has
//! them whole and updates them itself.

mod agreement;
mod division;
mod machine;
mod memory;
mod probe;
mod reduce;
mod resident;
mod shards;

use std::sync::Arc;

use ballast_cluster::{Group, Kind, Pulse, fits_tree};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::config::{ClusterConfig, Shard, TrainConfig};
use crate::error::{Error, Result};

pub(crate) use agreement::{Fingerprint, check_agreement, check_same_program};
pub(crate) use division::Division;
pub(crate) use probe::check_shared_folder;
pub(crate) use reduce::Reducer;
pub(crate) use resident::{Resident, gather_updates};
pub(crate) use shards::Shards;

/// The ranks of a run.
#[derive(Clone, Debug)]
pub struct Ranks {
    /// All ranks.
    pub world: Group,
    /// The ranks that share the sequences of this one.
    pub context: Group,
    /// Index of this rank among the data ranks.
    data: usize,
    /// Number of data ranks: they have different micro-batches.
    data_ranks: usize,
    groups: usize,
    /// Division of tensors; none for one rank.
    pub(crate) shard: Shard,
    /// Parts of the model whose messages may be in flight at once.
    pub(crate) window: usize,
    /// The others wait for this rank as long as it computes, reads or writes.
    _pulse: Arc<Pulse>,
}

impl Ranks {
    /// Divides the ranks as configured. Returns an error if they do not fit.
    pub(crate) fn new(world: Group, config: &TrainConfig) -> Result<Ranks> {
        let (context, groups) = (config.cluster.context, config.batch.groups);
        let data_ranks = data_ranks(world.size(), config)?;
        let (data, part) = (world.rank() / context, world.rank() % context);
        let members: Vec<usize> = (0..context).map(|part| data * context + part).collect();
        debug_assert_eq!(members[part], world.rank());
        let context = if context == 1 { Group::solo() } else { world.subgroup(&members, 1) };
        let shard = config.cluster.shard_on(world.size());
        let window = config.cluster.window;
        let _pulse = Arc::new(world.pulse()?);
        Ok(Ranks { world, context, data, data_ranks, groups, shard, window, _pulse })
    }

    /// Ranks of which the configuration is not known yet.
    pub(crate) fn equal(world: Group) -> Result<Ranks> {
        let (data, size) = (world.rank(), world.size());
        let (context, shard) = (Group::solo(), Shard::None);
        let _pulse = Arc::new(world.pulse()?);
        Ok(Ranks { world, context, data, data_ranks: size, groups: size, shard, window: 0, _pulse })
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.world.size()
    }

    /// Returns true if there is one rank.
    pub(crate) fn is_solo(&self) -> bool {
        self.size() == 1
    }

    /// Number of data ranks.
    pub(crate) fn data_ranks(&self) -> usize {
        self.data_ranks
    }

    /// The groups of this rank, in order.
    pub(crate) fn own_groups(&self) -> impl Iterator<Item = usize> + use<> {
        let (first, step, groups) = (self.data, self.data_ranks, self.groups);
        (first..groups).step_by(step)
    }

    /// Returns true if this rank does unit `index` of work that the data ranks share.
    pub(crate) fn does(&self, index: usize) -> bool {
        index % self.data_ranks == self.data
    }

    /// Returns true if this rank speaks for those that share its sequences.
    pub(crate) fn speaks(&self) -> bool {
        self.context.is_first()
    }

    /// Returns true on all ranks if the flag is set on any.
    pub(crate) fn any(&self, flag: bool) -> Result<bool> {
        let all = self.world.all_gather(Kind::Scalars, vec![flag.into()], &vec![1; self.size()])?;
        Ok(all.iter().any(|flag| flag[..] != [0]))
    }

    /// Sums values over the data ranks, in order; each value is an integer that f64 holds exactly.
    pub(crate) fn sum_counts<const N: usize>(&self, own: [f64; N]) -> Result<[f64; N]> {
        let own = if self.speaks() { own } else { [0.0; N] };
        let all = self.world.all_gather_f64(Kind::Scalars, &own)?;
        Ok(std::array::from_fn(|i| all.iter().map(|values| values[i]).sum()))
    }

    /// The values of all ranks, as JSON.
    pub(crate) fn exchange<T: Serialize + DeserializeOwned>(&self, kind: Kind, own: &T) -> Result<Vec<T>> {
        let problem = |error: serde_json::Error| Error::Ranks(format!("a message between ranks: {error}"));
        let bytes = serde_json::to_vec(own).map_err(problem)?;
        let all = self.world.all_gather_any(kind, bytes)?;
        all.iter().map(|bytes| serde_json::from_slice(bytes).map_err(problem)).collect()
    }

    /// The value of rank 0.
    pub(crate) fn value_of_first<T: Serialize + DeserializeOwned>(&self, own: Option<&T>) -> Result<T> {
        let problem = |error: serde_json::Error| Error::Ranks(format!("a message between ranks: {error}"));
        let bytes = own.map(serde_json::to_vec).transpose().map_err(problem)?.unwrap_or_default();
        let bytes = self.world.broadcast(Kind::Setup, 0, bytes)?;
        serde_json::from_slice(&bytes).map_err(problem)
    }

    /// Does work on rank 0 while the others wait for it. Returns the result there, and `None`
    /// elsewhere; an error is an error of all.
    pub(crate) fn on_first<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<Option<T>> {
        let (done, outcome) = match self.world.is_first() {
            true => match work() {
                Ok(done) => (Some(done), Ok(())),
                Err(error) => (None, Err(error)),
            },
            false => (None, Ok(())),
        };
        self.all_succeeded(outcome)?;
        Ok(done)
    }

    /// Ends a step that only some ranks take: an error of one is an error of all, which names the rank.
    pub(crate) fn all_succeeded(&self, own: Result) -> Result {
        if self.is_solo() {
            return own;
        }
        let text = own.as_ref().err().map(|error| error.to_string());
        let all = self.exchange(Kind::Setup, &text)?;
        own?;
        match all.iter().enumerate().find_map(|(rank, text)| Some((rank, text.as_ref()?))) {
            Some((rank, text)) => Err(ballast_cluster::Error::Failed(format!("rank {rank}: {text}")).into()),
            None => Ok(()),
        }
    }
}

/// Number of ranks with different micro-batches among `size` ranks. Returns an error if they do not fit.
pub(crate) fn data_ranks(size: usize, config: &TrainConfig) -> Result<usize> {
    let (context, groups) = (config.cluster.context, config.batch.groups);
    if !size.is_multiple_of(context) {
        return Err(Error::config(
            "cluster.context",
            format!(
                "`cluster.context` {context} must divide the number of ranks, got {size}; start a multiple of {context}"
            ),
        ));
    }
    let data_ranks = size / context;
    if !fits_tree(groups, data_ranks) {
        let fitting: Vec<String> = (1..=groups)
            .filter(|ranks| fits_tree(groups, *ranks))
            .map(|ranks| (ranks * context).to_string())
            .collect();
        return Err(Error::config(
            "batch.groups",
            format!(
                "`batch.groups` {groups} cannot be divided over {size} ranks: it allows {} ranks; set batch.groups to \
             {data_ranks} or a multiple by a power of two, and batch.accumulation to a multiple of it",
                fitting.join(", ")
            ),
        ));
    }
    Ok(data_ranks)
}

impl ClusterConfig {
    /// Division of tensors in a run on so many ranks.
    pub(crate) fn shard_on(&self, ranks: usize) -> Shard {
        if ranks == 1 { Shard::None } else { self.shard }
    }
}

impl Shard {
    pub(crate) fn divides_updates(self) -> bool {
        self >= Shard::Optimizer
    }

    pub(crate) fn divides_gradients(self) -> bool {
        self >= Shard::Gradients
    }

    pub(crate) fn divides_weights(self) -> bool {
        self == Shard::Weights
    }
}
