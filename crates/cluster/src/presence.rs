//! Heartbeats: the state that each rank reports, and the rank that blocks the others.
//!
//! ```text
//! ALIVE      the rank computes, reads or writes files, or waits for another within the time limit
//! a number   the rank has waited for rank `number` for longer than the time limit
//! nothing    the rank has stopped, or its machine is unreachable
//! ```
//! A step may take hours, and ranks with longer documents take longer than others, so time alone does not show that a
//! rank has stopped. A thread of each process sends heartbeats while the others compute ([`Pulse`]); only silence
//! counts.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::transport::Transport;

/// Channel of the heartbeats.
pub const PRESENCE: u16 = 0;

/// Time between two heartbeats of a rank.
pub(crate) const INTERVAL: Duration = Duration::from_millis(500);

const ALIVE: u64 = u64::MAX;

/// The state that this rank reports, and the reports of the others.
#[derive(Debug)]
pub(crate) struct Presence {
    transport: Arc<dyn Transport>,
    /// [`ALIVE`], or the rank for which this one has waited too long.
    says: AtomicU64,
    heard: Mutex<Heard>,
}

#[derive(Debug, Default)]
struct Heard {
    /// Last report of each rank, and the time at which it was read.
    by_rank: BTreeMap<usize, (u64, Instant)>,
    /// Time of the last read.
    read: Option<Instant>,
}

impl Presence {
    pub(crate) fn new(transport: Arc<dyn Transport>) -> Presence {
        Presence { transport, says: AtomicU64::new(ALIVE), heard: Mutex::default() }
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let own = self.transport.rank();
        (0..self.transport.size()).filter(move |rank| *rank != own)
    }

    fn heard(&self) -> MutexGuard<'_, Heard> {
        self.heard.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Sets the report of this rank from now on: the rank for which it has waited too long, or alive.
    pub(crate) fn set_overdue(&self, whom: Option<usize>) {
        self.says.store(whom.map_or(ALIVE, |rank| rank as u64), Ordering::SeqCst);
    }

    /// Sends this rank's report to all other ranks.
    pub(crate) fn tell(&self) -> Result {
        let bytes = self.says.load(Ordering::SeqCst).to_le_bytes();
        self.others().try_for_each(|rank| self.transport.start_send(rank, PRESENCE, bytes.to_vec()))
    }

    /// Reads the reports of the others, unless the last read was less than `interval` ago. Must be called regularly,
    /// because unread messages pile up in the transport and reports become old.
    pub(crate) fn hear(&self, interval: Duration) -> Result {
        if self.transport.size() == 1 {
            return Ok(());
        }
        let mut heard = self.heard();
        let now = Instant::now();
        if heard.read.is_some_and(|read| now - read < interval) {
            return Ok(());
        }
        heard.read = Some(now);
        for rank in self.others() {
            while let Some(bytes) = self.transport.poll(rank, PRESENCE)? {
                if let Ok(bytes) = <[u8; 8]>::try_from(&bytes[..]) {
                    heard.by_rank.insert(rank, (u64::from_le_bytes(bytes), now));
                }
            }
        }
        Ok(())
    }

    /// Returns the rank that blocks this one, which waits for `first`: that rank, or the one for which it waits, and so
    /// on. It has been silent for `timeout`, or waits for this one. `None` if a rank of that chain is alive.
    pub(crate) fn holds_up(&self, first: usize, timeout: Duration) -> Result<Option<usize>> {
        self.hear(Duration::ZERO)?;
        let heard = self.heard();
        let mut rank = first;
        for _ in 0..self.transport.size() {
            match heard.last_words(rank, timeout) {
                Some(ALIVE) => return Ok(None),
                Some(next) if next != self.transport.rank() as u64 => rank = next as usize,
                _ => break,
            }
        }
        Ok(Some(rank))
    }

    /// Returns the reason why messages of this rank are not received; `None` if another rank is alive and may still
    /// receive them.
    pub(crate) fn undelivered(&self, timeout: Duration) -> Result<Option<Error>> {
        self.hear(Duration::ZERO)?;
        let heard = self.heard();
        if self.others().any(|rank| heard.last_words(rank, timeout) == Some(ALIVE)) {
            return Ok(None);
        }
        let silent = self.others().find(|rank| heard.last_words(*rank, timeout).is_none());
        let problem = || Error::Failed("messages could not be delivered within cluster.timeout".into());
        Ok(Some(silent.map_or_else(problem, |rank| Error::Silent { rank, seconds: timeout.as_secs() })))
    }
}

impl Heard {
    /// Returns the last report of a rank; `None` if it is older than `timeout`.
    fn last_words(&self, rank: usize, timeout: Duration) -> Option<u64> {
        self.by_rank.get(&rank).filter(|(_, read)| read.elapsed() <= timeout).map(|(said, _)| *said)
    }
}

/// Sends heartbeats from a separate thread until it is dropped; see [`Group::pulse`](crate::Group::pulse).
#[derive(Debug)]
#[must_use]
pub struct Pulse(Option<(Sender<()>, JoinHandle<()>)>);

impl Pulse {
    pub(crate) fn start(presence: Arc<Presence>) -> Result<Pulse> {
        if presence.transport.size() == 1 {
            return Ok(Pulse(None));
        }
        let (beating, ended) = mpsc::channel::<()>();
        let beat = move || {
            while ended.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                // A rank that cannot send or receive finds out in its next message.
                let _ = presence.tell().and_then(|()| presence.hear(Duration::ZERO));
            }
        };
        let thread = std::thread::Builder::new().name("pulse".into()).spawn(beat).map_err(|error| {
            Error::Failed(format!("cannot start the thread that tells other ranks of this one: {error}"))
        })?;
        Ok(Pulse(Some((beating, thread))))
    }
}

impl Drop for Pulse {
    fn drop(&mut self) {
        if let Some((beating, thread)) = self.0.take() {
            drop(beating);
            // The thread does not panic, and if it did, nothing would be lost.
            let _ = thread.join();
        }
    }
}
