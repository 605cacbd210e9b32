//! The ranks of a run: waiting over the steps, and waiting and memory by rank.

use super::Report;
use super::curves::{plot, steps};
use crate::metrics::RankUse;
use ballast_format::{self as format, sentence};
use ballast_report::plot::{Axis, Band, LinePlot, Look, Scale, Series};

/// Most ranks in the table; of more, those that wait least and most are shown.
const ROWS: usize = 32;

/// Waiting and peak memory of a rank, over all steps.
struct Row {
    rank: usize,
    /// Mean share of a step.
    waiting: f64,
    peak_memory: u64,
}

/// The section about ranks; empty for a run in one process.
pub(super) fn ranks(report: &Report<'_>) -> String {
    // A resumed run may have another number of ranks; the table is about the last one.
    let Some(last) = steps(report).filter_map(|step| step.ranks.as_ref()).last() else {
        return String::new();
    };
    let count = last.waiting.len();
    let uses = || steps(report).filter_map(|step| step.ranks.as_ref());
    let own: Vec<&RankUse> = uses().filter(|ranks| ranks.waiting.len() == count).collect();
    let rows: Vec<Row> = (0..count)
        .map(|rank| Row {
            rank,
            waiting: own.iter().map(|ranks| ranks.waiting[rank]).sum::<f64>() / own.len() as f64,
            peak_memory: own
                .iter()
                .filter_map(|ranks| ranks.peak_memory.get(rank).copied())
                .max()
                .unwrap_or(0),
        })
        .collect();
    format!(
        "<h2 id=\"ranks\">Ranks</h2>\n<p class=\"soft\">{}; all together sent {} in the last step{}.</p>\n{}{}",
        format::plural(count, "rank"),
        format::bytes(last.sent.values().sum()),
        kinds(last),
        waiting(report, &rows),
        table(&rows)
    )
}

/// Bytes by kind of message, in parentheses.
fn kinds(ranks: &RankUse) -> String {
    let kinds: Vec<String> =
        ranks.sent.iter().map(|(kind, bytes)| format!("{kind} {}", format::bytes(*bytes))).collect();
    if kinds.len() < 2 { String::new() } else { format!(" ({})", kinds.join(", ")) }
}

fn waiting(report: &Report<'_>, rows: &[Row]) -> String {
    let (mut band, mut mean) = (Vec::new(), Vec::new());
    for step in steps(report) {
        let Some(ranks) = &step.ranks else { continue };
        let (x, waiting) = (step.step as f64, ranks.waiting.iter().map(|share| 100.0 * share));
        let least = waiting.clone().fold(f64::INFINITY, f64::min);
        let most = waiting.clone().fold(0.0, f64::max);
        band.push((x, least, most));
        mean.push((x, waiting.sum::<f64>() / ranks.waiting.len().max(1) as f64));
    }
    let most = rows.iter().max_by(|a, b| a.waiting.total_cmp(&b.waiting));
    let caption = most.map(|most| {
        format!(
            "On average a rank waited for {} of a step; rank {} most, {}",
            format::percent(rows.iter().map(|row| row.waiting).sum::<f64>() / rows.len() as f64),
            most.rank,
            format::percent(most.waiting)
        )
    });
    LinePlot {
        unit: "% of a step".into(),
        caption: sentence(&[caption]),
        y_axis: Some(Axis::padded(Scale::Linear, band.iter().map(|(_, _, most)| *most).chain([0.0]))),
        bands: vec![Band { name: "least to most".into(), points: band, color: 3 }],
        series: vec![Series { name: "mean of the ranks".into(), points: mean, look: Look::Line, color: 3 }],
        ..plot(report, "waiting", "Waiting for other ranks")
    }
    .html()
}

fn table(rows: &[Row]) -> String {
    let mut shown: Vec<&Row> = rows.iter().collect();
    let mut more = String::new();
    if shown.len() > ROWS {
        shown.sort_by(|a, b| a.waiting.total_cmp(&b.waiting));
        shown = shown[..ROWS / 2].iter().chain(&shown[rows.len() - ROWS / 2..]).copied().collect();
        shown.sort_by_key(|row| row.rank);
        more = format!(
            "<p class=\"soft\">The {ROWS} ranks that waited least and most; all are in metrics.jsonl.</p>\n"
        );
    }
    let rows: String = (shown.iter())
        .map(|row| {
            format!(
                "<tr><td class=\"number\">{}</td><td class=\"number\">{}</td><td class=\"number\">{}</td></tr>\n",
                row.rank,
                format::percent(row.waiting),
                format::bytes(row.peak_memory)
            )
        })
        .collect();
    format!(
        "<div class=\"scroll\"><table><thead><tr><th class=\"number\">rank</th><th class=\"number\">waiting</th>\
         <th class=\"number\">peak memory</th></tr></thead><tbody>{rows}</tbody></table></div>\n{more}"
    )
}
