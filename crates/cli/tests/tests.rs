//! The integration tests of the binary, but for whole jobs (jobs.rs): one binary, because linking takes longer than
//! most of them.

mod common;
#[cfg(feature = "hub")]
#[path = "../../checkpoint/tests/common/server.rs"]
mod server;

mod advice;
mod audit_formats;
mod bad_destinations;
mod bad_headers;
mod bad_indexes;
mod bad_tensors;
mod byte_order_mark;
mod changing_disk;
mod config_keys;
mod data;
mod docs;
mod eval;
mod generate;
mod help;
#[cfg(feature = "hub")]
mod hub;
mod lab;
mod not_finite;
mod odd_input;
mod oracle;
#[cfg(target_os = "linux")]
mod output;
#[cfg(target_os = "linux")]
mod paths;
mod policies;
mod release;
mod report;
mod sizes;
mod tied;
mod trace;
mod train;
mod train_ends;
mod used_destinations;
