//! Pickle as data: a description of the objects, of which nothing is executed.
//!
//! A pickle is a program for a stack machine; Python calls whatever functions it names. Here (`machine.rs`)
//! a call is only recorded, as [`Node::Call`], and which functions and classes may be named is decided in
//! `globals.rs`. What is refused is an error with its name and byte.
//!
//! Nodes lie in one list and refer to each other by index, so an object that contains itself, a deep nesting
//! and objects that are used many times need no recursion here. Memory is a small multiple of the bytes read
//! (16 bytes for a node, of which an opcode adds at most one, and 4 for an element of a tuple or list); both are
//! limited.

use std::path::Path;

use ballast_files::Result;

pub use super::globals::ALLOWED;
use super::machine::Machine;

/// Largest pickle that is read, in bytes.
pub(crate) const MOST_BYTES: u64 = 512 << 20;

/// Index of a node.
pub type Id = u32;

/// A range of a pickle's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Span {
    /// First byte.
    pub begin: u32,
    /// Number of bytes.
    pub length: u32,
}

/// Elements that follow each other in the list of all elements, or of all entries. A list that grows beyond its
/// room moves to the end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Run {
    pub(super) begin: u32,
    pub(super) length: u32,
    pub(super) room: u32,
}

/// A value.
#[derive(Clone, Copy, Debug, PartialEq)]
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
    Text(Span),
    /// Bytes: a range of the pickle.
    Bytes(Span),
    /// A tuple.
    Tuple(Run),
    /// A list or set.
    List(Run),
    /// A dict, in order; a later entry replaces an earlier one with the same key.
    Dict(Run),
    /// A function or class, by its number.
    Global(u32),
    /// A call, or the making of an object, that Python would carry out.
    Call {
        /// The function or class, a [`Node::Global`].
        callable: Id,
        /// Its arguments, a tuple.
        arguments: Id,
        /// Number of its additions, or `u32::MAX`.
        additions: u32,
    },
    /// An object outside of the pickle, by its key: a storage of torch.
    Persistent(Id),
}

/// No number.
pub(super) const NONE: u32 = u32::MAX;

/// State that is set in an object after it was made.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Additions {
    pub(super) state: Option<Id>,
    /// Entries, as in an `OrderedDict`.
    pub(super) entries: Run,
    /// Elements, as in a `deque`.
    pub(super) elements: Run,
}

/// Everything that a pickle describes.
#[derive(Debug, Default)]
pub(super) struct Values {
    pub(super) nodes: Vec<Node>,
    /// Elements of tuples and lists.
    pub(super) elements: Vec<Id>,
    /// Entries of dicts.
    pub(super) entries: Vec<(Id, Id)>,
    /// Module and name of functions and classes.
    pub(super) globals: Vec<(Span, Span)>,
    pub(super) additions: Vec<Additions>,
}

/// A pickle that was read.
#[derive(Debug)]
pub struct Pickle<'a> {
    bytes: &'a [u8],
    values: Values,
    root: Id,
}

impl<'a> Pickle<'a> {
    /// Reads the pickle in `bytes`, which begin at byte `begin` of `file`.
    pub fn parse(bytes: &'a [u8], file: &'a Path, begin: u64) -> Result<Pickle<'a>> {
        let mut machine = Machine::new(bytes, file, begin);
        let root = machine.run()?;
        Ok(Pickle { bytes, values: machine.values, root })
    }

    /// Number of bytes of the pickle that `bytes` begin with; none if they end before it does.
    pub(crate) fn length(bytes: &[u8], file: &Path, begin: u64) -> Result<Option<usize>> {
        let mut machine = Machine::new(bytes, file, begin);
        match machine.run() {
            Ok(_) => Ok(Some(machine.at)),
            Err(_) if machine.is_cut => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The value of the whole pickle.
    pub fn root(&self) -> Id {
        self.root
    }

    /// A value.
    pub fn node(&self, id: Id) -> Node {
        self.values.nodes[id as usize]
    }

    /// Number of bytes.
    pub(crate) fn length_in_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Number of values.
    pub(crate) fn count_of_nodes(&self) -> usize {
        self.values.nodes.len()
    }

    /// The bytes of a range.
    pub fn span(&self, span: Span) -> &'a [u8] {
        &self.bytes[span.begin as usize..][..span.length as usize]
    }

    fn elements_of(&self, run: Run) -> &[Id] {
        &self.values.elements[run.begin as usize..][..run.length as usize]
    }

    fn entries_of(&self, run: Run) -> &[(Id, Id)] {
        &self.values.entries[run.begin as usize..][..run.length as usize]
    }

    /// A string, if the value is one.
    pub fn text(&self, id: Id) -> Option<&'a str> {
        match self.node(id) {
            Node::Text(span) => Some(self.text_of(span)),
            _ => None,
        }
    }

    fn text_of(&self, span: Span) -> &'a str {
        // Checked when the opcode was read.
        std::str::from_utf8(self.span(span)).unwrap_or_default()
    }

    /// An integer, if the value is one.
    pub fn int(&self, id: Id) -> Option<i64> {
        match self.node(id) {
            Node::Int(value) => Some(value),
            _ => None,
        }
    }

    /// An integer that is not negative, if the value is one.
    pub(crate) fn count(&self, id: Id) -> Option<u64> {
        self.int(id).and_then(|value| u64::try_from(value).ok())
    }

    /// The elements of a tuple, a list, or a `torch.Size`.
    pub fn elements(&self, id: Id) -> Option<&[Id]> {
        match self.node(id) {
            Node::Tuple(run) | Node::List(run) => Some(self.elements_of(run)),
            Node::Call { arguments, .. } if self.callable(id) == Some(("torch", "Size")) => {
                match self.node(arguments) {
                    Node::Tuple(arguments) => match self.node(*self.elements_of(arguments).first()?) {
                        Node::Tuple(run) | Node::List(run) => Some(self.elements_of(run)),
                        _ => None,
                    },
                    _ => None,
                }
            }
            _ => None,
        }
    }

    /// The counts of a `torch.Size`, a tuple or a list.
    pub(crate) fn counts(&self, id: Id) -> Option<Vec<u64>> {
        self.elements(id)?.iter().map(|element| self.count(*element)).collect()
    }

    /// The counts of a shape, strides or offsets, of at most 64 dimensions: as many as torch can use. A shape may
    /// be written once and used by every tensor.
    pub(crate) fn shape(&self, id: Id) -> Option<Vec<u64>> {
        const MOST_DIMENSIONS: usize = 64;
        self.elements(id).filter(|elements| elements.len() <= MOST_DIMENSIONS).and_then(|_| self.counts(id))
    }

    /// The entries of a dict, an `OrderedDict` or a `defaultdict`.
    pub fn entries(&self, id: Id) -> Option<&[(Id, Id)]> {
        match self.node(id) {
            Node::Dict(run) => Some(self.entries_of(run)),
            Node::Call { .. } => match self.callable(id)? {
                ("collections", "OrderedDict" | "defaultdict") => Some(self.added_entries(id)),
                _ => None,
            },
            _ => None,
        }
    }

    /// The value of a string key in a dict.
    pub fn entry(&self, id: Id, key: &str) -> Option<Id> {
        let is_key = |id: Id| matches!(self.node(id), Node::Text(span) if self.span(span) == key.as_bytes());
        self.entries(id)?.iter().rev().find(|(k, _)| is_key(*k)).map(|(_, value)| *value)
    }

    /// Module and name of a function or class.
    pub(crate) fn global(&self, id: Id) -> Option<(&'a str, &'a str)> {
        match self.node(id) {
            Node::Global(number) => {
                let (module, name) = self.values.globals[number as usize];
                Some((self.text_of(module), self.text_of(name)))
            }
            _ => None,
        }
    }

    /// Module and name of the function or class of a call.
    pub fn callable(&self, id: Id) -> Option<(&'a str, &'a str)> {
        match self.node(id) {
            Node::Call { callable, .. } => self.global(callable),
            _ => None,
        }
    }

    /// The arguments of a call.
    pub(crate) fn arguments(&self, id: Id) -> Option<&[Id]> {
        match self.node(id) {
            Node::Call { arguments, .. } => self.elements(arguments),
            _ => None,
        }
    }

    fn additions(&self, id: Id) -> Additions {
        match self.node(id) {
            Node::Call { additions, .. } if additions != NONE => self.values.additions[additions as usize],
            _ => Additions::default(),
        }
    }

    /// The entries that are set in an object.
    pub(crate) fn added_entries(&self, id: Id) -> &[(Id, Id)] {
        self.entries_of(self.additions(id).entries)
    }

    /// The elements that are appended to an object.
    pub(crate) fn added_elements(&self, id: Id) -> &[Id] {
        self.elements_of(self.additions(id).elements)
    }

    /// The state that is set in an object.
    pub(crate) fn added_state(&self, id: Id) -> Option<Id> {
        self.additions(id).state
    }

    /// The state of an object of this class.
    pub(crate) fn state(&self, id: Id, class: &str) -> Option<Id> {
        if self.callable(id)?.1 == class { self.added_state(id) } else { None }
    }

    /// The kind of a value in Python: `int`, or the name of a class.
    pub fn kind(&self, id: Id) -> String {
        let named = |(module, name): (&str, &str)| match module {
            "__builtin__" | "builtins" => name.to_string(),
            _ => format!("{module}.{name}"),
        };
        let simple = match self.node(id) {
            Node::None => "None",
            Node::Bool(_) => "bool",
            Node::Int(_) => "int",
            Node::Float(_) => "float",
            Node::Text(_) => "str",
            Node::Bytes(_) => "bytes",
            Node::Tuple(_) => "tuple",
            Node::List(_) => "list",
            Node::Dict(_) => "dict",
            Node::Persistent(_) => "object outside of the pickle",
            Node::Global(_) => return self.global(id).map(named).unwrap_or_default(),
            Node::Call { .. } => {
                let class = match self.callable(id) {
                    // Protocol 2 has no bytes.
                    Some(("_codecs", "encode")) => return "bytes".into(),
                    // The class is an argument of the function that makes its objects.
                    Some(("copy_reg" | "copyreg", "_reconstructor")) => {
                        self.arguments(id).and_then(|arguments| self.global(*arguments.first()?))
                    }
                    other => other,
                };
                return class.map(named).unwrap_or_default();
            }
        };
        simple.into()
    }
}
