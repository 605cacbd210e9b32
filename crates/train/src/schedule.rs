//! The learning rate of a step.
//!
//! ```text
//! warm-up      lr s / warmup                                    s = 1..=warmup
//! afterwards   lr (floor + (1 - floor) f(p)),  p = (s - warmup) / (steps - warmup)
//!              f = (1 + cos(pi p)) / 2, 1 - p, or 1
//! ```

use crate::config::{ScheduleConfig, ScheduleKind};

/// The learning rate of step `step` (from 1) of `steps`; `peak` is the largest.
pub fn learning_rate(schedule: &ScheduleConfig, peak: f64, step: u64, steps: u64) -> f64 {
    let warmup = schedule.warmup.min(steps);
    if step <= warmup {
        return peak * step as f64 / warmup as f64;
    }
    let done = ((step - warmup) as f64 / (steps - warmup).max(1) as f64).min(1.0);
    let shape = match schedule.kind {
        ScheduleKind::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * done).cos()),
        ScheduleKind::Linear => 1.0 - done,
        ScheduleKind::Constant => 1.0,
    };
    peak * (schedule.floor + (1.0 - schedule.floor) * shape)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_climbs_falls_and_ends_at_the_floor() {
        for (kind, middle, end) in [
            (ScheduleKind::Cosine, 0.55, 0.1),
            (ScheduleKind::Linear, 0.55, 0.1),
            (ScheduleKind::Constant, 1.0, 1.0),
        ] {
            let schedule = ScheduleConfig { kind, warmup: 10, floor: 0.1 };
            let at = |step| learning_rate(&schedule, 1.0, step, 110);
            assert_eq!((at(1), at(5), at(10)), (0.1, 0.5, 1.0));
            assert!((at(60) - middle).abs() < 1e-12 && (at(110) - end).abs() < 1e-12, "{kind:?}");
            assert!((at(200) - end).abs() < 1e-12);
        }
    }

    #[test]
    fn a_warm_up_longer_than_the_run_and_none_at_all_are_fine() {
        let schedule = ScheduleConfig { kind: ScheduleKind::Linear, warmup: 100, floor: 0.0 };
        assert_eq!(learning_rate(&schedule, 2.0, 5, 5), 2.0);
        let schedule = ScheduleConfig { warmup: 0, ..schedule };
        assert_eq!(learning_rate(&schedule, 2.0, 1, 2), 1.0);
    }
}
