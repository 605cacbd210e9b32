//! A file on a server, read by ranges.

use std::sync::{Arc, Mutex, RwLock};

use ballast_files::{Error, Place, Result, Source};

use crate::address::Url;
use crate::client::{Answer, Client, Failure};

/// Number of bytes that the first request asks for: the header of most shards fits, and little is read that is
/// not needed.
const FIRST_BYTES: u64 = 64 << 10;

/// A server without ranges may send this much of a file to no use, and this much is kept in memory.
const SMALL_BYTES: u64 = 16 << 20;

/// Number of bytes that make an attempt a success although it failed in the end.
const PROGRESS_BYTES: usize = 64 << 10;

/// A file on a server.
pub(crate) struct RemoteFile {
    client: Arc<Client>,
    url: Url,
    /// Address in errors.
    pub(super) shown: String,
    /// Commit that the file must be from.
    commit: Option<String>,
    /// Size in bytes.
    pub(super) bytes: u64,
    /// False if the server ignores ranges.
    pub(super) ranged: bool,
    identity: Mutex<Identity>,
    /// Parts that were read and are kept.
    blocks: RwLock<Vec<(u64, Vec<u8>)>>,
}

/// The entity tags of a file, and the host that sends it.
#[derive(Clone, Default)]
struct Identity {
    /// By the endpoint.
    linked: Option<String>,
    /// By the host that sends the data.
    sent: Option<String>,
    /// Host that the endpoint redirects to; valid for a limited time.
    location: Option<Url>,
}

impl std::fmt::Debug for RemoteFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RemoteFile({}, {} bytes)", self.shown, self.bytes)
    }
}

impl RemoteFile {
    /// Asks for the start of a file, which tells its size and identity.
    pub(crate) fn open(
        client: &Arc<Client>,
        url: Url,
        shown: String,
        commit: Option<&str>,
    ) -> Result<RemoteFile> {
        let mut file = RemoteFile {
            client: client.clone(),
            url,
            shown,
            commit: commit.map(str::to_string),
            bytes: 0,
            ranged: true,
            identity: Mutex::default(),
            blocks: RwLock::default(),
        };
        let mut patience = client.patience();
        loop {
            match file.try_open() {
                Ok(()) => return Ok(file),
                Err(failure) => patience.wait(failure).map_err(|failure| failure.error(&file.shown))?,
            }
        }
    }

    fn try_open(&mut self) -> Result<(), Failure> {
        let mut answer = match self.client.send(&self.url, Some((0, FIRST_BYTES))) {
            Ok(answer) => answer,
            // A range of an empty file cannot be satisfied.
            Err(failure) if failure.range.is_some_and(|range| range.total == Some(0)) => {
                self.bytes = 0;
                return Ok(());
            }
            Err(failure) => return Err(failure),
        };
        self.check_commit(&answer)?;
        let start = if answer.status == 206 {
            let total = answer.range.and_then(|range| range.total);
            let total = total.ok_or_else(|| Failure::lasting("the server does not state the file's size"))?;
            self.bytes = total;
            let mut start = vec![0; total.min(FIRST_BYTES) as usize];
            check_part(&answer, 0, start.len() as u64)?;
            answer.fill(&mut start, &mut 0)?;
            answer.expect_end()?;
            start
        } else {
            self.ranged = false;
            self.start_without_ranges(&mut answer)?
        };
        *self.identity.lock().unwrap_or_else(|e| e.into_inner()) = Identity {
            linked: answer.linked_etag.take(),
            sent: answer.etag.take(),
            location: Some(answer.url),
        };
        self.keep(0, start);
        Ok(())
    }

    /// Reads a small file to its end, and the start of a large one.
    fn start_without_ranges(&mut self, answer: &mut Answer) -> Result<Vec<u8>, Failure> {
        match answer.length {
            Some(length) if length > SMALL_BYTES => {
                self.bytes = length;
                let mut start = vec![0; FIRST_BYTES as usize];
                answer.fill(&mut start, &mut 0)?;
                Ok(start)
            }
            _ => {
                let all = answer.read_to_end(SMALL_BYTES)?;
                self.bytes = all.len() as u64;
                Ok(all)
            }
        }
    }

    fn check_commit(&self, answer: &Answer) -> Result<(), Failure> {
        match (&self.commit, &answer.commit) {
            (Some(wanted), Some(got)) if wanted != got => {
                Err(Failure::lasting(format!("the server sent commit {got}, wanted {wanted}")))
            }
            _ => Ok(()),
        }
    }

    /// Returns the entity tag of the content: by the endpoint, else by the host that sends it.
    pub(crate) fn etag(&self) -> Option<String> {
        let identity = self.identity.lock().unwrap_or_else(|e| e.into_inner());
        identity.linked.clone().or(identity.sent.clone())
    }

    /// Keeps a part of the file in memory.
    fn keep(&self, at: u64, bytes: Vec<u8>) {
        self.blocks.write().unwrap_or_else(|e| e.into_inner()).push((at, bytes));
    }

    /// Copies from the parts that are kept. Returns false if they do not have all of it.
    fn copy_kept(&self, buffer: &mut [u8], at: u64) -> bool {
        let blocks = self.blocks.read().unwrap_or_else(|e| e.into_inner());
        blocks.iter().any(|(begin, bytes)| {
            let part = at.checked_sub(*begin).and_then(|from| {
                let from = usize::try_from(from).ok()?;
                bytes.get(from..from.checked_add(buffer.len())?)
            });
            part.map(|part| buffer.copy_from_slice(part)).is_some()
        })
    }

    /// Makes one attempt to read the rest of `buffer`, of which `*done` bytes are there.
    fn try_read(&self, buffer: &mut [u8], at: u64, done: &mut usize) -> Result<(), Failure> {
        let (from, length) = (at + *done as u64, (buffer.len() - *done) as u64);
        let known = self.identity.lock().unwrap_or_else(|e| e.into_inner()).clone();
        let sent = match &known.location {
            Some(location) => match self.client.send(location, Some((from, length))) {
                // The permission of a location ends after a while; the endpoint grants a new one.
                Err(failure)
                    if matches!(failure.status, Some(401 | 403 | 404 | 410)) && *location != self.url =>
                {
                    self.client.send(&self.url, Some((from, length)))
                }
                sent => sent,
            },
            None => self.client.send(&self.url, Some((from, length))),
        };
        let mut answer = sent?;
        self.check_identity(&known, &answer)?;
        if answer.status != 206 {
            return Err(Failure::lasting("the server ignored the range"));
        }
        check_part(&answer, from, length)?;
        if answer.range.and_then(|range| range.total).is_some_and(|total| total != self.bytes) {
            return Err(changed());
        }
        answer.fill(buffer, done)?;
        answer.expect_end()
    }

    /// Compares the entity tags of an answer with those of the first, and takes note of a new location.
    fn check_identity(&self, known: &Identity, answer: &Answer) -> Result<(), Failure> {
        self.check_commit(answer)?;
        let differ = |a: &Option<String>, b: &Option<String>| matches!((a, b), (Some(a), Some(b)) if a != b);
        if differ(&known.linked, &answer.linked_etag) {
            return Err(changed());
        }
        let vouched = known.linked.is_some() && answer.linked_etag.is_some();
        if differ(&known.sent, &answer.etag) && !vouched {
            return Err(changed());
        }
        if known.location.as_ref() != Some(&answer.url) {
            let mut identity = self.identity.lock().unwrap_or_else(|e| e.into_inner());
            (identity.sent, identity.location) = (answer.etag.clone(), Some(answer.url.clone()));
        }
        Ok(())
    }

    /// Reads from the start of the file to the end of the part, unless that is far.
    fn read_without_ranges(&self, buffer: &mut [u8], at: u64) -> Result<()> {
        let end = at + buffer.len() as u64;
        if end > SMALL_BYTES {
            let problem = format!(
                "the server has no range requests, so reading byte {at} would download all before it; download \
                 the file ({} bytes) and give its local path",
                self.bytes
            );
            return Err(Error::Hub { address: self.shown.clone(), problem });
        }
        let mut patience = self.client.patience();
        loop {
            let attempt = || -> Result<Vec<u8>, Failure> {
                let mut start = vec![0; end as usize];
                self.send_whole()?.fill(&mut start, &mut 0)?;
                Ok(start)
            };
            match attempt() {
                Ok(start) => {
                    buffer.copy_from_slice(&start[at as usize..]);
                    self.keep(0, start);
                    return Ok(());
                }
                Err(failure) => patience.wait(failure).map_err(|failure| failure.error(&self.shown))?,
            }
        }
    }

    /// Asks for the whole file, and checks that it is the same.
    pub(super) fn send_whole(&self) -> Result<Answer, Failure> {
        let known = self.identity.lock().unwrap_or_else(|e| e.into_inner()).clone();
        let answer = self.client.send(&self.url, None)?;
        self.check_identity(&known, &answer)?;
        if answer.length.is_some_and(|length| length != self.bytes) {
            return Err(changed());
        }
        Ok(answer)
    }
}

impl Source for RemoteFile {
    fn read_at(&self, buffer: &mut [u8], at: u64) -> Result<()> {
        let length = buffer.len() as u64;
        if length == 0 || self.copy_kept(buffer, at) {
            return Ok(());
        }
        if at.checked_add(length).is_none_or(|end| end > self.bytes) {
            return Err(Error::Header {
                file: self.shown.clone().into(),
                place: Place { tensor: None, byte: Some(at) },
                problem: format!("{length} bytes were wanted, but the file has {} bytes", self.bytes),
            });
        }
        if !self.ranged {
            return self.read_without_ranges(buffer, at);
        }
        let (mut done, mut patience) = (0, self.client.patience());
        loop {
            let before = done;
            let Err(failure) = self.try_read(buffer, at, &mut done) else { return Ok(()) };
            if done - before >= PROGRESS_BYTES {
                patience.renew();
            }
            patience.wait(failure).map_err(|mut failure| {
                failure.problem = format!("bytes {at} to {}: {}", at + length - 1, failure.problem);
                failure.error(&self.shown)
            })?;
        }
    }

    fn is_remote(&self) -> bool {
        true
    }

    fn prefetch(&self, at: u64, length: u64) -> Result<()> {
        let mut bytes = vec![0; length as usize];
        if self.copy_kept(&mut bytes, at) {
            return Ok(());
        }
        self.read_at(&mut bytes, at)?;
        self.keep(at, bytes);
        Ok(())
    }
}

fn changed() -> Failure {
    Failure::lasting("the file was changed on the server while it was read")
}

/// Checks that an answer has the part that was asked for.
fn check_part(answer: &Answer, at: u64, length: u64) -> Result<(), Failure> {
    let part = answer.range.and_then(|range| range.part);
    let part = part.ok_or_else(|| Failure::lasting("the server sent a part without Content-Range"))?;
    if part != (at, length) {
        let problem = format!(
            "the server sent {} bytes from byte {} instead of {length} from byte {at}",
            part.1, part.0
        );
        return Err(Failure::lasting(problem));
    }
    match answer.length {
        Some(stated) if stated != length => Err(Failure::lasting(format!(
            "the server announced {stated} bytes of data for a part of {length} bytes"
        ))),
        _ => Ok(()),
    }
}
