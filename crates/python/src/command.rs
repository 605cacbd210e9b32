//! Commands of `ballast`, called from Python, and the whole program.
//!
//! A command runs on a thread of its own without the GIL. The calling thread looks at signals and reports
//! progress until it ends, so that callbacks run where Python expects them.

use std::ffi::OsString;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ballast_checkpoint::jobs::Observer;
use ballast_ml::{Answer, Call, Failure};
use pyo3::exceptions::{PyKeyboardInterrupt, PyRuntimeError};
use pyo3::prelude::*;

use crate::contract::Policy;
use crate::errors;

/// Time between two looks at signals and progress.
const INTERVAL: Duration = Duration::from_millis(50);

/// Time that a cancelled command has before its thread is left to itself, if it may be.
const GRACE: Duration = Duration::from_millis(500);

/// Progress of a command, and the wish to cancel it.
#[derive(Default)]
struct Shared {
    /// Name and size of the phase.
    phase: Mutex<(&'static str, u64)>,
    done: AtomicU64,
    cancelled: AtomicBool,
}

impl Shared {
    fn begin(&self, name: &'static str, total: u64) {
        if let Ok(mut phase) = self.phase.lock() {
            *phase = (name, total);
            self.done.store(0, Ordering::Relaxed);
        }
    }

    /// Returns the phase, how much of it is done, and its size.
    fn progress(&self) -> (&'static str, u64, u64) {
        let Ok(phase) = self.phase.lock() else { return ("", 0, 0) };
        (phase.0, self.done.load(Ordering::Relaxed).min(phase.1), phase.1)
    }
}

impl Observer for Shared {
    fn phase(&self, name: &'static str, bytes: u64) {
        self.begin(name, bytes);
    }

    fn steps(&self, name: &'static str, steps: u64) {
        self.begin(name, steps);
    }

    fn advance(&self, count: u64) {
        self.done.fetch_add(count, Ordering::Relaxed);
    }

    fn cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }
}

type Ended = Result<Answer, Failure>;

/// Receives the end of a command. The lock is for the compiler: one thread uses it.
type Ends = Mutex<Receiver<Ended>>;

/// Runs a command. Returns its JSON document, whether its checks passed, and its warnings.
///
/// `progress` is called with the name of the phase, the amount done and its total. An interrupt, or an
/// exception of `progress`, cancels the command; with `may_leave` its thread is left behind if it does not end
/// soon: it computes and writes nothing any more.
#[pyfunction]
#[pyo3(signature = (args, policy=None, progress=None, may_leave=false))]
pub(crate) fn call(
    py: Python<'_>,
    args: Vec<OsString>,
    policy: Option<&Bound<'_, Policy>>,
    progress: Option<Bound<'_, PyAny>>,
    may_leave: bool,
) -> PyResult<(String, bool, Vec<String>)> {
    let shared = Arc::new(Shared::default());
    let policy = policy.map(|policy| policy.get().with_registry());
    let call = Call { args, policy, observer: shared.clone() };
    let (sender, receiver) = channel();
    let work = move || {
        // The receiver is gone if the thread was left behind.
        let _ = sender.send(ballast_ml::call(call));
    };
    std::thread::Builder::new().name("ballast".into()).spawn(work)?;
    match wait(py, &Mutex::new(receiver), &shared, progress.as_ref(), may_leave)? {
        Ok(answer) => Ok((answer.document, answer.passed, answer.warnings)),
        Err(failure) if failure.code == 130 => Err(PyKeyboardInterrupt::new_err(failure.message)),
        Err(failure) => Err(errors::exception(failure)),
    }
}

fn wait(
    py: Python<'_>,
    receiver: &Ends,
    shared: &Shared,
    progress: Option<&Bound<'_, PyAny>>,
    may_leave: bool,
) -> PyResult<Ended> {
    let mut reported = ("", 0, 0);
    loop {
        let received = receive(py, receiver);
        let now = shared.progress();
        let report = progress.filter(|_| now != reported && !now.0.is_empty());
        let looked = py.check_signals().and_then(|()| report.map(|callback| callback.call1(now)).transpose());
        reported = now;
        if let Err(exception) = looked {
            shared.cancelled.store(true, Ordering::Relaxed);
            if received.is_none() {
                cancel(py, receiver, may_leave);
            }
            return Err(exception);
        }
        match received {
            Some(Ok(ended)) => return Ok(ended),
            Some(Err(())) => {
                return Err(PyRuntimeError::new_err("the command panicked; this is a bug in ballast"));
            }
            None => {}
        }
    }
}

/// Waits for the end of a command without the GIL: `None` after the interval, `Err` if its thread panicked.
fn receive(py: Python<'_>, receiver: &Ends) -> Option<Result<Ended, ()>> {
    py.detach(|| match receiver.lock().map_err(|_| ())?.recv_timeout(INTERVAL) {
        Ok(ended) => Ok(Some(ended)),
        Err(RecvTimeoutError::Timeout) => Ok(None),
        Err(RecvTimeoutError::Disconnected) => Err(()),
    })
    .transpose()
}

/// Waits until a cancelled command has removed what it has written.
fn cancel(py: Python<'_>, receiver: &Ends, may_leave: bool) {
    let begun = Instant::now();
    while receive(py, receiver).is_none() && !(may_leave && begun.elapsed() > GRACE) {}
}

/// Runs the whole program with these arguments, without its name. Returns the exit code.
#[pyfunction]
pub(crate) fn run(py: Python<'_>, args: Vec<OsString>) -> u8 {
    py.detach(|| ballast_ml::run(std::iter::once(OsString::from("ballast")).chain(args)))
}
