//! A byte-order mark at the start of a file is ignored.

use std::fs;

use crate::common::{Scratch, ballast, run};

/// Puts a mark before a file of the scratch folder.
fn mark(scratch: &Scratch, name: &str) {
    let bytes = fs::read(scratch.path(name)).unwrap();
    scratch.put(name, [&b"\xef\xbb\xbf"[..], &bytes].concat());
}

fn eval(scratch: &Scratch, file: &str, more: &[&str]) -> serde_json::Value {
    let mut command = ballast(["eval", "src", "--json", "--data", file]);
    let mut report = run(command.args(more).current_dir(scratch.path(""))).exits(0).json();
    for timing in ["seconds", "tokens_per_second", "peak_memory_bytes"] {
        report[timing] = serde_json::Value::Null;
    }
    report
}

#[test]
fn eval_gives_the_same_figures_with_and_without_a_mark() {
    let scratch = Scratch::with_text_model();
    scratch.put("a.txt", "the cat and the hat, 10 € of it\n");
    scratch.put("a.jsonl", "{\"text\": \"the cat\"}\n\n{\"text\": \"and the hat\"}\n");
    for (file, limit) in [("a.txt", "5"), ("a.jsonl", "6")] {
        let plain = [eval(&scratch, file, &[]), eval(&scratch, file, &["--max-tokens", limit])];
        mark(&scratch, file);
        assert_eq!(
            [eval(&scratch, file, &[]), eval(&scratch, file, &["--max-tokens", limit])],
            plain,
            "{file}"
        );
    }
}

#[test]
fn files_beside_a_model_chats_policies_and_configurations_may_have_a_mark() {
    let scratch = Scratch::with_text_model();
    scratch.put("a.txt", "the cat and the hat\n");
    scratch.put("chat.json", r#"[{"role": "user", "content": "the cat"}]"#);
    scratch.put("policy.toml", "name = \"mine\"\nextends = \"strict\"\n");
    scratch.put("run.toml", "steps = 3\n");
    let generate = || {
        let mut command = ballast(["generate", "src", "--chat", "chat.json", "--max-tokens", "3", "--json"]);
        run(command.current_dir(scratch.path(""))).exits(0).json()["tokens"].clone()
    };
    let (plain, tokens) = (eval(&scratch, "a.txt", &[]), generate());
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        mark(&scratch, &format!("src/{name}"));
    }
    for name in ["a.txt", "chat.json", "policy.toml", "run.toml"] {
        mark(&scratch, name);
    }
    assert_eq!(eval(&scratch, "a.txt", &[]), plain);
    assert_eq!(generate(), tokens);
    let inside = |arguments: &[&str]| run(ballast(arguments).current_dir(scratch.path(""))).exits(0);
    assert_eq!(inside(&["audit", "src", "--policy", "policy.toml", "--json"]).json()["policy"], "mine");
    assert!(inside(&["train", "--config", "run.toml", "--print-config"]).stdout.contains("steps = 3"));
    let config = scratch.path("src/config.json").display().to_string();
    inside(&[
        "train",
        "--dry-run",
        "--set",
        "batch.accumulation=1",
        "--set",
        &format!("model.config={config}"),
        "--set",
        "model.tokenizer=src",
        "--data",
        "a.txt",
        "--set",
        "data.validation_fraction=0",
        "--set",
        "data.sequence_length=8",
    ]);
}

#[test]
fn eval_reads_no_more_of_a_file_than_the_tokens_need() {
    let scratch = Scratch::with_text_model();
    let good = "the cat and the hat, ".repeat(20_000);
    // Invalid UTF-8 or JSON comes long after the requested tokens.
    scratch.put("a.txt", [good.as_bytes(), b"\xff"].concat());
    scratch.put("a.jsonl", format!("{{\"text\": {good:?}}}\nnot JSON\n"));
    for file in ["a.txt", "a.jsonl"] {
        let report = eval(&scratch, file, &["--max-tokens", "64"]);
        assert_eq!((&report["tokens"], &report["documents"]), (&64.into(), &1.into()), "{file}");
        let whole = ballast(["eval", "src", "--data", file]).current_dir(scratch.path("")).output().unwrap();
        assert_eq!(whole.status.code(), Some(3), "{file}");
    }
    let byte = format!("not UTF-8 from byte {}", good.len());
    run(ballast(["eval", "src", "--data", "a.txt"]).current_dir(scratch.path(""))).exits(3).says(&[&byte]);
}
