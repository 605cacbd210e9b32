//! The optimizer's fp32 master weights, in a sample that torch wrote (fixtures/make_masters.py): audit finds the
//! bits that the model lost, and repair takes them.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ballast_checkpoint::Checkpoint;
use ballast_checkpoint::audit::{AuditReport, Severity, audit};
use ballast_checkpoint::convert::ConvertOptions;
use ballast_checkpoint::layout::{LayoutRequest, Naming};
use ballast_checkpoint::repair::{Outcome, RepairReport, repair};
use ballast_contract::Registry;
use ballast_files::jobs::Silent;
use safetensors::tensor::Dtype;

use crate::common::*;

const A_LOG: &str = "decoder.layers.0.self_attention.A_log";
const DT_BIAS: &str = "decoder.layers.0.self_attention.dt_bias";
const OUT_NORM: &str = "decoder.layers.0.self_attention.out_norm.weight";
const MASTER: &str = "optimizer.state.fp32_param.";

fn sample() -> PathBuf {
    fixture("torch/masters")
}

/// The masters that the sample was made with.
fn truth() -> BTreeMap<String, Vec<f32>> {
    let read = read_file(&sample().join("truth/truth.safetensors"));
    read.into_iter().map(|(name, (_, _, bytes))| (name, f32_values(&bytes))).collect()
}

/// Copies the sample and replaces the first value of some tensors, given as bytes.
fn changed(to: &Path, values: &[(&str, &[u8])]) -> PathBuf {
    for name in [".metadata", "__0_0.distcp", "config.json"] {
        std::fs::copy(sample().join(name), to.join(name)).unwrap();
    }
    let checkpoint = Checkpoint::open(to).unwrap();
    for (name, value) in values {
        let t = checkpoint.tensors.iter().chain(&checkpoint.state).find(|t| t.name == *name).unwrap();
        let file = std::fs::OpenOptions::new().write(true).open(&checkpoint.files[t.file].path).unwrap();
        file.write_all_at(value, t.begin).unwrap();
    }
    to.into()
}

fn audited(path: &Path) -> AuditReport {
    audit(&open(path), Registry::builtin(), &policy("strict"), &Silent).unwrap()
}

/// Tensors of the findings of one kind.
fn tensors_of(report: &AuditReport, kind: &str) -> Vec<String> {
    let findings = report.findings.iter().filter(|f| f.kind == kind);
    let mut tensors: Vec<String> = findings.flat_map(|f| f.tensors.clone()).collect();
    tensors.sort();
    tensors
}

fn repaired(checkpoint: &Path, original: &Path, to: Option<&Path>) -> RepairReport {
    let checkpoint = open(checkpoint);
    let ConvertOptions { policy, .. } = options(&checkpoint, "strict");
    repair(&checkpoint, &open(original), to, &policy, false, &Silent).unwrap()
}

fn outcomes(report: &RepairReport) -> BTreeMap<&str, Outcome> {
    report.tensors.iter().map(|t| (t.tensor.rsplit_once("0.").unwrap().1, t.outcome)).collect()
}

fn as_hf(source: &Path, to: &Path) {
    let source: Arc<Checkpoint> = open(source);
    let mut options = options(&source, "strict");
    options.layout = LayoutRequest { naming: Some(Naming::Hf), ..LayoutRequest::default() };
    convert(&source, to, &options);
}

#[test]
fn audit_names_the_tensors_whose_masters_have_the_lost_bits() {
    let report = audited(&sample());
    assert_eq!(tensors_of(&report, "master-has-bits"), [A_LOG, DT_BIAS, OUT_NORM]);
    assert!(tensors_of(&report, "master-differs").is_empty());
    let finding = report.findings.iter().find(|f| f.kind == "master-has-bits").unwrap();
    assert_eq!(finding.severity, Severity::Warning);
    assert!(finding.fix.starts_with("ballast repair CKPT DST --original CKPT"), "{}", finding.fix);
    assert!(report.notes.iter().any(|note| note.ends_with("fp32 master weights: 3")), "{:?}", report.notes);
}

#[test]
fn masters_without_more_bits_and_masters_without_names_are_no_finding() {
    for (name, noted) in [("torch/torch_dist_tp2", true), ("torch/legacy_tp2", false)] {
        let report = audited(&fixture(name));
        for kind in ["master-has-bits", "master-differs"] {
            assert!(tensors_of(&report, kind).is_empty(), "{name}: {kind}");
        }
        assert_eq!(report.notes.iter().any(|note| note.contains("master weights")), noted, "{name}");
    }
}

#[test]
fn audit_names_the_tensors_that_are_not_the_rounding_of_their_masters() {
    let folder = tempfile::tempdir().unwrap();
    let master = format!("{MASTER}{DT_BIAS}");
    let path = changed(folder.path(), &[(&master, &9.5f32.to_le_bytes())]);
    let report = audited(&path);
    assert_eq!(tensors_of(&report, "master-differs"), [format!("{DT_BIAS} (1 of 4 values)")]);
    assert_eq!(tensors_of(&report, "master-has-bits"), [A_LOG, OUT_NORM]);
}

#[test]
fn repair_takes_the_bits_of_the_masters_and_warns_of_it() {
    let folder = tempfile::tempdir().unwrap();
    let fixed = folder.path().join("fixed");
    let report = repaired(&sample(), &sample(), Some(&fixed));
    assert_eq!(report.tensors.len(), 3);
    assert!(report.tensors.iter().all(|t| t.outcome == Outcome::RestoredFromMaster), "{report:?}");
    assert_eq!(report.warnings.len(), 1);
    assert!(report.warnings[0].contains("3 tensors come from the optimizer's fp32 master weights"));
    let (read, truth) = (read_folder(&fixed), truth());
    for name in [A_LOG, DT_BIAS, OUT_NORM] {
        assert_eq!(read[name].0, Dtype::F32);
        assert_eq!(f32_values(&read[name].2), truth[name], "{name}");
    }
    let unprotected = &read["decoder.final_layernorm.weight"];
    assert_eq!(unprotected.0, Dtype::BF16, "only protected tensors are repaired");
    assert!(audited(&fixed).findings.is_empty());
}

#[test]
fn repair_of_another_layout_shifts_the_masters_as_the_model() {
    let folder = tempfile::tempdir().unwrap();
    let [hf, fixed, megatron, after] =
        ["hf", "fixed", "megatron", "after"].map(|name| folder.path().join(name));
    as_hf(&sample(), &hf);
    let report = repaired(&hf, &sample(), Some(&fixed));
    assert!(report.tensors.iter().all(|t| t.outcome == Outcome::RestoredFromMaster), "{report:?}");
    let (read, truth) = (read_folder(&fixed), truth());
    let module = "model.layers.0.linear_attn";
    assert_eq!(f32_values(&read[&format!("{module}.A_log")].2), truth[A_LOG]);
    assert_eq!(f32_values(&read[&format!("{module}.dt_bias")].2), truth[DT_BIAS]);
    let shifted: Vec<f32> = truth[OUT_NORM].iter().map(|x| x + 1.0).collect();
    assert_eq!(f32_values(&read[&format!("{module}.norm.weight")].2), shifted);
    repaired(&sample(), &sample(), Some(&megatron));
    as_hf(&megatron, &after);
    assert!(read_folder(&after) == read, "repaired before the conversion");
}

#[test]
fn a_tensor_that_is_not_the_rounding_of_its_master_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let path = changed(folder.path(), &[(DT_BIAS, &[0x18, 0x41]), (A_LOG, &9.5f32.to_le_bytes())]);
    let report = repaired(&path, &path, None);
    let outcomes = outcomes(&report);
    // The original's A_log is F32 and the same; its dt_bias has no F32 but the master's.
    assert_eq!(outcomes["self_attention.A_log"], Outcome::Intact);
    assert_eq!(outcomes["self_attention.dt_bias"], Outcome::Trained);
    assert_eq!(outcomes["self_attention.out_norm.weight"], Outcome::RestoredFromMaster);
}

#[test]
fn the_bits_of_the_originals_model_come_before_those_of_its_masters() {
    let folder = tempfile::tempdir().unwrap();
    let value = f32::from_bits(truth()[A_LOG][0].to_bits() ^ 1);
    let original = changed(folder.path(), &[(A_LOG, &value.to_le_bytes())]);
    let report = repaired(&sample(), &original, None);
    assert_eq!(outcomes(&report)["self_attention.A_log"], Outcome::Restored);
}
