//! The header of a GGUF file: entries and descriptions of tensors.
//!
//! Every count is checked against the rest of the file before memory is taken for it. Tensors must lie one after
//! the other, padded to the alignment, as llama.cpp requires.

use std::collections::HashSet;
use std::path::Path;

use ballast_contract::Dtype;
use ballast_files::header::{TensorInfo, elements};
use ballast_files::{Error, Place, Result, ShardFile};

use super::{ALIGNMENT, VERSION};

/// Largest number of values over all entries, so that a header cannot fill the memory.
const MAX_VALUES: u64 = 1 << 22;

/// Largest size of a string in bytes.
const MAX_STRING_BYTES: u64 = 1 << 26;

/// Largest size of all strings together in bytes.
const MAX_TEXT_BYTES: u64 = 1 << 28;

/// Largest number of tensors.
const MAX_TENSORS: u64 = 1 << 20;

/// Largest number of dimensions of a tensor.
const MAX_DIMENSIONS: u32 = 4;

/// Largest size of a tensor's name in bytes, without the zero that llama.cpp adds.
pub const MAX_NAME_BYTES: u64 = 63;

/// Deepest nesting of arrays.
const MAX_DEPTH: u32 = 4;

const MAGIC: [u8; 4] = *b"GGUF";

/// An entry: key and value.
pub type Entry = (String, Value);

/// The value of an entry.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // the names are the types of the format
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(String),
    /// Elements of one type; the type of an empty array is kept.
    Array(u32, Vec<Value>),
    U64(u64),
    I64(i64),
    F64(f64),
}

/// Numbers of the types in a file.
mod kind {
    pub(super) const STRING: u32 = 8;
    pub(super) const ARRAY: u32 = 9;
}

impl Value {
    /// An array of strings.
    pub fn strings(values: impl IntoIterator<Item = String>) -> Value {
        Value::Array(kind::STRING, values.into_iter().map(Value::String).collect())
    }

    /// An array of values of one type, at least one.
    pub fn array(values: Vec<Value>) -> Value {
        Value::Array(values.first().map_or(0, Value::kind), values)
    }

    /// Returns the string.
    pub fn text(&self) -> Option<&str> {
        match self {
            Value::String(text) => Some(text),
            _ => None,
        }
    }

    /// Returns the elements of an array.
    pub fn elements(&self) -> Option<&[Value]> {
        match self {
            Value::Array(_, values) => Some(values),
            _ => None,
        }
    }

    /// Returns the number of the type in a file.
    fn kind(&self) -> u32 {
        match self {
            Value::U8(_) => 0,
            Value::I8(_) => 1,
            Value::U16(_) => 2,
            Value::I16(_) => 3,
            Value::U32(_) => 4,
            Value::I32(_) => 5,
            Value::F32(_) => 6,
            Value::Bool(_) => 7,
            Value::String(_) => kind::STRING,
            Value::Array(..) => kind::ARRAY,
            Value::U64(_) => 10,
            Value::I64(_) => 11,
            Value::F64(_) => 12,
        }
    }

    /// Appends the bytes of the value, without its type.
    fn write(&self, out: &mut Vec<u8>) {
        match self {
            Value::U8(x) => out.push(*x),
            Value::I8(x) => out.extend(x.to_le_bytes()),
            Value::U16(x) => out.extend(x.to_le_bytes()),
            Value::I16(x) => out.extend(x.to_le_bytes()),
            Value::U32(x) => out.extend(x.to_le_bytes()),
            Value::I32(x) => out.extend(x.to_le_bytes()),
            Value::F32(x) => out.extend(x.to_le_bytes()),
            Value::Bool(x) => out.push(*x as u8),
            Value::String(text) => write_text(text, out),
            Value::Array(kind, values) => {
                out.extend(kind.to_le_bytes());
                out.extend((values.len() as u64).to_le_bytes());
                values.iter().for_each(|value| value.write(out));
            }
            Value::U64(x) => out.extend(x.to_le_bytes()),
            Value::I64(x) => out.extend(x.to_le_bytes()),
            Value::F64(x) => out.extend(x.to_le_bytes()),
        }
    }
}

/// Shows a value on one line; arrays by their length.
impl std::fmt::Display for Value {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Value::U8(x) => write!(f, "{x}"),
            Value::I8(x) => write!(f, "{x}"),
            Value::U16(x) => write!(f, "{x}"),
            Value::I16(x) => write!(f, "{x}"),
            Value::U32(x) => write!(f, "{x}"),
            Value::I32(x) => write!(f, "{x}"),
            Value::F32(x) => write!(f, "{x}"),
            Value::Bool(x) => write!(f, "{x}"),
            Value::String(text) => f.write_str(text),
            Value::Array(_, values) if values.len() <= 8 => {
                let shown: Vec<String> = values.iter().map(ToString::to_string).collect();
                write!(f, "[{}]", shown.join(", "))
            }
            Value::Array(_, values) => write!(f, "[{} values]", values.len()),
            Value::U64(x) => write!(f, "{x}"),
            Value::I64(x) => write!(f, "{x}"),
            Value::F64(x) => write!(f, "{x}"),
        }
    }
}

fn write_text(text: &str, out: &mut Vec<u8>) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// Types of tensors in a file: number, dtype.
const TYPES: [(u32, Dtype); 9] = [
    (0, Dtype::F32),
    (1, Dtype::F16),
    (8, Dtype::Q8_0),
    (24, Dtype::I8),
    (25, Dtype::I16),
    (26, Dtype::I32),
    (27, Dtype::I64),
    (28, Dtype::F64),
    (30, Dtype::Bf16),
];

/// Names of types that are not read.
const OTHER_TYPES: [(u32, &str); 12] = [
    (2, "Q4_0"),
    (3, "Q4_1"),
    (6, "Q5_0"),
    (7, "Q5_1"),
    (9, "Q8_1"),
    (10, "Q2_K"),
    (11, "Q3_K"),
    (12, "Q4_K"),
    (13, "Q5_K"),
    (14, "Q6_K"),
    (15, "Q8_K"),
    (39, "MXFP4"),
];

/// Returns true if a file begins as GGUF does.
pub fn is_gguf(path: &Path) -> Result<bool> {
    use std::io::Read;
    if !path.is_file() {
        return Ok(false);
    }
    let mut first = Vec::new();
    let file = std::fs::File::open(path).map_err(Error::io(path, "open"))?;
    file.take(MAGIC.len() as u64).read_to_end(&mut first).map_err(Error::io(path, "read"))?;
    Ok(first == MAGIC)
}

/// A validated header.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Header {
    /// Entries, in the file's order.
    pub entries: Vec<Entry>,
    /// Tensors in the order of their data, with row-major shapes; `begin` is relative to the file when read, and
    /// to the data when written.
    pub tensors: Vec<TensorInfo>,
}

impl Header {
    /// Returns the value of an entry.
    pub fn entry(&self, key: &str) -> Option<&Value> {
        self.entries.iter().find(|(k, _)| k == key).map(|(_, value)| value)
    }

    /// Reads and validates the header of an open file.
    pub fn read(file: &ShardFile) -> Result<Header> {
        let mut reader = Reader { file, at: 0, text: 0, values: 0, buffer: Vec::new(), buffered: 0 };
        let (tensor_count, entry_count) = reader.counts()?;
        let mut header = Header::default();
        let mut keys = HashSet::new();
        for _ in 0..entry_count {
            let begin = reader.at;
            let key = reader.text()?;
            if !keys.insert(key.clone()) {
                return Err(reader.fail(begin, format!("the key {key:?} occurs twice")));
            }
            let kind = reader.u32()?;
            let value = reader.value(kind, 0)?;
            header.entries.push((key, value));
        }
        let alignment = alignment(&header, &reader)?;
        let mut offsets = Vec::new();
        for _ in 0..tensor_count {
            let (tensor, begin) = reader.tensor()?;
            offsets.push((tensor, begin));
        }
        let data = reader
            .at
            .checked_next_multiple_of(alignment)
            .ok_or_else(|| reader.fail(reader.at, "the data begins past 2^64".into()))?;
        header.tensors = validate(offsets, data, alignment, &reader)?;
        Ok(header)
    }

    /// Parses a file that is in memory.
    pub fn parse(path: &Path, bytes: Vec<u8>) -> Result<Header> {
        Header::read(&ShardFile::in_memory(path, bytes))
    }

    /// Returns the bytes of the header, padded to the alignment.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::from(MAGIC);
        out.extend(VERSION.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.entries.len() as u64).to_le_bytes());
        for (key, value) in &self.entries {
            write_text(key, &mut out);
            out.extend(value.kind().to_le_bytes());
            value.write(&mut out);
        }
        for t in &self.tensors {
            write_text(&t.name, &mut out);
            out.extend((t.shape.len() as u32).to_le_bytes());
            t.shape.iter().rev().for_each(|dim| out.extend(dim.to_le_bytes()));
            let number =
                TYPES.iter().find(|row| row.1 == t.dtype).expect("the plan has types of the format").0;
            out.extend(number.to_le_bytes());
            out.extend(t.begin.to_le_bytes());
        }
        out.resize(out.len().next_multiple_of(ALIGNMENT as usize), 0);
        out
    }
}

/// Returns the alignment that the header states.
fn alignment(header: &Header, reader: &Reader<'_>) -> Result<u64> {
    match header.entry("general.alignment") {
        None => Ok(ALIGNMENT),
        Some(Value::U32(n)) if n.is_power_of_two() && (8..=1 << 20).contains(n) => Ok(*n as u64),
        Some(other) => {
            let problem =
                format!("general.alignment must be a power of two from 8 to 1048576 as a u32, got {other}");
            Err(reader.fail(reader.at, problem))
        }
    }
}

/// Checks names and offsets; `begin` becomes relative to the file.
fn validate(
    found: Vec<(TensorInfo, u64)>,
    data: u64,
    alignment: u64,
    reader: &Reader<'_>,
) -> Result<Vec<TensorInfo>> {
    let mut names = HashSet::new();
    let mut expected = 0u64;
    let mut tensors = Vec::with_capacity(found.len());
    for (mut t, described_at) in found {
        let fail = |byte: u64, problem: String| Error::Header {
            file: reader.file.path.clone(),
            place: Place { tensor: Some(t.name.clone()), byte: Some(byte) },
            problem,
        };
        if !names.insert(t.name.clone()) {
            return Err(fail(described_at, "the name occurs twice".into()));
        }
        if t.begin != expected {
            let problem = format!("offset {} in the data, expected {expected}", t.begin);
            return Err(fail(described_at, problem));
        }
        let begin = data.checked_add(t.begin);
        let end = begin.and_then(|begin| begin.checked_add(t.bytes));
        let (Some(begin), Some(end)) = (begin, end) else {
            return Err(fail(described_at, "it ends past 2^64".into()));
        };
        if end > reader.file.bytes {
            let problem =
                format!("it ends at byte {end}, but the file has {} bytes: truncated?", reader.file.bytes);
            return Err(fail(begin, problem));
        }
        // Cannot overflow: the end lies in the file.
        expected = (t.begin + t.bytes).next_multiple_of(alignment);
        t.begin = begin;
        tensors.push(t);
    }
    Ok(tensors)
}

/// Reads a header piece by piece.
struct Reader<'a> {
    file: &'a ShardFile,
    at: u64,
    /// Number of bytes of all strings.
    text: u64,
    /// Number of values.
    values: u64,
    buffer: Vec<u8>,
    /// Position of the buffer in the file.
    buffered: u64,
}

/// Number of bytes that are read ahead.
const AHEAD: u64 = 1 << 16;

impl Reader<'_> {
    fn fail(&self, byte: u64, problem: String) -> Error {
        let place = Place { tensor: None, byte: Some(byte) };
        Error::Header { file: self.file.path.clone(), place, problem }
    }

    /// Returns an error unless the file has `bytes` more bytes.
    fn require(&self, bytes: u64, what: &str) -> Result<()> {
        let rest = self.file.bytes.saturating_sub(self.at);
        if bytes > rest {
            let problem = format!("{what} needs {bytes} bytes, but only {rest} are left: truncated?");
            return Err(self.fail(self.at, problem));
        }
        Ok(())
    }

    fn bytes(&mut self, count: u64) -> Result<&[u8]> {
        self.require(count, "the header")?;
        let end = self.at + count;
        if self.at < self.buffered || end > self.buffered + self.buffer.len() as u64 {
            let take = count.max(AHEAD).min(self.file.bytes - self.at);
            self.buffer.resize(take as usize, 0);
            self.file.read_at(&mut self.buffer, self.at)?;
            self.buffered = self.at;
        }
        let from = (self.at - self.buffered) as usize;
        self.at = end;
        Ok(&self.buffer[from..from + count as usize])
    }

    fn fixed<const N: usize>(&mut self) -> Result<[u8; N]> {
        let bytes = self.bytes(N as u64)?;
        Ok(bytes.try_into().expect("as many bytes as asked for"))
    }

    fn u32(&mut self) -> Result<u32> {
        self.fixed().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64> {
        self.fixed().map(u64::from_le_bytes)
    }

    /// Reads magic, version and counts.
    fn counts(&mut self) -> Result<(u64, u64)> {
        if self.fixed::<4>()? != MAGIC {
            return Err(self.fail(0, "not a GGUF file: it does not begin with \"GGUF\"".into()));
        }
        let version = self.u32()?;
        if version.swap_bytes() == VERSION {
            return Err(self.fail(4, "the file is big endian; only little endian is read".into()));
        }
        if !(2..=VERSION).contains(&version) {
            return Err(self.fail(4, format!("version must be 2 or {VERSION}, got {version}")));
        }
        let (tensors, entries) = (self.u64()?, self.u64()?);
        if tensors > MAX_TENSORS {
            return Err(self.fail(8, format!("{tensors} tensors are over the limit of {MAX_TENSORS}")));
        }
        // A description has at least a name's length, a count of dimensions, a type and an offset; an entry a
        // key's length, a type and a byte.
        self.require(tensors * 24, "the list of tensors")?;
        if entries > MAX_VALUES {
            return Err(self.fail(16, format!("{entries} entries are over the limit of {MAX_VALUES}")));
        }
        self.require(entries * 13, "the list of entries")?;
        Ok((tensors, entries))
    }

    fn text(&mut self) -> Result<String> {
        let begin = self.at;
        let length = self.u64()?;
        if length > MAX_STRING_BYTES {
            let problem = format!("a string of {length} bytes is over the limit of {MAX_STRING_BYTES}");
            return Err(self.fail(begin, problem));
        }
        self.text += length;
        if self.text > MAX_TEXT_BYTES {
            return Err(self.fail(begin, format!("all strings together exceed {MAX_TEXT_BYTES} bytes")));
        }
        self.require(length, "a string")?;
        let bytes = self.bytes(length)?.to_vec();
        String::from_utf8(bytes).map_err(|_| self.fail(begin, "a string is not UTF-8".into()))
    }

    fn value(&mut self, kind: u32, depth: u32) -> Result<Value> {
        let begin = self.at;
        self.values += 1;
        if self.values > MAX_VALUES {
            return Err(self.fail(begin, format!("over {MAX_VALUES} values in the entries")));
        }
        Ok(match kind {
            0 => Value::U8(self.fixed::<1>()?[0]),
            1 => Value::I8(i8::from_le_bytes(self.fixed()?)),
            2 => Value::U16(u16::from_le_bytes(self.fixed()?)),
            3 => Value::I16(i16::from_le_bytes(self.fixed()?)),
            4 => Value::U32(self.u32()?),
            5 => Value::I32(i32::from_le_bytes(self.fixed()?)),
            6 => Value::F32(f32::from_le_bytes(self.fixed()?)),
            7 => match self.fixed::<1>()?[0] {
                0 => Value::Bool(false),
                1 => Value::Bool(true),
                other => return Err(self.fail(begin, format!("a bool must be 0 or 1, got {other}"))),
            },
            kind::STRING => Value::String(self.text()?),
            kind::ARRAY => self.array(depth)?,
            10 => Value::U64(self.u64()?),
            11 => Value::I64(i64::from_le_bytes(self.fixed()?)),
            12 => Value::F64(f64::from_le_bytes(self.fixed()?)),
            other => return Err(self.fail(begin, format!("unknown type {other} of a value"))),
        })
    }

    fn array(&mut self, depth: u32) -> Result<Value> {
        let begin = self.at;
        if depth == MAX_DEPTH {
            return Err(self.fail(begin, format!("arrays are nested over {MAX_DEPTH} deep")));
        }
        let (kind, count) = (self.u32()?, self.u64()?);
        if count > MAX_VALUES {
            return Err(self.fail(begin, format!("an array of {count} is over the limit of {MAX_VALUES}")));
        }
        // Every element has at least one byte.
        self.require(count, "an array")?;
        let values = (0..count).map(|_| self.value(kind, depth + 1)).collect::<Result<_>>()?;
        Ok(Value::Array(kind, values))
    }

    /// Reads a tensor's description; returns it with its position.
    fn tensor(&mut self) -> Result<(TensorInfo, u64)> {
        let described_at = self.at;
        let name = self.text()?;
        let fail = |this: &Self, problem: String| Error::Header {
            file: this.file.path.clone(),
            place: Place { tensor: Some(name.clone()), byte: Some(described_at) },
            problem,
        };
        if name.len() as u64 > MAX_NAME_BYTES {
            return Err(fail(self, format!("a name of over {MAX_NAME_BYTES} bytes")));
        }
        let dims = self.u32()?;
        if dims > MAX_DIMENSIONS {
            return Err(fail(self, format!("{dims} dimensions, at most {MAX_DIMENSIONS} are possible")));
        }
        let mut shape = (0..dims).map(|_| self.u64()).collect::<Result<Vec<u64>>>()?;
        let kind = self.u32()?;
        let Some(&(_, dtype)) = TYPES.iter().find(|row| row.0 == kind) else {
            let known = OTHER_TYPES.iter().find(|row| row.0 == kind).map_or("unknown", |row| row.1);
            let problem = format!("type {kind} ({known}) is not supported; F32, F16, BF16 and Q8_0 are");
            return Err(fail(self, problem));
        };
        let row = shape.first().copied().unwrap_or(1);
        let whole_rows = dtype.block().is_none_or(|(block, _)| row.is_multiple_of(block));
        shape.reverse();
        let bytes = elements(&shape).filter(|_| whole_rows).and_then(|n| dtype.bytes_for(n));
        let Some(bytes) = bytes else {
            let problem = format!("shape {shape:?} of {dtype} has no size in whole blocks below 2^64");
            return Err(fail(self, problem));
        };
        let begin = self.u64()?;
        Ok((TensorInfo { name, dtype, shape, begin, bytes }, described_at))
    }
}
