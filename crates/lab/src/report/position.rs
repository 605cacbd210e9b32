//! Error by position in the sequence: does it grow?
//!
//! Positions are taken together in stretches that become longer; a stretch is drawn at its last token, plural from one. For growth
//! the last stretch is compared with the first third of them, each position having the same weight; the first few tokens are
//! left out if there are more, since their states have hardly anything to lose.

use ballast_report::format::{self, sentence};
use ballast_report::plot::{Axis, LinePlot, Look, Scale, Series};

use super::words::{floor, heading, is_single, named, other, plural, policies, times};
use crate::Findings;
use crate::findings::{PositionError, Run};

/// Curves in a plot.
const CURVES: usize = 8;
/// Beyond this ratio an error grows, below its inverse it falls.
const GROWS: f64 = 1.5;

/// Tokens whose states have hardly anything to lose yet.
const EARLY: usize = 8;

/// Something that is measured by position.
struct Measure {
    id: &'static str,
    title: &'static str,
    unit: &'static str,
    value: fn(&PositionError) -> Option<f64>,
}

const KL: Measure =
    Measure { id: "kl", title: "KL divergence", unit: "nats by token", value: |stretch| Some(stretch.kl) };
const RECURRENCE: Measure = Measure {
    id: "recurrence",
    title: "Error of the recurrence",
    unit: "of the delta rule's outputs, by token",
    value: |stretch| stretch.recurrence,
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
        Some(_) => "A stretch of positions is drawn at its last token.",
        None => {
            "A stretch of positions is drawn at its last token. An error that the recurrence compounds would rise from left to right, \
             and more steeply than that of f32."
        }
    };
    heading("position", "Error by position", caption) + &plots
}

/// Of whole policies, or of single choices.
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

/// Stretches without any error have no place on a log axis.
fn points(run: &Run, measure: &Measure) -> Vec<(f64, f64)> {
    (run.by_position.iter())
        .filter_map(|stretch| Some((stretch.to as f64, (measure.value)(stretch)?)))
        .filter(|point| point.1 != 0.0)
        .collect()
}

/// Whether there is anything to draw: what is as f32 would press the others together.
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
        format!("rising by more than half: {up} of the {drawn} drawn, falling by more than a third: {down}")
    });
    let left_out =
        (left_out > 0).then(|| format!("{} with less damage left out", plural(left_out, "more run")));
    sentence(&[one, all, left_out])
}

/// The error of the last tokens over that of the first ones.
#[derive(Debug, PartialEq)]
struct Growth {
    first: (usize, usize),
    last: (usize, usize),
    ratio: f64,
}

fn growth(run: &Run, measure: &Measure) -> Option<Growth> {
    let values: Vec<(&PositionError, f64)> = (run.by_position.iter())
        .filter_map(|stretch| Some((stretch, (measure.value)(stretch)?)))
        .filter(|(_, value)| value.is_finite())
        .collect();
    let later = values.iter().position(|(stretch, _)| stretch.from >= EARLY).unwrap_or(0);
    let values = if values.len() - later >= 2 { &values[later..] } else { &values[..] };
    let (last, rest) = values.split_last()?;
    let first = &rest[..values.len().div_ceil(3).min(rest.len())];
    let weight = |stretch: &PositionError| stretch.to.saturating_sub(stretch.from) as f64;
    let sum: f64 = first.iter().map(|(stretch, value)| weight(stretch) * value).sum();
    let mean = sum / first.iter().map(|(stretch, _)| weight(stretch)).sum::<f64>();
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
            "{verb} with position: at {} it is {} what it is at {}",
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
        let stretch = |kl: &f64| {
            let to = (2 * from).max(from + 1);
            let stretch = PositionError { from, to, kl: *kl, ..PositionError::default() };
            from = to;
            stretch
        };
        Run { by_position: values.iter().map(stretch).collect(), ..Run::default() }
    }

    #[test]
    fn growth_is_the_last_stretch_over_the_first_third_by_tokens() {
        // 0..1, 1..2, 2..4, 4..8, 8..16: the first two stretches have a token each.
        let growth = growth(&run(&[1.0, 3.0, 9.0, 9.0, 8.0]), &KL).unwrap();
        assert_eq!(growth, Growth { first: (0, 2), last: (8, 16), ratio: 4.0 });
        assert_eq!(
            growth.text(),
            "grows with position: at tokens 9 to 16 it is 4.00 times what it is at tokens 1 to 2"
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
