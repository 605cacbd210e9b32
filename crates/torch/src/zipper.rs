//! Lays out zip files as `torch.save` writes them: stored entries whose data starts at a multiple of 64 bytes.
//!
//! The position of every byte is known before the data is, so that all threads write pieces in any order; only
//! the checksums wait for the data.

use ballast_files::frame::Checksum;

/// Data of entries starts at a multiple of this many bytes.
pub(super) const ALIGNMENT: u64 = 64;

/// Sizes and offsets from here on are written in 64 bits.
const LARGE: u64 = 0xffff_ffff;

/// 1980-01-01, the first day that a zip file can state.
const DAY: u16 = 0x21;

struct Entry {
    name: String,
    size: u64,
    /// Local header, from the start of the zip.
    header: u64,
    /// First byte of the data in the file.
    data: u64,
    /// Checksum, where the data is known.
    checksum: Option<u32>,
}

/// A zip file at some byte of a file.
pub(super) struct Zip {
    folder: &'static str,
    begin: u64,
    at: u64,
    entries: Vec<Entry>,
    /// Bytes by position in the file.
    pub(super) literals: Vec<(u64, Vec<u8>)>,
    /// Checksums to be made of data.
    pub(super) checksums: Vec<Checksum>,
}

impl Zip {
    /// Starts a zip at byte `begin` of a file; all entries lie in `folder`.
    pub(super) fn new(folder: &'static str, begin: u64) -> Zip {
        Zip { folder, begin, at: begin, entries: Vec::new(), literals: Vec::new(), checksums: Vec::new() }
    }

    /// Adds an entry with these bytes.
    pub(super) fn add(&mut self, name: &str, bytes: Vec<u8>) {
        let checksum = crc32fast::hash(&bytes);
        let at = self.header(name, bytes.len() as u64, Some(checksum));
        self.literals.push((at, bytes));
    }

    /// Adds an entry for `size` bytes of data, and returns the position of its first byte in the file.
    pub(super) fn reserve(&mut self, name: &str, size: u64) -> u64 {
        self.header(name, size, None)
    }

    fn header(&mut self, name: &str, size: u64, checksum: Option<u32>) -> u64 {
        let name = format!("{}/{name}", self.folder);
        let large = size >= LARGE;
        let mut bytes = Vec::new();
        bytes.extend(0x0403_4b50u32.to_le_bytes());
        bytes.extend(common(large, checksum.unwrap_or(0)));
        for _ in 0..2 {
            bytes.extend((if large { LARGE } else { size } as u32).to_le_bytes());
        }
        let mut extra = Vec::new();
        if large {
            extra.extend(1u16.to_le_bytes());
            extra.extend(16u16.to_le_bytes());
            extra.extend(size.to_le_bytes());
            extra.extend(size.to_le_bytes());
        }
        let fixed =
            (self.at - self.begin) + bytes.len() as u64 + 4 + name.len() as u64 + extra.len() as u64 + 4;
        let padding = fixed.next_multiple_of(ALIGNMENT) - fixed;
        extra.extend(b"FB");
        extra.extend((padding as u16).to_le_bytes());
        extra.extend(std::iter::repeat_n(b'Z', padding as usize));
        bytes.extend((name.len() as u16).to_le_bytes());
        bytes.extend((extra.len() as u16).to_le_bytes());
        bytes.extend(name.as_bytes());
        bytes.extend(extra);
        let header = self.at - self.begin;
        let data = self.at + bytes.len() as u64;
        self.literals.push((self.at, bytes));
        self.entries.push(Entry { name, size, header, data, checksum });
        self.at = data + size;
        data
    }

    /// Adds the directory, and returns the first byte after the zip.
    pub(super) fn finish(&mut self) -> u64 {
        let directory = self.at;
        let mut bytes = Vec::new();
        for entry in &self.entries {
            let begin = bytes.len() as u64;
            let (large, far) = (entry.size >= LARGE, entry.header >= LARGE);
            bytes.extend(0x0201_4b50u32.to_le_bytes());
            bytes.extend(45u16.to_le_bytes());
            bytes.extend(common(large || far, entry.checksum.unwrap_or(0)));
            for _ in 0..2 {
                bytes.extend((if large { LARGE } else { entry.size } as u32).to_le_bytes());
            }
            let mut extra: Vec<u8> = Vec::new();
            if large {
                extra.extend([entry.size.to_le_bytes(), entry.size.to_le_bytes()].concat());
            }
            if far {
                extra.extend(entry.header.to_le_bytes());
            }
            if !extra.is_empty() {
                let length = extra.len() as u16;
                extra.splice(0..0, [1u16.to_le_bytes(), length.to_le_bytes()].concat());
            }
            bytes.extend((entry.name.len() as u16).to_le_bytes());
            bytes.extend((extra.len() as u16).to_le_bytes());
            // No comment, first disk, no attributes.
            bytes.extend([0; 10]);
            bytes.extend((if far { LARGE } else { entry.header } as u32).to_le_bytes());
            bytes.extend(entry.name.as_bytes());
            bytes.extend(extra);
            if entry.checksum.is_none() {
                self.checksums.push(Checksum {
                    data: entry.data..entry.data + entry.size,
                    places: [self.begin + entry.header + 14, directory + begin + 16],
                });
            }
        }
        let (start, size, count) = (directory - self.begin, bytes.len() as u64, self.entries.len() as u64);
        if start >= LARGE || size >= LARGE || count >= 0xffff {
            let end = start + size;
            bytes.extend(0x0606_4b50u32.to_le_bytes());
            bytes.extend(44u64.to_le_bytes());
            bytes.extend([45u16.to_le_bytes(), 45u16.to_le_bytes()].concat());
            bytes.extend([0; 8]);
            for value in [count, count, size, start] {
                bytes.extend(value.to_le_bytes());
            }
            bytes.extend(0x0706_4b50u32.to_le_bytes());
            bytes.extend(0u32.to_le_bytes());
            bytes.extend(end.to_le_bytes());
            bytes.extend(1u32.to_le_bytes());
        }
        bytes.extend(0x0605_4b50u32.to_le_bytes());
        bytes.extend([0; 4]);
        for _ in 0..2 {
            bytes.extend((count.min(0xffff) as u16).to_le_bytes());
        }
        bytes.extend((size.min(LARGE) as u32).to_le_bytes());
        bytes.extend((start.min(LARGE) as u32).to_le_bytes());
        bytes.extend([0; 2]);
        self.at += bytes.len() as u64;
        self.literals.push((directory, bytes));
        self.at
    }

    /// The bytes of a zip without reserved entries.
    pub(super) fn into_bytes(mut self) -> Vec<u8> {
        self.finish();
        self.literals.into_iter().flat_map(|(_, bytes)| bytes).collect()
    }
}

/// Version, flags, method, time, day and checksum, as in both kinds of header.
fn common(large: bool, checksum: u32) -> Vec<u8> {
    let version: u16 = if large { 45 } else { 20 };
    let mut bytes = Vec::new();
    for value in [version, 0, 0, 0, DAY] {
        bytes.extend(value.to_le_bytes());
    }
    bytes.extend(checksum.to_le_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn entries_beyond_4_gib_are_read_by_another_zip_reader() {
        let mut zip = Zip::new("archive", 0);
        zip.add("data.pkl", b"first".to_vec());
        let large = 5 << 30;
        let first = zip.reserve("data/0", large);
        let second = zip.reserve("data/1", 3);
        zip.add("version", b"3\n".to_vec());
        let end = zip.finish();
        let file = tempfile::tempfile().unwrap();
        // A sparse file: the data takes no space.
        file.set_len(end).unwrap();
        for (at, bytes) in &zip.literals {
            file.write_all_at(bytes, *at).unwrap();
        }
        let mut read = ::zip::ZipArchive::new(file).unwrap();
        assert_eq!(read.len(), 4);
        for (name, at, size) in [("archive/data/0", first, large), ("archive/data/1", second, 3)] {
            let entry = read.by_index_raw(read.index_for_name(name).unwrap()).unwrap();
            assert_eq!((entry.data_start(), entry.size()), (Some(at), size), "{name}");
            assert_eq!(at % ALIGNMENT, 0);
        }
        assert_eq!(zip.checksums.len(), 2);
    }
}
