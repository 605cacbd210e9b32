//! Pickle as data: a machine that builds a description of the objects and executes nothing.
//!
//! A pickle is a program for a stack machine; Python calls whatever functions it names. Here a call is only
//! recorded, as [`Node::Call`], and the functions and classes that may be named are listed in [`ALLOWED`]:
//! those that torch and Megatron write. Any other is an error with its name and byte.
//!
//! Nodes lie in one list and refer to each other by index, so an object that contains itself, a deep nesting
//! and objects that are used many times need no recursion here. An opcode adds at most one node, and every
//! element of a tuple, list or dict comes from the stack, so memory is proportional to the bytes read; both
//! are limited.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use crate::error::{Error, Place, Result};

/// Largest pickle that is read, in bytes, and largest number of its values.
pub const MOST_BYTES: u64 = 512 << 20;
const MOST_NODES: usize = 1 << 25;

/// Functions and classes that a pickle may name, by module.
pub const ALLOWED: &[(&str, &[&str])] = &[
    ("_codecs", &["encode"]),
    ("argparse", &["Namespace"]),
    ("collections", &["OrderedDict", "defaultdict"]),
    ("megatron.core.enums", &["ModelType"]),
    ("megatron.core.transformer.enums", &["AttnBackend", "AttnMaskType", "AttnType", "LayerType"]),
    ("numpy", &["dtype", "ndarray"]),
    ("numpy._core.multiarray", &["_reconstruct", "scalar"]),
    ("numpy.core.multiarray", &["_reconstruct", "scalar"]),
    ("pathlib", &["Path", "PosixPath", "PurePosixPath"]),
    ("torch", TORCH),
    ("torch._tensor", &["_rebuild_from_type_v2"]),
    ("torch._utils", &["_rebuild_parameter", "_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3"]),
    ("torch.distributed.checkpoint.filesystem", &["_StorageInfo"]),
    (
        "torch.distributed.checkpoint.metadata",
        &[
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        ],
    ),
    ("torch.distributed.checkpoint.planner", &["SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"]),
    ("torch.nn.parameter", &["Parameter"]),
    ("torch.serialization", &["_get_layout"]),
    ("torch.storage", &["UntypedStorage"]),
];

const TORCH: &[&str] = &[
    "BFloat16Storage",
    "BoolStorage",
    "ByteStorage",
    "CharStorage",
    "DoubleStorage",
    "FloatStorage",
    "HalfStorage",
    "IntStorage",
    "LongStorage",
    "ShortStorage",
    "Size",
    "Tensor",
    "bfloat16",
    "bool",
    "device",
    "float16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
    "int16",
    "int32",
    "int64",
    "int8",
    "uint16",
    "uint32",
    "uint64",
    "uint8",
];

/// Index of a node.
pub type Id = usize;

/// A value.
#[derive(Clone, Debug, PartialEq)]
pub enum Node {
    /// None.
    None,
    /// A truth value.
    Bool(bool),
    /// An integer; those beyond i64 are kept as [`Node::Bytes`].
    Int(i64),
    /// A float.
    Float(f64),
    /// A string: a range of the pickle, which is UTF-8.
    Text(Range<usize>),
    /// Bytes: a range of the pickle.
    Bytes(Range<usize>),
    /// A tuple.
    Tuple(Vec<Id>),
    /// A list or set.
    List(Vec<Id>),
    /// A dict, in order; a later entry replaces an earlier one with the same key.
    Dict(Vec<(Id, Id)>),
    /// A function or class: module and name, ranges of the pickle.
    Global(Range<usize>, Range<usize>),
    /// A call, or the making of an object, that Python would carry out.
    Call {
        /// The function or class, a [`Node::Global`].
        callable: Id,
        /// Its arguments, a tuple.
        arguments: Id,
        /// State that is set afterwards.
        state: Option<Id>,
        /// Entries that are set afterwards, as in an `OrderedDict`.
        entries: Vec<(Id, Id)>,
    },
    /// An object outside of the pickle, by its key: a storage of torch.
    Persistent(Id),
}

/// A pickle that was read.
#[derive(Debug)]
pub struct Pickle<'a> {
    bytes: &'a [u8],
    nodes: Vec<Node>,
    root: Id,
}

struct Machine<'a> {
    file: &'a Path,
    /// Byte of the file at which the pickle begins, for errors.
    begin: u64,
    bytes: &'a [u8],
    at: usize,
    nodes: Vec<Node>,
    stack: Vec<Id>,
    marks: Vec<usize>,
    memo: HashMap<usize, Id>,
}

impl<'a> Pickle<'a> {
    /// Reads the pickle in `bytes`, which begin at byte `begin` of `file`.
    pub fn parse(bytes: &'a [u8], file: &'a Path, begin: u64) -> Result<Pickle<'a>> {
        let mut machine = Machine {
            file,
            begin,
            bytes,
            at: 0,
            nodes: Vec::new(),
            stack: Vec::new(),
            marks: Vec::new(),
            memo: HashMap::new(),
        };
        let root = machine.run()?;
        Ok(Pickle { bytes, nodes: machine.nodes, root })
    }

    /// The value of the whole pickle.
    pub fn root(&self) -> Id {
        self.root
    }

    /// A value.
    pub fn node(&self, id: Id) -> &Node {
        &self.nodes[id]
    }

    /// A string, if the value is one.
    pub fn text(&self, id: Id) -> Option<&'a str> {
        match self.node(id) {
            Node::Text(range) => Some(self.text_of(range)),
            _ => None,
        }
    }

    fn text_of(&self, range: &Range<usize>) -> &'a str {
        // Checked when the opcode was read.
        std::str::from_utf8(&self.bytes[range.clone()]).unwrap_or_default()
    }

    /// An integer, if the value is one.
    pub fn int(&self, id: Id) -> Option<i64> {
        match self.node(id) {
            Node::Int(value) => Some(*value),
            _ => None,
        }
    }

    /// An integer that is not negative, if the value is one.
    pub fn count(&self, id: Id) -> Option<u64> {
        self.int(id).and_then(|value| u64::try_from(value).ok())
    }

    /// The elements of a tuple, a list, or a `torch.Size`.
    pub fn elements(&self, id: Id) -> Option<&[Id]> {
        match self.node(id) {
            Node::Tuple(elements) | Node::List(elements) => Some(elements),
            Node::Call { arguments, .. } if self.callable(id) == Some(("torch", "Size")) => {
                match self.node(*arguments) {
                    Node::Tuple(arguments) => match self.node(*arguments.first()?) {
                        Node::Tuple(elements) | Node::List(elements) => Some(elements),
                        _ => None,
                    },
                    _ => None,
                }
            }
            _ => None,
        }
    }

    /// The counts of a `torch.Size`, a tuple or a list.
    pub fn counts(&self, id: Id) -> Option<Vec<u64>> {
        self.elements(id)?.iter().map(|element| self.count(*element)).collect()
    }

    /// The entries of a dict or an `OrderedDict`.
    pub fn entries(&self, id: Id) -> Option<&[(Id, Id)]> {
        match self.node(id) {
            Node::Dict(entries) => Some(entries),
            Node::Call { entries, .. } => match self.callable(id)? {
                ("collections", "OrderedDict" | "defaultdict") => Some(entries),
                _ => None,
            },
            _ => None,
        }
    }

    /// The value of a string key in a dict.
    pub fn entry(&self, id: Id, key: &str) -> Option<Id> {
        let entries = self.entries(id)?;
        entries.iter().rev().find(|(k, _)| self.text(*k) == Some(key)).map(|(_, value)| *value)
    }

    /// Module and name of a function or class.
    pub fn global(&self, id: Id) -> Option<(&'a str, &'a str)> {
        match self.node(id) {
            Node::Global(module, name) => Some((self.text_of(module), self.text_of(name))),
            _ => None,
        }
    }

    /// Module and name of the function or class of a call.
    pub fn callable(&self, id: Id) -> Option<(&'a str, &'a str)> {
        match self.node(id) {
            Node::Call { callable, .. } => self.global(*callable),
            _ => None,
        }
    }

    /// The arguments of a call.
    pub fn arguments(&self, id: Id) -> Option<&[Id]> {
        match self.node(id) {
            Node::Call { arguments, .. } => self.elements(*arguments),
            _ => None,
        }
    }

    /// The state of an object of this class.
    pub fn state(&self, id: Id, class: &str) -> Option<Id> {
        match self.node(id) {
            Node::Call { state, .. } if self.callable(id)?.1 == class => *state,
            _ => None,
        }
    }
}

impl<'a> Machine<'a> {
    fn error(&self, at: usize, problem: impl Into<String>) -> Error {
        Error::Header {
            file: self.file.into(),
            place: Place { tensor: None, byte: Some(self.begin + at as u64) },
            problem: problem.into(),
        }
    }

    fn take(&mut self, count: usize) -> Result<Range<usize>> {
        match self.at.checked_add(count) {
            Some(end) if end <= self.bytes.len() => {
                let range = self.at..end;
                self.at = end;
                Ok(range)
            }
            _ => {
                Err(self
                    .error(self.at, format!("the pickle ends within a value of {count} bytes: truncated?")))
            }
        }
    }

    fn fixed<const N: usize>(&mut self) -> Result<[u8; N]> {
        let range = self.take(N)?;
        Ok(std::array::from_fn(|i| self.bytes[range.start + i]))
    }

    /// A length of `N` bytes.
    fn length<const N: usize>(&mut self) -> Result<usize> {
        let at = self.at;
        let bytes = self.fixed::<N>()?;
        let length = bytes.iter().rev().fold(0u64, |sum, byte| sum << 8 | u64::from(*byte));
        usize::try_from(length).map_err(|_| self.error(at, format!("a length of {length} bytes")))
    }

    fn text(&mut self, length: usize) -> Result<Range<usize>> {
        let at = self.at;
        let range = self.take(length)?;
        match std::str::from_utf8(&self.bytes[range.clone()]) {
            Ok(_) => Ok(range),
            Err(_) => Err(self.error(at, "a string that is not UTF-8")),
        }
    }

    /// A line, without its end.
    fn line(&mut self) -> Result<Range<usize>> {
        let rest = &self.bytes[self.at..];
        let Some(length) = rest.iter().position(|byte| *byte == b'\n') else {
            return Err(self.error(self.at, "the pickle ends within a line: truncated?"));
        };
        let range = self.text(length)?;
        self.at += 1;
        Ok(range)
    }

    fn push(&mut self, node: Node) {
        self.stack.push(self.nodes.len());
        self.nodes.push(node);
    }

    fn pop(&mut self) -> Result<Id> {
        // Values below a mark belong to what is being built there.
        if self.stack.len() > self.marks.last().copied().unwrap_or(0)
            && let Some(id) = self.stack.pop()
        {
            return Ok(id);
        }
        Err(self.error(self.at, "an opcode needs a value, but the stack has none"))
    }

    fn top(&self) -> Result<Id> {
        self.stack
            .last()
            .copied()
            .ok_or_else(|| self.error(self.at, "an opcode needs a value, but the stack is empty"))
    }

    fn pop_mark(&mut self) -> Result<Vec<Id>> {
        let mark = self
            .marks
            .pop()
            .ok_or_else(|| self.error(self.at, "an opcode needs a mark, but there is none"))?;
        Ok(self.stack.split_off(mark))
    }

    fn tuple(&mut self, count: usize) -> Result<()> {
        let mut elements = Vec::with_capacity(count);
        for _ in 0..count {
            elements.push(self.pop()?);
        }
        elements.reverse();
        self.push(Node::Tuple(elements));
        Ok(())
    }

    fn pairs(&self, values: Vec<Id>) -> Result<Vec<(Id, Id)>> {
        let (pairs, []) = values.as_chunks::<2>() else {
            return Err(self.error(self.at, "a dict entry without a value"));
        };
        Ok(pairs.iter().map(|[key, value]| (*key, *value)).collect())
    }

    fn put(&mut self, index: usize) -> Result<()> {
        let top = self.top()?;
        self.memo.insert(index, top);
        Ok(())
    }

    fn get(&mut self, at: usize, index: usize) -> Result<()> {
        match self.memo.get(&index) {
            Some(id) => {
                self.stack.push(*id);
                Ok(())
            }
            None => Err(self.error(at, format!("value {index} is used before it is stored"))),
        }
    }

    /// Checks the name of a function or class.
    fn global(&mut self, at: usize, module: Range<usize>, name: Range<usize>) -> Result<()> {
        let text = |range: &Range<usize>| String::from_utf8_lossy(&self.bytes[range.clone()]).into_owned();
        let (module_name, own_name) = (text(&module), text(&name));
        let allowed =
            ALLOWED.iter().any(|(m, names)| *m == module_name && names.contains(&own_name.as_str()));
        if !allowed {
            let problem = format!(
                "the pickle names {module_name}.{own_name}, which is not among the functions and classes of tensors; \
                 nothing was executed. If you trust the file, save its tensors as safetensors with Python"
            );
            return Err(self.error(at, problem));
        }
        self.push(Node::Global(module, name));
        Ok(())
    }

    fn call(&mut self, at: usize) -> Result<()> {
        let (arguments, callable) = (self.pop()?, self.pop()?);
        if !matches!(self.nodes[callable], Node::Global(..)) {
            return Err(self.error(at, "a call of something that is not a named function or class"));
        }
        if !matches!(self.nodes[arguments], Node::Tuple(_)) {
            return Err(self.error(at, "a call whose arguments are not a tuple"));
        }
        self.push(Node::Call { callable, arguments, state: None, entries: Vec::new() });
        Ok(())
    }

    fn append(&mut self, at: usize, values: Vec<Id>) -> Result<()> {
        let list = self.top()?;
        match &mut self.nodes[list] {
            Node::List(elements) => {
                elements.extend(values);
                Ok(())
            }
            _ => Err(self.error(at, "elements are appended to something that is not a list")),
        }
    }

    fn set_entries(&mut self, at: usize, pairs: Vec<(Id, Id)>) -> Result<()> {
        let dict = self.top()?;
        match &mut self.nodes[dict] {
            Node::Dict(entries) | Node::Call { entries, .. } => {
                entries.extend(pairs);
                Ok(())
            }
            _ => Err(self.error(at, "entries are set in something that is not a dict")),
        }
    }

    fn build(&mut self, at: usize) -> Result<()> {
        let given = self.pop()?;
        let object = self.top()?;
        match &mut self.nodes[object] {
            Node::Call { state, .. } => {
                *state = Some(given);
                Ok(())
            }
            _ => Err(self.error(at, "state is set in something that is not an object")),
        }
    }

    /// An integer of any length, little endian, in two's complement.
    fn long(&mut self, length: usize) -> Result<()> {
        let range = self.take(length)?;
        let bytes = &self.bytes[range.clone()];
        if length > 8 {
            self.push(Node::Bytes(range));
            return Ok(());
        }
        let sign = bytes.last().is_some_and(|byte| *byte >= 0x80);
        let mut all = [if sign { 0xff } else { 0 }; 8];
        all[..length].copy_from_slice(bytes);
        self.push(Node::Int(i64::from_le_bytes(all)));
        Ok(())
    }

    /// Runs the pickle to its end and returns its value.
    fn run(&mut self) -> Result<Id> {
        loop {
            let at = self.at;
            if self.nodes.len() > MOST_NODES {
                return Err(self.error(at, format!("the pickle has more than {MOST_NODES} values")));
            }
            let [opcode] = self.fixed()?;
            match opcode {
                0x80 => {
                    let [protocol] = self.fixed()?;
                    if protocol > 5 {
                        return Err(
                            self.error(at, format!("pickle protocol {protocol}; the newest known is 5"))
                        );
                    }
                }
                // FRAME: its length is of no use here.
                0x95 => {
                    self.fixed::<8>()?;
                }
                b'.' => return self.pop(),
                b'(' => self.marks.push(self.stack.len()),
                b'0' => {
                    self.pop()?;
                }
                b'1' => {
                    self.pop_mark()?;
                }
                b'2' => {
                    let top = self.top()?;
                    self.stack.push(top);
                }
                b'N' => self.push(Node::None),
                0x88 => self.push(Node::Bool(true)),
                0x89 => self.push(Node::Bool(false)),
                b'J' => {
                    let value = i32::from_le_bytes(self.fixed()?);
                    self.push(Node::Int(value.into()));
                }
                b'K' => {
                    let [value] = self.fixed()?;
                    self.push(Node::Int(value.into()));
                }
                b'M' => {
                    let value = u16::from_le_bytes(self.fixed()?);
                    self.push(Node::Int(value.into()));
                }
                0x8a => {
                    let length = self.length::<1>()?;
                    self.long(length)?;
                }
                0x8b => {
                    let length = self.length::<4>()?;
                    self.long(length)?;
                }
                b'G' => {
                    let value = f64::from_be_bytes(self.fixed()?);
                    self.push(Node::Float(value));
                }
                0x8c => self.push_text::<1>()?,
                b'X' => self.push_text::<4>()?,
                0x8d => self.push_text::<8>()?,
                b'C' | b'U' => self.push_bytes::<1>()?,
                b'B' | b'T' => self.push_bytes::<4>()?,
                0x8e | 0x96 => self.push_bytes::<8>()?,
                b')' => self.push(Node::Tuple(Vec::new())),
                0x85 => self.tuple(1)?,
                0x86 => self.tuple(2)?,
                0x87 => self.tuple(3)?,
                b't' => {
                    let elements = self.pop_mark()?;
                    self.push(Node::Tuple(elements));
                }
                b']' | 0x8f => self.push(Node::List(Vec::new())),
                b'l' | 0x91 => {
                    let elements = self.pop_mark()?;
                    self.push(Node::List(elements));
                }
                b'a' => {
                    let value = self.pop()?;
                    self.append(at, vec![value])?;
                }
                b'e' | 0x90 => {
                    let values = self.pop_mark()?;
                    self.append(at, values)?;
                }
                b'}' => self.push(Node::Dict(Vec::new())),
                b'd' => {
                    let values = self.pop_mark()?;
                    let entries = self.pairs(values)?;
                    self.push(Node::Dict(entries));
                }
                b's' => {
                    let (value, key) = (self.pop()?, self.pop()?);
                    self.set_entries(at, vec![(key, value)])?;
                }
                b'u' => {
                    let values = self.pop_mark()?;
                    let pairs = self.pairs(values)?;
                    self.set_entries(at, pairs)?;
                }
                b'q' => {
                    let [index] = self.fixed()?;
                    self.put(index.into())?;
                }
                b'r' => {
                    let index = self.length::<4>()?;
                    self.put(index)?;
                }
                0x94 => self.put(self.memo.len())?,
                b'h' => {
                    let [index] = self.fixed()?;
                    self.get(at, index.into())?;
                }
                b'j' => {
                    let index = self.length::<4>()?;
                    self.get(at, index)?;
                }
                b'c' => {
                    let (module, name) = (self.line()?, self.line()?);
                    self.global(at, module, name)?;
                }
                0x93 => {
                    let (name, module) = (self.pop()?, self.pop()?);
                    match (self.nodes[module].clone(), self.nodes[name].clone()) {
                        (Node::Text(module), Node::Text(name)) => self.global(at, module, name)?,
                        _ => return Err(self.error(at, "the name of a function or class is not a string")),
                    }
                }
                b'R' | 0x81 => self.call(at)?,
                b'b' => self.build(at)?,
                b'Q' => {
                    let key = self.pop()?;
                    self.push(Node::Persistent(key));
                }
                other => {
                    let problem = format!(
                        "pickle opcode {other:#04x} is refused: torch does not write it, and nothing was executed"
                    );
                    return Err(self.error(at, problem));
                }
            }
        }
    }

    fn push_text<const N: usize>(&mut self) -> Result<()> {
        let length = self.length::<N>()?;
        let range = self.text(length)?;
        self.push(Node::Text(range));
        Ok(())
    }

    fn push_bytes<const N: usize>(&mut self) -> Result<()> {
        let length = self.length::<N>()?;
        let range = self.take(length)?;
        self.push(Node::Bytes(range));
        Ok(())
    }
}
