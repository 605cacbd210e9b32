//! Measures time and memory.

use std::time::Instant;

use crate::cases::Work;

/// Time and memory of one case.
#[derive(Clone, Copy, Debug)]
pub struct Measured {
    /// Median time in seconds.
    pub seconds: f64,
    /// Growth of the process's peak memory during the first run, in bytes; 0 if the system does not report
    /// it.
    pub bytes: u64,
}

/// Runs `work` once for memory, then `repetitions` times for the median time.
pub fn measure(repetitions: usize, work: &mut Work) -> anyhow::Result<Measured> {
    // Resets VmHWM to the memory that is resident now. Without the permission, the peak of the setup is
    // included.
    let _ = std::fs::write("/proc/self/clear_refs", "5");
    let before = peak_bytes();
    work()?;
    let bytes = peak_bytes().saturating_sub(before);
    Ok(Measured { seconds: median(repetitions, work)?, bytes })
}

/// Median time of `work`.
pub fn median(repetitions: usize, mut work: impl FnMut() -> anyhow::Result<()>) -> anyhow::Result<f64> {
    let mut times = Vec::new();
    for _ in 0..repetitions.max(1) {
        let begin = Instant::now();
        work()?;
        times.push(begin.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

fn peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok());
    kib.unwrap_or(0u64) * 1024
}
