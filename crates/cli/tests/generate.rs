//! `ballast generate`: the text of transformers, the options, and errors.

use std::io::{Read, Write};
use std::process::{Command, Stdio};

use ballast_model::memory;
use serde_json::{Value, json};

use crate::common::{self, Run, Scratch, ballast, run, text_golden};

const GREEDY: [&str; 4] = ["--temperature", "0", "--max-tokens", "12"];

fn golden() -> (String, String, Value) {
    let golden = text_golden("greedy.json");
    let text = |name: &str| golden[name].as_str().unwrap().to_string();
    (text("prompt"), text("continuation"), golden["ids"].clone())
}

fn generate(scratch: &Scratch, prompt: &str, flags: &[&str]) -> Run {
    scratch.run(&[&["generate", "src", "--prompt", prompt], flags].concat())
}

fn with_stdin(scratch: &Scratch, input: &[u8], flags: &[&str]) -> Run {
    let mut command = ballast([&["generate", "src"], flags].concat());
    command.current_dir(scratch.path("")).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(input).unwrap();
    let output = child.wait_with_output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    Run { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

#[test]
fn greedy_text_is_the_one_that_transformers_writes() {
    let scratch = Scratch::with_text_model();
    let (prompt, continuation, ids) = golden();
    let plain = generate(&scratch, &prompt, &GREEDY).exits(0);
    assert_eq!(plain.stdout, continuation.clone() + "\n");
    assert_eq!(plain.stderr, "", "--quiet hides the figures");
    let mut loud = Command::new(env!("CARGO_BIN_EXE_ballast"));
    let args = [&["generate", "src", "--prompt", &*prompt], &GREEDY[..]].concat();
    let plain = run(loud.args(args).current_dir(scratch.path("")).stdin(Stdio::null())).exits(0);
    for word in ["prompt: 9 tokens, ", "generated: 12 tokens, ", "/s; peak memory ", "MiB"] {
        assert!(plain.stderr.contains(word), "{}", plain.stderr);
    }
    let report = generate(&scratch, &prompt, &[&GREEDY[..], &["--json"]].concat()).exits(0).json();
    assert_eq!(report["schema"], "ballast.generate/1");
    assert_eq!((&report["text"], &report["tokens"]), (&json!(continuation), &ids));
    assert_eq!((&report["prompt_tokens"], &report["ended"]), (&json!(9), &json!("max-tokens")));
    assert_eq!(report["precision"], "f32", "as the checkpoint is stored");
    assert!(report["timings"]["generation_tokens_per_second"].as_f64().unwrap() > 0.0);
    assert!(report["peak_memory_bytes"].as_u64().unwrap() > 1 << 20);
}

#[test]
fn the_prompt_can_come_from_standard_input() {
    let scratch = Scratch::with_text_model();
    let (prompt, continuation, _) = golden();
    let run = with_stdin(&scratch, (prompt + "\n").as_bytes(), &[&["-"], &GREEDY[..]].concat()).exits(0);
    assert_eq!(run.stdout, continuation + "\n");
    with_stdin(&scratch, b"\xff\xfe", &["-"]).exits(3).says(&["standard input", "UTF-8"]);
}

#[test]
fn a_conversation_is_answered_through_the_chat_template() {
    let scratch = Scratch::with_text_model();
    scratch.put("chat.json", r#"[{"role": "user", "content": "the sea"}]"#);
    scratch.put("chat.jsonl", "{\"role\": \"user\", \"content\": \"the sea\"}\n");
    let rendered = "<|im_start|>user\nthe sea<|im_end|>\n<|im_start|>assistant\n";
    let expected = generate(&scratch, rendered, &GREEDY).exits(0).stdout;
    for file in ["chat.json", "chat.jsonl"] {
        let run = scratch.run(&[&["generate", "src", "--chat", file], &GREEDY[..]].concat()).exits(0);
        assert_eq!(run.stdout, expected, "{file}");
    }
}

#[test]
fn generation_config_gives_the_defaults_and_flags_override_them() {
    let scratch = Scratch::with_text_model();
    let (prompt, continuation, _) = golden();
    let report = generate(&scratch, "the", &["--json"]).exits(0).json();
    assert_eq!(
        report["sampling"],
        json!({"temperature": 0.7, "top_k": 20, "top_p": 0.95, "min_p": 0.0, "repetition_penalty": 1.0})
    );
    assert!(report["tokens"].as_array().unwrap().len() <= 24);
    let flags = ["--json", "--temperature", "1.5", "--top-k", "3", "--top-p", "0.5", "--min-p", "0.1"];
    let flags = [&flags[..], &["--repetition-penalty", "1.2", "--max-tokens", "2"]].concat();
    let report = generate(&scratch, "the", &flags).exits(0).json();
    assert_eq!(
        report["sampling"],
        json!({"temperature": 1.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.2})
    );
    assert!(report["tokens"].as_array().unwrap().len() <= 2);
    scratch.put(
        "src/generation_config.json",
        r#"{"do_sample": false, "temperature": 0.7, "max_new_tokens": 12}"#,
    );
    assert_eq!(
        generate(&scratch, &prompt, &[]).exits(0).stdout,
        continuation + "\n",
        "without do_sample: greedy"
    );
    scratch.put("src/generation_config.json", r#"{"temperature": "hot"}"#);
    generate(&scratch, "the", &[]).exits(3).says(&["generation_config.json", "`temperature` is \"hot\""]);
}

#[test]
fn a_stop_token_ends_the_text_and_is_not_shown() {
    let scratch = Scratch::with_text_model();
    let (prompt, _, ids) = golden();
    scratch.put("src/generation_config.json", r#"{"eos_token_id": [135, 3]}"#);
    let report = generate(&scratch, &prompt, &["--json"]).exits(0).json();
    assert_eq!((&report["ended"], &report["text"]), (&json!("stop-token"), &json!("ke-K")));
    assert_eq!(report["tokens"].as_array().unwrap()[..], ids.as_array().unwrap()[..4]);
}

#[test]
fn the_same_seed_writes_the_same_text_on_any_number_of_threads_and_another_seed_does_not() {
    let scratch = Scratch::with_text_model();
    let text = |seed: &str, threads: &str| {
        let flags = [
            "generate",
            "src",
            "--prompt",
            "the man",
            "--temperature",
            "1.5",
            "--top-k",
            "0",
            "--seed",
            seed,
        ];
        let mut command = ballast(flags);
        run(command.current_dir(scratch.path("")).env("RAYON_NUM_THREADS", threads)).exits(0).stdout
    };
    assert_eq!(text("7", "1"), text("7", "1"));
    assert_eq!(text("7", "1"), text("7", "2"));
    assert_ne!(text("7", "1"), text("8", "1"));
}

#[test]
fn a_prompt_that_is_longer_than_the_model_was_made_for_is_warned_about() {
    let scratch = Scratch::with_text_model();
    let config = std::fs::read_to_string(scratch.path("src/config.json")).unwrap();
    scratch.put(
        "src/config.json",
        config.replace("\"max_position_embeddings\": 32768", "\"max_position_embeddings\": 4"),
    );
    let (prompt, continuation, _) = golden();
    let run = generate(&scratch, &prompt, &GREEDY).exits(0);
    assert_eq!(run.stdout, continuation + "\n");
    assert!(
        run.stderr.contains("warning: the prompt has 9 tokens, more than max_position_embeddings (4)"),
        "{}",
        run.stderr
    );
}

#[test]
fn an_empty_prompt_no_prompt_and_bad_options_are_usage_errors() {
    let scratch = Scratch::with_text_model();
    generate(&scratch, "", &[]).exits(2).says(&["the prompt has no tokens"]);
    with_stdin(&scratch, b"", &["-"]).exits(2).says(&["the prompt has no tokens"]);
    scratch.run(&["generate", "src"]).exits(2).says(&["no prompt", "--prompt"]);
    for flags in [
        ["--temperature", "-1"],
        ["--top-p", "0"],
        ["--top-p", "1.5"],
        ["--min-p", "2"],
        ["--repetition-penalty", "0"],
        ["--precision", "fp8"],
        ["--chat", "x.json"],
    ] {
        let run = generate(&scratch, "a", &flags).exits(2);
        assert!(run.stderr.contains(flags[0]), "{}", run.stderr);
    }
}

#[test]
fn a_missing_or_broken_file_is_named() {
    let scratch = Scratch::with_text_model();
    scratch.run(&["generate", "nowhere", "--prompt", "a"]).exits(3).says(&["nowhere"]);
    scratch.run(&["generate", "src", "--chat", "none.json"]).exits(3).says(&["none.json: cannot read"]);
    scratch.put("chat.json", "[{\"content\": \"x\"}]");
    scratch.run(&["generate", "src", "--chat", "chat.json"]).exits(3).says(&["chat.json: message 1", "role"]);
    scratch.put("chat.json", "[{\"role\": \"user\", \"content\": \"x\"}]");
    scratch.put("src/chat_template.jinja", "{{ raise_exception('not today') }}");
    let run = scratch.run(&["generate", "src", "--chat", "chat.json"]).exits(3);
    run.says(&["chat_template.jinja: the chat template", "not today"]);
    std::fs::remove_file(scratch.path("src/chat_template.jinja")).unwrap();
    scratch.put("src/tokenizer_config.json", "{}");
    let run = scratch.run(&["generate", "src", "--chat", "chat.json"]).exits(3);
    run.says(&["tokenizer_config.json", "no `chat_template`"]);
    std::fs::remove_file(scratch.path("src/tokenizer.json")).unwrap();
    generate(&scratch, "a", &[]).exits(3).says(&["tokenizer.json: cannot read"]);
    let error = generate(&scratch, "a", &["--json"]).exits(3).json();
    assert_eq!((&error["schema"], &error["exit_code"]), (&json!("ballast.error/1"), &json!(3)));
}

#[test]
fn a_tokenizer_that_is_larger_than_the_model_is_refused_where_it_matters() {
    let scratch = Scratch::with_text_model();
    let text = std::fs::read_to_string(scratch.path("src/tokenizer.json")).unwrap();
    let mut tokenizer: Value = serde_json::from_str(&text).unwrap();
    let mut token = tokenizer["added_tokens"][0].clone();
    (token["id"], token["content"]) = (json!(160), json!("<|more|>"));
    tokenizer["added_tokens"].as_array_mut().unwrap().push(token);
    scratch.put("src/tokenizer.json", tokenizer.to_string());
    generate(&scratch, "a", &GREEDY).exits(0);
    let run = generate(&scratch, "a<|more|>", &GREEDY).exits(3);
    run.says(&["token 1 of the prompt has the id 160", "vocabulary of 160", "tokenizer.json"]);
}

#[test]
fn tensors_that_are_not_the_models_are_listed() {
    let scratch = Scratch::with_text_model();
    let config = std::fs::read_to_string(scratch.path("src/config.json")).unwrap();
    scratch.put("src/config.json", config.replace("\"vocab_size\": 160", "\"vocab_size\": 161"));
    let run = generate(&scratch, "a", &[]).exits(3);
    assert!(
        run.stderr.contains("\n    model.embed_tokens.weight: shape must be [161, 48], got [160, 48]"),
        "{}",
        run.stderr
    );
}

/// The fixture with an embedding larger than any memory, stored as a sparse file.
#[test]
fn a_model_that_does_not_fit_in_memory_is_refused_with_both_figures() {
    const ROWS: u64 = (1 << 31) - 1;
    if memory::available().is_none_or(|bytes| bytes > ROWS * 48 * 4 / 2) {
        return;
    }
    let scratch = Scratch::with_text_model();
    let mut header = serde_json::Map::new();
    let mut data = Vec::new();
    let embedding = "model.embed_tokens.weight";
    let mut put = |name: &str, dtype: &str, shape: Value, length: u64, at: &mut u64| {
        header.insert(
            name.into(),
            json!({"dtype": dtype, "shape": shape, "data_offsets": [*at, *at + length]}),
        );
        *at += length;
    };
    let mut at = 0;
    for (name, (dtype, shape, bytes)) in common::read_tensors(&scratch.path("src/model.safetensors")) {
        if name != embedding {
            put(&name, &dtype, json!(shape), bytes.len() as u64, &mut at);
            data.extend(bytes);
        }
    }
    put(embedding, "F32", json!([ROWS, 48]), ROWS * 48 * 4, &mut at);
    let header = Value::Object(header).to_string().into_bytes();
    scratch.put("src/model.safetensors", [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat());
    let file = std::fs::OpenOptions::new().write(true).open(scratch.path("src/model.safetensors")).unwrap();
    if file.set_len(8 + header.len() as u64 + at).is_err() {
        return; // A file system without files of this size.
    }
    let config = std::fs::read_to_string(scratch.path("src/config.json")).unwrap();
    scratch.put("src/config.json", config.replace("\"vocab_size\": 160", &format!("\"vocab_size\": {ROWS}")));
    generate(&scratch, "a", &[])
        .exits(4)
        .says(&["not enough memory for the model's parameters", "available"]);
}

#[test]
fn an_interrupt_ends_the_text_cleanly_with_its_summary() {
    let scratch = Scratch::with_text_model();
    scratch.put("src/generation_config.json", "{}");
    scratch.put("src/tokenizer_config.json", "{}");
    // Without --quiet, which hides the summary.
    let mut command = Command::new(env!("CARGO_BIN_EXE_ballast"));
    command.args(["generate", "src", "--prompt", "the", "--max-tokens", "100000000"]);
    command.current_dir(scratch.path("")).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut first = [0; 4];
    child.stdout.as_mut().unwrap().read_exact(&mut first).expect("text that comes before its end");
    let sent = Command::new("kill").arg("-INT").arg(child.id().to_string()).status().unwrap();
    assert!(sent.success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("generated: ") && stderr.contains("peak memory"), "{stderr}");
    assert!(output.stdout.ends_with(b"\n"));
}

#[test]
fn a_reader_that_leaves_ends_the_text() {
    let scratch = Scratch::with_text_model();
    scratch.put("src/generation_config.json", "{}");
    scratch.put("src/tokenizer_config.json", "{}");
    let mut command = ballast(["generate", "src", "--prompt", "the", "--max-tokens", "100000000"]);
    command.current_dir(scratch.path("")).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

/// Uses `script` to give the command a terminal; skipped if it is missing.
#[test]
fn a_chat_on_a_terminal_answers_lines_and_reads_only_what_is_new() {
    let scratch = Scratch::with_text_model();
    let command = format!("{} generate src --temperature 0 --max-tokens 8", env!("CARGO_BIN_EXE_ballast"));
    let mut script = Command::new("script");
    script.args(["-qec", &command, "/dev/null"]).current_dir(scratch.path(""));
    let Ok(mut child) = script.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()
    else {
        return;
    };
    child.stdin.take().unwrap().write_all(b"the sea\nand then\n\x04").unwrap();
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{text}");
    let first = "<|im_start|>user\nthe sea<|im_end|>\n<|im_start|>assistant\n";
    let flags = ["--temperature", "0", "--max-tokens", "8", "--json"];
    let report = generate(&scratch, first, &flags).exits(0).json();
    let answer = report["text"].as_str().unwrap();
    let then = "<|im_end|>\n<|im_start|>user\nand then<|im_end|>\n<|im_start|>assistant\n";
    let second = generate(&scratch, &format!("{first}{answer}{then}"), &flags).exits(0).json();
    assert!(text.contains(answer) && text.contains(second["text"].as_str().unwrap()), "{text}");
    // The last token of the first answer was shown but not processed yet.
    let known = report["prompt_tokens"].as_u64().unwrap() + 7;
    let new = second["prompt_tokens"].as_u64().unwrap() - known;
    assert!(text.contains(&format!("prompt: {new} tokens")), "{new} new tokens, and\n{text}");
}
