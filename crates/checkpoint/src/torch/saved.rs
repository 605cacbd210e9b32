//! Tensors in a file of `torch.save`: what its pickle says about them, and where their values lie.

use std::sync::Arc;

use ballast_contract::Dtype;

use super::archive::Archive;
use super::pickle::{Id, Node, Pickle};
use crate::assembly::{Part, row_major};
use crate::error::{Error, Place, Result};
use crate::header;
use crate::shard_file::ShardFile;

/// A tensor by its parts, before it is part of a checkpoint.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
    pub(crate) parts: Vec<Part>,
}

/// Deepest nesting of dicts and lists in which tensors are looked for, and the most values looked at.
const MOST_LEVELS: usize = 64;
const MOST_VALUES: usize = 1 << 22;

/// The element type that torch calls by this name (`bfloat16`, or the storage `BFloat16Storage`).
pub(crate) fn dtype_of(name: &str) -> Option<Dtype> {
    Some(match name {
        "bfloat16" | "BFloat16Storage" => Dtype::Bf16,
        "float16" | "HalfStorage" => Dtype::F16,
        "float32" | "FloatStorage" => Dtype::F32,
        "float64" | "DoubleStorage" => Dtype::F64,
        "float8_e4m3fn" => Dtype::F8E4M3,
        "float8_e5m2" => Dtype::F8E5M2,
        "int8" | "CharStorage" => Dtype::I8,
        "int16" | "ShortStorage" => Dtype::I16,
        "int32" | "IntStorage" => Dtype::I32,
        "int64" | "LongStorage" => Dtype::I64,
        "uint8" | "ByteStorage" => Dtype::U8,
        "uint16" => Dtype::U16,
        "uint32" => Dtype::U32,
        "uint64" => Dtype::U64,
        "bool" | "BoolStorage" => Dtype::Bool,
        _ => return None,
    })
}

/// A file of `torch.save`, with its pickle.
pub(crate) struct Saved<'a> {
    pub(crate) pickle: &'a Pickle<'a>,
    archive: &'a Archive,
    /// First byte of the pickle, for errors.
    begin: u64,
}

impl<'a> Saved<'a> {
    pub(crate) fn new(pickle: &'a Pickle<'a>, archive: &'a Archive, begin: u64) -> Saved<'a> {
        Saved { pickle, archive, begin }
    }

    fn error(&self, name: &str, problem: impl Into<String>) -> Error {
        Error::Header {
            file: self.archive.file.path.clone(),
            place: Place { tensor: Some(name.into()), byte: Some(self.begin) },
            problem: problem.into(),
        }
    }

    /// The tensor that a value is, if it is one; `name` is for errors and for the result.
    pub(crate) fn tensor(&self, id: Id, name: &str) -> Result<Option<Found>> {
        let pickle = self.pickle;
        let (Some(mut function), Some(mut arguments)) = (pickle.callable(id), pickle.arguments(id)) else {
            return Ok(None);
        };
        let malformed =
            || self.error(name, "the pickle describes the tensor in a form that torch does not write");
        // A subclass of torch.Tensor: the function and its arguments are arguments themselves.
        if function == ("torch._tensor", "_rebuild_from_type_v2") {
            let [inner, _, inner_arguments, ..] = arguments else { return Err(malformed()) };
            function = pickle.global(*inner).ok_or_else(malformed)?;
            arguments = pickle.elements(*inner_arguments).ok_or_else(malformed)?;
        }
        match function {
            ("torch._utils", "_rebuild_parameter") => {
                let [inner, ..] = arguments else { return Err(malformed()) };
                // A parameter holds a tensor, never another parameter.
                if pickle.callable(*inner) == Some(function) {
                    return Err(malformed());
                }
                return self.tensor(*inner, name);
            }
            ("torch._utils", "_rebuild_tensor" | "_rebuild_tensor_v2" | "_rebuild_tensor_v3") => {}
            _ => return Ok(None),
        }
        let [storage, offset, shape, strides, rest @ ..] = arguments else { return Err(malformed()) };
        let offset = pickle.count(*offset).ok_or_else(malformed)?;
        let shape = pickle.counts(*shape).ok_or_else(malformed)?;
        let strides = pickle.counts(*strides).ok_or_else(malformed)?;
        let stated = match (function.1, rest) {
            ("_rebuild_tensor_v3", [_, _, dtype, ..]) => {
                let (_, dtype) = pickle.global(*dtype).ok_or_else(malformed)?;
                Some(dtype_of(dtype).ok_or_else(|| self.error(name, format!("unknown type torch.{dtype}")))?)
            }
            ("_rebuild_tensor_v3", _) => return Err(malformed()),
            _ => None,
        };
        let Node::Persistent(key) = pickle.node(*storage) else { return Err(malformed()) };
        let Some([tag, class, key, _, length]) = pickle.elements(*key) else { return Err(malformed()) };
        let (Some("storage"), Some((_, class)), Some(key), Some(length)) =
            (pickle.text(*tag), pickle.global(*class), pickle.text(*key), pickle.count(*length))
        else {
            return Err(malformed());
        };
        // An untyped storage counts bytes.
        let stored = if class == "UntypedStorage" { Some(Dtype::U8) } else { dtype_of(class) };
        let stored = stored.ok_or_else(|| self.error(name, format!("unknown storage torch.{class}")))?;
        let dtype = stated.unwrap_or(stored);
        let (Some(width), Some(stored_width)) = (dtype.bytes(), stored.bytes()) else {
            return Err(malformed());
        };
        let Some(data) = self.archive.entry(&format!("data/{key}")) else {
            return Err(self.error(name, format!("its values are missing: the file has no entry data/{key}")));
        };
        if length.checked_mul(stored_width) != Some(data.end - data.start) {
            let problem = format!(
                "its storage data/{key} has {} bytes, expected {length} elements of {stored}",
                data.end - data.start
            );
            return Err(self.error(name, problem));
        }
        let elements = header::elements(&shape).filter(|elements| elements.checked_mul(width).is_some());
        let (Some(elements), true) = (elements, strides.len() == shape.len()) else {
            return Err(malformed());
        };
        let reach = shape.iter().zip(&strides).try_fold(offset, |sum, (size, stride)| {
            sum.checked_add(size.saturating_sub(1).checked_mul(*stride)?)
        });
        let end = reach.and_then(|reach| reach.checked_add(1)?.checked_mul(width));
        if elements > 0 && end.is_none_or(|end| end > data.end - data.start) {
            let problem = format!(
                "shape {shape:?} with strides {strides:?} from element {offset} on reaches past its storage of {length} elements"
            );
            return Err(self.error(name, problem));
        }
        let begin = data.start + if elements > 0 { offset * width } else { 0 };
        let strides = if elements > 0 { strides } else { row_major(&shape) };
        let offsets = vec![0; shape.len()];
        let part = Part { offsets, sizes: shape.clone(), strides, file: self.archive.file.clone(), begin };
        Ok(Some(Found { name: name.into(), dtype, shape, parts: vec![part] }))
    }

    /// All tensors below a value, named by the keys and positions that lead to them.
    pub(crate) fn tensors(&self, id: Id, name: &str) -> Result<Vec<Found>> {
        let mut found = Vec::new();
        let mut looked_at = 0;
        // Values to look at, the next one last.
        let mut waiting = vec![(id, name.to_string(), 0)];
        while let Some((id, name, level)) = waiting.pop() {
            looked_at += 1;
            if looked_at > MOST_VALUES || level > MOST_LEVELS {
                let problem = format!(
                    "the file has more than {MOST_VALUES} values or {MOST_LEVELS} levels of them: it is not a checkpoint"
                );
                return Err(self.error(&name, problem));
            }
            if let Some(tensor) = self.tensor(id, &name)? {
                found.push(tensor);
                continue;
            }
            let below = |key: &str| if name.is_empty() { key.to_string() } else { format!("{name}.{key}") };
            if let Some(entries) = self.pickle.entries(id) {
                for (key, value) in entries.iter().rev() {
                    let key = match self.pickle.node(*key) {
                        Node::Int(number) => number.to_string(),
                        _ => self.pickle.text(*key).unwrap_or("?").to_string(),
                    };
                    waiting.push((*value, below(&key), level + 1));
                }
            } else if let Node::Tuple(elements) | Node::List(elements) = self.pickle.node(id) {
                for (number, value) in elements.iter().enumerate().rev() {
                    waiting.push((*value, below(&number.to_string()), level + 1));
                }
            }
        }
        Ok(found)
    }
}

/// Reads a file of `torch.save` that holds one tensor, at a range of a file.
pub(crate) fn single_tensor(
    file: &Arc<ShardFile>,
    window: std::ops::Range<u64>,
    name: &str,
) -> Result<Found> {
    let archive = Archive::open(file, window)?;
    let (bytes, begin) = archive.pickle()?;
    let pickle = Pickle::parse(&bytes, &file.path, begin)?;
    let saved = Saved::new(&pickle, &archive, begin);
    saved.tensor(pickle.root(), name)?.ok_or_else(|| saved.error(name, "expected a tensor here"))
}
