//! `ballast`: the command line.

mod commands;
mod compare;
mod exit;
mod output;
mod progress;

use clap::Parser;

fn main() -> std::process::ExitCode {
    ballast_model::memory::keep_freed();
    let cli = commands::Cli::parse();
    let json = cli.json();
    exit::code(cli.run(), json)
}
