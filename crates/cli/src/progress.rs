//! Progress with rate and ETA: a bar on a terminal, a line every few seconds elsewhere. Also handles Ctrl-C.

use std::io::IsTerminal;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ballast_files::jobs::Observer;
use ballast_format::estimate;
use indicatif::{ProgressBar, ProgressStyle};

use crate::output;

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// True if a signal may end the process without cleanup.
static IDLE: AtomicBool = AtomicBool::new(false);

/// Delay before progress is shown.
const PATIENCE: Duration = Duration::from_millis(300);

/// Time between two plain lines.
const PLAIN_INTERVAL: Duration = Duration::from_secs(5);

/// The unit of a phase.
#[derive(Clone, Copy, PartialEq)]
enum Unit {
    Bytes,
    Tokens,
    Documents,
    Steps,
}

/// Returns true after an interrupt or termination signal.
pub(crate) fn interrupted() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

/// Says when a request to a server waits, and ends the wait after a signal.
pub(crate) fn watch_waits() {
    #[cfg(feature = "hub")]
    ballast_hub::set_waiting(ballast_hub::Waiting { announce: output::note, cancelled: interrupted });
}

struct Phase {
    name: &'static str,
    unit: Unit,
    total: u64,
    begun: Instant,
    last_line: Instant,
    bar: Option<ProgressBar>,
}

/// Shows the progress of long work and cancels it on Ctrl-C.
pub(crate) struct Progress {
    quiet: bool,
    done: AtomicU64,
    phase: Mutex<Option<Phase>>,
    /// Observer of the calling program, which shows progress and cancels in place of this.
    caller: Option<Arc<dyn Observer + Send>>,
}

impl Progress {
    /// Installs the signal handler: the first interrupt or termination signal cancels the work, the second
    /// ends the process.
    pub(crate) fn new(quiet: bool) -> Progress {
        let set = ctrlc::set_handler(|| {
            if INTERRUPTED.swap(true, Ordering::SeqCst) || IDLE.load(Ordering::SeqCst) {
                std::process::exit(130);
            }
        });
        // A handler that is already set is this one.
        if let Err(ctrlc::Error::System(error)) = set {
            output::note(&format!(
                "cannot start the thread for Ctrl-C: {error}; end this program with SIGKILL"
            ));
        }
        Progress { quiet, done: AtomicU64::new(0), phase: Mutex::new(None), caller: None }
    }

    /// Passes everything on to the observer of a calling program.
    pub(crate) fn observed(observer: Arc<dyn Observer + Send>) -> Progress {
        Progress { quiet: true, done: AtomicU64::new(0), phase: Mutex::new(None), caller: Some(observer) }
    }

    /// Begins a phase that counts tokens.
    pub(crate) fn tokens(&self, name: &'static str, total: u64) {
        self.begin(name, total, Unit::Tokens);
    }

    /// Begins a phase that counts documents.
    pub(crate) fn documents(&self, name: &'static str, total: u64) {
        self.begin(name, total, Unit::Documents);
    }

    /// Lets a signal end the process at once, for example while it waits for input.
    pub(crate) fn set_idle(&self, idle: bool) {
        IDLE.store(idle, Ordering::SeqCst);
    }

    fn begin(&self, name: &'static str, total: u64, unit: Unit) {
        self.finish();
        self.done.store(0, Ordering::Relaxed);
        if self.quiet {
            return;
        }
        let now = Instant::now();
        if let Ok(mut phase) = self.phase.lock() {
            *phase = Some(Phase { name, unit, total, begun: now, last_line: now, bar: None });
        }
    }

    /// Ends the phase and removes its bar.
    pub(crate) fn finish(&self) {
        if let Ok(mut phase) = self.phase.lock()
            && let Some(Phase { bar: Some(bar), .. }) = phase.take()
        {
            bar.finish_and_clear();
        }
    }
}

fn bar(name: &'static str, unit: Unit, total: u64, begun: Instant) -> ProgressBar {
    let template = match unit {
        Unit::Bytes => "{msg:10} {wide_bar} {bytes}/{total_bytes} {binary_bytes_per_sec} ETA {eta}",
        Unit::Tokens => "{msg:10} {wide_bar} {human_pos}/{human_len} tokens {per_sec} ETA {eta}",
        Unit::Documents => "{msg:10} {wide_bar} {human_pos}/{human_len} documents {per_sec} ETA {eta}",
        Unit::Steps => "{msg:10} {wide_bar} {human_pos}/{human_len} ETA {eta}",
    };
    let style = ProgressStyle::with_template(template).expect("a constant");
    ProgressBar::new(total).with_style(style).with_message(name).with_elapsed(begun.elapsed())
}

impl Observer for Progress {
    fn phase(&self, name: &'static str, total: u64) {
        match &self.caller {
            Some(caller) => caller.phase(name, total),
            None => self.begin(name, total, Unit::Bytes),
        }
    }

    fn steps(&self, name: &'static str, steps: u64) {
        match &self.caller {
            Some(caller) => caller.steps(name, steps),
            None => self.begin(name, steps, Unit::Steps),
        }
    }

    fn advance(&self, count: u64) {
        if let Some(caller) = &self.caller {
            return caller.advance(count);
        }
        let done = self.done.fetch_add(count, Ordering::Relaxed) + count;
        // Another thread is drawing if the lock is taken.
        let Ok(mut phase) = self.phase.try_lock() else { return };
        let Some(phase) = phase.as_mut() else { return };
        if phase.begun.elapsed() < PATIENCE {
            return;
        }
        if std::io::stderr().is_terminal() {
            phase
                .bar
                .get_or_insert_with(|| bar(phase.name, phase.unit, phase.total, phase.begun))
                .set_position(done);
        } else if phase.last_line.elapsed() >= PLAIN_INTERVAL {
            phase.last_line = Instant::now();
            let seconds = phase.begun.elapsed().as_secs_f64();
            let rate = done as f64 / seconds;
            let eta = estimate(phase.total.saturating_sub(done) as f64 / rate.max(1e-3));
            let percent = 100 * done / phase.total.max(1);
            let rate = match phase.unit {
                Unit::Steps => {
                    return output::note(&format!("{}: {percent} %, ETA {eta}", phase.name));
                }
                Unit::Bytes => output::bytes(rate as u64),
                Unit::Tokens => format!("{} tokens", output::count(rate as u64)),
                Unit::Documents => format!("{} documents", output::count(rate as u64)),
            };
            output::note(&format!("{}: {percent} %, {rate}/s, ETA {eta}", phase.name));
        }
    }

    fn cancelled(&self) -> bool {
        self.caller.as_ref().map_or_else(interrupted, |caller| caller.cancelled())
    }

    fn may_publish(&self) -> bool {
        self.caller.as_ref().map_or_else(|| !interrupted(), |caller| caller.may_publish())
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.finish();
    }
}
