//! The MPI transport of [`ballast_cluster`]: ranks are processes. Empty without the feature `mpi`.
//!
//! It is a separate crate, so that the feature does not rebuild model and training.

#[cfg(feature = "mpi")]
mod mpi;

#[cfg(feature = "mpi")]
pub use mpi::{abort, finish, start, start_with_limit};
