//! One row per run: error of the outputs, and the first tensor that differs.

use ballast_format::{self as format, sentence};
use ballast_report::page::inline;
use ballast_report::plot::{Rank, Ranking, Scale};

use super::table::{Column, Table};
use super::words::{
    FLOOR_COLOR, cell, code, floor, heading, is_broken, is_floor, named, other, plural, policies, share_cell,
    signed_cell,
};
use crate::Findings;
use crate::findings::{Kind, NotFinite, Run};

pub(super) fn section(findings: &Findings) -> String {
    if findings.runs.is_empty() {
        return String::new();
    }
    if let Some(other) = other(findings) {
        let caption = match other.has_outputs() {
            true => {
                "KL is the divergence of the next-token distributions from the model's, per token, in nats."
            }
            false => "",
        };
        return heading("runs", "Summary", caption) + &table(findings);
    }
    let caption = "Each policy runs the same input. KL is the divergence of the next-token distributions from the reference's, per token, \
                in nats. The first difference is the first tensor whose bits differ from the f32 run.";
    heading("runs", "All policies", caption) + &ranking(findings) + &table(findings)
}

fn ranking(findings: &Findings) -> String {
    let rows = (findings.runs.iter())
        .map(|run| Rank { name: run.name.clone(), value: run.kl.mean, color: color(run) })
        .collect();
    let mut colors: Vec<(String, String)> = Vec::new();
    for run in policies(findings) {
        let entry = (format!("c{}", color(run)), kind_name(run.kind).to_string());
        if !colors.contains(&entry) {
            colors.push(entry);
        }
    }
    Ranking {
        id: "damage".into(),
        title: "Mean KL divergence from the reference".into(),
        unit: "nats".into(),
        caption: ranking_caption(findings),
        rows,
        scale: Scale::Log,
        colors,
        level: floor(findings).map(|floor| ("f32 floor".into(), floor.kl.mean)),
    }
    .html()
}

fn ranking_caption(findings: &Findings) -> String {
    let finite: Vec<&Run> = policies(findings).filter(|run| !is_broken(run) && run.kl.mean > 0.0).collect();
    let (Some(most), Some(least)) = (finite.first(), finite.last()) else {
        return "No policy has a finite, nonzero divergence.".into();
    };
    let spread = match finite.len() {
        1 => format!("{} has {}", named(&most.name), format::number(most.kl.mean)),
        _ => format!(
            "from {} for {} down to {} for {}",
            format::number(most.kl.mean),
            named(&most.name),
            format::number(least.kl.mean),
            named(&least.name)
        ),
    };
    let broken = match policies(findings).filter(|run| is_broken(run)).count() {
        0 => None,
        1 => Some("one policy produces non-finite values".to_string()),
        number => Some(format!("{number} policies produce non-finite values")),
    };
    let floor = floor(findings).map(|floor| format!("the f32 floor is {}", format::number(floor.kl.mean)));
    sentence(&[Some(spread), broken, floor])
}

fn color(run: &Run) -> usize {
    match run.kind {
        _ if is_floor(run) => FLOOR_COLOR,
        Kind::Preset => 0,
        Kind::Tensor => 1,
        Kind::Site => 2,
        Kind::Several => 6,
        Kind::Checkpoint | Kind::Dump => 4,
    }
}

fn kind_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Preset => "preset",
        Kind::Tensor => "one protected tensor rounded",
        Kind::Site => "one operation in lower precision",
        Kind::Several => "several choices",
        Kind::Checkpoint => "another checkpoint",
        Kind::Dump => "another framework's tensors",
    }
}

/// The table of all runs; columns without data are left out.
fn table(findings: &Findings) -> String {
    let gradients = findings.runs.iter().any(|run| run.gradient_error.is_some());
    let lost = findings.runs.iter().any(|run| run.not_finite.is_some());
    let outputs = findings.runs.iter().any(Run::has_outputs);
    let mut columns = vec![Column::Text(if other(findings).is_some() { "" } else { "policy" })];
    if outputs {
        columns.extend([
            Column::Number("loss difference"),
            Column::Number("perplexity"),
            Column::Number("KL mean"),
            Column::Number("KL p99"),
            Column::Number("KL max"),
            Column::Number("top-1 agreement"),
        ]);
    }
    columns.extend(gradients.then_some(Column::Number("gradient error")));
    columns.push(Column::Text("first difference"));
    columns.extend(lost.then_some(Column::Text("non-finite")));
    let mut table = Table::new(&columns);
    for run in &findings.runs {
        let mut cells = vec![name(run)];
        if outputs {
            cells.extend([
                signed_cell(run.loss_difference),
                cell(run.perplexity),
                cell(run.kl.mean),
                cell(run.kl.p99),
                cell(run.kl.max),
                share_cell(run.top1_agreement),
            ]);
        }
        cells.extend(gradients.then(|| run.gradient_error.map_or(String::new(), cell)));
        cells.push(match &run.first_difference {
            Some(site) => code(site),
            None if is_floor(run) => String::new(),
            None if findings.changes_gradients_alone(run) => "gradients alone".into(),
            None => "<span class=\"soft\">none</span>".into(),
        });
        cells.extend(lost.then(|| run.not_finite.as_ref().map_or(String::new(), not_finite)));
        if is_floor(run) { table.aside(&cells) } else { table.row(&cells) }
    }
    table.html()
}

fn name(run: &Run) -> String {
    let floor = if is_floor(run) { "f32 floor: " } else { "" };
    let what = if is_floor(run) && run.what.is_empty() { "cost of f32 arithmetic" } else { &run.what };
    format!("{}<span class=\"what\">{floor}{}</span>", code(&run.name), inline(what))
}

fn not_finite(lost: &NotFinite) -> String {
    format!(
        "{}<span class=\"what\">{} in {}</span>",
        code(&lost.site),
        plural(lost.count, "value"),
        inline(&lost.dtype)
    )
}
