//! Non-finite values without an expected result to compare with.

use std::fs;
use std::path::{Path, PathBuf};

use ballast_checkpoint::tensor_file::{TensorFile, write_f32};

use crate::common::{self, ballast};

fn model(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models").join(name)
}

/// A copy of a golden model with a NaN in one of its tensors.
fn spoiled(folder: &Path, tensor: &str) -> PathBuf {
    let (source, copy) = (model("qwen3_5"), folder.join("spoiled"));
    fs::create_dir(&copy).unwrap();
    fs::copy(source.join("config.json"), copy.join("config.json")).unwrap();
    let file = TensorFile::open(&source.join("model.safetensors")).unwrap();
    let mut arrays: Vec<_> = file.names().map(|name| (name.to_string(), file.f32(name).unwrap())).collect();
    let (_, array) = arrays.iter_mut().find(|(name, _)| name == tensor).unwrap();
    array.values[0] = f32::NAN;
    let tensors: Vec<_> =
        arrays.iter().map(|(name, array)| (name.as_str(), &array.shape[..], &array.values[..])).collect();
    write_f32(&copy.join("model.safetensors"), &tensors, &[("format".into(), "pt".into())], false).unwrap();
    copy
}

#[test]
fn a_trace_of_a_model_with_nan_is_exit_code_5_and_names_the_first_tensor() {
    let folder = tempfile::tempdir().unwrap();
    let spoiled = spoiled(folder.path(), "model.layers.1.mlp.up_proj.weight");
    let golden = model("qwen3_5").join("golden.safetensors");
    let out = folder.path().join("out.safetensors");
    for arguments in [&["--json"][..], &["--grads"], &["--sites", "layers.*.out"]] {
        let mut command = ballast(["trace", "--force"]);
        command.args(arguments).arg(&spoiled).arg("--ids").arg(&golden).arg("--out").arg(&out);
        let run = common::run(&mut command).exits(5).says(&[
            "non-finite",
            "param.layers.1.mlp.up_proj.weight",
            "1 of ",
            "1 NaN",
        ]);
        assert!(!run.stdout.contains("PASSED") && !run.stdout.contains("\"passed\""), "{}", run.stdout);
        assert!(out.is_file(), "the tensors are there to be looked at");
    }
    // With an expected result, the comparison decides.
    let mut command = ballast(["trace"]);
    command.arg(&spoiled).arg("--ids").arg(&golden).arg("--expect").arg(&golden);
    common::run(&mut command).exits(1);
}

#[test]
fn an_oracle_whose_result_is_not_finite_and_not_compared_is_exit_code_5() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("in.safetensors");
    let shape = [1, 2, 1, 1];
    let tensors = [
        ("q", &shape[..], &[1.0, 1.0][..]),
        ("k", &shape[..], &[1.0, 1.0][..]),
        ("v", &shape[..], &[1.0, f32::INFINITY][..]),
    ];
    write_f32(&path, &tensors, &[], false).unwrap();
    common::run(ballast(["oracle", "attention"]).arg(&path))
        .exits(5)
        .says(&["non-finite value: o, 1 of 2 values"]);
}
