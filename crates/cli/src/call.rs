//! One command inside another program: same arguments, and the same JSON document as with `--json`, which is
//! returned instead of printed. Nothing is written to stdout or stderr, and no signal handler is installed.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use ballast_contract::{Policy, Registry};
use ballast_files::jobs::Observer;
use clap::Parser;

use crate::commands::Cli;
use crate::exit::{self, Outcome};

/// A command to run.
pub struct Call {
    /// Arguments, from the name of the command on.
    pub args: Vec<OsString>,
    /// Policy in place of the option `--policy`, and the registry that it belongs to.
    pub policy: Option<(Registry, Policy)>,
    /// Observes the work and can cancel it.
    pub observer: Arc<dyn Observer + Send>,
}

/// The result of a command.
pub struct Answer {
    /// JSON document.
    pub document: String,
    /// False if the command found that a check failed.
    pub passed: bool,
    /// Warnings.
    pub warnings: Vec<String>,
}

/// The error of a command.
#[derive(Debug, Default)]
pub struct Failure {
    /// Message: the problem, its place, and a remedy.
    pub message: String,
    /// Exit code of the program for this error.
    pub code: u8,
    /// File or folder, if the error is about one.
    pub file: Option<PathBuf>,
    /// Tensor, if the error is about one.
    pub tensor: Option<String>,
    /// Byte of the file, if known.
    pub byte: Option<u64>,
}

/// The program that called a command, as the command sees it.
pub(crate) struct Caller {
    pub(crate) policy: Option<(Registry, Policy)>,
    pub(crate) observer: Arc<dyn Observer + Send>,
    pub(crate) document: Mutex<Option<String>>,
    pub(crate) warnings: Arc<Mutex<Vec<String>>>,
}

/// Runs a command on the current rayon pool.
pub fn call(call: Call) -> Result<Answer, Failure> {
    let program = ["ballast", "--json"].map(OsString::from);
    let cli = Cli::try_parse_from(program.into_iter().chain(call.args)).map_err(|error| usage(&error))?;
    let warnings = Arc::default();
    let caller = Caller {
        policy: call.policy,
        observer: call.observer,
        document: Mutex::new(None),
        warnings: Arc::clone(&warnings),
    };
    let (result, caller) = cli.run_for(caller);
    let outcome = result.map_err(|error| exit::failure(&error))?;
    let warnings = warnings.lock().map(|mut kept| std::mem::take(&mut *kept)).unwrap_or_default();
    let document = caller.and_then(|caller| caller.document.into_inner().ok()).flatten();
    let failed = |code| Failure { message: "the command has no result".into(), code, ..Failure::default() };
    match (outcome, document) {
        (Outcome::Ok | Outcome::CheckFailed, Some(document)) => {
            Ok(Answer { document, passed: outcome == Outcome::Ok, warnings })
        }
        (Outcome::Interrupted, _) => Err(failed(130)),
        (Outcome::Failed(code), _) => Err(failed(code)),
        (_, None) => Err(failed(3)),
    }
}

/// Returns the first paragraph of the message, which the general help follows.
fn usage(error: &clap::Error) -> Failure {
    let text = error.render().to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let message = text.split("\n\n").next().unwrap_or(text).to_string();
    Failure { message, code: 2, ..Failure::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_files::jobs::Silent;

    fn run(args: &[&str]) -> Result<Answer, Failure> {
        let args = args.iter().map(OsString::from).collect();
        call(Call { args, policy: None, observer: Arc::new(Silent) })
    }

    #[test]
    fn the_document_of_a_command_is_returned() {
        let answer = run(&["audit", "--rules"]).unwrap();
        assert!(answer.passed && answer.document.contains("ballast.rules/1"));
    }

    #[test]
    fn an_error_has_its_exit_code_and_file() {
        let failure = run(&["audit", "no such folder"]).err().unwrap();
        assert_eq!((failure.code, failure.file), (3, Some("no such folder".into())));
        let failure = run(&["convert", "a", "b", "--dtype", "bf15"]).err().unwrap();
        assert_eq!(failure.code, 2);
        assert!(failure.message.starts_with("invalid value 'bf15' for '--dtype <DTYPE>'"), "{failure:?}");
    }

    #[test]
    fn a_call_that_may_not_publish_leaves_nothing_behind() {
        struct TooLate;
        impl Observer for TooLate {
            fn may_publish(&self) -> bool {
                false
            }
        }
        let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures");
        let release = format!("{fixtures}/release/qwen3_5");
        let model = format!("{fixtures}/models/qwen3_5");
        let golden = format!("{model}/golden.safetensors");
        let home = tempfile::tempdir().unwrap();
        let destination = |name: &str| home.path().join(name).display().to_string();
        let (folder, file) = (destination("folder"), destination("file.safetensors"));
        let gguf = destination("file.gguf");
        for args in [
            &["convert", &release, &folder, "--dtype", "f16"][..],
            &["convert", &release, &file],
            &["convert", &release, &gguf],
            &["repair", &release, &folder, "--original", &release],
            &["trace", &model, "--ids", &golden, "--out", &file],
            &["lab", "--policies", "f32", "--tokens", "8", "--no-gradients", "--out", &folder],
        ] {
            let args_of_call = args.iter().map(OsString::from).collect();
            let failure = call(Call { args: args_of_call, policy: None, observer: Arc::new(TooLate) }).err();
            assert_eq!(failure.as_ref().map(|failure| failure.code), Some(130), "{args:?}: {failure:?}");
            assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0, "{args:?}");
        }
    }
}
