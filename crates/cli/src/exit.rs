//! Exit codes, and the code of each error.

use std::io;
use std::path::PathBuf;

use ballast_checkpoint::error::is_full;
use ballast_checkpoint::{Error, ErrorKind};
use ballast_contract::rules::PolicyError;
use ballast_lab::Error as LabError;
use ballast_model::Error as ModelError;
use ballast_train::Error as TrainError;

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
    let code = code_of(&error);
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
    let lists = |error: &ModelError| matches!(error, ModelError::Tensors { .. });
    let in_training = |error: &TrainError| matches!(error, TrainError::Model(error) if lists(error));
    let in_lab = |error: &LabError| match error {
        LabError::Model(error) => lists(error),
        LabError::Train(error) => in_training(error),
        LabError::Choice(_) => true,
        LabError::Input(_) => false,
    };
    let lines = error.downcast_ref::<PolicyError>().is_some()
        || error.downcast_ref::<LabError>().is_some_and(in_lab)
        || error.downcast_ref::<ModelError>().is_some_and(lists)
        || error.downcast_ref::<TrainError>().is_some_and(in_training);
    let message = if lines { output::clean_lines(&message) } else { output::clean(&message) };
    output::error(&message);
    // A failure to print is less important than the error of the command.
    let _ = output::finish();
    code
}

/// Returns the error of a command as data.
pub(crate) fn failure(error: &anyhow::Error) -> Failure {
    let mut failure = Failure { message: format!("{error:#}"), code: code_of(error), ..Failure::default() };
    if let Some(error) = checkpoint_error(error) {
        let place = error.place();
        failure.file = error.file().map(PathBuf::from);
        (failure.tensor, failure.byte) = (place.tensor, place.byte);
    } else {
        failure.file = file_of(error);
    }
    failure
}

/// Returns the training error in an error, on its own or in a study.
fn train_error(error: &anyhow::Error) -> Option<&TrainError> {
    match error.downcast_ref() {
        Some(LabError::Train(error)) => Some(error),
        _ => error.downcast_ref(),
    }
}

fn model_error(error: &anyhow::Error) -> Option<&ModelError> {
    match (error.downcast_ref(), train_error(error)) {
        (Some(LabError::Model(error)), _) | (_, Some(TrainError::Model(error))) => Some(error),
        _ => error.downcast_ref(),
    }
}

fn checkpoint_error(error: &anyhow::Error) -> Option<&Error> {
    match model_error(error) {
        Some(ModelError::Checkpoint(error)) => Some(error),
        _ => error.downcast_ref(),
    }
}

fn file_of(error: &anyhow::Error) -> Option<PathBuf> {
    match (model_error(error), train_error(error)) {
        (Some(ModelError::Config { file, .. } | ModelError::Text { file, .. }), _)
        | (Some(ModelError::Tensors { root: file, .. }), _)
        | (_, Some(TrainError::Data { file, .. }))
        | (_, Some(TrainError::Resume { path: file, .. } | TrainError::Io { path: file, .. })) => {
            Some(file.clone())
        }
        _ => None,
    }
}

fn code_of(error: &anyhow::Error) -> u8 {
    if let Some(error) = error.downcast_ref::<Error>() {
        return code_of_kind(error.kind());
    }
    if let Some(error) = error.downcast_ref::<ModelError>() {
        return code_of_model(error);
    }
    if let Some(error) = error.downcast_ref::<TrainError>() {
        return code_of_training(error);
    }
    if let Some(error) = error.downcast_ref::<LabError>() {
        return match error {
            LabError::Choice(_) => 2,
            LabError::Input(_) => 3,
            LabError::Model(error) => code_of_model(error),
            LabError::Train(error) => code_of_training(error),
        };
    }
    if error.downcast_ref::<io::Error>().is_some_and(is_full) {
        return 4;
    }
    let usage = error.downcast_ref::<PolicyError>().is_some() || error.downcast_ref::<Usage>().is_some();
    if usage { 2 } else { 3 }
}

/// Returns the exit code of a training error.
pub(crate) fn code_of_training(error: &TrainError) -> u8 {
    match error {
        TrainError::Config(_) => 2,
        TrainError::Io { cause, .. } if is_full(cause) => 4,
        TrainError::Data { .. } | TrainError::Resume { .. } | TrainError::Io { .. } => 3,
        TrainError::Diverged(_) => 5,
        TrainError::Cluster(_) => 6,
        TrainError::Model(error) => code_of_model(error),
    }
}

fn code_of_model(error: &ModelError) -> u8 {
    match error {
        ModelError::Checkpoint(error) => code_of_kind(error.kind()),
        ModelError::Precision(_) => 2,
        ModelError::Memory { .. } => 4,
        ModelError::NotFinite(_) => 5,
        _ => 3,
    }
}

fn code_of_kind(kind: ErrorKind) -> u8 {
    match kind {
        ErrorKind::Check => 1,
        ErrorKind::Usage => 2,
        ErrorKind::Input => 3,
        ErrorKind::Space => 4,
        ErrorKind::Interrupted => 130,
    }
}
