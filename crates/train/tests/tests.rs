//! The integration tests of training, but for whole jobs (jobs.rs): one binary, because linking takes longer than most
//! of them.

mod common;

mod alternatives;
mod architectures;
mod configuration;
mod data;
mod faults;
mod lora;
mod machines;
mod moments;
mod muon;
mod nothing_trained;
mod parity;
mod resume;
mod resume_settings;
mod saves;
mod steps;
mod torch_ledger;
mod updates;
