//! GGUF, the file format of llama.cpp: read as any other checkpoint, written for the architectures that it has.
//!
//! ```text
//! "GGUF" | u32 version | u64 tensors | u64 entries | entries: key, type, value | tensors: name, dims, type, offset
//! padding to the alignment | data, every tensor at a multiple of the alignment
//! ```
//!
//! - [`header`]: entries and descriptions of tensors, parsed with limits, and written. [`q8_0`]: the quantized type.
//! - `family.rs`: architectures, and the fields of config.json. `parameters.rs`: config.json to entries.
//!   `names.rs`, `tensors.rs`: tensors under llama.cpp's names, with its transforms. `tokenizer.rs`: tokenizer.json
//!   to entries. `model.rs`, `adapter.rs`: whole files.
//!
//! A model that llama.cpp cannot express is refused, because it would compute something else without a word.

mod adapter;
mod family;
pub mod header;
mod model;
mod names;
mod parameters;
pub mod q8_0;
mod tensors;
mod tokenizer;

pub use self::adapter::{AdapterOptions, AdapterReport, convert_adapter};
pub(crate) use self::model::{GgufFile, plan, write};

/// Version of the format that is written.
pub const VERSION: u32 = 3;

/// Alignment of tensors in files that do not state one, and in those that are written.
pub const ALIGNMENT: u64 = 32;

/// Ending of file names.
pub const EXTENSION: &str = "gguf";

/// Entry with the name of the architecture.
pub const ARCHITECTURE: &str = "general.architecture";
