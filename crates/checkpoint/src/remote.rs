//! Checkpoints on a server: tensors are read ahead, and by more threads than there are cores.

use ballast_files::Result;
use ballast_files::jobs::parallel;

use crate::open::{Checkpoint, StoredTensor};

/// Tensors of a file that are at most this far apart are read by one request: less than a request costs.
const GAP_BYTES: u64 = 16 << 10;

/// Number of bytes that are read ahead and kept in memory, at most.
const PREFETCH_BYTES: u64 = 64 << 20;

impl Checkpoint {
    /// Reads tensors of files on a server ahead, by few and parallel requests. Later reads of them take no
    /// request. Does nothing for files on disk, and for tensors that are too large to be kept in memory.
    pub fn prefetch<'a>(&self, tensors: impl Iterator<Item = &'a StoredTensor>) -> Result<()> {
        if let Some(remote) = &self.remote {
            let mut parts: Vec<(usize, u64, u64)> = Vec::new();
            let mut wanted: Vec<&StoredTensor> =
                tensors.filter(|t| t.bytes > 0 && self.files[t.file].as_remote().is_some()).collect();
            wanted.sort_by_key(|t| (t.file, t.begin));
            for t in wanted {
                match parts.last_mut() {
                    Some((file, _, end)) if *file == t.file && t.begin <= *end + GAP_BYTES => {
                        *end = (t.begin + t.bytes).max(*end);
                    }
                    _ => parts.push((t.file, t.begin, t.begin + t.bytes)),
                }
            }
            let mut total = 0;
            parts.retain(|(_, begin, end)| {
                total += end - begin;
                total <= PREFETCH_BYTES
            });
            parallel(&parts, remote.parallel, |(file, begin, end)| {
                self.files[*file].as_remote().map_or(Ok(()), |file| file.prefetch(*begin, end - begin))
            })?;
        }
        Ok(())
    }

    /// Returns true if reads of this checkpoint take requests.
    pub(crate) fn is_on_server(&self) -> bool {
        self.files.iter().any(|file| file.as_remote().is_some())
    }
}

/// Runs `work`, which reads all of some checkpoints; on more threads than there are cores if one of them is on
/// a server, because a thread that reads from there mostly waits.
pub(crate) fn with_readers<R: Send>(checkpoints: &[&Checkpoint], work: impl FnOnce() -> R + Send) -> R {
    const READERS: usize = 16;
    if checkpoints.iter().any(|checkpoint| checkpoint.is_on_server())
        && let Ok(pool) = rayon::ThreadPoolBuilder::new().num_threads(READERS).build()
    {
        return pool.install(work);
    }
    work()
}
