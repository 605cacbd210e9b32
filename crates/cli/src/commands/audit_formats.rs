//! An audit as a document for others: a page or Markdown to attach to a release, SARIF for code scanning.

use std::collections::HashMap;

use ballast_checkpoint::Checkpoint;
use ballast_checkpoint::audit::{AuditReport, Finding, Severity};
use ballast_report::page::{inline, page};
use serde_json::{Value, json};

use super::inspect::layout_words;
use crate::output::{bytes, plural};

/// Number of tensors of a finding that a page or Markdown lists.
const LISTED: usize = 20;

/// The form of an audit's result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Format {
    /// Tables for a terminal.
    Text,
    /// One document with a stable schema, like --json.
    Json,
    /// Markdown, for a model card or a summary of a CI job.
    Markdown,
    /// A page of its own.
    Html,
    /// SARIF 2.1.0, for code scanning.
    Sarif,
}

/// The facts above the findings: name and value.
fn facts(report: &AuditReport) -> Vec<(&'static str, String)> {
    let unknown = "unknown architecture".to_owned();
    let mut facts = vec![
        ("Architecture", report.architecture.name.clone().unwrap_or(unknown)),
        ("Layout", layout_words(&report.layout)),
        ("Tensors", format!("{} ({} read)", report.tensors, bytes(report.bytes))),
        ("Policy", format!("{}: {} protected", report.policy, plural(report.protected, "tensor"))),
    ];
    facts.extend(report.released.as_ref().map(|p| ("Compared with", format!("{} ({})", p.name, p.source))));
    facts
}

fn verdict(report: &AuditReport) -> String {
    format!(
        "{}: {}, {}, {} as released",
        if report.passed { "Passed" } else { "Failed" },
        plural(report.count(Severity::Violation), "violation"),
        plural(report.count(Severity::Warning), "warning"),
        report.count(Severity::Note)
    )
}

fn severity(finding: &Finding) -> &'static str {
    match finding.severity {
        Severity::Violation => "violation",
        Severity::Warning => "warning",
        _ => "note",
    }
}

fn kind(finding: &Finding) -> String {
    finding.rule.as_ref().map_or(finding.kind.to_owned(), |rule| format!("{}: {rule}", finding.kind))
}

/// `F32, stored BF16`, as far as known.
fn dtypes(finding: &Finding) -> String {
    let required = finding.required.map(|d| d.to_string());
    let stored = finding.stored.map(|d| format!("stored {d}"));
    required.into_iter().chain(stored).collect::<Vec<_>>().join(", ")
}

/// Returns the first tensors, and how many more there are.
fn listed(finding: &Finding) -> (&[String], Option<String>) {
    let some = &finding.tensors[..finding.tensors.len().min(LISTED)];
    let more = finding.tensors.len() - some.len();
    (some, (more > 0).then(|| format!("and {more} more")))
}

/// Text of a table's cell: a pipe would end it, and names come from the file.
fn cell(text: &str) -> String {
    let shown: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    shown.replace('\\', "\\\\").replace('|', "\\|").replace('<', "&lt;").replace('`', "'")
}

/// The report as Markdown.
pub(super) fn markdown(report: &AuditReport) -> String {
    let mut text = format!("## Precision audit: {}\n\n| | |\n|---|---|\n", verdict(report));
    for (name, value) in facts(report) {
        text += &format!("| {name} | {} |\n", cell(&value));
    }
    if !report.findings.is_empty() {
        text += "\n| finding | tensors | dtype | reason | fix |\n|---|---|---|---|---|\n";
    }
    for f in &report.findings {
        let (some, more) = listed(f);
        let names: Vec<String> = some.iter().map(|name| format!("`{}`", cell(name))).chain(more).collect();
        text += &format!(
            "| **{}** {} | {}: {} | {} | {} | {} |\n",
            severity(f),
            cell(&kind(f)),
            f.tensors.len(),
            names.join("<br>"),
            dtypes(f),
            cell(&f.reason),
            cell(&f.fix)
        );
    }
    for note in &report.notes {
        text += &format!("\n- {}", cell(note));
    }
    text + &format!("\n\nMade by `ballast audit`, version {}.\n", env!("CARGO_PKG_VERSION"))
}

/// The report as a page.
pub(super) fn html(report: &AuditReport) -> String {
    let mut body =
        format!("<p><strong>{}</strong></p>\n<div class=\"scroll\"><table><tbody>\n", verdict(report));
    for (name, value) in facts(report) {
        body += &format!("<tr><th>{name}</th><td>{}</td></tr>\n", inline(&value));
    }
    body += "</tbody></table></div>\n";
    for f in &report.findings {
        let (some, more) = listed(f);
        let names = some.iter().map(|name| format!("<li><code>{}</code></li>", inline(name)));
        let names: String = names.chain(more.map(|more| format!("<li>{more}</li>"))).collect();
        body += &format!(
            "<h2>{}: {}</h2>\n<p>{} ({}): {}.</p>\n<p>Fix: <code>{}</code></p>\n<ul>{names}</ul>\n",
            severity(f),
            inline(&kind(f)),
            plural(f.tensors.len(), "tensor"),
            inline(&dtypes(f)),
            inline(&f.reason),
            inline(&f.fix)
        );
    }
    if !report.notes.is_empty() {
        let notes: String = report.notes.iter().map(|note| format!("<li>{}</li>", inline(note))).collect();
        body += &format!("<h2>Notes</h2>\n<ul>{notes}</ul>\n");
    }
    body += &format!("<p>Made by <code>ballast audit</code>, version {}.</p>\n", env!("CARGO_PKG_VERSION"));
    page("Precision audit", &body)
}

/// The report as SARIF: one result for each tensor of a finding, at the file that has it.
pub(super) fn sarif(report: &AuditReport, checkpoint: &Checkpoint) -> String {
    let files: HashMap<&str, usize> = checkpoint.tensors.iter().map(|t| (t.name.as_str(), t.file)).collect();
    let id = |f: &Finding| f.rule.as_ref().map_or(f.kind.to_owned(), |rule| format!("{}/{rule}", f.kind));
    let level = |f: &Finding| match f.severity {
        Severity::Violation => "error",
        Severity::Warning => "warning",
        _ => "note",
    };
    let mut rules: Vec<Value> = Vec::new();
    let mut results = Vec::new();
    for f in &report.findings {
        if !rules.iter().any(|rule| rule["id"] == id(f)) {
            rules.push(json!({
                "id": id(f),
                "shortDescription": { "text": f.reason },
                "help": { "text": f.fix },
                "defaultConfiguration": { "level": level(f) },
            }));
        }
        for tensor in &f.tensors {
            // A label may have counts behind the name.
            let name = tensor.split(" (").next().unwrap_or(tensor);
            // A tensor that is missing has no file; code scanning wants one all the same.
            let file = files.get(name).copied().unwrap_or_default();
            let file = checkpoint.files.get(file).map_or(String::new(), |f| checkpoint.shown_path(&f.path));
            results.push(json!({
                "ruleId": id(f),
                "level": level(f),
                "message": { "text": format!("{tensor}: {} -> {}", f.reason, f.fix) },
                "locations": [{
                    "physicalLocation": {
                        "artifactLocation": { "uri": uri(&file) },
                        "region": { "startLine": 1 },
                    },
                    "logicalLocations": [{ "fullyQualifiedName": name, "kind": "member" }],
                }],
            }));
        }
    }
    let document = json!({
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{
            "tool": { "driver": {
                "name": "ballast",
                "semanticVersion": env!("CARGO_PKG_VERSION"),
                "rules": rules,
            } },
            "results": results,
            "properties": { "passed": report.passed, "policy": report.policy, "notes": report.notes },
        }],
    });
    format!("{document:#}\n")
}

/// A relative path as a URI: every byte but letters, digits and `-._~/` is escaped.
fn uri(path: &str) -> String {
    let escape = |byte: u8| match byte {
        b'-' | b'.' | b'_' | b'~' | b'/' => char::from(byte).to_string(),
        byte if byte.is_ascii_alphanumeric() => char::from(byte).to_string(),
        byte => format!("%{byte:02X}"),
    };
    path.bytes().map(escape).collect()
}
