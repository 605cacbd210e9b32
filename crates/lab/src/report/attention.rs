//! Ranges of attention logits, and keys whose rank changes by rounding.
//!
//! bf16 has eight significant bits: neighbors of x are 2^(floor(log2 |x|) - 7) apart, so half a unit from 64
//! on, one unit from 128 on, and so forth. A smaller difference of logits may vanish, and with it the order
//! of two keys. The largest number in f16 is 65504.

use ballast_format::{self as format, sentence};
use ballast_report::plot::{Axis, Bin, Binned, Scale, Zone, grid, legend};

use super::table::{Column, Table};
use super::words::{
    badness, cell, code, heading, in_layer, largest, mean, plural, policies, share_cell, soft,
};
use crate::Findings;
use crate::findings::{AttentionError, LogitRange, Run};

/// Most layers with a plot.
const PLOTS: usize = 24;
/// Tables with at most this many rows are expanded.
const OPEN_ROWS: usize = 12;
/// Magnitude from which on neighbors in bf16 are half a unit apart.
const HALF_UNIT: f64 = 64.0;
/// The largest number in f16.
const F16_MAX: f64 = 65504.0;
/// Layers share an axis if the widest range is at most this many times the median one.
const SHARED: f64 = 12.0;

pub(super) fn section(findings: &Findings) -> String {
    let ranges = &findings.attention;
    let changes = changes(findings);
    if ranges.is_empty() && changes.is_empty() {
        return String::new();
    }
    heading("attention", "Attention logits", &caption(ranges))
        + &histograms(ranges)
        + &range_table(ranges)
        + &changes
}

fn caption(ranges: &[LogitRange]) -> String {
    let by_size = |a: &&LogitRange, b: &&LogitRange| badness(a.largest).total_cmp(&badness(b.largest));
    let Some(widest) = ranges.iter().max_by(by_size) else { return String::new() };
    let f16 = match widest.f16_ulp {
        Some(f16) => format!(" and {} in f16", ulp(f16)),
        None => ", beyond the range of f16".into(),
    };
    let first = format!(
        "in the reference the largest |logit| is {}, in layer {}, where neighbors are {} apart in bf16{f16}",
        format::number(widest.largest),
        widest.layer,
        ulp(widest.bf16_ulp)
    );
    let below = ranges.iter().filter(|range| range.largest < HALF_UNIT).count();
    let below = match below {
        _ if below == ranges.len() => {
            "all layers stay below 64, where neighbors in bf16 are less than half a unit apart".into()
        }
        _ => format!(
            "{} of {} stay below 64, where neighbors in bf16 are less than half a unit apart",
            format::count(below),
            plural(ranges.len(), "layer")
        ),
    };
    sentence(&[Some(first), Some(below)])
}

/// Formats a power of two exactly if it is short.
fn ulp(value: f64) -> String {
    if (0.01..1e6).contains(&value) { value.to_string() } else { format::number(value) }
}

/// Shade, lower end, and distance of neighbors in bf16.
const ZONES: [(usize, f64, &str); 5] =
    [(1, 64.0, "0.5"), (2, 128.0, "1"), (3, 256.0, "2"), (4, 512.0, "4"), (5, 1024.0, "8 or more")];

fn zones(reach: f64) -> Vec<Zone> {
    let mut zones = Vec::new();
    for (shade, from, ulp) in ZONES {
        let to = if shade == Zone::SHADES { reach.max(2.0 * from) } else { 2.0 * from };
        let name = format!("neighbors in bf16 {ulp} apart");
        zones.push(Zone { from: -to, to: -from, shade, name: name.clone() });
        zones.push(Zone { from, to, shade, name });
    }
    zones
}

fn histograms(ranges: &[LogitRange]) -> String {
    let mut drawn: Vec<&LogitRange> = ranges.iter().filter(|range| !range.histogram.is_empty()).collect();
    let left_out = drawn.len().saturating_sub(PLOTS);
    if left_out > 0 {
        drawn.sort_by(|a, b| badness(b.largest).total_cmp(&badness(a.largest)));
        drawn.truncate(PLOTS);
        drawn.sort_by_key(|range| range.layer);
    }
    if drawn.is_empty() {
        return String::new();
    }
    let shared = shared_axis(&drawn);
    let plots: Vec<String> = drawn.iter().map(|range| histogram(range, shared).html()).collect();
    let reach = largest(drawn.iter().map(|range| range.largest));
    let mut keys: Vec<(String, String)> = (ZONES.iter())
        .filter(|(_, from, _)| *from < reach)
        .map(|(shade, _, ulp)| (Zone::class(*shade), format!("bf16 neighbors {ulp} apart")))
        .collect();
    if reach >= F16_MAX {
        keys.push(("level".into(), "largest f16 number, 65504".into()));
    }
    let keys: Vec<(String, &str)> = keys.iter().map(|(class, name)| (class.clone(), &name[..])).collect();
    let axes = match shared {
        Some(_) => "All plots share the x axis.",
        None => "Each plot has its own x axis, since the ranges differ too much.",
    };
    let left_out = match left_out {
        0 => String::new(),
        number => format!(" {} with smaller logits not drawn.", plural(number, "layer")),
    };
    let about = format!("Histograms of the logits by layer; counts on a log scale. {axes}{left_out}");
    soft(&about) + &if keys.is_empty() { String::new() } else { legend(&keys) } + &grid(&plots)
}

fn shared_axis(drawn: &[&LogitRange]) -> Option<Axis> {
    let mut sizes: Vec<f64> = drawn.iter().map(|range| badness(range.largest)).collect();
    sizes.sort_by(f64::total_cmp);
    let alike = sizes.last()? / sizes[sizes.len() / 2] <= SHARED;
    alike.then(|| Axis::tight(Scale::Linear, drawn.iter().flat_map(|range| [range.min, range.max])))
}

fn histogram(range: &LogitRange, x_axis: Option<Axis>) -> Binned {
    let number = range.histogram.len().max(1) as f64;
    let width = match (range.max - range.min) / number {
        width if width > 0.0 => width,
        _ => (range.min.abs() / 100.0).max(0.01),
    };
    let bins =
        (range.histogram.iter()).map(|(from, count)| Bin { from: *from, to: from + width, count: *count });
    let limits = vec![("smallest f16 number".into(), -F16_MAX), ("largest f16 number".into(), F16_MAX)];
    Binned {
        title: format!("Layer {}", range.layer),
        caption: format!("{} to {}.", format::number(range.min), format::number(range.max)),
        noun: "logit".into(),
        bins: bins.collect(),
        scale: Scale::Log,
        x_axis,
        zones: zones(largest([range.min, range.max])),
        limits,
        small: true,
        ..Binned::default()
    }
}

fn range_table(ranges: &[LogitRange]) -> String {
    let mut table = Table::new(&[
        Column::Number("layer"),
        Column::Number("min"),
        Column::Number("max"),
        Column::Number("largest |logit|"),
        Column::Number("bf16 spacing"),
        Column::Number("f16 spacing"),
        Column::Number("queries"),
    ]);
    for range in ranges {
        table.row(&[
            range.layer.to_string(),
            cell(range.min),
            cell(range.max),
            cell(range.largest),
            ulp(range.bf16_ulp),
            range.f16_ulp.map_or("<span class=\"bad\">out of range</span>".into(), ulp),
            format::count(range.rows),
        ]);
    }
    if ranges.is_empty() {
        return String::new();
    }
    table.folded("Ranges by layer", &plural(ranges.len(), "layer"), ranges.len() <= OPEN_ROWS)
}

/// Policies that change the top key of a query or make keys tie.
fn changes(findings: &Findings) -> String {
    let all: Vec<&Run> = policies(findings).filter(|run| !run.attention.is_empty()).collect();
    if all.is_empty() {
        return String::new();
    }
    let changed: Vec<&Run> = (all.iter().copied())
        .filter(|run| run.attention.iter().any(|layer| layer.top_key_changed > 0.0 || layer.ties > 0.0))
        .collect();
    let mut table = Table::new(&[
        Column::Text("policy"),
        Column::Number("rows with another top key"),
        Column::Number("worst layer"),
        Column::Number("rows with a tie"),
        Column::Number("worst layer"),
        Column::Number("max logit difference"),
    ]);
    for run in &changed {
        table.row(&[
            code(&run.name),
            mean_share(run, |layer| layer.top_key_changed),
            worst_layer(run, |layer| layer.top_key_changed),
            mean_share(run, |layer| layer.ties),
            worst_layer(run, |layer| layer.ties),
            cell(run.attention.iter().map(|layer| badness(layer.max_abs)).fold(0.0, f64::max)),
        ]);
    }
    let about = "Softmax rows whose top key changes, and rows in which keys tie for it; means over layers.";
    let caption = match (changed.len(), all.len() - changed.len()) {
        (0, _) => "No policy changes a top key or makes keys tie.".into(),
        (_, 0) => about.into(),
        (_, same) => format!("{about} {same} of {} policies change neither.", all.len()),
    };
    format!("<h3>Changed top keys</h3>\n{}{}", soft(&caption), table.html())
}

fn mean_share(run: &Run, value: fn(&AttentionError) -> f64) -> String {
    mean(run.attention.iter().map(value)).map_or(String::new(), share_cell)
}

fn worst_layer(run: &Run, value: fn(&AttentionError) -> f64) -> String {
    let worst = run.attention.iter().max_by(|a, b| badness(value(a)).total_cmp(&badness(value(b))));
    worst
        .filter(|layer| value(layer) > 0.0)
        .map_or(String::new(), |layer| in_layer(share_cell(value(layer)), layer.layer))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zones_double_with_every_power_of_two() {
        let zones = zones(5000.0);
        assert_eq!(zones.len(), 10);
        let positive: Vec<(f64, f64)> =
            zones.iter().filter(|zone| zone.from > 0.0).map(|zone| (zone.from, zone.to)).collect();
        assert_eq!(
            positive,
            [(64.0, 128.0), (128.0, 256.0), (256.0, 512.0), (512.0, 1024.0), (1024.0, 5000.0)]
        );
        // ulp(x) = 2^(floor(log2 x) - 7)
        for (from, name) in ZONES.iter().take(4).map(|(_, from, name)| (from, name)) {
            assert_eq!(2f64.powf(from.log2().floor() - 7.0).to_string(), *name);
        }
    }

    #[test]
    fn very_different_layers_have_axes_of_their_own() {
        let range =
            |largest: f64| LogitRange { min: -largest, max: largest, largest, ..LogitRange::default() };
        let (a, b, c) = (range(10.0), range(12.0), range(70000.0));
        assert!(shared_axis(&[&a, &b]).is_some());
        assert!(shared_axis(&[&a, &b, &c]).is_none());
        assert!(shared_axis(&[]).is_none());
    }
}
