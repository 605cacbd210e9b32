//! The transport over MPI.
//!
//! ```text
//! channel of a message    its MPI tag
//! a message of n bytes    n / limit pieces of `limit` bytes, then one of n % limit, which may be empty
//! ```
//! MPI counts in C ints, so a message above [`LARGEST_PIECE`] is sent in several pieces. The last piece is always
//! shorter than the limit, so the end of a message is known without its length.
//!
//! Only non-blocking calls are used (MPI_Isend, MPI_Irecv, MPI_Test, MPI_Testsome, MPI_Iprobe): a rank that stopped
//! must not block the others inside the library. MPI moves large messages only while both sides call it.
//!
//! Sender and receiver must agree on the length of a message: Open MPI 4.1 copies a large message that is longer than
//! its receive past the end of the buffer.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int};
use std::fmt;
use std::mem::MaybeUninit;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, TryLockError};
use std::time::{Duration, Instant};

use mpi::Threading;
use mpi::environment::Universe;
use mpi::ffi;
use mpi::traits::Communicator;

use ballast_cluster::{Error, Group, PRESENCE, Result, Ticket, Transport};

/// Largest number of bytes of one MPI message.
const LARGEST_PIECE: usize = 1 << 30;

/// Time that [`abort`] gives another thread to leave the library.
const ABORT_PATIENCE: Duration = Duration::from_millis(200);

/// The transport of this process; MPI can be started once.
static RUNNING: OnceLock<Arc<Mpi>> = OnceLock::new();

/// The transport of a process that was started by mpirun or srun; see [`start`].
pub struct Mpi {
    rank: usize,
    size: usize,
    limit: usize,
    /// MPI is initialized for calls from one thread at a time: the one that holds the lock.
    state: Mutex<State>,
}

struct State {
    /// `None` after [`finish`].
    universe: Option<Universe>,
    /// Requests of the pieces in flight.
    sends: Vec<ffi::MPI_Request>,
    /// The messages of `sends`, in the same order.
    sent: Vec<Arc<Vec<u8>>>,
    /// Number of pieces from which a send removes the completed ones, so that many sends stay cheap.
    crowd: usize,
    receives: HashMap<Ticket, Incoming>,
    /// Messages without a receive, of which a part has arrived, by sender and channel.
    polled: HashMap<(usize, u16), Incoming>,
    last_ticket: u64,
}

// SAFETY: requests are handles of the library, which was initialized for calls from any thread, one at a time; the
// mutex around the state sees to that.
unsafe impl Send for State {}

/// A message that is being received. Its memory is not moved while a request is open.
struct Incoming {
    from: usize,
    /// Has room for all pieces; its length is the number of bytes that have arrived.
    buffer: Vec<u8>,
    /// Open requests with their lengths, the next one last.
    pieces: Vec<(ffi::MPI_Request, usize)>,
}

/// Starts MPI and returns the group of all ranks.
pub fn start(timeout: Duration) -> Result<Group> {
    start_with_limit(timeout, LARGEST_PIECE)
}

/// [`start`] with another size above which messages are divided. It must be the same on all ranks.
pub fn start_with_limit(timeout: Duration, limit: usize) -> Result<Group> {
    let limit = limit.clamp(1, LARGEST_PIECE);
    let again = || Error::Failed("MPI was started twice in one process".into());
    let (universe, threading) =
        mpi::environment::initialize_with_threading(Threading::Serialized).ok_or_else(again)?;
    let world = universe.world();
    let (rank, size) = (world.rank() as usize, world.size() as usize);
    if threading < Threading::Serialized {
        let problem = format!(
            "this MPI allows calls from the main thread only ({threading:?}); it must allow them from any thread, \
             one at a time (MPI_THREAD_SERIALIZED): build it with thread support"
        );
        return Err(Error::Failed(problem));
    }
    // SAFETY: the library is initialized, and no other thread has a handle to it yet.
    let code = unsafe { ffi::MPI_Comm_set_errhandler(ffi::RSMPI_COMM_WORLD, ffi::RSMPI_ERRORS_RETURN) };
    check(code, rank, rank)?;
    let state = State {
        universe: Some(universe),
        sends: Vec::new(),
        sent: Vec::new(),
        crowd: 0,
        receives: HashMap::new(),
        polled: HashMap::new(),
        last_ticket: 0,
    };
    let transport = Arc::new(Mpi { rank, size, limit, state: Mutex::new(state) });
    RUNNING.set(transport.clone()).map_err(|_| again())?;
    Ok(Group::world(transport, timeout))
}

/// Finalizes MPI after all ranks have reached this call and all messages are sent. `world` is the group of
/// [`start`].
pub fn finish(world: &Group) -> Result {
    world.flush()?;
    world.barrier()?;
    let Some(transport) = RUNNING.get() else { return Ok(()) };
    // Heartbeats that have arrived meanwhile.
    for from in 0..transport.size {
        while transport.poll(from, PRESENCE)?.is_some() {}
    }
    world.flush()?;
    transport.state()?.universe = None;
    Ok(())
}

/// Ends all processes of the run at once, for a panic hook; only this process if MPI was not started.
pub fn abort(code: i32) -> ! {
    match RUNNING.get() {
        Some(transport) => transport.abort(code),
        None => std::process::exit(code),
    }
}

impl fmt::Debug for Mpi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mpi").field("rank", &self.rank).field("size", &self.size).finish_non_exhaustive()
    }
}

impl Mpi {
    fn state(&self) -> Result<MutexGuard<'_, State>> {
        // No call panics between two changes that belong together.
        let state = self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        match state.universe {
            Some(_) => Ok(state),
            None => Err(Error::Failed("MPI has ended in this process".into())),
        }
    }

    /// Lengths of the pieces of a message.
    fn pieces(&self, len: usize) -> impl Iterator<Item = usize> + use<> {
        let limit = self.limit;
        std::iter::repeat_n(limit, len / limit).chain([len % limit])
    }

    /// Starts to receive a piece of `len` bytes to `buffer`.
    ///
    /// # Safety
    /// `buffer` must be valid for writes of `len` bytes until the request has completed.
    unsafe fn receive_piece(
        &self,
        buffer: *mut u8,
        len: usize,
        from: usize,
        channel: u16,
    ) -> Result<ffi::MPI_Request> {
        let mut request = MaybeUninit::uninit();
        // SAFETY: the caller holds the lock and keeps the buffer; the call writes the request if it succeeds.
        unsafe {
            let code = ffi::MPI_Irecv(
                buffer.cast(),
                len as c_int,
                ffi::RSMPI_UINT8_T,
                from as c_int,
                c_int::from(channel),
                ffi::RSMPI_COMM_WORLD,
                request.as_mut_ptr(),
            );
            check(code, from, self.rank)?;
            Ok(request.assume_init())
        }
    }

    /// Lets a receive progress. Returns true if it has no open request.
    fn advance(&self, incoming: &mut Incoming) -> Result<bool> {
        while let Some((request, expected)) = incoming.pieces.last_mut() {
            let mut arrived = 0;
            let mut status = MaybeUninit::uninit();
            // SAFETY: the request is open, and the caller holds the lock.
            let code = unsafe { ffi::MPI_Test(request, &mut arrived, status.as_mut_ptr()) };
            check(code, incoming.from, self.rank)?;
            if arrived == 0 {
                return Ok(false);
            }
            // SAFETY: the status of a completed request was written by the call above.
            let received = unsafe { received(&status.assume_init()) };
            if received != *expected {
                let problem = format!("expected {expected} bytes, got {received}");
                return Err(Error::Transport { from: incoming.from, to: self.rank, problem });
            }
            incoming.pieces.pop();
            // SAFETY: the buffer has room for all pieces, and they were received one behind the other, so these
            // bytes are initialized.
            unsafe { incoming.buffer.set_len(incoming.buffer.len() + received) };
        }
        Ok(true)
    }
}

/// Number of bytes of a received message.
///
/// # Safety
/// The status must be one of a completed receive or a successful probe.
unsafe fn received(status: &ffi::MPI_Status) -> usize {
    let mut count = 0;
    // SAFETY: the status is valid, and so is the type.
    unsafe { ffi::MPI_Get_count(status, ffi::RSMPI_UINT8_T, &mut count) };
    usize::try_from(count).unwrap_or(0)
}

/// Returns the error of an MPI call that failed.
fn check(code: c_int, from: usize, to: usize) -> Result {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = [0 as c_char; ffi::MPI_MAX_ERROR_STRING as usize + 1];
    let mut len = 0;
    // SAFETY: the call writes at most MPI_MAX_ERROR_STRING characters, so the last one stays 0.
    let text = unsafe {
        ffi::MPI_Error_string(code, text.as_mut_ptr(), &mut len);
        CStr::from_ptr(text.as_ptr())
    };
    Err(Error::Transport { from, to, problem: format!("MPI: {}", text.to_string_lossy()) })
}

impl State {
    /// Lets all sends progress and drops the messages that are sent.
    fn advance_sends(&mut self, rank: usize) -> Result {
        if self.sends.is_empty() {
            return Ok(());
        }
        let (mut count, mut done) = (0, vec![0; self.sends.len()]);
        // SAFETY: the requests are open, there is room for all indices, and the caller holds the lock.
        let code = unsafe {
            ffi::MPI_Testsome(
                self.sends.len() as c_int,
                self.sends.as_mut_ptr(),
                &mut count,
                done.as_mut_ptr(),
                ffi::RSMPI_STATUSES_IGNORE,
            )
        };
        check(code, rank, rank)?;
        // MPI_UNDEFINED, which is negative, without an open request.
        done.truncate(usize::try_from(count).unwrap_or(0));
        // From the back, so that the remaining indices stay valid.
        done.sort_unstable();
        for index in done.into_iter().rev() {
            self.sends.swap_remove(index as usize);
            self.sent.swap_remove(index as usize);
        }
        self.crowd = 2 * self.sends.len() + 16;
        Ok(())
    }
}

impl Transport for Mpi {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn start_send(&self, to: usize, channel: u16, bytes: Vec<u8>) -> Result {
        let mut state = self.state()?;
        if state.sends.len() >= state.crowd {
            state.advance_sends(self.rank)?;
        }
        let bytes = Arc::new(bytes);
        let mut begin = 0;
        for len in self.pieces(bytes.len()) {
            let mut request = MaybeUninit::uninit();
            // SAFETY: the lock is held; the state keeps the bytes, which nobody changes, until the request has
            // completed; the call writes the request if it succeeds.
            let request = unsafe {
                let code = ffi::MPI_Isend(
                    bytes[begin..begin + len].as_ptr().cast(),
                    len as c_int,
                    ffi::RSMPI_UINT8_T,
                    to as c_int,
                    c_int::from(channel),
                    ffi::RSMPI_COMM_WORLD,
                    request.as_mut_ptr(),
                );
                check(code, self.rank, to)?;
                request.assume_init()
            };
            state.sends.push(request);
            state.sent.push(bytes.clone());
            begin += len;
        }
        Ok(())
    }

    fn start_receive(&self, from: usize, channel: u16, len: usize) -> Result<Ticket> {
        let mut state = self.state()?;
        state.last_ticket += 1;
        let ticket = Ticket(state.last_ticket);
        let incoming = Incoming { from, buffer: Vec::with_capacity(len), pieces: Vec::new() };
        // Stored in the state before the first request is open, so that an error does not free the memory.
        let incoming = state.receives.entry(ticket).or_insert(incoming);
        let mut begin = 0;
        for len in self.pieces(len) {
            // SAFETY: the lock is held. The buffer has room for all pieces, and it is neither changed nor dropped
            // while one is open: `take` removes it after the last.
            let request = unsafe {
                let buffer = incoming.buffer.as_mut_ptr().add(begin);
                self.receive_piece(buffer, len, from, channel)?
            };
            incoming.pieces.insert(0, (request, len));
            begin += len;
        }
        Ok(ticket)
    }

    fn take(&self, ticket: Ticket) -> Result<Option<Vec<u8>>> {
        let mut state = self.state()?;
        let Some(incoming) = state.receives.get_mut(&ticket) else {
            let problem = "its receive was not started".into();
            return Err(Error::Transport { from: self.rank, to: self.rank, problem });
        };
        if !self.advance(incoming)? {
            state.advance_sends(self.rank)?;
            return Ok(None);
        }
        Ok(state.receives.remove(&ticket).map(|incoming| incoming.buffer))
    }

    fn poll(&self, from: usize, channel: u16) -> Result<Option<Vec<u8>>> {
        let mut state = self.state()?;
        let nothing = || Incoming { from, buffer: Vec::new(), pieces: Vec::new() };
        // Stays in the state while a request is open, so that an error does not free the memory.
        let incoming = state.polled.entry((from, channel)).or_insert_with(nothing);
        loop {
            let had = incoming.buffer.len();
            if !incoming.pieces.is_empty() {
                let expected = incoming.pieces[0].1;
                if !self.advance(incoming)? {
                    return Ok(None);
                }
                if expected < self.limit {
                    return Ok(state.polled.remove(&(from, channel)).map(|incoming| incoming.buffer));
                }
                continue;
            }
            let mut found = 0;
            let mut status = MaybeUninit::uninit();
            // SAFETY: the lock is held; the call writes to both.
            let code = unsafe {
                ffi::MPI_Iprobe(
                    from as c_int,
                    c_int::from(channel),
                    ffi::RSMPI_COMM_WORLD,
                    &mut found,
                    status.as_mut_ptr(),
                )
            };
            check(code, from, self.rank)?;
            if found == 0 {
                return Ok(None);
            }
            // SAFETY: the probe found a message and wrote its status.
            let len = unsafe { received(&status.assume_init()) };
            incoming.buffer.reserve_exact(len);
            // SAFETY: the lock is held, so this receives the message that was found. There is room for it, and the
            // buffer is neither changed nor dropped while the request is open.
            let request = unsafe {
                let buffer = incoming.buffer.as_mut_ptr().add(had);
                self.receive_piece(buffer, len, from, channel)?
            };
            incoming.pieces.push((request, len));
        }
    }

    fn is_flushed(&self) -> Result<bool> {
        let mut state = self.state()?;
        state.advance_sends(self.rank)?;
        Ok(state.sends.is_empty())
    }

    fn abort(&self, code: i32) -> ! {
        let started = Instant::now();
        let lock = loop {
            match self.state.try_lock() {
                Ok(state) => break Some(state),
                Err(TryLockError::Poisoned(poisoned)) => break Some(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) if started.elapsed() > ABORT_PATIENCE => break None,
                Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(1)),
            }
        };
        if lock.as_ref().is_none_or(|state| state.universe.is_some()) {
            // SAFETY: the library is initialized and has not ended. If a thread is still inside it, then since long,
            // and the process ends here in any case.
            unsafe { ffi::MPI_Abort(ffi::RSMPI_COMM_WORLD, code) };
        }
        std::process::exit(code)
    }
}
