//! Which ranks are there: what each says about itself, and who holds up the others.
//!
//! ```text
//! ALIVE      the rank computes, reads or writes files, or waits for another within the time limit
//! a number   the rank has waited for this one for longer than the time limit
//! nothing    the rank has stopped, or its machine is unreachable
//! ```
//! A step may take hours, and ranks with longer documents take longer than others, so time alone says nothing about a
//! rank. A thread of each process speaks while its others compute ([`Pulse`]); only silence counts.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::transport::Transport;

/// Channel of what ranks say about themselves.
pub const PRESENCE: u16 = 0;

/// Time between two messages of a rank about itself.
pub(crate) const INTERVAL: Duration = Duration::from_millis(500);

const ALIVE: u64 = u64::MAX;

/// The words of this rank about itself, and those heard from others.
#[derive(Debug)]
pub(crate) struct Presence {
    transport: Arc<dyn Transport>,
    /// [`ALIVE`], or the rank that this one has waited for too long.
    says: AtomicU64,
    heard: Mutex<Heard>,
}

#[derive(Debug, Default)]
struct Heard {
    /// Last words of each rank, and when they were read.
    by_rank: BTreeMap<usize, (u64, Instant)>,
    /// Time of the last look.
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

    /// Sets what this rank says from now on: that it waits for another since too long, or that it is alive.
    pub(crate) fn set_overdue(&self, whom: Option<usize>) {
        self.says.store(whom.map_or(ALIVE, |rank| rank as u64), Ordering::SeqCst);
    }

    /// Tells all ranks of the cluster about this one.
    pub(crate) fn tell(&self) -> Result {
        let bytes = self.says.load(Ordering::SeqCst).to_le_bytes();
        self.others().try_for_each(|rank| self.transport.start_send(rank, PRESENCE, bytes.to_vec()))
    }

    /// Reads what others have said, if the last look is `interval` ago. Regularly, because unread messages pile up in
    /// the transport, and what they say becomes old.
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

    /// The rank that holds up this one, which waits for `first`: that rank, or the one that it waits for, and so on.
    /// It has been silent for `timeout`, or waits for this one. `None` if a rank on the way is alive.
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

    /// Why messages of this rank are not taken, if no other rank is alive that may still take them.
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
    /// Last words of a rank; `None` if they are `timeout` old.
    fn last_words(&self, rank: usize, timeout: Duration) -> Option<u64> {
        self.by_rank.get(&rank).filter(|(_, read)| read.elapsed() <= timeout).map(|(said, _)| *said)
    }
}

/// Tells the other ranks that this process is there, until it is dropped, whatever the threads of the run do; see
/// [`Group::pulse`](crate::Group::pulse).
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
                // A rank that cannot send or hear notices it in its own next message.
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
            // It does not panic, and if it did, nothing would be lost.
            let _ = thread.join();
        }
    }
}
