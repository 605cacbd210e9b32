//! Closed pipes and full devices.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use crate::common::{Scratch, ballast};

fn model(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models").join(name)
}

fn full() -> File {
    OpenOptions::new().write(true).open("/dev/full").unwrap()
}

#[test]
fn a_full_device_behind_standard_output_is_exit_code_4() {
    let scratch = Scratch::with_text_model();
    let source = scratch.src().to_str().unwrap().to_string();
    let golden = model("qwen3_5").join("golden.safetensors").to_str().unwrap().to_string();
    let attention = model("../attention/grouped.safetensors").to_str().unwrap().to_string();
    let text = scratch.path("text.txt").to_str().unwrap().to_string();
    std::fs::write(&text, "some words to read, and some more of them\n").unwrap();
    let commands: [&[&str]; 14] = [
        &["inspect", &source],
        &["inspect", &source, "--json"],
        &["audit", &source],
        &["audit", "--rules"],
        &["diff", &source, &source],
        &["convert", &source, "unused", "--dry-run"],
        &["demo"],
        &["trace", &source, "--ids", &golden],
        &["oracle", "attention", &attention],
        &["eval", &source, "--data", &text],
        &["generate", &source, "--prompt", "a", "--max-tokens", "2"],
        &["data", "inspect", &text, "--model", &source, "--no-eos"],
        &["train", "--keys"],
        &["--help"],
    ];
    for command in commands {
        let output = ballast(command).stdout(full()).stderr(Stdio::piped()).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(4), "{command:?}: {stderr}");
        assert!(stderr.contains("standard output: cannot write: No space left"), "{command:?}: {stderr}");
    }
}

#[test]
fn a_closed_standard_output_ends_quietly() {
    let source = model("qwen3_5");
    for json in [false, true] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = ballast(["inspect"]);
        command.arg(&source).args(json.then_some("--json"));
        let output = command.stdout(writer).stderr(Stdio::piped()).output().unwrap();
        assert_eq!(output.status.code(), Some(0));
        assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    }
}

#[test]
fn training_goes_on_when_nobody_reads_its_output() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    // Without --quiet, stderr gets lines during the whole run, one per evaluation.
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_ballast"));
    command.args(["train", "--steps", "3", "--set", "evaluation.every=1", "--set", "evaluation.batches=1"]);
    command.args(["--set", "batch.accumulation=1", "--set", "batch.sequences=1", "--set", "samples.count=0"]);
    let (reader, writer) = std::io::pipe().unwrap();
    let both = writer.try_clone().unwrap();
    let mut child = command.arg("--out").arg(&out).stdout(both).stderr(writer).spawn().unwrap();
    drop(command);
    // The effect of `2>&1 | head -1`.
    let mut lines = BufReader::new(reader);
    lines.read_line(&mut String::new()).unwrap();
    drop(lines);
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert!(out.join("model/model.safetensors").is_file());
    assert!(out.join("checkpoints").read_dir().unwrap().count() > 0);
}

#[test]
fn a_check_that_failed_keeps_its_code_when_the_reader_is_gone() {
    let (mut reader, writer) = std::io::pipe().unwrap();
    let mut command = ballast(["oracle", "attention", "--tolerance", "0"]);
    command.arg(model("../attention/grouped.safetensors")).stdout(writer);
    let mut child = command.spawn().unwrap();
    drop(command);
    let mut first = [0; 1];
    reader.read_exact(&mut first).unwrap();
    drop(reader);
    assert_eq!(child.wait().unwrap().code(), Some(1));
}
