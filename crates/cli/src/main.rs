//! The `ballast` command.
#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)] // They panic on a closed pipe; see output.rs.

mod cluster;
mod commands;
mod compare;
mod exit;
mod launcher;
mod output;
mod progress;
mod warnings;

use clap::Parser;

fn main() -> std::process::ExitCode {
    ballast_model::memory::keep_freed();
    let code = match commands::Cli::try_parse() {
        Ok(cli) => cluster::has_nothing_to_do(cli.runs_on_all_ranks()).unwrap_or_else(|| {
            let (result, global) = cli.run();
            cluster::end(exit::code(result, &global))
        }),
        Err(usage) => exit::usage(&usage),
    };
    std::process::ExitCode::from(code)
}
