//! Decoding: the same input token by token.

use ballast_format::{self as format, sentence};
use ballast_report::plot::{Axis, LinePlot, Look, Scale, Series};

use super::table::{Column, Table};
use super::words::{cell, code, heading, named, plural, share_cell, times};
use crate::Findings;
use crate::findings::DecodingRun;

/// Most curves in the plot.
const CURVES: usize = 7;

pub(super) fn section(findings: &Findings) -> String {
    let runs = &findings.decoding;
    if runs.is_empty() {
        return String::new();
    }
    let about = "The same input, decoded token by token, so caches and recurrent states are rounded at every token. Each policy is compared \
                 with decoding in f32.";
    heading("decoding", "Decoding", about) + &plot(runs) + &table(runs)
}

/// The runs with the largest KL, and the one that rounds only the recurrent state.
fn drawn(runs: &[DecodingRun]) -> Vec<&DecodingRun> {
    let has_any =
        |run: &&DecodingRun| run.by_position.iter().any(|place| place.kl.is_finite() && place.kl > 0.0);
    let mut drawn: Vec<&DecodingRun> = runs.iter().filter(has_any).take(CURVES).collect();
    let state = runs.iter().filter(has_any).find(|run| run.name == "state");
    drawn.extend(state.filter(|_| drawn.iter().all(|run| run.name != "state")));
    drawn
}

fn plot(runs: &[DecodingRun]) -> String {
    let drawn = drawn(runs);
    if drawn.is_empty() {
        return String::new();
    }
    let points = |run: &DecodingRun| -> Vec<(f64, f64)> {
        let places = run.by_position.iter().filter(|place| place.kl != 0.0);
        places.map(|place| (place.to as f64, place.kl)).collect()
    };
    let look = if drawn.iter().all(|run| points(run).len() < 2) { Look::Dots } else { Look::Line };
    let series: Vec<Series> = (drawn.iter().enumerate())
        .map(|(color, run)| Series { name: run.name.clone(), points: points(run), look, color })
        .collect();
    let xs = series.iter().flat_map(|series| series.points.iter().map(|point| point.0));
    LinePlot {
        id: "decoding-kl".into(),
        title: "KL divergence while decoding".into(),
        unit: "nats per token".into(),
        caption: caption(runs, drawn.len()),
        x_name: "token".into(),
        x_axis: Some(Axis::tight(Scale::Log, xs).whole()),
        scale: Scale::Log,
        series,
        ..LinePlot::default()
    }
    .html()
}

fn caption(runs: &[DecodingRun], drawn: usize) -> String {
    let find = |name: &str| runs.iter().find(|run| run.name == name);
    let worst = runs
        .iter()
        .find(|run| run.kl.mean.is_finite())
        .map(|run| format!("{} has the largest mean, {}", named(&run.name), format::number(run.kl.mean)));
    let state = find("state").zip(find("bf16")).and_then(|(state, bf16)| {
        let ratio = bf16.kl.mean / state.kl.mean;
        let text =
            format!("bf16 storage with an f32 state costs {} as much as a bf16 state alone", times(ratio));
        (ratio.is_finite() && ratio > 0.0).then_some(text)
    });
    let left_out = runs.len() - drawn;
    let left_out = (left_out > 0).then(|| format!("{} not drawn", plural(left_out, "more run")));
    sentence(&[worst, state, left_out])
}

fn table(runs: &[DecodingRun]) -> String {
    let mut table = Table::new(&[
        Column::Text("policy"),
        Column::Number("KL mean"),
        Column::Number("p99"),
        Column::Number("max"),
        Column::Number("top-1 agreement"),
    ]);
    for run in runs {
        table.row(&[
            code(&run.name),
            cell(run.kl.mean),
            cell(run.kl.p99),
            cell(run.kl.max),
            share_cell(run.top1_agreement),
        ]);
    }
    table.folded("By policy", "largest mean KL first", runs.len() <= 12)
}
