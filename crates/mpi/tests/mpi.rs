//! Ranks under mpirun: the checks of a group, and what happens when one rank fails.
//!
//! Starts itself under `mpirun`; a rank finds its case in an environment variable.

#[path = "../../cluster/tests/checks/mod.rs"]
mod checks;

use std::io::Write;
use std::process::{Command, ExitCode, Output, Stdio};
use std::time::{Duration, Instant};

use ballast_cluster::{Group, Kind, Result};
use ballast_mpi as mpi;

/// Names the case in the ranks.
const CASE: &str = "BALLAST_MPI_CASE";

/// Printed by a rank that has sent all its messages to a stopped one.
const SENT: &str = "all messages are sent";

/// Time limit of a group in which a rank stops.
const TIMEOUT: Duration = Duration::from_secs(3);

/// A test: its name, its number of ranks, what a rank does, and what is expected of the job.
struct Case {
    name: &'static str,
    ranks: usize,
    run: fn(&Group) -> Result,
    expect: fn(&Output),
}

const CASES: [Case; 10] = [
    Case { name: "two_ranks_pass_all_checks", ranks: 2, run: pass_all_checks, expect: success },
    Case { name: "four_ranks_pass_all_checks", ranks: 4, run: pass_all_checks, expect: success },
    Case { name: "waiting_ranks_are_heard_and_forgotten", ranks: 4, run: wait_often, expect: success },
    Case {
        name: "a_message_of_another_length_is_an_error",
        ranks: 2,
        run: send_another_length,
        expect: success,
    },
    Case { name: "a_busy_rank_is_waited_for", ranks: 3, run: be_busy, expect: success },
    Case { name: "a_panic_of_one_rank_ends_all", ranks: 4, run: panic, expect: panicked },
    Case { name: "an_error_of_one_rank_ends_all_with_its_code", ranks: 4, run: fail, expect: failed },
    Case { name: "a_killed_rank_ends_all", ranks: 4, run: be_killed, expect: killed },
    Case { name: "a_stopped_rank_is_named", ranks: 4, run: be_stopped, expect: stopped },
    Case { name: "a_stopped_rank_blocks_no_send", ranks: 4, run: be_stopped_under_a_flood, expect: flooded },
];

fn main() -> ExitCode {
    if let Ok(name) = std::env::var(CASE) {
        return rank(CASES.iter().find(|case| case.name == name).expect("a case"));
    }
    let filter = std::env::args().skip(1).find(|arg| !arg.starts_with('-'));
    let chosen = |case: &&Case| filter.as_ref().is_none_or(|filter| case.name.contains(filter.as_str()));
    for case in CASES.iter().filter(chosen) {
        let started = Instant::now();
        let output = start(case).expect("mpirun starts");
        (case.expect)(&output);
        println!("test {} ... ok ({:.1} s)", case.name, started.elapsed().as_secs_f64());
    }
    ExitCode::SUCCESS
}

/// One process of a case.
fn rank(case: &Case) -> ExitCode {
    let timeout = if case.name.contains("stopped") || case.name.contains("busy") {
        TIMEOUT
    } else {
        Duration::from_secs(60)
    };
    let group = mpi::start_with_limit(timeout, 1 << 16).expect("MPI starts");
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        hook(panic);
        mpi::abort(101)
    }));
    match (case.run)(&group).and_then(|()| mpi::finish(&group)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(format!("rank {}: {error}", group.rank()));
            group.abort(3)
        }
    }
}

/// Writes a line at once: pieces of lines of several ranks would mix.
fn say(line: String) {
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}

fn start(case: &Case) -> std::io::Result<Output> {
    let mut mpirun = Command::new("mpirun");
    mpirun.args(["--allow-run-as-root", "--oversubscribe", "-n", &case.ranks.to_string()]);
    mpirun.arg(std::env::current_exe()?).env(CASE, case.name).stdin(Stdio::null()).output()
}

#[track_caller]
fn ends(output: &Output, code: i32) -> String {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{text}");
    text
}

/// The failure ends the job, not the time limit of the ranks that wait.
#[track_caller]
fn ends_at_once(output: &Output, code: i32) -> String {
    let text = ends(output, code);
    assert!(!text.contains("has not answered"), "{text}");
    text
}

fn success(output: &Output) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !text.contains("rank"), "{}: {text}", output.status);
}

fn pass_all_checks(group: &Group) -> Result {
    checks::all(group);
    Ok(())
}

/// Rank 1 is late, so that the others tell for whom they wait, then everyone waits for rank 0.
fn wait_often(group: &Group) -> Result {
    for late in [1, 0] {
        group.barrier()?;
        if group.rank() == late {
            std::thread::sleep(Duration::from_secs(2));
        }
        group.barrier()?;
    }
    assert!(group.rank() == 0 || group.traffic().waited() > Duration::from_secs(1));
    Ok(())
}

/// Only a small message may be too long: Open MPI 4.1 writes a large one past the end of the buffer.
fn send_another_length(group: &Group) -> Result {
    let other = 1 - group.rank();
    for (sent, expected) in [(100, 50), (50, 100), (70_000, 100_000)] {
        group.send(other, Kind::States, vec![0; sent])?;
        let error = group.wait(group.receive(other, expected)?).expect_err("the lengths differ");
        let between = format!("message between rank {other} and rank {}: ", group.rank());
        assert!(error.to_string().starts_with(&between), "{error}");
    }
    Ok(())
}

/// One rank works for longer than the time limit.
fn be_busy(group: &Group) -> Result {
    if group.rank() == 1 {
        let _pulse = group.pulse()?;
        std::thread::sleep(2 * TIMEOUT);
    }
    group.barrier()
}

fn panic(group: &Group) -> Result {
    group.barrier()?;
    assert_ne!(group.rank(), 2, "rank 2 panics");
    group.barrier()
}

fn panicked(output: &Output) {
    assert!(ends_at_once(output, 101).contains("rank 2 panics"));
}

fn fail(group: &Group) -> Result {
    group.barrier()?;
    if group.rank() == 1 {
        return Err(ballast_cluster::Error::Failed("a problem of this rank".into()));
    }
    group.barrier()
}

fn failed(output: &Output) {
    assert!(ends_at_once(output, 3).contains("rank 1: a problem of this rank"));
}

/// Sends a signal to this process.
fn signal(name: &str) {
    let process = std::process::id().to_string();
    Command::new("kill").args([name, &process]).status().expect("kill starts");
}

fn be_killed(group: &Group) -> Result {
    group.barrier()?;
    if group.rank() == 3 {
        signal("-KILL");
    }
    group.barrier()
}

fn killed(output: &Output) {
    ends_at_once(output, 137);
}

/// The others send large messages to the stopped rank before they wait for it.
fn be_stopped(group: &Group) -> Result {
    stop_and_send(group, 100)
}

/// More messages than the library has buffers for, which it then lacks for others too: any rank may be named.
fn be_stopped_under_a_flood(group: &Group) -> Result {
    stop_and_send(group, 3000)
}

fn stop_and_send(group: &Group, count: usize) -> Result {
    group.barrier()?;
    if group.rank() == 2 {
        signal("-STOP");
    }
    for i in 0..count {
        group.send(2, Kind::Gradients, vec![0; if i % 25 == 0 { 1 << 20 } else { 1000 }])?;
    }
    // mpirun continues the stopped rank before it ends it, so that it may come here too.
    if group.rank() != 2 {
        say(SENT.to_owned());
    }
    group.barrier()
}

fn stopped(output: &Output) {
    let text = ended(output);
    assert!(text.contains("rank 2 has not answered for 3 s"), "{text}");
    assert!(![0, 1, 3].iter().any(|rank| text.contains(&format!("rank {rank} has not"))), "{text}");
}

fn flooded(output: &Output) {
    ended(output);
}

/// A send that waited for the stopped rank would end in the error of the time limit, before its rank has sent all.
fn ended(output: &Output) -> String {
    let text = ends(output, 3);
    assert!(text.contains(" has not answered for 3 s"), "{text}");
    assert_eq!(text.matches(SENT).count(), 3, "a send to a stopped rank waits: {text}");
    text
}
