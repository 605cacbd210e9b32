//! Keys of config.json without effect are reported; ambiguous input is rejected.

use std::path::Path;

use ballast_model::text::Tokenizer;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};

use crate::common::{Scratch, ballast, run, text_golden};

/// A small model with a tokenizer, data and ids, whose config.json has two unknown keys.
fn with_unknown_keys() -> Scratch {
    let scratch = Scratch::with_text_model();
    let text = std::fs::read_to_string(scratch.path("src/config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    config["alibi"] = json!(true);
    config["rope_parameters"]["factor"] = json!(8.0);
    scratch.put("src/config.json", config.to_string());
    scratch.put("data.txt", text_golden("evaluation.json")["text"].as_str().unwrap());
    ids(&scratch, &[("input_ids", &[1, 3], &[1, 2, 3])]);
    scratch
}

/// Writes `ids.safetensors`.
fn ids(scratch: &Scratch, tensors: &[(&str, &[usize], &[i64])]) {
    let bytes: Vec<Vec<u8>> =
        tensors.iter().map(|(_, _, values)| values.iter().flat_map(|v| v.to_le_bytes()).collect()).collect();
    let views = tensors.iter().zip(&bytes).map(|((name, shape, _), bytes)| {
        (*name, TensorView::new(Dtype::I64, shape.to_vec(), bytes).unwrap())
    });
    safetensors::serialize_to_file(views, None, &scratch.path("ids.safetensors")).unwrap();
}

#[test]
fn every_command_that_reads_a_configuration_names_the_keys_without_effect() {
    let scratch = with_unknown_keys();
    let training = "--set steps=1 --set data.validation_fraction=0 --set data.sequence_length=16 --set batch.sequences=1";
    let commands = [
        "inspect src".to_string(),
        "audit src".into(),
        "trace src --ids ids.safetensors".into(),
        "eval src --data data.txt --max-tokens 16".into(),
        "generate src --prompt the --max-tokens 2".into(),
        "lab src --ids ids.safetensors --policies A_log --no-gradients --out lab".into(),
        format!("train --model src --data data.txt --out run {training}"),
        format!("train --model src --data data.txt --out run2 --dry-run {training}"),
    ];
    for command in commands {
        let mut arguments: Vec<&str> = command.split(' ').collect();
        arguments.push("--json");
        let done = scratch.run(&arguments).exits(0);
        let line = "warning: config.json has 2 keys without effect here: alibi, rope_parameters.factor";
        assert_eq!(done.stderr.lines().filter(|l| *l == line).count(), 1, "{command}: {}", done.stderr);
        assert_eq!(
            done.json()["unknown_config_keys"],
            json!(["alibi", "rope_parameters.factor"]),
            "{command}"
        );
    }
}

#[test]
fn nothing_is_said_of_a_configuration_whose_keys_are_all_known() {
    let scratch = Scratch::with_text_model();
    let done = scratch.run(&["inspect", "src", "--json"]).exits(0);
    assert_eq!(done.stderr, "");
    assert_eq!(done.json()["unknown_config_keys"], json!([]));
}

#[test]
fn a_mask_with_a_hole_or_beside_sequences_is_refused() {
    let scratch = Scratch::with_text_model();
    type Integers<'a> = (&'a str, &'a [usize], &'a [i64]);
    let cases: [(&[Integers], &[&str]); 4] = [
        (
            &[("input_ids", &[2, 3], &[1, 2, 3, 4, 5, 6]), ("attention_mask", &[2, 3], &[1, 1, 0, 1, 0, 1])],
            &["attention_mask", "row 1 is masked at column 1"],
        ),
        (
            &[
                ("input_ids", &[1, 3], &[1, 2, 3]),
                ("attention_mask", &[1, 3], &[1, 1, 0]),
                ("cu_seqlens", &[3], &[0, 1, 3]),
            ],
            &["attention_mask", "cannot be combined with cu_seqlens"],
        ),
        (
            &[("input_ids", &[1, 3], &[1, 2, 3]), ("attention_mask", &[1, 3], &[1, 1, 2])],
            &["attention_mask", "must be 0 or 1, got 2 at [0, 2]"],
        ),
        (
            &[("input_ids", &[1, 3], &[1, 2, 3]), ("position_ids", &[1, 3], &[0, 1, 5])],
            &["position_ids", "is not supported"],
        ),
    ];
    for (tensors, words) in cases {
        ids(&scratch, tensors);
        for command in [&["trace", "src"][..], &["lab", "src", "--out", "lab"]] {
            scratch.run(&[command, &["--ids", "ids.safetensors"]].concat()).exits(3).says(words);
        }
    }
}

#[test]
fn the_text_of_a_byte_fallback_tokenizer_is_whole_in_json_and_on_stdout() {
    let scratch = Scratch::with_text_model();
    // Replaces the 160 tokens by bytes, some of incomplete characters, and words.
    let bytes = "é€😀ÿß".bytes().chain([0xFF, 0xC0]).collect::<Vec<u8>>();
    let token = |id: usize| match bytes.get(id % 40) {
        Some(byte) if id < 40 => format!("<0x{byte:02X}>"),
        _ => format!("\u{2581}w{id}"),
    };
    let mut tokens: Vec<String> = (0..160).map(token).collect();
    tokens.dedup();
    let vocabulary: serde_json::Map<String, Value> =
        tokens.into_iter().enumerate().map(|(id, token)| (token, json!(id))).collect();
    let replace = json!({"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "});
    let decoders = json!([replace, {"type": "ByteFallback"}, {"type": "Fuse"}]);
    let tokenizer = json!({
        "version": "1.0",
        "added_tokens": [],
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {"type": "BPE", "byte_fallback": true, "unk_token": null, "vocab": vocabulary, "merges": []},
    });
    scratch.put("src/tokenizer.json", tokenizer.to_string());
    scratch.put("src/tokenizer_config.json", "{}");
    scratch.put("src/generation_config.json", "{}");
    let flags = ["generate", "src", "--prompt", "ß", "--max-tokens", "200", "--temperature", "100"];
    let report = scratch.run(&[&flags[..], &["--json"]].concat()).exits(0).json();
    let written: Vec<u32> =
        report["tokens"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
    let tokenizer = Tokenizer::load(&scratch.src()).unwrap();
    let whole = tokenizer.decode(&written, true).unwrap();
    assert!(whole.contains('\u{fffd}') && whole.contains('w'), "{whole}");
    assert_eq!(report["text"], json!(whole));
    assert_eq!(scratch.run(&flags).exits(0).stdout, whole + "\n");
}

#[test]
fn a_temperature_below_what_f32_holds_writes_the_greedy_text() {
    let scratch = Scratch::with_text_model();
    let text = |flags: &[&str]| {
        let common = ["generate", "src", "--prompt", "the", "--max-tokens", "8", "--json"];
        scratch.run(&[&common[..], flags].concat()).exits(0).json()["tokens"].clone()
    };
    let greedy = text(&["--temperature", "0"]);
    for temperature in ["1e-46", "1e-300"] {
        assert_eq!(text(&["--temperature", temperature, "--top-k", "0", "--top-p", "1"]), greedy);
    }
}

#[test]
fn a_gemma_4_of_twelve_layers_with_padded_layer_keys_is_built_as_its_configuration_says() {
    let scratch = Scratch::new();
    let seed = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/config/gemma4_padded_keys");
    let config = seed.to_str().unwrap();
    let training = ["--set", "steps=1", "--set", "batch.sequences=1", "--set", "data.sequence_length=32"];
    let model = format!("model.config={config:?}");
    let arguments = [&["train", "--out", "run", "--set", &model], &training[..]].concat();
    run(ballast(arguments).current_dir(scratch.path(""))).exits(0);
    let list = scratch.run(&["inspect", "run/model", "--tensors", "--json"]).exits(0).json();
    let shape = |name: &str| {
        let tensors = list["tensors"].as_array().unwrap();
        tensors.iter().find(|t| t["name"] == name).map(|t| t["shape"].clone())
    };
    assert_eq!(shape("model.layers.4.self_attn.q_norm.weight"), Some(json!([16])));
    assert_eq!(shape("model.layers.5.self_attn.q_norm.weight"), Some(json!([32])));
    assert_eq!(shape("model.layers.11.self_attn.q_norm.weight"), Some(json!([32])));
    let saved = std::fs::read_to_string(scratch.path("run/model/config.json")).unwrap();
    let saved: Value = serde_json::from_str(&saved).unwrap();
    assert_eq!(saved["per_layer_config"]["05"]["head_dim"], 32);
}
