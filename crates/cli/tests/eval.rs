//! `ballast eval`: the perplexity of transformers for every form of data, and errors.

use serde_json::{Value, json};

use crate::common::{Run, Scratch, text_golden};

fn eval(scratch: &Scratch, data: &str, flags: &[&str]) -> Run {
    scratch.run(&[&["eval", "src", "--data", data], flags].concat())
}

fn with_data() -> (Scratch, Value) {
    let (scratch, golden) = (Scratch::with_text_model(), text_golden("evaluation.json"));
    scratch.put("data.txt", golden["text"].as_str().unwrap());
    (scratch, golden)
}

fn near(a: &Value, b: f64) -> bool {
    (a.as_f64().unwrap() - b).abs() <= 1e-5 * b.abs()
}

#[test]
fn perplexity_and_its_error_are_those_of_transformers_losses() {
    let (scratch, golden) = with_data();
    let runs = golden["runs"].as_array().unwrap();
    assert_eq!(runs.len(), 3);
    for expected in runs {
        let (window, stride) = (expected["window"].to_string(), expected["stride"].to_string());
        let report =
            eval(&scratch, "data.txt", &["--window", &window, "--stride", &stride, "--json"]).exits(0).json();
        let windows: Vec<(f64, f64)> = expected["windows"]
            .as_array()
            .unwrap()
            .iter()
            .map(|w| (w[0].as_f64().unwrap(), w[1].as_f64().unwrap()))
            .collect();
        let (sum, n) = windows.iter().fold((0.0, 0.0), |(s, n), w| (s + w.0, n + w.1));
        let k = windows.len() as f64;
        let squares: f64 = windows.iter().map(|(s, m)| (s - sum / n * m).powi(2)).sum();
        let error = (k / (k - 1.0) * squares).sqrt() / n;
        assert_eq!(report["schema"], "ballast.eval/1");
        assert_eq!((&report["windows"], &report["predicted"]), (&json!(windows.len()), &json!(n as u64)));
        assert!(near(&report["perplexity"], expected["perplexity"].as_f64().unwrap()), "{report} {expected}");
        assert!(near(&report["nll"], sum / n), "{report}");
        assert!((report["nll_error"].as_f64().unwrap() - error).abs() < 1e-5, "{report} {error}");
        let bytes = golden["text"].as_str().unwrap().len() as f64;
        let tokens = golden["ids"].as_array().unwrap().len() as f64;
        assert!(near(&report["bits_per_byte"], sum / n / std::f64::consts::LN_2 * tokens / bytes));
    }
}

#[test]
fn the_table_has_every_figure() {
    let (scratch, _) = with_data();
    let table = eval(&scratch, "data.txt", &["--window", "32"]).exits(0).stdout;
    for word in [
        "tokens",
        "windows",
        "nll per token",
        "perplexity",
        "bits per byte",
        "±",
        "tokens/s",
        "peak memory",
        "MiB",
    ] {
        assert!(table.contains(word), "no {word} in\n{table}");
    }
    let one = eval(&scratch, "data.txt", &[]).exits(0).stdout;
    assert!(one.contains("1 of 2048 tokens") && one.contains("no standard error"), "{one}");
}

#[test]
fn lines_of_json_are_documents_end_to_end() {
    let (scratch, golden) = with_data();
    let text = golden["text"].as_str().unwrap();
    let (a, b) = text.split_at(text.len() / 2);
    scratch.put("data.jsonl", format!("{}\n\n{}\n", json!({"text": a, "id": 1}), json!({"text": b})));
    let lines = eval(&scratch, "data.jsonl", &["--window", "32", "--json"]).exits(0).json();
    let whole = eval(&scratch, "data.txt", &["--window", "32", "--json"]).exits(0).json();
    assert_eq!((&lines["documents"], &whole["documents"]), (&json!(2), &json!(1)));
    // Both halves end with a line break, so splitting does not change the tokens.
    assert_eq!(lines["tokens"], whole["tokens"]);
    assert_eq!(lines["nll"], whole["nll"]);
}

#[test]
fn the_first_tokens_can_be_taken_alone() {
    let (scratch, golden) = with_data();
    let report =
        eval(&scratch, "data.txt", &["--window", "32", "--max-tokens", "64", "--json"]).exits(0).json();
    assert_eq!((&report["tokens"], &report["windows"]), (&json!(64), &json!(2)));
    let windows = &golden["runs"][0]["windows"];
    let sum = windows[0][0].as_f64().unwrap() + windows[1][0].as_f64().unwrap();
    assert!(near(&report["nll"], sum / 62.0), "{report}");
    assert!(report["bytes"].as_u64().unwrap() < golden["text"].as_str().unwrap().len() as u64);
}

#[test]
fn bf16_changes_the_figures_a_little_and_threads_do_not() {
    let (scratch, _) = with_data();
    let nll = |flags: &[&str]| {
        let flags = [&["--window", "32", "--json"], flags].concat();
        eval(&scratch, "data.txt", &flags).exits(0).json()["nll"].as_f64().unwrap()
    };
    let f32 = nll(&[]);
    assert_eq!(f32, nll(&["--precision", "f32", "--threads", "1"]));
    let bf16 = nll(&["--precision", "bf16"]);
    assert!(f32 != bf16 && (f32 - bf16).abs() < 0.02, "{f32} {bf16}");
}

#[test]
fn bad_data_is_refused_with_file_and_line() {
    let (scratch, _) = with_data();
    scratch.put("json.jsonl", "{\"text\": \"a\"}\n\n{\"text\": \n");
    eval(&scratch, "json.jsonl", &[]).exits(3).says(&["json.jsonl: line 3: not valid JSON"]);
    scratch.put("field.jsonl", "{\"text\": \"a\"}\n{\"body\": \"b\"}\n");
    eval(&scratch, "field.jsonl", &[]).exits(3).says(&["field.jsonl: line 2: no string `text`"]);
    scratch.put("bytes.txt", b"ab\xff");
    eval(&scratch, "bytes.txt", &[]).exits(3).says(&["bytes.txt: not UTF-8 from byte 2"]);
    scratch.put("short.txt", "a");
    eval(&scratch, "short.txt", &[])
        .exits(3)
        .says(&["short.txt: at least 2 tokens are needed, found 1 token"]);
    eval(&scratch, "none.txt", &[]).exits(3).says(&["none.txt: cannot read"]);
    eval(&scratch, "data.txt", &["--window", "8", "--stride", "9"])
        .exits(2)
        .says(&["--stride must be at most the window (8), got 9"]);
    assert!(eval(&scratch, "data.txt", &["--window", "1"]).exits(2).stderr.contains("--window"));
    std::fs::remove_file(scratch.path("src/tokenizer.json")).unwrap();
    eval(&scratch, "data.txt", &[]).exits(3).says(&["tokenizer.json: cannot read"]);
}
