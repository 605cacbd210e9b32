//! All tensors of a pickle, by the keys and positions that lead to them, and what else is there.
//!
//! Dicts, lists and tuples are followed. Any other object is opaque: it is counted as left out. A tensor in an
//! opaque object would be lost, so opaque objects are looked through too, and such a tensor is an item that is
//! not supported.

use std::collections::HashSet;

use ballast_files::Result;
use ballast_files::left_out::{self, LeftOut};

use super::division::Item;
use super::pickle::{Id, Node};
use super::saved::{Found, SavedPickle, Value};

/// Deepest nesting of dicts and lists in which tensors are looked for, and the most values looked at.
const MOST_LEVELS: usize = 64;
const MOST_VALUES: usize = 1 << 22;
/// Longest name in bytes.
const LONGEST_NAME: usize = 4096;

/// Most tensors of a pickle, and most bytes of all their names. One tensor and one key, which are written once, may
/// be used many times, so both follow the length of the pickle, in which a tensor of its own takes over 64 bytes.
fn limits(pickle_bytes: usize) -> (usize, usize) {
    ((1 << 16) + pickle_bytes / 64, (1 << 24) + 4 * pickle_bytes)
}

/// The tensors of a pickle, and what else it has.
#[derive(Default)]
pub(super) struct Contents {
    pub(super) items: Vec<Item>,
    pub(super) left_out: Vec<LeftOut>,
}

/// A step on the way from the root to a value.
#[derive(Clone, Copy)]
enum Step {
    /// A key of a dict.
    Key(Id),
    /// A position in a list.
    Position(usize),
    /// The attribute of an object with this key.
    Attribute(Id),
}

/// The name of a value: the keys and positions that lead to it, with dots between them.
#[derive(Default)]
struct Name {
    text: String,
    /// The bytes of these dots.
    cuts: Vec<u32>,
    is_long: bool,
}

/// A value to look at.
struct Visit {
    id: Id,
    /// Number of its step plus one; 0 for the root.
    step: usize,
    level: usize,
    /// The opaque object in which it lies.
    within: Option<Id>,
}

struct Walk<'a> {
    saved: &'a SavedPickle<'a>,
    /// Every step with the number of the one before it.
    steps: Vec<(usize, Step)>,
    waiting: Vec<Visit>,
    /// Values within opaque objects that were looked at.
    opaque: HashSet<Id>,
    name_bytes: usize,
    contents: Contents,
}

/// Finds everything in a pickle.
pub(super) fn contents(saved: &SavedPickle<'_>) -> Result<Contents> {
    let root = Visit { id: saved.pickle.root(), step: 0, level: 0, within: None };
    let mut walk = Walk {
        saved,
        steps: Vec::new(),
        waiting: vec![root],
        opaque: HashSet::new(),
        name_bytes: 0,
        contents: Contents::default(),
    };
    let mut looked_at = 0;
    while let Some(visit) = walk.waiting.pop() {
        looked_at += 1;
        if looked_at > MOST_VALUES || visit.level > MOST_LEVELS {
            let problem = format!(
                "the file has more than {MOST_VALUES} values or {MOST_LEVELS} levels of them: it is not a checkpoint"
            );
            return Err(saved.error(&left_out::shortened(&walk.name(visit.step).text), problem));
        }
        walk.look_at(&visit)?;
    }
    Ok(walk.contents)
}

impl Walk<'_> {
    fn look_at(&mut self, visit: &Visit) -> Result<()> {
        let pickle = self.saved.pickle;
        // An array in an opaque object is part of it, as in a random generator: weights of torch are tensors.
        let is_data = visit.within.is_some()
            && pickle.callable(visit.id).is_some_and(|(module, _)| module.starts_with("numpy."));
        if !is_data && matches!(pickle.node(visit.id), Node::Call { .. } | Node::Persistent(_)) {
            let name = self.name(visit.step);
            match self.saved.value(visit.id, &name.text)? {
                Value::Tensor(tensor, attributes) => {
                    self.count_attributes(attributes, &name.text);
                    return self.add(visit, name, Ok(*tensor));
                }
                Value::Unsupported(reason) => return self.add(visit, name, Err(reason)),
                Value::Other => {}
            }
        }
        match visit.within {
            Some(_) => self.go_through(visit),
            None => self.follow(visit),
        }
        Ok(())
    }

    /// Adds a tensor, or why it is not supported.
    fn add(&mut self, visit: &Visit, name: Name, tensor: Result<Found, String>) -> Result<()> {
        let Name { text, cuts, is_long } = name;
        self.name_bytes += text.len();
        let (most, most_bytes) = limits(self.saved.pickle.length_in_bytes());
        if is_long || self.name_bytes > most_bytes || self.contents.items.len() >= most {
            let problem = format!(
                "a name of more than {LONGEST_NAME} bytes, or more than {most} tensors with names of {most_bytes} \
                 bytes in a pickle of this length: it is not a checkpoint"
            );
            return Err(self.saved.error(&left_out::shortened(&text), problem));
        }
        let tensor = match (visit.within, self.odd_key(visit.step)) {
            (Some(object), _) => {
                let kind = self.saved.pickle.kind(object);
                Err(format!("it lies in a {kind}, which is not a dict; save its tensors in a dict"))
            }
            (None, Some(kind)) => {
                Err(format!("a key that leads to it is a {kind}; a name needs strings or integers"))
            }
            (None, None) => tensor,
        };
        self.contents.items.push(Item { name: text, cuts, tensor });
        Ok(())
    }

    /// Counts what was set in a parameter beside its values.
    fn count_attributes(&mut self, attributes: Option<Id>, name: &str) {
        let pickle = self.saved.pickle;
        let Some(attributes) = attributes else { return };
        let is_none =
            |id: Id| pickle.node(id) == Node::None || pickle.entries(id).is_some_and(<[_]>::is_empty);
        // A dict, or two of them.
        let is_empty = match pickle.elements(attributes) {
            Some(both) => both.iter().all(|id| is_none(*id)),
            None => is_none(attributes),
        };
        if !is_empty {
            left_out::count(&mut self.contents.left_out, "attributes of a tensor", || name.into());
        }
    }

    /// Follows dicts, lists and tuples; counts anything else.
    fn follow(&mut self, visit: &Visit) {
        let pickle = self.saved.pickle;
        if let Some(entries) = pickle.entries(visit.id) {
            self.count_dict_attributes(visit);
            for (key, value) in entries.iter().rev() {
                self.wait(visit, *value, Step::Key(*key), visit.within);
            }
            return;
        }
        if let (Node::Tuple(_) | Node::List(_), Some(elements)) =
            (pickle.node(visit.id), pickle.elements(visit.id))
        {
            for (position, value) in elements.iter().enumerate().rev() {
                self.wait(visit, *value, Step::Position(position), visit.within);
            }
            return;
        }
        self.count(&pickle.kind(visit.id), visit.step);
        self.go_through(visit);
    }

    /// Counts attributes of a dict, but for the versions of modules that `state_dict()` sets.
    fn count_dict_attributes(&mut self, visit: &Visit) {
        let pickle = self.saved.pickle;
        let Some(state) = pickle.added_state(visit.id) else { return };
        let entries = pickle.entries(state).unwrap_or_default();
        for (key, value) in entries.iter().filter(|(key, _)| pickle.text(*key) != Some("_metadata")) {
            self.wait(visit, *value, Step::Attribute(*key), Some(visit.id));
            self.count("attributes of a dict", self.steps.len());
        }
    }

    fn count(&mut self, kind: &str, step: usize) {
        let mut all = std::mem::take(&mut self.contents.left_out);
        left_out::count(&mut all, kind, || self.name(step).text);
        self.contents.left_out = all;
    }

    /// Goes through an opaque object, or through what lies in one, each value once.
    fn go_through(&mut self, visit: &Visit) {
        let pickle = self.saved.pickle;
        if !self.opaque.insert(visit.id) {
            return;
        }
        // Nesting has no limit here, because nothing is looked at twice.
        let at = &Visit { level: 0, ..*visit };
        let within = visit.within.or(Some(visit.id));
        let elements = match pickle.node(visit.id) {
            Node::Tuple(_) | Node::List(_) => pickle.elements(visit.id),
            Node::Call { .. } => pickle.arguments(visit.id),
            _ => None,
        };
        for (position, value) in elements.unwrap_or_default().iter().enumerate() {
            self.wait(at, *value, Step::Position(position), within);
        }
        let Node::Call { .. } = pickle.node(visit.id) else {
            for (key, value) in pickle.entries(visit.id).unwrap_or_default() {
                self.wait(at, *value, Step::Attribute(*key), within);
            }
            return;
        };
        for (key, value) in pickle.added_entries(visit.id) {
            self.wait(at, *value, Step::Attribute(*key), within);
        }
        for (position, value) in pickle.added_elements(visit.id).iter().enumerate() {
            self.wait(at, *value, Step::Position(position), within);
        }
        if let Some(state) = pickle.added_state(visit.id) {
            self.waiting.push(Visit { id: state, step: visit.step, level: 0, within });
        }
    }

    fn wait(&mut self, from: &Visit, id: Id, step: Step, within: Option<Id>) {
        self.steps.push((from.step, step));
        self.waiting.push(Visit { id, step: self.steps.len(), level: from.level + 1, within });
    }

    /// The steps that lead to a value, the last one first.
    fn steps_to(&self, mut step: usize) -> impl Iterator<Item = Step> {
        std::iter::from_fn(move || {
            let (before, own) = *self.steps.get(step.checked_sub(1)?)?;
            step = before;
            Some(own)
        })
    }

    /// The name of a value. It is cut short if it is too long.
    fn name(&self, step: usize) -> Name {
        let (mut parts, mut bytes) = (Vec::new(), 0);
        for step in self.steps_to(step) {
            let part = match step {
                Step::Position(position) => position.to_string(),
                Step::Key(key) | Step::Attribute(key) => match self.saved.pickle.node(key) {
                    Node::Int(number) => number.to_string(),
                    Node::Text(span) if span.length as usize > LONGEST_NAME => {
                        bytes += LONGEST_NAME;
                        "...".into()
                    }
                    Node::Text(_) => self.saved.pickle.text(key).unwrap_or_default().to_string(),
                    _ => format!("<{}>", self.saved.pickle.kind(key)),
                },
            };
            bytes += part.len() + 1;
            parts.push(part);
            if bytes > LONGEST_NAME + 1 {
                break;
            }
        }
        let mut name = Name { is_long: bytes > LONGEST_NAME + 1, ..Name::default() };
        for (number, part) in parts.into_iter().rev().enumerate() {
            if number > 0 {
                name.cuts.push(name.text.len() as u32);
                name.text.push('.');
            }
            name.text += &part;
        }
        name
    }

    /// The kind of a key on the way to a value that cannot be part of a name.
    fn odd_key(&self, step: usize) -> Option<String> {
        let pickle = self.saved.pickle;
        let is_odd = |key: Id| !matches!(pickle.node(key), Node::Text(_) | Node::Int(_));
        self.steps_to(step).find_map(|step| match step {
            Step::Key(key) if is_odd(key) => Some(pickle.kind(key)),
            _ => None,
        })
    }
}
