//! The input token by token: what rounding costs while a text is written.

use ballast_report::format::{self, sentence};
use ballast_report::plot::{Axis, LinePlot, Look, Scale, Series};

use super::table::{Column, Table};
use super::words::{cell, code, heading, named, plural, share_cell, times};
use crate::Findings;
use crate::findings::DecodingRun;

/// Curves in the plot.
const CURVES: usize = 7;

pub(super) fn section(findings: &Findings) -> String {
    let runs = &findings.decoding;
    if runs.is_empty() {
        return String::new();
    }
    let about = "The same input, one token after the other, as a text is written: what is rounded in caches and states is rounded at \
                 every token. Each policy is compared with f32 that decodes.";
    heading("decoding", "Token by token", about) + &plot(runs) + &table(runs)
}

/// The runs with most damage, and the recurrent state by itself.
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
        unit: "nats by token".into(),
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
    let worst = runs.iter().find(|run| run.kl.mean.is_finite()).map(|run| {
        format!("{} is furthest from f32 with a mean of {}", named(&run.name), format::number(run.kl.mean))
    });
    let state = find("state").zip(find("bf16")).and_then(|(state, bf16)| {
        let ratio = bf16.kl.mean / state.kl.mean;
        let text =
            format!("bf16 storage with an f32 state costs {} what a bf16 state alone does", times(ratio));
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
        Column::Number("largest"),
        Column::Number("same likeliest token"),
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
    table.folded("By policy", "most damage first", runs.len() <= 12)
}
