//! Tests of whole jobs: runs over several ranks, with every setting that divides them. They take a minute, so they are
//! apart from the others, and `.ci/quick` leaves them out.

#[allow(dead_code)] // each binary uses a part of this
mod common;

mod plan_ranks;
mod ranks;
