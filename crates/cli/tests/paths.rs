//! Names of files and folders that are not plain ASCII, and files that are not regular ones.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::common::{self, Scratch, ballast, run};

/// Accents as macOS writes them, quotes, a backslash, a line break, another script.
const NAMES: [&str; 5] =
    ["cafe\u{301} e\u{308}te", "it's \"so\"", "a\\u{301}b", "two\nlines", "模型 \u{1f600}"];

fn settings() -> [&'static str; 10] {
    [
        "--set",
        "batch.accumulation=1",
        "--set",
        "evaluation.batches=0",
        "--set",
        "samples.count=0",
        "--set",
        "data.sequence_length=16",
        "--set",
        "data.validation_fraction=0",
    ]
}

#[test]
fn flags_of_train_take_any_utf8_name() {
    for name in NAMES {
        let scratch = Scratch::with_text_model();
        let model = scratch.path(name);
        fs::rename(scratch.src(), &model).unwrap();
        let data = scratch.path(&format!("{name}.txt"));
        fs::write(&data, "some words to learn, and some more of them\n").unwrap();
        let out = scratch.path(&format!("{name}-run"));
        let mut command = ballast(["train", "--steps", "1", "--precision", "f32"]);
        command.args(settings()).arg("--model").arg(&model).arg("--data").arg(&data).arg("--out").arg(&out);
        common::run(&mut command).exits(0);
        assert!(out.join("model/model.safetensors").is_file(), "{name:?}");
        // The configuration that was saved has the same names.
        let mut command = ballast(["train", "--steps", "2"]);
        common::run(command.arg("--resume").arg(&out)).exits(0);
    }
}

/// Replaces a file by a link to nothing, as in a cache whose content was removed.
fn lose(scratch: &Scratch, name: &str) {
    let _ = fs::remove_file(scratch.path(name));
    std::os::unix::fs::symlink("../blobs/lost", scratch.path(name)).unwrap();
}

#[test]
fn a_file_that_cannot_be_looked_at_is_named_by_every_command() {
    let lost = |name: &str| [name.to_string(), "a link to ../blobs/lost, which does not exist".to_string()];
    for name in ["tokenizer.json", "config.json", "generation_config.json", "model.safetensors", "notes.md"] {
        let scratch = Scratch::with_text_model();
        lose(&scratch, &format!("src/{name}"));
        let [name, problem] = lost(&format!("src/{name}"));
        scratch.every_command_refuses(&[&name, &problem]);
    }
    for name in ["chat_template.jinja", "tokenizer_config.json"] {
        let scratch = Scratch::with_text_model();
        lose(&scratch, &format!("src/{name}"));
        let [name, problem] = lost(&format!("src/{name}"));
        scratch.put("data.txt", "some words to learn, and some more of them\n");
        let train = ["train", "--model", "src/model.safetensors", "--data", "data.txt", "--out", "run"];
        scratch.run(&train).exits(3).says(&[&name, &problem]);
    }
}

#[test]
fn hidden_links_to_nothing_and_folders_are_left_alone() {
    let scratch = Scratch::with_text_model();
    lose(&scratch, "src/.#config.json");
    scratch.put("src/original/notes.md", "x");
    scratch.converts(&[]);
    assert!(scratch.dst().join("tokenizer.json").is_file());
}

#[test]
fn a_pipe_beside_the_weights_is_named() {
    let scratch = Scratch::with_text_model();
    std::process::Command::new("mkfifo").arg(scratch.path("src/notes.md")).status().unwrap();
    scratch.every_command_refuses(&["src/notes.md", "not a file or folder"]);
}

#[test]
fn a_checkpoint_of_a_run_that_cannot_be_looked_at_is_not_skipped() {
    let scratch = Scratch::with_text_model();
    scratch.put("data.txt", "some words to learn, and some more of them\n");
    let mut train = vec!["train", "--model", "src", "--data", "data.txt", "--out", "run", "--steps", "1"];
    train.extend(settings());
    scratch.run(&train).exits(0);
    lose(&scratch, "run/checkpoints/step-00000009");
    let words = ["run/checkpoints/step-00000009", "which does not exist"];
    scratch.run(&["train", "--resume", "run", "--steps", "2"]).exits(3).says(&words);
}

#[test]
fn a_name_that_is_not_utf8_is_refused_by_train_with_the_flag_and_the_reason() {
    let bad = PathBuf::from(OsStr::from_bytes(b"ru\xffn"));
    for flag in ["--out", "--model", "--data"] {
        let folder = tempfile::tempdir().unwrap();
        let mut command = ballast(["train"]);
        let run = common::run(command.arg(flag).arg(folder.path().join(&bad)).current_dir(folder.path()));
        run.exits(2).says(&[flag, "not UTF-8", "rename"]);
    }
}

#[test]
fn json_reports_of_merge_and_resume_have_names_that_are_not_utf8() {
    let scratch = Scratch::with_text_model();
    let data = scratch.path("data.txt");
    fs::write(&data, "some words to learn, and some more of them\n").unwrap();
    let run = scratch.path("run");
    let mut command = ballast(["train", "--steps", "1", "--precision", "f32", "--set", "lora.rank=2"]);
    command
        .args(settings())
        .arg("--model")
        .arg(scratch.src())
        .arg("--data")
        .arg(&data)
        .arg("--out")
        .arg(&run);
    common::run(&mut command).exits(0);
    let odd = |name: &[u8]| scratch.path("").join(Path::new(OsStr::from_bytes(name)));
    let mut command = ballast(["merge", "--json"]);
    let merged =
        common::run(command.arg(scratch.src()).arg(run.join("adapter")).arg("--out").arg(odd(b"mer\xffged")))
            .exits(0);
    assert_eq!(merged.json()["schema"], "ballast.merge/1");
    assert!(odd(b"mer\xffged").join("model.safetensors").is_file());
    fs::rename(&run, odd(b"ru\xffn")).unwrap();
    let mut command = ballast(["train", "--json", "--steps", "2"]);
    let resumed = common::run(command.arg("--resume").arg(odd(b"ru\xffn"))).exits(0);
    assert_eq!(resumed.json()["step"], 2);
}

#[test]
fn a_policy_file_may_have_any_name() {
    let scratch = Scratch::with_text_model();
    let policy = scratch.path("").join(Path::new(OsStr::from_bytes(b"pol\xfficy.toml")));
    fs::write(&policy, "name = \"mine\"\nextends = \"strict\"\n").unwrap();
    let mut command = ballast(["audit", "--json"]);
    let report = common::run(command.arg("--policy").arg(&policy).arg(scratch.src())).exits(0).json();
    assert_eq!(report["policy"], "mine");
}

/// Files that commands read whole, and a command that reads each. A pipe would wait for a writer forever.
#[test]
fn a_pipe_or_a_device_in_place_of_a_file_is_refused() {
    let generate = ["generate", "src", "--prompt", "a"];
    for (name, args) in [
        ("src/config.json", &["inspect", "src"][..]),
        ("src/tokenizer.json", &generate),
        ("src/tokenizer_config.json", &generate),
        ("src/generation_config.json", &generate),
        ("src/chat_template.jinja", &["generate", "src", "--chat", "chat.json"]),
        ("chat.json", &["generate", "src", "--chat", "chat.json"]),
        ("policy.toml", &["audit", "src", "--policy", "policy.toml"]),
        ("run.toml", &["train", "--config", "run.toml", "--dry-run"]),
        ("text.txt", &["eval", "src", "--data", "text.txt"]),
        ("config.json", &["train", "--set", "model.config=\"config.json\"", "--dry-run"]),
    ] {
        for make in [&["mkfifo"][..], &["ln", "-s", "/dev/zero"]] {
            let scratch = Scratch::with_text_model();
            scratch.put("chat.json", r#"[{"role": "user", "content": "a"}]"#);
            let path = scratch.path(name);
            let _ = fs::remove_file(&path);
            let made = std::process::Command::new(make[0]).args(&make[1..]).arg(&path).status().unwrap();
            assert!(made.success());
            let refused = scratch.run(args);
            let file = name.trim_start_matches("src/");
            assert!(refused.stderr.contains(file) && refused.stderr.contains("not a"), "{}", refused.stderr);
            assert!(
                [2, 3].map(Some).contains(&refused.code),
                "{name}: {:?} {}",
                refused.code,
                refused.stderr
            );
        }
    }
}

#[test]
fn standard_input_without_an_end_is_refused() {
    let scratch = Scratch::with_text_model();
    let zeros = fs::File::open("/dev/zero").unwrap();
    let mut command = ballast(["generate", "src", "-"]);
    run(command.current_dir(scratch.path("")).stdin(zeros)).exits(3).says(&["standard input", "256 MiB"]);
}
