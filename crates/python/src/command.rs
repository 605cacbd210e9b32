//! Commands of `ballast` as Python functions, and the whole program.
//!
//! A command runs on its own thread without the GIL. Until it ends, the calling thread checks signals and reports
//! progress, so that callbacks run where Python expects them.

use std::ffi::OsString;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use ballast_files::jobs::Observer;
use ballast_ml::{Answer, Call, Failure};
use pyo3::exceptions::{PyKeyboardInterrupt, PyRuntimeError};
use pyo3::prelude::*;

use crate::contract::Policy;
use crate::errors::{self, UsageError};

/// Time between two checks of signals and progress.
const INTERVAL: Duration = Duration::from_millis(50);

/// Time a canceled command has to end before its thread is abandoned, if that is allowed.
const GRACE: Duration = Duration::from_millis(500);

/// Process that has used the thread pool.
static PROCESS: OnceLock<u32> = OnceLock::new();

/// Returns an error in a forked process: a fork copies the state of the thread pool but not its threads, and would
/// wait for them forever.
fn check_fork() -> PyResult<()> {
    if *PROCESS.get_or_init(std::process::id) == std::process::id() {
        return Ok(());
    }
    Err(UsageError::new_err(
        "this process was forked after ballast had started its threads, which a fork does not copy; start it \
         with the method \"spawn\" or \"forkserver\" of multiprocessing",
    ))
}

/// Progress of a command, and the request to cancel it.
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

type Ended = Result<Answer, Failure>;

/// Message from the command's thread to the calling thread.
enum Event {
    /// The result is complete; it is put in place after an answer and discarded without one.
    Complete(Sender<()>),
    Ended(Ended),
}

/// Receives the events of a command. The lock is for the compiler: one thread uses it.
type Events = Mutex<Receiver<Event>>;

/// The command's side of a call.
struct Worker {
    shared: Arc<Shared>,
    events: Sender<Event>,
}

impl Observer for Worker {
    fn phase(&self, name: &'static str, bytes: u64) {
        self.shared.begin(name, bytes);
    }

    fn steps(&self, name: &'static str, steps: u64) {
        self.shared.begin(name, steps);
    }

    fn advance(&self, count: u64) {
        self.shared.done.fetch_add(count, Ordering::Relaxed);
    }

    fn cancelled(&self) -> bool {
        self.shared.cancelled.load(Ordering::Relaxed)
    }

    /// Asks the calling thread, which checks signals and reports progress once more, so that an exception is raised
    /// before the result is in place.
    fn may_publish(&self) -> bool {
        let (yes, answer) = channel();
        self.events.send(Event::Complete(yes)).is_ok() && answer.recv().is_ok()
    }
}

/// Runs a command. Returns its JSON document, whether its checks passed, and its warnings.
///
/// `progress` is called with the phase, the amount done and the total. An interrupt or an exception of `progress`
/// cancels the command. With `may_leave`, a thread that does not end soon is abandoned: it writes nothing.
#[pyfunction]
#[pyo3(signature = (args, policy=None, progress=None, may_leave=false))]
pub(crate) fn call(
    py: Python<'_>,
    args: Vec<OsString>,
    policy: Option<&Bound<'_, Policy>>,
    progress: Option<Bound<'_, PyAny>>,
    may_leave: bool,
) -> PyResult<(String, bool, Vec<String>)> {
    check_fork()?;
    let shared = Arc::new(Shared::default());
    let policy = policy.map(|policy| policy.get().with_registry());
    let (events, receiver) = channel();
    let observer = Arc::new(Worker { shared: shared.clone(), events: events.clone() });
    let call = Call { args, policy, observer };
    let work = move || {
        // The receiver is gone if the thread was abandoned.
        let _ = events.send(Event::Ended(ballast_ml::call(call)));
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
    receiver: &Events,
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
            if !matches!(received, Some(Ok(Event::Ended(_)) | Err(()))) {
                drop(received);
                cancel(py, receiver, may_leave);
            }
            return Err(exception);
        }
        match received {
            Some(Ok(Event::Ended(ended))) => return Ok(ended),
            Some(Ok(Event::Complete(yes))) => {
                let _ = yes.send(());
                return finish(py, receiver);
            }
            Some(Err(())) => return Err(panicked()),
            None => {}
        }
    }
}

/// Waits for the end of a command that puts its result in place. An interrupt is then too late; Python raises it
/// after the call.
fn finish(py: Python<'_>, receiver: &Events) -> PyResult<Ended> {
    loop {
        match receive(py, receiver) {
            Some(Ok(Event::Ended(ended))) => return Ok(ended),
            Some(Ok(Event::Complete(yes))) => drop(yes.send(())),
            Some(Err(())) => return Err(panicked()),
            None => {}
        }
    }
}

fn panicked() -> PyErr {
    PyRuntimeError::new_err("the command panicked; this is a bug in ballast")
}

/// Waits for an event without the GIL: `None` after the interval, `Err` if the command's thread panicked.
fn receive(py: Python<'_>, receiver: &Events) -> Option<Result<Event, ()>> {
    py.detach(|| match receiver.lock().map_err(|_| ())?.recv_timeout(INTERVAL) {
        Ok(event) => Ok(Some(event)),
        Err(RecvTimeoutError::Timeout) => Ok(None),
        Err(RecvTimeoutError::Disconnected) => Err(()),
    })
    .transpose()
}

/// Waits until a canceled command has removed its partial result. A result completed meanwhile gets no answer and
/// is discarded.
fn cancel(py: Python<'_>, receiver: &Events, may_leave: bool) {
    let begun = Instant::now();
    while matches!(receive(py, receiver), None | Some(Ok(Event::Complete(_))))
        && !(may_leave && begun.elapsed() > GRACE)
    {}
}

/// Runs the whole program with these arguments, which exclude its name. Returns the exit code.
#[pyfunction]
pub(crate) fn run(py: Python<'_>, args: Vec<OsString>) -> u8 {
    py.detach(|| ballast_ml::run(std::iter::once(OsString::from("ballast")).chain(args)))
}
