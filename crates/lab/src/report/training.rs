//! A few training steps in f32 and under each policy.

use ballast_format::{self as format, sentence};
use ballast_report::plot::{Axis, LinePlot, Look, Scale, Series};

use super::table::{Column, Table};
use super::words::{FLOOR_COLOR, cell, code, heading, named, plural, signed_cell, soft};
use crate::Findings;
use crate::findings::{Training, TrainingRun};

/// Most curves, besides the reference.
const CURVES: usize = 7;

pub(super) fn section(findings: &Findings) -> String {
    let Some(training) = &findings.training else { return String::new() };
    if training.reference.is_empty() && training.runs.is_empty() {
        return String::new();
    }
    let about = format!(
        "{} of AdamW on the same input, learning rate {}, in f32 and under each policy.",
        plural(training.steps, "step"),
        format::number(training.learning_rate)
    );
    heading("training", "Training steps", &about)
        + &losses(training)
        + &differences(training)
        + &table(training)
}

fn drawn(training: &Training) -> &[TrainingRun] {
    &training.runs[..training.runs.len().min(CURVES)]
}

fn losses(training: &Training) -> String {
    let points =
        |losses: &[f64]| losses.iter().enumerate().map(|(step, loss)| (step as f64 + 1.0, *loss)).collect();
    let mut series = vec![Series {
        name: "f32 reference".into(),
        points: points(&training.reference),
        look: Look::Line,
        color: FLOOR_COLOR,
    }];
    series.extend(drawn(training).iter().enumerate().map(|(color, run)| Series {
        name: run.name.clone(),
        points: points(&run.losses),
        look: Look::Line,
        color,
    }));
    let fall = training.reference.first().zip(training.reference.last());
    let fall = fall.map(|(first, last)| {
        format!("in f32 the loss goes from {} to {}", format::number(*first), format::number(*last))
    });
    let left_out = training.runs.len() - drawn(training).len();
    let left_out =
        (left_out > 0).then(|| format!("{} with smaller errors not drawn", plural(left_out, "run")));
    LinePlot {
        id: "training-loss".into(),
        title: "Loss before each step".into(),
        caption: sentence(&[fall, furthest(training), left_out]),
        scale: Scale::fitting(training.reference.iter().copied()),
        series,
        ..plot(training)
    }
    .html()
}

/// The run whose last loss differs most from the reference's.
fn furthest(training: &Training) -> Option<String> {
    let runs = training.runs.iter().filter_map(|run| Some((run, last_difference(run, training)?)));
    let (run, difference) =
        runs.filter(|run| run.1.is_finite()).max_by(|a, b| a.1.abs().total_cmp(&b.1.abs()))?;
    Some(format!("{} differs most from it at the end, by {}", named(&run.name), format::signed(difference)))
}

/// Difference of the last losses; `None` if the run ended early.
fn last_difference(run: &TrainingRun, training: &Training) -> Option<f64> {
    let whole = run.losses.len() == training.reference.len();
    whole.then(|| Some(run.losses.last()? - training.reference.last()?)).flatten()
}

/// Absolute loss differences, for curves that overlap in the plot of losses.
fn differences(training: &Training) -> String {
    let series: Vec<Series> = (drawn(training).iter().enumerate())
        .map(|(color, run)| Series {
            name: run.name.clone(),
            points: (run.losses.iter().zip(&training.reference).enumerate())
                .map(|(step, (loss, reference))| (step as f64 + 1.0, (loss - reference).abs()))
                .filter(|point| point.1 != 0.0)
                .collect(),
            look: Look::Line,
            color,
        })
        .collect();
    if series.iter().all(|series| series.points.iter().all(|point| !point.1.is_finite())) {
        return String::new();
    }
    LinePlot {
        id: "training-difference".into(),
        title: "Loss difference from f32".into(),
        caption: growth(training),
        scale: Scale::Log,
        series,
        ..plot(training)
    }
    .html()
}

/// Number of runs whose loss difference grows from its first to its last nonzero value.
fn growth(training: &Training) -> String {
    let grown = |run: &TrainingRun| {
        let mut distances = (run.losses.iter().zip(&training.reference))
            .map(|(loss, reference)| (loss - reference).abs())
            .filter(|distance| distance.is_finite() && *distance > 0.0);
        let first = distances.next()?;
        Some(distances.next_back()? / first)
    };
    let ratios: Vec<f64> = drawn(training).iter().filter_map(grown).collect();
    let up = ratios.iter().filter(|ratio| **ratio > 1.5).count();
    let text = (!ratios.is_empty()).then(|| {
        format!(
            "for {up} of {} policies the difference grows by more than half from the first step to the last",
            ratios.len()
        )
    });
    sentence(&[text])
}

fn plot(training: &Training) -> LinePlot {
    let last = training.runs.iter().map(|run| run.losses.len()).fold(training.reference.len(), usize::max);
    LinePlot {
        x_name: "step".into(),
        x_axis: Some(Axis::tight(Scale::Linear, [1.0, last.max(1) as f64]).whole()),
        ..LinePlot::default()
    }
}

fn table(training: &Training) -> String {
    let protected = training.runs.iter().any(|run| run.protected_drift.is_some());
    let lost = training.runs.iter().any(|run| run.not_finite.is_some());
    let mut columns = vec![
        Column::Text("policy"),
        Column::Number("last loss"),
        Column::Number("difference from f32"),
        Column::Number("drift"),
    ];
    columns.extend(protected.then_some(Column::Number("drift of protected tensors")));
    columns.extend(lost.then_some(Column::Text("non-finite")));
    let mut table = Table::new(&columns);
    for run in &training.runs {
        let mut cells = vec![
            code(&run.name),
            run.losses.last().map_or(String::new(), |loss| cell(*loss)),
            last_difference(run, training).map_or(String::new(), signed_cell),
            cell(run.drift),
        ];
        cells.extend(protected.then(|| run.protected_drift.map_or(String::new(), cell)));
        cells.extend(lost.then(|| {
            run.not_finite.map_or(String::new(), |step| format!("<span class=\"bad\">at step {step}</span>"))
        }));
        table.row(&cells);
    }
    if training.runs.is_empty() {
        return String::new();
    }
    let finite = training.runs.iter().filter(|run| run.drift.is_finite());
    let most = finite.max_by(|a, b| a.drift.total_cmp(&b.drift));
    let most = most.map(|run| format!("{} drifts most: {}", named(&run.name), format::number(run.drift)));
    let about = "distance of the parameters from the f32 run's, relative to how far those moved".to_string();
    format!("<h3>Drift</h3>\n{}{}", soft(&sentence(&[Some(about), most])), table.html())
}
