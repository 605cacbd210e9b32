//! The integration tests of the checkpoint library: one binary, because linking takes longer than most of them.

mod common;

mod architectures;
mod fp8;
mod gguf;
mod gguf_malformed;
mod gguf_tokenizer;
#[cfg(feature = "hub")]
mod hub;
#[cfg(feature = "hub")]
mod hub_cache;
mod layouts;
mod masters;
mod megatron_details;
mod precision;
mod released;
mod torch;
mod torch_export;
mod torch_saved;
mod views;
