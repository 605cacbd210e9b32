//! Checkpoints, as safetensors, in torch's formats or as GGUF, on disk or on a server: open, stream, write
//! atomically, convert, audit, compare, repair.

#![forbid(unsafe_code)]

mod assembly;
pub mod audit;
pub mod cast;
pub mod convert;
pub mod diff;
pub mod encoding;
pub mod error;
mod folder;
pub mod fp8;
pub mod gguf;
pub mod header;
pub mod hub;
pub mod index;
pub mod inspect;
pub mod jobs;
pub mod layout;
pub mod left_out;
mod masters;
pub mod open;
mod ranks;
pub mod regular;
pub mod repair;
mod shard_file;
mod shards;
pub mod staging;
pub mod synthetic;
pub mod tensor_file;
pub mod tied;
pub mod torch;
mod transfer;
pub mod verify;
pub mod view;
pub mod write;

pub use error::{Error, ErrorKind, Result};
pub use folder::look_at;
pub use open::Checkpoint;
pub use view::View;

/// The examples of README.md, run as tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
