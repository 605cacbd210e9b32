//! Report of a training run: one HTML file with plots, tables and samples, without scripts.
//!
//! `curves.rs` draws the metrics over the steps, with a one-sentence caption for each plot; `tables.rs` has
//! the ledger, the memory plan, the samples and the events; `ranks.rs` has the ranks of a run. Plots and page come from `ballast_report`.

mod curves;
mod ranks;
mod tables;

use crate::ledger::{Entry, Ledger};
use crate::metrics::{Event, MetricsEntry};
use ballast_report::page::{block, inline, page};

/// Content of a report. The page depends on nothing else, neither clock nor files.
#[derive(Clone, Debug, Default)]
pub struct Report<'a> {
    /// Title.
    pub title: &'a str,
    /// Facts about the run as names and values: model, data, device, dates, ...
    pub summary: Vec<(String, String)>,
    /// Metrics and events, in order.
    pub records: &'a [MetricsEntry],
    /// One row per tensor of the ledger.
    pub ledger: Vec<LedgerRow>,
    /// The memory plan.
    pub plan: Vec<PlanRow>,
    /// Peak memory of the process in bytes; 0 if it was not measured.
    pub measured_peak: u64,
    /// Generated samples.
    pub samples: Vec<Sample>,
    /// Run configuration (TOML).
    pub config: &'a str,
}

/// The ledger's record of one tensor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LedgerRow {
    /// Name of the tensor.
    pub name: String,
    /// Storage type.
    pub dtype: String,
    /// Number of checks.
    pub checks: u64,
    /// Checksum of its bytes at the first check.
    pub first_checksum: String,
    /// Checksum at the last check.
    pub last_checksum: String,
    /// True if a forward pass was seen to read exactly the checked bits.
    pub live: bool,
    /// All checks passed.
    pub fine: bool,
}

/// Returns the rows of a ledger.
pub fn ledger_rows(ledger: &Ledger) -> Vec<LedgerRow> {
    let row = |entry: &Entry| LedgerRow {
        name: entry.name.clone(),
        dtype: entry.dtype.clone(),
        checks: entry.checks,
        first_checksum: format!("{:016x}", entry.first),
        last_checksum: format!("{:016x}", entry.last),
        live: entry.live > 0,
        fine: entry.dtype == "f32" && ledger.clean_steps == ledger.steps,
    };
    ledger.entries.iter().map(row).collect()
}

/// A row of the memory plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlanRow {
    /// Name: parameters, gradients, ...
    pub what: String,
    /// Size in bytes.
    pub bytes: u64,
}

/// A text that the model generated.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// Steps trained before.
    pub step: u64,
    /// Prompt.
    pub prompt: String,
    /// Expected answer, if there is only one.
    pub expected: Option<String>,
    /// Generated answer.
    pub answer: String,
    /// Verdict; `None` if the answer cannot be judged.
    pub right: Option<bool>,
}

/// Returns the page as HTML. The same report gives the same bytes.
pub fn html(report: &Report<'_>) -> String {
    let mut body = curves::lead(report);
    if !report.summary.is_empty() {
        let facts: String = (report.summary.iter())
            .map(|(name, value)| format!("<div><dt>{}</dt><dd>{}</dd></div>", inline(name), inline(value)))
            .collect();
        body += &format!("<dl class=\"facts\">{facts}</dl>\n");
    }
    body += &curves::training(report);
    body += &tables::events(&events(report.records));
    body += &tables::samples(&report.samples);
    body += &curves::gradients(report);
    body += &curves::speed(report);
    body += &ranks::ranks(report);
    body += &tables::memory(report, &curves::memory_over_time(report));
    body += &tables::ledger(&report.ledger);
    if !report.config.is_empty() {
        body += &format!(
            "<h2 id=\"configuration\">Configuration</h2>\n<pre><code>{}</code></pre>\n",
            block(report.config)
        );
    }
    page(report.title, &body)
}

/// Returns all events in order.
fn events(records: &[MetricsEntry]) -> Vec<&Event> {
    (records.iter())
        .filter_map(|record| match record {
            MetricsEntry::Event(event) => Some(event),
            _ => None,
        })
        .collect()
}

#[cfg(test)]
mod tests;
