//! Sharded checkpoints with inconsistent files, and configs without content.

use std::fs;
use std::process::Command;

use serde_json::{Value, json};

use crate::common::{self, Scratch, permissions_do_not_bind, raw_file, valid_file};

const INDEX: &str = "src/model.safetensors.index.json";

/// Two shards of 4 bytes: `a` in `1.safetensors`, `b` in `2.safetensors`; and this index.
fn sharded(index: &str) -> Scratch {
    let scratch = Scratch::new();
    scratch.put("src/1.safetensors", valid_file(&[("a", "U8", &[4], b"aaaa")]));
    scratch.put("src/2.safetensors", valid_file(&[("b", "U8", &[4], b"bbbb")]));
    scratch.put(INDEX, index);
    scratch
}

/// An index with these entries.
fn index(total_size: u64, weight_map: Value) -> String {
    json!({ "metadata": { "total_size": total_size }, "weight_map": weight_map }).to_string()
}

/// Every command that uses the tensors refuses with exit code 3; `audit` makes it a finding, with exit code
/// 1; `inspect` mentions it.
#[track_caller]
fn disagreement(scratch: &Scratch, words: &str) {
    for args in [
        &["convert", "src", "dst"][..],
        &["diff", "src", "src"],
        &["repair", "src", "dst", "--original", "src"],
    ] {
        scratch.refuses(args, 3, &["src: the index and the shards disagree", words, "`ballast audit`"]);
    }
    let report = scratch.run(&["audit", "src", "--json"]).exits(1).json();
    let findings = report["findings"].as_array().unwrap();
    let found = findings.iter().find(|f| f["kind"] == "index").expect("a finding about the index");
    assert_eq!(found["severity"], "violation");
    assert!(found["tensors"].to_string().replace("\\\"", "\"").contains(words), "{found}");
    assert!(scratch.run(&["audit", "src"]).exits(1).stdout.contains("FAILED"));
    assert!(scratch.run(&["inspect", "src"]).exits(0).stdout.contains(words));
}

#[test]
fn a_matching_index_is_accepted() {
    let scratch = sharded(&index(8, json!({ "a": "1.safetensors", "b": "2.safetensors" })));
    scratch.run(&["audit", "src"]).exits(0);
    scratch.converts(&[]);
}

#[test]
fn a_truncated_shard_is_refused_by_its_name() {
    let scratch = sharded(&index(8, json!({ "a": "1.safetensors", "b": "2.safetensors" })));
    let whole = valid_file(&[("b", "U8", &[4], b"bbbb")]);
    scratch.put("src/2.safetensors", &whole[..whole.len() - 1]);
    let place = format!("src/2.safetensors, tensor \"b\", byte {}: ", whole.len() - 4);
    let words = [place.as_str(), "ends at data byte 4, but the data has 3 bytes: truncated?"];
    scratch.every_command_refuses(&words);
}

#[test]
fn an_index_that_names_a_missing_file_is_refused() {
    let scratch = sharded(&index(8, json!({ "a": "1.safetensors", "b": "3.safetensors" })));
    let words = [INDEX, "shard \"3.safetensors\" not found (1 of 2 shards are missing)"];
    scratch.every_command_refuses(&words);
}

#[test]
fn a_tensor_that_its_shard_does_not_hold_is_a_disagreement() {
    let scratch =
        sharded(&index(8, json!({ "a": "1.safetensors", "b": "2.safetensors", "c": "2.safetensors" })));
    disagreement(&scratch, "the index places \"c\" in 2.safetensors, which does not hold it");
}

#[test]
fn a_tensor_that_the_index_does_not_know_is_a_disagreement() {
    let scratch = sharded(&index(10, json!({ "a": "1.safetensors", "b": "2.safetensors" })));
    scratch.put("src/2.safetensors", valid_file(&[("b", "U8", &[4], b"bbbb"), ("x", "U8", &[2], b"xx")]));
    disagreement(&scratch, "2.safetensors holds \"x\", which the index does not place there");
}

#[test]
fn a_tensor_in_two_shards_is_a_disagreement() {
    let scratch = sharded(&index(12, json!({ "a": "1.safetensors", "b": "2.safetensors" })));
    scratch.put("src/2.safetensors", valid_file(&[("a", "U8", &[4], b"AAAA"), ("b", "U8", &[4], b"bbbb")]));
    disagreement(&scratch, "\"a\" is in both 1.safetensors and 2.safetensors");
}

#[test]
fn a_tensor_in_two_files_without_an_index_is_a_disagreement() {
    let scratch = sharded("");
    fs::remove_file(scratch.path(INDEX)).unwrap();
    scratch.put("src/2.safetensors", valid_file(&[("a", "U8", &[4], b"AAAA")]));
    disagreement(&scratch, "\"a\" is in both 1.safetensors and 2.safetensors");
}

/// Shards by their file name.
fn without_index(shards: &[&str]) -> Scratch {
    let scratch = Scratch::new();
    for (number, name) in shards.iter().enumerate() {
        let tensor = format!("model.layers.{number}.mlp.up_proj.weight");
        scratch.put(&format!("src/{name}"), valid_file(&[(&tensor, "U8", &[4], b"aaaa")]));
    }
    scratch
}

#[test]
fn a_folder_without_an_index_that_lacks_a_shard_is_refused() {
    let scratch = without_index(&["model-00001-of-00002.safetensors"]);
    let words = ["src", "model-00002-of-00002.safetensors not found (1 of 2 shards are there)"];
    scratch.every_command_refuses(&words);
    let both = without_index(&["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]);
    both.converts(&[]);
}

#[test]
fn a_folder_without_an_index_that_lacks_a_layer_of_the_configuration_is_refused() {
    let scratch = without_index(&["first.safetensors"]);
    let config = json!({ "architectures": ["Qwen3_5ForCausalLM"], "num_hidden_layers": 2 }).to_string();
    scratch.put("src/config.json", &config);
    let words = ["src", "no tensor of layer 1 found, while config.json has 2 layers"];
    scratch.every_command_refuses(&words);
    let both = without_index(&["first.safetensors", "second.safetensors"]);
    both.put("src/config.json", &config);
    both.converts(&[]);
}

#[test]
fn a_wrong_total_size_is_a_disagreement() {
    let scratch = sharded(&index(9, json!({ "a": "1.safetensors", "b": "2.safetensors" })));
    disagreement(&scratch, "total_size is 9, but the tensors have 8 bytes");
}

#[test]
fn an_index_that_points_outside_its_folder_is_refused() {
    let scratch = sharded(&index(8, json!({ "a": "1.safetensors", "b": "../src/2.safetensors" })));
    let words = [INDEX, "the shard \"../src/2.safetensors\" (tensor \"b\") is not a plain file name"];
    scratch.every_command_refuses(&words);
}

#[test]
fn an_index_that_points_to_an_absolute_path_is_refused() {
    let scratch = sharded(&index(8, json!({ "a": "/etc/passwd", "b": "2.safetensors" })));
    scratch.every_command_refuses(&[INDEX, "\"/etc/passwd\" (tensor \"a\") is not a plain file name"]);
}

#[test]
fn an_index_that_is_not_json_is_refused() {
    sharded("{\"weight_map\": nonsense}").every_command_refuses(&[INDEX, "not a valid index", "line 1"]);
}

#[test]
fn an_index_without_a_weight_map_is_refused() {
    sharded("{\"metadata\": {}}").every_command_refuses(&[INDEX, "missing field `weight_map`"]);
}

#[test]
fn an_index_with_one_tensor_twice_is_refused() {
    let index = r#"{"weight_map":{"a":"1.safetensors","a":"2.safetensors"}}"#;
    sharded(index).every_command_refuses(&[INDEX, "the key \"a\" occurs twice"]);
}

#[test]
fn an_index_that_names_a_folder_is_refused() {
    let scratch = sharded(&index(4, json!({ "a": "1.safetensors", "b": "sub" })));
    fs::create_dir(scratch.path("src/sub")).unwrap();
    scratch.every_command_refuses(&["src/sub: not a file"]);
}

#[test]
fn an_index_that_names_a_pipe_is_refused_and_does_not_wait_for_a_writer() {
    let scratch = sharded(&index(4, json!({ "a": "1.safetensors", "b": "pipe" })));
    let made = Command::new("mkfifo").arg(scratch.path("src/pipe")).status();
    if !made.is_ok_and(|status| status.success()) {
        eprintln!("skipped: there is no mkfifo here");
        return;
    }
    // `timeout` would exit with 124.
    let mut command = Command::new("timeout");
    command.arg("20").arg(env!("CARGO_BIN_EXE_ballast")).args(["inspect", "src"]);
    common::run(command.current_dir(scratch.path(""))).exits(3).says(&["src/pipe: not a file"]);
    scratch.convert_refuses(&[], 3, &["src/pipe: not a file"]);
}

#[test]
fn a_folder_without_weights_is_refused() {
    let scratch = Scratch::new();
    scratch.put("src/config.json", common::HYBRID_CONFIG);
    scratch.every_command_refuses(&["src: no safetensors file and no index in this folder"]);
}

#[test]
fn a_path_that_is_not_there_is_refused() {
    let scratch = Scratch::new();
    scratch.refuses(&["inspect", "nowhere"], 3, &["nowhere: cannot open: No such file"]);
    scratch.refuses(&["convert", "nowhere", "dst"], 3, &["nowhere: cannot open: No such file"]);
}

#[test]
fn a_folder_called_model_safetensors_is_refused() {
    let scratch = Scratch::new();
    fs::create_dir(scratch.path("src/model.safetensors")).unwrap();
    scratch.every_command_refuses(&["src: no safetensors file and no index in this folder"]);
    let words = ["src/model.safetensors: no safetensors file"];
    scratch.refuses(&["inspect", "src/model.safetensors"], 3, &words);
}

#[test]
fn a_file_that_may_not_be_read_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let scratch = Scratch::with_model(&valid_file(&[("a", "U8", &[4], b"aaaa")]));
    if permissions_do_not_bind(&scratch.path("")) {
        eprintln!("skipped: permissions do not bind this user");
        return;
    }
    let model = scratch.path("src/model.safetensors");
    fs::set_permissions(model, fs::Permissions::from_mode(0o000)).unwrap();
    scratch.every_command_refuses(&["src/model.safetensors: cannot open: Permission denied"]);
}

#[test]
fn a_config_that_is_not_json_is_refused() {
    let scratch = Scratch::with_model(&valid_file(&[("a", "U8", &[4], b"aaaa")]));
    scratch.put("src/config.json", "{\"architectures\": [}");
    scratch.every_command_refuses(&["src/config.json: not valid JSON", "line 1 column 20"]);
}

#[test]
fn a_config_that_is_not_an_object_is_refused() {
    let scratch = Scratch::with_model(&valid_file(&[("a", "U8", &[4], b"aaaa")]));
    scratch.put("src/config.json", "[1, 2]");
    scratch.every_command_refuses(&["src/config.json: not a JSON object"]);
}

#[test]
fn a_config_without_architectures_and_model_type_is_refused_where_rules_are_needed() {
    let scratch = Scratch::with_model(&valid_file(&[("a", "U8", &[4], b"aaaa")]));
    scratch.put("src/config.json", r#"{"hidden_size": 64}"#);
    let words = ["src/config.json: no `architectures` and no `model_type`", "add \"architectures\""];
    scratch.refuses(&["inspect", "src"], 3, &words);
    scratch.refuses(&["audit", "src"], 3, &words);
    scratch.convert_refuses(&[], 3, &words);
    scratch.refuses(&["repair", "src", "dst", "--original", "src"], 3, &words);
}

#[test]
fn a_missing_rank_is_refused() {
    let scratch = Scratch::new();
    scratch.put("src/mp_rank_00/model.safetensors", valid_file(&[("a", "U8", &[4], b"aaaa")]));
    scratch.put("src/mp_rank_02/model.safetensors", valid_file(&[("a", "U8", &[4], b"aaaa")]));
    scratch.every_command_refuses(&["src: 2 mp_rank_* folders", "is a rank missing?"]);
}

#[test]
fn two_indexes_are_refused_unless_one_is_named() {
    let scratch = sharded("");
    fs::remove_file(scratch.path(INDEX)).unwrap();
    let text = index(8, json!({ "a": "1.safetensors", "b": "2.safetensors" }));
    scratch.put("src/x.safetensors.index.json", &text);
    scratch.put("src/y.safetensors.index.json", &text);
    let words = ["src: several indexes (x.safetensors.index.json, y.safetensors.index.json)"];
    scratch.every_command_refuses(&words);
    scratch.run(&["inspect", "src/x.safetensors.index.json"]).exits(0);
}

#[test]
fn a_bad_shard_that_the_index_does_not_name_is_ignored_and_said_to_be() {
    let scratch = sharded(&index(4, json!({ "a": "1.safetensors" })));
    scratch.put("src/2.safetensors", raw_file("not a header", 3));
    let run = scratch.run(&["audit", "src"]).exits(0);
    assert!(run.stdout.contains("ignored: 2.safetensors"), "{}", run.stdout);
}
