//! Output of the commands: tables that fit the terminal, sizes, JSON with a stable schema.
//!
//! All writes to stdout and stderr happen here. A closed pipe (`| head`) ends the output, not the command.
//! Any other failure to write to stdout, such as a full device, is kept and returned by [`finish`] as the
//! error of the command. Of several ranks, the first prints; the others print their errors alone.

use std::collections::HashMap;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::sync::Mutex;

use ballast_format as format;
pub(crate) use ballast_format::{bytes, count, plural};
use comfy_table::{CellAlignment, ContentArrangement, LineStyle, Table, TableStyle};
use serde::Serialize;

use crate::launcher;
use crate::warnings::Warnings;

/// Width of tables if the output is not a terminal.
const PLAIN_WIDTH: u16 = 120;

/// Dense style: lines around the table and below its headings, none between rows.
const STYLE: TableStyle = TableStyle::new()
    .top_border(LineStyle::none().fill('─').junction('─'))
    .header_separator(LineStyle::none().fill('─').junction('─'))
    .bottom_border(LineStyle::none().fill('─').junction('─'));

/// The first failure to write to stdout; nothing is written after it.
static FAILED: Mutex<Option<io::Error>> = Mutex::new(None);

/// Prints text on stdout.
pub(crate) fn print(text: &str) {
    write(|stdout| stdout.write_all(text.as_bytes()));
}

/// Prints text on stdout and flushes it. Returns false if stdout can no longer be written.
pub(crate) fn print_now(text: &str) -> bool {
    write(|stdout| stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()))
}

/// Prints a line on stderr; failures are ignored.
pub(crate) fn note(line: &str) {
    if launcher::rank() == 0 {
        note_on_any_rank(line);
    }
}

/// Prints an error on stderr, on any rank; failures are ignored.
pub(crate) fn error(message: &str) {
    match launcher::rank() {
        0 => note_on_any_rank(&format!("ballast: {message}")),
        rank => note_on_any_rank(&format!("ballast: rank {rank}: {message}")),
    }
}

fn note_on_any_rank(line: &str) {
    let _ = io::stderr().lock().write_all(format!("{line}\n").as_bytes());
}

/// Flushes stdout. Returns the first error of any write; a closed pipe is none.
pub(crate) fn finish() -> io::Result<()> {
    write(|stdout| stdout.flush());
    match FAILED.lock().map(|mut failed| failed.take()) {
        Ok(Some(error)) if error.kind() != ErrorKind::BrokenPipe => Err(error),
        _ => Ok(()),
    }
}

fn write(work: impl FnOnce(&mut io::StdoutLock<'_>) -> io::Result<()>) -> bool {
    if launcher::rank() > 0 {
        return true;
    }
    let Ok(mut failed) = FAILED.lock() else { return false };
    if failed.is_none() {
        *failed = work(&mut io::stdout().lock()).err();
    }
    failed.is_none()
}

/// Formats `value` as one JSON document with the name and version of its schema, and the unknown keys of
/// config.json.
pub(crate) fn json(command: &str, value: &impl Serialize, warnings: &Warnings) -> String {
    #[derive(Serialize)]
    struct Document<'a, T> {
        schema: String,
        #[serde(flatten)]
        value: &'a T,
        #[serde(skip_serializing_if = "Option::is_none")]
        unknown_config_keys: Option<&'a Vec<String>>,
    }
    let unknown_config_keys = warnings.unknown_config_keys();
    let document = Document { schema: format!("ballast.{command}/1"), value, unknown_config_keys };
    serde_json::to_string_pretty(&document).expect("reports are plain data")
}

/// Creates a table with these headings; a column whose heading starts with `>` is right-aligned.
pub(crate) fn table(headings: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(STYLE).set_content_arrangement(ContentArrangement::Dynamic);
    // mpirun gives its ranks a terminal without a width.
    if !std::io::stdout().is_terminal() || table.width() == Some(0) {
        table.set_width(PLAIN_WIDTH);
    }
    table.set_header(headings.iter().map(|h| h.trim_start_matches('>')));
    for (i, heading) in headings.iter().enumerate() {
        if heading.starts_with('>')
            && let Some(column) = table.column_mut(i)
        {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// Escapes characters of names from files that could control the terminal, change the text direction or break
/// the line.
pub(crate) fn clean(text: &str) -> String {
    let changes_direction =
        |c| matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let breaks_line = |c| matches!(c, '\u{2028}' | '\u{2029}');
    let escape = |c: char| {
        if c.is_control() || changes_direction(c) || breaks_line(c) {
            c.escape_default().to_string()
        } else {
            c.to_string()
        }
    };
    text.chars().map(escape).collect()
}

/// Does the same as [`clean`] but keeps line breaks.
pub(crate) fn clean_lines(text: &str) -> String {
    text.split('\n').map(clean).collect::<Vec<_>>().join("\n")
}

/// Replaces numbers in tensor names by `*`. Returns each pattern once with its number of occurrences.
pub(crate) fn patterns<'a>(names: impl IntoIterator<Item = &'a String>) -> Vec<(String, usize)> {
    let mut found: Vec<(String, usize)> = Vec::new();
    let mut places: HashMap<String, usize> = HashMap::new();
    for name in names {
        let pattern = clean(&format::name_pattern(name));
        let place = *places.entry(pattern.clone()).or_insert(found.len());
        match found.get_mut(place) {
            Some((_, n)) => *n += 1,
            None => found.push((pattern, 1)),
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_counts_are_readable() {
        assert_eq!(bytes(17), "17 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(5 << 30), "5.0 GiB");
        assert_eq!(count(7), "7");
        assert_eq!(count(1234567), "1,234,567");
        assert_eq!(plural(1, "tensor"), "1 tensor");
        assert_eq!(plural(2000, "tensor"), "2,000 tensors");
    }

    #[test]
    fn control_characters_never_reach_the_terminal() {
        assert_eq!(clean("a\u{1b}[31mb\r\u{202e}"), "a\\u{1b}[31mb\\r\\u{202e}");
        assert_eq!(clean("a\nb"), "a\\nb");
        assert_eq!(clean_lines("a\nb\r"), "a\nb\\r");
    }

    #[test]
    fn names_of_many_layers_become_one_pattern() {
        let names: Vec<String> = ["l.0.a", "l.1.a", "l.1.b"].map(String::from).to_vec();
        assert_eq!(patterns(&names), [("l.*.a".to_string(), 2), ("l.*.b".to_string(), 1)]);
    }
}
