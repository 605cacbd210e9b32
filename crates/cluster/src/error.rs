//! Errors of this crate.

/// Shorthand for results of this crate.
pub type Result<T = (), E = Error> = std::result::Result<T, E>;

/// A failed message between ranks.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Error {
    /// A rank did not respond in time.
    #[error(
        "rank {rank} has not answered for {seconds} s (cluster.timeout); it may have stopped, or its machine is \
         unreachable"
    )]
    Silent {
        /// The rank, in the whole cluster.
        rank: usize,
        /// The time limit.
        seconds: u64,
    },
    /// A rank ended the run.
    #[error("{0}")]
    Failed(String),
    /// The transport refused a message.
    #[error("message between rank {from} and rank {to}: {problem}")]
    Transport {
        /// The sender.
        from: usize,
        /// The receiver.
        to: usize,
        /// The problem.
        problem: String,
    },
}
