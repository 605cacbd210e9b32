//! Chat templates: minijinja with limits, because a template comes from whoever made the model.
//!
//! minijinja counts the instructions of a rendering. It does not bound the memory that an instruction takes,
//! nor the depth of what it parses and computes. Three parts add this:
//! - `source.rs` bounds what is parsed: length, words of a tag, alternatives, constants that are computed.
//! - `guard.rs` rewrites the compiled instructions, so that each one that makes a value is checked;
//!   `filters.rs` does the same for filters, functions and methods.
//! - `budget.rs` decides: depth and size of a value, bytes of all values of a rendering.
//!
//! What remains is recursion of bounded depth. It runs on a thread of its own, whose stack is large enough
//! for the deepest template that the limits admit.

mod budget;
mod filters;
mod guard;
mod source;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::machinery::{Instructions, Vm, get_compiled_template, make_string_output};
use minijinja::{AutoEscape, Environment, ErrorKind, Value};

use super::python::{str_of, strftime};
use super::text_error;
use crate::error::{Error, Result};

/// Instruction limit of one rendering; an endless loop in a template becomes an error. Checks count too: about
/// one for each two instructions of the template.
const FUEL: u64 = 20_000_000;

/// Stack of the thread that parses and renders. tests.rs has the deepest templates that the limits admit: in an
/// unoptimized build, whose frames are the largest, blocks that render themselves take 6 MiB, all others 2.
const STACK: usize = 64 << 20;

/// Templates by name, compiled once.
#[derive(Debug)]
pub(super) struct Templates {
    environment: Environment<'static>,
    file: PathBuf,
}

impl Templates {
    /// Compiles templates from sources by name; errors name `file`.
    pub(super) fn new(sources: &[(&str, &str)], file: &Path) -> Result<Templates> {
        for (_, source) in sources {
            source::check(source).map_err(|problem| unreadable(file, problem))?;
        }
        on_own_stack(file, || {
            let mut environment = environment();
            for (name, source) in sources {
                environment
                    .add_template_owned(name.to_string(), source::without_generation_blocks(source))
                    .and_then(|()| guarded(&environment, name).map(drop))
                    .map_err(|error| unreadable(file, format!("{error:#}")))?;
            }
            Ok(Templates { environment, file: file.into() })
        })?
    }

    /// Returns true if there is a template of this name.
    pub(super) fn has(&self, name: &str) -> bool {
        self.environment.get_template(name).is_ok()
    }

    /// Renders a template with the variables that `variables` makes.
    pub(super) fn render(&self, name: &str, variables: impl FnOnce() -> Value + Send) -> Result<String> {
        on_own_stack(&self.file, || {
            rendered(&self.environment, name, variables())
                .map_err(|error| text_error(&self.file, format!("the chat template: {error:#}")))
        })?
    }
}

fn unreadable(file: &Path, problem: String) -> Error {
    text_error(file, format!("the chat template cannot be read: {problem}"))
}

/// Runs `work` on a thread with a stack of [`STACK`] bytes, of which the system provides what is used. A
/// panic of the template engine becomes an error.
fn on_own_stack<T: Send>(file: &Path, work: impl FnOnce() -> T + Send) -> Result<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("template".into()).stack_size(STACK);
        let running = thread.spawn_scoped(scope, work).map_err(|_| Error::Memory {
            what: "the stack of the chat template".into(),
            needed: STACK as u64,
            available: crate::memory::available().unwrap_or(0),
        })?;
        running.join().map_err(|_| text_error(file, "the chat template: the template engine failed"))
    })
}

fn rendered(environment: &Environment, name: &str, variables: Value) -> Result<String, minijinja::Error> {
    let (main, blocks) = guarded(environment, name)?;
    let mut text = String::new();
    let mut output = make_string_output(&mut text);
    Vm::new(environment).eval(&main, variables, &blocks, &mut output, AutoEscape::None)?;
    Ok(text)
}

type Compiled<'e> = (Instructions<'e>, std::collections::BTreeMap<&'e str, Instructions<'e>>);

/// Returns the checked instructions of a template and of its blocks. They borrow from the environment, so
/// nothing can keep them beside it without unsafe code. They are made for each rendering, in a seventh of the
/// time of compiling (0.3 and 2.0 ms for a template of 10 KB, on a busy machine).
fn guarded<'e>(environment: &'e Environment<'e>, name: &str) -> Result<Compiled<'e>, minijinja::Error> {
    let template = environment.get_template(name)?;
    let compiled = get_compiled_template(&template);
    let blocks = compiled.blocks.iter().map(|(name, block)| Ok((*name, guard::guarded(block)?)));
    Ok((guard::guarded(&compiled.instructions)?, blocks.collect::<Result<_, minijinja::Error>>()?))
}

fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_fuel(Some(FUEL));
    // In a debug build, errors would print the variables.
    environment.set_debug(false);
    environment.set_formatter(|out, state, value| {
        let written;
        let text = match value.as_str() {
            Some(text) => text,
            None => {
                written = str_of(value);
                &written
            }
        };
        budget::charge(state, text.len())?;
        Ok(out.write_str(text)?)
    });
    filters::install(&mut environment);
    guard::install(&mut environment);
    environment.add_function("raise_exception", |message: String| -> Result<String, minijinja::Error> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", |format: String| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        strftime(&format, now)
    });
    environment
}
