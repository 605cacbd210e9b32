//! The header of a safetensors file: parse, validate fully, write.
//!
//! ```text
//! u64 LE header length N | N bytes of JSON, padded with spaces to a multiple of 8 | data
//! ```
//!
//! A header is valid if its tensors cover the data exactly: no gap, no overlap, nothing after the last
//! tensor, and every span has the size of its shape and dtype. The `safetensors` crate is not used to parse
//! because it accepts duplicate keys and does not report the byte of an error.

use std::fmt;
use std::path::Path;

use ballast_contract::Dtype;
use serde::Deserialize;
use serde::de::{self, MapAccess, Visitor};

use crate::error::{Error, Place, Result};

/// Largest header that the format allows.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Key of the metadata in the JSON, which no tensor can have as its name.
const METADATA: &str = "__metadata__";

/// Returns an error if the format has no place for a tensor of this name.
pub fn check_name(name: &str) -> Result<()> {
    if name == METADATA {
        let problem = "safetensors files have their metadata under this name; rename the tensor";
        return Err(Error::tensor(name, problem));
    }
    Ok(())
}

/// Size of the length field before the JSON.
const LENGTH_BYTES: u64 = 8;

/// One tensor of a header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Shape.
    pub shape: Vec<u64>,
    /// First byte, from the start of the file.
    pub begin: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// A validated header.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// `__metadata__`, in the file's order.
    pub metadata: Vec<(String, String)>,
    /// Tensors in the order of their data.
    pub tensors: Vec<TensorInfo>,
}

/// Returns the number of elements of a shape; `None` if it overflows.
pub fn elements(shape: &[u64]) -> Option<u64> {
    // A tensor with a zero dimension is empty, even if the other dimensions overflow.
    if shape.contains(&0) {
        return Some(0);
    }
    shape.iter().try_fold(1u64, |product, &dim| product.checked_mul(dim))
}

/// Returns the length of the JSON, given the first 8 bytes of a file of `file_bytes` bytes.
pub fn json_bytes(file: &Path, file_bytes: u64, first: &[u8]) -> Result<u64> {
    let fail =
        |problem| Error::Header { file: file.into(), place: Place { tensor: None, byte: Some(0) }, problem };
    let Ok(length) = <[u8; 8]>::try_from(first) else {
        return Err(fail(format!("{file_bytes} bytes are too few for a safetensors file")));
    };
    let length = u64::from_le_bytes(length);
    if length > MAX_HEADER_BYTES {
        return Err(fail(format!(
            "the header claims {length} bytes, over the format's limit of {MAX_HEADER_BYTES}: not a safetensors file?"
        )));
    }
    if length > file_bytes.saturating_sub(LENGTH_BYTES) {
        return Err(fail(format!(
            "the header claims {length} bytes, but the file has only {file_bytes}: truncated?"
        )));
    }
    Ok(length)
}

impl Header {
    /// Parses and validates the JSON of a file of `file_bytes` bytes.
    pub fn parse(file: &Path, file_bytes: u64, json: &[u8]) -> Result<Header> {
        let fail = |byte: u64, problem: String| Error::Header {
            file: file.into(),
            place: Place { tensor: None, byte: Some(byte) },
            problem,
        };
        let text = std::str::from_utf8(json)
            .map_err(|e| fail(LENGTH_BYTES + e.valid_up_to() as u64, "the header is not UTF-8".into()))?;
        if !text.starts_with('{') {
            return Err(fail(LENGTH_BYTES, "the header does not start with `{`".into()));
        }
        let raw: RawHeader = serde_json::from_str(text).map_err(|e| {
            let byte = LENGTH_BYTES + byte_of(text, e.line(), e.column());
            fail(byte, format!("the header is not valid: {}", without_position(&e)))
        })?;
        let data_start = LENGTH_BYTES + json.len() as u64;
        let tensors = validate(file, data_start, file_bytes, raw.tensors)?;
        Ok(Header { metadata: raw.metadata, tensors })
    }

    /// Returns the bytes of the length field and the JSON. `begin` is relative to the data, and the tensors
    /// must be in the order of their data.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut map = serde_json::Map::new();
        if !self.metadata.is_empty() {
            let metadata = self.metadata.iter().map(|(k, v)| (k.clone(), v.clone().into())).collect();
            map.insert(METADATA.into(), serde_json::Value::Object(metadata));
        }
        for t in &self.tensors {
            let entry = serde_json::json!({
                "dtype": t.dtype, "shape": t.shape, "data_offsets": [t.begin, t.begin + t.bytes],
            });
            map.insert(t.name.clone(), entry);
        }
        let mut json = serde_json::Value::Object(map).to_string().into_bytes();
        json.resize(json.len().next_multiple_of(8), b' ');
        [&(json.len() as u64).to_le_bytes()[..], &json].concat()
    }
}

/// Checks that every span has the size of its shape, and that the spans cover the data exactly.
fn validate(
    file: &Path,
    data_start: u64,
    file_bytes: u64,
    raw: Vec<(String, RawEntry)>,
) -> Result<Vec<TensorInfo>> {
    let data_bytes = file_bytes.saturating_sub(data_start);
    let fail = |tensor: &str, byte: u64, problem: String| Error::Header {
        file: file.into(),
        place: Place { tensor: Some(tensor.into()), byte: Some(data_start.saturating_add(byte)) },
        problem,
    };
    let mut tensors = Vec::with_capacity(raw.len());
    for (name, entry) in raw {
        let (begin, end) = entry.data_offsets;
        // Types of blocks belong to GGUF.
        let Some(dtype) = Dtype::from_name(&entry.dtype).filter(|dtype| dtype.block().is_none()) else {
            return Err(fail(&name, begin, format!("unknown dtype {:?}", entry.dtype)));
        };
        if begin > end {
            return Err(fail(&name, begin, format!("its offsets are reversed: {begin} > {end}")));
        }
        if end > data_bytes {
            let problem =
                format!("it ends at data byte {end}, but the data has {data_bytes} bytes: truncated?");
            return Err(fail(&name, begin, problem));
        }
        let needed = elements(&entry.shape).and_then(|n| dtype.bytes_for(n)).ok_or_else(|| {
            let problem = format!("shape {:?} of {dtype} has no size in whole bytes below 2^64", entry.shape);
            fail(&name, begin, problem)
        })?;
        if needed != end - begin {
            let problem = format!(
                "shape {:?} of {dtype} takes {needed} bytes, but its offsets span {}",
                entry.shape,
                end - begin
            );
            return Err(fail(&name, begin, problem));
        }
        tensors.push(TensorInfo { name, dtype, shape: entry.shape, begin, bytes: end - begin });
    }
    tensors.sort_by_key(|t| (t.begin, t.bytes));
    let mut expected = 0;
    for (i, t) in tensors.iter_mut().enumerate() {
        if t.begin < expected {
            return Err(fail(
                &t.name,
                t.begin,
                format!(
                    "it overlaps the tensor before it, which ends at data byte {expected} (tensor number {i} by offset)"
                ),
            ));
        }
        if t.begin > expected {
            return Err(fail(
                &t.name,
                expected,
                format!("{} bytes before it belong to no tensor", t.begin - expected),
            ));
        }
        expected = t.begin + t.bytes;
        t.begin += data_start;
    }
    if expected != data_bytes {
        return Err(Error::Header {
            file: file.into(),
            place: Place { tensor: None, byte: Some(data_start + expected) },
            problem: format!("{} bytes after the last tensor", data_bytes - expected),
        });
    }
    Ok(tensors)
}

/// Returns the byte in `text` at a line and column of serde_json.
fn byte_of(text: &str, line: usize, column: usize) -> u64 {
    let before: usize = text.split_inclusive('\n').take(line.saturating_sub(1)).map(str::len).sum();
    (before + column.saturating_sub(1)).min(text.len()) as u64
}

fn without_position(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.rsplit_once(" at line ").map_or(text.clone(), |(head, _)| head.to_string())
}

#[derive(Deserialize)]
struct RawEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

struct RawHeader {
    metadata: Vec<(String, String)>,
    tensors: Vec<(String, RawEntry)>,
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct HeaderVisitor;
        impl<'de> Visitor<'de> for HeaderVisitor {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut seen = std::collections::HashSet::new();
                let mut raw = RawHeader { metadata: Vec::new(), tensors: Vec::new() };
                while let Some(name) = map.next_key::<String>()? {
                    if !seen.insert(name.clone()) {
                        return Err(de::Error::custom(format!("the key {name:?} occurs twice")));
                    }
                    let place = |e| de::Error::custom(format!("tensor {name:?}: {e}"));
                    if name == METADATA {
                        raw.metadata = map.next_value::<UniqueMap>().map_err(place)?.0;
                    } else {
                        let entry = map.next_value::<RawEntry>().map_err(place)?;
                        raw.tensors.push((name, entry));
                    }
                }
                Ok(raw)
            }
        }
        deserializer.deserialize_map(HeaderVisitor)
    }
}

/// An ordered map of strings to strings without duplicate keys.
pub(crate) struct UniqueMap(pub(crate) Vec<(String, String)>);

impl<'de> Deserialize<'de> for UniqueMap {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct UniqueVisitor;
        impl<'de> Visitor<'de> for UniqueVisitor {
            type Value = UniqueMap;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of strings")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<UniqueMap, A::Error> {
                let mut seen = std::collections::HashSet::new();
                let mut entries = Vec::new();
                while let Some((key, value)) = map.next_entry::<String, String>()? {
                    if !seen.insert(key.clone()) {
                        return Err(de::Error::custom(format!("the key {key:?} occurs twice")));
                    }
                    entries.push((key, value));
                }
                Ok(UniqueMap(entries))
            }
        }
        deserializer.deserialize_map(UniqueVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(file: &[u8]) -> Result<Header> {
        let path = Path::new("x.safetensors");
        let n = json_bytes(path, file.len() as u64, &file[..file.len().min(8)])?;
        Header::parse(path, file.len() as u64, &file[8..8 + n as usize])
    }

    proptest! {
        #[test]
        fn a_written_header_is_read_by_us_and_by_the_safetensors_crate(
            tensors in prop::collection::btree_map("[a-z.\u{e9}\"\\\\]{1,12}", (0usize..22, prop::collection::vec(0u64..5, 0..4)), 0..8),
            metadata in prop::collection::btree_map("[a-z]{1,6}", ".{0,6}", 0..3),
        ) {
            let mut begin = 0;
            let mut header = Header { metadata: metadata.into_iter().collect(), tensors: Vec::new() };
            for (name, (dtype, shape)) in tensors {
                let dtype = Dtype::all().filter(|dtype| dtype.block().is_none()).nth(dtype).unwrap();
                let Some(bytes) = dtype.bytes_for(elements(&shape).unwrap()) else { continue };
                header.tensors.push(TensorInfo { name, dtype, shape, begin, bytes });
                begin += bytes;
            }
            let mut file = header.to_bytes();
            prop_assert_eq!(file.len() % 8, 0);
            let data_start = file.len() as u64;
            file.resize(file.len() + begin as usize, 7);
            let ours = parse(&file).unwrap();
            prop_assert_eq!(&ours.metadata, &header.metadata);
            prop_assert_eq!(ours.tensors.len(), header.tensors.len());
            let theirs = safetensors::SafeTensors::deserialize(&file).unwrap();
            for t in &header.tensors {
                let read = ours.tensors.iter().find(|r| r.name == t.name).unwrap();
                prop_assert_eq!(read, &TensorInfo { begin: t.begin + data_start, ..t.clone() });
                let view = theirs.tensor(&t.name).unwrap();
                prop_assert_eq!(view.data().len() as u64, t.bytes);
                prop_assert_eq!(view.dtype().to_string(), t.dtype.name());
            }
        }

        #[test]
        fn arbitrary_bytes_are_an_error_never_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = parse(&bytes);
        }

        #[test]
        fn a_damaged_header_is_an_error_never_a_panic(at in 8usize..200, byte in any::<u8>()) {
            let header = Header { metadata: vec![("format".into(), "pt".into())], tensors: vec![
                TensorInfo { name: "a".into(), dtype: Dtype::Bf16, shape: vec![2, 3], begin: 0, bytes: 12 },
                TensorInfo { name: "b".into(), dtype: Dtype::F32, shape: vec![], begin: 12, bytes: 4 },
            ]};
            let mut file = header.to_bytes();
            file.resize(file.len() + 16, 0);
            if at < file.len() { file[at] = byte; }
            let _ = parse(&file);
        }
    }
}
