//! Arrays of numpy in a pickle, as tensors.
//!
//! ```text
//! _reconstruct(ndarray, (0,), b'b') with state (version, shape, dtype, is in Fortran order, data)
//! _frombuffer(data, dtype, shape, 'C' or 'F')
//! dtype('f4', ...) with state (version, byte order, ...)
//! ```
//! Protocol 2, which `torch.save` uses, has no bytes: they are the call `_codecs.encode(text, 'latin1')`, and are
//! decoded into memory.

use std::sync::Arc;

use ballast_contract::Dtype;
use ballast_files::assembly::{Part, row_major};
use ballast_files::{Result, ShardFile, header};

use super::pickle::{Id, Node, Pickle};
use super::saved::{Found, SavedPickle, Supported};

/// An array, by the parts of the pickle that describe it.
struct Array {
    shape: Id,
    dtype: Id,
    is_fortran: bool,
    data: Id,
}

/// The array that a value is, if it is one.
pub(super) fn array(
    saved: &SavedPickle<'_>,
    id: Id,
    name: &str,
) -> Result<Option<std::result::Result<Found, String>>> {
    match described(saved.pickle, id) {
        None => Ok(None),
        Some(None) => {
            Err(saved.error(name, "the pickle describes the array in a form that numpy does not write"))
        }
        Some(Some(array)) => read(saved, &array, name).map(Some),
    }
}

/// The description of an array: none if the value is not one, and none within if it is malformed.
fn described(pickle: &Pickle<'_>, id: Id) -> Option<Option<Array>> {
    let arguments = pickle.arguments(id)?;
    let array = |shape: &Id, dtype: &Id, is_fortran, data: &Id| {
        Some(Array { shape: *shape, dtype: *dtype, is_fortran, data: *data })
    };
    match pickle.callable(id)? {
        ("numpy._core.multiarray" | "numpy.core.multiarray", "_reconstruct") => {
            let state = pickle.added_state(id).and_then(|state| pickle.elements(state));
            Some(match state {
                Some([_, shape, dtype, fortran, data]) => match pickle.node(*fortran) {
                    Node::Bool(is_fortran) => array(shape, dtype, is_fortran, data),
                    Node::Int(is_fortran) => array(shape, dtype, is_fortran != 0, data),
                    _ => None,
                },
                _ => None,
            })
        }
        ("numpy._core.numeric" | "numpy.core.numeric", "_frombuffer") => Some(match arguments {
            [data, dtype, shape, order] => match pickle.text(*order) {
                Some("C") => array(shape, dtype, false, data),
                Some("F") => array(shape, dtype, true, data),
                _ => None,
            },
            _ => None,
        }),
        _ => None,
    }
}

fn read(saved: &SavedPickle<'_>, array: &Array, name: &str) -> Supported<Found> {
    let malformed =
        || saved.error(name, "the pickle describes the array in a form that numpy does not write");
    let dtype = match dtype(saved.pickle, array.dtype) {
        Some(Ok(dtype)) => dtype,
        Some(Err(code)) => {
            let reason = format!(
                "it is an array of numpy of type {code:?}, which no checkpoint here has; save it as another type"
            );
            return Ok(Err(reason));
        }
        None => return Err(malformed()),
    };
    let shape = saved.pickle.shape(array.shape).ok_or_else(malformed)?;
    let bytes =
        header::elements(&shape).and_then(|elements| dtype.bytes_for(elements)).ok_or_else(malformed)?;
    let (file, begin, length) = data(saved, array.data).ok_or_else(malformed)?;
    if length != bytes {
        let problem =
            format!("its array of numpy has {length} bytes, expected {bytes} for {dtype} {shape:?}");
        return Err(saved.error(name, problem));
    }
    let strides = if array.is_fortran { column_major(&shape) } else { row_major(&shape) };
    let part = Part { offsets: vec![0; shape.len()], sizes: shape.clone(), strides, file, begin };
    Ok(Ok(Found { name: name.into(), dtype, shape, parts: vec![part] }))
}

fn column_major(shape: &[u64]) -> Vec<u64> {
    let mut strides: Vec<u64> = row_major(&shape.iter().rev().copied().collect::<Vec<u64>>());
    strides.reverse();
    strides
}

/// The element type of an array, or its name if it has none here.
fn dtype(pickle: &Pickle<'_>, id: Id) -> Option<std::result::Result<Dtype, String>> {
    if pickle.callable(id)? != ("numpy", "dtype") {
        return None;
    }
    let code = pickle.text(*pickle.arguments(id)?.first()?)?;
    let state = pickle.added_state(id).and_then(|state| pickle.elements(state))?;
    let order = pickle.text(*state.get(1)?)?;
    let dtype = match code {
        "b1" => Dtype::Bool,
        "i1" => Dtype::I8,
        "i2" => Dtype::I16,
        "i4" => Dtype::I32,
        "i8" => Dtype::I64,
        "u1" => Dtype::U8,
        "u2" => Dtype::U16,
        "u4" => Dtype::U32,
        "u8" => Dtype::U64,
        "f2" => Dtype::F16,
        "f4" => Dtype::F32,
        "f8" => Dtype::F64,
        "c8" => Dtype::C64,
        other => return Some(Err(format!("{order}{other}"))),
    };
    Some(if order == ">" { Err(format!(">{code}")) } else { Ok(dtype) })
}

/// The bytes of an array: a file, the first byte in it, and their number.
fn data(saved: &SavedPickle<'_>, id: Id) -> Option<(Arc<ShardFile>, u64, u64)> {
    let pickle = saved.pickle;
    // Text is what Python 2 wrote for bytes that happen to be UTF-8.
    if let Node::Bytes(span) | Node::Text(span) = pickle.node(id) {
        let begin = saved.begin + u64::from(span.begin);
        return Some((saved.archive.file.clone(), begin, span.length.into()));
    }
    match pickle.callable(id)? {
        // Protocol 2 for no bytes at all.
        ("__builtin__", "bytes") if pickle.arguments(id)?.is_empty() => {
            return Some((saved.archive.file.clone(), saved.begin, 0));
        }
        ("_codecs", "encode") => {}
        _ => return None,
    }
    let [text, encoding] = pickle.arguments(id)? else { return None };
    if pickle.text(*encoding)? != "latin1" {
        return None;
    }
    let known = saved.decoded.borrow().get(text).cloned();
    let file = match known {
        Some(file) => file,
        None => {
            let bytes = pickle.text(*text)?.chars().map(|c| u8::try_from(u32::from(c)).ok());
            let bytes = bytes.collect::<Option<Vec<u8>>>()?;
            let file = Arc::new(ShardFile::in_memory(&saved.archive.file.path, bytes));
            saved.decoded.borrow_mut().insert(*text, file.clone());
            file
        }
    };
    let length = file.bytes;
    Some((file, 0, length))
}
