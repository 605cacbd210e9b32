//! A file that the first rank writes and every rank looks for: the folder of a run must be the same on all machines.
//!
//! ```text
//! first rank    creates a file with a byte for each rank, and flushes it
//! every rank    opens it, and sets and flushes its byte
//! first rank    finds all bytes set, and removes the file
//! ```
//! Without this, a folder of each machine's own would be noticed by the first checkpoint.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::Ranks;
use super::machine::Machine;
use crate::error::{Error, Result};

/// Time that a file of another machine has to appear: clients of network file systems keep what they know of a folder
/// for up to 60 s (`acdirmax` of NFS).
const PATIENCE: Duration = Duration::from_secs(75);

/// Time between two looks.
const PAUSE: Duration = Duration::from_millis(100);

/// Returns an error on all ranks, with the same text, unless all of them see and write one `folder`, which the first
/// has made.
pub(crate) fn check_shared_folder(ranks: &Ranks, folder: &Path) -> Result {
    if ranks.is_solo() {
        return Ok(());
    }
    let machine = Machine::here();
    let made = ranks.on_first(|| make(folder, ranks.size()))?;
    let of_first = made.as_ref().map(|name| (name.clone(), machine.clone()));
    let checked = ranks.value_of_first(of_first.as_ref()).and_then(|(name, first): (String, Machine)| {
        let patience = if machine.shares_files(&first) { Duration::ZERO } else { PATIENCE };
        let mark = || mark(&folder.join(&name), ranks.world.rank(), patience);
        all_agree(ranks, folder, &first, mark().err().map(|error| (machine, error.to_string())))?;
        let path = folder.join(&name);
        let unmarked = match ranks.world.is_first() {
            true => unmarked(&path, PATIENCE).map_err(Error::io(&path, "read"))?,
            false => None,
        };
        match ranks.value_of_first(ranks.world.is_first().then_some(&unmarked))? {
            None => Ok(()),
            Some(rank) => {
                Err(refusal(folder, &first, &format!("what rank {rank} writes there does not arrive")))
            }
        }
    });
    // A leftover of a process that was killed is removed when the run is opened again.
    if let Some(name) = made {
        let _ = fs::remove_file(folder.join(name));
    }
    checked
}

/// Returns the same error on all ranks if one of them has a problem with the file.
fn all_agree(ranks: &Ranks, folder: &Path, first: &Machine, own: Option<(Machine, String)>) -> Result {
    let seen = folder_name(folder);
    let own = own.map(|(machine, error)| format!("on {} cannot write to {seen}: {error}", machine.name));
    let all = ranks.exchange(ballast_cluster::Kind::Setup, &own)?;
    match all.iter().enumerate().find_map(|(rank, problem)| Some((rank, problem.as_ref()?))) {
        None => Ok(()),
        Some((rank, problem)) => Err(refusal(folder, first, &format!("rank {rank} {problem}"))),
    }
}

fn refusal(folder: &Path, first: &Machine, problem: &str) -> Error {
    Error::config(
        "out",
        format!(
            "`out` is not shared by all ranks: rank 0 on {} made a file in {}, and {problem}; set `out` to a folder that all \
         machines share under the same path",
            first.name,
            folder_name(folder)
        ),
    )
}

/// The path of a folder from the root, which shows where a relative one leads.
fn folder_name(folder: &Path) -> String {
    std::path::absolute(folder).unwrap_or_else(|_| folder.into()).display().to_string()
}

/// Creates the file, hidden, with a name that no other run has. Returns its name.
fn make(folder: &Path, ranks: usize) -> Result<String> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let name = format!(".probe-{}-{}", std::process::id(), now.as_nanos());
    let path = folder.join(&name);
    let write = || -> io::Result<()> {
        let file = File::options().write(true).create_new(true).open(&path)?;
        file.write_all_at(&vec![0; ranks], 0)?;
        file.sync_all()?;
        File::open(folder)?.sync_all()
    };
    write().map_err(Error::io(&path, "write"))?;
    Ok(name)
}

/// Sets and flushes the byte of a rank. A file that is not there yet is looked for again for some time.
fn mark(path: &Path, rank: usize, patience: Duration) -> io::Result<()> {
    let file = retried(patience, || match File::options().write(true).open(path) {
        Ok(file) => Ok(Some(file)),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::StaleNetworkFileHandle) => {
            // Some clients look for names that they do not know only after the folder was listed.
            let _ = path.parent().map(fs::read_dir).map(|entries| entries.map(Iterator::count));
            Ok(None)
        }
        Err(error) => Err(error),
    })?;
    let absent = || io::Error::new(ErrorKind::NotFound, "the file is not there");
    let file = file.ok_or_else(absent)?;
    file.write_all_at(&[1], rank as u64)?;
    file.sync_all()
}

/// Returns the first rank whose byte is not set. The file is opened for each look: only then do clients of network
/// file systems ask for changes.
fn unmarked(path: &Path, patience: Duration) -> io::Result<Option<usize>> {
    let mut missing = None;
    retried(patience, || {
        missing = fs::read(path)?.iter().position(|byte| *byte != 1);
        Ok(missing.is_none().then_some(()))
    })?;
    Ok(missing)
}

/// Calls `look` until it finds something or the time has passed; at least once.
fn retried<R>(patience: Duration, mut look: impl FnMut() -> io::Result<Option<R>>) -> io::Result<Option<R>> {
    let started = Instant::now();
    loop {
        let found = look()?;
        if found.is_some() || started.elapsed() >= patience {
            return Ok(found);
        }
        std::thread::sleep(PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use ballast_cluster::threads;

    use super::*;

    /// The result on each rank, of which each has one of these folders.
    fn check(folders: &[&Path]) -> Vec<Option<Error>> {
        threads::run(folders.len(), |world| {
            let folder = folders[world.rank()];
            check_shared_folder(&Ranks::equal(world).unwrap(), folder).err()
        })
    }

    fn is_empty(folder: &Path) -> bool {
        fs::read_dir(folder).unwrap().next().is_none()
    }

    #[test]
    fn a_shared_folder_passes_and_nothing_is_left_in_it() {
        let folder = tempfile::tempdir().unwrap();
        assert!(check(&[folder.path(); 4]).iter().all(Option::is_none));
        assert!(is_empty(folder.path()));
    }

    #[test]
    fn a_rank_with_another_folder_is_named_on_all_ranks_with_machine_and_folder() {
        let (shared, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for error in check(&[shared.path(), shared.path(), other.path()]) {
            let Some(Error::Config { problem: text, .. }) = error else { panic!("{error:?}") };
            let name = Machine::here().name;
            let place = format!("rank 2 on {name} cannot write to {}", other.path().display());
            assert!(text.contains(&place) && text.contains("`out` is not shared"), "{text}");
        }
        assert!(is_empty(shared.path()) && is_empty(other.path()));
    }

    #[test]
    fn a_file_that_appears_later_is_found_and_one_that_does_not_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("late");
        let absent = mark(&path, 1, Duration::ZERO).unwrap_err();
        assert_eq!(absent.kind(), ErrorKind::NotFound);
        std::thread::scope(|scope| {
            let looking = scope.spawn(|| mark(&path, 1, PATIENCE));
            // Most likely after its first look; the result is the same before.
            std::thread::sleep(PAUSE / 2);
            fs::write(folder.path().join("new"), [1, 0]).unwrap();
            fs::rename(folder.path().join("new"), &path).unwrap();
            looking.join().unwrap().unwrap();
        });
        assert_eq!(fs::read(&path).unwrap(), [1, 1]);
    }

    #[test]
    fn a_mark_that_does_not_arrive_names_its_rank() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(make(folder.path(), 3).unwrap());
        mark(&path, 0, Duration::ZERO).unwrap();
        mark(&path, 2, Duration::ZERO).unwrap();
        assert_eq!(unmarked(&path, Duration::ZERO).unwrap(), Some(1));
        mark(&path, 1, Duration::ZERO).unwrap();
        assert_eq!(unmarked(&path, Duration::ZERO).unwrap(), None);
    }
}
