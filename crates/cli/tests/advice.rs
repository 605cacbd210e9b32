//! The advice of commands and the form of their errors.

use crate::common::{self, A_LOG, HYBRID_CONFIG, Scratch, ballast, run, valid_file};

#[test]
fn audit_names_repair_before_convert_for_a_rounded_tensor() {
    let scratch = Scratch::with_model(&valid_file(&[(A_LOG, "BF16", &[1], &[0xcd, 0x3d])]));
    scratch.put("src/config.json", HYBRID_CONFIG);
    let report = scratch.run(&["audit", "src", "--json"]).exits(1).json();
    let finding = report["findings"].as_array().unwrap().iter().find(|f| f["kind"] == "not-f32").unwrap();
    let fix = finding["fix"].as_str().unwrap();
    assert!(fix.starts_with("ballast repair CKPT DST --original ORIG"), "{fix}");
    assert!(fix.contains("ballast convert SRC DST, which makes it F32 in name only"), "{fix}");
}

#[test]
fn repair_says_loudly_that_bits_come_from_the_optimizers_master_weights() {
    let scratch = Scratch::new();
    let sample = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/torch/masters");
    let sample = sample.to_str().unwrap();
    let words = "the f32 bits of 3 tensors come from the optimizer's fp32 master weights";
    let audit = scratch.run(&["audit", sample]).exits(1);
    assert!(
        audit.stdout.contains("master-has-bits") && audit.stdout.contains("--original CKPT"),
        "{}",
        audit.stdout
    );
    let run = scratch.run(&["repair", sample, "dst", "--original", sample]).exits(0);
    assert!(run.stdout.contains(&format!("WARNING: {words}")), "{}", run.stdout);
    assert!(run.stdout.contains("restored from master"), "{}", run.stdout);
    let run = scratch.run(&["repair", sample, "dst", "--original", sample, "--dry-run", "--json"]).exits(0);
    assert!(run.stderr.contains(&format!("warning: {words}")), "{}", run.stderr);
    let report = run.json();
    assert!(report["warnings"][0].as_str().unwrap().starts_with(words), "{report}");
    assert_eq!(report["tensors"][0]["outcome"], "restored-from-master");
    scratch.run(&["audit", "dst"]).exits(0);
    let inspect = scratch.run(&["inspect", sample]).exits(0);
    assert!(inspect.stdout.contains("beside the model (optimizer)"), "{}", inspect.stdout);
}

#[test]
fn the_nemo_layout_of_a_model_without_linear_attention_has_the_names_of_hf() {
    let scratch = Scratch::new();
    let gemma = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models/gemma2");
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(gemma.join(name), scratch.src().join(name)).unwrap();
    }
    let run = scratch.converts(&["--layout", "nemo"]);
    assert!(
        run.stdout.contains("nothing is under _fp32_params: the names are those of hf"),
        "{}",
        run.stdout
    );
    scratch.run(&["convert", "dst", "back", "--layout", "hf"]).exits(0);
    scratch.run(&["diff", "src", "back"]).exits(0);
    let read = |name: &str| common::read_tensors(&scratch.path(name).join("model.safetensors"));
    assert!(read("back") == read("src") && read("dst") == read("src"));
}

#[test]
fn errors_show_no_escaped_line_breaks() {
    let scratch = Scratch::with_text_model();
    scratch.put("text.txt", "one two three four five six seven eight nine ten ".repeat(40));
    scratch.put("bad.toml", "steps = 3\n[optimizer\n");
    scratch.put("type.toml", "[optimizer]\nlearning_rate = 'fast'\n");
    let lora = ["--set", "lora.rank=2", "--set", "lora.targets=[\"embed_tokens\", \"A_log\"]"];
    let train = ["train", "--model", "src", "--data", "text.txt", "--out", "run"];
    for (args, code, words) in [
        (
            [&train[..], &lora].concat(),
            3,
            "these modules cannot have an adapter; exclude them: model.embed_tokens: an embedding; ",
        ),
        (vec!["train", "--config", "bad.toml"], 2, "bad.toml: line 2: "),
        (vec!["train", "--config", "type.toml"], 2, "type.toml: "),
    ] {
        let run = scratch.run(&args).exits(code).says(&[words]);
        assert!(!run.stderr.contains("\\n"), "{}", run.stderr);
    }
    std::fs::remove_file(scratch.path("src/tokenizer.json")).unwrap();
    let run = scratch.run(&["lab", "src"]).exits(3).says(&["the embedded text needs a tokenizer"]);
    assert!(!run.stderr.contains("\\n"), "{}", run.stderr);
}

#[test]
fn an_unknown_instruction_set_is_refused_by_every_command() {
    for value in ["avx51", "AVX2", "avx512 "] {
        let mut command = ballast(["audit", "--rules"]);
        run(command.env("BALLAST_SIMD", value))
            .exits(2)
            .says(&[value, "portable, avx2, avx512, avx512bf16, amx"]);
    }
    for value in ["", "portable", "amx"] {
        run(ballast(["audit", "--rules"]).env("BALLAST_SIMD", value)).exits(0);
    }
}
