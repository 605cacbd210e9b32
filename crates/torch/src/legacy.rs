//! Files that `torch.save` wrote before torch 1.6, or writes with `_use_new_zipfile_serialization=False`:
//! ```text
//! pickle of 0x1950a86a20f9469cfc6c | pickle of 1001 | pickle of the writer's system
//! pickle of the object, with its storages by key
//! pickle of the list of keys
//! for every key in this order: number of elements (i64), elements
//! ```
//! The length of a pickle is stated nowhere, so each is read to find where the next begins.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use ballast_files::{Result, ShardFile};

use super::archive::failure;
use super::pickle::{MOST_BYTES, Node, Pickle};
use super::saved::storage_width;

/// The magic number, as an integer of ten bytes in a pickle.
const MAGIC: [u8; 12] = [0x8a, 10, 0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19];
/// Bytes before the magic number at most: protocol and frame.
const MOST_BEFORE: usize = 11;
const PROTOCOL: i64 = 1001;
/// Bytes of the number of elements before a storage.
const COUNT_BYTES: u64 = 8;
/// Bytes that are read first, to find the end of a pickle in them.
const FIRST_BYTES: u64 = 1 << 16;

/// The places of the parts of a file.
pub(super) struct Legacy {
    /// The object.
    pub(super) pickle: Range<u64>,
    /// Elements of the storages, by key.
    pub(super) storages: Vec<(String, Range<u64>)>,
}

/// Reads where the parts of a file are; none if it is not of this format.
pub(super) fn read(file: &Arc<ShardFile>) -> Result<Option<Legacy>> {
    let mut first = vec![0; (MOST_BEFORE + MAGIC.len()).min(file.bytes as usize)];
    file.read_at(&mut first, 0)?;
    // A pickle begins with its protocol.
    if first.first() != Some(&0x80) || !first.windows(MAGIC.len()).any(|bytes| bytes == MAGIC) {
        return Ok(None);
    }
    let (_, at) = pickle_at(file, 0)?;
    let (bytes, end) = pickle_at(file, at)?;
    let version = Pickle::parse(&bytes, &file.path, at)?;
    if version.int(version.root()) != Some(PROTOCOL) {
        let problem = format!("a protocol of torch.save other than {PROTOCOL}");
        return Err(failure(file, at, problem));
    }
    let at = end;
    let (bytes, end) = pickle_at(file, at)?;
    let system = Pickle::parse(&bytes, &file.path, at)?;
    let little = system.entry(system.root(), "little_endian").map(|id| system.node(id));
    if little != Some(Node::Bool(true)) {
        return Err(failure(file, at, "the tensors are not stated to be in little-endian order".into()));
    }
    let at = end;
    let (bytes, end) = pickle_at(file, at)?;
    let object = Pickle::parse(&bytes, &file.path, at)?;
    let widths = storage_widths(file, &object, at)?;
    let storages = storages(file, end, &widths)?;
    Ok(Some(Legacy { pickle: at..end, storages }))
}

/// Reads the pickle at a byte of the file. Returns it with the byte after it.
fn pickle_at(file: &Arc<ShardFile>, at: u64) -> Result<(Vec<u8>, u64)> {
    let mut wanted = FIRST_BYTES;
    loop {
        let mut bytes = vec![0; wanted.min(file.bytes.saturating_sub(at)) as usize];
        file.read_at(&mut bytes, at)?;
        if let Some(length) = Pickle::length(&bytes, &file.path, at)? {
            bytes.truncate(length);
            return Ok((bytes, at + length as u64));
        }
        if (bytes.len() as u64) < wanted || wanted >= MOST_BYTES {
            let problem = format!("a pickle does not end within {} bytes: truncated?", bytes.len());
            return Err(failure(file, at, problem));
        }
        wanted *= 2;
    }
}

/// Bytes of an element of every storage that the object has, by key.
fn storage_widths(file: &ShardFile, object: &Pickle<'_>, at: u64) -> Result<HashMap<String, u64>> {
    let mut widths = HashMap::new();
    for id in 0..object.count_of_nodes() as u32 {
        let Node::Persistent(key) = object.node(id) else { continue };
        let Some([tag, class, key, _, _, view]) = object.elements(key) else { continue };
        let (Some("storage"), Some((_, class)), Some(key)) =
            (object.text(*tag), object.global(*class), object.text(*key))
        else {
            continue;
        };
        if object.node(*view) != Node::None {
            let problem =
                format!("storage {key:?} is a view of another one; load the file and save it again");
            return Err(failure(file, at, problem));
        }
        let Some(width) = storage_width(class) else {
            let problem = format!("storage {key:?} is a torch.{class}, whose size is not known");
            return Err(failure(file, at, problem));
        };
        if widths.insert(key.to_string(), width).is_some_and(|other| other != width) {
            return Err(failure(file, at, format!("storage {key:?} has two types")));
        }
    }
    Ok(widths)
}

/// Reads the list of keys at a byte of the file, and finds the storages after it.
fn storages(
    file: &Arc<ShardFile>,
    at: u64,
    widths: &HashMap<String, u64>,
) -> Result<Vec<(String, Range<u64>)>> {
    let (bytes, mut next) = pickle_at(file, at)?;
    let keys = Pickle::parse(&bytes, &file.path, at)?;
    let Some(ids) = keys.elements(keys.root()) else {
        return Err(failure(file, at, "expected the list of the storages' keys".into()));
    };
    let mut found = Vec::with_capacity(ids.len());
    for id in ids {
        let key = keys.text(*id).unwrap_or_default();
        let Some(width) = widths.get(key) else {
            return Err(failure(file, at, format!("storage {key:?} belongs to no tensor")));
        };
        let mut count = [0; COUNT_BYTES as usize];
        file.read_at(&mut count, next)?;
        let begin = next + COUNT_BYTES;
        let end = u64::from_le_bytes(count).checked_mul(*width).and_then(|length| begin.checked_add(length));
        let Some(end) = end.filter(|end| *end <= file.bytes) else {
            return Err(failure(
                file,
                next,
                format!("storage {key:?} reaches past the end of the file: truncated?"),
            ));
        };
        found.push((key.to_string(), begin..end));
        next = end;
    }
    if next != file.bytes {
        let problem = format!(
            "{} bytes after the last storage: does the file hold several objects?",
            file.bytes - next
        );
        return Err(failure(file, next, problem));
    }
    Ok(found)
}
