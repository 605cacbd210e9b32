//! `ballast diff`

use std::collections::BTreeMap;
use std::path::PathBuf;

use ballast_checkpoint::diff::{DiffReport, Measure, TensorDiff, Verdict, diff};
use ballast_contract::Role;
use clap::Args;
use serde::Serialize;

use super::inspect::layout_words;
use super::{Global, open, remote_text};
use crate::exit::Outcome;
use crate::output::{self, clean, count, plural, table};

/// Number of rows shown without `--all`.
const SHOWN: usize = 20;

/// Compare two checkpoints across layouts and dtypes.
#[derive(Args)]
pub(crate) struct DiffArgs {
    /// Checkpoint: a folder, an index, a safetensors file, hf://ORG/NAME[@REVISION] or a URL.
    a: PathBuf,
    /// Checkpoint to compare with.
    b: PathBuf,
    /// Treat tensors as equal up to this relative RMS difference, RMS(a-b)/(RMS(b)+1e-8).
    #[arg(long, default_value_t = 0.0, value_name = "X", value_parser = parse_tolerance)]
    tolerance: f64,
    /// Treat the same values in another dtype as different.
    #[arg(long)]
    strict_dtype: bool,
    /// List every tensor whose bits differ.
    #[arg(long)]
    all: bool,
}

fn parse_tolerance(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|x: &f64| *x >= 0.0).ok_or_else(|| "must be a number of at least 0".into())
}

pub(crate) fn run(args: DiffArgs, global: &Global) -> anyhow::Result<Outcome> {
    let (a, b) = (open(&args.a)?, open(&args.b)?);
    let report = diff(&a, &b, &global.progress())?;
    let differing: Vec<&TensorDiff> =
        report.tensors.iter().filter(|t| t.differs(args.tolerance, args.strict_dtype)).collect();
    if global.json {
        #[derive(Serialize)]
        struct Document<'a> {
            equal: bool,
            differing: usize,
            #[serde(flatten)]
            report: &'a DiffReport,
        }
        let document = Document { equal: differing.is_empty(), differing: differing.len(), report: &report };
        global.print_json("diff", &document);
    } else {
        output::print(&text(&report, &differing, if args.all { usize::MAX } else { SHOWN }));
    }
    Ok(if differing.is_empty() { Outcome::Ok } else { Outcome::CheckFailed })
}

/// Number of tensors of a role by verdict: same bits, same values, same after rounding, different, in one
/// only.
#[derive(Default)]
struct Counts([u64; 5]);

pub(super) fn text(report: &DiffReport, differing: &[&TensorDiff], shown: usize) -> String {
    let mut text = format!("A  {}\nB  {}\n", layout_words(&report.a), layout_words(&report.b));
    let mut roles: BTreeMap<Role, Counts> = BTreeMap::new();
    for t in &report.tensors {
        let column = match &t.verdict {
            Verdict::SameBits => 0,
            Verdict::SameValues => 1,
            Verdict::SameAfterRounding(_) => 2,
            Verdict::Different(_) | Verdict::OtherShape => 3,
            Verdict::OnlyInA | Verdict::OnlyInB => 4,
        };
        roles.entry(t.role).or_default().0[column] += 1;
    }
    let mut summary = table(&[
        "role",
        ">same bits",
        ">same values,\nother dtype",
        ">same after\nrounding",
        ">different",
        ">in one only",
    ]);
    for (role, Counts(columns)) in &roles {
        summary.add_row(std::iter::once(role.to_string()).chain(columns.iter().map(|n| count(*n))));
    }
    text += &format!("{summary}\n");
    let changed: Vec<&TensorDiff> =
        report.tensors.iter().filter(|t| t.verdict != Verdict::SameBits).collect();
    if !changed.is_empty() {
        let mut rows =
            table(&["tensor", "A", "B", "verdict", ">values", ">max abs", ">max ulp", ">relative RMS"]);
        for t in changed.iter().take(shown) {
            rows.add_row(row(t));
        }
        text += &format!("{rows}\n");
        if changed.len() > shown {
            text += &format!("... and {} more; --all lists them\n", changed.len() - shown);
        }
    }
    text.extend(report.remote.iter().map(remote_text));
    let tensors = plural(report.tensors.len(), "tensor");
    text += &if differing.is_empty() {
        format!("EQUAL: {tensors}, {} values compared\n", count(report.elements))
    } else {
        format!(
            "DIFFERENT: {} of {tensors}, {} values compared\n",
            count(differing.len() as u64),
            count(report.elements)
        )
    };
    text
}

fn row(t: &TensorDiff) -> [String; 8] {
    let dtype = |d: Option<ballast_contract::Dtype>| d.map(|d| d.to_string()).unwrap_or_default();
    let (verdict, measure): (&str, Option<&Measure>) = match &t.verdict {
        Verdict::SameBits => ("same bits", None),
        Verdict::SameValues => ("same values", None),
        Verdict::SameAfterRounding(m) => ("same after rounding", Some(m)),
        Verdict::Different(m) => ("different", Some(m)),
        Verdict::OtherShape => ("other shape", None),
        Verdict::OnlyInA => ("only in A", None),
        Verdict::OnlyInB => ("only in B", None),
    };
    let number = |f: &dyn Fn(&Measure) -> String| measure.map(f).unwrap_or_default();
    [
        clean(&t.tensor),
        dtype(t.a),
        dtype(t.b),
        verdict.into(),
        number(&|m| count(m.differing)),
        number(&|m| format!("{:.2e}", m.max_abs)),
        number(&|m| count(m.max_ulp)),
        number(&|m| format!("{:.2e}", m.relative_rms)),
    ]
}
