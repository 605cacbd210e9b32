//! `ballast oracle`: golden files pass, and errors name their cause.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use ballast_checkpoint::tensor_file::{Array, Named, TensorFile, write_f32};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/gdn").join(name).with_extension("safetensors")
}

fn oracle(arguments: &[&dyn AsRef<OsStr>]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ballast")).arg("oracle").args(arguments).output().unwrap()
}

fn json(output: &Output) -> serde_json::Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {}", error(output)))
}

fn error(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn every_golden_file_passes_in_both_storages_and_both_places_of_the_norm() {
    for name in ["head128", "no_decay", "l2norm_gva", "strong_decay", "plain_ragged", "packed"] {
        for options in [&["--tolerance", "1e-4"][..], &["--storage", "bf16"], &["--chunk", "17"]] {
            let mut command = Command::new(env!("CARGO_BIN_EXE_ballast"));
            let output =
                command.args(["oracle", "gdn", "--json"]).arg(fixture(name)).args(options).output().unwrap();
            assert_eq!(output.status.code(), Some(0), "{name} {options:?}: {}", error(&output));
            let report = json(&output);
            assert_eq!(report["compared"], 8, "{name}: every result is compared");
        }
    }
    let bytes = |place: &str| {
        let output = oracle(&[&"gdn", &fixture("packed"), &"--l2norm", &place, &"--json"]);
        assert_eq!(output.status.code(), Some(0));
        json(&output)["notes"]["saved_bytes"].as_u64().unwrap()
    };
    // The normalized q and k: 2 x 150 tokens x 2 heads x 16 x 4 bytes.
    assert_eq!(bytes("outside") - bytes("inside"), 2 * 150 * 2 * 16 * 4);
}

#[test]
fn attention_and_indexer_pass_their_golden_files_and_a_lowered_site_does_not() {
    let golden = |name: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name);
    for (name, results) in
        [("grouped", 4), ("capped_window", 4), ("sinks_packed", 5), ("wide_values", 4), ("head256", 4)]
    {
        let path = golden(&format!("attention/{name}.safetensors"));
        let output = oracle(&[&"attention", &path, &"--tolerance", &"1e-5", &"--json"]);
        assert_eq!(output.status.code(), Some(0), "{name}: {}", error(&output));
        assert_eq!(json(&output)["compared"], results, "{name}");
        let bf16 = oracle(&[&"attention", &path, &"--storage", &"bf16"]);
        assert_eq!(bf16.status.code(), Some(0), "{name} in bf16");
        let lowered = oracle(&[&"attention", &path, &"--qk-product", &"bf16", &"--tolerance", &"1e-5"]);
        assert_eq!(lowered.status.code(), Some(1), "{name}: the rounding of the product shows");
    }
    let choice = golden("indexer/choice.safetensors");
    let output = oracle(&[&"indexer", &choice, &"--tolerance", &"1e-5", &"--json"]);
    assert_eq!((output.status.code(), &json(&output)["compared"]), (Some(0), &serde_json::json!(2)));
    let other = oracle(&[&"indexer", &choice, &"--topk", &"5"]);
    assert_eq!(other.status.code(), Some(3));
    assert!(error(&other).contains("\"selected\""), "{}", error(&other));
}

#[test]
fn results_are_written_and_pass_as_expectations_and_a_tolerance_can_fail() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out.safetensors");
    let output = oracle(&[&"gdn", &fixture("packed"), &"--out", &out]);
    assert_eq!(output.status.code(), Some(0), "{}", error(&output));
    let (written, golden) = (TensorFile::open(&out).unwrap(), TensorFile::open(&fixture("packed")).unwrap());
    for name in ["o", "ht", "dq", "dk", "dv", "dg", "dbeta", "dh0"] {
        assert_eq!(written.f32(name).unwrap().shape, golden.f32(name).unwrap().shape, "{name}");
    }
    assert_eq!(oracle(&[&"gdn", &fixture("packed"), &"--tolerance", &"1e-9"]).status.code(), Some(1));
    assert_eq!(
        oracle(&[&"gdn", &fixture("packed"), &"--out", &out]).status.code(),
        Some(2),
        "no overwriting"
    );
}

type Change<'a> = &'a dyn Fn(&str, Array<f32>) -> Option<Array<f32>>;

/// The packed golden file with some tensors changed or left out.
fn changed(path: &Path, change: Change<'_>) {
    let file = TensorFile::open(&fixture("packed")).unwrap();
    let arrays: Vec<(String, Array<f32>)> = file
        .names()
        .filter(|name| *name != "cu_seqlens")
        .filter_map(|name| Some((name.to_string(), change(name, file.f32(name).unwrap())?)))
        .collect();
    let named = arrays.iter().map(|(name, array)| (name.as_str(), &array.shape[..], &array.values[..]));
    let tensors: Vec<Named<'_>> = named.collect();
    write_f32(path, &tensors, &[], false).unwrap();
}

#[test]
fn missing_misshapen_and_mistyped_tensors_are_named_with_what_was_expected() {
    let folder = tempfile::tempdir().unwrap();
    let check = |file: &str, words: &[&str], change: Change<'_>| {
        let path = folder.path().join(file);
        changed(&path, change);
        let output = oracle(&[&"gdn", &path]);
        assert_eq!(output.status.code(), Some(3), "{file}");
        for word in words {
            assert!(error(&output).contains(word), "{file}: no {word:?} in {}", error(&output));
        }
    };
    check(
        "missing.safetensors",
        &["missing.safetensors", "\"g\"", "not found; the file holds"],
        &|name, a| (name != "g").then_some(a),
    );
    check("shape.safetensors", &["\"beta\"", "must be [1, 150, 4]", "[1, 600]"], &|name, mut a| {
        if name == "beta" {
            a.shape = vec![1, 600];
        }
        Some(a)
    });
    // Without cu_seqlens there is one sequence, and h0 has five.
    check("states.safetensors", &["\"h0\"", "must be [1, 4, 16, 24]", "[5, 4, 16, 24]"], &|_, a| Some(a));
    let output = oracle(&[&"gdn", &fixture("packed"), &"--chunk", &"0"]);
    assert_eq!(output.status.code(), Some(2));
}
