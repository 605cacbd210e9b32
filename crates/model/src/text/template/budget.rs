//! Limits of the values that a template computes.
//!
//! Every value that comes from an instruction, a filter, a function or a method passes [`check`]. So each
//! value that a template can name is bounded in depth and size, counted as a tree: a list that holds one
//! string a million times counts it a million times. What prints, compares, copies or drops such a value is
//! bounded with it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use minijinja::value::{DynObject, Object, ObjectRepr, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

/// Bytes of all values and texts that one rendering may make. Freed ones count too, so it bounds memory.
const TOTAL: usize = 512 << 20;

/// Bytes of one value.
pub(super) const VALUE: usize = 32 << 20;

/// Levels of lists and maps inside of each other. JSON that is read has at most 128.
const DEPTH: usize = 200;

/// Bytes that an item of a list, or a key or value of a map, takes beside its text.
pub(super) const NODE: usize = 32;

/// Bytes that a rendering has made.
#[derive(Debug, Default)]
struct Spent(AtomicUsize);

impl Object for Spent {}

fn too_much(problem: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, problem)
}

/// Counts bytes that are about to be allocated, or have been; an error beyond the limit.
pub(super) fn charge(state: &State, bytes: usize) -> Result<(), Error> {
    let spent: Arc<Spent> = state.get_or_set_temp_object("spent", Spent::default);
    let before = spent.0.fetch_add(bytes.min(TOTAL + 1), Ordering::Relaxed);
    if before.saturating_add(bytes) > TOTAL {
        let limit = TOTAL >> 20;
        return Err(too_much(format!(
            "template makes more than {limit} MiB of values, the limit of a rendering"
        )));
    }
    Ok(())
}

/// Size of a value, counted as a tree.
#[derive(Default)]
pub(super) struct Size {
    /// Bytes of strings.
    pub(super) text: usize,
    /// Items, keys, values, and the value itself.
    pub(super) nodes: usize,
    /// Levels of lists and maps.
    pub(super) depth: usize,
}

impl Size {
    fn bytes(&self) -> usize {
        self.text.saturating_add(self.nodes.saturating_mul(NODE))
    }
}

/// Returns true for objects whose contents change: inside of lists or of each other, they could contain
/// themselves.
fn is_mutable(object: &DynObject) -> bool {
    let name = object.type_name();
    name.ends_with("::Namespace") || name.ends_with("::Loop")
}

/// Measures a value; an error beyond the limits, or if a namespace or loop lies inside.
pub(super) fn measure(value: &Value) -> Result<Size, Error> {
    walk(value, false)
}

/// Refuses a value that cannot be stored in a namespace or a loop: one that is or contains either.
pub(super) fn storable(value: &Value) -> Result<(), Error> {
    walk(value, true).map(drop)
}

/// Measures without recursion. `inside`: the value itself is to be stored in another one.
fn walk(value: &Value, inside: bool) -> Result<Size, Error> {
    let mut size = Size::default();
    let mut pending = vec![(value.clone(), 0)];
    while let Some((value, depth)) = pending.pop() {
        size.nodes += 1;
        size.text = size.text.saturating_add(value.as_str().map_or(0, str::len));
        let Some(object) = value.as_object() else { continue };
        if (inside || depth > 0) && is_mutable(object) {
            return Err(too_much("a namespace or loop cannot be stored in a list, map or namespace".into()));
        }
        size.depth = size.depth.max(depth + 1);
        if size.depth > DEPTH {
            return Err(too_much(format!("value is nested more than {DEPTH} levels deep, the limit")));
        }
        for child in children(object) {
            pending.push((child, depth + 1));
            // Items are counted while they come: a lazy sequence can be endless.
            if size.bytes() + pending.len() * NODE > VALUE {
                return Err(too_large());
            }
        }
    }
    if size.bytes() > VALUE { Err(too_large()) } else { Ok(size) }
}

pub(super) fn too_large() -> Error {
    too_much(format!("value is larger than {} MiB, the limit", VALUE >> 20))
}

fn children(object: &DynObject) -> Box<dyn Iterator<Item = Value> + '_> {
    match object.repr() {
        ObjectRepr::Map => {
            Box::new(object.try_iter_pairs().into_iter().flatten().flat_map(|(key, value)| [key, value]))
        }
        ObjectRepr::Seq | ObjectRepr::Iterable => Box::new(object.try_iter().into_iter().flatten()),
        _ => Box::new(std::iter::empty()),
    }
}

/// Admits a computed value. Lazy sequences become lists in memory: they would nest without limit, and each
/// level of them recurses when it is read.
pub(super) fn check(state: &State, value: Value) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        if text.len() > VALUE {
            return Err(too_large());
        }
        charge(state, text.len())?;
        return Ok(value);
    }
    if value.as_object().is_none() {
        return Ok(value);
    }
    charge(state, measure(&value)?.nodes * NODE)?;
    if value.kind() == ValueKind::Iterable {
        return Ok(iterable(value.try_iter()?.collect()));
    }
    Ok(value)
}

/// Returns a value that prints and compares as the results of slices and filters do: iterable, not a list.
pub(super) fn iterable(items: Vec<Value>) -> Value {
    Value::make_object_iterable(items, |items| Box::new(items.iter().cloned()))
}
