//! The integration tests of the lab: one binary, because linking takes longer than most of them.

mod common;
mod tiny;

mod choices;
mod policies;
mod reference;
mod report;
mod studies;
