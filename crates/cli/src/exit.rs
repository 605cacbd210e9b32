//! Exit codes, and the code of each error.

use std::io;
use std::path::{Path, PathBuf};

use ballast_contract::ErrorKind;
use ballast_contract::rules::PolicyError;
use ballast_files::{Place, is_full};

use crate::call::Failure;
use crate::commands::Global;
use crate::{launcher, output};

/// Every exit code with its meaning: the list of `ballast --help`, with which a test compares the pages.
pub(crate) const CODES: [(u8, &str); 8] = [
    (0, "success"),
    (1, "a check failed"),
    (2, "usage or configuration"),
    (3, "bad or missing input"),
    (4, "not enough memory or disk space"),
    (5, "NaN or infinity"),
    (6, "a rank failed or does not answer"),
    (130, "interrupted"),
];

/// Returns [`CODES`] as a section of `ballast --help`.
pub(crate) fn codes_help() -> String {
    CODES
        .iter()
        .fold("Exit codes:".into(), |text, (code, meaning)| text + &format!("\n  {code:3}  {meaning}"))
}

/// The end of a command that returned no error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Success.
    Ok,
    /// The command finished, and a check failed.
    CheckFailed,
    /// The user interrupted the command, which has reported its progress.
    Interrupted,
    /// A failure that has been reported, with its exit code.
    Failed(u8),
}

/// A mistake in the arguments.
#[derive(Debug)]
pub(crate) struct Usage(pub(crate) String);

impl std::fmt::Display for Usage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// Prints help and version on stdout, a mistake in the arguments on stderr.
pub(crate) fn usage(error: &clap::Error) -> u8 {
    if launcher::rank() > 0 {
        // The first rank says it.
        return if error.use_stderr() { 2 } else { 0 };
    }
    if error.use_stderr() {
        let _ = error.print();
        return 2;
    }
    let printed = error.print();
    ended(Outcome::Ok, printed.and(output::finish()))
}

/// Returns the exit code of a command that finished, or that of a failure to print its output.
fn ended(outcome: Outcome, printed: io::Result<()>) -> u8 {
    if let Err(error) = printed
        && error.kind() != io::ErrorKind::BrokenPipe
    {
        output::error(&format!("standard output: cannot write: {error}"));
        return if is_full(&error) { 4 } else { 3 };
    }
    match outcome {
        Outcome::Ok => 0,
        Outcome::CheckFailed => 1,
        Outcome::Interrupted => 130,
        Outcome::Failed(code) => code,
    }
}

/// Returns the exit code of a command and prints its error.
pub(crate) fn code(result: anyhow::Result<Outcome>, global: &Global) -> u8 {
    let error = match result {
        Ok(outcome) => return ended(outcome, output::finish()),
        Err(error) => error,
    };
    let code = code_of(known(&error).kind);
    if !crate::cluster::reports() {
        return code;
    }
    if global.json {
        global
            .print_json("error", &serde_json::json!({ "message": format!("{error:#}"), "exit_code": code }));
    }
    let message = format!("{error:#}");
    // Errors of policy files quote a line, and tensors that do not match a model are listed; all others are
    // one line.
    let lines = known(&error).is_list;
    let message = if lines { output::clean_lines(&message) } else { output::clean(&message) };
    output::error(&message);
    // A failure to print is less important than the error of the command.
    let _ = output::finish();
    code
}

/// Returns the error of a command as data.
pub(crate) fn failure(error: &anyhow::Error) -> Failure {
    let Known { kind, file, place, .. } = known(error);
    let (message, code) = (format!("{error:#}"), code_of(kind));
    Failure { message, code, file: file.map(PathBuf::from), tensor: place.tensor, byte: place.byte }
}

/// The facts about an error that do not depend on the crate it is from.
struct Known<'a> {
    kind: ErrorKind,
    file: Option<&'a Path>,
    place: Place,
    /// True if the message has several lines.
    is_list: bool,
}

fn known(error: &anyhow::Error) -> Known<'_> {
    macro_rules! known {
        ($($of:ty),*) => {$(
            if let Some(error) = error.downcast_ref::<$of>() {
                let (kind, file, place) = (error.kind(), error.file(), error.place());
                return Known { kind, file, place, is_list: error.is_list() };
            }
        )*};
    }
    known!(ballast_files::Error, ballast_model::Error, ballast_train::Error, ballast_lab::Error);
    let (kind, is_list) = if let Some(error) = error.downcast_ref::<PolicyError>() {
        (error.kind(), true)
    } else if error.is::<Usage>() {
        (ErrorKind::Usage, false)
    } else if error.downcast_ref::<io::Error>().is_some_and(is_full) {
        (ErrorKind::Space, false)
    } else {
        (ErrorKind::Input, false)
    };
    Known { kind, file: None, place: Place::default(), is_list }
}

/// Returns the exit code of a kind of errors.
pub(crate) fn code_of(kind: ErrorKind) -> u8 {
    match kind {
        ErrorKind::Check => 1,
        ErrorKind::Usage => 2,
        ErrorKind::Input => 3,
        ErrorKind::Space => 4,
        ErrorKind::Diverged => 5,
        ErrorKind::Rank => 6,
        ErrorKind::Interrupted => 130,
    }
}
