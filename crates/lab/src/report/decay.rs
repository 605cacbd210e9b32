//! Half-lives of the heads of linear attention, and their errors.
//!
//! A head's state loses exp(A_log) softplus(a + dt_bias) nats per token; its half-life is ln 2 over the mean
//! of that. A rounded A_log multiplies the rate of a head by one factor at all tokens: the rate error is that
//! factor minus one.

use std::collections::BTreeMap;

use ballast_format::{self as format, sentence};
use ballast_report::plot::{Axis, LinePlot, Look, Scale, Series, grid};

use super::table::{Column, Table};
use super::words::{badness, cell, code, enumerate, floor, heading, largest, mean, plural, policies, soft};
use crate::Findings;
use crate::findings::{Decay, DecayError, Run};

/// Rates within this relative difference count as equal: exp in f32 is no more accurate.
const SAME_RATE: f64 = 1e-6;
/// Most plots of rates.
const PLOTS: usize = 9;
/// Most rows of the table.
const ROWS: usize = 10;

pub(super) fn section(findings: &Findings) -> String {
    let rates = rates(findings);
    if findings.decays.is_empty() && rates.is_empty() {
        return String::new();
    }
    let about = "Half-life of each head's state in the reference, in tokens, and how policies change it.";
    let html = heading("decay", "Decay", about) + &half_lives(findings) + &rates;
    html + &table(findings)
}

fn half_lives(findings: &Findings) -> String {
    let decays = &findings.decays;
    if decays.is_empty() {
        return String::new();
    }
    let points = decays.iter().map(|decay| (decay.layer as f64, decay.half_life)).collect();
    let series = vec![Series { name: "half-life".into(), points, look: Look::Cloud, color: 0 }];
    LinePlot {
        id: "half-lives".into(),
        title: "Half-life of each head".into(),
        unit: "tokens, by layer".into(),
        caption: half_lives_caption(findings),
        x_name: "layer".into(),
        x_axis: Some(layer_axis(decays.iter().map(|decay| decay.layer))),
        series,
        scale: Scale::Log,
        ..LinePlot::default()
    }
    .html()
}

/// Layer axis with half a layer of padding, so that no dot lies on the edge.
fn layer_axis(layers: impl Iterator<Item = usize>) -> Axis {
    let edges = layers.flat_map(|layer| [layer as f64 - 0.5, layer as f64 + 0.5]);
    Axis::tight(Scale::Linear, edges).whole()
}

fn half_lives_caption(findings: &Findings) -> String {
    let mut sorted: Vec<&Decay> =
        findings.decays.iter().filter(|decay| decay.half_life.is_finite() && decay.half_life > 0.0).collect();
    sorted.sort_by(|a, b| a.half_life.total_cmp(&b.half_life));
    let (Some(least), Some(most)) = (sorted.first(), sorted.last()) else {
        return "No head has a finite half-life.".into();
    };
    let spread = format!(
        "{}: from {} to {} tokens, the median {}; the longest is head {} of layer {}",
        plural(findings.decays.len(), "head"),
        format::number(least.half_life),
        format::number(most.half_life),
        format::number(sorted[sorted.len() / 2].half_life),
        most.head,
        most.layer
    );
    let longest = findings.input.longest;
    let beyond = sorted.iter().filter(|decay| decay.half_life > longest as f64).count();
    let beyond = (longest > 0).then(|| {
        format!(
            "{} longer than the longest sequence, {}",
            share_of(beyond, sorted.len()),
            plural(longest, "token")
        )
    });
    sentence(&[Some(spread), beyond])
}

fn share_of(part: usize, whole: usize) -> String {
    match part {
        0 => "none is".into(),
        1 => format!("one of {whole} is"),
        _ => format!("{} of {} are", format::count(part), format::count(whole)),
    }
}

/// Errors of the decay rates; runs with equal errors share a plot.
fn rates(findings: &Findings) -> String {
    if policies(findings).all(|run| run.decay.is_empty()) {
        return String::new();
    }
    let mut alike: Vec<Vec<&Run>> = Vec::new();
    for run in policies(findings).filter(|run| moves_rate(run)) {
        match alike.iter_mut().find(|runs| same_rates(runs[0], run)) {
            Some(runs) => runs.push(run),
            None => alike.push(vec![run]),
        }
    }
    let most = largest(policies(findings).flat_map(|run| run.decay.iter().map(|head| head.rate_error)));
    let text = match alike.len() {
        0 => format!("no policy changes a head's rate by more than {} (relative)", format::number(most)),
        _ if alike.len() == 1 => "each dot is a head".into(),
        _ => "each dot is a head; all plots share their axes; policies with equal errors share a plot".into(),
    };
    let drawn = &alike[..alike.len().min(PLOTS)];
    let values = drawn.iter().flat_map(|runs| runs[0].decay.iter().map(|head| 100.0 * head.rate_error));
    let reach = largest(values);
    let y_axis = Axis::padded(Scale::Linear, [-reach, reach]);
    let plots: Vec<String> = drawn.iter().map(|runs| rate_plot(runs, findings, y_axis).html()).collect();
    let left_out = (alike.len() > PLOTS).then(|| format!("{} more not drawn", alike.len() - PLOTS));
    format!(
        "<h3>Error of the decay rate</h3>\n{}{}",
        soft(&sentence(&[Some(text), left_out])),
        if plots.is_empty() { String::new() } else { grid(&plots) }
    )
}

fn moves_rate(run: &Run) -> bool {
    run.decay.iter().any(|head| badness(head.rate_error) > SAME_RATE)
}

fn same_rates(a: &Run, b: &Run) -> bool {
    let near = |(a, b): (&DecayError, &DecayError)| {
        (a.layer, a.head) == (b.layer, b.head)
            && (a.rate_error.to_bits() == b.rate_error.to_bits()
                || (a.rate_error - b.rate_error).abs() <= SAME_RATE)
    };
    a.decay.len() == b.decay.len() && a.decay.iter().zip(&b.decay).all(near)
}

fn rate_plot(runs: &[&Run], findings: &Findings, y_axis: Axis) -> LinePlot {
    let run = runs[0];
    let names: Vec<&str> = runs.iter().map(|run| &run.name[..]).collect();
    let errors = || run.decay.iter().map(|head| head.rate_error);
    let off = format!(
        "at most {} %, {} % on average",
        format::number(100.0 * largest(errors())),
        format::number(100.0 * mean(errors().map(f64::abs)).unwrap_or(f64::NAN))
    );
    LinePlot {
        title: enumerate(&names, 4),
        unit: "%, by layer".into(),
        caption: sentence(&[Some(off), furthest_half_life(run, findings)]),
        x_name: "layer".into(),
        series: vec![Series {
            name: "rate error, %".into(),
            points: run.decay.iter().map(|head| (head.layer as f64, 100.0 * head.rate_error)).collect(),
            look: Look::Cloud,
            color: 1,
        }],
        x_axis: Some(layer_axis(run.decay.iter().map(|head| head.layer))),
        y_axis: Some(y_axis),
        small: true,
        ..LinePlot::default()
    }
}

/// The head whose half-life changes most, in the reference and in the run.
fn furthest<'a>(run: &'a Run, findings: &'a Findings) -> Option<(&'a Decay, &'a DecayError)> {
    let before: BTreeMap<(usize, usize), &Decay> =
        findings.decays.iter().map(|decay| ((decay.layer, decay.head), decay)).collect();
    (run.decay.iter())
        .filter_map(|head| Some((*before.get(&(head.layer, head.head))?, head)))
        .map(|pair| (pair, (pair.1.half_life - pair.0.half_life).abs()))
        .filter(|(_, change)| change.is_finite())
        .max_by(|a, b| a.1.total_cmp(&b.1))
        .map(|(pair, _)| pair)
}

fn furthest_half_life(run: &Run, findings: &Findings) -> Option<String> {
    let (before, after) = furthest(run, findings)?;
    let change = after.half_life - before.half_life;
    Some(format!(
        "the half-life of head {} in layer {} changes most, by {} of {} tokens",
        before.head,
        before.layer,
        format::signed(change),
        format::number(before.half_life)
    ))
}

/// Runs whose decay differs from f32, the largest error first.
fn table(findings: &Findings) -> String {
    let off = |run: &Run| run.decay.iter().map(|head| badness(head.per_token_error)).fold(0.0, f64::max);
    let of_floor = floor(findings).map_or(0.0, off);
    let mut all: Vec<&Run> = policies(findings).filter(|run| off(run) > 2.0 * of_floor).collect();
    all.sort_by(|a, b| off(b).total_cmp(&off(a)));
    if all.is_empty() {
        return String::new();
    }
    let mut table = Table::new(&[
        Column::Text("policy"),
        Column::Number("rate error, max"),
        Column::Number("mean"),
        Column::Number("decay error, max"),
        Column::Number("mean"),
        Column::Number("largest half-life change, tokens"),
    ]);
    all.iter().take(ROWS).for_each(|run| table.row(&row(run, findings)));
    let left_out = all.len().saturating_sub(ROWS);
    let left_out =
        (left_out > 0).then(|| format!("{} with smaller errors left out", plural(left_out, "run")));
    let about =
        "relative errors of exp(A_log) (rate) and of the mean of -g (decay) over all heads".to_string();
    let which = floor(findings)
        .map(|_| format!("policies with more than twice the error of f32 ({})", format::number(of_floor)));
    format!(
        "<h3>Decay errors by policy</h3>\n{}{}",
        soft(&sentence(&[Some(about), which, left_out])),
        table.html()
    )
}

fn row(run: &Run, findings: &Findings) -> [String; 6] {
    let average = |value: fn(&DecayError) -> f64| {
        cell(mean(run.decay.iter().map(|head| value(head).abs())).unwrap_or(f64::NAN))
    };
    let most = |value: fn(&DecayError) -> f64| {
        cell(run.decay.iter().map(|head| badness(value(head))).fold(0.0, f64::max))
    };
    let half_life = furthest(run, findings).map_or(String::new(), |(before, after)| {
        format!("{} by {}", cell(before.half_life), format::signed(after.half_life - before.half_life))
    });
    [
        code(&run.name),
        most(|head| head.rate_error),
        average(|head| head.rate_error),
        most(|head| head.per_token_error),
        average(|head| head.per_token_error),
        half_life,
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(name: &str, errors: &[f64]) -> Run {
        let head = |(head, error): (usize, &f64)| DecayError {
            layer: 0,
            head,
            rate_error: *error,
            per_token_error: *error,
            half_life: 100.0 / (1.0 + error),
        };
        Run { name: name.into(), decay: errors.iter().enumerate().map(head).collect(), ..Run::default() }
    }

    fn findings(runs: Vec<Run>) -> Findings {
        let decay = |head| Decay { layer: 0, head, rate: 1.0, per_token: 0.007, half_life: 100.0 };
        Findings { runs, decays: (0..2).map(decay).collect(), ..Findings::default() }
    }

    #[test]
    fn policies_that_round_alike_share_a_plot() {
        let runs = vec![run("a", &[0.01, -0.02]), run("b", &[0.01, -0.02]), run("c", &[0.0, 1e-8])];
        let html = rates(&findings(runs));
        assert_eq!(html.matches("<figure").count(), 1, "{html}");
        assert!(html.contains("<strong>a and b</strong>"));
        assert!(html.contains("At most 2.00 %, 1.50 % on average"), "{html}");
        assert!(html.contains("the half-life of head 1 in layer 0 changes most, by +2.04 of 100 tokens"));
    }

    #[test]
    fn rates_that_nobody_changes_are_said_to_be_so() {
        let html = rates(&findings(vec![run("a", &[2e-8, 0.0])]));
        assert!(html.contains("No policy changes a head&#39;s rate by more than 2e-8 (relative)"), "{html}");
    }

    #[test]
    fn the_table_begins_with_the_decay_that_is_furthest_off() {
        let html = table(&findings(vec![
            run("near", &[1e-5, 0.0]),
            run("far", &[0.01, 0.0]),
            run("same", &[0.0, 0.0]),
        ]));
        assert!(html.find("<code>far").unwrap() < html.find("<code>near").unwrap());
        assert!(!html.contains("<code>same"));
    }
}
