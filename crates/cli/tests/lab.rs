//! `ballast lab`: its files, its output, and its errors.

use std::fs;
use std::path::{Path, PathBuf};

use crate::common::{self, ballast};

fn model(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models").join(name)
}

fn run(arguments: &[&str]) -> common::Run {
    common::run(&mut ballast(arguments))
}

fn text(path: &Path) -> String {
    path.to_str().unwrap().to_string()
}

fn golden(name: &str) -> [String; 2] {
    [text(&model(name)), text(&model(name).join("golden.safetensors"))]
}

#[test]
fn without_a_model_it_looks_at_the_embedded_one() {
    let folder = tempfile::tempdir().unwrap();
    let out = text(&folder.path().join("lab"));
    let report = run(&["lab", "--policies", "bf16,A_log", "--out", &out]);
    assert_eq!(report.code, Some(0), "{}", report.stderr);
    for part in
        ["the embedded model: qwen3_5_text", "reference in f64", "A_log", "Does A_log in bf16 matter here?"]
    {
        assert!(report.stdout.contains(part), "{part}: {}", report.stdout);
    }
    let page = fs::read_to_string(Path::new(&out).join("lab.html")).unwrap();
    assert!(page.contains("the embedded model") && !page.contains("<script"));
    let json: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(Path::new(&out).join("lab.json")).unwrap()).unwrap();
    assert_eq!(json["schema"], "ballast.lab/1");
    assert_eq!(json["runs"].as_array().unwrap().len(), 3, "f32 is always there");
    assert!(json["reference"]["loss"].as_f64().unwrap() < 0.3, "it was trained");
    let again = run(&["lab", "--policies", "A_log", "--out", &out]);
    assert_eq!(again.code, Some(2));
    assert!(again.stderr.contains("--force"), "{}", again.stderr);
    assert_eq!(fs::read_dir(&out).unwrap().count(), 2, "nothing else is left");
}

#[test]
fn json_alone_leaves_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let [model, ids] = golden("gemma3");
    let arguments = ["lab", &model, "--ids", &ids, "--policies", "logits=f16", "--json", "--no-gradients"];
    let report = common::run(ballast(arguments).current_dir(folder.path()));
    assert_eq!(report.code, Some(0), "{}", report.stderr);
    let json: serde_json::Value = serde_json::from_str(&report.stdout).unwrap();
    assert_eq!(json["schema"], "ballast.lab/1");
    assert_eq!(json["runs"][0]["name"], "logits=f16");
    assert_eq!(json["runs"][0]["gradients"].as_array().unwrap().len(), 0);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn mistakes_are_named_with_the_right_code() {
    let [model, ids] = golden("qwen3_5");
    let folder = tempfile::tempdir().unwrap();
    let missing = text(&folder.path().join("nothing"));
    let cases: [(&[&str], i32, &str); 7] = [
        (&["--policies", "A_logg"], 2, "unknown term \"A_logg\""),
        (&["--policies", "A_log=f16"], 2, "bf16 only"),
        (&["--dump", &missing], 3, "nothing"),
        (&["--tokens", "64"], 2, "cannot be combined with --ids"),
        (&["--compare", &model, &model], 2, "cannot be used with"),
        (&["--reference", "f16"], 2, "invalid value"),
        (&["--data", "x.txt"], 2, "cannot be used with"),
    ];
    for (arguments, code, problem) in cases {
        let all: Vec<&str> =
            ["lab", &model, "--ids", &ids, "--json"].iter().chain(arguments).copied().collect();
        let report = run(&all);
        assert_eq!(report.code, Some(code), "{arguments:?}: {}", report.stderr);
        assert!(report.stderr.contains(problem), "{arguments:?}: {}", report.stderr);
    }
    let report = run(&["lab", "--compare", &model, &missing, "--ids", &ids, "--json"]);
    assert_eq!(report.code, Some(3), "{}", report.stderr);
    assert!(report.stderr.contains("nothing"), "{}", report.stderr);
    let report = run(&["lab", &missing, "--json"]);
    assert_eq!(report.code, Some(3), "{}", report.stderr);
    let report = run(&["lab", &model, "--json"]);
    assert_eq!(report.code, Some(3));
    assert!(report.stderr.contains("tokenizer") && report.stderr.contains("--ids"), "{}", report.stderr);
}

#[test]
fn tokens_of_another_vocabulary_are_refused() {
    let [_, ids] = golden("qwen3_next");
    let small = text(&model("deepseek_v32"));
    let report = run(&["lab", &small, "--ids", &ids, "--json"]);
    // The tiny models share a vocabulary of 160; the embedded one's bytes go beyond it.
    assert_eq!(report.code, Some(0), "{}", report.stderr);
    let report = run(&["lab", &small, "--task", "--json"]);
    assert_eq!(report.code, Some(3));
    assert!(report.stderr.contains("outside the vocabulary of 160"), "{}", report.stderr);
}

#[test]
fn a_trace_of_its_own_agrees_and_another_models_does_not() {
    let folder = tempfile::tempdir().unwrap();
    let [model, ids] = golden("qwen3_next");
    let dump = folder.path().join("dump");
    fs::create_dir(&dump).unwrap();
    let file = text(&dump.join("a.safetensors"));
    let sites = "layers.*.out,layers.*.mixer.out,norm,logits";
    let made = run(&["trace", &model, "--ids", &ids, "--sites", sites, "--grads", "--out", &file]);
    assert_eq!(made.code, Some(0), "{}", made.stderr);
    let arguments =
        ["lab", &model, "--ids", &ids, "--dump", &text(&dump), "--out", &text(&folder.path().join("lab"))];
    let report = run(&arguments);
    assert_eq!(report.code, Some(0), "{}{}", report.stdout, report.stderr);
    assert!(report.stdout.contains("agrees within 1e-3 everywhere"), "{}", report.stdout);
    assert!(report.stdout.contains("gradient error"), "{}", report.stdout);
    let made = run(&[
        "trace",
        &model,
        "--ids",
        &ids,
        "--sites",
        sites,
        "--precision",
        "hf-bf16",
        "--out",
        &file,
        "--force",
    ]);
    assert_eq!(made.code, Some(0), "{}", made.stderr);
    let report = run(&["lab", &model, "--ids", &ids, "--dump", &text(&dump), "--json"]);
    assert_eq!(report.code, Some(1), "{}", report.stderr);
    let json: serde_json::Value = serde_json::from_str(&report.stdout).unwrap();
    assert_eq!(json["runs"][0]["first_difference"], "layers.0.mixer.out");
}

#[test]
fn training_steps_decoding_and_two_checkpoints_are_shown() {
    let folder = tempfile::tempdir().unwrap();
    let [model, ids] = golden("qwen3_5");
    let out = text(&folder.path().join("a"));
    let report = run(&[
        "lab",
        &model,
        "--ids",
        &ids,
        "--policies",
        "hf-bf16,state",
        "--decode",
        "--steps",
        "2",
        "--no-gradients",
        "--out",
        &out,
    ]);
    assert_eq!(report.code, Some(0), "{}", report.stderr);
    assert!(report.stdout.contains("training") && report.stdout.contains("drift"), "{}", report.stdout);
    assert!(report.stdout.contains("decoding"), "{}", report.stdout);
    let out = text(&folder.path().join("b"));
    let report = run(&["lab", "--compare", &model, &model, "--ids", &ids, "--no-gradients", "--out", &out]);
    assert_eq!(report.code, Some(0), "{}", report.stderr);
    assert!(report.stdout.contains("gives the same values everywhere"), "{}", report.stdout);
}
