//! Checks between the instructions of a compiled template.
//!
//! The instructions are rewritten, not the syntax tree: they are a flat list, so this does not recurse, keeps
//! the places that errors name, and sees everything that can run, whatever syntax it came from.

use minijinja::machinery::{Instruction, Instructions};
use minijinja::value::Rest;
use minijinja::{Environment, Error, ErrorKind, State, Value};

use super::budget::{NODE, charge, check, storable, too_large};
use super::filters::slice;

// Filters that only rewritten instructions use. A name with a colon cannot be written after `|`; the filter
// `map` can reach them, which does no harm.
const CHECK: &str = "check:value";
const CONCAT: &str = "check:concat";
const INCLUDE: &str = "check:include";
const KEPT: &str = "check:kept";
const SLICE: &str = "check:slice";
const SPREAD: &str = "check:spread";
const STORED: &str = "check:stored";
const TIMES: &str = "check:times";

fn refused(problem: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, problem)
}

fn apply(filter: &'static str, arguments: u16) -> Instruction<'static> {
    // The last field is an index into a cache of filters; this value means that there is none.
    Instruction::ApplyFilter(filter, Some(arguments), !0)
}

/// Returns the instructions with checks.
pub(super) fn guarded<'t>(original: &Instructions<'t>) -> Result<Instructions<'t>, Error> {
    let count = original.len() as u32;
    let mut expanded = Vec::with_capacity(original.len());
    // Place of each instruction, and of the end, among the new ones.
    let mut places = vec![0];
    for instruction in (0..count).filter_map(|i| original.get(i)) {
        let new = expansion(instruction)?;
        places.push(places[places.len() - 1] + new.len() as u32);
        expanded.push(new);
    }
    let mut guarded = Instructions::new(original.name(), original.source());
    for (i, new) in (0..count).zip(expanded) {
        let (span, line) = (original.get_span(i), original.get_line(i).unwrap_or(0) as u16);
        for mut instruction in new {
            retarget(&mut instruction, &places);
            match span {
                Some(span) => guarded.add_with_span(instruction, span),
                None => guarded.add_with_line(instruction, line),
            };
        }
    }
    Ok(guarded)
}

fn retarget(instruction: &mut Instruction, places: &[u32]) {
    match instruction {
        Instruction::Iterate(target)
        | Instruction::Jump(target)
        | Instruction::JumpIfFalse(target)
        | Instruction::JumpIfFalseOrPop(target)
        | Instruction::JumpIfTrueOrPop(target)
        | Instruction::BuildMacro(_, target, _) => *target = places[*target as usize],
        _ => {}
    }
}

/// Returns the instructions that stand for one.
fn expansion<'t>(instruction: &Instruction<'t>) -> Result<Vec<Instruction<'t>>, Error> {
    let own = instruction.clone();
    Ok(match instruction {
        // As a constant, it passes the formatter, which counts what is written.
        Instruction::EmitRaw(text) => vec![Instruction::LoadConst(Value::from(*text)), Instruction::Emit],
        Instruction::StringConcat => vec![apply(CONCAT, 2)],
        Instruction::Slice => vec![apply(SLICE, 4)],
        Instruction::Mul => vec![apply(TIMES, 2), Instruction::UnpackList(2), own, apply(CHECK, 1)],
        Instruction::Add
        | Instruction::BuildList(_)
        | Instruction::BuildMap(_)
        | Instruction::BuildMacro(..)
        | Instruction::EndCapture => vec![own, apply(CHECK, 1)],
        Instruction::SetAttr(_) => {
            vec![Instruction::Swap, apply(STORED, 1), Instruction::Swap, own]
        }
        Instruction::UnpackLists(lists) => {
            let list = Instruction::BuildList(Some(*lists));
            vec![list, apply(SPREAD, 1), Instruction::UnpackLists(1)]
        }
        // A loop keeps the arguments of `changed`.
        Instruction::CallMethod("changed", Some(arguments)) => {
            vec![apply(KEPT, *arguments), Instruction::UnpackList(*arguments as usize), own]
        }
        // minijinja divides by the number of arguments.
        Instruction::CallMethod("cycle", None | Some(1)) => {
            return Err(refused("`cycle` needs arguments, written one by one"));
        }
        Instruction::CallMethod("changed", None) => {
            return Err(refused("`changed` needs arguments, written one by one"));
        }
        Instruction::Include(_) | Instruction::LoadBlocks => vec![apply(INCLUDE, 1)],
        _ => vec![own],
    })
}

/// Adds the filters that check.
pub(super) fn install(environment: &mut Environment) {
    environment.add_filter(CHECK, check);
    environment.add_filter(CONCAT, |state: &State, left: Value, right: Value| {
        check(state, Value::from(format!("{left}{right}")))
    });
    environment.add_filter(INCLUDE, |_: Value| -> Result<Value, Error> {
        Err(refused("a chat template cannot include or extend another one"))
    });
    environment.add_filter(SLICE, slice);
    environment.add_filter(SPREAD, spread);
    environment.add_filter(KEPT, |values: Rest<Value>| {
        // The first one is the loop.
        values.iter().skip(1).try_for_each(storable)?;
        Ok::<_, Error>(reversed(&values))
    });
    environment.add_filter(STORED, |value: Value| storable(&value).map(|()| value));
    environment.add_filter(TIMES, times);
}

/// Arguments of a filter as a list that `UnpackList` puts back on the stack: it reverses.
fn reversed(values: &[Value]) -> Value {
    values.iter().rev().cloned().collect()
}

/// Concatenates lists of arguments (`f(*a, *b)`).
fn spread(state: &State, lists: Value) -> Result<Value, Error> {
    let mut all = Vec::new();
    for list in lists.try_iter()? {
        charge(state, list.len().unwrap_or(0) * NODE)?;
        all.extend(list.try_iter()?);
    }
    Ok(all.into())
}

/// Checks the size of a repeated string or list before it is made.
fn times(left: Value, right: Value) -> Result<Value, Error> {
    let bytes = |value: &Value| match value.as_str() {
        Some(text) => Some(text.len()),
        None => value.as_object().and_then(|_| value.len()).map(|items| items.saturating_mul(NODE)),
    };
    let repeated = match (bytes(&left), bytes(&right)) {
        (Some(bytes), None) => bytes.saturating_mul(right.as_usize().unwrap_or(0)),
        (None, Some(bytes)) => bytes.saturating_mul(left.as_usize().unwrap_or(0)),
        _ => 0,
    };
    if repeated > super::budget::VALUE { Err(too_large()) } else { Ok(reversed(&[left, right])) }
}

#[cfg(test)]
mod tests {
    use super::super::budget::iterable;
    use super::*;

    #[test]
    fn lists_of_arguments_keep_their_order() {
        let list = iterable(vec![1.into(), 2.into()]);
        assert_eq!(reversed(&[list.clone(), 3.into()]).to_string(), "[3, [1, 2]]");
    }
}
