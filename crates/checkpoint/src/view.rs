//! Views: tensors made of slices and concatenations of stored tensors.
//!
//! Every change of layout (split or fused projections, experts, tensor-parallel ranks) rearranges blocks, so
//! a destination tensor is a small tree over stored tensors and is streamed from it, never assembled in
//! memory. The tree is simplified as it is built: splitting a fused tensor gives the stored tensor again, so
//! a detour costs nothing.
//!
//! A node treats a tensor as a matrix [outer, width] of elements: a slice along dimension d of a shape takes
//! columns of the matrix [prod(shape[..d]), prod(shape[d..])].

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use ballast_contract::Dtype;
use ballast_files::cast::{self, Buffer};
use ballast_files::header::elements;
use ballast_files::{Error, Result};

use crate::open::{Checkpoint, StoredTensor};

#[derive(Clone, Debug)]
enum Node {
    /// A whole stored tensor.
    Stored { checkpoint: Arc<Checkpoint>, tensor: usize },
    /// Columns `from..from + take` of `of` as [outer, width].
    Slice { of: Arc<Node>, outer: u64, width: u64, from: u64, take: u64 },
    /// Parts side by side, each [outer, its width].
    Concat { outer: u64, parts: Vec<(Arc<Node>, u64)> },
}

/// A range of bytes in a file of a checkpoint.
pub(crate) struct FileRun {
    pub(crate) checkpoint: Arc<Checkpoint>,
    pub(crate) file: usize,
    pub(crate) bytes: Range<u64>,
}

/// A change of the values or their order after the view is put together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Transform {
    None,
    /// Every matrix [rows, columns] of the last two dimensions is transposed.
    Transposed {
        rows: u64,
        columns: u64,
    },
    /// Columns are `groups` x `size` blocks of `width`, and become `size` x `groups` blocks.
    Regrouped {
        groups: u64,
        size: u64,
        width: u64,
    },
    /// x becomes -exp(x), in f32.
    NegativeExp,
}

/// A named tensor made of stored tensors.
#[derive(Clone, Debug)]
pub struct View {
    /// Name.
    pub name: String,
    /// Element type; parts in a narrower type are widened exactly.
    pub dtype: Dtype,
    /// Shape.
    pub shape: Vec<u64>,
    /// Value added to every element in f32: -1, 0 or +1, for zero-centered gammas.
    pub shift: i8,
    transform: Transform,
    node: Arc<Node>,
}

impl View {
    /// Creates a view of a stored tensor.
    pub fn stored(checkpoint: &Arc<Checkpoint>, tensor: usize) -> View {
        let t = &checkpoint.tensors[tensor];
        let node = Arc::new(Node::Stored { checkpoint: checkpoint.clone(), tensor });
        let (name, shape) = (t.name.clone(), t.shape.clone());
        View { name, dtype: t.dtype, shape, shift: 0, transform: Transform::None, node }
    }

    /// Renames the tensor.
    pub fn renamed(self, name: impl Into<String>) -> View {
        View { name: name.into(), ..self }
    }

    /// Changes the shape; the number of elements must stay the same.
    pub fn reshaped(self, shape: &[u64]) -> Result<View> {
        if elements(shape) != elements(&self.shape) {
            let problem = format!("shape {:?} cannot be reshaped to {shape:?}", self.shape);
            return Err(Error::tensor(self.name, problem));
        }
        Ok(View { shape: shape.to_vec(), ..self })
    }

    /// Adds `by` to every element.
    pub fn shifted(self, by: i8) -> View {
        View { shift: self.shift + by, ..self }
    }

    /// Transposes the last two dimensions. A matrix is read as a whole, so it must fit in memory.
    pub fn transposed(self) -> Result<View> {
        let dims = self.shape.len();
        if dims < 2 || self.transform != Transform::None || self.dtype.bytes().is_none() {
            let problem = format!("{} of shape {:?} cannot be transposed", self.dtype, self.shape);
            return Err(Error::tensor(self.name, problem));
        }
        self.require_elements()?;
        let (rows, columns) = (self.shape[dims - 2], self.shape[dims - 1]);
        let mut shape = self.shape.clone();
        shape.swap(dims - 2, dims - 1);
        Ok(View { shape, transform: Transform::Transposed { rows, columns }, ..self })
    }

    /// Reorders the columns of the last dimension: `groups` x `size` blocks of `width` become `size` x `groups`
    /// blocks.
    pub(crate) fn regrouped(self, groups: u64, size: u64, width: u64) -> Result<View> {
        let columns = groups.checked_mul(size).and_then(|blocks| blocks.checked_mul(width));
        let fits = columns.is_some() && self.shape.last().copied() == columns;
        if !fits || self.transform != Transform::None || self.dtype.bytes().is_none() {
            let problem = format!(
                "{} of shape {:?} does not have {groups} x {size} blocks of {width} columns",
                self.dtype, self.shape
            );
            return Err(Error::tensor(self.name, problem));
        }
        self.require_elements()?;
        if groups == 1 || size == 1 {
            return Ok(self);
        }
        Ok(View { transform: Transform::Regrouped { groups, size, width }, ..self })
    }

    /// Replaces every element x by -exp(x), in f32.
    pub(crate) fn negative_exp(self) -> Result<View> {
        if self.transform != Transform::None || !self.dtype.widens_exactly_to(Dtype::F32) {
            return Err(Error::tensor(self.name, format!("-exp(x) of {} is not possible", self.dtype)));
        }
        Ok(View { dtype: Dtype::F32, transform: Transform::NegativeExp, ..self })
    }

    /// Number of elements.
    pub fn elements(&self) -> u64 {
        elements(&self.shape).expect("checked when the header was parsed")
    }

    /// Number of bytes in the view's dtype.
    pub fn bytes(&self) -> u64 {
        self.dtype.bytes_for(self.elements()).expect("checked when the header was parsed")
    }

    /// Returns an error for an empty tensor, whose shape the size of the file does not bound.
    pub(crate) fn require_elements(&self) -> Result<()> {
        if self.elements() > 0 {
            return Ok(());
        }
        let problem = format!(
            "shape {:?} has no elements; an empty tensor cannot be sliced or concatenated",
            self.shape
        );
        Err(Error::tensor(&self.name, problem))
    }

    /// Slices dimension `dim` to `range`.
    pub fn slice(&self, dim: usize, range: Range<u64>) -> Result<View> {
        let refuse = |problem: String| Err(Error::tensor(&self.name, problem));
        let Some(&size) = self.shape.get(dim) else {
            return refuse(format!("shape {:?} has no dimension {dim}", self.shape));
        };
        if range.end > size || range.start > range.end {
            return refuse(format!(
                "cannot slice rows {range:?} of dimension {dim} from shape {:?}",
                self.shape
            ));
        }
        if !is_countable(&self.shape) {
            return refuse(format!("shape {:?} is too large to be sliced", self.shape));
        }
        if self.transform != Transform::None {
            return refuse("a tensor with reordered or changed values cannot be sliced".into());
        }
        if self.dtype.bytes().is_none() || self.dtype.is_scaled_float() {
            return refuse(format!(
                "{} tensors depend on a scale and cannot be sliced or concatenated; --dtype bf16 dequantizes them",
                self.dtype
            ));
        }
        let outer: u64 = self.shape[..dim].iter().product();
        let inner: u64 = self.shape[dim + 1..].iter().product();
        let mut shape = self.shape.clone();
        shape[dim] = range.end - range.start;
        let node = slice(&self.node, outer, size * inner, range.start * inner, shape[dim] * inner);
        Ok(View { shape, node, ..self.clone() })
    }

    /// Concatenates `parts` along dimension `dim` under the name `name`.
    pub fn concat(name: impl Into<String>, dim: usize, parts: &[View]) -> Result<View> {
        let name = name.into();
        let Some(first) = parts.first() else {
            return Err(Error::tensor(name, "no parts to concatenate"));
        };
        let mut shape = first.shape.clone();
        let mut dtype = first.dtype;
        for part in &parts[1..] {
            let fits = part.shape.len() == shape.len()
                && part.shift == first.shift
                && (part.transform, first.transform) == (Transform::None, Transform::None)
                && (0..shape.len()).all(|d| d == dim || part.shape[d] == shape[d]);
            let joined = shape.get(dim).and_then(|size| size.checked_add(*part.shape.get(dim)?));
            let (true, Some(joined)) = (fits, joined) else {
                let problem = format!(
                    "{:?} ({}) cannot be concatenated with {:?} ({}) along dimension {dim}",
                    part.shape, part.name, shape, first.name
                );
                return Err(Error::tensor(name, problem));
            };
            shape[dim] = joined;
            dtype = match dtype.promote(part.dtype) {
                Some(dtype) => dtype,
                None if dtype == part.dtype => dtype,
                None => {
                    let problem =
                        format!("parts of {dtype} and {} ({}) cannot be concatenated", part.dtype, part.name);
                    return Err(Error::tensor(name, problem));
                }
            };
        }
        if parts.len() > 1 && (dtype.bytes().is_none() || dtype.is_scaled_float()) {
            let problem = format!(
                "{dtype} tensors depend on a scale and cannot be sliced or concatenated; --dtype bf16 dequantizes them"
            );
            return Err(Error::tensor(name, problem));
        }
        if !is_countable(&shape) {
            return Err(Error::tensor(name, format!("shape {shape:?} is too large to be concatenated")));
        }
        let outer: u64 = shape[..dim].iter().product();
        let inner: u64 = shape[dim + 1..].iter().product();
        let widths = parts.iter().map(|p| (p.node.clone(), p.shape[dim] * inner)).collect();
        let (shift, transform) = (first.shift, first.transform);
        Ok(View { name, dtype, shape, shift, transform, node: concat(outer, widths) })
    }

    /// Returns the stored tensors of the view in order, repeated if used repeatedly.
    pub fn sources(&self) -> Vec<&StoredTensor> {
        self.leaves().into_iter().map(|(checkpoint, tensor)| &checkpoint.tensors[tensor]).collect()
    }

    /// Returns true if the view is of one stored tensor with this name.
    pub(crate) fn is_stored_as(&self, name: &str) -> bool {
        matches!(self.sources().as_slice(), [tensor] if tensor.name == name)
    }

    /// Returns the files of these tensors.
    pub(crate) fn source_files(&self) -> Vec<&Path> {
        let file = |c: &Checkpoint, tensor: usize| c.tensors[tensor].file;
        self.leaves().into_iter().map(|(c, tensor)| c.files[file(c, tensor)].path.as_path()).collect()
    }

    fn leaves(&self) -> Vec<(&Checkpoint, usize)> {
        fn collect<'a>(node: &'a Node, found: &mut Vec<(&'a Checkpoint, usize)>) {
            match node {
                Node::Stored { checkpoint, tensor } => found.push((checkpoint, *tensor)),
                Node::Slice { of, .. } => collect(of, found),
                Node::Concat { parts, .. } => parts.iter().for_each(|(part, _)| collect(part, found)),
            }
        }
        let mut found = Vec::new();
        collect(&self.node, &mut found);
        found
    }

    /// Returns the ranges of files that make up the view's bytes, if it is a plain copy of a few of them.
    pub(crate) fn plain_runs(&self) -> Option<Vec<FileRun>> {
        fn flat(node: &Node) -> bool {
            match node {
                Node::Stored { .. } => true,
                Node::Slice { of, outer, .. } => *outer == 1 && flat(of),
                Node::Concat { outer, parts } => *outer == 1 && parts.iter().all(|(part, _)| flat(part)),
            }
        }
        let is_changed = self.shift != 0 || self.transform != Transform::None;
        if is_changed || !flat(&self.node) || self.sources().iter().any(|t| t.dtype != self.dtype) {
            return None;
        }
        let mut runs = Vec::new();
        let all = 0..self.units();
        let done = each_run(&self.node, all, &mut |checkpoint, tensor, range| {
            let t = &checkpoint.tensors[tensor];
            let unit = unit_bytes(t.dtype);
            let bytes = t.begin + range.start * unit..t.begin + range.end * unit;
            runs.push(FileRun { checkpoint: checkpoint.clone(), file: t.file, bytes });
            Ok(())
        });
        done.ok().map(|()| runs)
    }

    /// Returns the number of units to read: elements, or bytes for types narrower than 8 bits.
    pub fn units(&self) -> u64 {
        if self.dtype.bytes().is_some() { self.elements() } else { self.bytes() }
    }

    /// Returns the number of bytes of a unit in the view's dtype.
    pub fn unit_bytes(&self) -> u64 {
        unit_bytes(self.dtype)
    }

    /// Reads `range` (in units) in the view's dtype into `out`.
    pub fn read(&self, range: Range<u64>, out: &mut Buffer, scratch: &mut Buffer) -> Result<()> {
        let target = out.resize(((range.end - range.start) * self.unit_bytes()) as usize);
        match self.transform {
            Transform::Transposed { rows, columns } => {
                self.read_transposed(range, rows, columns, target, scratch)?
            }
            Transform::Regrouped { groups, size, width } => {
                self.read_regrouped(range, [groups, size, width], target, scratch)?
            }
            _ => self.read_plain(range, target, scratch)?,
        }
        if self.transform == Transform::NegativeExp {
            for x in bytemuck::cast_slice_mut::<u8, f32>(target) {
                // Rounded once.
                *x = -(*x as f64).exp() as f32;
            }
        }
        if self.shift != 0 {
            shift_in_f32(target, self.dtype, self.shift as f32);
        }
        Ok(())
    }

    /// Reads `range` as it is put together.
    fn read_plain(&self, range: Range<u64>, target: &mut [u8], scratch: &mut Buffer) -> Result<()> {
        let unit = self.unit_bytes();
        let mut at = 0;
        each_run(&self.node, range, &mut |checkpoint, tensor, run| {
            let t = &checkpoint.tensors[tensor];
            let stored_unit = unit_bytes(t.dtype);
            let count = run.end - run.start;
            let piece = &mut target[at..at + (count * unit) as usize];
            at += piece.len();
            let begin = t.begin + run.start * stored_unit;
            let file = &checkpoint.files[t.file];
            if t.dtype == self.dtype {
                return file.read_at(piece, begin);
            }
            // A part in a narrower dtype is widened exactly, through an aligned copy.
            let narrow = scratch.resize((count * stored_unit) as usize);
            file.read_at(narrow, begin)?;
            let mut wide = Buffer::default();
            cast::convert(narrow, t.dtype, wide.resize(piece.len()), self.dtype);
            piece.copy_from_slice(wide.as_ref());
            Ok(())
        })
    }

    /// Reads `range` of transposed matrices; each one that it touches is read once.
    fn read_transposed(
        &self,
        range: Range<u64>,
        rows: u64,
        columns: u64,
        target: &mut [u8],
        scratch: &mut Buffer,
    ) -> Result<()> {
        let (size, unit) = (rows * columns, self.unit_bytes() as usize);
        let mut matrix = Buffer::default();
        let mut at = range.start;
        let mut places = target.chunks_exact_mut(unit);
        while at < range.end {
            let first = at / size * size;
            let end = range.end.min(first + size);
            self.read_plain(first..first + size, matrix.resize(size as usize * unit), scratch)?;
            let matrix = matrix.as_ref();
            for (i, place) in (at - first..end - first).zip(&mut places) {
                let (column, row) = (i / rows, i % rows);
                let from = (row * columns + column) as usize * unit;
                place.copy_from_slice(&matrix[from..from + unit]);
            }
            at = end;
        }
        Ok(())
    }

    /// Reads `range` of rows with reordered columns; whole rows are read at once.
    fn read_regrouped(
        &self,
        range: Range<u64>,
        [groups, size, width]: [u64; 3],
        target: &mut [u8],
        scratch: &mut Buffer,
    ) -> Result<()> {
        let (columns, unit) = (groups * size * width, self.unit_bytes());
        let rows = range.start / columns * columns..range.end.next_multiple_of(columns);
        let mut whole = Buffer::default();
        self.read_plain(rows.clone(), whole.resize(((rows.end - rows.start) * unit) as usize), scratch)?;
        let whole = whole.as_ref();
        let (mut at, mut done) = (range.start, 0);
        while at < range.end {
            let (row, column) = (at / columns, at % columns);
            let (block, offset) = (column / width, column % width);
            let source = (block % groups * size + block / groups) * width + offset;
            let bytes = ((width - offset).min(range.end - at) * unit) as usize;
            let from = ((row * columns + source - rows.start) * unit) as usize;
            target[done..done + bytes].copy_from_slice(&whole[from..from + bytes]);
            (at, done) = (at + bytes as u64 / unit, done + bytes);
        }
        Ok(())
    }
}

/// Adds `by` in f32; views with a shift are F32 (see [`crate::layout`]).
fn shift_in_f32(data: &mut [u8], dtype: Dtype, by: f32) {
    assert_eq!(dtype, Dtype::F32, "a shifted view is widened to F32 first");
    for x in bytemuck::cast_slice_mut::<u8, f32>(data) {
        *x += by;
    }
}

impl View {
    /// Widens the elements exactly to `dtype`.
    pub fn widened(self, dtype: Dtype) -> View {
        debug_assert!(self.dtype.widens_exactly_to(dtype));
        View { dtype, ..self }
    }
}

/// Returns true if no product of dimensions overflows, even in an empty tensor.
fn is_countable(shape: &[u64]) -> bool {
    shape.iter().try_fold(1u64, |product, &dim| product.checked_mul(dim.max(1))).is_some()
}

fn unit_bytes(dtype: Dtype) -> u64 {
    dtype.bytes().unwrap_or(1)
}

fn same(a: &Arc<Node>, b: &Arc<Node>) -> bool {
    if Arc::ptr_eq(a, b) {
        return true;
    }
    match (&**a, &**b) {
        (Node::Stored { checkpoint: c, tensor: t }, Node::Stored { checkpoint: d, tensor: u }) => {
            Arc::ptr_eq(c, d) && t == u
        }
        _ => false,
    }
}

/// Returns columns `from..from + take` of `node` as [outer, width], simplified.
fn slice(node: &Arc<Node>, outer: u64, width: u64, from: u64, take: u64) -> Arc<Node> {
    if from == 0 && take == width {
        return node.clone();
    }
    match &**node {
        Node::Slice { of, outer: o, width: w, from: f, take: t } if *o == outer && *t == width => {
            slice(of, outer, *w, f + from, take)
        }
        Node::Concat { outer: o, parts } if *o == outer => {
            let mut chosen = Vec::new();
            let mut at = 0;
            for (part, part_width) in parts {
                let (begin, end) = (from.max(at), (from + take).min(at + part_width));
                if begin < end {
                    chosen.push((slice(part, outer, *part_width, begin - at, end - begin), end - begin));
                }
                at += part_width;
            }
            concat(outer, chosen)
        }
        _ => Arc::new(Node::Slice { of: node.clone(), outer, width, from, take }),
    }
}

/// Returns the parts side by side, simplified.
fn concat(outer: u64, parts: Vec<(Arc<Node>, u64)>) -> Arc<Node> {
    let mut flat: Vec<(Arc<Node>, u64)> = Vec::new();
    let push = |flat: &mut Vec<(Arc<Node>, u64)>, node: Arc<Node>, width: u64| {
        if let Some((last, last_width)) = flat.last_mut()
            && let (
                Node::Slice { of: a, outer: oa, width: wa, from: fa, take: ta },
                Node::Slice { of: b, outer: ob, width: wb, from: fb, take: tb },
            ) = (&**last, &*node)
            && (oa, wa) == (ob, wb)
            && *oa == outer
            && same(a, b)
            && fa + ta == *fb
        {
            // Adjacent columns of one tensor become one slice.
            (*last, *last_width) = (slice(a, outer, *wa, *fa, ta + tb), *last_width + width);
            return;
        }
        flat.push((node, width));
    };
    for (part, width) in parts {
        match &*part {
            Node::Concat { outer: o, parts: inner } if *o == outer => {
                for (node, width) in inner {
                    push(&mut flat, node.clone(), *width);
                }
            }
            _ => push(&mut flat, part, width),
        }
    }
    match flat.len() {
        1 => flat.remove(0).0,
        _ => Arc::new(Node::Concat { outer, parts: flat }),
    }
}

/// Callback for a checkpoint, a tensor of it, and a range of that tensor's elements.
type RunVisitor<'a> = &'a mut dyn FnMut(&Arc<Checkpoint>, usize, Range<u64>) -> Result<()>;

/// Calls `f` with the stored pieces of elements `range` of the node, in order.
fn each_run(node: &Node, range: Range<u64>, f: RunVisitor<'_>) -> Result<()> {
    if range.is_empty() {
        return Ok(());
    }
    match node {
        Node::Stored { checkpoint, tensor } => f(checkpoint, *tensor, range),
        Node::Slice { of, width, from, take, .. } => {
            let mut at = range.start;
            while at < range.end {
                let (row, column) = (at / take, at % take);
                let count = (take - column).min(range.end - at);
                let begin = row * width + from + column;
                each_run(of, begin..begin + count, f)?;
                at += count;
            }
            Ok(())
        }
        Node::Concat { parts, .. } => {
            let total: u64 = parts.iter().map(|(_, width)| width).sum();
            let mut at = range.start;
            while at < range.end {
                let (row, mut column) = (at / total, at % total);
                let row_end = range.end.min((row + 1) * total);
                for (part, width) in parts {
                    if column >= *width {
                        column -= width;
                        continue;
                    }
                    let count = (width - column).min(row_end - at);
                    if count == 0 {
                        break;
                    }
                    let begin = row * width + column;
                    each_run(part, begin..begin + count, f)?;
                    at += count;
                    column = 0;
                }
            }
            Ok(())
        }
    }
}
