//! Plots of the metrics over the steps, each with a one-sentence caption.

use std::collections::BTreeSet;

use super::{Report, events};
use crate::metrics::{Evaluation, MetricsEntry, Step};
use ballast_format::{self as format, sentence};
use ballast_report::plot::{Axis, Band, Histogram, Level, LinePlot, Look, Marker, Scale, Series, grid};

/// Least number of steps for a smoothed curve.
const SMOOTHED_FROM: usize = 20;
/// Number of windows for the median and spread of the speed.
const WINDOWS: usize = 60;
/// Most parameter groups with a plot of their own.
const GROUPS: usize = 24;

/// Points of a curve.
type Points = Vec<(f64, f64)>;

/// Summary of the run in one sentence.
pub(super) fn lead(report: &Report<'_>) -> String {
    let steps: Vec<&Step> = steps(report).collect();
    let Some(last) = steps.last() else { return "<p class=\"lead\">The run has no steps.</p>\n".into() };
    let tokens: u64 = steps.iter().fold(0, |sum, step| sum.saturating_add(step.tokens));
    let seconds: f64 = steps.iter().map(|step| step.seconds).filter(|seconds| seconds.is_finite()).sum();
    let mut caption = format!(
        "{} on {} in {}",
        format::plural(steps.len(), "step"),
        format::plural(tokens, "token"),
        format::duration(seconds)
    );
    caption += &match last.loss.is_finite() {
        true => format!("; the last loss is {}", format::number(last.loss)),
        false => "; <span class=\"bad\">the last loss is non-finite</span>".into(),
    };
    if let Some(best) = best_evaluation(report) {
        caption += &format!(", the lowest validation loss {}", format::number(best.loss));
    }
    format!("<p class=\"lead\">{caption}.</p>\n")
}

/// Loss, accuracy, learning rate.
pub(super) fn training(report: &Report<'_>) -> String {
    if report.records.iter().all(|record| matches!(record, MetricsEntry::Event(_))) {
        return String::new();
    }
    let mut html = "<h2 id=\"training\">Training</h2>\n".to_string();
    html += &loss(report);
    let mut beside = Vec::new();
    // Runs of other programs may have none.
    if evaluations(report).any(|found| found.accuracy.is_finite()) {
        beside.push(accuracy(report));
    }
    if steps(report).next().is_some() {
        beside.push(learning_rate(report));
    }
    html += &grid(&beside);
    html + &other_losses(report)
}

fn loss(report: &Report<'_>) -> String {
    // What the validation loss can be compared with.
    let train: Points = points(report, |step| step.cross_entropy.unwrap_or(step.loss));
    let validation: Points = evaluations(report).map(|found| (found.step as f64, found.loss)).collect();
    let caption = [change("The loss", &train), lowest_validation(report)];
    let scale = Scale::fitting(train.iter().chain(&validation).map(|point| point.1));
    let mut series = with_smoothed("train", train, scale, 0);
    if !validation.is_empty() {
        let name = "validation".to_string();
        series.push(Series { name, points: validation, look: Look::Dots, color: 1 });
    }
    LinePlot { caption: sentence(&caption), scale, series, ..plot(report, "loss", "Loss") }.html()
}

fn accuracy(report: &Report<'_>) -> String {
    let points: Points =
        evaluations(report).map(|found| (found.step as f64, 100.0 * found.accuracy)).collect();
    let best = (evaluations(report).filter(|found| found.accuracy.is_finite()))
        .reduce(|best, found| if found.accuracy > best.accuracy { found } else { best });
    let caption = best.map(|best| {
        format!(
            "The best accuracy, {} of the validation tokens, is at step {}",
            format::percent(best.accuracy),
            format::count(best.step)
        )
    });
    LinePlot {
        unit: "% of validation tokens".into(),
        caption: sentence(&[caption]),
        series: vec![Series { name: "accuracy, %".into(), points, look: Look::Dots, color: 1 }],
        ..plot(report, "accuracy", "Accuracy")
    }
    .html()
}

fn learning_rate(report: &Report<'_>) -> String {
    let points = points(report, |step| step.learning_rate);
    let caption = extreme(&points, f64::gt).zip(points.last().copied()).map(|(top, last)| {
        format!(
            "The peak, {}, is at step {}; the last value is {}",
            format::number(top.1),
            format::count(top.0 as u64),
            format::number(last.1)
        )
    });
    LinePlot {
        caption: sentence(&[caption]),
        series: vec![Series { name: "learning rate".into(), points, look: Look::Line, color: 2 }],
        ..plot(report, "learning-rate", "Learning rate")
    }
    .html()
}

/// Losses that only some models have.
fn other_losses(report: &Report<'_>) -> String {
    let indexer = other_loss(report, "indexer-loss", "Indexer loss", |step| step.indexer_loss);
    let balance = other_loss(report, "balance-loss", "Balance loss", |step| step.balance_loss);
    let minimized = other_loss(report, "minimized-loss", "Loss with smoothing and z-loss", |step| {
        step.cross_entropy.map(|_| step.loss)
    });
    let plots: Vec<String> = [minimized, indexer, balance].into_iter().flatten().collect();
    if plots.is_empty() { String::new() } else { grid(&plots) }
}

fn other_loss(
    report: &Report<'_>,
    id: &str,
    title: &str,
    value: impl Fn(&Step) -> Option<f64>,
) -> Option<String> {
    let points: Points = steps(report).filter_map(|step| Some((step.step as f64, value(step)?))).collect();
    let caption = sentence(&[change(&format!("the {}", title.to_lowercase()), &points)]);
    let scale = Scale::fitting(points.iter().map(|point| point.1));
    let any = !points.is_empty();
    let series = with_smoothed(&title.to_lowercase(), points, scale, 6);
    any.then(|| LinePlot { caption, scale, series, ..plot(report, id, title) }.html())
}

/// Norm of all gradients, and of each parameter group on shared axes.
pub(super) fn gradients(report: &Report<'_>) -> String {
    let total = points(report, |step| step.gradient_norm);
    if total.is_empty() {
        return String::new();
    }
    let top = extreme(&total, f64::gt);
    let caption = median(total.iter().map(|point| point.1)).zip(top).map(|(median, top)| {
        format!(
            "The median norm is {}; the largest, {}, is at step {}",
            format::number(median),
            format::number(top.1),
            format::count(top.0 as u64)
        )
    });
    let all = LinePlot {
        unit: "before clipping".into(),
        caption: sentence(&[caption]),
        scale: Scale::Log,
        series: with_smoothed("norm", total, Scale::Log, 0),
        ..plot(report, "gradient-norm", "Gradient norm")
    };
    format!("<h2 id=\"gradients\">Gradients</h2>\n{}{}", all.html(), group_norms(report))
}

fn group_norms(report: &Report<'_>) -> String {
    let names: BTreeSet<&String> = steps(report).flat_map(|step| step.group_norms.keys()).collect();
    let groups: Vec<(&String, Points)> = (names.iter().take(GROUPS))
        .map(|name| {
            let points = steps(report)
                .filter_map(|step| Some((step.step as f64, *step.group_norms.get(*name)?)))
                .collect();
            (*name, points)
        })
        .collect();
    if groups.is_empty() {
        return String::new();
    }
    let y_axis =
        Axis::padded(Scale::Log, groups.iter().flat_map(|(_, points)| points.iter().map(|point| point.1)));
    let plots: Vec<String> = (groups.into_iter())
        .map(|(name, points)| {
            let series = with_smoothed("norm", points, Scale::Log, 0);
            let plot = plot(report, "", name);
            LinePlot { series, y_axis: Some(y_axis), small: true, ..plot }.html()
        })
        .collect();
    let more = match names.len().checked_sub(GROUPS + 1) {
        Some(more) => format!(" {} more are in metrics.jsonl.", format::count(more + 1)),
        None => String::new(),
    };
    format!(
        "<h3>By parameter group</h3>\n<p class=\"soft\">All plots share their axes; log scale.{more}</p>\n{}",
        grid(&plots)
    )
}

/// Tokens per second, and step times.
pub(super) fn speed(report: &Report<'_>) -> String {
    let rate: Points = (steps(report).filter(|step| step.seconds > 0.0 && step.seconds.is_finite()))
        .map(|step| (step.step as f64, step.tokens as f64 / step.seconds))
        .collect();
    let Some(typical) = median(rate.iter().map(|point| point.1)) else { return String::new() };
    let seconds: Points = points(report, |step| step.seconds);
    let slowest = extreme(&seconds, f64::gt).zip(median(seconds.iter().map(|point| point.1)));
    let caption = format!("The median speed is {} tokens per second", format::number(typical));
    let says_slowest = slowest.map(|(slowest, typical)| {
        format!(
            "The median step took {}, the slowest, step {}, {}",
            format::duration(typical),
            format::count(slowest.0 as u64),
            format::duration(slowest.1)
        )
    });
    let (band, middle) = spread(&rate);
    let over_time = LinePlot {
        caption: sentence(&[Some(caption)]),
        bands: vec![Band { name: "10 to 90 % of steps".into(), points: band, color: 2 }],
        series: vec![Series { name: "median".into(), points: middle, look: Look::Line, color: 2 }],
        ..plot(report, "tokens-per-second", "Tokens per second")
    };
    let values: Vec<f64> = seconds.iter().map(|point| point.1).collect();
    let times = Histogram {
        title: "Time per step".into(),
        unit: "steps by seconds".into(),
        caption: sentence(&[says_slowest]),
        noun: "step".into(),
        scale: Scale::fitting(values.iter().copied()),
        values,
        bins: 40,
        color: 2,
        small: false,
    };
    format!("<h2 id=\"speed\">Speed</h2>\n{}", grid(&[over_time.html(), times.html()]))
}

/// Peak memory so far beside the plan.
pub(super) fn memory_over_time(report: &Report<'_>) -> String {
    let most = steps(report).map(|step| step.peak_memory).max().unwrap_or(0);
    if most == 0 {
        return String::new();
    }
    let planned: u64 = report.plan.iter().map(|row| row.bytes).sum();
    let (unit, name) = format::byte_unit(most.max(planned));
    let points: Points = points(report, |step| step.peak_memory as f64 / unit);
    let reached = (steps(report).find(|step| step.peak_memory == most)).map_or(0, |step| step.step);
    let caption =
        format!("The peak of {} was reached at step {}", format::bytes(most), format::count(reached));
    let levels = (planned > 0).then(|| Level { y: planned as f64 / unit, name: "plan".into() });
    LinePlot {
        unit: name.into(),
        caption: sentence(&[Some(caption)]),
        series: vec![Series { name: "peak so far".into(), points, look: Look::Line, color: 6 }],
        levels: levels.into_iter().collect(),
        // Starts at zero, like the bar of the plan above.
        y_axis: Some(Axis::padded(Scale::Linear, [0.0, most.max(planned) as f64 / unit])),
        ..plot(report, "memory-over-time", "Peak memory so far")
    }
    .html()
}

/// A plot without curves: steps on the x axis, events as flags.
pub(super) fn plot(report: &Report<'_>, id: &str, title: &str) -> LinePlot {
    let markers = (events(report.records).into_iter().enumerate())
        .map(|(index, event)| Marker {
            x: event.step as f64,
            label: (index + 1).to_string(),
            text: format!("{}: {}", event.what, event.text),
        })
        .collect();
    let steps = report.records.iter().map(|record| record.step() as f64);
    LinePlot {
        id: id.into(),
        title: title.into(),
        x_name: "step".into(),
        x_axis: Some(Axis::tight(Scale::Linear, steps).whole()),
        markers,
        ..LinePlot::default()
    }
}

pub(super) fn steps<'a>(report: &Report<'a>) -> impl Iterator<Item = &'a Step> {
    report.records.iter().filter_map(|record| match record {
        MetricsEntry::Step(step) => Some(step),
        _ => None,
    })
}

fn evaluations<'a>(report: &Report<'a>) -> impl Iterator<Item = &'a Evaluation> {
    report.records.iter().filter_map(|record| match record {
        MetricsEntry::Evaluation(evaluation) => Some(evaluation),
        _ => None,
    })
}

fn points(report: &Report<'_>, value: impl Fn(&Step) -> f64) -> Points {
    steps(report).map(|step| (step.step as f64, value(step))).collect()
}

fn best_evaluation<'a>(report: &Report<'a>) -> Option<&'a Evaluation> {
    (evaluations(report).filter(|found| found.loss.is_finite()))
        .reduce(|best, found| if found.loss < best.loss { found } else { best })
}

fn lowest_validation(report: &Report<'_>) -> Option<String> {
    let best = best_evaluation(report)?;
    Some(format!(
        "the lowest validation loss, {}, is at step {}",
        format::number(best.loss),
        format::count(best.step)
    ))
}

/// The change from the first to the last finite value, and the step from which on values are non-finite.
fn change(name: &str, points: &[(f64, f64)]) -> Option<String> {
    let finite = |point: &&(f64, f64)| point.1.is_finite();
    let first = points.iter().find(finite);
    let last = points.iter().rev().find(finite);
    let (Some(first), Some(last)) = (first, last) else {
        return points.first().map(|_| format!("{name} was never finite"));
    };
    let over = format::plural((last.0 - first.0).abs() as u64, "step");
    let mut caption = match last.1.total_cmp(&first.1) {
        _ if first.0 == last.0 => format!("{name} is {} at step {}", format::number(first.1), first.0),
        std::cmp::Ordering::Equal => {
            format!("{name} is {}, the same after {over}", format::number(first.1))
        }
        order => format!(
            "{name} {} from {} to {} over {over}",
            if order.is_lt() { "fell" } else { "rose" },
            format::number(first.1),
            format::number(last.1)
        ),
    };
    let ended = points.iter().rposition(|point| point.1.is_finite()).map_or(0, |last| last + 1);
    if let Some(point) = points.get(ended) {
        caption += &format!(" and is non-finite from step {} on", format::count(point.0 as u64));
    }
    Some(caption)
}

/// The finite point with the most extreme y by `further`; the first of equals.
fn extreme(points: &[(f64, f64)], further: fn(&f64, &f64) -> bool) -> Option<(f64, f64)> {
    let finite = points.iter().copied().filter(|point| point.1.is_finite());
    finite.reduce(|best, point| if further(&point.1, &best.1) { point } else { best })
}

fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    quantiles(values.collect(), [0.5]).map(|[median]| median)
}

/// Quantiles of the finite values by nearest rank.
fn quantiles<const N: usize>(mut values: Vec<f64>, shares: [f64; N]) -> Option<[f64; N]> {
    values.retain(|value| value.is_finite());
    values.sort_by(f64::total_cmp);
    let last = values.len().checked_sub(1)?;
    Some(shares.map(|share| values[(share * last as f64).round() as usize]))
}

/// 10th to 90th percentile, and median, over windows of neighboring points.
fn spread(points: &[(f64, f64)]) -> (Vec<(f64, f64, f64)>, Points) {
    let window = points.len().div_ceil(WINDOWS).max(1);
    (points.chunks(window))
        .filter_map(|window| {
            let values = window.iter().map(|point| point.1).collect();
            let [low, middle, high] = quantiles(values, [0.1, 0.5, 0.9])?;
            let x = window[window.len() / 2].0;
            Some(((x, low, high), (x, middle)))
        })
        .unzip()
}

/// A noisy curve: pale raw values, with a smoothed curve on top if they are many.
fn with_smoothed(name: &str, points: Points, scale: Scale, color: usize) -> Vec<Series> {
    if points.is_empty() {
        return Vec::new();
    }
    let many = points.len() >= SMOOTHED_FROM;
    let smoothed =
        Series { name: format!("{name}, smoothed"), points: smooth(&points, scale), look: Look::Line, color };
    let look = if many { Look::Pale } else { Look::Line };
    let mut series = vec![Series { name: name.into(), points, look, color }];
    series.extend(many.then_some(smoothed));
    series
}

/// Mean of a forward and a backward exponential moving average, so that the curve does not lag. Weights halve
/// over an eightieth of the run. On a log axis logarithms are averaged, or one large value would lift its
/// neighbors. Gaps stay gaps.
fn smooth(points: &[(f64, f64)], scale: Scale) -> Points {
    let keep = 0.5f64.powf(80.0 / points.len().max(160) as f64);
    let values = points.iter().map(|point| scale.forward(point.1));
    let from_left = moving_average(values.clone(), keep);
    let from_right = moving_average(values.rev(), keep);
    (points.iter().zip(from_left).zip(from_right.into_iter().rev()))
        .map(|((point, left), right)| (point.0, scale.back(left / 2.0 + right / 2.0)))
        .collect()
}

/// Exponential moving average with bias correction.
fn moving_average(values: impl Iterator<Item = f64>, keep: f64) -> Vec<f64> {
    let (mut sum, mut weight) = (0.0, 0.0);
    values
        .map(|value| {
            if !value.is_finite() {
                return f64::NAN;
            }
            sum = keep * sum + (1.0 - keep) * value;
            weight = keep * weight + (1.0 - keep);
            sum / weight
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_smoothed_ramp_lags_behind_neither_end_and_gaps_stay() {
        let mut ramp: Points = (0..201).map(|step| (step as f64, step as f64)).collect();
        let smoothed = smooth(&ramp, Scale::Linear);
        assert!((smoothed[100].1 - 100.0).abs() < 1e-9, "{}", smoothed[100].1);
        ramp[50].1 = f64::INFINITY;
        let lost = smooth(&ramp, Scale::Linear).iter().filter(|point| !point.1.is_finite()).count();
        assert_eq!(lost, 1);
    }

    #[test]
    fn one_large_value_does_not_lift_a_smoothed_curve_on_a_log_axis() {
        let mut flat: Points = (0..200).map(|step| (step as f64, 1.0)).collect();
        flat[100].1 = 1e6;
        assert!(smooth(&flat, Scale::Log)[95].1 < 5.0);
        assert!(smooth(&flat, Scale::Linear)[95].1 > 1e3);
    }
}
