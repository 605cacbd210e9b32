//! Ranks as threads of one process, for tests of code that runs on several ranks.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::group::Group;
use crate::transport::{Ticket, Transport};

/// Sender, receiver and channel.
type Lane = (usize, usize, u16);

#[derive(Debug, Default)]
struct Exchange {
    /// Messages by lane and number.
    messages: HashMap<(Lane, u64), Vec<u8>>,
    sent: HashMap<Lane, u64>,
    expected: HashMap<Lane, u64>,
    tickets: HashMap<Ticket, (Lane, u64, usize)>,
    last_ticket: u64,
}

#[derive(Debug, Default)]
struct Shared {
    exchange: Mutex<Exchange>,
    aborted: AtomicBool,
    code: AtomicU64,
}

/// The transport of one rank; see [`transports`].
#[derive(Debug)]
pub struct Threads {
    rank: usize,
    size: usize,
    shared: Arc<Shared>,
}

/// Connected transports of `size` ranks.
pub fn transports(size: usize) -> Vec<Threads> {
    let shared = Arc::new(Shared::default());
    (0..size).map(|rank| Threads { rank, size, shared: shared.clone() }).collect()
}

/// Runs `work` on `size` threads, each with the group of all ranks, and returns the results by rank. A panic of a
/// thread is passed on.
pub fn run<R: Send>(size: usize, work: impl Fn(Group) -> R + Sync) -> Vec<R> {
    run_with_timeout(size, Duration::from_secs(120), work)
}

/// [`run`] with another time limit.
pub fn run_with_timeout<R: Send>(size: usize, timeout: Duration, work: impl Fn(Group) -> R + Sync) -> Vec<R> {
    let work = &work;
    std::thread::scope(|scope| {
        let start = |transport: Threads| {
            let shared = transport.shared.clone();
            scope.spawn(move || {
                let group = Group::world(Arc::new(transport), timeout);
                let result = catch_unwind(AssertUnwindSafe(|| work(group)));
                result.unwrap_or_else(|panic| {
                    // The others must not wait for a rank that is gone.
                    shared.aborted.store(true, Ordering::SeqCst);
                    resume_unwind(panic)
                })
            })
        };
        let running: Vec<_> = transports(size).into_iter().map(start).collect();
        running.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
    })
}

impl Threads {
    fn exchange(&self) -> Result<MutexGuard<'_, Exchange>> {
        if self.shared.aborted.load(Ordering::SeqCst) {
            let code = self.shared.code.load(Ordering::SeqCst);
            return Err(Error::Failed(format!("a rank ended the run with code {code}")));
        }
        // The maps stay consistent if a thread panics: no call panics while it holds the lock.
        Ok(self.shared.exchange.lock().unwrap_or_else(|poisoned| poisoned.into_inner()))
    }
}

impl Transport for Threads {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn start_send(&self, to: usize, channel: u16, bytes: Vec<u8>) -> Result {
        let lane = (self.rank, to, channel);
        let mut exchange = self.exchange()?;
        let number = exchange.sent.entry(lane).or_default();
        *number += 1;
        let number = *number;
        exchange.messages.insert((lane, number), bytes);
        Ok(())
    }

    fn start_receive(&self, from: usize, channel: u16, len: usize) -> Result<Ticket> {
        let lane = (from, self.rank, channel);
        let mut exchange = self.exchange()?;
        let number = exchange.expected.entry(lane).or_default();
        *number += 1;
        let number = *number;
        exchange.last_ticket += 1;
        let ticket = Ticket(exchange.last_ticket);
        exchange.tickets.insert(ticket, (lane, number, len));
        Ok(ticket)
    }

    fn take(&self, ticket: Ticket) -> Result<Option<Vec<u8>>> {
        let mut exchange = self.exchange()?;
        let Some((lane, number, len)) = exchange.tickets.get(&ticket).copied() else {
            let problem = "its receive was not started".into();
            return Err(Error::Transport { from: self.rank, to: self.rank, problem });
        };
        let Some(bytes) = exchange.messages.remove(&(lane, number)) else { return Ok(None) };
        exchange.tickets.remove(&ticket);
        if bytes.len() != len {
            let problem = format!("expected {len} bytes, got {}", bytes.len());
            return Err(Error::Transport { from: lane.0, to: lane.1, problem });
        }
        Ok(Some(bytes))
    }

    fn poll(&self, from: usize, channel: u16) -> Result<Option<Vec<u8>>> {
        let lane = (from, self.rank, channel);
        let mut exchange = self.exchange()?;
        let next = exchange.expected.get(&lane).copied().unwrap_or(0) + 1;
        let message = exchange.messages.remove(&(lane, next));
        if message.is_some() {
            exchange.expected.insert(lane, next);
        }
        Ok(message)
    }

    fn is_flushed(&self) -> Result<bool> {
        Ok(true)
    }

    fn abort(&self, code: i32) -> ! {
        self.shared.code.store(code as u64, Ordering::SeqCst);
        self.shared.aborted.store(true, Ordering::SeqCst);
        panic!("rank {} ended the run with code {code}", self.rank);
    }
}
