//! The stack machine that reads a pickle ([`super::pickle`]).

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use ballast_files::{Error, Place, Result};

use super::globals;
use super::pickle::{Additions, Id, NONE, Node, Run, Span, Values};

/// Largest number of values, and of those that wait on the stack.
const MOST_NODES: usize = 1 << 25;
const MOST_WAITING: usize = 1 << 24;
/// Longest name of a function or class with its module, in bytes.
const LONGEST_NAME: usize = 1024;

/// Nodes that every machine begins with, because they can be written in one byte or two: None, the truth values,
/// the empty tuple, and the integers of one byte.
const SHARED_NONE: Id = 0;
const SHARED_FALSE: Id = 1;
const SHARED_TRUE: Id = 2;
const SHARED_TUPLE: Id = 3;
const SHARED_INT: Id = 4;

/// A machine that reads one pickle.
pub(super) struct Machine<'a> {
    file: &'a Path,
    /// Byte of the file at which the pickle begins, for errors.
    begin: u64,
    bytes: &'a [u8],
    pub(super) at: usize,
    /// True after an error because the bytes ended.
    pub(super) is_cut: bool,
    pub(super) values: Values,
    stack: Vec<Id>,
    marks: Vec<u32>,
    memo: Memo,
}

/// Values that are stored for later use, by number. Python counts them from 0, so a list holds them; a number
/// beyond the bytes read so far, which no list should grow to, goes into a map.
#[derive(Default)]
struct Memo {
    near: Vec<Id>,
    far: HashMap<u32, Id>,
    count: u32,
}

impl Memo {
    fn get(&self, number: u32) -> Option<Id> {
        let near = self.near.get(number as usize).copied().filter(|id| *id != NONE);
        near.or_else(|| self.far.get(&number).copied())
    }

    /// Stores a value after `read` bytes.
    fn put(&mut self, number: u32, id: Id, read: usize) {
        if self.get(number).is_none() {
            self.count += 1;
        }
        let place = number as usize;
        if place >= read {
            self.far.insert(number, id);
            return;
        }
        if place >= self.near.len() {
            self.near.resize(place + 1, NONE);
        }
        self.near[place] = id;
    }
}

/// Appends values to a run of `all`, with room for as many again.
fn extend<T: Copy>(all: &mut Vec<T>, run: &mut Run, values: &[T]) -> Option<()> {
    let Some(&last) = values.last() else { return Some(()) };
    let (begin, length) = (run.begin as usize, run.length as usize);
    let wanted = length + values.len();
    if wanted > run.room as usize {
        let room = if length == 0 { wanted } else { 2 * wanted };
        let moved = all.len();
        u32::try_from(moved + room).ok()?;
        all.extend_from_within(begin..begin + length);
        all.extend_from_slice(values);
        // The room holds copies of the last value until it is used.
        all.resize(moved + room, last);
        *run = Run { begin: moved as u32, length: wanted as u32, room: room as u32 };
    } else {
        all[begin + length..begin + wanted].copy_from_slice(values);
        run.length = wanted as u32;
    }
    Some(())
}

impl<'a> Machine<'a> {
    /// A machine for the pickle that `bytes` begin with, at byte `begin` of `file`.
    pub(super) fn new(bytes: &'a [u8], file: &'a Path, begin: u64) -> Machine<'a> {
        let mut nodes = vec![Node::None, Node::Bool(false), Node::Bool(true), Node::Tuple(Run::default())];
        nodes.extend((0..=255).map(Node::Int));
        let values = Values { nodes, ..Values::default() };
        let (stack, marks, memo) = (Vec::new(), Vec::new(), Memo::default());
        Machine { file, begin, bytes, at: 0, is_cut: false, values, stack, marks, memo }
    }

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
                self.is_cut = true;
                let problem = format!("the pickle ends within a value of {count} bytes: truncated?");
                Err(self.error(self.at, problem))
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
            self.is_cut = true;
            return Err(self.error(self.at, "the pickle ends within a line: truncated?"));
        };
        let range = self.text(length)?;
        self.at += 1;
        Ok(range)
    }

    fn push(&mut self, node: Node) {
        self.stack.push(self.values.nodes.len() as Id);
        self.values.nodes.push(node);
    }

    /// The range of a pickle, which has at most [`super::pickle::MOST_BYTES`].
    fn span(range: Range<usize>) -> Span {
        Span { begin: range.start as u32, length: range.len() as u32 }
    }

    fn pop(&mut self) -> Result<Id> {
        // Values below a mark belong to what is being built there.
        if self.stack.len() > self.marks.last().map_or(0, |mark| *mark as usize)
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
        Ok(self.stack.split_off(mark as usize))
    }

    /// Takes `count` values from the stack as a tuple.
    fn tuple(&mut self, count: usize) -> Result<()> {
        let mut elements = [NONE; 3];
        for element in elements[..count].iter_mut().rev() {
            *element = self.pop()?;
        }
        let run = self.run_of(&elements[..count])?;
        self.push(Node::Tuple(run));
        Ok(())
    }

    fn too_many(&self) -> Error {
        self.error(self.at, "the pickle has too many values")
    }

    /// A run of elements.
    fn run_of(&mut self, elements: &[Id]) -> Result<Run> {
        let mut run = Run::default();
        extend(&mut self.values.elements, &mut run, elements).ok_or_else(|| self.too_many())?;
        Ok(run)
    }

    fn pairs(&self, values: &[Id]) -> Result<Vec<(Id, Id)>> {
        let (pairs, []) = values.as_chunks::<2>() else {
            return Err(self.error(self.at, "a dict entry without a value"));
        };
        Ok(pairs.iter().map(|[key, value]| (*key, *value)).collect())
    }

    fn put(&mut self, number: usize) -> Result<()> {
        let top = self.top()?;
        let number = u32::try_from(number).map_err(|_| self.too_many())?;
        self.memo.put(number, top, self.at);
        Ok(())
    }

    fn get(&mut self, at: usize, number: usize) -> Result<()> {
        match u32::try_from(number).ok().and_then(|number| self.memo.get(number)) {
            Some(id) => {
                self.stack.push(id);
                Ok(())
            }
            None => Err(self.error(at, format!("value {number} is used before it is stored"))),
        }
    }

    /// Checks the name of a function or class.
    fn global(&mut self, at: usize, module: Span, name: Span) -> Result<()> {
        let bytes = |span: Span| &self.bytes[span.begin as usize..][..span.length as usize];
        let length = module.length as usize + name.length as usize;
        if length > LONGEST_NAME {
            let problem =
                format!("a function or class has a name of {length} bytes; at most {LONGEST_NAME} are read");
            return Err(self.error(at, problem));
        }
        let [module_name, own_name] = [module, name].map(|span| String::from_utf8_lossy(bytes(span)));
        if !globals::is_accepted(&module_name, &own_name) {
            let problem = format!(
                "the pickle names {module_name}.{own_name}, which is not among the functions and classes of tensors; \
                 nothing was executed. If you trust the file, save its tensors as safetensors with Python"
            );
            return Err(self.error(at, problem));
        }
        self.values.globals.push((module, name));
        self.push(Node::Global(self.values.globals.len() as u32 - 1));
        Ok(())
    }

    fn call(&mut self, at: usize) -> Result<()> {
        let (arguments, callable) = (self.pop()?, self.pop()?);
        let callable = self.class_of_module(callable);
        if !matches!(self.node(callable), Node::Global(..)) {
            return Err(self.error(at, "a call of something that is not a named function or class"));
        }
        if !matches!(self.node(arguments), Node::Tuple(_)) {
            return Err(self.error(at, "a call whose arguments are not a tuple"));
        }
        self.push(Node::Call { callable, arguments, additions: NONE });
        Ok(())
    }

    /// The class of a module, which files before torch 1.6 have with its source code; other values are themselves.
    fn class_of_module(&self, id: Id) -> Id {
        let Node::Persistent(key) = self.node(id) else { return id };
        let Node::Tuple(run) = self.node(key) else { return id };
        match self.values.elements[run.begin as usize..][..run.length as usize] {
            [_, class, _, _] => class,
            _ => id,
        }
    }

    fn node(&self, id: Id) -> Node {
        self.values.nodes[id as usize]
    }

    /// State of the object on top of the stack; none if it is not an object.
    fn additions(&mut self) -> Result<Option<&mut Additions>> {
        let object = self.top()?;
        let Node::Call { additions, .. } = &mut self.values.nodes[object as usize] else { return Ok(None) };
        if *additions == NONE {
            *additions = self.values.additions.len() as u32;
            self.values.additions.push(Additions::default());
        }
        Ok(self.values.additions.get_mut(*additions as usize))
    }

    fn append(&mut self, at: usize, values: &[Id]) -> Result<()> {
        let list = self.top()?;
        let done = match self.node(list) {
            Node::List(mut run) => {
                let done = extend(&mut self.values.elements, &mut run, values);
                self.values.nodes[list as usize] = Node::List(run);
                done
            }
            Node::Call { .. } => {
                let mut run = self.additions()?.map(|own| own.elements).unwrap_or_default();
                let done = extend(&mut self.values.elements, &mut run, values);
                if let Some(own) = self.additions()? {
                    own.elements = run;
                }
                done
            }
            _ => return Err(self.error(at, "elements are appended to something that is not a list")),
        };
        done.ok_or_else(|| self.too_many())
    }

    fn set_entries(&mut self, at: usize, pairs: &[(Id, Id)]) -> Result<()> {
        let dict = self.top()?;
        let done = match self.node(dict) {
            Node::Dict(mut run) => {
                let done = extend(&mut self.values.entries, &mut run, pairs);
                self.values.nodes[dict as usize] = Node::Dict(run);
                done
            }
            Node::Call { .. } => {
                let mut run = self.additions()?.map(|own| own.entries).unwrap_or_default();
                let done = extend(&mut self.values.entries, &mut run, pairs);
                if let Some(own) = self.additions()? {
                    own.entries = run;
                }
                done
            }
            _ => return Err(self.error(at, "entries are set in something that is not a dict")),
        };
        done.ok_or_else(|| self.too_many())
    }

    fn build(&mut self, at: usize) -> Result<()> {
        let given = self.pop()?;
        match self.additions()? {
            Some(own) => {
                own.state = Some(given);
                Ok(())
            }
            None => Err(self.error(at, "state is set in something that is not an object")),
        }
    }

    /// An integer of any length, little endian, in two's complement.
    fn long(&mut self, length: usize) -> Result<()> {
        let range = self.take(length)?;
        let bytes = &self.bytes[range.clone()];
        if length > 8 {
            self.push(Node::Bytes(Self::span(range)));
            return Ok(());
        }
        let sign = bytes.last().is_some_and(|byte| *byte >= 0x80);
        let mut all = [if sign { 0xff } else { 0 }; 8];
        all[..length].copy_from_slice(bytes);
        self.push(Node::Int(i64::from_le_bytes(all)));
        Ok(())
    }

    /// Runs the pickle to its end and returns its value.
    pub(super) fn run(&mut self) -> Result<Id> {
        loop {
            let at = self.at;
            if self.values.nodes.len() > MOST_NODES {
                return Err(self.error(at, format!("the pickle has more than {MOST_NODES} values")));
            }
            if self.stack.len() + self.marks.len() > MOST_WAITING {
                let problem = format!("more than {MOST_WAITING} values are pushed and not used");
                return Err(self.error(at, problem));
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
                b'(' => self.marks.push(self.stack.len() as u32),
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
                b'N' => self.stack.push(SHARED_NONE),
                0x88 => self.stack.push(SHARED_TRUE),
                0x89 => self.stack.push(SHARED_FALSE),
                b'J' => {
                    let value = i32::from_le_bytes(self.fixed()?);
                    self.push(Node::Int(value.into()));
                }
                b'K' => {
                    let [value] = self.fixed()?;
                    self.stack.push(SHARED_INT + Id::from(value));
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
                b'C' => self.push_bytes::<1>()?,
                b'B' => self.push_bytes::<4>()?,
                b'U' => self.push_string::<1>()?,
                b'T' => self.push_string::<4>()?,
                0x8e | 0x96 => self.push_bytes::<8>()?,
                b')' => self.stack.push(SHARED_TUPLE),
                0x85 => self.tuple(1)?,
                0x86 => self.tuple(2)?,
                0x87 => self.tuple(3)?,
                b't' => {
                    let elements = self.pop_mark()?;
                    let run = self.run_of(&elements)?;
                    self.push(Node::Tuple(run));
                }
                b']' | 0x8f => self.push(Node::List(Run::default())),
                b'l' | 0x91 => {
                    let elements = self.pop_mark()?;
                    let run = self.run_of(&elements)?;
                    self.push(Node::List(run));
                }
                b'a' => {
                    let value = self.pop()?;
                    self.append(at, &[value])?;
                }
                b'e' | 0x90 => {
                    let values = self.pop_mark()?;
                    self.append(at, &values)?;
                }
                b'}' => self.push(Node::Dict(Run::default())),
                b'd' => {
                    let values = self.pop_mark()?;
                    let pairs = self.pairs(&values)?;
                    self.push(Node::Dict(Run::default()));
                    self.set_entries(at, &pairs)?;
                }
                b's' => {
                    let (value, key) = (self.pop()?, self.pop()?);
                    self.set_entries(at, &[(key, value)])?;
                }
                b'u' => {
                    let values = self.pop_mark()?;
                    let pairs = self.pairs(&values)?;
                    self.set_entries(at, &pairs)?;
                }
                b'q' => {
                    let [index] = self.fixed()?;
                    self.put(index.into())?;
                }
                b'r' => {
                    let index = self.length::<4>()?;
                    self.put(index)?;
                }
                0x94 => self.put(self.memo.count as usize)?,
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
                    self.global(at, Self::span(module), Self::span(name))?;
                }
                0x93 => {
                    let (name, module) = (self.pop()?, self.pop()?);
                    match (self.node(module), self.node(name)) {
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
        self.push(Node::Text(Self::span(range)));
        Ok(())
    }

    fn push_bytes<const N: usize>(&mut self) -> Result<()> {
        let length = self.length::<N>()?;
        let range = self.take(length)?;
        self.push(Node::Bytes(Self::span(range)));
        Ok(())
    }

    /// A string of Python 2, which is text or bytes.
    fn push_string<const N: usize>(&mut self) -> Result<()> {
        let length = self.length::<N>()?;
        let range = self.take(length)?;
        let is_text = std::str::from_utf8(&self.bytes[range.clone()]).is_ok();
        let span = Self::span(range);
        self.push(if is_text { Node::Text(span) } else { Node::Bytes(span) });
        Ok(())
    }
}

#[cfg(test)]
mod tests;
