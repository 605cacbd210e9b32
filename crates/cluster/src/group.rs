//! Groups of ranks: point-to-point messages with a time limit.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::presence::{INTERVAL, Presence, Pulse};
use crate::traffic::{Kind, Traffic};
use crate::transport::{Solo, Ticket, Transport};

/// Time after the time limit in which ranks tell each other for whom they wait, before a rank is named.
const LISTENING: Duration = Duration::from_millis(1500);

/// A group of ranks. All members must call the collective operations of a group in the same order.
#[derive(Clone, Debug)]
pub struct Group {
    transport: Arc<dyn Transport>,
    traffic: Arc<Traffic>,
    /// Ranks of the members in the cluster.
    members: Arc<[usize]>,
    /// Index of this process among the members.
    rank: usize,
    channel: u16,
    timeout: Duration,
    presence: Arc<Presence>,
}

/// A receive in flight.
#[derive(Debug)]
#[must_use]
pub struct Receive {
    /// Index of the sender in the group.
    from: usize,
    ticket: Ticket,
}

impl Group {
    /// Returns a group of one process.
    pub fn solo() -> Group {
        Group::world(Arc::new(Solo), Duration::MAX)
    }

    /// Returns the group of all ranks. If a rank that others wait for is silent for `timeout`, that is an error.
    pub fn world(transport: Arc<dyn Transport>, timeout: Duration) -> Group {
        let (rank, members) = (transport.rank(), (0..transport.size()).collect());
        let presence = Arc::new(Presence::new(transport.clone()));
        Group { transport, traffic: Arc::default(), members, rank, channel: 1, timeout, presence }
    }

    /// Returns a group of some of these ranks, in this order, which must include this rank. Groups that exist at the
    /// same time and share two ranks need different `number`s, from 1.
    ///
    /// # Panics
    /// If this rank is not a member, or a member is not in this group.
    pub fn subgroup(&self, members: &[usize], number: u16) -> Group {
        let rank = members.iter().position(|member| *member == self.rank).expect("this rank is a member");
        let members = members.iter().map(|member| self.members[*member]).collect();
        Group { members, rank, channel: self.channel + number, ..self.clone() }
    }

    /// Sets the time limit.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Returns the index of this process in the group.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.members.len()
    }

    /// Returns true for the rank that writes files and prints.
    pub fn is_first(&self) -> bool {
        self.rank == 0
    }

    /// Returns the bytes sent and the time waited by this process, in all groups.
    pub fn traffic(&self) -> &Traffic {
        &self.traffic
    }

    /// Ends all processes of the run at once.
    pub fn abort(&self, code: i32) -> ! {
        self.transport.abort(code)
    }

    /// Sends a message to a member.
    pub fn send(&self, to: usize, kind: Kind, bytes: Vec<u8>) -> Result {
        self.traffic.count(kind, bytes.len());
        self.transport.start_send(self.members[to], self.channel, bytes)
    }

    /// Starts to receive a message of `len` bytes from a member.
    pub fn receive(&self, from: usize, len: usize) -> Result<Receive> {
        let ticket = self.transport.start_receive(self.members[from], self.channel, len)?;
        Ok(Receive { from, ticket })
    }

    /// Waits for a message.
    pub fn wait(&self, receive: Receive) -> Result<Vec<u8>> {
        self.presence.hear(INTERVAL)?;
        if let Some(bytes) = self.transport.take(receive.ticket)? {
            return Ok(bytes);
        }
        let (from, started) = (self.members[receive.from], Instant::now());
        let silent = |rank| Error::Silent { rank, seconds: self.timeout.as_secs() };
        let fault = || Ok(self.presence.holds_up(from, self.timeout)?.map(silent));
        let bytes = self.wait_until(from, || self.transport.take(receive.ticket), fault)?;
        self.traffic.wait(started.elapsed());
        Ok(bytes)
    }

    /// Sends heartbeats to the other ranks until the result is dropped. They wait for this rank beyond the time limit,
    /// however long it computes or writes a file.
    pub fn pulse(&self) -> Result<Pulse> {
        Pulse::start(self.presence.clone())
    }

    /// Returns true if all messages of this process are sent. Occasional calls let large messages progress while the
    /// caller computes.
    pub fn is_flushed(&self) -> Result<bool> {
        self.transport.is_flushed()
    }

    /// Waits until all messages of this process are sent.
    pub fn flush(&self) -> Result {
        let left = || Ok(self.transport.is_flushed()?.then_some(()));
        self.wait_until(self.transport.rank(), left, || self.presence.undelivered(self.timeout))
    }

    /// Polls `look` until it returns a value. After the time limit this rank tells the others that it waits for `whom`,
    /// and the wait ends with the error of `fault` if there is one.
    fn wait_until<R>(
        &self,
        whom: usize,
        look: impl Fn() -> Result<Option<R>>,
        fault: impl Fn() -> Result<Option<Error>>,
    ) -> Result<R> {
        let (started, mut told) = (Instant::now(), Duration::ZERO);
        let mut found = || {
            for turn in 0u32.. {
                if let Some(found) = look()? {
                    return Ok(found);
                }
                let waited = started.elapsed();
                if waited - told > INTERVAL {
                    told = waited;
                    // Until the time limit this rank counts as alive: ranks that wait for messages in flight may
                    // seem to wait for each other in a circle.
                    self.presence.set_overdue((waited > self.timeout).then_some(whom));
                    self.presence.tell()?;
                    self.presence.hear(Duration::ZERO)?;
                    if waited > self.timeout.saturating_add(LISTENING)
                        && let Some(error) = fault()?
                    {
                        return Err(error);
                    }
                }
                pause(turn);
            }
            unreachable!("the loop ends by what it looks for, or a fault")
        };
        let found = found();
        self.presence.set_overdue(None);
        found
    }
}

/// Waits for a moment: spins at first, then yields the core, then sleeps longer and longer.
fn pause(turn: u32) {
    match turn {
        0..64 => std::hint::spin_loop(),
        64..256 => std::thread::yield_now(),
        _ => std::thread::sleep(Duration::from_micros(20 * u64::from((turn - 256) / 64 + 1).min(10))),
    }
}
