//! Error by position in the sequence, and its growth.
//!
//! Positions are grouped in ranges of doubling length; a range is drawn at its last token, counted from one.
//! Growth is the error of the last range over the mean of the first third of ranges, weighted by positions.
//! The first 8 tokens are left out if there are more: their states have hardly anything to lose yet.

use ballast_format::{self as format, sentence};
use ballast_report::plot::{Axis, LinePlot, Look, Scale, Series};

use super::words::{floor, heading, is_single, named, other, plural, policies, times};
use crate::Findings;
use crate::findings::{PositionError, Run};

/// Most curves in a plot.
const CURVES: usize = 8;
/// Ratio from which on an error counts as growing; below its inverse it counts as falling.
const GROWS: f64 = 1.5;

/// Tokens whose states have hardly anything to lose yet.
const EARLY: usize = 8;

/// A quantity measured by position.
struct Measure {
    id: &'static str,
    title: &'static str,
    unit: &'static str,
    value: fn(&PositionError) -> Option<f64>,
}

const KL: Measure =
    Measure { id: "kl", title: "KL divergence", unit: "nats per token", value: |range| Some(range.kl) };
const RECURRENCE: Measure = Measure {
    id: "recurrence",
    title: "Error of the recurrence",
    unit: "outputs of the delta rule, relative",
    value: |range| range.recurrence,
};

pub(super) fn section(findings: &Findings) -> String {
    let mut plots = String::new();
    for measure in [KL, RECURRENCE] {
        plots += &plot(findings, &measure, false);
        plots += &plot(findings, &measure, true);
    }
    if plots.is_empty() {
        return plots;
    }
    let caption = match other(findings) {
        Some(_) => "Each range of positions is drawn at its last token.",
        None => {
            "Each range of positions is drawn at its last token. An error that the recurrence compounds rises from left to right, more \
             steeply than that of f32."
        }
    };
    heading("position", "Error by position", caption) + &plots
}

/// A plot of the whole policies or of the single choices.
fn plot(findings: &Findings, measure: &Measure, single: bool) -> String {
    let curve = |run: &Run| points(run, measure);
    let runs: Vec<&Run> = policies(findings)
        .filter(|run| is_single(run) == single && is_drawn(findings, run, measure))
        .collect();
    if runs.is_empty() {
        return String::new();
    }
    let drawn = &runs[..runs.len().min(CURVES)];
    let look = if drawn.iter().all(|run| curve(run).len() < 2) { Look::Dots } else { Look::Line };
    let series: Vec<Series> = (drawn.iter().enumerate())
        .map(|(color, run)| Series { name: run.name.clone(), points: curve(run), look, color })
        .collect();
    let xs = series.iter().flat_map(|series| series.points.iter().map(|point| point.0));
    let x_axis = Some(Axis::tight(Scale::Log, xs).whole());
    let (of, id) = if single { ("single choices", "single") } else { ("policies", "whole") };
    LinePlot {
        id: format!("position-{}-{id}", measure.id),
        title: if other(findings).is_some() {
            measure.title.into()
        } else {
            format!("{}, {of}", measure.title)
        },
        unit: measure.unit.into(),
        caption: caption(drawn, floor(findings), runs.len() - drawn.len(), measure),
        x_name: "token".into(),
        series,
        scale: Scale::Log,
        x_axis,
        ..LinePlot::default()
    }
    .html()
}

/// Points of a curve; ranges with zero error cannot be drawn on a log axis.
fn points(run: &Run, measure: &Measure) -> Vec<(f64, f64)> {
    (run.by_position.iter())
        .filter_map(|range| Some((range.to as f64, (measure.value)(range)?)))
        .filter(|point| point.1 != 0.0)
        .collect()
}

/// Returns true if a run has finite errors that differ from f32's.
fn is_drawn(findings: &Findings, run: &Run, measure: &Measure) -> bool {
    let points = points(run, measure);
    let as_floor = floor(findings).is_some_and(|floor| self::points(floor, measure) == points);
    !as_floor && points.iter().any(|point| point.1.is_finite())
}

fn caption(drawn: &[&Run], floor: Option<&Run>, left_out: usize, measure: &Measure) -> String {
    let grown: Vec<(&Run, Growth)> =
        drawn.iter().filter_map(|run| Some((*run, growth(run, measure)?))).collect();
    let spoken = grown.iter().find(|(run, _)| run.name == "A_log").or(grown.first());
    let one = spoken.map(|(run, growth)| {
        let of_floor = floor.and_then(|floor| self::growth(floor, measure));
        let of_floor = of_floor.map_or(String::new(), |floor| format!(" (f32: {})", times(floor.ratio)));
        format!("{} {}{of_floor}", named(&run.name), growth.text())
    });
    let number = |rule: fn(f64) -> bool| grown.iter().filter(|(_, growth)| rule(growth.ratio)).count();
    let (up, down) = (number(|ratio| ratio > GROWS), number(|ratio| ratio < 1.0 / GROWS));
    let all = (grown.len() > 1).then(|| {
        let drawn = grown.len();
        format!("of {drawn} curves, {up} grew by more than half and {down} shrank by more than a third")
    });
    let left_out =
        (left_out > 0).then(|| format!("{} with smaller errors not drawn", plural(left_out, "more run")));
    sentence(&[one, all, left_out])
}

/// Ratio of the error at the last tokens to that at the first.
#[derive(Debug, PartialEq)]
struct Growth {
    first: (usize, usize),
    last: (usize, usize),
    ratio: f64,
}

fn growth(run: &Run, measure: &Measure) -> Option<Growth> {
    let values: Vec<(&PositionError, f64)> = (run.by_position.iter())
        .filter_map(|range| Some((range, (measure.value)(range)?)))
        .filter(|(_, value)| value.is_finite())
        .collect();
    let later = values.iter().position(|(range, _)| range.from >= EARLY).unwrap_or(0);
    let values = if values.len() - later >= 2 { &values[later..] } else { &values[..] };
    let (last, rest) = values.split_last()?;
    let first = &rest[..values.len().div_ceil(3).min(rest.len())];
    let weight = |range: &PositionError| range.to.saturating_sub(range.from) as f64;
    let sum: f64 = first.iter().map(|(range, value)| weight(range) * value).sum();
    let mean = sum / first.iter().map(|(range, _)| weight(range)).sum::<f64>();
    let ratio = last.1 / mean;
    (ratio.is_finite() && mean > 0.0).then(|| Growth {
        first: (first[0].0.from, first[first.len() - 1].0.to),
        last: (last.0.from, last.0.to),
        ratio,
    })
}

impl Growth {
    fn text(&self) -> String {
        let tokens = |(from, to): (usize, usize)| match to.saturating_sub(from) {
            0 | 1 => format!("token {}", format::count(to)),
            _ => format!("tokens {} to {}", format::count(from + 1), format::count(to)),
        };
        let verb = match self.ratio {
            ratio if ratio > GROWS => "grows",
            ratio if ratio < 1.0 / GROWS => "falls",
            _ => "hardly changes",
        };
        format!(
            "{verb} with position: the error at {} is {} that at {}",
            tokens(self.last),
            times(self.ratio),
            tokens(self.first)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(values: &[f64]) -> Run {
        let mut from = 0;
        let range = |kl: &f64| {
            let to = (2 * from).max(from + 1);
            let range = PositionError { from, to, kl: *kl, ..PositionError::default() };
            from = to;
            range
        };
        Run { by_position: values.iter().map(range).collect(), ..Run::default() }
    }

    #[test]
    fn growth_is_the_last_stretch_over_the_first_third_by_tokens() {
        // 0..1, 1..2, 2..4, 4..8, 8..16: the first two ranges have a token each.
        let growth = growth(&run(&[1.0, 3.0, 9.0, 9.0, 8.0]), &KL).unwrap();
        assert_eq!(growth, Growth { first: (0, 2), last: (8, 16), ratio: 4.0 });
        assert_eq!(
            growth.text(),
            "grows with position: the error at tokens 9 to 16 is 4.00 times that at tokens 1 to 2"
        );
    }

    #[test]
    fn growth_needs_two_stretches_and_an_error() {
        assert_eq!(growth(&run(&[1.0]), &KL), None);
        assert_eq!(growth(&run(&[0.0, 1.0]), &KL), None);
        assert_eq!(growth(&run(&[f64::NAN, f64::NAN]), &KL), None);
        assert_eq!(growth(&run(&[1.0, 1.0]), &RECURRENCE), None);
        assert!(growth(&run(&[2.0, 2.0]), &KL).unwrap().text().starts_with("hardly changes"));
    }
}
