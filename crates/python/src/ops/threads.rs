//! The thread pool of the kernels. Its size is torch's number of threads, so that rayon and OpenMP, which
//! never run at the same time, use the same processors.

use std::sync::{Arc, Mutex, PoisonError};

use ballast_kernels::KernelError;
use pyo3::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::errors::UsageError;

struct Pool {
    /// Process that made it: threads do not survive a fork.
    process: u32,
    threads: usize,
    pool: Arc<ThreadPool>,
}

static POOL: Mutex<Option<Pool>> = Mutex::new(None);

/// The pool of `threads` threads; a new one if the number has changed.
fn pool(threads: usize) -> PyResult<Arc<ThreadPool>> {
    let mut current = POOL.lock().unwrap_or_else(PoisonError::into_inner);
    let process = std::process::id();
    if let Some(made) = &*current
        && made.process == process
        && made.threads == threads
    {
        return Ok(made.pool.clone());
    }
    let pool = ThreadPoolBuilder::new()
        .num_threads(threads.max(1))
        .thread_name(|i| format!("ballast-{i}"))
        .build()
        .map_err(|error| UsageError::new_err(format!("cannot start {threads} threads: {error}")))?;
    let pool = Arc::new(pool);
    if let Some(old) = current.replace(Pool { process, threads, pool: pool.clone() })
        && old.process != process
    {
        // Its threads are in the other process; to end it would wait for them.
        std::mem::forget(old);
    }
    Ok(pool)
}

/// Runs a kernel on `threads` threads, without the GIL.
pub fn run<R: Send>(
    py: Python<'_>,
    threads: usize,
    kernel: impl FnOnce() -> Result<R, KernelError> + Send,
) -> PyResult<R> {
    let pool = pool(threads)?;
    py.detach(|| pool.install(kernel)).map_err(|error| UsageError::new_err(error.to_string()))
}
