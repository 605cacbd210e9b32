//! The integration tests of the models: one binary, because linking takes longer than most of them.

mod common;

mod adapters;
mod balance;
mod buckets;
mod configurations;
mod context;
mod deepseek;
mod fp8;
mod golden;
mod init;
mod layerwise;
mod oddities;
mod peft;
mod planned_memory;
mod precision;
mod probe;
mod properties;
mod residual;
mod tied;
