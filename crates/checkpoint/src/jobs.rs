//! Streaming work over tensors in parallel: jobs of bounded size, results in order, progress, interruption.

use std::ops::Range;

use rayon::prelude::*;

use crate::cast::Buffer;
use crate::error::{Error, Result};

/// Bytes that one job reads at a time: fits the second-level cache, so that scanning what was just read
/// costs no memory traffic.
pub const CHUNK_BYTES: u64 = 1 << 20;

/// Watches long work, and can stop it.
pub trait Observer: Sync {
    /// A phase of `bytes` bytes begins.
    fn phase(&self, _name: &'static str, _bytes: u64) {}
    /// A phase of `steps` steps of any kind begins.
    fn steps(&self, _name: &'static str, _steps: u64) {}
    /// `bytes` (or steps) more are done.
    fn advance(&self, _bytes: u64) {}
    /// Whether the user asked to stop.
    fn cancelled(&self) -> bool {
        false
    }
}

/// Watches nothing.
pub struct Silent;

impl Observer for Silent {}

/// The buffers of one worker; they grow to a few chunks and stay.
#[derive(Default)]
pub struct Workspace {
    /// What is read first.
    pub a: Buffer,
    /// What is read second, or converted to.
    pub b: Buffer,
    /// For [`crate::view::View::read`].
    pub scratch: Buffer,
}

/// Runs `work` on every job, on all threads of the current rayon pool; results come in the jobs' order.
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

/// `units` units of `unit_bytes` bytes in pieces of at most `chunk` bytes; one empty piece for none.
pub fn pieces(units: u64, unit_bytes: u64, chunk: u64) -> impl Iterator<Item = Range<u64>> {
    let step = (chunk / unit_bytes).max(1);
    let count = units.div_ceil(step).max(1);
    (0..count).map(move |i| i * step..units.min((i + 1) * step))
}
