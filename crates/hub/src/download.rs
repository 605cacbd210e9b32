//! Downloads files into the cache: by parallel ranges, written in order, so that the length of an incomplete
//! file is what is known of it, and the next download continues there.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex};

use ballast_files::jobs::{CHUNK_BYTES, Observer, parallel};
use ballast_files::staging::check_space;
use ballast_files::{Error, Result, Source};
use ring::digest::{self, Context};

use crate::RemoteFile;
use crate::address::RepoAddress;
use crate::cache::{Cache, create_folder_of};
use crate::client::{Client, Failure};
use crate::repo::file_url;

/// A file to download.
struct Wanted {
    /// Path in the repository.
    path: String,
    /// Name of its content in the cache.
    key: String,
    file: RemoteFile,
}

/// Downloads those of `paths` that the snapshot of the address's commit does not have.
pub(super) fn download(
    client: &Arc<Client>,
    cache: &Cache,
    address: &RepoAddress,
    paths: &[String],
    observer: &dyn Observer,
) -> Result<()> {
    let commit = address.revision();
    let snapshot = cache.snapshot(commit);
    let missing: Vec<&String> = paths.iter().filter(|path| !snapshot.join(path).is_file()).collect();
    let wanted = parallel(&missing, client.settings.limits.parallel, |path| {
        let url = file_url(client, &address.repo, commit, path)?;
        let shown = RepoAddress { path: path.to_string(), ..address.clone() }.to_string();
        let file = RemoteFile::open(client, url, shown, Some(commit))?;
        let key = key(file.etag(), commit, path);
        Ok(Wanted { path: path.to_string(), key, file })
    })?;
    let left = |w: &Wanted| w.file.bytes.saturating_sub(length_of(&incomplete(cache, &w.key)));
    let needed: u64 = wanted.iter().filter(|w| !cache.blob(&w.key).is_file()).map(left).sum();
    create_folder_of(&cache.blob("x"))?;
    check_space(cache.blob("x").parent().unwrap_or(Path::new(".")), &client.settings.cache, needed)?;
    observer.phase("downloading", wanted.iter().map(|w| w.file.bytes).sum());
    for w in &wanted {
        fetch(client, cache, w, observer)?;
        cache.link(commit, &w.path, &w.key)?;
    }
    Ok(())
}

/// Returns the name of a content in the cache: its entity tag, as other tools have it.
fn key(etag: Option<String>, commit: &str, path: &str) -> String {
    let is_name = |text: &String| {
        text.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b)) && !text.starts_with('.')
    };
    match etag {
        Some(etag) if is_name(&etag) && etag.len() <= 200 => etag,
        etag => {
            let text = format!("{commit}/{path}/{}", etag.unwrap_or_default());
            format!("{:032x}", xxhash_rust::xxh3::xxh3_128(text.as_bytes()))
        }
    }
}

fn incomplete(cache: &Cache, key: &str) -> std::path::PathBuf {
    cache.blob(&format!("{key}.incomplete"))
}

fn length_of(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |metadata| metadata.len())
}

/// Downloads the content of a file, unless the cache has it.
fn fetch(client: &Client, cache: &Cache, wanted: &Wanted, observer: &dyn Observer) -> Result<()> {
    let _lock = cache.lock(&wanted.key)?;
    let (place, staged) = (cache.blob(&wanted.key), incomplete(cache, &wanted.key));
    let bytes = wanted.file.bytes;
    if place.is_file() && length_of(&place) == bytes {
        observer.advance(bytes);
        return Ok(());
    }
    let fail = |e| Error::io(&staged, "write")(e);
    let mut output = Output {
        file: File::options().create(true).append(true).read(true).open(&staged).map_err(fail)?,
        path: &staged,
        digest: Digest::of(&wanted.key, bytes),
        observer,
        cache: &client.settings.cache,
    };
    if !wanted.file.ranged || length_of(&staged) > bytes {
        output.file.set_len(0).map_err(fail)?;
    }
    if wanted.file.ranged {
        let done = output.resume()?;
        in_ranges(client, wanted, done, &mut output)?;
    } else {
        in_one_stream(client, wanted, &mut output)?;
    }
    output.file.sync_all().map_err(fail)?;
    let digest = output.digest.finish();
    if length_of(&staged) != bytes || !digest {
        fs::remove_file(&staged).map_err(fail)?;
        let problem = "what was downloaded does not have the checksum that the hub states; it was discarded";
        return Err(Error::Hub { address: wanted.file.shown.clone(), problem: problem.into() });
    }
    fs::rename(&staged, &place).map_err(Error::io(&place, "write"))
}

/// An incomplete file that grows at its end.
struct Output<'a> {
    file: File,
    path: &'a Path,
    digest: Digest,
    observer: &'a dyn Observer,
    cache: &'a Path,
}

impl Output<'_> {
    /// Reads what is there. Returns its length.
    fn resume(&mut self) -> Result<u64> {
        let mut piece = vec![0; CHUNK_BYTES as usize];
        let mut reader = &self.file;
        let mut done = 0;
        loop {
            let read = reader.read(&mut piece).map_err(Error::io(self.path, "read"))?;
            if read == 0 {
                return Ok(done);
            }
            self.digest.update(&piece[..read]);
            self.advance(read as u64)?;
            done += read as u64;
        }
    }

    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(Error::io(self.path, "write"))?;
        self.digest.update(bytes);
        self.advance(bytes.len() as u64)
    }

    fn advance(&self, bytes: u64) -> Result<()> {
        self.observer.advance(bytes);
        if self.observer.cancelled() {
            return Err(Error::DownloadInterrupted { cache: self.cache.into() });
        }
        Ok(())
    }
}

/// The ranges of a download: which one is next, and which are read but not written.
#[derive(Default)]
struct Ranges {
    next: u64,
    written: u64,
    ready: BTreeMap<u64, Result<Vec<u8>>>,
    ended: bool,
}

/// Downloads from byte `done` on by parallel ranges.
fn in_ranges(client: &Client, wanted: &Wanted, done: u64, output: &mut Output<'_>) -> Result<()> {
    let limits = &client.settings.limits;
    let step = limits.range_bytes.max(1);
    let count = (wanted.file.bytes - done).div_ceil(step);
    let (ranges, changed) = (Mutex::new(Ranges::default()), Condvar::new());
    let lock = || ranges.lock().unwrap_or_else(|e| e.into_inner());
    let wait = |guard| changed.wait(guard).unwrap_or_else(|e| e.into_inner());
    let work = || {
        loop {
            let mut state = lock();
            // Ranges far ahead would fill the memory.
            while !state.ended && state.next < count && state.next >= state.written + limits.parallel as u64 {
                state = wait(state);
            }
            if state.ended || state.next >= count {
                return;
            }
            let i = state.next;
            state.next += 1;
            drop(state);
            let at = done + i * step;
            let mut bytes = vec![0; step.min(wanted.file.bytes - at) as usize];
            let read = wanted.file.read_at(&mut bytes, at).map(|()| bytes);
            lock().ready.insert(i, read);
            changed.notify_all();
        }
    };
    std::thread::scope(|scope| {
        for started in 0..(limits.parallel as u64).min(count) {
            match std::thread::Builder::new().spawn_scoped(scope, work) {
                Ok(_) => {}
                Err(error) if started == 0 => return Err(Error::Threads(error)),
                Err(_) => break, // fewer will do
            }
        }
        let mut write = || {
            for i in 0..count {
                let mut state = lock();
                let read = loop {
                    match state.ready.remove(&i) {
                        Some(read) => break read,
                        None => state = wait(state),
                    }
                };
                drop(state);
                output.append(&read?)?;
                lock().written = i + 1;
                changed.notify_all();
            }
            Ok(())
        };
        let result = write();
        lock().ended = true;
        changed.notify_all();
        result
    })
}

/// Downloads from a server without ranges.
fn in_one_stream(client: &Client, wanted: &Wanted, output: &mut Output<'_>) -> Result<()> {
    let mut patience = client.patience();
    let mut piece = vec![0; CHUNK_BYTES as usize];
    loop {
        let mut answer = wanted.file.send_whole();
        let failure = loop {
            match answer.as_mut().map_err(|failure| std::mem::replace(failure, Failure::lasting(""))) {
                Err(failure) => break failure,
                Ok(answer) => match answer.read(&mut piece) {
                    Ok(0) => return Ok(()),
                    Ok(read) => output.append(&piece[..read])?,
                    Err(failure) => break failure,
                },
            }
        };
        patience.wait(failure).map_err(|failure| failure.error(&wanted.file.shown))?;
        output.file.set_len(0).map_err(Error::io(output.path, "write"))?;
        output.digest = Digest::of(&wanted.key, wanted.file.bytes);
    }
}

/// The checksum that an entity tag of the hub is: SHA-256 of a large file, SHA-1 of a small one as git has it.
struct Digest(Option<(Context, String)>);

impl Digest {
    fn of(key: &str, bytes: u64) -> Digest {
        let is_hex = key.bytes().all(|b| b.is_ascii_hexdigit());
        Digest(match key.len() {
            64 if is_hex => Some((Context::new(&digest::SHA256), key.to_lowercase())),
            40 if is_hex => {
                let mut context = Context::new(&digest::SHA1_FOR_LEGACY_USE_ONLY);
                context.update(format!("blob {bytes}\0").as_bytes());
                Some((context, key.to_lowercase()))
            }
            _ => None,
        })
    }

    fn update(&mut self, bytes: &[u8]) {
        if let Some((context, _)) = &mut self.0 {
            context.update(bytes);
        }
    }

    /// Returns true if the checksum is as stated, or none is.
    fn finish(self) -> bool {
        self.0.is_none_or(|(context, stated)| {
            let digest = context.finish();
            let hex: String = digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
            hex == stated
        })
    }
}
