//! The interface of transports, which move bytes between ranks.

use std::fmt::Debug;

use crate::error::{Error, Result};

/// Identifies a receive in flight; see [`Transport::start_receive`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticket(pub u64);

/// Moves bytes between two ranks. Messages from one rank to another in one channel arrive in the order in
/// which they were sent; receives are matched in the order in which they were started.
///
/// No call waits for another rank.
pub trait Transport: Debug + Send + Sync {
    /// Returns the rank of this process, from 0.
    fn rank(&self) -> usize;

    /// Returns the number of processes.
    fn size(&self) -> usize;

    /// Starts to send a message and keeps its bytes until they are sent.
    fn start_send(&self, to: usize, channel: u16, bytes: Vec<u8>) -> Result;

    /// Starts to receive a message of `len` bytes.
    fn start_receive(&self, from: usize, channel: u16, len: usize) -> Result<Ticket>;

    /// Returns the message of a receive if it has arrived; the ticket is then no longer valid.
    fn take(&self, ticket: Ticket) -> Result<Option<Vec<u8>>>;

    /// Returns the next message of a channel if one has arrived, without a receive. Must not be mixed with
    /// [`Transport::start_receive`] in one channel.
    fn poll(&self, from: usize, channel: u16) -> Result<Option<Vec<u8>>>;

    /// Returns true if all messages are sent.
    fn is_flushed(&self) -> Result<bool>;

    /// Ends all processes of the run at once.
    fn abort(&self, code: i32) -> !;
}

/// The transport of a run with one process.
#[derive(Clone, Copy, Debug, Default)]
pub struct Solo;

impl Solo {
    fn refuse<T>(&self, other: usize) -> Result<T> {
        Err(Error::Transport { from: 0, to: other, problem: "this run has one process".into() })
    }
}

impl Transport for Solo {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn start_send(&self, to: usize, _: u16, _: Vec<u8>) -> Result {
        self.refuse(to)
    }

    fn start_receive(&self, from: usize, _: u16, _: usize) -> Result<Ticket> {
        self.refuse(from)
    }

    fn take(&self, _: Ticket) -> Result<Option<Vec<u8>>> {
        self.refuse(0)
    }

    fn poll(&self, _: usize, _: u16) -> Result<Option<Vec<u8>>> {
        Ok(None)
    }

    fn is_flushed(&self) -> Result<bool> {
        Ok(true)
    }

    fn abort(&self, code: i32) -> ! {
        std::process::exit(code)
    }
}
