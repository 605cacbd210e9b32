//! Audit of a checkpoint: the precision contract, its headers and index, and its values.
//!
//! Every header, index and name is checked, and every value is read once, or those of the protected tensors
//! only ([`Values`]). Findings are grouped by kind and rule, each with its tensors and a fix.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use ballast_contract::holder::strip_fp32_holder_key;
use ballast_contract::rounded::{Fit, Narrow};
use ballast_contract::{Architecture, Dtype, Policy, Registry, Rule};
use ballast_files::jobs::{self, CHUNK_BYTES, Observer};
use ballast_files::{Result, cast, left_out};
use ballast_hub::RemoteSummary;
use serde::Serialize;

use crate::fp8::{self, ScaleOf};
use crate::layout::{Layout, Naming, metadata};
use crate::masters;
use crate::open::{Checkpoint, StoredTensor};
pub use crate::released::Publication;
use crate::released::{Published, Released};
use crate::remote::with_readers;
use crate::tied;

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
#[non_exhaustive]
pub enum Severity {
    Violation,
    Warning,
    Note,
}

/// A finding: one kind of problem and the tensors that have it.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Finding {
    /// Stable name of the kind.
    pub kind: &'static str,
    /// Severity.
    pub severity: Severity,
    /// Rule, if the finding is about one.
    pub rule: Option<String>,
    /// dtype that the rule requires.
    pub required: Option<Dtype>,
    /// dtype that is stored.
    pub stored: Option<Dtype>,
    /// Tensors with this problem.
    pub tensors: Vec<String>,
    /// Explanation.
    pub reason: String,
    /// Fix.
    pub fix: String,
}

/// The cost of storing A_log in bf16: the relative error of the decay rate exp(A_log).
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct DecayCost {
    /// `would` for tensors with full f32 precision, `has` for those already rounded.
    pub tense: &'static str,
    /// Number of tensors.
    pub tensors: usize,
    /// Number of heads over all tensors.
    pub heads: u64,
    /// Mean relative error of exp(A_log): measured (`would`), or expected from rounding (`has`).
    pub mean: f64,
    /// Worst relative error of exp(A_log): measured, or the bound.
    pub worst: f64,
}

/// The values that an audit reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Values {
    /// Values of all tensors.
    All,
    /// Values of the protected tensors: for a checkpoint on a server.
    Protected,
}

/// The result of an audit.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct AuditReport {
    /// Architecture.
    pub architecture: Architecture,
    /// Policy of the audit.
    pub policy: String,
    /// Layout.
    pub layout: Layout,
    /// Number of tensors.
    pub tensors: usize,
    /// Number of bytes of the values that were read.
    pub bytes: u64,
    /// Values that were read.
    pub values: Values,
    /// Number of protected tensors.
    pub protected: usize,
    /// Findings, violations first.
    pub findings: Vec<Finding>,
    /// Cost of storing A_log in bf16.
    pub decay: Vec<DecayCost>,
    /// Notes.
    pub notes: Vec<String>,
    /// Source of the published form of the tensors, if it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub released: Option<Publication>,
    /// Bytes and requests that a server was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remote: Option<RemoteSummary>,
    /// True if there is no violation.
    pub passed: bool,
}

impl AuditReport {
    /// Returns the number of tensors in findings of this severity.
    pub fn count(&self, severity: Severity) -> usize {
        self.findings.iter().filter(|f| f.severity == severity).map(|f| f.tensors.len()).sum()
    }
}

/// Statistics of a tensor's values.
#[derive(Clone, Copy)]
struct Scan {
    non_finite: u64,
    /// Number of values that are -inf.
    negative_infinite: u64,
    /// Types of fewer bits that represent the values (protected tensors only).
    fit: Fit,
    decay: DecaySum,
}

#[derive(Clone, Copy, Default)]
struct DecaySum {
    heads: u64,
    sum: f64,
    worst: f64,
}

/// Audits `checkpoint` against the rules of `policy` for its architecture; reads all values.
pub fn audit(
    checkpoint: &Checkpoint,
    registry: &Registry,
    policy: &Policy,
    observer: &dyn Observer,
) -> Result<AuditReport> {
    audit_with(checkpoint, registry, policy, AuditOptions::default(), observer)
}

/// Options of an audit: the values that are read, and the published form that they are compared with.
#[derive(Clone, Copy, Debug)]
pub struct AuditOptions<'a> {
    /// Values that are read.
    pub values: Values,
    /// The checkpoint that the authors published, of which the protected tensors are read; without it, the table of
    /// releases is asked for the model's name.
    pub original: Option<&'a Arc<Checkpoint>>,
    /// True if a tensor that is as its authors published it is no violation.
    pub accept_released: bool,
}

impl Default for AuditOptions<'_> {
    fn default() -> Self {
        AuditOptions { values: Values::All, original: None, accept_released: false }
    }
}

/// Audits `checkpoint` like [`audit`], with options.
pub fn audit_with(
    checkpoint: &Checkpoint,
    registry: &Registry,
    policy: &Policy,
    options: AuditOptions<'_>,
    observer: &dyn Observer,
) -> Result<AuditReport> {
    let values = options.values;
    let (architecture, policy) = checkpoint.contract(registry, policy)?;
    let released = match options.original {
        Some(original) => Some(Released::by_original(checkpoint, original, &policy)?),
        None => Released::by_name(checkpoint),
    };
    let verdicts = Verdicts { released: released.as_ref(), accepts: options.accept_released };
    let layout = Layout::detect(checkpoint);
    let rules: Vec<Option<&Rule>> = checkpoint.tensors.iter().map(|t| policy.rule_for(&t.name)).collect();
    let mut findings = Findings::default();
    header_findings(checkpoint, &policy, &rules, &layout, &verdicts, &mut findings);
    fp8_findings(checkpoint, values, &mut findings)?;
    let is_read = |rule: &Option<&Rule>| values == Values::All || rule.is_some();
    let read = || checkpoint.tensors.iter().zip(&rules).filter(|(_, rule)| is_read(rule)).map(|(t, _)| t);
    let bytes = read().map(|t| t.bytes).sum();
    let mut notes = Vec::new();
    if values == Values::All {
        head_findings(checkpoint, &mut findings)?;
    } else {
        checkpoint.prefetch(read())?;
        let unread = checkpoint.tensors.len() - read().count();
        notes.push(format!(
            "the values of {unread} tensors that are not protected were not read ({}); --full reads them",
            ballast_format::bytes(checkpoint.tensor_bytes() - bytes)
        ));
    }
    let work = || scan_values(checkpoint, &rules, &is_read, observer);
    let scans = with_readers(&[checkpoint], work)?;
    let decay = value_findings(checkpoint, &rules, &scans, &verdicts, &mut findings);
    notes.extend(master_findings(checkpoint, &policy, observer, &mut findings)?);
    notes.extend(recognition(checkpoint, &architecture, &layout, &rules));
    if !checkpoint.ignored.is_empty() {
        let names: Vec<_> =
            checkpoint.ignored.iter().filter_map(|p| p.file_name()).map(|n| n.to_string_lossy()).collect();
        notes.push(format!("not part of the checkpoint, ignored: {}", names.join(", ")));
    }
    notes.extend(left_out::line(&checkpoint.left_out));
    let findings = findings.sorted();
    notes.extend(verdicts.note(&findings));
    Ok(AuditReport {
        architecture,
        policy: policy.name.clone(),
        layout,
        tensors: checkpoint.tensors.len(),
        bytes,
        values,
        protected: rules.iter().flatten().count(),
        passed: findings.iter().all(|f| f.severity != Severity::Violation),
        findings,
        decay,
        notes,
        released: released.map(|released| released.publication),
        remote: checkpoint.remote.as_ref().map(|remote| remote.summary()),
    })
}

/// Returns a note on how the architecture was recognized, unless config.json says it all.
fn recognition(
    checkpoint: &Checkpoint,
    architecture: &Architecture,
    layout: &Layout,
    rules: &[Option<&Rule>],
) -> Option<String> {
    let families = architecture.families.join(", ");
    let name = architecture.name.as_deref();
    if architecture.families.is_empty() {
        let who = match name {
            Some(name) => format!("{name} is not in the table of architectures (ballast audit --rules)"),
            None => "unknown architecture (no config.json, no known tensor names)".to_owned(),
        };
        return Some(match rules.iter().flatten().count() {
            0 => format!(
                "{who}, and none of its tensors looks like one that must be f32: only general checks were made"
            ),
            1 => format!("{who}: 1 tensor is protected by structure"),
            found => format!("{who}: {found} tensors are protected by structure"),
        });
    }
    if architecture.source != "tensor names" {
        return None;
    }
    match checkpoint.config {
        Some(_) => Some(format!(
            "{} is not in the table of architectures: its tensor names are those of {families}",
            name.unwrap_or("the architecture in config.json")
        )),
        None if layout.naming == Naming::Gguf => None,
        None => Some(format!("no config.json: identified as {families} by its tensor names")),
    }
}

/// The verdict on a protected tensor that is not F32, or only in name, by what its authors published.
struct Verdicts<'a> {
    released: Option<&'a Released>,
    /// True if a tensor that is as published is no violation.
    accepts: bool,
}

impl Verdicts<'_> {
    /// Returns the kind of finding, which is `otherwise` if nothing is known of the tensor.
    fn kind<'k>(&self, tensor: &StoredTensor, rule: &Rule, otherwise: &'k Kind) -> &'k Kind {
        match self.released.and_then(|released| released.of(tensor, rule)) {
            Some(Published::F32) => &LOST,
            Some(Published::Narrow) if self.accepts => &AS_RELEASED,
            _ => otherwise,
        }
    }

    /// Returns a note on where the verdicts come from, and on what the policy leaves no room for.
    fn note(&self, findings: &[Finding]) -> Option<String> {
        let publication = &self.released?.publication;
        let (name, source) = (&publication.name, &publication.source);
        let is_about_bits =
            |f: &&Finding| [LOST.name, AS_RELEASED.name, NOT_F32.name, IN_NAME_ONLY.name].contains(&f.kind);
        findings.iter().find(is_about_bits)?;
        Some(match self.accepts {
            true => format!("compared with what {name} publishes ({source})"),
            false => format!(
                "compared with what {name} publishes ({source}); the policy accepts F32 only, also of tensors that \
                 are as released"
            ),
        })
    }
}

/// A kind of finding: its stable name, severity, explanation and fix.
struct Kind {
    name: &'static str,
    severity: Severity,
    reason: &'static str,
    fix: &'static str,
}

const fn violation(name: &'static str, reason: &'static str, fix: &'static str) -> Kind {
    Kind { name, severity: Severity::Violation, reason, fix }
}

/// The rule states the reason.
const NOT_F32: Kind = violation(
    "not-f32",
    "",
    "ballast repair CKPT DST --original ORIG; without the original, ballast convert SRC DST, which makes it F32 in name only",
);
const LOST: Kind = violation(
    "lost",
    "published in F32; the bits that this file lacks were lost on the way here",
    "ballast repair CKPT DST --original ORIG",
);
const AS_RELEASED: Kind = Kind {
    name: "as-released",
    severity: Severity::Note,
    reason: "as its authors published it: the f32 bits were never there",
    fix: "none; --policy strict accepts F32 only",
};
const F64_NOT_F32: Kind = violation("not-f32", "", "ballast convert SRC DST --narrow-f64");
const GGUF_NOT_F32: Kind = violation("not-f32", "", GGUF_FIX);
const GGUF_VECTOR: Kind = violation(
    "gguf-vector-not-f32",
    "llama.cpp takes tensors of one dimension in F32 only: it stops, or computes something else",
    GGUF_FIX,
);
const GGUF_FIX: &str = "convert the original again: ballast convert CKPT DST.gguf";
const MISSING: Kind = violation(
    "missing",
    "the layer exists, but its protected tensor is missing",
    "copy it from the original checkpoint",
);
const FP8_UNSCALED: Kind = violation(
    "fp8-scale-missing",
    "an FP8 weight has no value without the scales of its blocks",
    "copy the scales from the original checkpoint",
);
const FP8_SHAPE: Kind = violation(
    "fp8-scale-shape",
    "the scales of an FP8 weight do not fit its blocks",
    "copy the scales from the original checkpoint, or state quantization_config.weight_block_size",
);
const FP8_VALUE: Kind = violation(
    "fp8-scale-value",
    "a scale of an FP8 weight is not finite and positive",
    "copy the scales from the original checkpoint",
);
const UNCONFIGURED: Kind = violation(
    "quantization-config-missing",
    "codes of a quantized weight, but config.json has no quantization_config: loaders read the codes as values",
    "copy quantization_config from the original's config.json, or convert the original again",
);
const SCALE_ALONE: Kind = violation(
    "scale-without-codes",
    "a scale of a quantized weight, but the weight is missing or not quantized: whether it has been multiplied is unknown",
    "convert the original again, or remove the scale if the weight has been multiplied by it",
);
const BARE_AND_ROUTED: Kind = violation(
    "bare-and-routed",
    "one tensor under two names, bare and under _fp32_params: loaders may read either one",
    "remove one of the two",
);
const HOLDER_LEAKED: Kind = violation(
    "holder-leaked",
    "the run-time holder _fp32_params is part of the saved name: other tools will not find the tensor",
    "ballast convert SRC DST --layout hf",
);
const INDEX: Kind = violation(
    "index",
    "index and shards disagree: loaders will miss tensors or read the wrong one",
    "write the checkpoint again, or fix the index",
);
const DEAD_HEAD: Kind = violation(
    "dead-head",
    "A_log = -inf: A was initialized or rounded to exactly 0; the head never decays and gets no gradient",
    "copy the tensor from the original, or initialize A again in f32",
);
const NON_FINITE: Kind = violation(
    "non-finite",
    "NaN or infinite values: the model's output will be non-finite",
    "go back to an earlier checkpoint",
);
const HEAD_DIFFERS: Kind = violation(
    "tied-head-differs",
    "config.json ties the output head to the embedding, but both are stored with different values: transformers unties \
     them, other programs use one of the two",
    "set \"tie_word_embeddings\": false in config.json, or remove the head to use the embedding",
);
const HEAD_COPY: Kind = Kind {
    name: "tied-head-copy",
    severity: Severity::Warning,
    reason: "config.json ties the output head to the embedding, but the head is also stored, with the same values: \
             training only one of them makes them differ",
    fix: "remove the head from the file; ballast train and ballast merge write one tensor",
};
const IN_NAME_ONLY: Kind = Kind {
    name: "in-name-only",
    severity: Severity::Warning,
    reason: "F32 in name only: every value is a bf16 value (or one of the type named beside the tensor), so it was rounded \
             before it was stored (by a cast of the whole model, or in a source of fewer bits)",
    fix: "ballast repair CKPT DST --original ORIG",
};
const MASTER_HAS_BITS: Kind = Kind {
    name: "master-has-bits",
    severity: Severity::Warning,
    reason: "the model's values are the rounding to fewer bits of the optimizer's fp32 master weights, which still have the bits \
             that the model lost",
    fix: "ballast repair CKPT DST --original CKPT, which takes the bits from the master weights",
};
const MASTER_DIFFERS: Kind = Kind {
    name: "master-differs",
    severity: Severity::Warning,
    reason: "the model's values are not the rounding of the optimizer's fp32 master weights: one of the two was changed \
             alone, and a resumed run continues from the masters",
    fix: "use the optimizer state of the same step, or resume without it (Megatron: --no-load-optim)",
};

/// Findings, one per kind, rule and stored dtype.
#[derive(Default)]
struct Findings(Vec<Finding>);

impl Findings {
    fn add(&mut self, kind: &Kind, rule: Option<&Rule>, stored: Option<Dtype>, tensor: String) {
        let rule_id = rule.map(|r| r.id.as_str());
        let known =
            self.0.iter_mut().find(|f| (f.kind, f.rule.as_deref(), f.stored) == (kind.name, rule_id, stored));
        if let Some(finding) = known {
            finding.tensors.push(tensor);
            return;
        }
        self.0.push(Finding {
            kind: kind.name,
            severity: kind.severity,
            rule: rule_id.map(str::to_owned),
            required: rule.map(|r| r.dtype),
            stored,
            tensors: vec![tensor],
            reason: rule.filter(|_| kind.reason.is_empty()).map_or(kind.reason.into(), |r| r.reason.clone()),
            fix: kind.fix.into(),
        });
    }

    fn sorted(mut self) -> Vec<Finding> {
        self.0.sort_by_key(|f| f.severity);
        self.0
    }
}

fn header_findings(
    checkpoint: &Checkpoint,
    policy: &Policy,
    rules: &[Option<&Rule>],
    layout: &Layout,
    verdicts: &Verdicts<'_>,
    findings: &mut Findings,
) {
    for (t, rule) in checkpoint.tensors.iter().zip(rules) {
        let is_float = t.dtype.is_plain_float() || t.dtype.is_scaled_float();
        if let Some(rule) = rule.filter(|r| t.dtype != r.dtype && is_float) {
            let kind = match t.dtype {
                _ if layout.naming == Naming::Gguf => &GGUF_NOT_F32,
                Dtype::F64 => &F64_NOT_F32,
                _ => verdicts.kind(t, rule, &NOT_F32),
            };
            findings.add(kind, Some(rule), Some(t.dtype), t.name.clone());
        } else if layout.naming == Naming::Gguf && t.shape.len() < 2 && is_float && t.dtype != Dtype::F32 {
            findings.add(&GGUF_VECTOR, None, Some(t.dtype), t.name.clone());
        }
    }
    for rank in 0..checkpoint.ranks {
        let of_rank = || checkpoint.tensors.iter().filter(move |t| t.rank == rank);
        let bare: HashSet<String> = of_rank().map(|t| strip_fp32_holder_key(&t.name).into_owned()).collect();
        for t in of_rank() {
            for rule in &policy.rules {
                if let Some(expected) = rule.expected_beside(&t.name).filter(|e| !bare.contains(e)) {
                    findings.add(&MISSING, Some(rule), None, expected);
                }
            }
        }
        let names: HashSet<&str> = of_rank().map(|t| t.name.as_str()).collect();
        // Ballast marks its own nemo files; in any other file a holder key is a leak.
        let is_intended =
            layout.naming == Naming::Nemo && checkpoint.metadata_value(metadata::LAYOUT) == Some("nemo");
        for t in of_rank() {
            let stripped = strip_fp32_holder_key(&t.name);
            if stripped == t.name {
                continue;
            }
            if names.contains(&*stripped) {
                findings.add(&BARE_AND_ROUTED, None, Some(t.dtype), stripped.into_owned());
            } else if !is_intended {
                findings.add(&HOLDER_LEAKED, None, Some(t.dtype), t.name.clone());
            }
        }
    }
    for issue in &checkpoint.issues {
        findings.add(&INDEX, None, None, issue.to_string());
    }
}

/// Finds FP8 weights without usable scales or configuration, and scales without weights; the values of the scales
/// are read with all others.
fn fp8_findings(checkpoint: &Checkpoint, values: Values, findings: &mut Findings) -> Result<()> {
    for t in fp8::unconfigured(checkpoint) {
        findings.add(&UNCONFIGURED, None, Some(t.dtype), t.name.clone());
    }
    for t in fp8::scales_without_codes(checkpoint) {
        findings.add(&SCALE_ALONE, None, Some(t.dtype), t.name.clone());
    }
    for (weight, scales) in fp8::pairs(checkpoint)? {
        let t = &checkpoint.tensors[weight];
        match scales {
            ScaleOf::Missing(name) => findings.add(&FP8_UNSCALED, None, Some(t.dtype), name),
            ScaleOf::Unfit(problem) => {
                findings.add(&FP8_SHAPE, None, Some(t.dtype), format!("{} ({problem})", t.name));
            }
            ScaleOf::Found(..) if values != Values::All => {}
            ScaleOf::Found(scales, _) => {
                let bad = fp8::count_bad_scales(checkpoint, scales)?;
                if bad > 0 {
                    let t = &checkpoint.tensors[scales];
                    let label = format!("{} ({bad} of {} scales)", t.name, t.elements());
                    findings.add(&FP8_VALUE, None, Some(t.dtype), label);
                }
            }
        }
    }
    Ok(())
}

/// Finds an output head that is stored although config.json ties it to the embedding.
fn head_findings(checkpoint: &Checkpoint, findings: &mut Findings) -> Result<()> {
    if checkpoint.config.as_ref().is_some_and(tied::is_tied)
        && let Some(head) = tied::stored_head(checkpoint)?
    {
        let kind = if head.equal { &HEAD_COPY } else { &HEAD_DIFFERS };
        findings.add(kind, None, None, head.head);
    }
    Ok(())
}

/// Compares protected tensors with the optimizer's master weights; returns a note if there are some.
fn master_findings(
    checkpoint: &Checkpoint,
    policy: &Policy,
    observer: &dyn Observer,
    findings: &mut Findings,
) -> Result<Option<String>> {
    // An F16 model is not the bf16 rounding of its masters.
    let is_compared =
        |t: &StoredTensor| matches!(t.dtype, Dtype::Bf16 | Dtype::F32) && policy.rule_for(&t.name).is_some();
    let found = masters::find(checkpoint, is_compared);
    for (number, values) in masters::compare(checkpoint, &found, observer)? {
        let t = &checkpoint.tensors[number];
        let rule = policy.rule_for(&t.name);
        if values.differing > 0 {
            let label = format!("{} ({} of {} values)", t.name, values.differing, t.elements());
            findings.add(&MASTER_DIFFERS, rule, Some(t.dtype), label);
        } else if values.lost_bits() {
            findings.add(&MASTER_HAS_BITS, rule, Some(t.dtype), t.name.clone());
        }
    }
    let note =
        || format!("protected tensors compared with the optimizer's fp32 master weights: {}", found.len());
    Ok((!found.is_empty()).then(note))
}

/// Reads values once, in parallel.
fn scan_values(
    checkpoint: &Checkpoint,
    rules: &[Option<&Rule>],
    is_read: &(impl Fn(&Option<&Rule>) -> bool + Sync),
    observer: &dyn Observer,
) -> Result<Vec<Scan>> {
    let work: Vec<(usize, Range<u64>)> = checkpoint
        .tensors
        .iter()
        .enumerate()
        .filter(|(i, _)| is_read(&rules[*i]))
        .flat_map(|(i, t)| {
            // A piece has whole blocks.
            let unit = t.dtype.block().map_or(1, |(_, bytes)| bytes);
            let pieces = jobs::pieces(t.bytes / unit, unit, CHUNK_BYTES);
            pieces.map(move |range| (i, range.start * unit..range.end * unit))
        })
        .collect();
    let bytes = |(_, range): &(usize, Range<u64>)| range.end - range.start;
    observer.phase("reading", work.iter().map(bytes).sum());
    let parts = jobs::run(&work, observer, bytes, |(i, range), w| {
        let t = &checkpoint.tensors[*i];
        let buffer = w.a.resize((range.end - range.start) as usize);
        checkpoint.files[t.file].read_at(buffer, t.begin + range.start)?;
        Ok(scan(buffer, t, rules[*i]))
    })?;
    let empty = Scan { non_finite: 0, negative_infinite: 0, fit: Fit::default(), decay: DecaySum::default() };
    let mut scans = vec![empty; checkpoint.tensors.len()];
    for ((i, _), part) in work.iter().zip(parts) {
        let s = &mut scans[*i];
        s.non_finite += part.non_finite;
        s.negative_infinite += part.negative_infinite;
        s.fit.add(&part.fit);
        s.decay.heads += part.decay.heads;
        s.decay.sum += part.decay.sum;
        s.decay.worst = s.decay.worst.max(part.decay.worst);
    }
    Ok(scans)
}

fn scan(data: &[u8], t: &StoredTensor, rule: Option<&Rule>) -> Scan {
    let mut scan = Scan {
        non_finite: cast::count_non_finite(data, t.dtype),
        negative_infinite: 0,
        fit: Fit::default(),
        decay: DecaySum::default(),
    };
    if rule.is_none() || !t.dtype.widens_exactly_to(Dtype::F32) {
        return scan;
    }
    // Protected tensors are small: simple code is fast enough.
    let mut wide = cast::Buffer::default();
    let elements = data.len() as u64 / t.dtype.bytes().unwrap_or(1);
    cast::convert(data, t.dtype, wide.resize(elements as usize * 4), Dtype::F32);
    let values: &[f32] = bytemuck::cast_slice(wide.as_ref());
    scan.fit = Fit::of(values);
    for &x in values {
        scan.negative_infinite += (x == f32::NEG_INFINITY) as u64;
        if is_a_log(&t.name) && x.is_finite() {
            let error = if t.dtype == Dtype::F32 && !Narrow::Bf16.represents(x) {
                // exp(rounded)/exp(x) - 1
                ((cast::bf16_round(x) as f64 - x as f64).exp() - 1.0).abs()
            } else {
                // Already rounded: the error is at most half a bf16 step; see `value_findings` for the mean.
                Narrow::Bf16.half_step(x).exp() - 1.0
            };
            scan.decay.heads += 1;
            scan.decay.sum += error;
            scan.decay.worst = scan.decay.worst.max(error);
        }
    }
    scan
}

fn is_a_log(name: &str) -> bool {
    name.rsplit('.').next() == Some("A_log")
}

fn value_findings(
    checkpoint: &Checkpoint,
    rules: &[Option<&Rule>],
    scans: &[Scan],
    verdicts: &Verdicts<'_>,
    findings: &mut Findings,
) -> Vec<DecayCost> {
    let is_gguf = checkpoint.metadata_value(ballast_gguf::ARCHITECTURE).is_some();
    let mut costs: HashMap<&'static str, (usize, DecaySum)> = HashMap::new();
    for ((t, rule), scan) in checkpoint.tensors.iter().zip(rules).zip(scans) {
        if is_a_log(&t.name) && scan.negative_infinite > 0 {
            let label = format!("{} ({} of {} heads)", t.name, scan.negative_infinite, t.elements());
            findings.add(&DEAD_HEAD, *rule, Some(t.dtype), label);
        }
        if scan.non_finite > scan.negative_infinite || scan.non_finite > 0 && !is_a_log(&t.name) {
            let label = format!("{} ({} of {} values)", t.name, scan.non_finite, t.elements());
            findings.add(&NON_FINITE, None, Some(t.dtype), label);
        }
        let Some(rule) = rule else { continue };
        // GGUF needs F32 of tensors that a release has in BF16.
        if let Some(narrow) = scan.fit.rounded_to().filter(|_| t.dtype == Dtype::F32 && !is_gguf) {
            let label = match narrow {
                Narrow::Bf16 => t.name.clone(),
                _ => format!("{} ({narrow})", t.name),
            };
            findings.add(verdicts.kind(t, rule, &IN_NAME_ONLY), Some(rule), Some(t.dtype), label);
        }
        let rounded = scan.fit.narrowest();
        // The costs are those of bf16; of f16 and tf32 the finding says enough.
        if is_a_log(&t.name) && scan.decay.heads > 0 && matches!(rounded, None | Some(Narrow::Bf16)) {
            let rounded = rounded.is_some();
            let tense = if rounded { "has" } else { "would" };
            let (tensors, sum) = costs.entry(tense).or_default();
            *tensors += 1;
            sum.heads += scan.decay.heads;
            // The expectation of a uniform rounding error is half its bound.
            sum.sum += if rounded { scan.decay.sum / 2.0 } else { scan.decay.sum };
            sum.worst = sum.worst.max(scan.decay.worst);
        }
    }
    let cost = |tense: &'static str| {
        let (tensors, sum) = costs.get(tense)?;
        Some(DecayCost {
            tense,
            tensors: *tensors,
            heads: sum.heads,
            mean: sum.sum / sum.heads as f64,
            worst: sum.worst,
        })
    };
    ["would", "has"].into_iter().filter_map(cost).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_a_bf16_step_is_half_the_distance_to_the_next_value() {
        for x in [1.0f32, 1.5, 2.0, -2.7, 0.3, 1e-3] {
            let here = cast::bf16_bits(x.to_bits());
            let next = |bits: u16| f32::from_bits((bits as u32) << 16) as f64;
            assert_eq!(Narrow::Bf16.half_step(x), (next(here + 1) - next(here)).abs() / 2.0, "{x}");
        }
    }
}
