//! Filters, functions and methods, with checks of what they return, and of what they are about to allocate
//! where that can be much more than they are given.

use std::ops::Range;

use minijinja::functions::{dict, namespace, range};
use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value, filters};
use minijinja_contrib::pycompat;

use super::super::python::Json;
use super::budget::{NODE, VALUE, charge, check, iterable, measure, too_large};

/// Bytes that a call with these arguments may allocate, if not in proportion to their size.
type Bound = fn(&[Value]) -> Result<usize, Error>;

/// Adds all of them. minijinja's own filters `chain` and `zip` and its function `debug` are removed: Jinja2 has
/// none of them, and the results of the first nest without limit.
pub(super) fn install(environment: &mut Environment<'static>) {
    for (name, filter, bound) in table() {
        environment.add_filter(name, move |state: &State, arguments: Rest<Value>| {
            charge(state, bound(&arguments)?)?;
            check(state, filter.call(state, &arguments)?)
        });
    }
    environment.add_filter("tojson", to_json);
    environment.remove_filter("chain");
    environment.remove_filter("zip");
    environment.remove_global("debug");
    let functions = [
        ("dict", Value::from_function(dict), none as Bound),
        ("namespace", Value::from_function(namespace), none),
        ("range", Value::from_function(range), range_bound),
    ];
    for (name, function, bound) in functions {
        environment.add_function(name, move |state: &State, arguments: Rest<Value>| {
            charge(state, bound(&arguments)?)?;
            check(state, function.call(state, &arguments)?)
        });
    }
    environment.set_unknown_method_callback(method);
}

/// All filters of minijinja that are kept. A test fails if one is missing here.
pub(super) fn table() -> Vec<(&'static str, Value, Bound)> {
    macro_rules! filters {
        ($($name:literal $filter:ident $bound:ident,)*) => {
            vec![$(($name, Value::from_function(filters::$filter), $bound as Bound)),*]
        };
    }
    filters![
        "abs" abs none,
        "attr" attr none,
        "batch" batch batch_bound,
        "bool" bool none,
        "capitalize" capitalize none,
        "count" length none,
        "d" default none,
        "default" default none,
        "dictsort" dictsort none,
        "e" escape none,
        "escape" escape none,
        "first" first none,
        "float" float none,
        "format" format format_bound,
        "groupby" groupby items_bound,
        "indent" indent indent_bound,
        "int" int none,
        "items" items none,
        "join" join join_bound,
        "last" last items_bound,
        "length" length none,
        "lines" lines items_bound,
        "list" list items_bound,
        "lower" lower none,
        "map" map items_bound,
        "max" max none,
        "min" min none,
        "pprint" pprint pprint_bound,
        "reject" reject items_bound,
        "rejectattr" rejectattr items_bound,
        "replace" replace replace_bound,
        "reverse" reverse none,
        "round" round none,
        "safe" safe none,
        "select" select items_bound,
        "selectattr" selectattr items_bound,
        "slice" slice batch_bound,
        "sort" sort items_bound,
        "split" split items_bound,
        "string" string none,
        "sum" sum none,
        "title" title none,
        "trim" trim none,
        "unique" unique items_bound,
        "upper" upper none,
    ]
}

/// Methods of strings, lists and maps that Python has.
fn method(state: &State, value: &Value, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    let all: Vec<Value> = [value].into_iter().chain(arguments).cloned().collect();
    let bytes = match (name, arguments) {
        ("format", _) => format_bound(&all)?,
        ("join", [items, ..]) => join_bound(&[items.clone(), value.clone()])?,
        ("replace", _) => replace_bound(&all)?,
        ("split" | "splitlines", _) => items_bound(&all)?,
        // pycompat would not return.
        ("count", [part]) if part.as_str() == Some("") && value.as_str().is_some() => {
            return Ok(Value::from(value.len().unwrap_or(0) + 1));
        }
        _ => 0,
    };
    charge(state, bytes)?;
    check(state, pycompat::unknown_method_callback(state, value, name, arguments)?)
}

fn none(_: &[Value]) -> Result<usize, Error> {
    Ok(0)
}

/// Bytes of a value as text, roughly.
fn text_bytes(value: &Value) -> Result<usize, Error> {
    match value.as_str() {
        Some(text) => Ok(text.len()),
        None if value.as_object().is_none() => Ok(NODE),
        None => measure(value).map(|size| size.text + size.nodes * NODE),
    }
}

/// Limits what one call makes to the size of a value.
fn one_value(bytes: usize) -> Result<usize, Error> {
    if bytes > VALUE { Err(too_large()) } else { Ok(bytes) }
}

/// A string becomes a list of characters or parts; lists stay as large as they are.
fn items_bound(arguments: &[Value]) -> Result<usize, Error> {
    let text = arguments.first().and_then(Value::as_str);
    Ok(text.map_or(0, str::len).saturating_mul(NODE))
}

fn batch_bound(arguments: &[Value]) -> Result<usize, Error> {
    let count = arguments.get(1).and_then(Value::as_usize).unwrap_or(0);
    one_value(count.saturating_mul(2 * NODE))?;
    Ok(count * 2 * NODE + items_bound(arguments)?)
}

fn join_bound(arguments: &[Value]) -> Result<usize, Error> {
    let [items, joiner, ..] = arguments else { return Ok(0) };
    one_value(items.len().unwrap_or(0).saturating_mul(text_bytes(joiner)?))
}

fn replace_bound(arguments: &[Value]) -> Result<usize, Error> {
    let [value, from, to, ..] = arguments else { return Ok(0) };
    let found = match (value.as_str(), from.as_str()) {
        (Some(text), Some("")) => text.len() + 1,
        (Some(text), Some(from)) => text.matches(from).count(),
        _ => text_bytes(value)?,
    };
    one_value(found.saturating_mul(text_bytes(to)?))
}

fn indent_bound(arguments: &[Value]) -> Result<usize, Error> {
    let named = || arguments.last().and_then(|named| named.get_attr("width").ok()?.as_usize());
    let width = arguments.get(1).and_then(Value::as_usize).or_else(named).unwrap_or(4);
    let lines = arguments.first().and_then(Value::as_str).map_or(0, |text| text.matches('\n').count());
    one_value((lines + 1).saturating_mul(width))
}

/// The arguments, as often as the format can name them, and the widths that it asks for.
fn format_bound(arguments: &[Value]) -> Result<usize, Error> {
    let Some((format, values)) = arguments.split_first() else { return Ok(0) };
    let format = format.as_str().unwrap_or_default();
    let places = format.matches(['%', '{']).count();
    let widths = format.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty());
    let widths: Vec<usize> = widths.map(|digits| digits.parse().unwrap_or(usize::MAX)).collect();
    let mut bytes = widths.into_iter().fold(0, usize::saturating_add);
    for value in values {
        // A `*` takes the width from an argument.
        let number = value.as_i64().map_or(0, |number| number.unsigned_abs() as usize);
        let width = if format.contains('*') { number } else { 0 };
        bytes = bytes.saturating_add((text_bytes(value)?.saturating_add(width)).saturating_mul(places));
    }
    one_value(bytes)
}

fn pprint_bound(arguments: &[Value]) -> Result<usize, Error> {
    let Some(value) = arguments.first() else { return Ok(0) };
    let size = measure(value)?;
    one_value(size.text + size.nodes * 4 * (size.depth + 2))
}

fn range_bound(arguments: &[Value]) -> Result<usize, Error> {
    let far = |value: &Value| value.as_i64().is_none_or(|number| number.unsigned_abs() > 1 << 53);
    if arguments.iter().any(|value| value.is_number() && far(value)) {
        return Err(Error::new(ErrorKind::InvalidOperation, "range has too many elements"));
    }
    Ok(0)
}

/// `value[start:stop:step]` as in Python. minijinja's own slice stays lazy, and subtracts beyond zero where a
/// negative step meets a start before the stop.
pub(super) fn slice(
    state: &State,
    value: Value,
    start: Value,
    stop: Value,
    step: Value,
) -> Result<Value, Error> {
    let number = |value: Value| if value.is_none() { Ok(None) } else { i64::try_from(value).map(Some) };
    let (start, stop, step) = (number(start)?, number(stop)?, number(step)?.unwrap_or(1));
    let bad = |problem: String| Err(Error::new(ErrorKind::InvalidOperation, problem));
    if step == 0 {
        return bad("cannot slice by step size of 0".into());
    }
    let sliced = match (value.as_str(), value.kind()) {
        (Some(text), _) => {
            let range = slice_range(text.chars().count(), start, stop, step);
            charge(state, range.len() * size_of::<char>())?;
            Value::from(picked(text.chars(), range, step).collect::<String>())
        }
        (None, ValueKind::Undefined | ValueKind::None) => Value::from(Vec::<Value>::new()),
        (None, ValueKind::Seq | ValueKind::Iterable) => {
            let length = value.len().map_or_else(|| value.try_iter().map(Iterator::count), Ok)?;
            let range = slice_range(length, start, stop, step);
            charge(state, range.len() * NODE)?;
            iterable(picked(value.try_iter()?, range, step).collect())
        }
        (None, kind) => return bad(format!("value of type {kind} cannot be sliced")),
    };
    check(state, sliced)
}

/// Places that a slice covers, the first and last of which it begins with.
fn slice_range(length: usize, start: Option<i64>, stop: Option<i64>, step: i64) -> Range<usize> {
    let length = length as i64;
    let place = |place: i64, low: i64| {
        let from_start = if place < 0 { place.saturating_add(length) } else { place };
        from_start.clamp(low, length + low)
    };
    let (low, high) = if step > 0 {
        (start.map_or(0, |start| place(start, 0)), stop.map_or(length, |stop| place(stop, 0)))
    } else {
        let (last, before) =
            (start.map_or(length - 1, |start| place(start, -1)), stop.map(|stop| place(stop, -1)));
        (before.unwrap_or(-1) + 1, last + 1)
    };
    low as usize..high.max(low) as usize
}

fn picked<T>(items: impl Iterator<Item = T>, range: Range<usize>, step: i64) -> impl Iterator<Item = T> {
    let mut picked: Vec<T> = items.skip(range.start).take(range.len()).collect();
    if step < 0 {
        picked.reverse();
    }
    picked.into_iter().step_by(usize::try_from(step.unsigned_abs()).unwrap_or(usize::MAX))
}

/// `tojson` as transformers defines it: `json.dumps` with `ensure_ascii` off, and nothing escaped for HTML.
fn to_json(state: &State, value: Value, options: Kwargs) -> Result<Value, Error> {
    let bad = |problem: String| Error::new(ErrorKind::InvalidOperation, problem);
    if value.is_undefined() {
        return Err(bad("an undefined value has no JSON".into()));
    }
    let json = json_options(&options)?;
    options.assert_all_used()?;
    let value = serde_json::to_value(&value).map_err(|error| bad(format!("tojson: {error}")))?;
    check(state, Value::from(json.write(&value).ok_or_else(too_large)?))
}

fn json_options(options: &Kwargs) -> Result<Json, Error> {
    let bad = |problem: &str| Error::new(ErrorKind::InvalidOperation, problem.to_string());
    let indent = match options.get::<Option<Value>>("indent")? {
        None => None,
        Some(value) if value.is_none() => None,
        Some(value) => match (value.as_str(), value.as_i64()) {
            (Some(text), _) if text.len() > 64 => {
                return Err(bad("tojson: indent is longer than 64 bytes, the limit"));
            }
            (Some(text), _) => Some(text.to_string()),
            (None, Some(n)) => Some(" ".repeat(n.clamp(0, 64) as usize)),
            _ => return Err(bad("tojson: indent is neither a number nor a string")),
        },
    };
    let separators = match options.get::<Option<Vec<String>>>("separators")? {
        None => None,
        Some(pair) => match <[String; 2]>::try_from(pair) {
            Ok([item, key]) => Some((item, key)),
            Err(_) => return Err(bad("tojson: separators must be two strings")),
        },
    };
    Ok(Json {
        indent,
        ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sorted: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        separators,
        limit: VALUE,
    })
}
