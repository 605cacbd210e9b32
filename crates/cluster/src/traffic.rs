//! Counts of sent bytes by purpose.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

/// Purpose of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Gradients, to be summed.
    Gradients,
    /// Weights, from the ranks that own them.
    Weights,
    /// Keys and values of attention, and their gradients, between the ranks of a sequence.
    Attention,
    /// Recurrent states and their gradients, and the convolution's tokens before a boundary.
    States,
    /// Losses, norms, counts and checksums.
    Scalars,
    /// State of the run at its start, and for checkpoints.
    Setup,
    /// Barriers, and messages about waiting ranks. Not counted: they depend on time.
    Control,
}

impl Kind {
    /// All kinds that are counted.
    pub const COUNTED: [Kind; 6] =
        [Kind::Gradients, Kind::Weights, Kind::Attention, Kind::States, Kind::Scalars, Kind::Setup];

    /// Returns the name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Gradients => "gradients",
            Kind::Weights => "weights",
            Kind::Attention => "attention",
            Kind::States => "states",
            Kind::Scalars => "scalars",
            Kind::Setup => "setup",
            Kind::Control => "control",
        }
    }
}

/// Bytes that a process has sent, by kind, and the time that it has waited for others.
#[derive(Debug, Default)]
pub struct Traffic {
    counts: Mutex<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    sent: BTreeMap<Kind, u64>,
    waited: Duration,
}

impl Traffic {
    pub(crate) fn count(&self, kind: Kind, bytes: usize) {
        if kind != Kind::Control {
            *self.lock().sent.entry(kind).or_default() += bytes as u64;
        }
    }

    pub(crate) fn wait(&self, time: Duration) {
        self.lock().waited += time;
    }

    /// Returns the bytes sent so far, by kind.
    pub fn sent(&self) -> BTreeMap<Kind, u64> {
        self.lock().sent.clone()
    }

    /// Returns the time spent waiting so far.
    pub fn waited(&self) -> Duration {
        self.lock().waited
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Counts> {
        // Counters stay usable after a panic elsewhere.
        self.counts.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
