//! Tensors in a file of `torch.save`: what its pickle says about them, and where their values lie.
//!
//! Every argument of the functions with which torch rebuilds a tensor is read:
//!
//! | argument | |
//! |---|---|
//! | storage, offset, size, stride, dtype, view of a parameter | the place of the values |
//! | requires_grad | a setting of training, which no weight has |
//! | backward_hooks | always empty; others are refused |
//! | metadata: the negative and the conjugate bit | refused: the values are stored without them |
//! | state: attributes of a parameter or a subclass | named and counted among what is left out |

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use ballast_contract::Dtype;
use ballast_files::assembly::{Part, row_major};
use ballast_files::{Error, Place, Result, ShardFile, header};

use super::archive::Archive;
use super::numpy;
use super::pickle::{Id, Node, Pickle};

/// A tensor by its parts, before it is part of a checkpoint.
#[derive(Clone, Debug)]
pub struct Found {
    /// Name.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Shape.
    pub shape: Vec<u64>,
    /// Places of its values.
    pub parts: Vec<Part>,
}

/// Kind of a value of a pickle.
pub(crate) enum Value {
    /// A tensor, and the attributes that were set in it.
    Tensor(Box<Found>, Option<Id>),
    /// A tensor that has no place in a checkpoint here: why, and what to do.
    Unsupported(String),
    /// Anything else.
    Other,
}

/// Most bytes of the pickle of a file with one tensor.
const MOST_BYTES_OF_ONE: u64 = 1 << 16;

/// The element type that torch calls by this name (`bfloat16`, or the storage `BFloat16Storage`).
pub(crate) fn dtype_of(name: &str) -> Option<Dtype> {
    Some(match name {
        "bfloat16" | "BFloat16Storage" => Dtype::Bf16,
        "float16" | "HalfStorage" => Dtype::F16,
        "float32" | "FloatStorage" => Dtype::F32,
        "float64" | "DoubleStorage" => Dtype::F64,
        "complex64" | "ComplexFloatStorage" => Dtype::C64,
        "float8_e4m3fn" => Dtype::F8E4M3,
        "float8_e5m2" => Dtype::F8E5M2,
        "float8_e4m3fnuz" => Dtype::F8E4M3Fnuz,
        "float8_e5m2fnuz" => Dtype::F8E5M2Fnuz,
        "float8_e8m0fnu" => Dtype::F8E8M0,
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

/// The element type of a storage. An untyped one counts bytes.
fn storage_dtype(class: &str) -> Option<Dtype> {
    if class == "UntypedStorage" { Some(Dtype::U8) } else { dtype_of(class) }
}

/// Bytes of an element of a storage, also of types that no tensor here has.
pub(super) fn storage_width(class: &str) -> Option<u64> {
    match class {
        "ComplexDoubleStorage" => Some(16),
        "QInt32Storage" => Some(4),
        "QInt8Storage" | "QUInt8Storage" | "QUInt4x2Storage" | "QUInt2x4Storage" => Some(1),
        _ => storage_dtype(class)?.bytes(),
    }
}

/// A storage: the bytes of the file that it occupies, its type, and its number of elements.
struct Storage {
    data: std::ops::Range<u64>,
    dtype: Dtype,
    length: u64,
}

/// The place of a tensor in its storage, in elements.
struct View {
    offset: u64,
    shape: Vec<u64>,
    strides: Vec<u64>,
}

/// A file of `torch.save`, with its pickle.
pub(crate) struct SavedPickle<'a> {
    pub(crate) pickle: &'a Pickle<'a>,
    pub(super) archive: &'a Archive,
    /// First byte of the pickle, for errors.
    pub(super) begin: u64,
    /// Arrays of numpy that were decoded, by their values in the pickle.
    pub(super) decoded: RefCell<HashMap<Id, Arc<ShardFile>>>,
}

/// A tensor, or why it is unsupported.
pub(super) type Supported<T> = Result<std::result::Result<T, String>>;

impl<'a> SavedPickle<'a> {
    pub(crate) fn new(pickle: &'a Pickle<'a>, archive: &'a Archive, begin: u64) -> SavedPickle<'a> {
        SavedPickle { pickle, archive, begin, decoded: RefCell::default() }
    }

    pub(crate) fn error(&self, name: &str, problem: impl Into<String>) -> Error {
        Error::Header {
            file: self.archive.file.path.clone(),
            place: Place { tensor: Some(name.into()), byte: Some(self.begin) },
            problem: problem.into(),
        }
    }

    pub(super) fn malformed(&self, name: &str) -> Error {
        self.error(name, "the pickle describes the tensor in a form that torch does not write")
    }

    /// Returns the kind of a value; `name` is for errors and for the result.
    pub(crate) fn value(&self, id: Id, name: &str) -> Result<Value> {
        self.value_in(id, name, None)
    }

    /// Returns the kind of a value, as the tensor of a parameter or a subclass if `attributes` has its attributes.
    fn value_in(&self, id: Id, name: &str, attributes: Option<Id>) -> Result<Value> {
        let pickle = self.pickle;
        if let Node::Persistent(key) = pickle.node(id) {
            return self.raw_storage(key, name);
        }
        let (Some(mut function), Some(mut arguments)) = (pickle.callable(id), pickle.arguments(id)) else {
            return Ok(Value::Other);
        };
        let malformed = || self.malformed(name);
        let mut attributes = attributes;
        // A subclass of torch.Tensor: the function and its arguments are arguments themselves.
        if function == ("torch._tensor", "_rebuild_from_type_v2") {
            let [inner, class, inner_arguments, state] = arguments else { return Err(malformed()) };
            let class = pickle.global(*class).ok_or_else(malformed)?;
            if !matches!(class, ("torch", "Tensor") | ("torch.nn.parameter", "Parameter" | "Buffer")) {
                let (module, class) = class;
                return Ok(Value::Unsupported(format!(
                    "it is a {module}.{class}, whose values may stand for others; save it as a plain tensor \
                     (a DTensor by full_tensor())"
                )));
            }
            attributes = Some(*state);
            function = pickle.global(*inner).ok_or_else(malformed)?;
            arguments = pickle.elements(*inner_arguments).ok_or_else(malformed)?;
        }
        match (function, arguments) {
            (("torch._utils", "_rebuild_parameter"), [inner, _, hooks]) => {
                self.parameter(*inner, *hooks, name, attributes)
            }
            (("torch._utils", "_rebuild_parameter_with_state"), [inner, _, hooks, state]) => {
                self.parameter(*inner, *hooks, name, Some(*state))
            }
            (("torch._utils", "_rebuild_tensor" | "_rebuild_tensor_v2" | "_rebuild_tensor_v3"), _) => {
                let tensor = self.rebuilt(function.1, arguments, name)?;
                Ok(match tensor {
                    Ok(tensor) => Value::Tensor(Box::new(tensor), attributes),
                    Err(reason) => Value::Unsupported(reason),
                })
            }
            (("torch._utils", "_rebuild_parameter" | "_rebuild_parameter_with_state"), _) => Err(malformed()),
            ((module, function), _) if function.starts_with("_rebuild") => {
                Ok(Value::Unsupported(unsupported_kind(module, function)))
            }
            _ => match numpy::array(self, id, name)? {
                Some(Ok(tensor)) => Ok(Value::Tensor(Box::new(tensor), None)),
                Some(Err(reason)) => Ok(Value::Unsupported(reason)),
                None => Ok(Value::Other),
            },
        }
    }

    /// A parameter, which holds a tensor and never another parameter.
    fn parameter(&self, inner: Id, hooks: Id, name: &str, attributes: Option<Id>) -> Result<Value> {
        if let Some(("torch._utils", "_rebuild_parameter" | "_rebuild_parameter_with_state")) =
            self.pickle.callable(inner)
        {
            return Err(self.malformed(name));
        }
        if let Err(reason) = self.no_hooks(hooks, name)? {
            return Ok(Value::Unsupported(reason));
        }
        match self.value_in(inner, name, attributes)? {
            Value::Other => Err(self.malformed(name)),
            value => Ok(value),
        }
    }

    fn no_hooks(&self, hooks: Id, name: &str) -> Supported<()> {
        let is_none = self.pickle.node(hooks) == Node::None;
        let entries = if is_none { Some(&[][..]) } else { self.pickle.entries(hooks) };
        let entries = entries.ok_or_else(|| self.malformed(name))?;
        Ok(match entries.len() {
            0 => Ok(()),
            _ => Err("it has backward hooks, which are code; save its values without them (tensor.detach())"
                .into()),
        })
    }

    /// The tensor that one of torch's functions rebuilds.
    fn rebuilt(&self, function: &str, arguments: &[Id], name: &str) -> Supported<Found> {
        let (pickle, malformed) = (self.pickle, || self.malformed(name));
        let [storage, offset, shape, strides, rest @ ..] = arguments else { return Err(malformed()) };
        // requires_grad is a setting of training.
        let (hooks, dtype, metadata) = match (function, rest) {
            ("_rebuild_tensor", []) => (None, None, None),
            ("_rebuild_tensor_v2", [_, hooks]) => (Some(*hooks), None, None),
            ("_rebuild_tensor_v2", [_, hooks, metadata]) => (Some(*hooks), None, Some(*metadata)),
            ("_rebuild_tensor_v3", [_, hooks, dtype]) => (Some(*hooks), Some(*dtype), None),
            ("_rebuild_tensor_v3", [_, hooks, dtype, metadata]) => {
                (Some(*hooks), Some(*dtype), Some(*metadata))
            }
            _ => return Err(malformed()),
        };
        if let Some(Err(reason)) = hooks.map(|hooks| self.no_hooks(hooks, name)).transpose()? {
            return Ok(Err(reason));
        }
        if let Some(Err(reason)) = metadata.map(|metadata| self.no_bits(metadata, name)).transpose()? {
            return Ok(Err(reason));
        }
        let Node::Persistent(key) = pickle.node(*storage) else { return Err(malformed()) };
        let storage = match self.storage(key, name)? {
            Ok(storage) => storage,
            Err(reason) => return Ok(Err(reason)),
        };
        let dtype = match dtype {
            None => storage.dtype,
            Some(dtype) => {
                let (_, dtype) = pickle.global(dtype).ok_or_else(malformed)?;
                match dtype_of(dtype) {
                    Some(dtype) => dtype,
                    None => return Ok(Err(unknown_type(dtype))),
                }
            }
        };
        let view = View {
            offset: pickle.count(*offset).ok_or_else(malformed)?,
            shape: pickle.shape(*shape).ok_or_else(malformed)?,
            strides: pickle.shape(*strides).ok_or_else(malformed)?,
        };
        self.viewed(&storage, dtype, view, name).map(Ok)
    }

    /// Checks the metadata of a tensor: the bits that change what its stored values mean.
    fn no_bits(&self, metadata: Id, name: &str) -> Supported<()> {
        if self.pickle.node(metadata) == Node::None {
            return Ok(Ok(()));
        }
        let entries = self.pickle.entries(metadata).ok_or_else(|| self.malformed(name))?;
        for (key, value) in entries {
            let key = self.pickle.text(*key).ok_or_else(|| self.malformed(name))?;
            return Ok(Err(match (key, self.pickle.node(*value)) {
                ("neg" | "conj", Node::Bool(false)) => continue,
                ("neg", Node::Bool(true)) => {
                    "its negative bit is set: its values are the stored ones with the \
                                              other sign; save tensor.resolve_neg()"
                        .into()
                }
                ("conj", Node::Bool(true)) => {
                    "its conjugate bit is set: its values are the conjugates of the \
                                               stored ones; save tensor.resolve_conj()"
                        .into()
                }
                _ => format!("its metadata has {key:?}, whose meaning is not known; save tensor.clone()"),
            }));
        }
        Ok(Ok(()))
    }

    /// A storage that is a value itself: a tensor of one dimension.
    fn raw_storage(&self, key: Id, name: &str) -> Result<Value> {
        let is_storage =
            self.pickle.elements(key).and_then(|key| self.pickle.text(*key.first()?)) == Some("storage");
        if !is_storage {
            return Ok(Value::Other);
        }
        let storage = match self.storage(key, name)? {
            Ok(storage) => storage,
            Err(reason) => return Ok(Value::Unsupported(reason)),
        };
        let view = View { offset: 0, shape: vec![storage.length], strides: vec![1] };
        Ok(Value::Tensor(Box::new(self.viewed(&storage, storage.dtype, view, name)?), None))
    }

    /// The storage with a key, which is `("storage", class, name, device, number of elements)`. Files before torch
    /// 1.6 add the part of another storage that it is, which [`super::legacy`] has checked.
    fn storage(&self, key: Id, name: &str) -> Supported<Storage> {
        let (pickle, malformed) = (self.pickle, || self.malformed(name));
        let Some([tag, class, key, _, length] | [tag, class, key, _, length, _]) = pickle.elements(key)
        else {
            return Err(malformed());
        };
        let (Some("storage"), Some((_, class)), Some(key), Some(length)) =
            (pickle.text(*tag), pickle.global(*class), pickle.text(*key), pickle.count(*length))
        else {
            return Err(malformed());
        };
        let Some(dtype) = storage_dtype(class) else {
            return Ok(Err(unknown_type(class)));
        };
        let width = dtype.bytes().ok_or_else(malformed)?;
        let Some(data) = self.archive.entry(&format!("data/{key}")) else {
            return Err(self.error(name, format!("its values are missing: the file has no entry data/{key}")));
        };
        let bytes = data.end - data.start;
        if length.checked_mul(width) != Some(bytes) {
            let problem =
                format!("its storage data/{key} has {bytes} bytes, expected {length} elements of {dtype}");
            return Err(self.error(name, problem));
        }
        Ok(Ok(Storage { data, dtype, length }))
    }

    /// The tensor that is a view of a storage.
    fn viewed(&self, storage: &Storage, dtype: Dtype, view: View, name: &str) -> Result<Found> {
        let View { offset, shape, strides } = view;
        let width = dtype.bytes().ok_or_else(|| self.malformed(name))?;
        let elements = header::elements(&shape).filter(|elements| elements.checked_mul(width).is_some());
        let (Some(elements), true) = (elements, strides.len() == shape.len()) else {
            return Err(self.malformed(name));
        };
        let reach = shape.iter().zip(&strides).try_fold(offset, |sum, (size, stride)| {
            sum.checked_add(size.saturating_sub(1).checked_mul(*stride)?)
        });
        let end = reach.and_then(|reach| reach.checked_add(1)?.checked_mul(width));
        if elements > 0 && end.is_none_or(|end| end > storage.data.end - storage.data.start) {
            let length = storage.length;
            let problem = format!(
                "shape {shape:?} with strides {strides:?} from element {offset} on reaches past its storage of {length} elements"
            );
            return Err(self.error(name, problem));
        }
        let begin = storage.data.start + if elements > 0 { offset * width } else { 0 };
        let strides = if elements > 0 { strides } else { row_major(&shape) };
        let offsets = vec![0; shape.len()];
        let part = Part { offsets, sizes: shape.clone(), strides, file: self.archive.file.clone(), begin };
        Ok(Found { name: name.into(), dtype, shape, parts: vec![part] })
    }
}

fn unknown_type(name: &str) -> String {
    format!("its type is torch.{name}, which no checkpoint here has; save it as another type")
}

/// Reason why a tensor that torch rebuilds by another function is unsupported.
fn unsupported_kind(module: &str, function: &str) -> String {
    let kind = match function {
        "_rebuild_sparse_tensor" | "_rebuild_sparse_csr_tensor" => "it is sparse; save tensor.to_dense()",
        "_rebuild_qtensor" => "it is quantized by torch; save tensor.dequantize()",
        "_rebuild_nested_tensor" => "it is a nested tensor; save its parts (tensor.unbind())",
        "_rebuild_meta_tensor_no_storage" => "it is on the device \"meta\", so it has no values",
        "_rebuild_device_tensor_from_numpy"
        | "_rebuild_device_tensor_from_cpu_tensor"
        | "_rebuild_xla_tensor" => "it was saved from a device without storages; save tensor.cpu()",
        _ => "its kind is not known; save it as a plain tensor",
    };
    format!("{kind} ({module}.{function})")
}

/// Reads a file of `torch.save` that holds one tensor, at a range of a file.
pub(crate) fn single_tensor(
    file: &Arc<ShardFile>,
    window: std::ops::Range<u64>,
    name: &str,
) -> Result<Found> {
    let archive = Archive::open(file, window)?;
    let (bytes, begin) = archive.pickle_up_to(MOST_BYTES_OF_ONE)?;
    let pickle = Pickle::parse(&bytes, &file.path, begin)?;
    let saved = SavedPickle::new(&pickle, &archive, begin);
    match saved.value(pickle.root(), name)? {
        Value::Tensor(tensor, _) => Ok(*tensor),
        Value::Unsupported(reason) => Err(saved.error(name, reason)),
        Value::Other => Err(saved.error(name, "expected a tensor here")),
    }
}
