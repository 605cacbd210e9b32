//! Python's formatting of values, for templates written for Python: `str`, `json.dumps`, `strftime`.

use minijinja::value::ValueKind;
use serde_json::{Number, Value};

/// A float as `repr` writes it: the shortest digits that give it back, with an exponent below 1e-4 and from
/// 1e16.
fn float(value: f64) -> String {
    if !value.is_finite() {
        let sign = if value < 0.0 { "-" } else { "" };
        return if value.is_nan() { "nan".into() } else { format!("{sign}inf") };
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if value != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    let plain = value.to_string();
    if plain.contains('.') { plain } else { plain + ".0" }
}

fn number(value: &Number) -> String {
    match value.as_f64() {
        Some(float_value) if value.is_f64() => float(float_value),
        _ => value.to_string(),
    }
}

/// `str(value)`.
pub(super) fn str_of(value: &minijinja::Value) -> String {
    match value.kind() {
        ValueKind::Undefined => String::new(),
        ValueKind::None => "None".into(),
        ValueKind::Bool => if value.is_true() { "True" } else { "False" }.into(),
        ValueKind::Number if !value.is_integer() => {
            f64::try_from(value.clone()).map_or_else(|_| value.to_string(), float)
        }
        ValueKind::Seq | ValueKind::Map => {
            serde_json::to_value(value).map_or_else(|_| value.to_string(), |v| repr(&v))
        }
        _ => value.to_string(),
    }
}

/// `repr(value)` of what JSON can hold.
fn repr(value: &Value) -> String {
    match value {
        Value::Null => "None".into(),
        Value::Bool(true) => "True".into(),
        Value::Bool(false) => "False".into(),
        Value::Number(value) => number(value),
        Value::String(text) => repr_string(text),
        Value::Array(items) => format!("[{}]", items.iter().map(repr).collect::<Vec<_>>().join(", ")),
        Value::Object(fields) => {
            let fields: Vec<String> =
                fields.iter().map(|(key, value)| format!("{}: {}", repr_string(key), repr(value))).collect();
            format!("{{{}}}", fields.join(", "))
        }
    }
}

fn repr_string(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::from(quote);
    for c in text.chars() {
        match c {
            '\\' => out += "\\\\",
            '\n' => out += "\\n",
            '\r' => out += "\\r",
            '\t' => out += "\\t",
            c if c == quote => out.extend(['\\', c]),
            c if (c as u32) < 0x20 || c == '\u{7f}' => out += &format!("\\x{:02x}", c as u32),
            c => out.push(c),
        }
    }
    out.push(quote);
    out
}

/// Options of `json.dumps`.
pub(super) struct Json {
    pub(super) indent: Option<String>,
    pub(super) ascii: bool,
    pub(super) sorted: bool,
    /// Separators between items, and between key and value.
    pub(super) separators: Option<(String, String)>,
    /// Bytes after which writing stops: indents and separators can make the text far longer than the value is.
    pub(super) limit: usize,
}

impl Json {
    /// `json.dumps(value)`, or `None` if it is longer than the limit.
    pub(super) fn write(&self, value: &Value) -> Option<String> {
        let mut out = String::new();
        self.value(&mut out, value, 0);
        (out.len() <= self.limit).then_some(out)
    }

    fn value(&self, out: &mut String, value: &Value, depth: usize) {
        match value {
            Value::Array(items) => {
                let items = items.iter().map(|item| (None, item)).collect();
                self.container(out, ('[', ']'), items, depth);
            }
            Value::Object(fields) => {
                let mut fields: Vec<_> = fields.iter().map(|(key, value)| (Some(key), value)).collect();
                if self.sorted {
                    fields.sort_by_key(|(key, _)| *key);
                }
                self.container(out, ('{', '}'), fields, depth);
            }
            Value::String(text) => self.string(out, text),
            Value::Number(value) => *out += &number(value),
            other => *out += &other.to_string(),
        }
    }

    fn container(
        &self,
        out: &mut String,
        ends: (char, char),
        items: Vec<(Option<&String>, &Value)>,
        depth: usize,
    ) {
        let (item_separator, key_separator) = match (&self.separators, &self.indent) {
            (Some((item, key)), _) => (item.as_str(), key.as_str()),
            (None, Some(_)) => (",", ": "),
            (None, None) => (", ", ": "),
        };
        let line = |out: &mut String, depth: usize| {
            if let Some(indent) = &self.indent {
                out.push('\n');
                *out += &indent.repeat(depth);
            }
        };
        out.push(ends.0);
        for (i, (key, value)) in items.iter().enumerate() {
            if out.len() > self.limit {
                return;
            }
            if i > 0 {
                *out += item_separator;
            }
            line(out, depth + 1);
            if let Some(key) = key {
                self.string(out, key);
                *out += key_separator;
            }
            self.value(out, value, depth + 1);
        }
        if !items.is_empty() {
            line(out, depth);
        }
        out.push(ends.1);
    }

    fn string(&self, out: &mut String, text: &str) {
        let quoted = Value::from(text).to_string();
        if !self.ascii {
            *out += &quoted;
            return;
        }
        for c in quoted.chars() {
            if c.is_ascii() {
                out.push(c);
            } else {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    *out += &format!("\\u{unit:04x}");
                }
            }
        }
    }
}

const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// `strftime` of a time in seconds since 1970, in UTC; unknown codes are copied.
pub(super) fn strftime(format: &str, seconds: u64) -> String {
    let (days, time) = ((seconds / 86400) as i64, seconds % 86400);
    let (year, month, day) = civil(days);
    let first = (1..month).map(|m| days_of_month(year, m)).sum::<i64>();
    let (hour, minute, second) = (time / 3600, time / 60 % 60, time % 60);
    let (day_name, month_name) = (DAYS[((days + 4) % 7) as usize], MONTHS[month as usize - 1]);
    let hour12 = (hour + 11) % 12 + 1;
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let code = chars.next();
        let (code, plain) = if code == Some('-') { (chars.next(), true) } else { (code, false) };
        let two = |n: u64| if plain { n.to_string() } else { format!("{n:02}") };
        out += &match code {
            Some('Y') => year.to_string(),
            Some('y') => two((year % 100) as u64),
            Some('m') => two(month as u64),
            Some('d') => two(day as u64),
            Some('e') => format!("{day:2}"),
            Some('B') => month_name.into(),
            Some('b' | 'h') => month_name[..3].into(),
            Some('A') => day_name.into(),
            Some('a') => day_name[..3].into(),
            Some('H') => two(hour),
            Some('I') => two(hour12),
            Some('M') => two(minute),
            Some('S') => two(second),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.into(),
            Some('j') => format!("{:03}", first + day),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('Z') => "UTC".into(),
            Some('%') => "%".into(),
            Some(other) => format!("%{other}"),
            None => "%".into(),
        };
    }
    out
}

/// Year, month and day of a day counted from 1970-01-01.
fn civil(mut days: i64) -> (i64, i64, i64) {
    // A cycle of 400 years has the same days each time.
    let mut year = 1970 + 400 * (days / 146_097);
    days %= 146_097;
    let mut month = 1;
    loop {
        let length = (1..=12).map(|m| days_of_month(year, m)).sum::<i64>();
        if days < length {
            break;
        }
        (days, year) = (days - length, year + 1);
    }
    while days >= days_of_month(year, month) {
        (days, month) = (days - days_of_month(year, month), month + 1);
    }
    (year, month, days + 1)
}

fn days_of_month(year: i64, month: i64) -> i64 {
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    match month {
        2 => 28 + leap as i64,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_look_as_in_python() {
        let expected = [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e-4, "0.0001"),
            (1e-5, "1e-05"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (-2.25, "-2.25"),
            (f64::INFINITY, "inf"),
        ];
        for (value, text) in expected {
            assert_eq!(float(value), text);
        }
    }

    #[test]
    fn times_look_as_in_python() {
        // datetime.fromtimestamp(n, timezone.utc).strftime("%Y-%m-%d %H:%M:%S %a %B %j %-d %I %p %y %%")
        let format = "%Y-%m-%d %H:%M:%S %a %B %j %-d %I %p %y %%";
        for (seconds, text) in [
            (0, "1970-01-01 00:00:00 Thu January 001 1 12 AM 70 %"),
            (951_782_399, "2000-02-28 23:59:59 Mon February 059 28 11 PM 00 %"),
            (951_782_400, "2000-02-29 00:00:00 Tue February 060 29 12 AM 00 %"),
            (1_735_689_599, "2024-12-31 23:59:59 Tue December 366 31 11 PM 24 %"),
            (1_785_542_400, "2026-08-01 00:00:00 Sat August 213 1 12 AM 26 %"),
        ] {
            assert_eq!(strftime(format, seconds), text);
        }
    }
}
