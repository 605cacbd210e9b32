//! GGUF, the file format of llama.cpp: the header, and what llama.cpp calls a model's hyperparameters, tokens and
//! tensors.
//!
//! ```text
//! "GGUF" | u32 version | u64 tensors | u64 entries | entries: key, type, value | tensors: name, dims, type, offset
//! padding to the alignment | data, every tensor at a multiple of the alignment
//! ```
//!
//! - [`header`]: entries and descriptions of tensors, parsed with limits, and written.
//! - `family.rs`: architectures, and the fields of config.json. [`parameters`]: config.json to entries. [`names`]:
//!   tensors under llama.cpp's names. [`tokenizer`]: tokenizer.json to entries.
//!
//! A model that llama.cpp cannot express is refused, because it would silently compute something else.

#![forbid(unsafe_code)]

mod family;
pub mod header;
pub mod names;
pub mod parameters;
pub mod tokenizer;

pub use self::family::{Config, Family};

/// Version of the format that is written.
pub(crate) const VERSION: u32 = 3;

/// Alignment of tensors in files that do not state one, and in those that are written.
pub const ALIGNMENT: u64 = 32;

/// Ending of file names.
pub const EXTENSION: &str = "gguf";

/// Entry with the name of the architecture.
pub const ARCHITECTURE: &str = "general.architecture";

/// The examples of README.md, run as tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
