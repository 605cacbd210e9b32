//! Tables: events, samples, memory, the ledger.

use std::collections::BTreeMap;

use super::{LedgerRow, Report, Sample};
use crate::metrics::Event;
use ballast_format as format;
use ballast_report::page::{block, inline};
use ballast_report::plot::StackedBar;

/// Most events that are shown; further ones are only counted.
const EVENTS: usize = 200;

pub(super) fn events(events: &[&Event]) -> String {
    if events.is_empty() {
        return String::new();
    }
    let mut kinds: BTreeMap<&str, u64> = BTreeMap::new();
    events.iter().for_each(|event| *kinds.entry(&event.what).or_default() += 1);
    let kinds: Vec<String> =
        kinds.iter().map(|(what, number)| format!("{what} ({})", format::count(*number))).collect();
    let rows: String = (events.iter().take(EVENTS).enumerate())
        .map(|(index, event)| {
            format!(
                "<tr><td>{}</td><td class=\"number\">{}</td><td>{}</td><td>{}</td></tr>\n",
                index + 1,
                format::count(event.step),
                inline(&event.what),
                block(&event.text)
            )
        })
        .collect();
    let more = match events.len().checked_sub(EVENTS + 1) {
        Some(more) => format!("<p class=\"soft\">{} more are in metrics.jsonl.</p>", format::count(more + 1)),
        None => String::new(),
    };
    format!(
        "<h2 id=\"events\">Events</h2>\n<p class=\"soft\">{}: {}. Numbers refer to the flags above the plots.</p>\n\
         <div class=\"scroll\"><table class=\"events\"><thead><tr><th></th><th class=\"number\">step</th><th>event</th>\
         <th>details</th></tr></thead><tbody>{rows}</tbody></table></div>{more}\n",
        format::plural(events.len(), "event"),
        inline(&kinds.join(", "))
    )
}

/// Samples by step, the latest first; earlier steps are collapsed.
pub(super) fn samples(samples: &[Sample]) -> String {
    let mut by_step: BTreeMap<u64, Vec<&Sample>> = BTreeMap::new();
    samples.iter().for_each(|sample| by_step.entry(sample.step).or_default().push(sample));
    let mut html = String::new();
    for (index, (step, samples)) in by_step.iter().rev().enumerate() {
        let cards: String = samples.iter().map(|sample| card(sample)).collect();
        let judged = samples.iter().filter(|sample| sample.right.is_some()).count();
        let right = samples.iter().filter(|sample| sample.right == Some(true)).count();
        let share = if judged > 0 { format!("{right} of {judged} correct") } else { String::new() };
        html += &format!(
            "<details{}><summary>After step {}<span class=\"soft\">{share}</span></summary>\
             <div class=\"samples\">{cards}</div></details>\n",
            if index == 0 { " open" } else { "" },
            format::count(*step)
        );
    }
    if html.is_empty() { html } else { format!("<h2 id=\"samples\">Samples</h2>\n{html}") }
}

fn card(sample: &Sample) -> String {
    let (class, mark) = match sample.right {
        Some(true) => (" is-right", " <span class=\"good\">✓ correct</span>"),
        Some(false) => (" is-wrong", " <span class=\"bad\">✗ wrong</span>"),
        None => ("", ""),
    };
    let expected = match &sample.expected {
        Some(expected) if sample.right != Some(true) => {
            format!("<dt>Expected</dt><dd>{}</dd>", block(expected))
        }
        _ => String::new(),
    };
    format!(
        "<dl class=\"sample{class}\"><dt>Prompt</dt><dd>{}</dd><dt>Answer{mark}</dt><dd>{}</dd>{expected}</dl>\n",
        block(&sample.prompt),
        block(&sample.answer)
    )
}

/// The memory plan beside the measured peak, with `plot` below.
pub(super) fn memory(report: &Report<'_>, plot: &str) -> String {
    let planned: u64 = report.plan.iter().map(|row| row.bytes).sum();
    if planned == 0 && report.measured_peak == 0 {
        return plot.into();
    }
    let caption = match (planned, report.measured_peak) {
        (0, peak) => format!("Peak memory of the process: {}.", format::bytes(peak)),
        (_, 0) => format!("Planned memory: {}.", format::bytes(planned)),
        (_, peak) => {
            let more = peak as f64 / planned as f64 - 1.0;
            format!(
                "The measured peak, {}, is {} {} the plan of {}.",
                format::bytes(peak),
                format::percent(more.abs()),
                if more > 0.0 { "above" } else { "below" },
                format::bytes(planned)
            )
        }
    };
    let bar = StackedBar {
        parts: report.plan.iter().map(|row| (row.what.clone(), row.bytes as f64)).collect(),
        mark: (report.measured_peak > 0).then(|| ("measured peak".into(), report.measured_peak as f64)),
    };
    let mut html = format!("<h2 id=\"memory\">Memory</h2>\n<p class=\"soft\">{caption}</p>\n");
    if planned > 0 {
        html += &bar.html(|size| format::bytes(size as u64));
        html += &plan_table(report, planned);
    }
    html + plot
}

fn plan_table(report: &Report<'_>, planned: u64) -> String {
    let row = |name: String, bytes: u64| {
        let share = format::percent(bytes as f64 / planned as f64);
        format!(
            "<tr><td>{name}</td><td class=\"number\">{}</td><td class=\"number\">{share}</td></tr>\n",
            format::bytes(bytes)
        )
    };
    let rows: String = (report.plan.iter().enumerate())
        .map(|(index, part)| {
            let swatch = format!("<i class=\"swatch {}\"></i>", StackedBar::class(index));
            row(swatch + &inline(&part.what), part.bytes)
        })
        .collect();
    let mut foot = row("Planned".into(), planned);
    if report.measured_peak > 0 {
        foot += &row("Measured peak".into(), report.measured_peak);
    }
    format!(
        "<div class=\"scroll\"><table><thead><tr><th>part</th><th class=\"number\">size</th>\
         <th class=\"number\">share of plan</th></tr></thead><tbody>{rows}</tbody><tfoot>{foot}</tfoot></table></div>\n"
    )
}

/// The ledger, one group per name pattern and type; groups with a failed check come first, expanded.
pub(super) fn ledger(rows: &[LedgerRow]) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let mut groups: BTreeMap<(bool, String, &str), Vec<&LedgerRow>> = BTreeMap::new();
    let mut faulty: BTreeMap<(String, &str), bool> = BTreeMap::new();
    for row in rows {
        *faulty.entry((format::name_pattern(&row.name), &row.dtype)).or_default() |= !row.fine;
    }
    for row in rows {
        let key = (format::name_pattern(&row.name), &row.dtype[..]);
        groups.entry((!faulty[&key], key.0, key.1)).or_default().push(row);
    }
    let groups: String = groups
        .iter()
        .map(|((fine, pattern, dtype), rows)| ledger_group(*fine, pattern, dtype, rows))
        .collect();
    let checks: u64 = rows.iter().map(|row| row.checks).sum();
    let wrong = rows.iter().filter(|row| !row.fine).count() as u64;
    let verdict = match wrong {
        0 => "<span class=\"good\">all checks passed</span>".to_string(),
        _ => format!("<span class=\"bad\">{} failed a check</span>", format::plural(wrong, "tensor")),
    };
    format!(
        "<h2 id=\"ledger\">Protected-tensor ledger</h2>\n<p class=\"soft\">{}, {}: {verdict}. A forward \
         pass was seen to read exactly the checked bits of {}.</p>\n\
         {groups}",
        format::plural(rows.len(), "tensor"),
        format::plural(checks, "check"),
        format::plural(rows.iter().filter(|row| row.live).count(), "tensor"),
    )
}

fn ledger_group(fine: bool, pattern: &str, dtype: &str, rows: &[&LedgerRow]) -> String {
    let mark = match rows.iter().filter(|row| !row.fine).count() {
        0 => "<span class=\"good\">✓</span>".to_string(),
        wrong => format!("<span class=\"bad\">✗ {wrong} of {}</span>", rows.len()),
    };
    let lines: String = (rows.iter())
        .map(|row| {
            format!(
                "<tr><td>{}</td><td><code>{}</code></td><td class=\"number\">{}</td><td><code>{}</code></td>\
                 <td><code>{}</code></td><td>{}</td></tr>\n",
                if row.fine { "<span class=\"good\">✓</span>" } else { "<span class=\"bad\">✗</span>" },
                inline(&row.name),
                format::count(row.checks),
                inline(&row.first_checksum),
                inline(&row.last_checksum),
                if row.live { "yes" } else { "no" }
            )
        })
        .collect();
    format!(
        "<details{}><summary>{mark} <code>{}</code><span class=\"soft\">{}, {}</span></summary><div class=\"scroll\">\
         <table><thead><tr><th></th><th>tensor</th><th class=\"number\">checks</th><th>first checksum</th>\
         <th>last checksum</th><th>read by forward</th></tr></thead><tbody>{lines}</tbody></table></div></details>\n",
        if fine { "" } else { " open" },
        inline(pattern),
        inline(dtype),
        format::plural(rows.len(), "tensor")
    )
}
