//! Errors of gradients.

use ballast_format::{self as format, sentence};
use ballast_report::plot::{Rank, Ranking, Scale};

use super::table::{Column, Table};
use super::words::{FLOOR_COLOR, badness, cell, code, floor, heading, is_floor, named, top};
use crate::Findings;
use crate::findings::{GradientError, Run};

/// Whole policies in the table, and as many single choices.
const RUNS: usize = 3;
/// Tensors of each run.
const TENSORS: usize = 4;

pub(super) fn section(findings: &Findings) -> String {
    let mut runs: Vec<(&Run, f64)> =
        findings.runs.iter().filter_map(|run| Some((run, run.gradient_error?))).collect();
    if runs.is_empty() {
        return String::new();
    }
    runs.sort_by(|a, b| badness(b.1).total_cmp(&badness(a.1)));
    let about = "Relative error RMS(difference) / RMS of the gradients of the language loss, all together and by parameter.";
    heading("gradients", "Gradients", about) + &ranking(findings, &runs) + &tensors(findings)
}

fn ranking(findings: &Findings, runs: &[(&Run, f64)]) -> String {
    let row = |(run, value): &(&Run, f64)| Rank {
        name: run.name.clone(),
        value: *value,
        color: if is_floor(run) { FLOOR_COLOR } else { 3 },
    };
    let level = floor(findings).and_then(|floor| floor.gradient_error);
    Ranking {
        id: "gradient-error".into(),
        title: "Error of all gradients together".into(),
        caption: caption(runs),
        rows: runs.iter().map(row).collect(),
        scale: Scale::Log,
        level: level.map(|value| ("f32 floor".into(), value)),
        ..Ranking::default()
    }
    .html()
}

fn caption(runs: &[(&Run, f64)]) -> String {
    let lost = runs.iter().filter(|(_, value)| !value.is_finite()).count();
    let lost = match lost {
        0 => None,
        1 => Some("the gradients of one policy are non-finite".into()),
        number => Some(format!("the gradients of {number} policies are non-finite")),
    };
    let finite = || runs.iter().filter(|(run, value)| value.is_finite() && !is_floor(run));
    let worst = finite().next().map(|(run, value)| {
        format!("{} has the largest error, {}", named(&run.name), format::number(*value))
    });
    let order: Vec<&Run> = finite().map(|(run, _)| *run).collect();
    let by_damage = order.windows(2).all(|pair| badness(pair[0].kl.mean) >= badness(pair[1].kl.mean));
    let order = (order.len() > 2).then(|| match by_damage {
        true => "the order is the same as by KL divergence".to_string(),
        false => "the order differs from that by KL divergence".into(),
    });
    sentence(&[worst, order, lost])
}

/// The tensors with the largest errors, in the runs with the largest KL.
fn tensors(findings: &Findings) -> String {
    let mut table = Table::new(&[
        Column::Text("policy"),
        Column::Text("parameter"),
        Column::Number("error"),
        Column::Number("cosine"),
    ]);
    let some_finite = |run: &Run| run.gradients.iter().any(|gradient| gradient.error.is_finite());
    for run in top(findings, RUNS, some_finite) {
        let mut worst: Vec<&GradientError> = run.gradients.iter().collect();
        worst.sort_by(|a, b| badness(b.error).total_cmp(&badness(a.error)));
        for (index, gradient) in worst.into_iter().take(TENSORS).enumerate() {
            table.row(&[
                if index == 0 { code(&run.name) } else { String::new() },
                code(&gradient.tensor),
                cell(gradient.error),
                cosine(gradient.cosine),
            ]);
        }
    }
    match table.html() {
        html if html.is_empty() => html,
        html => format!("<h3>Gradients with the largest errors</h3>\n{html}"),
    }
}

/// Formats a cosine with the digits that tell it from 1.
fn cosine(value: f64) -> String {
    if !value.is_finite() || value.abs() < 0.9 {
        return cell(value);
    }
    let digits = if value.abs() >= 1.0 { 3.0 } else { -(1.0 - value.abs()).log10().floor() + 1.0 };
    format!("{value:.*}", digits.clamp(3.0, 12.0) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cosine_is_told_from_one() {
        assert_eq!(cosine(1.0), "1.000");
        assert_eq!(cosine(0.5), "0.500");
        assert_eq!(cosine(0.999_999_7), "0.99999970");
        assert_eq!(cosine(-0.95), "-0.950");
        assert!(cosine(f64::NAN).contains("non-finite"));
    }
}
