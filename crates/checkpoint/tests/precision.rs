//! The contract on real files: what conversion may round, what audit finds, what repair restores. Every
//! statement about a file is also checked with the `safetensors` crate.

use std::path::Path;
use std::sync::Arc;

use ballast_checkpoint::Checkpoint;
use ballast_checkpoint::audit::{AuditReport, Severity, audit};
use ballast_checkpoint::diff::{Verdict, diff};
use ballast_checkpoint::layout::{LayoutRequest, Naming};
use ballast_checkpoint::repair::{Outcome, repair};
use ballast_contract::rounded::Narrow;
use ballast_contract::{Dtype, Registry};
use ballast_files::cast::bf16_round;
use ballast_files::jobs::Silent;
use safetensors::Dtype as FileDtype;

use crate::common::*;

const A_LOG_1: &str = "model.language_model.layers.1.linear_attn.A_log";

fn audited(path: &Path, policy_name: &str) -> AuditReport {
    let checkpoint = Checkpoint::open(path).unwrap();
    audit(&checkpoint, Registry::builtin(), &policy(policy_name), &Silent).unwrap()
}

/// kind, rule, how many
fn kinds(report: &AuditReport) -> Vec<(&'static str, String, usize)> {
    report.findings.iter().map(|f| (f.kind, f.rule.clone().unwrap_or_default(), f.tensors.len())).collect()
}

/// A copy of the release fixture in one file, with some tensors changed.
fn changed_release(folder: &Path, change: impl Fn(&mut Tensor)) {
    std::fs::create_dir(folder).unwrap();
    std::fs::copy(fixture("release/qwen3_5/config.json"), folder.join("config.json")).unwrap();
    let mut tensors: Vec<Tensor> = read_folder(&fixture("release/qwen3_5"))
        .into_iter()
        .map(|(name, (dtype, shape, data))| Tensor { name, dtype, shape, data })
        .collect();
    tensors.iter_mut().for_each(change);
    tensors.retain(|t| !t.name.is_empty());
    write_file(&folder.join("model.safetensors"), &tensors);
}

fn round_in_place(t: &mut Tensor) {
    t.data = f32_values(&t.data).into_iter().flat_map(|x| bf16_round(x).to_le_bytes()).collect();
}

#[test]
fn the_release_breaks_strict_by_dt_bias_only_and_keeps_megatron() {
    let strict = audited(&fixture("release/qwen3_5"), "strict");
    assert_eq!(kinds(&strict), [("not-f32", "gdn-dt-bias".to_string(), 3)]);
    assert!(!strict.passed);
    let megatron = audited(&fixture("release/qwen3_5"), "megatron");
    assert!(megatron.passed && megatron.findings.is_empty());
    assert_eq!((megatron.tensors, megatron.protected), (91, 6));
    let [cost] = megatron.decay.as_slice() else { panic!("{:?}", megatron.decay) };
    assert_eq!((cost.tense, cost.tensors, cost.heads), ("would", 3, 12));
    // Compared with the error computed here in f64.
    let errors: Vec<f64> = read_folder(&fixture("release/qwen3_5"))
        .iter()
        .filter(|(name, _)| name.ends_with("A_log"))
        .flat_map(|(_, (_, _, data))| f32_values(data))
        .map(|x| ((bf16_round(x) as f64).exp() / (x as f64).exp() - 1.0).abs())
        .collect();
    let (mean, worst) = (errors.iter().sum::<f64>() / 12.0, errors.iter().fold(0.0, |a: f64, b| a.max(*b)));
    assert!((cost.mean / mean - 1.0).abs() < 1e-9 && (cost.worst / worst - 1.0).abs() < 1e-9);
}

#[test]
fn a_cast_to_bf16_or_f16_leaves_every_protected_tensor_in_f32_with_its_bits() {
    let source = open(&fixture("release/qwen3_5"));
    let original = read_folder(&fixture("release/qwen3_5"));
    let folder = tempfile::tempdir().unwrap();
    for (name, dtype, file_dtype) in [
        ("bf16", Dtype::Bf16, FileDtype::BF16),
        ("f16", Dtype::F16, FileDtype::F16),
        ("f32", Dtype::F32, FileDtype::F32),
    ] {
        let path = folder.path().join(name);
        let mut options = options(&source, "strict");
        options.dtype = Some(dtype);
        convert(&source, &path, &options);
        let mut protected = 0;
        for (tensor, (got, _, data)) in read_folder(&path) {
            let is_protected =
                ["A_log", "dt_bias", "linear_attn.norm.weight"].iter().any(|leaf| tensor.ends_with(leaf));
            assert_eq!(got, if is_protected { FileDtype::F32 } else { file_dtype }, "{tensor}");
            if is_protected && original[&tensor].0 == FileDtype::F32 {
                assert_eq!(data, original[&tensor].2, "{tensor}");
                protected += 1;
            }
        }
        assert_eq!(protected, 6);
        assert!(audited(&path, "strict").passed);
    }
}

#[test]
fn every_change_of_dtype_is_listed() {
    let source = open(&fixture("release/qwen3_5"));
    let mut options = options(&source, "strict");
    options.dtype = Some(Dtype::F32);
    let plan = ballast_checkpoint::convert::plan(&source, &options).unwrap();
    let mut listed: Vec<&String> = plan.dtype_changes.iter().flat_map(|c| &c.tensors).collect();
    listed.sort();
    let mut expected: Vec<&String> =
        source.tensors.iter().filter(|t| t.dtype == Dtype::Bf16).map(|t| &t.name).collect();
    expected.sort();
    assert_eq!(listed, expected);
    assert!(plan.dtype_changes.iter().all(|c| !c.lossy && c.from == Dtype::Bf16 && c.to == Dtype::F32));
}

#[test]
fn no_policy_rounds_what_it_is_asked_to_and_the_audit_sees_every_tensor_not_only_the_first() {
    let folder = tempfile::tempdir().unwrap();
    // Only the middle layer's A_log is bf16.
    changed_release(&folder.path().join("middle"), |t| {
        if t.name == A_LOG_1 {
            t.dtype = FileDtype::BF16;
            t.data = f32_values(&t.data).iter().flat_map(|x| half_bits(*x).to_le_bytes()).collect();
        }
    });
    let report = audited(&folder.path().join("middle"), "megatron");
    assert_eq!(kinds(&report), [("not-f32", "gdn-a-log".to_string(), 1)]);
    assert_eq!(report.findings[0].tensors, [A_LOG_1]);
    assert_eq!(report.findings[0].stored, Some(Dtype::Bf16));
    let tenses: Vec<_> = report.decay.iter().map(|c| (c.tense, c.tensors)).collect();
    assert_eq!(tenses, [("would", 2), ("has", 1)]);

    let source = open(&fixture("release/qwen3_5"));
    let mut options = options(&source, "none");
    options.dtype = Some(Dtype::Bf16);
    let report = convert(&source, &folder.path().join("cast"), &options);
    assert_eq!(report.verification.rounded, 6);
    assert!(read_folder(&folder.path().join("cast")).values().all(|(dtype, _, _)| *dtype == FileDtype::BF16));
    assert_eq!(audited(&folder.path().join("cast"), "strict").findings.len(), 3);
}

fn half_bits(x: f32) -> u16 {
    ballast_files::cast::bf16_bits(x.to_bits())
}

#[test]
fn f32_in_name_only_is_caught_and_repair_restores_it_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    let rounded = folder.path().join("rounded");
    changed_release(&rounded, |t| {
        if t.name.ends_with("A_log") {
            round_in_place(t);
        }
    });
    let report = audited(&rounded, "megatron");
    assert!(report.passed, "a warning is not a violation");
    assert_eq!(kinds(&report), [("in-name-only", "gdn-a-log".to_string(), 3)]);
    assert_eq!(report.findings[0].severity, Severity::Warning);

    let (checkpoint, original) = (open(&rounded), open(&fixture("release/qwen3_5")));
    let policy = options(&checkpoint, "megatron").policy;
    let destination = folder.path().join("repaired");
    let report = repair(&checkpoint, &original, Some(&destination), &policy, false, &Silent).unwrap();
    let outcomes = |o| report.tensors.iter().filter(|t| t.outcome == o).count();
    assert_eq!((outcomes(Outcome::Restored), outcomes(Outcome::Intact)), (3, 3));
    let comparison = diff(&open(&destination), &original, &Silent).unwrap();
    assert_eq!(comparison.tensors.iter().filter(|t| t.verdict == Verdict::SameBits).count(), 91);
    assert!(audited(&destination, "megatron").findings.is_empty());
}

#[test]
fn values_rounded_to_f16_are_caught_and_restored_too() {
    let folder = tempfile::tempdir().unwrap();
    for narrow in [Narrow::F16, Narrow::Tf32] {
        let rounded = folder.path().join(narrow.name());
        changed_release(&rounded, |t| {
            if t.name.ends_with("A_log") {
                t.data =
                    f32_values(&t.data).into_iter().flat_map(|x| narrow.round(x).to_le_bytes()).collect();
            }
        });
        let report = audited(&rounded, "megatron");
        assert_eq!(kinds(&report), [("in-name-only", "gdn-a-log".to_string(), 3)]);
        assert!(report.findings[0].tensors.iter().all(|name| name.ends_with(".A_log (f16)")), "{narrow}");
        assert!(report.decay.is_empty(), "neither the cost of bf16 nor full precision is claimed");

        let (checkpoint, original) = (open(&rounded), open(&fixture("release/qwen3_5")));
        let policy = options(&checkpoint, "megatron").policy;
        let destination = folder.path().join(format!("{narrow}-repaired"));
        let report = repair(&checkpoint, &original, Some(&destination), &policy, false, &Silent).unwrap();
        assert_eq!(report.tensors.iter().filter(|t| t.outcome == Outcome::Restored).count(), 3);
        let comparison = diff(&open(&destination), &original, &Silent).unwrap();
        assert_eq!(comparison.tensors.iter().filter(|t| t.verdict == Verdict::SameBits).count(), 91);
    }
}

#[test]
fn a_protected_tensor_that_was_trained_since_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let trained = folder.path().join("trained");
    changed_release(&trained, |t| {
        if t.name.ends_with("A_log") {
            round_in_place(t);
        }
        if t.name == A_LOG_1 {
            // One head was trained.
            t.data[..4].copy_from_slice(&0.123f32.to_le_bytes());
        }
    });
    let (checkpoint, original) = (open(&trained), open(&fixture("release/qwen3_5")));
    let policy = options(&checkpoint, "megatron").policy;
    let destination = folder.path().join("repaired");
    let report = repair(&checkpoint, &original, Some(&destination), &policy, false, &Silent).unwrap();
    let kept = report.tensors.iter().find(|t| t.outcome == Outcome::Trained).unwrap();
    assert_eq!((kept.tensor.as_str(), kept.trained_values, kept.elements), (A_LOG_1, 1, 4));
    assert_eq!(read_folder(&destination)[A_LOG_1], read_folder(&trained)[A_LOG_1]);
    assert_eq!(report.tensors.iter().filter(|t| t.outcome == Outcome::Restored).count(), 2);
}

#[test]
fn repair_works_across_layouts_and_from_bf16_storage() {
    let folder = tempfile::tempdir().unwrap();
    let original = open(&fixture("release/qwen3_5"));
    // Cast to bf16 as frameworks do, then packed for two ranks.
    let mut cast = options(&original, "none");
    cast.dtype = Some(Dtype::Bf16);
    convert(&original, &folder.path().join("cast"), &cast);
    let broken = open(&folder.path().join("cast"));
    let mut pack = options(&broken, "megatron");
    pack.layout =
        LayoutRequest { naming: Some(Naming::Megatron), ranks: Some(2), ..LayoutRequest::default() };
    convert(&broken, &folder.path().join("ranks"), &pack);
    let ranks = open(&folder.path().join("ranks"));
    let policy = options(&ranks, "megatron").policy;
    let destination = folder.path().join("repaired");
    let report = repair(&ranks, &original, Some(&destination), &policy, false, &Silent).unwrap();
    // A_log is the rounding of the original's; the norm was rounded before it was shifted: bf16(w) - 1.
    let restored: Vec<&str> =
        report.tensors.iter().filter(|t| t.outcome == Outcome::Restored).map(|t| t.tensor.as_str()).collect();
    assert_eq!(restored.len(), 12, "{:?}", report.tensors);
    let comparison = diff(&open(&destination), &original, &Silent).unwrap();
    let protected = |t: &&ballast_checkpoint::diff::TensorDiff| {
        t.tensor.ends_with("A_log") || t.tensor.ends_with("linear_attn.norm.weight")
    };
    assert_eq!(comparison.tensors.iter().filter(protected).count(), 6);
    assert!(comparison.tensors.iter().filter(protected).all(|t| t.verdict == Verdict::SameBits));
}

type Change = Box<dyn Fn(&mut Tensor)>;

#[test]
fn damage_of_every_kind_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let cases: [(&str, Change, &str, &str); 7] = [
        (
            "dead",
            Box::new(|t| {
                if t.name == A_LOG_1 {
                    t.data[..4].copy_from_slice(&f32::NEG_INFINITY.to_le_bytes())
                }
            }),
            "dead-head",
            A_LOG_1,
        ),
        (
            "nan",
            Box::new(|t| {
                if t.name == A_LOG_1 {
                    t.data[..4].copy_from_slice(&f32::NAN.to_le_bytes())
                }
            }),
            "non-finite",
            A_LOG_1,
        ),
        (
            "inf",
            Box::new(|t| {
                if t.name.ends_with("embed_tokens.weight") {
                    t.data[..2].copy_from_slice(&[0x80, 0x7f])
                }
            }),
            "non-finite",
            "embed_tokens",
        ),
        (
            "missing",
            Box::new(|t| {
                if t.name == A_LOG_1 {
                    t.name.clear()
                }
            }),
            "missing",
            A_LOG_1,
        ),
        (
            "leaked",
            Box::new(|t| {
                if t.name == A_LOG_1 {
                    t.name = A_LOG_1.replace("A_log", "_fp32_params.A_log")
                }
            }),
            "holder-leaked",
            "_fp32_params",
        ),
        (
            "f16",
            Box::new(|t| {
                if t.name == A_LOG_1 {
                    (t.dtype, t.data) = (FileDtype::F16, vec![0; 8])
                }
            }),
            "not-f32",
            A_LOG_1,
        ),
        (
            "f64",
            Box::new(|t| {
                if t.name == A_LOG_1 {
                    (t.dtype, t.data) = (FileDtype::F64, vec![0; 32])
                }
            }),
            "not-f32",
            A_LOG_1,
        ),
    ];
    for (name, change, kind, first) in cases {
        let path = folder.path().join(name);
        changed_release(&path, change);
        let report = audited(&path, "megatron");
        assert!(!report.passed, "{name}");
        assert_eq!(report.findings.iter().map(|f| f.kind).collect::<Vec<_>>(), [kind], "{name}");
        assert_eq!(report.findings[0].tensors.len(), 1, "{name}");
        assert!(report.findings[0].tensors[0].contains(first), "{name}: {:?}", report.findings[0].tensors);
    }
    let dead = audited(&folder.path().join("dead"), "megatron");
    assert!(dead.findings[0].tensors[0].contains("1 of 4 heads"));
}

#[test]
fn a_bare_and_a_routed_key_for_one_tensor_are_found_and_not_converted() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("both");
    changed_release(&path, |t| {
        if t.name == "model.language_model.layers.0.linear_attn.dt_bias" {
            t.name = "model.language_model.layers.1.linear_attn._fp32_params.dt_bias".into();
        }
    });
    let report = audited(&path, "megatron");
    assert_eq!(report.findings[0].kind, "bare-and-routed");
    let checkpoint = open(&path);
    let error =
        ballast_checkpoint::convert::plan(&checkpoint, &options(&checkpoint, "megatron")).err().unwrap();
    assert!(error.to_string().contains("stored twice"), "{error}");
}

#[test]
fn a_nemo_file_of_ours_is_not_taken_for_a_leak() {
    let folder = tempfile::tempdir().unwrap();
    let source = open(&fixture("release/qwen3_5"));
    let mut nemo = options(&source, "strict");
    nemo.layout.naming = Some(Naming::Nemo);
    convert(&source, &folder.path().join("nemo"), &nemo);
    let names: Vec<String> =
        read_folder(&folder.path().join("nemo")).into_keys().filter(|n| n.contains("_fp32_params")).collect();
    assert_eq!(names.len(), 6, "A_log and dt_bias of three layers");
    assert!(audited(&folder.path().join("nemo"), "megatron").passed);
    // Back in the hf layout, no holder key is left.
    let routed = open(&folder.path().join("nemo"));
    let mut hf = options(&routed, "strict");
    hf.layout.naming = Some(Naming::Hf);
    convert(&routed, &folder.path().join("hf"), &hf);
    assert!(read_folder(&folder.path().join("hf")).keys().all(|n| !n.contains("_fp32_params")));
}

#[test]
fn constants_are_not_taken_for_rounded_values() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ones");
    changed_release(&path, |t| {
        if t.name.ends_with("linear_attn.norm.weight") {
            t.data = 1f32.to_le_bytes().repeat(t.data.len() / 4);
        }
    });
    assert!(audited(&path, "megatron").findings.is_empty());
}

#[test]
fn the_config_is_told_the_new_dtype_and_the_rest_of_it_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("with-dtype");
    changed_release(&path, |_| {});
    let text = std::fs::read_to_string(path.join("config.json")).unwrap();
    let text = text.replacen('{', "{\n  \"dtype\": \"float32\",", 1);
    std::fs::write(path.join("config.json"), &text).unwrap();
    std::fs::write(path.join("tokenizer.json"), "{}").unwrap();
    let source: Arc<Checkpoint> = open(&path);
    let mut options = options(&source, "strict");
    options.dtype = Some(Dtype::Bf16);
    let destination = folder.path().join("out");
    convert(&source, &destination, &options);
    let read =
        |path: &Path| serde_json::from_slice::<serde_json::Value>(&std::fs::read(path).unwrap()).unwrap();
    let mut expected = read(&path.join("config.json"));
    expected["dtype"] = "bfloat16".into();
    assert_eq!(read(&destination.join("config.json")), expected);
    assert!(destination.join("tokenizer.json").exists());
}

#[test]
fn shards_respect_their_limit_and_the_index_is_right() {
    let folder = tempfile::tempdir().unwrap();
    let source = open(&fixture("release/qwen3_5"));
    let mut options = options(&source, "megatron");
    options.max_shard_bytes = 60_000;
    let destination = folder.path().join("sharded");
    let report = convert(&source, &destination, &options);
    assert!(report.files > 5);
    let index: serde_json::Value =
        serde_json::from_slice(&std::fs::read(destination.join("model.safetensors.index.json")).unwrap())
            .unwrap();
    assert_eq!(index["metadata"]["total_size"], 361_576);
    assert_eq!(index["weight_map"].as_object().unwrap().len(), 91);
    for (tensor, shard) in index["weight_map"].as_object().unwrap() {
        let file = destination.join(shard.as_str().unwrap());
        assert!(read_file(&file).contains_key(tensor));
        assert!(std::fs::metadata(&file).unwrap().len() < 60_000 + 16_000, "{shard}");
    }
    // The format's own metadata is kept, and every tensor is aligned to its element.
    let checkpoint = open(&destination);
    assert_eq!(checkpoint.metadata_value("format"), Some("pt"));
    assert!(checkpoint.tensors.iter().all(|t| t.begin % t.dtype.bytes().unwrap() == 0));
}
