//! Integration tests, as modules of one binary.

mod architectures;
mod holder;
mod page;
