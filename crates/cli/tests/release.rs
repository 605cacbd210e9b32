//! The commands on a checkpoint in released form, as a user would run them.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn release() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/release/qwen3_5")
}

fn ballast(arguments: &[&dyn AsRef<OsStr>]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ballast")).args(arguments).output().unwrap()
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn error(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn json(output: &Output) -> serde_json::Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {}", text(output)))
}

#[test]
fn strict_reports_dt_bias_and_megatron_accepts_the_release() {
    let strict = ballast(&[&"audit", &release()]);
    assert_eq!(strict.status.code(), Some(1));
    assert!(
        text(&strict).contains("gdn-dt-bias") && text(&strict).contains("FAILED: 3 violations, 0 warnings")
    );
    let megatron = ballast(&[&"audit", &release(), &"--policy", &"megatron"]);
    assert_eq!(megatron.status.code(), Some(0));
    assert!(text(&megatron).contains("PASSED: 0 violations, 0 warnings"), "{}", text(&megatron));
}

#[test]
fn hf_to_nemo_to_megatron_ranks_to_hf_is_the_same_bits_for_all_91_tensors() {
    let folder = tempfile::tempdir().unwrap();
    let [nemo, ranks, hf] = ["nemo", "ranks", "hf"].map(|name| folder.path().join(name));
    for (from, to, options) in [
        (&release(), &nemo, &["--layout", "nemo"][..]),
        (&nemo, &ranks, &["--layout", "megatron", "--tp", "2"]),
        (&ranks, &hf, &["--layout", "hf"]),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ballast"));
        let output = command
            .arg("convert")
            .args([from, to])
            .args(["--policy", "megatron"])
            .args(options)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", error(&output));
        assert!(text(&output).contains("verified against the source by reading back"));
    }
    for checkpoint in [&nemo, &ranks, &hf] {
        let output = ballast(&[&"diff", checkpoint, &release(), &"--strict-dtype", &"--json"]);
        assert_eq!(output.status.code(), Some(0));
        let report = json(&output);
        let tensors = report["tensors"].as_array().unwrap();
        assert_eq!(tensors.len(), 91);
        assert!(tensors.iter().all(|t| t["verdict"] == "same-bits"));
        for role in ["vision", "mtp", "linear-attention"] {
            assert!(tensors.iter().any(|t| t["role"] == role), "{role}");
        }
    }
}

#[test]
fn a_rounded_checkpoint_is_different_until_tolerated() {
    let folder = tempfile::tempdir().unwrap();
    let rounded = folder.path().join("rounded");
    ballast(&[&"convert", &release(), &rounded, &"--dtype", &"bf16", &"--policy", &"none"]);
    let output = ballast(&[&"diff", &rounded, &release(), &"--json"]);
    assert_eq!(output.status.code(), Some(1));
    let report = json(&output);
    let count = |v: &str| report["tensors"].as_array().unwrap().iter().filter(|t| t["verdict"] == v).count();
    assert_eq!((count("same-bits"), count("same-after-rounding")), (85, 6));
    let tolerant = ballast(&[&"diff", &rounded, &release(), &"--tolerance", &"0.01"]);
    assert_eq!(tolerant.status.code(), Some(0));
    // The same values in a wider dtype are equal without --strict-dtype.
    let wide = folder.path().join("wide");
    ballast(&[&"convert", &release(), &wide, &"--dtype", &"f32"]);
    assert_eq!(ballast(&[&"diff", &wide, &release()]).status.code(), Some(0));
    assert_eq!(ballast(&[&"diff", &wide, &release(), &"--strict-dtype"]).status.code(), Some(1));
}

#[test]
fn every_command_speaks_json_with_its_schema() {
    let folder = tempfile::tempdir().unwrap();
    let [out, repaired, missing] = ["out", "repaired", "missing"].map(|name| folder.path().join(name));
    let release = release();
    let cases: [(&[&dyn AsRef<OsStr>], &str, i32); 9] = [
        (&[&"inspect", &release, &"--tensors"], "inspect", 0),
        (&[&"audit", &release], "audit", 1),
        (&[&"audit", &"--rules"], "rules", 0),
        (&[&"convert", &release, &out, &"--dry-run"], "convert-plan", 0),
        (&[&"convert", &release, &out], "convert", 0),
        (&[&"diff", &out, &release], "diff", 0),
        (&[&"repair", &out, &repaired, &"--original", &release], "repair", 0),
        (&[&"demo"], "demo", 0),
        (&[&"inspect", &missing], "error", 3),
    ];
    for (arguments, schema, code) in cases {
        let output =
            Command::new(env!("CARGO_BIN_EXE_ballast")).args(arguments).arg("--json").output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{schema}: {}", error(&output));
        assert_eq!(json(&output)["schema"], format!("ballast.{schema}/1"));
    }
}

#[test]
fn the_demonstration_finds_explains_and_mends_the_violation() {
    let output = ballast(&[&"demo"]);
    assert_eq!(output.status.code(), Some(0));
    let text = text(&output);
    for words in [
        "FAILED: 9 violations",
        "in-name-only",
        "PASSED: 0 violations, 9 warnings",
        "restored",
        "EQUAL: 55 tensors",
    ] {
        assert!(text.contains(words), "{words} is missing in:\n{text}");
    }
}

#[test]
fn a_single_file_can_be_written_and_read_by_path() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("one.safetensors");
    let output = ballast(&[&"convert", &release(), &file, &"--policy", &"megatron"]);
    assert_eq!(output.status.code(), Some(0), "{}", error(&output));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    assert_eq!(ballast(&[&"diff", &file, &release()]).status.code(), Some(0));
    // Without a config.json the architecture comes from the names, and the audit says so.
    let audit = ballast(&[&"audit", &file, &"--policy", &"megatron"]);
    assert_eq!(audit.status.code(), Some(0));
    assert!(text(&audit).contains("by its tensor names"));
    let by_index = ballast(&[&"inspect", &release().join("model.safetensors.index.json"), &"--json"]);
    assert_eq!(json(&by_index)["total"]["tensors"], 91);
}

#[test]
fn a_policy_file_decides_what_is_protected() {
    let folder = tempfile::tempdir().unwrap();
    let policy = folder.path().join("ours.toml");
    std::fs::write(&policy, "name = \"ours\"\nextends = \"strict\"\nremove = [\"gdn-dt-bias\"]\n").unwrap();
    assert_eq!(ballast(&[&"audit", &release(), &"--policy", &policy]).status.code(), Some(0));
    std::fs::write(&policy, "name = \"ours\"\nremove = [\"gdn-dt-bias\"]\n").unwrap();
    let output = ballast(&[&"audit", &release(), &"--policy", &policy]);
    assert_eq!(output.status.code(), Some(2));
    assert!(
        error(&output).contains("ours.toml") && error(&output).contains("gdn-dt-bias"),
        "{}",
        error(&output)
    );
    assert_eq!(ballast(&[&"audit", &release(), &"--policy", &"strikt"]).status.code(), Some(2));
}
