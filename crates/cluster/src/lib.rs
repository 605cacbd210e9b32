//! Messages and sums between the processes of a training run.
//!
//! ```text
//! Transport   moves bytes between two ranks: Solo (one process), threads (tests), MPI (ballast-mpi)
//! Group       collective operations of a group of ranks, with a time limit and byte counts
//! TreeSum     a sum in the order of a binary tree, which fixes the bits of a result
//! ```
//! Results do not depend on the order of arrival: a sum waits for all its terms and adds them in a fixed tree.
//!
//! # Example
//! ```
//! use ballast_cluster::{Kind, threads};
//!
//! let sums = threads::run(4, |group| group.all_reduce(Kind::Gradients, &[1.0, 2.0, 3.0]).unwrap());
//! assert!(sums.iter().all(|sum| sum[..] == [4.0, 8.0, 12.0]));
//! ```
#![forbid(unsafe_code)]

mod collective;
mod error;
mod group;
mod presence;
pub mod threads;
mod traffic;
mod transport;
mod tree;

pub use collective::{Gather, ReduceScatter, even_parts};
pub use error::{Error, Result};
pub use group::{Group, Receive};
pub use presence::{PRESENCE, Pulse};
pub use traffic::{Kind, Traffic};
pub use transport::{Solo, Ticket, Transport};
pub use tree::{TreeSum, fits_tree};
