//! The `ballast` command.
#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)] // They panic on a closed pipe; see output.rs.

mod commands;
mod compare;
mod exit;
mod output;
mod progress;
mod warnings;

use clap::Parser;

fn main() -> std::process::ExitCode {
    ballast_model::memory::keep_freed();
    match commands::Cli::try_parse() {
        Ok(cli) => {
            let (result, global) = cli.run();
            exit::code(result, &global)
        }
        Err(usage) => exit::usage(&usage),
    }
}
