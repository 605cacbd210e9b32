//! Commands under mpirun or srun: which ranks run, how MPI starts, and how all ranks end.
//!
//! ```text
//! a command on one rank     rank 0 runs it, the others exit with 0; MPI is not started
//! a command on all ranks    calls `start` for its group; `end` ends MPI on all
//! a failure of one rank     ends all of them with its exit code
//! ```

use std::time::Duration;

use ballast_cluster::Group;

use crate::exit::Usage;
use crate::launcher::{has_launcher, launch};
use crate::output;

/// Exit code of a process that panicked, as without MPI.
#[cfg(feature = "mpi")]
const PANICKED: i32 = 101;

/// Time that the first rank has to report an error that all ranks have.
const FIRST_REPORTS: Duration = Duration::from_secs(2);

/// The group of all ranks, once MPI has been started.
#[cfg(feature = "mpi")]
static STARTED: std::sync::OnceLock<Group> = std::sync::OnceLock::new();

/// Returns the exit code of a process that has nothing to do: one of several without MPI in this build, or one
/// other than the first in a command that runs on one rank.
pub(crate) fn has_nothing_to_do(runs_on_all_ranks: bool) -> Option<u8> {
    let launch = launch()?;
    if cfg!(not(feature = "mpi")) {
        if launch.rank == 0 || outlives_the_first() {
            output::error(&no_mpi(launch.size));
        }
        return Some(2);
    }
    if runs_on_all_ranks {
        return None;
    }
    output::note(&format!("this command runs on one rank; the other {} have exited", launch.size - 1));
    (launch.rank > 0).then_some(0)
}

/// Returns true if the launcher does not end this rank although the first one had time to report: then the first
/// rank is another build, which waits for this one inside MPI. Without a launcher nothing waits for this process.
///
/// A rank that exited at once could have the first one ended before it has said why.
fn outlives_the_first() -> bool {
    let is_launched = has_launcher();
    if is_launched {
        std::thread::sleep(FIRST_REPORTS);
    }
    is_launched
}

fn no_mpi(size: usize) -> String {
    format!(
        "started as one of {size} processes, but this build has no MPI; build it on every machine with `cargo build \
         --release --features mpi`, or start one process without mpirun or srun"
    )
}

/// Starts MPI if this process is one of several. Returns the group of all ranks; a rank that does not answer
/// within `timeout` is an error.
pub(crate) fn start(timeout: Duration) -> anyhow::Result<Group> {
    match launch() {
        None => Ok(Group::solo()),
        Some(launch) => start_mpi(launch.rank, launch.size, timeout),
    }
}

#[cfg(not(feature = "mpi"))]
fn start_mpi(_: usize, size: usize, _: Duration) -> anyhow::Result<Group> {
    Err(Usage(no_mpi(size)).into())
}

#[cfg(feature = "mpi")]
fn start_mpi(rank: usize, size: usize, timeout: Duration) -> anyhow::Result<Group> {
    let group = ballast_mpi::start(timeout)?;
    let group = STARTED.get_or_init(|| group);
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        output::error("panicked; this ends the run on all ranks");
        print(panic);
        ballast_mpi::abort(PANICKED)
    }));
    if (group.rank(), group.size()) != (rank, size) {
        let problem = format!(
            "started as rank {rank} of {size}, but MPI says rank {} of {}: the launcher belongs to another MPI \
             library than this build; with Slurm try `srun --mpi=pmix`",
            group.rank(),
            group.size()
        );
        return Err(Usage(problem).into());
    }
    Ok(group.clone())
}

/// Returns true if this rank is to report its error. One that all ranks have is reported by the first, which then
/// ends them: the others wait for that.
pub(crate) fn reports() -> bool {
    #[cfg(feature = "mpi")]
    if STARTED.get().is_some_and(|group| group.rank() > 0) {
        std::thread::sleep(FIRST_REPORTS);
        // The launcher ends this rank, because another one has ended the run.
        return !crate::progress::interrupted();
    }
    true
}

/// Ends MPI, if it was started, with the exit code of this rank: after success or an interrupt when all ranks have
/// come here, after a failure at once on all of them.
pub(crate) fn end(code: u8) -> u8 {
    #[cfg(feature = "mpi")]
    if let Some(group) = STARTED.get() {
        if !matches!(code, 0 | 130) {
            group.abort(code.into());
        }
        if let Err(error) = ballast_mpi::finish(group) {
            output::error(&error.to_string());
            group.abort(3);
        }
    }
    code
}
