//! A tensor whose parts lie in several places, read as if it were in one.
//!
//! The tensor of shape [d0, d1, ...] is divided into boxes. Element `i` of the row-major tensor is looked up in
//! the box that holds it, and as many elements as lie there in a row are read at once.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use crate::error::{Error, Place, Result};
use crate::shard_file::{ShardFile, Source};

/// A box of a tensor, in a file.
#[derive(Clone, Debug)]
pub struct Part {
    /// First element along every dimension.
    pub offsets: Vec<u64>,
    /// Size along every dimension.
    pub sizes: Vec<u64>,
    /// Elements between neighbors along every dimension, in the file.
    pub strides: Vec<u64>,
    /// The file.
    pub file: Arc<ShardFile>,
    /// Byte of the file at which the first element begins.
    pub begin: u64,
}

/// A tensor in parts.
#[derive(Debug)]
pub struct Assembly {
    shape: Vec<u64>,
    /// Bytes of an element.
    width: u64,
    parts: Vec<Part>,
}

/// Returns the strides of a tensor in row-major order.
pub fn row_major(shape: &[u64]) -> Vec<u64> {
    let mut strides = vec![1; shape.len()];
    for d in (1..shape.len()).rev() {
        strides[d - 1] = strides[d] * shape[d].max(1);
    }
    strides
}

impl Assembly {
    /// Checks that the parts cover the tensor, each element once, and lie within their files. The sizes of
    /// `shape` must have a product below 2^64 / `width`.
    pub fn new(name: &str, shape: &[u64], width: u64, parts: Vec<Part>) -> Result<Assembly> {
        let fail = |part: &Part, problem: String| Error::Header {
            file: part.file.path.clone(),
            place: Place { tensor: Some(name.into()), byte: Some(part.begin) },
            problem,
        };
        let mut covered = 0u64;
        for (number, part) in parts.iter().enumerate() {
            let rank = shape.len();
            if [part.offsets.len(), part.sizes.len(), part.strides.len()] != [rank; 3] {
                return Err(fail(part, format!("a part of another rank than shape {shape:?}")));
            }
            let ends = part.offsets.iter().zip(&part.sizes).map(|(offset, size)| offset.checked_add(*size));
            if !ends.zip(shape).all(|(end, size)| end.is_some_and(|end| end <= *size)) {
                let problem =
                    format!("a part of {:?} at {:?} exceeds shape {shape:?}", part.sizes, part.offsets);
                return Err(fail(part, problem));
            }
            let elements: u64 = part.sizes.iter().product();
            if elements > 0 {
                let reach =
                    part.sizes.iter().zip(&part.strides).try_fold(0u64, |sum, (size, stride)| {
                        sum.checked_add((size - 1).checked_mul(*stride)?)
                    });
                let end =
                    reach.and_then(|reach| reach.checked_add(1)?.checked_mul(width)?.checked_add(part.begin));
                if end.is_none_or(|end| end > part.file.bytes) {
                    let problem = format!(
                        "a part of {:?} reaches past the end of the file, which has {} bytes: truncated?",
                        part.sizes, part.file.bytes
                    );
                    return Err(fail(part, problem));
                }
            }
            let overlaps = |other: &Part| {
                (0..rank).all(|d| {
                    let begin = part.offsets[d].max(other.offsets[d]);
                    begin < (part.offsets[d] + part.sizes[d]).min(other.offsets[d] + other.sizes[d])
                })
            };
            if elements > 0 && parts[..number].iter().any(overlaps) {
                return Err(fail(part, format!("the part at {:?} overlaps another one", part.offsets)));
            }
            covered += elements;
        }
        let elements: u64 = shape.iter().product();
        if covered != elements {
            let problem = format!("the parts have {covered} of its {elements} elements; parts are missing");
            return Err(match parts.first() {
                Some(part) => fail(part, problem),
                None => Error::tensor(name, problem),
            });
        }
        Ok(Assembly { shape: shape.to_vec(), width, parts })
    }

    /// Number of bytes.
    pub fn bytes(&self) -> u64 {
        self.width * self.shape.iter().product::<u64>()
    }

    /// Returns the part as a plain range of its file, if the tensor is in one part and row-major.
    pub fn plain(&self) -> Option<&Part> {
        match self.parts.as_slice() {
            [part] if is_row_major(&part.sizes, &part.strides) => Some(part),
            _ => None,
        }
    }

    /// Returns the files of the parts.
    pub fn paths(&self) -> impl Iterator<Item = &PathBuf> {
        self.parts.iter().map(|part| &part.file.path)
    }

    /// Returns the part with an element, its position there, and the number of elements that follow each other
    /// both in the tensor and in the file.
    fn locate(&self, element: u64) -> Result<(&Part, u64, u64)> {
        let strides = row_major(&self.shape);
        let mut rest = element;
        let index: Vec<u64> = strides
            .iter()
            .map(|stride| {
                let i = rest / stride;
                rest %= stride;
                i
            })
            .collect();
        let holds = |part: &&Part| {
            (0..index.len()).all(|d| (part.offsets[d]..part.offsets[d] + part.sizes[d]).contains(&index[d]))
        };
        let Some(part) = self.parts.iter().find(holds) else {
            return Err(Error::Refused(format!("element {element} lies in no part of the tensor")));
        };
        let position = (0..index.len()).map(|d| (index[d] - part.offsets[d]) * part.strides[d]).sum();
        // Dimensions that follow each other in tensor and file alike are one run.
        let mut run = 1;
        let mut inner = 1;
        for d in (0..index.len()).rev() {
            if part.strides[d] != inner && part.sizes[d] > 1 {
                break;
            }
            run += (part.offsets[d] + part.sizes[d] - index[d] - 1) * inner;
            inner *= part.sizes[d];
            if part.sizes[d] != self.shape[d] {
                break;
            }
        }
        Ok((part, position, run))
    }
}

impl Source for Assembly {
    fn read_at(&self, buffer: &mut [u8], at: u64) -> Result<()> {
        let end = at.checked_add(buffer.len() as u64).filter(|end| *end <= self.bytes());
        let Some(end) = end else {
            return Err(Error::Refused(format!("bytes from {at} on lie outside of the tensor")));
        };
        let mut byte = at;
        while byte < end {
            let (element, within) = (byte / self.width, byte % self.width);
            let (part, position, run) = self.locate(element)?;
            let count = (run * self.width - within).min(end - byte);
            let target = &mut buffer[(byte - at) as usize..(byte - at + count) as usize];
            part.file.read_at(target, part.begin + position * self.width + within)?;
            byte += count;
        }
        Ok(())
    }
}

fn is_row_major(sizes: &[u64], strides: &[u64]) -> bool {
    let wanted = row_major(sizes);
    (0..sizes.len()).all(|d| sizes[d] <= 1 || strides[d] == wanted[d])
}

/// Returns a part that is the whole of a tensor in row-major order.
pub fn whole(file: &Arc<ShardFile>, begin: u64, shape: &[u64]) -> Part {
    let (offsets, sizes, strides) = (vec![0; shape.len()], shape.to_vec(), row_major(shape));
    Part { offsets, sizes, strides, file: file.clone(), begin }
}

/// Returns the parts of `parts`, which make up a tensor of shape `shape`, that lie in `rows` of its first
/// dimension, counted from there.
pub fn rows_of(parts: &[Part], width: u64, rows: Range<u64>) -> Vec<Part> {
    let inside = |part: &Part| {
        let (Some(offset), Some(size)) = (part.offsets.first(), part.sizes.first()) else { return None };
        let (begin, end) = (rows.start.max(*offset), rows.end.min(offset + size));
        if begin >= end {
            return None;
        }
        let mut part = part.clone();
        part.begin += (begin - offset) * part.strides[0] * width;
        part.offsets[0] = begin - rows.start;
        part.sizes[0] = end - begin;
        Some(part)
    };
    parts.iter().filter_map(inside).collect()
}
