//! The `ballast` command as a library: [`run`] is the whole program, [`call`] runs one command inside another
//! program, such as Python.
//!
//! ```
//! use std::sync::Arc;
//!
//! use ballast_files::jobs::Silent;
//! use ballast_ml::{Call, call};
//!
//! let args = vec!["audit".into(), "--rules".into()];
//! let answer = call(Call { args, policy: None, observer: Arc::new(Silent) }).map_err(|failure| failure.message)?;
//! assert!(answer.passed && answer.document.contains("A_log"));
//! # Ok::<(), String>(())
//! ```
#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)] // They panic on a closed pipe; see output.rs.

mod call;
mod cluster;
mod commands;
mod compare;
mod exit;
mod launcher;
mod output;
mod progress;
mod warnings;

use std::ffi::OsString;

use clap::{CommandFactory, Parser};

pub use call::{Answer, Call, Failure, call};

/// Returns the commands and options with their help, for whatever checks or describes a command line without
/// running it.
pub fn command() -> clap::Command {
    commands::Cli::command()
}

/// Runs the program with its arguments, the first of which is its name. Returns its exit code.
pub fn run(args: impl IntoIterator<Item = OsString>) -> u8 {
    ballast_model::limits::become_errors();
    ballast_model::memory::keep_freed();
    progress::watch_waits();
    let code = match commands::Cli::try_parse_from(args) {
        Ok(cli) => cluster::has_nothing_to_do(cli.runs_on_all_ranks()).unwrap_or_else(|| {
            let (result, global) = cli.run();
            cluster::end(exit::code(result, &global))
        }),
        Err(usage) => exit::usage(&usage),
    };
    debug_assert!(exit::CODES.iter().any(|(known, _)| *known == code), "exit code {code} is not in the list");
    code
}
