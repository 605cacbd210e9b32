//! Ranks that work together: point-to-point messages with a time limit.

use std::collections::BTreeMap;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::traffic::{Kind, Traffic};
use crate::transport::{Solo, Ticket, Transport};

/// Channel of the messages that say for whom a rank waits, or that it is busy.
pub const WAITING: u16 = 0;

/// Message in that channel of a rank that is busy; see [`Group::while_busy`].
const BUSY: u64 = u64::MAX;

/// Time after which a waiting rank tells the others for whom it waits, and a busy one that it is busy.
const PATIENCE: Duration = Duration::from_millis(500);

/// Time after the time limit in which a rank listens for whom the others wait now. They tell it several times, and what
/// they said before is not used: it may have been read late.
const LISTENING: Duration = Duration::from_millis(1500);

/// Some ranks of a cluster. All members must call the collective operations of a group in the same order.
#[derive(Clone, Debug)]
pub struct Group {
    transport: Arc<dyn Transport>,
    traffic: Arc<Traffic>,
    /// Ranks of the members in the whole cluster.
    members: Arc<[usize]>,
    /// Index of this process among the members.
    rank: usize,
    channel: u16,
    timeout: Duration,
    waits: Arc<Mutex<Waits>>,
}

/// Messages of other ranks about waiting.
#[derive(Debug, Default)]
struct Waits {
    /// The rank that a rank waits for, or [`BUSY`], and when this was heard.
    by_rank: BTreeMap<usize, (u64, Instant)>,
    /// Time of the last look.
    read: Option<Instant>,
    /// Time at which everything about waiting was forgotten.
    forgotten: Option<Instant>,
}

/// A message that is expected.
#[derive(Debug)]
#[must_use]
pub struct Receive {
    /// Index of the sender in the group.
    from: usize,
    ticket: Ticket,
}

impl Group {
    /// A group of one process.
    pub fn solo() -> Group {
        Group::world(Arc::new(Solo), Duration::MAX)
    }

    /// The group of all ranks. A rank that does not answer within `timeout` is an error.
    pub fn world(transport: Arc<dyn Transport>, timeout: Duration) -> Group {
        let (rank, members) = (transport.rank(), (0..transport.size()).collect());
        Group {
            transport,
            traffic: Arc::default(),
            members,
            rank,
            channel: 1,
            timeout,
            waits: Arc::default(),
        }
    }

    /// A group of some of these ranks, this one among them, in this order. Groups that exist at the same time and share
    /// two ranks need different `number`s, from 1.
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

    /// Index of this process in the group.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.members.len()
    }

    /// Returns true for the rank that writes files and prints.
    pub fn is_first(&self) -> bool {
        self.rank == 0
    }

    /// Bytes sent and time waited by this process, in all groups.
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
        self.hear_waiting(PATIENCE)?;
        if let Some(bytes) = self.transport.take(receive.ticket)? {
            return Ok(bytes);
        }
        let started = Instant::now();
        let (mut told, mut overdue) = (None, None);
        for turn in 0u32.. {
            if let Some(bytes) = self.transport.take(receive.ticket)? {
                self.traffic.wait(started.elapsed());
                return Ok(bytes);
            }
            let waited = started.elapsed();
            if waited > PATIENCE && told.is_none_or(|told: Duration| waited - told > PATIENCE) {
                told = Some(waited);
                self.tell(self.members[receive.from] as u64)?;
                self.hear_waiting(Duration::ZERO)?;
            }
            if waited > self.timeout {
                let since = *overdue.get_or_insert_with(Instant::now);
                if since.elapsed() < LISTENING {
                    self.forget_before(since)?;
                } else if let Some(rank) = self.silent_rank(self.members[receive.from])? {
                    return Err(Error::Silent { rank, seconds: self.timeout.as_secs() });
                } else {
                    overdue = None;
                }
            }
            pause(turn);
        }
        unreachable!("the loop ends by a message or the time limit")
    }

    /// Does long work, such as writing a file, for which the others may have to wait: they are told regularly that this
    /// rank is busy, and wait for it beyond the time limit. The work must not wait for another rank.
    pub fn while_busy<R>(&self, work: impl FnOnce() -> R) -> R {
        if self.transport.size() == 1 {
            return work();
        }
        let (working, ended) = mpsc::channel::<()>();
        std::thread::scope(|scope| {
            // Dropped at the end of the work, also by a panic.
            let _working = working;
            scope.spawn(move || {
                while ended.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
                    // A rank that cannot send notices it after the work.
                    let _ = self.tell(BUSY);
                }
            });
            work()
        })
    }

    /// Returns true if all messages of this process have left. A call now and then moves large messages forward while
    /// the caller computes.
    pub fn is_flushed(&self) -> Result<bool> {
        self.transport.is_flushed()
    }

    /// Waits until all messages of this process have left.
    pub fn flush(&self) -> Result {
        let started = Instant::now();
        for turn in 0u32.. {
            if self.transport.is_flushed()? {
                return Ok(());
            }
            if started.elapsed() > self.timeout {
                let problem = "messages could not be delivered within cluster.timeout".to_string();
                return Err(Error::Failed(problem));
            }
            pause(turn);
        }
        unreachable!("the loop ends by delivery or the time limit")
    }

    /// Tells all ranks of the cluster for whom this one waits, or that it is [`BUSY`].
    fn tell(&self, whom: u64) -> Result {
        let bytes = whom.to_le_bytes().to_vec();
        (0..self.transport.size())
            .filter(|rank| *rank != self.transport.rank())
            .try_for_each(|rank| self.transport.start_send(rank, WAITING, bytes.clone()))
    }

    /// Reads what others have said about waiting, if the last look is `interval` ago. Regularly, because unread
    /// messages pile up in the transport, and what they say becomes old.
    fn hear_waiting(&self, interval: Duration) -> Result {
        if self.transport.size() == 1 {
            return Ok(());
        }
        let mut waits = self.waits.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let now = Instant::now();
        if waits.read.is_some_and(|read| now - read < interval) {
            return Ok(());
        }
        waits.read = Some(now);
        for rank in (0..self.transport.size()).filter(|rank| *rank != self.transport.rank()) {
            while let Some(bytes) = self.transport.poll(rank, WAITING)? {
                if let Ok(bytes) = <[u8; 8]>::try_from(&bytes[..]) {
                    waits.by_rank.insert(rank, (u64::from_le_bytes(bytes), now));
                }
            }
        }
        Ok(())
    }

    /// Forgets what others said about waiting, once for each time `since`.
    fn forget_before(&self, since: Instant) -> Result {
        let forgotten = |waits: &Waits| waits.forgotten.is_some_and(|forgotten| forgotten >= since);
        if forgotten(&self.waits.lock().unwrap_or_else(|poisoned| poisoned.into_inner())) {
            return Ok(());
        }
        self.hear_waiting(Duration::ZERO)?;
        let mut waits = self.waits.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        waits.by_rank.retain(|_, (whom, _)| *whom == BUSY);
        waits.forgotten = Some(Instant::now());
        Ok(())
    }

    /// The rank that holds up the others: the one that `first` waits for, or that one, and so on. A rank that
    /// waits for nobody has stopped. `None` if that rank was busy within the time limit.
    fn silent_rank(&self, first: usize) -> Result<Option<usize>> {
        self.hear_waiting(Duration::ZERO)?;
        let waits = self.waits.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let mut rank = first;
        for _ in 0..self.transport.size() {
            match waits.by_rank.get(&rank) {
                Some((BUSY, heard)) if heard.elapsed() < self.timeout => return Ok(None),
                Some((next, _)) if *next != BUSY && *next != self.transport.rank() as u64 => {
                    rank = *next as usize
                }
                _ => break,
            }
        }
        Ok(Some(rank))
    }
}

/// Waits for a moment: at first without giving up the core, then longer and longer.
fn pause(turn: u32) {
    match turn {
        0..64 => std::hint::spin_loop(),
        64..256 => std::thread::yield_now(),
        _ => std::thread::sleep(Duration::from_micros(20 * u64::from((turn - 256) / 64 + 1).min(10))),
    }
}
