//! Parallel streaming over tensors: jobs of bounded size, ordered results, progress, cancellation.

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rayon::prelude::*;

use crate::cast::Buffer;
use crate::error::{Error, Result};

/// Number of bytes that a job reads at once: fits in the L2 cache, so that processing them costs no memory
/// traffic.
pub const CHUNK_BYTES: u64 = 1 << 20;

/// Observes long work and can cancel it.
pub trait Observer: Sync {
    /// Starts a phase of `bytes` bytes.
    fn phase(&self, _name: &'static str, _bytes: u64) {}
    /// Starts a phase of `steps` steps.
    fn steps(&self, _name: &'static str, _steps: u64) {}
    /// Reports that `bytes` (or steps) more are done.
    fn advance(&self, _bytes: u64) {}
    /// Returns true if the work should stop.
    fn cancelled(&self) -> bool {
        false
    }
    /// Returns true if a finished result may be put in place. It is asked right before, and the answer is final:
    /// whoever answers true no longer cancels.
    fn may_publish(&self) -> bool {
        !self.cancelled()
    }
}

/// An observer that does nothing.
pub struct Silent;

impl Observer for Silent {}

/// The buffers of one worker; they grow to a few chunks and are reused.
#[derive(Default)]
pub struct Workspace {
    /// First input.
    pub a: Buffer,
    /// Second input, or the converted data.
    pub b: Buffer,
    /// Scratch of a read that rearranges or converts elements.
    pub scratch: Buffer,
}

/// Runs `work` on every job, on all threads of the current rayon pool. Returns the results in the order of
/// the jobs.
pub fn run<J: Sync, R: Send>(
    jobs: &[J],
    observer: &dyn Observer,
    bytes: impl Fn(&J) -> u64 + Sync,
    work: impl Fn(&J, &mut Workspace) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    jobs.par_iter()
        .with_max_len(8)
        .map_init(Workspace::default, |workspace, job| {
            if observer.cancelled() {
                return Err(Error::Interrupted);
            }
            let result = work(job, workspace)?;
            observer.advance(bytes(job));
            Ok(result)
        })
        .collect()
}

/// Divides `units` units of `unit_bytes` bytes into pieces of at most `chunk` bytes; yields one empty piece
/// for 0 units.
pub fn pieces(units: u64, unit_bytes: u64, chunk: u64) -> impl Iterator<Item = Range<u64>> {
    let step = (chunk / unit_bytes).max(1);
    let count = units.div_ceil(step).max(1);
    (0..count).map(move |i| i * step..units.min((i + 1) * step))
}

/// Runs `work`, which mostly waits, on every item, on up to `threads` threads of its own. Returns the results in the order of the items, or
/// the first error; no work is started after it.
pub fn parallel<T: Sync, R: Send>(
    items: &[T],
    threads: usize,
    work: impl Fn(&T) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let results: Mutex<Vec<(usize, Result<R>)>> = Mutex::default();
    std::thread::scope(|scope| {
        let worker = || {
            while !failed.load(Ordering::Relaxed) {
                let i = next.fetch_add(1, Ordering::Relaxed);
                let Some(item) = items.get(i) else { break };
                let result = work(item);
                failed.fetch_or(result.is_err(), Ordering::Relaxed);
                results.lock().unwrap_or_else(|e| e.into_inner()).push((i, result));
            }
        };
        // This thread works too, so that a system without more threads is slow and nothing else.
        for _ in 1..threads.clamp(1, items.len().max(1)) {
            if std::thread::Builder::new().spawn_scoped(scope, worker).is_err() {
                break;
            }
        }
        worker();
    });
    let mut results = results.into_inner().unwrap_or_else(|e| e.into_inner());
    results.sort_by_key(|(i, _)| *i);
    let mut all = Vec::with_capacity(items.len());
    for (_, result) in results {
        all.push(result?);
    }
    Ok(all)
}
