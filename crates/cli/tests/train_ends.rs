//! Failures of `ballast train`: messages, files left, and exit codes.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::common::{self, Scratch, on_small_disk, run};

/// Small steps; a run takes about a second.
const SMALL: [&str; 10] = [
    "--set",
    "data.sequence_length=48",
    "--set",
    "batch.sequences=2",
    "--set",
    "evaluation.batches=1",
    "--set",
    "samples.count=0",
    "--threads",
    "1",
];

fn train<'a>(extra: &[&'a str]) -> Vec<&'a str> {
    [&["train"], &SMALL[..], extra].concat()
}

/// Returns the binary's command in a folder, without --quiet.
fn loud(folder: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ballast"));
    command.args(args).current_dir(folder).stdin(Stdio::null());
    command
}

/// Fills the disk.
fn fill(disk: &Path) {
    let mut file = File::create(disk.join("filler")).unwrap();
    for size in [1 << 16, 4096, 1] {
        while file.write(&vec![1; size]).is_ok_and(|n| n > 0) {}
    }
}

#[test]
fn a_run_inside_its_source_model_or_over_its_data_is_refused_at_the_start() {
    let scratch = Scratch::new();
    scratch.run(&train(&["--steps", "1", "--out", "base"])).exits(0);
    fs::create_dir(scratch.path("model")).unwrap();
    for name in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        fs::copy(scratch.path("base/model").join(name), scratch.path("model").join(name)).unwrap();
    }
    scratch.put("run/metrics.jsonl", "{\"text\": \"some words\"}\n");
    scratch.put("taken/model/notes.txt", "mine");
    let task = ["--model", "model", "--set", "data.task=recall"];
    let data = ["--model", "model", "--data", "run/metrics.jsonl"];
    for (args, words) in [
        (
            &[&task[..], &["--out", "model/tuned"]].concat()[..],
            &["model.checkpoint", "model/tuned", "overlap"][..],
        ),
        (&[&task[..], &["--out", "model"]].concat(), &["model.checkpoint", "overlap"]),
        (
            &[&task[..], &["--out", "model/tuned", "--set", "lora.rank=2"]].concat(),
            &["model.checkpoint", "overlap"],
        ),
        // The finished model would replace the source.
        (&[&task[..], &["--out", "."]].concat(), &["model.checkpoint", "overlap"]),
        (&[&data[..], &["--out", "run"]].concat(), &["data.files", "run/metrics.jsonl", "overlap"]),
        (&[&task[..], &["--out", "taken"]].concat(), &["taken/model exists", "another `out`"]),
        (&[&task[..], &["--out", "base"]].concat(), &["has checkpoints of a run"]),
    ] {
        let steps = ["--steps", "1", "--set", "batch.accumulation=1"];
        scratch.refuses(&[&train(&steps)[..], args].concat(), 2, words);
        scratch.refuses(&[&train(&steps)[..], args, &["--dry-run"]].concat(), 2, words);
    }
    // A folder whose name starts with the model's name is not part of the model.
    let beside =
        [&train(&["--steps", "1", "--out", "model-tuned", "--set", "batch.accumulation=1"])[..], &task]
            .concat();
    scratch.run(&beside).exits(0);
}

#[test]
fn a_dry_run_of_a_resumed_run_is_refused_rather_than_trained() {
    let scratch = Scratch::new();
    scratch.run(&train(&["--steps", "1", "--out", "run"])).exits(0);
    for flag in ["--dry-run", "--print-config"] {
        assert_eq!(scratch.run(&["train", "--resume", "run", flag]).code, Some(2), "{flag}");
    }
}

#[test]
fn data_with_nothing_to_train_on_ends_with_exit_code_3() {
    let scratch = Scratch::new();
    scratch.run(&train(&["--steps", "1", "--out", "base"])).exits(0);
    let line = format!("{{\"prompt\": \"{}\", \"completion\": \"yes\"}}\n", "p".repeat(99));
    scratch.put("data.jsonl", line.repeat(30));
    let args =
        ["--steps", "2", "--model", "base/model", "--data", "data.jsonl", "--set", "data.packing=padded"];
    let args = train(&[&args[..], &["--set", "batch.accumulation=1", "--out", "run"]].concat());
    let words = ["data.jsonl: nothing in it is trained on", "first 48 tokens"];
    scratch.run(&args).exits(3).says(&words);
    assert!(!scratch.path("run/model").exists());
    scratch.run(&[&args[..], &["--dry-run"]].concat()).exits(3).says(&words);
}

#[test]
fn steps_without_a_trained_token_are_in_the_summary() {
    let scratch = Scratch::new();
    scratch.run(&train(&["--steps", "1", "--out", "base"])).exits(0);
    let line = format!("{{\"prompt\": \"{}\", \"completion\": \"yes\"}}\n", "p".repeat(400));
    scratch.put("data.jsonl", line.repeat(3));
    let args =
        ["--steps", "2", "--model", "base/model", "--data", "data.jsonl", "--set", "batch.accumulation=1"];
    let shown = scratch.run(&train(&[&args[..], &["--out", "a"]].concat())).exits(0).stdout;
    assert!(shown.contains("steps were skipped: they had no tokens to train on"), "{shown}");
    let json = scratch.run(&train(&[&args[..], &["--out", "b", "--json"]].concat())).exits(0).json();
    assert!(json["untrained"].as_u64().unwrap() > 0, "{json}");
}

#[test]
fn a_last_update_that_is_not_finite_ends_with_exit_code_5_and_publishes_nothing() {
    let scratch = Scratch::new();
    let args =
        ["--preset", "hybrid-moe", "--set", "optimizer.eps=1e-50", "--precision", "f32", "--steps", "1"];
    let run = scratch.run(&train(&[&args[..], &["--out", "run"]].concat())).exits(5);
    assert!(run.stderr.contains("the update takes") && run.stderr.contains("NaN"), "{}", run.stderr);
    assert!(!scratch.path("run/model").exists());
    assert_eq!(fs::read_dir(scratch.path("run/checkpoints")).unwrap().count(), 0);
}

#[test]
fn an_error_of_the_system_names_its_cause_once() {
    let scratch = Scratch::new();
    let missing = scratch.run(&["train", "--config", "none.toml"]).exits(3);
    assert_eq!(missing.stderr.matches("No such file").count(), 1, "{}", missing.stderr);
    scratch.put("policy.toml", "name = ");
    let policy = scratch.run(&["audit", "src", "--policy", "policy.toml"]);
    assert_eq!(policy.stderr.matches("TOML parse error").count(), 1, "{}", policy.stderr);
}

#[test]
fn a_full_disk_ends_with_exit_code_4() {
    on_small_disk("train_ends::a_full_disk_ends_with_exit_code_4", "size=1m", |disk| {
        fill(disk);
        let ended = run(&mut loud(disk, &train(&["--steps", "2", "--out", "run"]))).exits(4);
        assert!(ended.stderr.contains("No space left on device"), "{}", ended.stderr);
    });
}

#[test]
fn a_stop_whose_save_failed_ends_with_exit_code_4_and_names_the_checkpoint_that_exists() {
    let name =
        "train_ends::a_stop_whose_save_failed_ends_with_exit_code_4_and_names_the_checkpoint_that_exists";
    // A checkpoint takes some 11 MB: the first fits, a second does not fit beside it.
    on_small_disk(name, "size=18m", |disk| {
        let args = train(&["--steps", "100000", "--set", "checkpoints.every=2", "--out", "run"]);
        let mut command = loud(disk, &args);
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let metrics = || fs::read_to_string(disk.join("run/metrics.jsonl")).unwrap_or_default();
        while !metrics().contains("save failed") {
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap().success());
        let output = child.wait_with_output().unwrap();
        let stdout = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.code(), Some(4), "{stdout}");
        assert!(
            stdout.contains("could not be saved") && stdout.contains("not enough disk space"),
            "{stdout}"
        );
        assert!(
            stdout.contains("the newest checkpoint is from step 2; resume with: ballast train --resume run"),
            "{stdout}"
        );
        assert!(stdout.contains("run/checkpoints/step-00000002/model"), "{stdout}");
        assert!(!stdout.contains("stopped after saving"), "{stdout}");
        // On the full disk, resuming and stopping at once loses nothing.
        let before = common::snapshot(&disk.join("run/checkpoints"));
        let resumed = loud(disk, &["train", "--resume", "run"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        assert!(Command::new("kill").args(["-TERM", &resumed.id().to_string()]).status().unwrap().success());
        resumed.wait_with_output().unwrap();
        assert!(common::snapshot(&disk.join("run/checkpoints")) == before, "the only checkpoint changed");
    });
}

/// Something in the way of the checkpoint of a step.
fn block_checkpoint(scratch: &Scratch, step: u64) {
    scratch.put(&format!("run/checkpoints/step-{step:08}"), "x");
    scratch.put(&format!("run/checkpoints/.new-{step:08}"), "x");
}

/// A run of three steps, which saves each of them, and cannot save this one.
fn run_with_blocked_checkpoint(scratch: &Scratch, step: u64, extra: &[&str]) -> common::Run {
    let out = scratch.path("run");
    let args = train(&[&["--steps", "3", "--set", "checkpoints.every=1", "--out", "run"], extra].concat());
    let mut command = common::ballast(args);
    let child = command.current_dir(scratch.path("")).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = child.spawn().unwrap();
    // The folder is cleaned up before that.
    while !out.join("metrics.jsonl").is_file() && child.try_wait().unwrap().is_none() {
        std::thread::sleep(Duration::from_millis(1));
    }
    block_checkpoint(scratch, step);
    let output = child.wait_with_output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    common::Run { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

#[test]
fn a_finished_run_whose_last_save_failed_ends_with_exit_code_4_and_says_so_when_quiet() {
    let scratch = Scratch::new();
    let ended = run_with_blocked_checkpoint(&scratch, 3, &[]).exits(4);
    assert!(
        ended.stderr.contains("save failed: the checkpoint of step 3 could not be written"),
        "{}",
        ended.stderr
    );
    assert!(ended.stdout.contains("the checkpoint of step 3 was not saved: "), "{}", ended.stdout);
    assert!(ended.stdout.contains("the newest checkpoint is from step 2"), "{}", ended.stdout);
    assert!(scratch.path("run/model/model.safetensors").is_file());
    let scratch = Scratch::new();
    let json = run_with_blocked_checkpoint(&scratch, 3, &["--json"]).exits(4).json();
    assert_eq!(json["failed_saves"][0]["step"], 3, "{json}");
    assert!(json["save_failure"].as_str().is_some_and(|error| json["failed_saves"][0]["error"] == error));
    assert_eq!((&json["stopped"], &json["checkpoint"]["step"]), (&false.into(), &2.into()));
}

#[test]
fn a_finished_run_whose_newest_checkpoint_exists_names_the_save_that_failed_and_succeeds() {
    let scratch = Scratch::new();
    let json = run_with_blocked_checkpoint(&scratch, 2, &["--json"]).exits(0).json();
    assert_eq!(json["failed_saves"].as_array().map(Vec::len), Some(1), "{json}");
    assert_eq!((&json["failed_saves"][0]["step"], &json["checkpoint"]["step"]), (&2.into(), &3.into()));
    assert!(json["save_failure"].is_null(), "{json}");
}

#[test]
fn warnings_are_shown_when_quiet_and_progress_is_not() {
    let scratch = Scratch::new();
    fs::create_dir_all(scratch.path("run/report.html")).unwrap();
    let args = train(&["--steps", "2", "--set", "evaluation.every=1", "--out", "run"]);
    let ended = scratch.run(&args).exits(0);
    assert!(ended.stderr.starts_with("report failed: "), "{}", ended.stderr);
    assert_eq!(ended.stderr.lines().count(), 1, "{}", ended.stderr);
}

#[test]
fn metrics_tensorboard_and_report_that_cannot_be_written_do_not_keep_the_model_from_being_published() {
    let name = "train_ends::metrics_tensorboard_and_report_that_cannot_be_written_do_not_keep_the_model_from_being_published";
    on_small_disk(name, "size=1m", |disk| {
        let scratch = Scratch::new();
        fs::create_dir_all(scratch.path("run")).unwrap();
        fs::create_dir(disk.join("tensorboard")).unwrap();
        for name in ["metrics.jsonl", "report.html", "tensorboard"] {
            symlink(disk.join(name), scratch.path("run").join(name)).unwrap();
        }
        // Room for the first events of TensorBoard, and for nothing else.
        fs::write(disk.join("page"), vec![1; 4096]).unwrap();
        fill(disk);
        fs::remove_file(disk.join("page")).unwrap();
        let args = train(&["--steps", "12", "--tensorboard", "--out", "run"]);
        let ended = run(&mut loud(&scratch.path(""), &args)).exits(0);
        for words in
            ["metrics failed: ", "tensorboard failed: ", "report failed: ", "No space left on device"]
        {
            assert!(ended.stderr.contains(words), "no {words:?} in {}", ended.stderr);
        }
        assert!(ended.stdout.contains("report  not written"), "{}", ended.stdout);
        assert!(scratch.path("run/model/model.safetensors").is_file());
    });
}
