//! Thread pool of the kernels, with its working memory. It has as many threads as torch, so that rayon and OpenMP,
//! which never run at the same time, use the same processors.

use std::sync::{Arc, Mutex, PoisonError};

use ballast_kernels::{KernelError, Scratch};
use pyo3::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::errors::UsageError;

struct Pool {
    /// Process that created it: threads do not survive a fork.
    process: u32,
    threads: usize,
    pool: ThreadPool,
    /// Kept between calls, because fresh pages for every call would take longer than a small kernel.
    scratch: Scratch,
}

static POOL: Mutex<Option<Arc<Pool>>> = Mutex::new(None);

/// Returns the pool of `threads` threads, a new one if the number or the process has changed.
fn pool(threads: usize) -> PyResult<Arc<Pool>> {
    let mut current = POOL.lock().unwrap_or_else(PoisonError::into_inner);
    let process = std::process::id();
    if let Some(made) = &*current
        && made.process == process
        && made.threads == threads
    {
        return Ok(made.clone());
    }
    let pool = ThreadPoolBuilder::new()
        .num_threads(threads.max(1))
        .thread_name(|i| format!("ballast-{i}"))
        .build()
        .map_err(|error| UsageError::new_err(format!("cannot start {threads} threads: {error}")))?;
    let scratch = pool.install(|| Scratch::new(0));
    let pool = Arc::new(Pool { process, threads, pool, scratch });
    if let Some(old) = current.replace(pool.clone())
        && old.process != process
    {
        // Its threads are in the other process, and dropping it would wait for them.
        std::mem::forget(old);
    }
    Ok(pool)
}

/// Runs a kernel on `threads` threads with their working memory, without the GIL.
pub fn run<R: Send>(
    py: Python<'_>,
    threads: usize,
    kernel: impl FnOnce(&Scratch) -> Result<R, KernelError> + Send,
) -> PyResult<R> {
    let pool = pool(threads)?;
    py.detach(|| pool.pool.install(|| kernel(&pool.scratch)))
        .map_err(|error| UsageError::new_err(error.to_string()))
}
