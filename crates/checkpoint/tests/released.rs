//! Audits against what the authors published: the original itself, or a release that is known by name.

use std::path::Path;
use std::sync::Arc;

use ballast_checkpoint::Checkpoint;
use ballast_checkpoint::audit::{AuditOptions, AuditReport, Severity, audit_with};
use ballast_checkpoint::convert::ConvertOptions;
use ballast_checkpoint::layout::{LayoutRequest, Naming};
use ballast_contract::{Dtype, Registry};
use ballast_files::jobs::Silent;
use serde_json::json;

use crate::common::*;

fn audited(path: &Path, original: Option<&Arc<Checkpoint>>, accept_released: bool) -> AuditReport {
    let checkpoint = Checkpoint::open(path).unwrap();
    let options = AuditOptions { original, accept_released, ..AuditOptions::default() };
    audit_with(&checkpoint, Registry::builtin(), &policy("strict"), options, &Silent).unwrap()
}

/// Kind, rule and number of tensors of each finding, by name.
fn kinds(report: &AuditReport) -> Vec<(&'static str, &str, usize)> {
    let mut kinds: Vec<_> = report
        .findings
        .iter()
        .map(|f| (f.kind, f.rule.as_deref().unwrap_or_default(), f.tensors.len()))
        .collect();
    kinds.sort();
    kinds
}

/// Converts the release fixture to `to`, without a policy.
fn cast(to: &Path, dtype: Option<Dtype>) {
    let source = open(&fixture("release/qwen3_5"));
    let options = ConvertOptions { dtype, ..options(&source, "none") };
    convert(&source, to, &options);
}

const LOST: [(&str, &str, usize); 3] =
    [("as-released", "gdn-dt-bias", 3), ("lost", "gdn-a-log", 3), ("lost", "gdn-out-norm", 3)];

#[test]
fn the_original_decides_what_was_lost_and_what_was_never_there() {
    let home = tempfile::tempdir().unwrap();
    let original = open(&fixture("release/qwen3_5"));
    let same = audited(&fixture("release/qwen3_5"), Some(&original), true);
    assert_eq!(kinds(&same), [("as-released", "gdn-dt-bias", 3)]);
    assert!(same.passed && same.findings[0].severity == Severity::Note);
    assert_eq!(same.released.as_ref().unwrap().source, "--original");

    // Cast whole; cast and widened again, which is F32 in name only; and in another layout.
    let [rounded, wide, nemo] = ["rounded", "wide", "nemo"].map(|name| home.path().join(name));
    cast(&rounded, Some(Dtype::Bf16));
    assert_eq!(kinds(&audited(&rounded, Some(&original), true)), LOST);
    let source = open(&rounded);
    let options = ConvertOptions { dtype: Some(Dtype::F32), ..options(&source, "none") };
    convert(&source, &wide, &options);
    let report = audited(&wide, Some(&original), true);
    assert_eq!(kinds(&report), LOST);
    assert!(!report.passed);
    let source = open(&rounded);
    let layout = LayoutRequest { naming: Some(Naming::Nemo), ..Default::default() };
    let options = ConvertOptions { layout, ..crate::common::options(&source, "none") };
    convert(&source, &nemo, &options);
    assert_eq!(kinds(&audited(&nemo, Some(&original), true)), LOST);

    // A policy that was asked for has no exceptions, and says so.
    let strict = audited(&fixture("release/qwen3_5"), Some(&original), false);
    assert_eq!(kinds(&strict), [("not-f32", "gdn-dt-bias", 3)]);
    assert!(
        strict.notes.iter().any(|note| note.contains("the policy accepts F32 only")),
        "{:?}",
        strict.notes
    );
    // An original that was rounded itself has published no more.
    assert!(audited(&rounded, Some(&open(&rounded)), true).passed);
    assert!(audited(&wide, Some(&open(&rounded)), true).passed);
}

#[test]
fn a_release_is_known_by_its_folder_the_cache_of_a_hub_and_config_json() {
    let home = tempfile::tempdir().unwrap();
    let original = home.path().join("any");
    cast(&original, None);
    let named = |path: &str| {
        let path = home.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::rename(&original, &path).unwrap();
        let report = audited(&path, None, true);
        std::fs::rename(&path, &original).unwrap();
        report
    };
    assert_eq!(kinds(&named("elsewhere")), [("not-f32", "gdn-dt-bias", 3)]);
    for path in ["Qwen3.5-0.8B", "models--Qwen--Qwen3.5-0.8B/snapshots/0123"] {
        let report = named(path);
        assert_eq!(kinds(&report), [("as-released", "gdn-dt-bias", 3)], "{path}");
        assert!(report.passed && report.notes.iter().any(|note| note.contains("Qwen3.5-0.8B publishes")));
    }
    let config = original.join("config.json");
    let mut fields: serde_json::Value = serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
    fields["_name_or_path"] = json!("Qwen/Qwen3.5-0.8B");
    std::fs::write(&config, fields.to_string()).unwrap();
    assert_eq!(kinds(&named("elsewhere")), [("as-released", "gdn-dt-bias", 3)]);

    // One file alone is named by its folder.
    let folder = home.path().join("Qwen3.5-4B");
    cast(&folder, None);
    assert_eq!(
        kinds(&audited(&folder.join("model.safetensors"), None, true)),
        [("as-released", "gdn-dt-bias", 3)]
    );

    // Cast whole: Qwen3.5 has two of the three in F32, Qwen3-Next none.
    let rounded = home.path().join("Qwen3.5-27B");
    cast(&rounded, Some(Dtype::Bf16));
    assert_eq!(kinds(&audited(&rounded, None, true)), LOST);
    let next = home.path().join("Qwen3-Next-80B-A3B-Instruct");
    std::fs::rename(&rounded, &next).unwrap();
    assert!(audited(&next, None, true).passed);
}

#[test]
fn another_model_as_the_original_is_an_error() {
    let home = tempfile::tempdir().unwrap();
    std::fs::copy(fixture("release/qwen3_5/config.json"), home.path().join("config.json")).unwrap();
    let tensors =
        read_folder(&fixture("release/qwen3_5")).into_iter().map(|(name, (dtype, mut shape, mut data))| {
            if name.ends_with("layers.1.linear_attn.A_log") {
                shape[0] -= 1;
                data.truncate(4 * shape[0]);
            }
            Tensor { name, dtype, shape, data }
        });
    write_file(&home.path().join("model.safetensors"), &tensors.collect::<Vec<_>>());
    let checkpoint = Checkpoint::open(&fixture("release/qwen3_5")).unwrap();
    let original = open(home.path());
    let options = AuditOptions { original: Some(&original), ..AuditOptions::default() };
    let error =
        audit_with(&checkpoint, Registry::builtin(), &policy("strict"), options, &Silent).unwrap_err();
    let error = error.to_string();
    assert!(
        error.contains("layers.1.linear_attn.A_log") && error.contains("is it another model?"),
        "{error}"
    );
}
