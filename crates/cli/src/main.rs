//! The `ballast` command.
#![forbid(unsafe_code)]

#[global_allocator]
static ALLOCATOR: ballast_model::limits::Allocator = ballast_model::limits::Allocator;

fn main() -> std::process::ExitCode {
    // The list of arguments is allocated before the program begins.
    ballast_model::limits::become_errors();
    std::process::ExitCode::from(ballast_ml::run(std::env::args_os()))
}
