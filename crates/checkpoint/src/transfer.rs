//! Writes a planned checkpoint, flushes it, and compares it with the plan, all at the same time.
//!
//! While one shard is written, the tensors of the finished shards are read back and compared, and the disk
//! flushes them. A copy alone leaves a core idle, so the comparison costs little time.

use std::fs::File;
use std::path::Path;

use ballast_files::jobs::{self, Observer};
use ballast_files::{Error, Result};

use crate::verify::{Chunk, Moved, Pair, Verification, Verifier};
use crate::write::{Job, WritePlan};

/// The time at which the pairs to compare are known.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Prepare {
    /// Before the data is written, from the headers alone.
    Early,
    /// After all data is written (the replicas of ranks are compared while ranks are joined).
    Late,
}

enum Work {
    Write(Job),
    Check(Chunk),
}

/// Executes `plan`; `pairs` opens the result and returns the pairs to compare.
pub(crate) fn write_verified(
    plan: &WritePlan,
    prepare: Prepare,
    pairs: impl Fn() -> Result<Vec<Pair>>,
    observer: &dyn Observer,
) -> Result<Verification> {
    let files = plan.create()?;
    let mut verifier = match prepare {
        Prepare::Early => Some(Verifier::new(pairs()?)),
        Prepare::Late => None,
    };
    let verify_bytes = verifier.as_ref().map_or(0, Verifier::bytes);
    observer.phase("writing", plan.tensor_bytes + verify_bytes);
    let mut results = Vec::new();
    let verdict = std::thread::scope(|scope| {
        let mut flushes = Vec::new();
        // Pairs by the last shard they depend on.
        let mut waiting = verifier.as_ref().map_or(Vec::new(), |v| pairs_by_shard(plan, v));
        for shard in 0..plan.file_count() {
            let mut work: Vec<Work> = plan.jobs(shard).into_iter().map(Work::Write).collect();
            if let (Some(verifier), true) = (&verifier, shard > 0) {
                work.extend(checks(verifier, std::mem::take(&mut waiting[shard - 1])));
            }
            results.extend(run(plan, &files, verifier.as_ref(), &work, observer)?);
            let (file, path) = (&files[shard], plan.shard_path(shard));
            plan.seal(shard, file)?;
            let flush = move || file.sync_all().map_err(Error::io(path, "flush"));
            match std::thread::Builder::new().spawn_scoped(scope, flush) {
                Ok(thread) => flushes.push(thread),
                // No more threads: flush here.
                Err(_) => flush()?,
            }
        }
        let verifier = match verifier.take() {
            Some(verifier) => verifier,
            None => {
                let verifier = Verifier::new(pairs()?);
                observer.phase("verifying", verifier.bytes());
                waiting = vec![(0..verifier.pair_count()).collect()];
                verifier
            }
        };
        let rest: Vec<Work> = checks(&verifier, waiting.into_iter().flatten().collect()).collect();
        results.extend(run(plan, &files, Some(&verifier), &rest, observer)?);
        observer.phase("flushing", 0);
        for flush in flushes {
            flush.join().unwrap_or_else(|_| Err(Error::Verification("the flush failed".into())))?;
        }
        Ok(verifier)
    });
    Ok(verdict?.finish(&results))
}

/// Returns, for every shard, the pairs that can be compared once it is written.
fn pairs_by_shard(plan: &WritePlan, verifier: &Verifier) -> Vec<Vec<usize>> {
    let number = |path: &Path| {
        (0..plan.file_count()).find(|&i| plan.shard_path(i) == path).unwrap_or(plan.file_count() - 1)
    };
    let mut by_shard = vec![Vec::new(); plan.file_count()];
    for pair in 0..verifier.pair_count() {
        let last = verifier.files(pair).into_iter().map(number).max().unwrap_or(0);
        by_shard[last].push(pair);
    }
    by_shard
}

fn checks(verifier: &Verifier, pairs: Vec<usize>) -> impl Iterator<Item = Work> {
    pairs.into_iter().flat_map(|pair| verifier.chunks(pair)).map(Work::Check)
}

fn run(
    plan: &WritePlan,
    files: &[File],
    verifier: Option<&Verifier>,
    work: &[Work],
    observer: &dyn Observer,
) -> Result<Vec<Moved>> {
    let bytes = |work: &Work| match work {
        Work::Write(job) => job.bytes,
        Work::Check(chunk) => verifier.map_or(0, |v| v.chunk_bytes(chunk)),
    };
    let results = jobs::run(work, observer, bytes, |work, workspace| match work {
        Work::Write(job) => plan.do_job(job, &files[job.shard], workspace).map(|()| None),
        Work::Check(chunk) => verifier.map(|v| v.check(chunk, workspace)).transpose(),
    })?;
    Ok(results.into_iter().flatten().collect())
}
