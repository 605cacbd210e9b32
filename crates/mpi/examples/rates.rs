//! Measures a group's messages and sums between the ranks of a machine or cluster:
//! `mpirun -n 2 target/release/examples/rates`. Medians, on rank 0.

use std::time::{Duration, Instant};

use ballast_cluster::{Group, Kind, Result};
use ballast_mpi as mpi;

const TURNS: usize = 15;

fn main() -> Result {
    let group = mpi::start(Duration::from_secs(60))?;
    if group.is_first() {
        println!("{:>10} {:>14} {:>14} {:>14} {:>14}", "bytes", "send us", "send GB/s", "sum us", "sum GB/s");
    }
    for bytes in [8, 4 << 10, 64 << 10, 1 << 20, 64 << 20] {
        let repeats = if bytes < 1 << 20 { 200 } else { 2 };
        let send = median(&group, repeats, || round_trip(&group, bytes))? / 2.0;
        let values = vec![1.0; bytes / 4];
        let sum = median(&group, repeats, || group.all_reduce(Kind::Gradients, &values).map(drop))?;
        if group.is_first() {
            let rate = |seconds: f64| bytes as f64 / seconds / 1e9;
            println!(
                "{bytes:>10} {:>14.1} {:>14.2} {:>14.1} {:>14.2}",
                1e6 * send,
                rate(send),
                1e6 * sum,
                rate(sum)
            );
        }
    }
    overlap(&group)?;
    waiting(&group)?;
    mpi::finish(&group)
}

/// Median time of one call, in seconds.
fn median(group: &Group, repeats: usize, mut work: impl FnMut() -> Result) -> Result<f64> {
    let mut times = Vec::with_capacity(TURNS);
    for _ in 0..TURNS {
        group.barrier()?;
        let started = Instant::now();
        for _ in 0..repeats {
            work()?;
        }
        times.push(started.elapsed().as_secs_f64() / repeats as f64);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[TURNS / 2])
}

/// Rank 0 sends to the last rank, which sends back.
fn round_trip(group: &Group, bytes: usize) -> Result {
    let last = group.size() - 1;
    if group.rank() == 0 {
        group.send(last, Kind::States, vec![0; bytes])?;
        group.wait(group.receive(last, bytes)?)?;
    } else if group.rank() == last {
        let message = group.wait(group.receive(0, bytes)?)?;
        group.send(0, Kind::States, message)?;
    }
    Ok(())
}

/// The share of a large all-gather's time that is hidden behind computation: without any call of MPI meanwhile, and
/// with one every millisecond.
fn overlap(group: &Group) -> Result {
    const BYTES: usize = 32 << 20;
    let lens = vec![BYTES; group.size()];
    let own = || vec![group.rank() as u8; BYTES];
    let alone = median(group, 1, || group.all_gather(Kind::Weights, own(), &lens).map(drop))?;
    for calls in [false, true] {
        let mut waits = Vec::new();
        for _ in 0..TURNS {
            group.barrier()?;
            let gather = group.start_all_gather(Kind::Weights, own(), &lens)?;
            let started = Instant::now();
            while started.elapsed().as_secs_f64() < 2.0 * alone {
                let turn = Instant::now();
                while turn.elapsed() < Duration::from_millis(1) {
                    std::hint::spin_loop();
                }
                if calls {
                    group.is_flushed()?;
                }
            }
            let started = Instant::now();
            drop(group.finish_all_gather(gather)?);
            waits.push(started.elapsed().as_secs_f64());
        }
        waits.sort_by(f64::total_cmp);
        if group.is_first() {
            println!(
                "all-gather of {BYTES} bytes: {:.1} ms; behind computation {} calls: {:.1} ms",
                1e3 * alone,
                if calls { "with" } else { "without" },
                1e3 * waits[TURNS / 2]
            );
        }
    }
    Ok(())
}

/// The share of a core that a rank uses while it waits for another.
fn waiting(group: &Group) -> Result {
    let (started, used) = (Instant::now(), processor_seconds());
    if !group.is_first() {
        std::thread::sleep(Duration::from_secs(4));
    }
    group.barrier()?;
    if group.is_first()
        && let (Some(before), Some(after)) = (used, processor_seconds())
    {
        let (used, time) = (after - before, started.elapsed().as_secs_f64());
        println!("waiting uses {:.0} % of a core", 100.0 * used / time);
    }
    Ok(())
}

/// Processor time of this process, on Linux.
fn processor_seconds() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/self/stat").ok()?;
    let fields: Vec<&str> = text.rsplit(") ").next()?.split(' ').collect();
    // Fields 14 and 15 of proc_pid_stat(5), in ticks of 10 ms.
    Some((fields.get(11)?.parse::<f64>().ok()? + fields.get(12)?.parse::<f64>().ok()?) / 100.0)
}
