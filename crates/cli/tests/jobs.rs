//! Tests of whole jobs: conversions that are killed, and ranks under a launcher. They need the cores for themselves, so
//! they are apart from the others, and `.ci/quick` leaves them out.

#[allow(dead_code)] // each binary uses a part of this
mod common;

mod killed;
mod launched;
#[cfg(feature = "mpi")]
mod mpirun;
