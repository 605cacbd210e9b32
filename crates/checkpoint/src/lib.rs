//! Checkpoints, as safetensors, in torch's formats or as GGUF, on disk or on a server: open, stream, write
//! atomically, convert, audit, compare, repair.

#![forbid(unsafe_code)]

pub mod audit;
pub mod convert;
pub mod diff;
pub mod fp8;
pub mod gguf;
pub mod inspect;
pub mod layout;
mod masters;
mod open;
mod released;
mod remote;
pub mod repair;
mod shards;
pub mod synthetic;
pub mod tensor_file;
pub mod tied;
mod torch;
mod transfer;
mod verify;
mod view;
mod write;

pub use open::{Checkpoint, MemoryTensor, StoredTensor};
pub use torch::FileFormat;
pub use verify::{MovedValues, Verification};
pub use view::View;
pub use write::DEFAULT_SHARD_BYTES;

/// The examples of README.md, run as tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
