//! Comparison of results with expected ones: a table of errors and a verdict.

use ballast_checkpoint::tensor_file::Array;
use serde::Serialize;

use crate::commands::Global;
use crate::exit::Outcome;
use crate::output::{self, clean, count, table};

/// Results and their errors.
pub(crate) struct Comparison {
    tolerance: f64,
    rows: Vec<Row>,
    non_finite: Option<String>,
}

/// One result and its error.
#[derive(Serialize)]
struct Row {
    tensor: String,
    shape: Vec<usize>,
    /// RMS(a-b) / (RMS(b) + 1e-8)
    ratio: Option<f64>,
    max_abs: Option<f64>,
    passed: Option<bool>,
}

impl Comparison {
    /// Creates an empty comparison; a result passes with a ratio of at most `tolerance`.
    pub(crate) fn new(tolerance: f64) -> Comparison {
        Comparison { tolerance, rows: Vec::new(), non_finite: None }
    }

    /// Adds a result and the expected one, if there is one, of the same shape.
    pub(crate) fn add(&mut self, name: &str, result: &Array<f32>, expected: Option<&Array<f32>>) {
        let compared = expected.map(|expected| compare(&result.values, &expected.values));
        if self.non_finite.is_none() && compared.is_none() {
            self.non_finite = non_finite_text(name, &result.values);
        }
        self.rows.push(Row {
            tensor: name.into(),
            shape: result.shape.clone(),
            ratio: compared.map(|(ratio, _)| ratio),
            max_abs: compared.map(|(_, max_abs)| max_abs),
            passed: compared.map(|(ratio, _)| ratio <= self.tolerance),
        });
    }

    /// Adds an expected result that is missing.
    pub(crate) fn add_missing(&mut self, name: &str, shape: &[usize]) {
        let (tensor, shape) = (name.to_string(), shape.to_vec());
        self.rows.push(Row { tensor, shape, ratio: None, max_abs: None, passed: Some(false) });
    }

    /// Describes the first result that is non-finite and has no expected one.
    pub(crate) fn non_finite(&self) -> Option<&str> {
        self.non_finite.as_deref()
    }

    /// Returns the number of results that were compared.
    pub(crate) fn compared(&self) -> usize {
        self.rows.iter().filter(|row| row.passed.is_some()).count()
    }

    /// Prints the table, or the JSON document of `command`.
    pub(crate) fn report(&self, command: &str, notes: serde_json::Value, global: &Global) -> Outcome {
        let (rows, tolerance) = (&self.rows, self.tolerance);
        let failed = rows.iter().filter(|r| r.passed == Some(false)).count();
        let compared = self.compared();
        if global.json {
            let document = serde_json::json!({
                "tolerance": tolerance, "passed": failed == 0, "compared": compared, "results": rows, "notes": notes,
            });
            global.print_json(command, &document);
        } else {
            let mut shown = table(&["result", "shape", ">relative RMS", ">max abs", "verdict"]);
            for r in rows {
                let number = |x: Option<f64>| x.map(|x| format!("{x:.2e}")).unwrap_or_default();
                let verdict = match (r.passed, r.ratio) {
                    (Some(true), _) => "ok",
                    (Some(false), None) => "MISSING",
                    (Some(false), _) => "OFF",
                    (None, _) => "not compared",
                };
                let shape = format!("{:?}", r.shape);
                shown.add_row([clean(&r.tensor), shape, number(r.ratio), number(r.max_abs), verdict.into()]);
            }
            output::print(&format!("{shown}\n"));
            output::print(&match (compared, failed) {
                (0, _) => "nothing compared: the file has no expected results\n".to_string(),
                (_, 0) => format!("PASSED: {} compared, all within {tolerance:e}\n", count(compared as u64)),
                _ => format!("FAILED: {failed} of {compared} results differ by more than {tolerance:e}\n"),
            });
        }
        if failed == 0 { Outcome::Ok } else { Outcome::CheckFailed }
    }
}

/// Describes a tensor with NaN or infinite values; `None` if all are finite.
pub(crate) fn non_finite_text(name: &str, values: &[f32]) -> Option<String> {
    let count = values.iter().filter(|x| !x.is_finite()).count();
    let nan = values.iter().filter(|x| x.is_nan()).count();
    let of = values.len();
    (count > 0).then(|| format!("{name}, {count} of {of} values ({nan} NaN, {} infinite)", count - nan))
}

/// Returns RMS(a-b) / (RMS(b) + 1e-8) and max |a-b|; a NaN on one side only counts as infinite.
fn compare(a: &[f32], b: &[f32]) -> (f64, f64) {
    let n = (a.len() as f64).max(1.0);
    let (mut squares, mut size, mut max_abs) = (0f64, 0f64, 0f64);
    for (a, b) in a.iter().zip(b) {
        let difference = (*a as f64 - *b as f64).abs();
        let same = a == b || a.is_nan() && b.is_nan();
        let difference = if same {
            0.0
        } else if difference.is_nan() {
            f64::INFINITY
        } else {
            difference
        };
        squares += difference * difference;
        size += (*b as f64) * (*b as f64);
        max_abs = max_abs.max(difference);
    }
    ((squares / n).sqrt() / ((size / n).sqrt() + 1e-8), max_abs)
}
