//! Keys chosen by sparse indexers, compared with the reference's choice.

use ballast_format::{self as format, sentence};
use ballast_report::plot::{Axis, LinePlot, Look, Scale, Series};

use super::table::{Column, Table};
use super::words::{
    FLOOR_COLOR, badness, cell, code, floor, heading, in_layer, is_floor, mean, named, plural, share_cell,
};
use crate::Findings;
use crate::findings::Run;

/// Most curves, besides the f32 floor.
const CURVES: usize = 7;

pub(super) fn section(findings: &Findings) -> String {
    let mut runs: Vec<&Run> =
        findings.runs.iter().filter(|run| !run.indexer.is_empty() && !is_floor(run)).collect();
    if runs.is_empty() {
        return String::new();
    }
    runs.sort_by(|a, b| badness(lost(b)).total_cmp(&badness(lost(a))));
    let about = "Share of the reference's keys that a policy chooses too, averaged over queries with more keys than the indexer takes.";
    heading("indexer", "Indexer", about) + &plot(findings, &runs) + &table(&runs)
}

/// Mean share of the reference's keys that a run misses.
fn lost(run: &Run) -> f64 {
    mean(run.indexer.iter().map(|layer| 1.0 - layer.overlap)).unwrap_or(f64::NAN)
}

fn plot(findings: &Findings, runs: &[&Run]) -> String {
    let points = |run: &Run| -> Vec<(f64, f64)> {
        run.indexer.iter().map(|layer| (layer.layer as f64, 100.0 * layer.overlap)).collect()
    };
    let mut series: Vec<Series> = (runs.iter().take(CURVES).enumerate())
        .map(|(color, run)| Series { name: run.name.clone(), points: points(run), look: Look::Dots, color })
        .collect();
    let floor = floor(findings).filter(|floor| !floor.indexer.is_empty());
    series.extend(floor.map(|floor| Series {
        name: "f32 floor".into(),
        points: points(floor),
        look: Look::Pale,
        color: FLOOR_COLOR,
    }));
    let layers = series.iter().flat_map(|series| series.points.iter().map(|point| point.0));
    LinePlot {
        id: "indexer-overlap".into(),
        title: "Key overlap with the reference".into(),
        unit: "% of keys, by layer".into(),
        caption: caption(runs),
        x_name: "layer".into(),
        x_axis: Some(Axis::tight(Scale::Linear, layers).whole()),
        series,
        ..LinePlot::default()
    }
    .html()
}

fn caption(runs: &[&Run]) -> String {
    let layers = runs.iter().flat_map(|run| run.indexer.iter().map(move |layer| (run, layer)));
    let worst = layers.max_by(|a, b| badness(1.0 - a.1.overlap).total_cmp(&badness(1.0 - b.1.overlap)));
    let text = worst.map(|(run, layer)| match layer.overlap == 1.0 {
        true => "every policy chooses the same keys in every layer".to_string(),
        false => format!(
            "the smallest overlap is {} for {} in layer {}, where {} of {} queries choose exactly the same keys",
            format::exact_percent(layer.overlap),
            named(&run.name),
            layer.layer,
            format::exact_percent(layer.same),
            format::count(layer.queries)
        ),
    });
    let same = runs.iter().filter(|run| run.indexer.iter().all(|layer| layer.overlap == 1.0)).count();
    let same = (same > 0 && same < runs.len())
        .then(|| format!("{same} of {} policies choose the same keys everywhere", runs.len()));
    let left_out = runs.len().saturating_sub(CURVES);
    let left_out =
        (left_out > 0).then(|| format!("{} with a larger overlap not drawn", plural(left_out, "run")));
    sentence(&[text, same, left_out])
}

fn table(runs: &[&Run]) -> String {
    let mut table = Table::new(&[
        Column::Text("policy"),
        Column::Number("key overlap"),
        Column::Number("worst layer"),
        Column::Number("queries with equal keys"),
        Column::Number("indexer gradient error"),
    ]);
    for run in runs {
        let worst =
            run.indexer.iter().max_by(|a, b| badness(1.0 - a.overlap).total_cmp(&badness(1.0 - b.overlap)));
        table.row(&[
            code(&run.name),
            share_cell(1.0 - lost(run)),
            worst.map_or(String::new(), |layer| in_layer(share_cell(layer.overlap), layer.layer)),
            mean(run.indexer.iter().map(|layer| layer.same)).map_or(String::new(), share_cell),
            run.indexer_gradient_error.map_or(String::new(), cell),
        ]);
    }
    table.folded("By policy", "means over layers", runs.len() <= 12)
}
