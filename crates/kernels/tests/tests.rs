//! The integration tests of the kernels: one binary, because linking takes longer than most of them.

mod saved;
mod scratch;
