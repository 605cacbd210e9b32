//! `ballast trace`: golden models pass, differences are found, and errors name their cause.

use std::fs;
use std::path::{Path, PathBuf};

use ballast_checkpoint::tensor_file::{Array, TensorFile, write_f32};
use safetensors::tensor::{Dtype, TensorView};

use crate::common::{self, ballast};

fn model(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models").join(name)
}

fn golden(name: &str) -> PathBuf {
    model(name).join("golden.safetensors")
}

fn run(arguments: &[&str]) -> common::Run {
    common::run(&mut ballast(arguments))
}

/// A file with integer tensors of the given shapes.
fn ids_file(folder: &Path, tensors: &[(&str, &[usize], &[i64])]) -> PathBuf {
    let path = folder.join("ids.safetensors");
    let bytes: Vec<Vec<u8>> =
        tensors.iter().map(|(_, _, values)| values.iter().flat_map(|v| v.to_le_bytes()).collect()).collect();
    let views = tensors.iter().zip(&bytes).map(|((name, shape, _), bytes)| {
        (*name, TensorView::new(Dtype::I64, shape.to_vec(), bytes).unwrap())
    });
    safetensors::serialize_to_file(views, None, &path).unwrap();
    path
}

fn text(path: &Path) -> String {
    path.to_str().unwrap().to_string()
}

#[test]
fn every_golden_model_passes_with_every_gradient() {
    let models = [
        ("qwen3_next", 64),
        ("qwen3_5", 57),
        ("qwen3_5_moe", 74),
        ("gemma2", 48),
        ("gemma3", 82),
        ("gemma4_dense", 81),
        ("gemma4_moe", 129),
        ("gemma4_ple", 155),
        ("deepseek_v32", 47),
    ];
    for (name, compared) in models {
        let (folder, golden) = (text(&model(name)), text(&golden(name)));
        let tolerance = if name == "qwen3_5" { "2e-4" } else { "1e-4" };
        let report = run(&[
            "trace",
            &folder,
            "--ids",
            &golden,
            "--grads",
            "--experts",
            "fused",
            "--expect",
            &golden,
            "--tolerance",
            tolerance,
            "--json",
        ])
        .exits(0)
        .json();
        assert_eq!(report["schema"], "ballast.trace/1");
        assert_eq!(report["compared"], compared, "{name}");
        assert_eq!(report["passed"], true);
    }
}

#[test]
fn a_lower_precision_is_seen_and_fails_at_a_tight_tolerance() {
    let (folder, golden) = (text(&model("qwen3_5")), text(&golden("qwen3_5")));
    let arguments = ["trace", &folder, "--ids", &golden, "--expect", &golden, "--precision", "hf-bf16"];
    let shown = run(&[&arguments[..], &["--tolerance", "1e-3"]].concat()).exits(1);
    assert!(shown.stdout.contains("OFF") && shown.stdout.contains("FAILED"), "{}", shown.stdout);
    run(&[&arguments[..], &["--tolerance", "0.5"]].concat()).exits(0);
}

#[test]
fn the_output_holds_logits_loss_gradients_and_the_chosen_sites() {
    let scratch = tempfile::tempdir().unwrap();
    let out = scratch.path().join("out.safetensors");
    let (folder, golden) = (text(&model("qwen3_5_moe")), text(&golden("qwen3_5_moe")));
    let sites = "layers.0.linear_attn.g,layers.3.self_attn.logits,d.layers.1.out";
    let arguments = [
        "trace",
        &folder,
        "--ids",
        &golden,
        "--out",
        &text(&out),
        "--grads",
        "--sites",
        sites,
        "--experts",
        "split",
    ];
    run(&arguments).exits(0);
    let file = TensorFile::open(&out).unwrap();
    assert_eq!(file.f32("logits").unwrap().shape, [2, 29, 160]);
    assert_eq!(file.f32("layers.0.linear_attn.g").unwrap().shape, [2, 29, 4]);
    assert_eq!(file.f32("layers.3.self_attn.logits").unwrap().values.len(), 2 * 4 * 29 * 29);
    assert_eq!(file.f32("d.layers.1.out").unwrap().shape, [2, 29, 48]);
    assert!(file.has("loss") && file.has("grad.model.layers.0.mlp.experts.7.up_proj.weight"));
    // Its own output passes as the expected file, and an existing file is not replaced.
    run(&["trace", &folder, "--ids", &golden, "--expect", &text(&out), "--tolerance", "0"]).exits(0);
    run(&arguments).exits(2).says(&["out.safetensors"]);
}

#[test]
fn padding_packing_and_labels_are_understood() {
    let scratch = tempfile::tempdir().unwrap();
    let folder = text(&model("qwen3_5"));
    let ids: Vec<i64> = (1..=9).collect();
    let trace = |path: &Path| run(&["trace", &folder, "--ids", &text(path), "--json"]).exits(0).json();
    let packed =
        trace(&ids_file(scratch.path(), &[("input_ids", &[1, 9], &ids), ("cu_seqlens", &[3], &[0, 5, 9])]));
    let padded: Vec<i64> = [&ids[..5], &[0, 0], &[0, 0, 0], &ids[5..]].concat();
    let mask: Vec<i64> = [1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1].to_vec();
    let rows = trace(&ids_file(
        scratch.path(),
        &[("input_ids", &[2, 7], &padded), ("attention_mask", &[2, 7], &mask)],
    ));
    assert_eq!(packed["notes"]["loss"], rows["notes"]["loss"], "padding changes nothing");
    assert_eq!(packed["notes"]["tokens"], 9);
    let labels: Vec<i64> = [-100, -100, -100, -100, -100, -100, -100, 8, 9].to_vec();
    let fewer =
        trace(&ids_file(scratch.path(), &[("input_ids", &[1, 9], &ids), ("labels", &[1, 9], &labels)]));
    assert_ne!(fewer["notes"]["loss"], packed["notes"]["loss"]);
}

#[test]
fn mistakes_are_named() {
    let scratch = tempfile::tempdir().unwrap();
    let folder = text(&model("qwen3_5"));
    let golden = text(&golden("qwen3_5"));
    let with = |tensors: &[(&str, &[usize], &[i64])]| {
        let path = text(&ids_file(scratch.path(), tensors));
        run(&["trace", &folder, "--ids", &path])
    };
    with(&[("input_ids", &[2, 2], &[1, 2, 3, 160])])
        .exits(3)
        .says(&["token 3 has the id 160", "vocabulary of 160"]);
    with(&[("input_ids", &[1, 2], &[1, -7])]).exits(3).says(&["input_ids", "[0, 1] is -7"]);
    with(&[("input_ids", &[4], &[1, 2, 3, 4])]).exits(3).says(&["input_ids", "must be [B, T]"]);
    with(&[("input_ids", &[1, 0], &[])]).exits(3).says(&["no tokens"]);
    with(&[("ids", &[1, 1], &[1])]).exits(3).says(&["input_ids", "not found; the file holds"]);
    with(&[("input_ids", &[1, 2], &[1, 2]), ("labels", &[1, 1], &[1])])
        .exits(3)
        .says(&["labels", "must be [1, 2]"]);
    with(&[("input_ids", &[1, 2], &[1, 2]), ("cu_seqlens", &[2], &[0, 3])]).exits(3).says(&["cu_seqlens"]);
    run(&["trace", &folder, "--ids", &golden, "--precision", "fp8"]).exits(2).says(&["\"fp8\"", "hf-bf16"]);
    let empty = scratch.path().join("empty.safetensors");
    let array = Array { shape: vec![1], values: vec![0.0] };
    write_f32(&empty, &[("something", &array.shape, &array.values)], &[], false).unwrap();
    run(&["trace", &folder, "--ids", &golden, "--expect", &text(&empty)])
        .exits(3)
        .says(&["no tensor to compare"]);
    // A missing and an invalid config.json.
    let bare = scratch.path().join("bare");
    fs::create_dir(&bare).unwrap();
    fs::copy(model("qwen3_5").join("model.safetensors"), bare.join("model.safetensors")).unwrap();
    run(&["trace", &text(&bare), "--ids", &golden]).exits(3).says(&["config.json"]);
    fs::write(bare.join("config.json"), r#"{"model_type": "llama"}"#).unwrap();
    run(&["trace", &text(&bare), "--ids", &golden]).exits(3).says(&["`model_type` is \"llama\"", "qwen3_5"]);
    let config = fs::read_to_string(model("qwen3_5").join("config.json")).unwrap();
    let bad = config.replace("\"num_key_value_heads\": 2", "\"num_key_value_heads\": 3");
    fs::write(bare.join("config.json"), bad).unwrap();
    run(&["trace", &text(&bare), "--ids", &golden])
        .exits(3)
        .says(&["`num_key_value_heads` must divide 4, got 3"]);
    let bad = config.replace("\"hidden_size\": 48", "\"hidden_size\": \"big\"");
    fs::write(bare.join("config.json"), bad).unwrap();
    run(&["trace", &text(&bare), "--ids", &golden]).exits(3).says(&["`hidden_size` is \"big\""]);
    // Tensors of the wrong shape are listed, one per line.
    let bad = config.replace("\"intermediate_size\": 96", "\"intermediate_size\": 90");
    fs::write(bare.join("config.json"), bad).unwrap();
    let listed = run(&["trace", &text(&bare), "--ids", &golden]).exits(3);
    assert!(
        listed.stderr.contains("of the wrong shape:") && listed.stderr.lines().count() > 10,
        "{}",
        listed.stderr
    );
}
