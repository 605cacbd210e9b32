//! Models and adapters as GGUF files: the tensors with llama.cpp's transforms, beside the header of [`ballast_gguf`].
//!
//! `tensors.rs`: tensors under llama.cpp's names. `model.rs`, `adapter.rs`: whole files.

mod adapter;
mod model;
mod tensors;

pub use self::adapter::{AdapterOptions, AdapterReport, convert_adapter};
pub(crate) use self::model::{GgufFile, plan, write};
