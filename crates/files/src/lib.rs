//! Files of tensors: safetensors headers, casts between dtypes, files read by position, and folders that appear
//! complete or not at all.

#![forbid(unsafe_code)]

pub mod assembly;
pub mod cast;
pub mod encoding;
mod error;
mod folder;
pub mod frame;
pub mod header;
pub mod index;
pub mod jobs;
pub mod left_out;
pub mod q8_0;
pub mod ranks;
pub mod regular;
mod shard_file;
pub mod staging;

pub use ballast_contract::ErrorKind;
pub use error::{Error, Place, Result, is_full};
pub use folder::{Disk, Folder, is_sidecar, look_at};
pub use shard_file::{ShardFile, Source, open_shard, read_header};

/// The examples of README.md, run as tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
