//! The container of `torch.save`: a pickle, and the storages of its tensors, in a whole file or in a range of one.
//! Since torch 1.6 it is a zip file whose entries are stored, not compressed; before, see [`super::legacy`].

use std::collections::HashMap;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::sync::Arc;

use ballast_files::{Error, Place, Result, ShardFile};
use zip::{CompressionMethod, ZipArchive};

use super::legacy;
use super::pickle::MOST_BYTES;

/// A file of `torch.save`, by the places of its entries.
#[derive(Debug)]
pub(crate) struct Archive {
    /// The file.
    pub(crate) file: Arc<ShardFile>,
    window: Range<u64>,
    /// The bytes of the file, by the name below the archive's own folder: `data.pkl`, and `data/KEY` for a storage.
    entries: HashMap<String, Range<u64>>,
}

/// Name of the pickle.
const PICKLE: &str = "data.pkl";

/// A range of a file, as a reader.
struct Window<'a> {
    file: &'a ShardFile,
    range: Range<u64>,
    at: u64,
}

impl Read for Window<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.range.end - self.range.start;
        let count = (buffer.len() as u64).min(length.saturating_sub(self.at));
        let target = &mut buffer[..count as usize];
        self.file.read_at(target, self.range.start + self.at).map_err(io::Error::other)?;
        self.at += count;
        Ok(count as usize)
    }
}

impl Seek for Window<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let length = self.range.end - self.range.start;
        let at = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::End(by) => length.checked_add_signed(by),
            SeekFrom::Current(by) => self.at.checked_add_signed(by),
        };
        self.at = at.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "before the first byte"))?;
        Ok(self.at)
    }
}

impl Archive {
    /// Reads the places of the entries of a whole file.
    pub(crate) fn whole(file: &Arc<ShardFile>) -> Result<Archive> {
        let window = 0..file.bytes;
        match legacy::read(file)? {
            Some(legacy) => {
                let storages = legacy.storages.into_iter();
                let mut entries: HashMap<String, Range<u64>> =
                    storages.map(|(key, range)| (format!("data/{key}"), range)).collect();
                entries.insert(PICKLE.into(), legacy.pickle);
                Ok(Archive { file: file.clone(), window, entries })
            }
            None => Archive::open(file, window),
        }
    }

    /// Reads the directory of the zip in a range of a file.
    pub(crate) fn open(file: &Arc<ShardFile>, window: Range<u64>) -> Result<Archive> {
        if window.start > window.end || window.end > file.bytes {
            let problem = format!(
                "bytes {} to {} lie outside of the file, which has {} bytes: truncated?",
                window.start, window.end, file.bytes
            );
            return Err(failure(file, window.start, problem));
        }
        let mut archive = Archive { file: file.clone(), window, entries: HashMap::new() };
        let mut ranges = archive.read_directory()?;
        ranges.sort_by_key(|(_, range)| (range.start, range.end));
        if let Some([_, (name, range)]) =
            ranges.array_windows().find(|[(_, first), (_, second)]| second.start < first.end)
        {
            return Err(archive.error(range.start, format!("zip entry {name:?} overlaps another one")));
        }
        for (name, range) in ranges {
            // torch puts everything into one folder.
            let own = name.split_once('/').map_or(name.as_str(), |(_, rest)| rest);
            if archive.entries.insert(own.into(), range.clone()).is_some() {
                return Err(archive.error(range.start, format!("two zip entries are called {own:?}")));
            }
        }
        archive.check_order()?;
        Ok(archive)
    }

    /// Names and places of the zip's entries.
    fn read_directory(&self) -> Result<Vec<(String, Range<u64>)>> {
        let window = &self.window;
        let bad = |error: zip::result::ZipError| {
            let problem = format!("not a readable zip file as torch.save writes it ({error})");
            self.error(window.start, problem)
        };
        let reader = Window { file: &self.file, range: window.clone(), at: 0 };
        let mut zip = ZipArchive::new(reader).map_err(bad)?;
        // Its program is compressed.
        let is_script = |name: &str| name.ends_with("/constants.pkl") || name.contains("/code/");
        if zip.file_names().flatten().any(|name| is_script(&name)) {
            let problem = "a TorchScript archive (torch.jit.save), whose tensors belong to a program; load it with \
                           torch.jit.load and save its state_dict() with torch.save";
            return Err(self.error(window.start, problem.into()));
        }
        let mut entries = Vec::with_capacity(zip.len());
        for index in 0..zip.len() {
            let entry = zip.by_index_raw(index).map_err(bad)?;
            let name = entry.name().map_err(bad)?.into_owned();
            let begin = entry.data_start().and_then(|start| start.checked_add(window.start));
            let range = begin.and_then(|begin| Some(begin..begin.checked_add(entry.size())?));
            let Some(range) = range.filter(|range| range.end <= window.end) else {
                let problem = format!("zip entry {name:?} reaches past the end: truncated?");
                return Err(self.error(window.start, problem));
            };
            if entry.compression() != CompressionMethod::Stored
                || entry.compressed_size() != entry.size()
                || entry.encrypted()
            {
                let problem =
                    format!("zip entry {name:?} is compressed or encrypted; torch.save stores entries");
                return Err(self.error(range.start, problem));
            }
            entries.push((name, range));
        }
        Ok(entries)
    }

    /// Checks the byte order of the tensors.
    fn check_order(&self) -> Result<()> {
        let Some(order) = self.entry("byteorder") else { return Ok(()) };
        const LITTLE: &[u8] = b"little";
        let problem = match order.end - order.start {
            0..=16 if self.bytes(&order)? == LITTLE => return Ok(()),
            0..=16 if self.bytes(&order)? == b"big" => {
                "the tensors are stored in big-endian order".to_string()
            }
            length => format!("zip entry \"byteorder\" has {length} bytes, expected \"little\""),
        };
        Err(self.error(order.start, problem))
    }

    fn error(&self, byte: u64, problem: String) -> Error {
        failure(&self.file, byte, problem)
    }

    /// The bytes of the file that an entry occupies.
    pub(crate) fn entry(&self, name: &str) -> Option<Range<u64>> {
        self.entries.get(name).cloned()
    }

    fn bytes(&self, range: &Range<u64>) -> Result<Vec<u8>> {
        let mut bytes = vec![0; (range.end - range.start) as usize];
        self.file.read_at(&mut bytes, range.start)?;
        Ok(bytes)
    }

    /// Reads the pickle, and returns it with its first byte in the file.
    pub(crate) fn pickle(&self) -> Result<(Vec<u8>, u64)> {
        self.pickle_up_to(MOST_BYTES)
    }

    /// Reads the pickle if it has at most `most` bytes.
    pub(crate) fn pickle_up_to(&self, most: u64) -> Result<(Vec<u8>, u64)> {
        let Some(range) = self.entry(PICKLE) else {
            let problem = "the zip file has no data.pkl: it was not written by torch.save";
            return Err(self.error(self.window.start, problem.into()));
        };
        let length = range.end - range.start;
        if length > most {
            let problem = format!("data.pkl has {length} bytes; at most {most} are read");
            return Err(self.error(range.start, problem));
        }
        Ok((self.bytes(&range)?, range.start))
    }
}

/// An error at a byte of a file.
pub(super) fn failure(file: &ShardFile, byte: u64, problem: String) -> Error {
    let place = Place { tensor: None, byte: Some(byte) };
    Error::Header { file: file.path.clone(), place, problem }
}
