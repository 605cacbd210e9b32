//! The `ballast` command.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    std::process::ExitCode::from(ballast_ml::run(std::env::args_os()))
}
