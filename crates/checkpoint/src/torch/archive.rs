//! The zip container of `torch.save`: entries that are stored, not compressed, in a whole file or in a range of
//! one.

use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::sync::Arc;

use zip::{CompressionMethod, ZipArchive};

use super::pickle::MOST_BYTES;
use crate::error::{Error, Place, Result};
use crate::shard_file::ShardFile;

/// A zip file, by the places of its entries.
#[derive(Debug)]
pub(crate) struct Archive {
    /// The file.
    pub(crate) file: Arc<ShardFile>,
    window: Range<u64>,
    /// Names below the archive's own folder, and the bytes of the file.
    entries: Vec<(String, Range<u64>)>,
}

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
    /// Reads the directory of the zip in a range of a file.
    pub(crate) fn open(file: &Arc<ShardFile>, window: Range<u64>) -> Result<Archive> {
        let fail = |byte: u64, problem: String| Error::Header {
            file: file.path.clone(),
            place: Place { tensor: None, byte: Some(byte) },
            problem,
        };
        if window.start > window.end || window.end > file.bytes {
            let problem = format!(
                "bytes {} to {} lie outside of the file, which has {} bytes: truncated?",
                window.start, window.end, file.bytes
            );
            return Err(fail(window.start, problem));
        }
        let bad = |error: zip::result::ZipError| {
            let problem = format!(
                "not a readable zip file as torch.save writes it ({error}); a file saved by torch before 1.6 must be \
                 loaded and saved again"
            );
            fail(window.start, problem)
        };
        let reader = Window { file, range: window.clone(), at: 0 };
        let mut zip = ZipArchive::new(reader).map_err(bad)?;
        let mut entries = Vec::with_capacity(zip.len());
        for index in 0..zip.len() {
            let entry = zip.by_index_raw(index).map_err(bad)?;
            let name = entry.name().map_err(bad)?.into_owned();
            let begin = entry.data_start().and_then(|start| start.checked_add(window.start));
            let range = begin.and_then(|begin| Some(begin..begin.checked_add(entry.size())?));
            let Some(range) = range.filter(|range| range.end <= window.end) else {
                return Err(fail(
                    window.start,
                    format!("zip entry {name:?} reaches past the end: truncated?"),
                ));
            };
            if entry.compression() != CompressionMethod::Stored
                || entry.compressed_size() != entry.size()
                || entry.encrypted()
            {
                let problem =
                    format!("zip entry {name:?} is compressed or encrypted; torch.save stores entries");
                return Err(fail(range.start, problem));
            }
            // torch puts everything into one folder.
            let name = name.split_once('/').map_or(name.clone(), |(_, rest)| rest.to_string());
            entries.push((name, range));
        }
        let archive = Archive { file: file.clone(), window, entries };
        let mut ranges: Vec<&(String, Range<u64>)> = archive.entries.iter().collect();
        ranges.sort_by_key(|(_, range)| (range.start, range.end));
        if let Some([_, (name, range)]) =
            ranges.array_windows().find(|[(_, first), (_, second)]| second.start < first.end)
        {
            return Err(archive.error(range.start, format!("zip entry {name:?} overlaps another one")));
        }
        if let Some(order) = archive.entry("byteorder")
            && archive.bytes(&order)? != b"little"
        {
            return Err(archive.error(order.start, "the tensors are stored in big-endian order".into()));
        }
        Ok(archive)
    }

    fn error(&self, byte: u64, problem: String) -> Error {
        let place = Place { tensor: None, byte: Some(byte) };
        Error::Header { file: self.file.path.clone(), place, problem }
    }

    /// The bytes of the file that an entry occupies.
    pub(crate) fn entry(&self, name: &str) -> Option<Range<u64>> {
        self.entries.iter().find(|(own, _)| own == name).map(|(_, range)| range.clone())
    }

    fn bytes(&self, range: &Range<u64>) -> Result<Vec<u8>> {
        let mut bytes = vec![0; (range.end - range.start) as usize];
        self.file.read_at(&mut bytes, range.start)?;
        Ok(bytes)
    }

    /// Reads the pickle, and returns it with its first byte in the file.
    pub(crate) fn pickle(&self) -> Result<(Vec<u8>, u64)> {
        let Some(range) = self.entry("data.pkl") else {
            let problem = "the zip file has no data.pkl: it was not written by torch.save";
            return Err(self.error(self.window.start, problem.into()));
        };
        if range.end - range.start > MOST_BYTES {
            let problem =
                format!("data.pkl has {} bytes; at most {MOST_BYTES} are read", range.end - range.start);
            return Err(self.error(range.start, problem));
        }
        Ok((self.bytes(&range)?, range.start))
    }
}
