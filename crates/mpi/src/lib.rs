//! Ranks of [`ballast_cluster`] that are processes under MPI. Empty without the feature `mpi`.
//!
//! A crate of its own, so that the feature rebuilds neither the model nor the training.

#[cfg(feature = "mpi")]
mod mpi;

#[cfg(feature = "mpi")]
pub use mpi::{abort, finish, start, start_with_limit};
