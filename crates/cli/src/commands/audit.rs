//! `ballast audit`

use std::path::PathBuf;

use ballast_checkpoint::Checkpoint;
use ballast_checkpoint::audit::{AuditOptions, AuditReport, Severity, Values, audit_with};
use ballast_contract::{Family, Policy, Registry};
use clap::Args;

use super::audit_formats::{self, Format};
use super::inspect::layout_words;
use super::{Global, PolicyArg, open, remote_text};
use crate::exit::{Outcome, Usage};
use crate::output::{self, bytes, clean, clean_lines, plural, table};

/// Check a checkpoint's dtypes, index and values against the precision contract.
#[derive(Args)]
pub(crate) struct AuditArgs {
    /// Checkpoint: a folder, an index, a safetensors or GGUF file, hf://ORG/NAME[@REVISION] or a URL.
    #[arg(required_unless_present = "rules")]
    path: Option<PathBuf>,
    /// Print the rules of a family, or all rules and policies, with their reasons and sources, and exit.
    #[arg(long, value_name = "FAMILY", num_args = 0..=1)]
    rules: Option<Option<String>>,
    /// Read all values of a checkpoint on a hub, not only those of protected tensors.
    #[arg(long)]
    full: bool,
    /// Checkpoint that the authors published: a tensor that is as they published it is a note, one that lost f32 bits
    /// a violation. Only its protected tensors are read. Without it, releases that Ballast knows by name decide.
    #[arg(long, value_name = "ORIG")]
    original: Option<PathBuf>,
    /// Form of the result on standard output.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
    #[command(flatten)]
    policy: PolicyArg,
}

pub(crate) fn run(args: AuditArgs, global: &Global) -> anyhow::Result<Outcome> {
    let (registry, policy) = args.policy.load(global)?;
    let Some(path) = args.path.filter(|_| args.rules.is_none()) else {
        let registry = match args.rules.flatten() {
            Some(family) => of_family(registry, &family)?,
            None => registry,
        };
        if global.json {
            let rules = serde_json::json!({ "rules": registry.rules, "families": registry.families, "policies": registry.policies });
            global.print_json("rules", &rules);
        } else {
            output::print(&rules_text(&registry));
        }
        return Ok(Outcome::Ok);
    };
    let checkpoint = Checkpoint::open(&path)?;
    global.warnings.check_config(&checkpoint);
    // The answer does not depend on what the cache has.
    let values = if args.full || checkpoint.remote.is_none() { Values::All } else { Values::Protected };
    let original = args.original.as_deref().map(open).transpose()?;
    // A policy that was asked for has no exceptions.
    let accept_released = !args.policy.is_given(global);
    let options = AuditOptions { values, original: original.as_ref(), accept_released };
    let report = audit_with(&checkpoint, &registry, &policy, options, &global.progress())?;
    match if global.json { Format::Json } else { args.format } {
        Format::Json => global.print_json("audit", &report),
        Format::Text => output::print(&text(&report)),
        Format::Markdown => output::print(&audit_formats::markdown(&report)),
        Format::Html => output::print(&audit_formats::html(&report)),
        Format::Sarif => output::print(&audit_formats::sarif(&report, &checkpoint)),
    }
    Ok(if report.passed { Outcome::Ok } else { Outcome::CheckFailed })
}

/// Formats the report as text.
pub(super) fn text(report: &AuditReport) -> String {
    let read = match report.values {
        Values::All => "read",
        Values::Protected => "of protected values read",
    };
    let mut text = format!(
        "{} ({}), {}, {} {read}\npolicy {}: {} protected\n",
        clean(report.architecture.name.as_deref().unwrap_or("unknown architecture")),
        layout_words(&report.layout),
        plural(report.tensors, "tensor"),
        bytes(report.bytes),
        clean(&report.policy),
        plural(report.protected, "tensor")
    );
    if !report.findings.is_empty() {
        let mut findings = table(&["finding", ">tensors", "required", "stored", "first tensor, reason, fix"]);
        for f in &report.findings {
            let mark = match f.severity {
                Severity::Violation => "VIOLATION",
                Severity::Warning => "warning",
                _ => "note",
            };
            let what = f.rule.as_deref().map_or(f.kind.to_string(), |r| format!("{}: {}", f.kind, clean(r)));
            findings.add_row([
                format!("{mark}\n{what}"),
                f.tensors.len().to_string(),
                f.required.map(|d| d.to_string()).unwrap_or_default(),
                f.stored.map(|d| d.to_string()).unwrap_or_default(),
                format!("{}\n{} -> {}", clean(&f.tensors[0]), clean(&f.reason), clean(&f.fix)),
            ]);
        }
        text += &format!("{findings}\n");
    }
    for cost in &report.decay {
        let heads = plural(cost.heads as usize, "head");
        let (mean, worst) = (100.0 * cost.mean, 100.0 * cost.worst);
        text += &match cost.tense {
            "would" => format!(
                "A_log ({heads}) has full f32 precision. In bf16 its decay rates exp(A_log) would be off by {mean:.2} % on average, {worst:.2} % at worst.\n"
            ),
            _ => format!(
                "A_log ({heads}) was rounded to bf16. Its decay rates exp(A_log) are off by about {mean:.2} % on average, up to {worst:.2} %.\n"
            ),
        };
    }
    for note in &report.notes {
        text += &format!("note: {}\n", clean(note));
    }
    text += &report.remote.as_ref().map(remote_text).unwrap_or_default();
    let (violations, warnings) = (report.count(Severity::Violation), report.count(Severity::Warning));
    let as_released = match report.count(Severity::Note) {
        0 => String::new(),
        notes => format!(", {} as released", plural(notes, "tensor")),
    };
    text += &format!(
        "{}: {}, {}{as_released}\n",
        if report.passed { "PASSED" } else { "FAILED" },
        plural(violations, "violation"),
        plural(warnings, "warning")
    );
    text
}

/// Reduces a registry to one family, given by its name, a `model_type` or an entry of `architectures`.
fn of_family(registry: Registry, wanted: &str) -> anyhow::Result<Registry> {
    let is_named = |family: &&Family| {
        family.name == wanted
            || family.model_types.iter().chain(&family.architectures).any(|name| name == wanted)
    };
    let families: Vec<Family> = registry.families.iter().filter(is_named).cloned().collect();
    if families.is_empty() {
        let known: Vec<&str> = registry.families.iter().map(|f| f.name.as_str()).collect();
        return Err(Usage(format!("unknown family `{wanted}`; the table has: {}", known.join(", "))).into());
    }
    let names: Vec<&String> = families.iter().map(|f| &f.name).collect();
    let rules = registry.rules.iter().filter(|r| r.families.iter().any(|f| names.contains(&f)));
    Ok(Registry { rules: rules.cloned().collect(), families, ..registry })
}

fn rules_text(registry: &Registry) -> String {
    let mut rules = table(&["rule", "tensors", "architectures", "policies", "reason, source"]);
    for rule in &registry.rules {
        let mut tensors: Vec<String> =
            rule.tensors.iter().map(|t| format!("{}.{}", t.module, t.param)).collect();
        if rule.is_structural() {
            tensors.push(format!("near {}", rule.near.join(" or ")));
        }
        let includes = |p: &&Policy| p.rules.iter().any(|r| r.id == rule.id);
        let policies: Vec<&str> =
            registry.policies.iter().filter(includes).map(|p| p.name.as_str()).collect();
        rules.add_row([
            clean(&rule.id),
            clean_lines(&tensors.join("\n")),
            clean_lines(&rule.families.join("\n")),
            clean_lines(&policies.join("\n")),
            format!("{}\n({})", clean(&rule.reason), clean(&rule.source)),
        ]);
    }
    let mut policies = table(&["policy", "tensors in F32"]);
    for policy in &registry.policies {
        policies.add_row([clean(&policy.name), clean(&policy.description)]);
    }
    format!("{rules}\n{policies}\n")
}
