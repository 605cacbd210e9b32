//! Report of a training run: one HTML file with plots, tables and samples, without scripts.
//!
//! `curves.rs` draws the metrics over the steps, with a one-sentence caption for each plot; `tables.rs` has the ledger,
//! the memory plan, the samples and the events. Plots and page come from `ballast_report`.

mod curves;
mod tables;

use crate::metrics::{Event, MetricsEntry};
use ballast_report::page::{block, inline, page};

/// Everything a report is made from; no clock and no file is asked besides.
#[derive(Clone, Debug, Default)]
pub struct Report<'a> {
    /// Heading.
    pub title: &'a str,
    /// Names and values that describe the run: model, data, device, dates, ...
    pub summary: Vec<(String, String)>,
    /// What the run said about itself, in its order.
    pub records: &'a [MetricsEntry],
    /// What the ledger knows of each tensor.
    pub ledger: Vec<LedgerRow>,
    /// What memory was planned for.
    pub plan: Vec<PlanRow>,
    /// Most memory that the process had, in bytes; 0 where nobody measured.
    pub measured_peak: u64,
    /// What the model wrote.
    pub samples: Vec<Sample>,
    /// The configuration as TOML.
    pub config: &'a str,
}

/// What the ledger knows of a tensor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LedgerRow {
    /// The tensor's name.
    pub name: String,
    /// The type it is stored in.
    pub dtype: String,
    /// How often it was looked at.
    pub checks: u64,
    /// Of its bytes, at the first look.
    pub first_checksum: String,
    /// The same at the last look.
    pub last_checksum: String,
    /// Whether a forward was seen to read exactly these bits.
    pub live: bool,
    /// Whether every look found what should be there.
    pub fine: bool,
}

/// What memory is planned for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlanRow {
    /// Parameters, gradients, ...
    pub what: String,
    /// How much of it.
    pub bytes: u64,
}

/// What the model wrote.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// After this many steps.
    pub step: u64,
    /// What it was asked.
    pub prompt: String,
    /// What it should have written, where there is one answer.
    pub expected: Option<String>,
    /// What it wrote.
    pub answer: String,
    /// Whether that was right, where it can be said.
    pub right: Option<bool>,
}

/// The page. The same report gives the same bytes.
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

/// All events, in the order in which they happened.
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
