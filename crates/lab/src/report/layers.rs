//! Error of the residual stream after each layer, one plot per run, on shared axes.

use ballast_format::{self as format, sentence};
use ballast_report::plot::{Axis, LinePlot, Look, Scale, Series, grid, legend};

use super::words::{
    FLOOR_COLOR, floor, heading, is_broken, list, named, plural, policies, soft, times_floor,
};
use crate::Findings;
use crate::findings::{LayerError, Run};

/// Most runs with a plot.
const PLOTS: usize = 36;
/// Most names in a sentence.
const NAMES: usize = 12;

pub(super) fn section(findings: &Findings) -> String {
    let none: &[LayerError] = &[];
    let of_floor = floor(findings).map_or(none, |floor| &floor.by_layer[..]);
    let (same, drawn): (Vec<&Run>, Vec<&Run>) = policies(findings)
        .filter(|run| !run.by_layer.is_empty())
        .partition(|run| !of_floor.is_empty() && run.by_layer == of_floor);
    let shown = &drawn[..drawn.len().min(PLOTS)];
    if shown.is_empty() && same.is_empty() {
        return String::new();
    }
    let all = (shown.iter().map(|run| &run.by_layer[..]).chain([of_floor])).flatten();
    let y_axis = Axis::padded(Scale::Log, all.map(|layer| layer.error));
    let layers = (shown.iter().map(|run| &run.by_layer[..]).chain([of_floor])).flatten();
    let x_axis = Axis::tight(Scale::Linear, layers.map(|layer| layer.layer as f64)).whole();
    let plots: Vec<String> = shown.iter().map(|run| plot(run, of_floor, x_axis, y_axis).html()).collect();

    let mut html = heading("layers", "Error by layer", &caption(shown, of_floor));
    if !plots.is_empty() {
        if !of_floor.is_empty() {
            let keys = [("c0".to_string(), "the policy"), (format!("pale c{FLOOR_COLOR}"), "f32 floor")];
            html += &legend(&keys);
        }
        html += &grid(&plots);
    }
    if drawn.len() > PLOTS {
        html += &soft(&format!("{} with smaller errors not drawn.", plural(drawn.len() - PLOTS, "run")));
    }
    if !same.is_empty() {
        let names: Vec<&str> = same.iter().map(|run| &run.name[..]).collect();
        let text = format!("not drawn, equal to f32 after every layer: {}", list(&names, NAMES));
        html += &soft(&sentence(&[Some(text)]));
    }
    html
}

fn caption(shown: &[&Run], of_floor: &[LayerError]) -> String {
    let axes = match shown.len() {
        1 => "Relative error of the residual stream after each layer, RMS(difference) / RMS, log scale.",
        _ => {
            "Relative error of the residual stream after each layer, RMS(difference) / RMS. All plots share their axes (log scale); \
             the largest KL comes first."
        }
    };
    let Some(run) = shown.iter().find(|run| !is_broken(run)) else { return axes.into() };
    let (Some(first), Some(last)) = (run.by_layer.first(), run.by_layer.last()) else { return axes.into() };
    let of_last = of_floor.iter().find(|layer| layer.layer == last.layer).map(|layer| layer.error);
    let floor = times_floor(last.error, of_last).map(|times| format!(", {times}"));
    let text = format!(
        "{} has {} after layer {} and {} after layer {}{}",
        named(&run.name),
        format::number(first.error),
        first.layer,
        format::number(last.error),
        last.layer,
        floor.unwrap_or_default()
    );
    format!("{axes} {}", sentence(&[Some(text)]))
}

fn plot(run: &Run, of_floor: &[LayerError], x_axis: Axis, y_axis: Axis) -> LinePlot {
    let mut series = vec![Series {
        name: run.name.clone(),
        points: points(&run.by_layer),
        look: if run.by_layer.len() < 2 { Look::Dots } else { Look::Line },
        color: 0,
    }];
    if !of_floor.is_empty() {
        let floor =
            Series { name: "f32".into(), points: points(of_floor), look: Look::Pale, color: FLOOR_COLOR };
        series.insert(0, floor);
    }
    LinePlot {
        title: run.name.clone(),
        caption: plot_caption(run, of_floor),
        x_name: "layer".into(),
        series,
        x_axis: Some(x_axis),
        y_axis: Some(y_axis),
        small: true,
        ..LinePlot::default()
    }
}

/// Points of a curve; layers with zero error cannot be drawn on a log axis, and the caption counts them.
fn points(by_layer: &[LayerError]) -> Vec<(f64, f64)> {
    (by_layer.iter().filter(|layer| layer.error != 0.0))
        .map(|layer| (layer.layer as f64, layer.error))
        .collect()
}

fn plot_caption(run: &Run, of_floor: &[LayerError]) -> String {
    let finite = || run.by_layer.iter().filter(|layer| layer.error.is_finite());
    let exact = finite().filter(|layer| layer.error == 0.0).count();
    let exact = (exact > 0).then(|| format!("no error after {}", plural(exact, "layer")));
    let last = finite().next_back().map(|layer| {
        let of_last = of_floor.iter().find(|other| other.layer == layer.layer).map(|other| other.error);
        let floor = times_floor(layer.error, of_last).map_or(String::new(), |times| format!(", {times}"));
        format!("{} after layer {}{floor}", format::number(layer.error), layer.layer)
    });
    sentence(&[last, exact])
}
