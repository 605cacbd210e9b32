//! `ballast train`: the embedded run, its folder, signals, kills, a full disk, errors.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::common::{Scratch, ballast, on_small_disk, run};

/// Small steps; a run takes about a second.
const SMALL: [&str; 10] = [
    "--set",
    "data.sequence_length=48",
    "--set",
    "batch.sequences=2",
    "--set",
    "evaluation.batches=1",
    "--set",
    "samples.count=2",
    "--threads",
    "1",
];

fn train<'a>(extra: &[&'a str]) -> Vec<&'a str> {
    [&["train"], &SMALL[..], extra].concat()
}

fn finished_weights(out: &Path) -> Vec<u8> {
    fs::read(out.join("model/model.safetensors")).unwrap()
}

#[test]
fn the_embedded_run_leaves_a_folder_that_can_be_used() {
    let scratch = Scratch::new();
    let args = train(&["--steps", "4", "--json", "--tensorboard"]);
    let json = scratch.run(&args).exits(0).json();
    assert_eq!(json["step"], 4);
    assert_eq!(json["ledger"]["summary"], "9 protected tensors: f32 for 4/4 steps");
    assert!(json["evaluation"]["by_source"]["recall"]["tokens"].as_u64().unwrap() > 0);
    let out = scratch.path("runs/default");
    for file in [
        "config.toml",
        "metrics.jsonl",
        "report.html",
        "model/config.json",
        "model/tokenizer.json",
        "model/generation_config.json",
        "checkpoints/step-00000004/state.json",
    ] {
        assert!(out.join(file).is_file(), "{file}");
    }
    assert_eq!(fs::read_dir(out.join("tensorboard")).unwrap().count(), 1);
    let generate = ["generate", "runs/default/model", "--prompt", "aQbX?a", "--max-tokens", "1", "--json"];
    let generated = scratch.run(&generate).exits(0).json();
    assert_eq!(generated["tokens"].as_array().map(Vec::len), Some(1), "{generated}");
    scratch.run(&["audit", "runs/default/model"]).exits(0);
    let again = scratch.run(&train(&["--steps", "1", "--json"])).exits(0).json();
    assert_eq!(again["out"], "runs/default-2", "nothing is overwritten");
    let taken = scratch.run(&train(&["--steps", "1", "--out", "runs/default"])).exits(2);
    assert!(taken.stderr.contains("has checkpoints of a run"), "{}", taken.stderr);
}

#[test]
fn mistakes_are_named_with_exit_code_2_and_nothing_is_written() {
    let scratch = Scratch::new();
    for (args, words) in [
        (
            &["--set", "optimiser.learning_rate=1"][..],
            &["`optimiser.learning_rate`", "`optimizer.learning_rate`"][..],
        ),
        (&["--set", "steps"], &["steps", "`=`"]),
        (&["--preset", "huge"], &["huge", "hybrid-moe"]),
        (&["--precision", "fp8"], &["fp8", "hf-bf16"]),
        (&["--set", "precision.sites.logits=f8"], &["precision.sites.logits", "f16"]),
        (&["--set", "data.task=chess"], &["chess", "recall"]),
        (&["--data", "some.txt"], &["model.tokenizer"]),
    ] {
        scratch.run(&train(args)).exits(2).says(words);
    }
    scratch.run(&["train", "--config", "none.toml"]).exits(3).says(&["none.toml", "read"]);
    scratch.put("bad.toml", "steps = 3\n[optimizer]\nlr = 1");
    scratch.run(&["train", "--config", "bad.toml"]).exits(2).says(&["bad.toml", "optimizer.lr"]);
    scratch.run(&["train", "--resume", "nowhere"]).exits(3).says(&["nowhere", "no checkpoint"]);
}

#[test]
fn the_configuration_is_shown_and_reads_back_and_every_key_is_explained() {
    let scratch = Scratch::new();
    let printed = scratch.run(&train(&["--print-config", "--steps", "7"])).exits(0).stdout;
    scratch.put("again.toml", &printed);
    assert_eq!(scratch.run(&["train", "--config", "again.toml", "--print-config"]).exits(0).stdout, printed);
    assert!(printed.contains("steps = 7") && printed.contains("sequence_length = 48"));
    let keys = scratch.run(&["train", "--keys"]).exits(0).stdout;
    assert!(keys.contains("sentinel.on_fault") && keys.contains("hybrid-moe"));
    assert!(!scratch.path("runs").exists());
}

#[test]
fn a_dry_run_shows_masks_types_memory_and_time_and_leaves_nothing() {
    let scratch = Scratch::new();
    let text = scratch.run(&train(&["--dry-run"])).exits(0).stdout;
    for words in [
        "\u{27e6}",
        "protected: A_log",
        "moments, f32",
        "saved for backward: linear attention",
        "a step takes",
    ] {
        assert!(text.contains(words), "no {words:?} in {text}");
    }
    let json = scratch.run(&train(&["--dry-run", "--json"])).exits(0).json();
    assert!(json["memory_total_bytes"].as_u64().unwrap() > 1_000_000);
    assert!(!scratch.path("runs").exists());
}

fn plan<'a>(more: &[&'a str]) -> Vec<&'a str> {
    let ranks = ["train", "--dry-run", "--ranks", "8", "--flops", "1000", "--model", "model"];
    [&ranks[..], &["--set", "batch.groups=8", "--set", "data.sequence_length=1024"], more].concat()
}

#[test]
fn a_cluster_is_planned_without_tensors_and_what_does_not_fit_has_alternatives() {
    let scratch = Scratch::new();
    let folder = scratch.path("model");
    std::fs::create_dir(&folder).unwrap();
    let config = include_str!("../../../examples/models/qwen3.5-397b-a17b/config.json");
    std::fs::write(folder.join("config.json"), config).unwrap();
    let text = scratch.run(&plan(&["--memory", "1024"])).exits(0).stdout;
    for words in ["8 ranks", "moments, f32", "sent per step", "12.5 GB/s", "does NOT fit", "cluster.shard="] {
        assert!(text.contains(words), "no {words:?} in {text}");
    }
    let json = scratch.run(&plan(&["--memory", "1024", "--json"])).exits(0).json();
    assert!(json["fits"] == false && json["parameters"].as_u64().unwrap() > 390_000_000_000);
    assert!(json["alternatives"][0]["bytes"].as_u64().unwrap() <= 1 << 40);
    let shared = ["--memory", "1024", "--set", "lora.rank=16", "--set", "cluster.shard=weights", "--json"];
    assert_eq!(scratch.run(&plan(&shared)).exits(0).json()["fits"], true);
    let run = scratch.run(&plan(&["--set", "batch.groups=4"])).exits(2);
    assert!(run.stderr.contains("`batch.groups` 4 cannot be divided over 8 ranks"), "{}", run.stderr);
    let run = scratch.run(&plan(&["--bandwidth", "0"])).exits(2);
    assert!(run.stderr.contains("--bandwidth must be above 0, got 0"), "{}", run.stderr);
    assert!(!scratch.path("runs").exists());
}

#[test]
fn a_fault_ends_with_exit_code_5_and_names_the_site() {
    let scratch = Scratch::new();
    let args = train(&[
        "--preset",
        "gemma",
        "--steps",
        "40",
        "--set",
        "precision.sites.norms=f16",
        "--set",
        "optimizer.learning_rate=50",
        "--set",
        "schedule.warmup=0",
        "--set",
        "optimizer.clip=0",
        "--out",
        "run",
    ]);
    let run = scratch.run(&args).exits(5);
    assert!(run.stderr.contains("is the first site with non-finite values"), "{}", run.stderr);
    assert!(scratch.path("run/report.html").is_file());
    let batch = fs::read_dir(scratch.path("run/faults")).unwrap().next().unwrap().unwrap().path();
    assert!(batch.extension().is_some_and(|e| e == "safetensors"));
}

fn start(scratch: &Scratch, args: &[&str]) -> Child {
    let mut command = ballast(args);
    command.current_dir(scratch.path("")).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().unwrap()
}

#[test]
fn a_signal_saves_and_resuming_ends_with_the_bits_of_an_undisturbed_run() {
    let scratch = Scratch::new();
    scratch.run(&train(&["--steps", "150", "--out", "whole"])).exits(0);
    let mut child = start(&scratch, &train(&["--steps", "150", "--out", "run"]));
    while fs::read_to_string(scratch.path("run/metrics.jsonl")).unwrap_or_default().lines().count() < 3 {
        assert!(child.try_wait().unwrap().is_none(), "it ended before it could be stopped");
        std::thread::sleep(Duration::from_millis(10));
    }
    let killed = Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
    assert!(killed.success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let saved = fs::read_dir(scratch.path("run/checkpoints")).unwrap().count();
    assert!(saved >= 1);
    scratch.run(&["train", "--resume", "run", "--threads", "2"]).exits(0);
    assert!(finished_weights(&scratch.path("run")) == finished_weights(&scratch.path("whole")));
}

#[test]
fn a_run_that_is_killed_again_and_again_loses_an_interval_at_most_and_ends_with_the_same_bits() {
    const KILLS: u64 = 15;
    let scratch = Scratch::new();
    let every = ["--set", "checkpoints.every=2", "--set", "evaluation.every=0"];
    let new = |out| [&train(&["--steps", "60", "--out", out])[..], &every].concat();
    scratch.run(&new("whole")).exits(0);
    let newest = |scratch: &Scratch| -> u64 {
        let Ok(entries) = fs::read_dir(scratch.path("run/checkpoints")) else { return 0 };
        let step = |name: String| name.strip_prefix("step-")?.parse().ok();
        entries
            .flatten()
            .filter_map(|e| step(e.file_name().to_string_lossy().into_owned()))
            .max()
            .unwrap_or(0)
    };
    let mut kills = 0;
    let mut seed = 1u64;
    loop {
        let before = newest(&scratch);
        let args = if before == 0 { new("run") } else { vec!["train", "--resume", "run", "--threads", "1"] };
        if before == 0 {
            let _ = fs::remove_dir_all(scratch.path("run"));
        }
        let mut child = start(&scratch, &args);
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let mut patience = 20 + (seed >> 33) % 400;
        let ended = loop {
            if child.try_wait().unwrap().is_some() {
                break true;
            }
            if kills < KILLS && patience == 0 {
                child.kill().unwrap();
                child.wait().unwrap();
                kills += 1;
                break false;
            }
            patience = patience.saturating_sub(1);
            std::thread::sleep(Duration::from_millis(1));
        };
        assert!(newest(&scratch) >= before, "a checkpoint was lost");
        if ended {
            break;
        }
    }
    assert!(kills > 3, "{kills}");
    assert!(finished_weights(&scratch.path("run")) == finished_weights(&scratch.path("whole")));
}

#[test]
fn a_full_disk_does_not_end_the_run_and_the_old_checkpoint_stays() {
    on_small_disk(
        "train::a_full_disk_does_not_end_the_run_and_the_old_checkpoint_stays",
        "size=18m",
        |disk| {
            // A checkpoint takes some 11 MB: the first fits, a second does not fit beside it.
            let args =
                train(&["--steps", "6", "--set", "checkpoints.every=2", "--set", "checkpoints.keep_last=3"]);
            let mut command = Command::new(env!("CARGO_BIN_EXE_ballast"));
            let run = run(command.args(args).args(["--out", "run"]).current_dir(disk).stdin(Stdio::null()));
            assert!(run.stderr.contains("save failed: the checkpoint of step"), "{}", run.stderr);
            assert!(run.stderr.contains("step 6/6"), "{}", run.stderr);
            let steps: Vec<String> = fs::read_dir(disk.join("run/checkpoints"))
                .unwrap()
                .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
                .collect();
            assert_eq!(steps, ["step-00000002"], "nothing half written");
        },
    );
}

#[test]
fn adapters_are_trained_merged_and_used() {
    let scratch = Scratch::new();
    scratch.run(&train(&["--steps", "2", "--out", "base"])).exits(0);
    let lora = [
        "--model",
        "base/model",
        "--set",
        "lora.rank=2",
        "--set",
        "data.task=recall",
        "--set",
        "batch.accumulation=1",
    ];
    scratch.run(&[&train(&["--steps", "2", "--out", "low"])[..], &lora].concat()).exits(0);
    assert!(scratch.path("low/adapter/adapter_model.safetensors").is_file());
    scratch.run(&["merge", "base/model", "low/adapter", "--out", "merged"]).exits(0);
    scratch.run(&["audit", "merged"]).exits(0);
    let words = ["--prompt", "aQ?a", "--max-tokens", "2", "--precision", "f32"];
    let merged = scratch.run(&[&["generate", "merged"], &words[..]].concat()).exits(0);
    let applied =
        scratch.run(&[&["generate", "base/model", "--adapter", "low/adapter"], &words[..]].concat()).exits(0);
    assert_eq!(applied.stdout, merged.stdout);
    let wrong = scratch.run(&[&["generate", "base/model", "--adapter", "base/model"], &words[..]].concat());
    wrong.exits(3).says(&["adapter_config.json"]);
}
