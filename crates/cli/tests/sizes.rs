//! Extreme values of every numeric flag and key: none ends in a panic, an abort or a signal.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use ballast_checkpoint::tensor_file::write_f32;

use crate::common::{self, Run, Scratch, ballast};

const VALUES: [&str; 6] = ["0", "-1", "1", "2147483648", "100000000000", "9223372036854775807"];

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name)
}

/// Runs the binary on every list of arguments, two at a time, and asserts that it ends by itself with one of
/// its codes.
fn all_end(folder: &Path, cases: &[Vec<String>]) {
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some(arguments) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
            let Run { code, stderr, .. } = common::run(ballast(arguments).current_dir(folder));
            assert!(matches!(code, Some(0..=5)), "{arguments:?} ended with {code:?}: {stderr}");
            let silent = !stderr.contains("panicked") && !stderr.contains("memory allocation");
            assert!(silent, "{arguments:?}: {stderr}");
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(work);
        scope.spawn(work);
    });
}

/// Returns `base` with every flag at every value.
fn with_flags(base: &[&str], flags: &[&str]) -> Vec<Vec<String>> {
    let case = |flag: &str, value: &str| {
        let flag = format!("{flag}={value}");
        base.iter().map(|part| part.to_string()).chain([flag]).collect()
    };
    flags.iter().flat_map(|flag| VALUES.map(|value| case(flag, value))).collect()
}

/// The keys of a run's configuration that hold a number, by the default configuration.
fn numeric_keys() -> Vec<String> {
    fn leaves(table: &toml::Table, above: &str, found: &mut Vec<String>) {
        for (key, value) in table {
            match value {
                toml::Value::Table(inner) => leaves(inner, &format!("{above}{key}."), found),
                toml::Value::Integer(_) | toml::Value::Float(_) => found.push(format!("{above}{key}")),
                _ => {}
            }
        }
    }
    let printed = common::run(&mut ballast(["train", "--print-config"])).exits(0).stdout;
    let mut found = vec!["lora.rank".to_string(), "lora.alpha".to_string()];
    leaves(&printed.parse().unwrap(), "", &mut found);
    assert!(found.len() > 25, "{found:?}");
    found
}

#[test]
fn no_number_in_a_configuration_of_training_ends_in_a_panic() {
    let scratch = Scratch::with_text_model();
    scratch.put("data.txt", "some words to learn, and some more of them\n");
    let base = "train --model src --data data.txt --precision f32 --set batch.accumulation=1 --set evaluation.batches=1 \
                --set samples.count=1 --set samples.tokens=2 --set data.sequence_length=8 --set data.validation=data.txt";
    let mut cases = Vec::new();
    for (number, key) in numeric_keys().iter().enumerate() {
        for (place, value) in VALUES.iter().enumerate() {
            // A dry run if the number sets the amount of work; else one step and everything after it.
            let long = matches!(key.as_str(), "steps" | "evaluation.batches" | "samples.tokens");
            let rest = if long && *value != "1" && *value != "0" {
                "--dry-run".to_string()
            } else {
                format!("--steps 1 --out run-{number}-{place}")
            };
            let line = format!("{base} {rest} --set {key}={value}");
            cases.push(line.split_whitespace().map(String::from).collect());
        }
    }
    all_end(&scratch.path(""), &cases);
}

#[test]
fn no_number_of_a_flag_ends_in_a_panic() {
    let scratch = Scratch::with_text_model();
    scratch.put("data.txt", "some words to read, and some more of them\n");
    fs::copy(fixture("attention/capped_window.safetensors"), scratch.path("attention.safetensors")).unwrap();
    fs::copy(fixture("indexer/choice.safetensors"), scratch.path("indexer.safetensors")).unwrap();
    fs::copy(fixture("gdn/packed.safetensors"), scratch.path("gdn.safetensors")).unwrap();
    fs::copy(fixture("models/qwen3_5/golden.safetensors"), scratch.path("ids.safetensors")).unwrap();
    let ids = ["lab", "src", "--ids", "ids.safetensors", "--policies", "A_log", "--no-gradients", "--json"];
    let text = ["lab", "src", "--data", "data.txt", "--policies", "A_log", "--no-gradients", "--json"];
    let task = ["lab", "--policies", "A_log", "--no-gradients", "--json", "--task"];
    let mut cases = Vec::new();
    for (base, flags) in [
        (&["oracle", "attention", "attention.safetensors"][..], &["--window", "--cap", "--tolerance"][..]),
        (&["oracle", "indexer", "indexer.safetensors"], &["--topk"]),
        (&["oracle", "gdn", "gdn.safetensors"], &["--chunk"]),
        (&["trace", "src", "--ids", "ids.safetensors"], &["--tolerance"]),
        (&["diff", "src", "src"], &["--tolerance"]),
        (&["convert", "src", "dst", "--layout", "megatron", "--dry-run"], &["--tp", "--max-shard-size"]),
        (&["eval", "src", "--data", "data.txt"], &["--window", "--stride", "--max-tokens"]),
        (&["data", "inspect", "data.txt", "--model", "src"], &["--samples", "--sequence-length", "--seed"]),
        (
            &["generate", "src", "--prompt", "a", "--max-tokens", "2"],
            &["--temperature", "--top-k", "--top-p", "--min-p", "--repetition-penalty", "--seed"],
        ),
        (&["train", "--dry-run"], &["--seed"]),
        (&["train", "--print-config"], &["--steps"]),
        (&ids, &["--learning-rate"]),
        (&text, &["--tokens", "--sequences"]),
        (&["inspect", "src"], &["--threads"]),
    ] {
        cases.extend(with_flags(base, flags));
    }
    // The task is endless: too large a request is rejected before it is generated.
    for [tokens, sequences] in [["2147483648", "1"], ["4294967295", "4294967295"], ["2", "4294967295"]] {
        let more = ["--tokens", tokens, "--sequences", sequences];
        cases.push(task.iter().chain(&more).map(|part| part.to_string()).collect());
    }
    all_end(&scratch.path(""), &cases);
}

#[test]
fn too_many_threads_are_cut_with_a_message() {
    let model = fixture("models/qwen3_5");
    for (command, flag) in [
        (&mut ballast(["inspect", "--threads", "100000"]), true),
        (ballast(["inspect"]).env("RAYON_NUM_THREADS", "100000"), false),
    ] {
        let run = common::run(command.arg(&model)).exits(0);
        assert!(run.stderr.contains("--threads 100000 is too many"), "{flag}: {}", run.stderr);
        assert!(run.stderr.contains("using"), "{flag}: {}", run.stderr);
    }
}

fn elements(shape: &[usize]) -> usize {
    if shape.contains(&0) { 0 } else { shape.iter().product() }
}

/// A file of tensors of zeros.
fn tensors(scratch: &Scratch, metadata: &[(&str, &str)], tensors: &[(&str, &[usize])]) -> PathBuf {
    let path = scratch.path("in.safetensors");
    let values: Vec<Vec<f32>> = tensors.iter().map(|(_, shape)| vec![0.0; elements(shape)]).collect();
    let named: Vec<_> =
        tensors.iter().zip(&values).map(|((name, shape), values)| (*name, *shape, &values[..])).collect();
    let metadata: Vec<_> = metadata.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect();
    write_f32(&path, &named, &metadata, true).unwrap();
    path
}

#[test]
fn an_oracle_without_heads_width_or_tokens_names_the_tensor_and_its_shape() {
    let scratch = Scratch::new();
    for empty in 0..4 {
        let dimension = |at: usize| if at == empty { 0 } else { 2 };
        let q = [dimension(0), dimension(1), dimension(2), dimension(3)];
        let gates = [q[0], q[1], 2];
        let v = [q[0], q[1], 2, 2];
        let file =
            tensors(&scratch, &[], &[("q", &q), ("k", &q), ("v", &v), ("g", &gates), ("beta", &gates)]);
        for operation in ["gdn", "attention"] {
            let run = common::run(ballast(["oracle", operation]).arg(&file)).exits(3);
            run.says(&["\"q\"", "dimensions must be at least 1", &format!("got {q:?}")]);
        }
        let v = [2, 2, dimension(2), dimension(3)];
        let q = [2; 4];
        if empty >= 2 {
            let gates = [2, 2, v[2]];
            let file =
                tensors(&scratch, &[], &[("q", &q), ("k", &q), ("v", &v), ("g", &gates), ("beta", &gates)]);
            for operation in ["gdn", "attention"] {
                common::run(ballast(["oracle", operation]).arg(&file))
                    .exits(3)
                    .says(&["\"v\"", "at least 1"]);
            }
        }
        let q = [dimension(0), dimension(1), dimension(2), dimension(3)];
        let (k, w) = ([q[0], q[1], q[3]], [q[0], q[1], q[2]]);
        let file = tensors(&scratch, &[("topk", "2")], &[("q", &q), ("k", &k), ("w", &w)]);
        common::run(ballast(["oracle", "indexer"]).arg(&file)).exits(3).says(&["\"q\"", "at least 1"]);
    }
    // Dimensions whose product is 0 but whose partial products exceed any memory.
    let huge = [1 << 40, 1 << 40, 0, 1];
    let file = tensors(&scratch, &[], &[("q", &huge), ("k", &huge), ("v", &huge)]);
    for operation in ["gdn", "attention", "indexer"] {
        common::run(ballast(["oracle", operation]).arg(&file)).exits(3);
    }
}

#[test]
fn an_oracle_whose_result_does_not_fit_in_memory_is_exit_code_4() {
    let scratch = Scratch::new();
    let (q, k, w) = ([1, 2, 1, 1], [1, 2, 1], [1, 2, 1]);
    let file = tensors(&scratch, &[("topk", "100000000000")], &[("q", &q), ("k", &k), ("w", &w)]);
    common::run(ballast(["oracle", "indexer"]).arg(&file)).exits(4).says(&[
        "not enough memory for",
        "iB needed, ",
        "iB available",
    ]);
    let most = usize::MAX.to_string();
    common::run(ballast(["oracle", "indexer", "--topk", &most]).arg(&file)).exits(4);
    // A state of 10^12 values from two megabytes of input.
    let wide = [1, 1, 1, 1 << 20];
    let gates = [1, 1, 1];
    let file =
        tensors(&scratch, &[], &[("q", &wide), ("k", &wide), ("v", &wide), ("g", &gates), ("beta", &gates)]);
    common::run(ballast(["oracle", "gdn"]).arg(&file)).exits(4).says(&[
        "not enough memory for",
        "iB needed, ",
        "iB available",
    ]);
    common::run(ballast(["oracle", "attention"]).arg(&file)).exits(3);
}
