//! Helpers of all sections: classes of runs, formatted cells, lists of names.

use ballast_format as format;
pub(super) use ballast_format::plural;
use ballast_report::page::{inline, prose};

use crate::Findings;
use crate::findings::{Kind, Run};

/// Color of the f32 floor in every plot.
pub(super) const FLOOR_COLOR: usize = 7;

/// The f32 run: its error is the floor, the cost of f32 arithmetic itself.
pub(super) fn floor(findings: &Findings) -> Option<&Run> {
    findings.runs.iter().find(|run| is_floor(run))
}

pub(super) fn is_floor(run: &Run) -> bool {
    run.name == "f32"
}

/// All other runs, the largest mean KL first.
pub(super) fn policies(findings: &Findings) -> impl Iterator<Item = &Run> {
    findings.runs.iter().filter(|run| !is_floor(run))
}

/// Returns true if a run changes a single tensor or site.
pub(super) fn is_single(run: &Run) -> bool {
    matches!(run.kind, Kind::Tensor | Kind::Site)
}

/// Returns true if the outputs are non-finite.
pub(super) fn is_broken(run: &Run) -> bool {
    run.has_outputs() && !run.kl.mean.is_finite()
}

/// The compared checkpoint or dump, in a study that compares just two.
pub(super) fn other(findings: &Findings) -> Option<&Run> {
    match &findings.runs[..] {
        [run] if matches!(run.kind, Kind::Checkpoint | Kind::Dump) => Some(run),
        _ => None,
    }
}

/// The first `each` whole policies and the first `each` single choices that satisfy `with`.
pub(super) fn top(findings: &Findings, each: usize, with: impl Fn(&Run) -> bool) -> Vec<&Run> {
    let (mut whole, mut single) = (0, 0);
    policies(findings)
        .filter(|run| with(run))
        .filter(|run| {
            let seen = if is_single(run) { &mut single } else { &mut whole };
            *seen += 1;
            *seen <= each
        })
        .collect()
}

/// A section heading with a paragraph below it.
pub(super) fn heading(id: &str, title: &str, caption: &str) -> String {
    format!("<h2 id=\"{id}\">{}</h2>\n{}", inline(title), soft(caption))
}

/// A paragraph in a muted color; empty for empty text.
pub(super) fn soft(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!("<p class=\"soft\">{}</p>\n", prose(text)) }
}

/// A name in backticks, which the page shows as code.
pub(super) fn named(name: &str) -> String {
    format!("`{}`", name.replace('`', "'"))
}

/// Names in backticks as a list of at most `most`, then how many more there are.
pub(super) fn list(names: &[&str], most: usize) -> String {
    let names: Vec<String> = names.iter().map(|name| named(name)).collect();
    enumerate(&names.iter().map(|name| &name[..]).collect::<Vec<_>>(), most)
}

/// `a, b and c`, or `a, b and 7 more`.
pub(super) fn enumerate(names: &[&str], most: usize) -> String {
    let more = names.len().saturating_sub(most);
    let (shown, last) = match (more, names) {
        (0, []) => return String::new(),
        (0, [one]) => return one.to_string(),
        (0, [shown @ .., last]) => (shown, last.to_string()),
        _ => (&names[..most], format!("{} more", format::count(more))),
    };
    format!("{} and {last}", shown.join(", "))
}

/// `12.3 times`.
pub(super) fn times(ratio: f64) -> String {
    if ratio > 1e6 { "over a million times".into() } else { format!("{} times", format::number(ratio)) }
}

/// The ratio of an error to the f32 floor in words.
pub(super) fn times_floor(error: f64, floor: Option<f64>) -> Option<String> {
    let ratio = error / floor?;
    (ratio.is_finite() && ratio > 0.0).then(|| format!("{} the f32 floor", times(ratio)))
}

/// A number as a table cell.
pub(super) fn cell(value: f64) -> String {
    mark_lost(value, format::number(value))
}

/// A signed difference as a table cell.
pub(super) fn signed_cell(value: f64) -> String {
    mark_lost(value, format::signed(value))
}

/// A fraction as a table cell, in percent.
pub(super) fn share_cell(value: f64) -> String {
    mark_lost(value, format::exact_percent(value).replace(' ', "\u{a0}"))
}

fn mark_lost(value: f64, text: String) -> String {
    if value.is_finite() { text } else { format!("<span class=\"bad\">{text}</span>") }
}

/// A cell followed by its layer.
pub(super) fn in_layer(cell: String, layer: impl std::fmt::Display) -> String {
    format!("{cell}<span class=\"soft\"> layer&nbsp;{layer}</span>")
}

/// The name of a tensor or run as code, with line-break opportunities.
pub(super) fn code(name: &str) -> String {
    let mut html = String::from("<code>");
    for part in name.split_inclusive(['.', '/', ',', '=']) {
        html += &inline(part);
        html += if part.len() > 1 { "<wbr>" } else { "" };
    }
    html + "</code>"
}

/// Sort key of an error; non-finite values rank as the largest.
pub(super) fn badness(error: f64) -> f64 {
    if error.is_finite() { error.abs() } else { f64::INFINITY }
}

/// Largest absolute value of the finite values.
pub(super) fn largest(values: impl IntoIterator<Item = f64>) -> f64 {
    values.into_iter().map(f64::abs).filter(|value| value.is_finite()).fold(0.0, f64::max)
}

/// Mean of the finite values.
pub(super) fn mean(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let (sum, count) = (values.into_iter().filter(|value| value.is_finite()))
        .fold((0.0, 0_u64), |(sum, count), value| (sum + value, count + 1));
    (count > 0).then(|| sum / count as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_as_a_person_says_them() {
        assert_eq!(enumerate(&[], 3), "");
        assert_eq!(enumerate(&["a"], 3), "a");
        assert_eq!(enumerate(&["a", "b", "c"], 3), "a, b and c");
        assert_eq!(enumerate(&["a", "b", "c", "d"], 2), "a, b and 2 more");
        assert_eq!(list(&["a", "b`"], 2), "`a` and `b'`");
    }

    #[test]
    fn names_break_at_their_dots_and_stay_text() {
        assert_eq!(code("layers.3.A_log"), "<code>layers.<wbr>3.<wbr>A_log<wbr></code>");
        assert_eq!(code("<b>"), "<code>&lt;b&gt;<wbr></code>");
    }

    #[test]
    fn differences_have_a_sign_and_what_is_not_finite_is_marked() {
        assert_eq!([0.5, -0.5, 0.0].map(signed_cell), ["+0.500", "-0.500", "0"]);
        assert_eq!(signed_cell(f64::INFINITY), "<span class=\"bad\">non-finite</span>");
        assert_eq!(mean([f64::NAN]), None);
        assert_eq!(mean([1.0, f64::NAN, 3.0]), Some(2.0));
    }
}
