//! What a file has beside the tensors of a checkpoint: values that are not tensors, and tensors that are not
//! weights and that no checkpoint here can have. They are named and counted, by kind.

use serde::Serialize;

/// Most kinds that are told apart, and most names of one kind.
const MOST_KINDS: usize = 100;
const MOST_NAMES: usize = 3;
/// Longest kind and longest name, in characters.
const LONGEST: usize = 120;
/// The kind of values when there are too many kinds.
const OTHER: &str = "other values";

/// Values of one kind that are not part of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LeftOut {
    /// Class in Python, or a description.
    pub kind: String,
    /// Number of values.
    pub count: u64,
    /// Names of the first ones.
    pub names: Vec<String>,
}

/// Counts a value.
pub fn count(all: &mut Vec<LeftOut>, kind: &str, name: impl FnOnce() -> String) {
    let kind = shortened(kind);
    let place = all.iter().position(|own| own.kind == kind).unwrap_or_else(|| {
        let kind = if all.len() < MOST_KINDS { kind } else { OTHER.into() };
        all.iter().position(|own| own.kind == kind).unwrap_or_else(|| {
            all.push(LeftOut { kind, count: 0, names: Vec::new() });
            all.len() - 1
        })
    });
    let own = &mut all[place];
    own.count += 1;
    if own.names.len() < MOST_NAMES {
        own.names.push(shortened(&name()));
    }
}

/// Adds what another file has.
pub fn join(all: &mut Vec<LeftOut>, other: Vec<LeftOut>) {
    for LeftOut { kind, count, names } in other {
        match all.iter_mut().find(|own| own.kind == kind) {
            Some(own) => {
                own.count += count;
                let missing = MOST_NAMES.saturating_sub(own.names.len());
                own.names.extend(names.into_iter().take(missing));
            }
            None => all.push(LeftOut { kind, count, names }),
        }
    }
}

/// One line that names and counts everything; none if there is nothing.
pub fn line(all: &[LeftOut]) -> Option<String> {
    let kinds: Vec<String> = all
        .iter()
        .map(|LeftOut { kind, count, names }| {
            let more = if *count > names.len() as u64 { ", ..." } else { "" };
            format!("{count} {kind} ({}{more})", names.join(", "))
        })
        .collect();
    (!kinds.is_empty())
        .then(|| format!("beside the tensors, not part of the checkpoint: {}", kinds.join("; ")))
}

/// A text of at most as many characters as are shown.
pub fn shortened(text: &str) -> String {
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.into(),
    }
}
