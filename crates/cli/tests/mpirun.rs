//! Training under mpirun: the same model on any number of ranks, and what happens when one of them fails.
//!
//! BALLAST_KILLS sets how often ranks are killed at random moments (default 3).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::common::{self, Run, ballast, run};

/// A small step of four groups.
const STEP: [&str; 6] = [
    "batch.groups=4",
    "batch.accumulation=4",
    "batch.sequences=1",
    "data.sequence_length=48",
    "samples.count=0",
    "evaluation.batches=2",
];

/// Arguments of a new run.
fn train(out: &Path, settings: &[&str]) -> Vec<String> {
    let mut args: Vec<String> = ["--threads", "1", "train", "--out"].map(String::from).to_vec();
    args.push(out.display().to_string());
    for setting in STEP.iter().chain(settings) {
        args.extend(["--set".into(), setting.to_string()]);
    }
    args
}

fn resume(out: &Path) -> Vec<String> {
    ["--threads", "1", "train", "--resume"]
        .map(String::from)
        .into_iter()
        .chain([out.display().to_string()])
        .collect()
}

/// One job at a time: each has more ranks than this machine may have cores.
fn turn() -> std::sync::MutexGuard<'static, ()> {
    static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());
    TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn mpirun(ranks: usize, args: &[String]) -> Command {
    let mut command = Command::new("mpirun");
    command.args(["--allow-run-as-root", "--oversubscribe", "-n", &ranks.to_string()]);
    let rank = ballast(args.iter().map(String::as_str));
    command.arg(rank.get_program()).args(rank.get_args()).stdin(Stdio::null());
    command
}

fn alone(args: &[String]) -> Run {
    run(&mut ballast(args.iter().map(String::as_str))).exits(0)
}

/// Asserts that `ballast diff` finds no difference between the finished models.
#[track_caller]
fn assert_equal(a: &Path, b: &Path) {
    let (a, b) = (a.join("model").display().to_string(), b.join("model").display().to_string());
    let found = run(&mut ballast(["diff", &a, &b])).exits(0);
    assert!(found.stdout.contains("EQUAL"), "{}", found.stdout);
}

/// Process ids of the ranks of a job, by rank.
fn ranks_of(job: &mut Child, count: usize) -> Vec<u32> {
    while running(job) {
        let mut found: Vec<(usize, u32)> = Vec::new();
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let Ok(pid) = entry.file_name().to_string_lossy().parse::<u32>() else { continue };
            let stat = fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
            let parent =
                stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(1)?.parse::<u32>().ok());
            if parent != Some(job.id()) {
                continue;
            }
            let environment = fs::read(entry.path().join("environ")).unwrap_or_default();
            let rank = environment.split(|byte| *byte == 0).find_map(|variable| {
                String::from_utf8_lossy(variable).strip_prefix("OMPI_COMM_WORLD_RANK=")?.parse().ok()
            });
            found.extend(rank.map(|rank| (rank, pid)));
        }
        if found.len() == count {
            found.sort_unstable();
            return found.into_iter().map(|(_, pid)| pid).collect();
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    panic!("the job ended before its ranks were found");
}

fn signal(pid: u32, signal: &str) {
    assert!(Command::new("kill").args([signal, &pid.to_string()]).status().unwrap().success());
}

/// Waits for the end of a job; its exit code and output.
fn end(job: Child) -> (Option<i32>, String) {
    let output = job.wait_with_output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Returns true until a job has ended.
fn running(job: &mut Child) -> bool {
    job.try_wait().unwrap().is_none()
}

/// Waits until a job has recorded this many steps.
fn wait_for_steps(job: &mut Child, out: &Path, steps: usize) {
    let recorded = || {
        fs::read_to_string(out.join("metrics.jsonl"))
            .map_or(0, |text| text.matches("\"gradient_norm\"").count())
    };
    while recorded() < steps {
        assert!(running(job), "the job ended after {} steps, expected {steps}", recorded());
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn start(command: &mut Command) -> Child {
    command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

fn steps_saved(out: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(out.join("checkpoints")).map(|all| all.flatten().collect::<Vec<_>>());
    let named =
        |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("step-"));
    let mut steps: Vec<PathBuf> =
        entries.unwrap_or_default().into_iter().map(|entry| entry.path()).filter(named).collect();
    steps.sort();
    steps
}

#[test]
fn fifty_steps_on_1_2_and_4_ranks_give_the_same_model_with_every_shard_setting() {
    let _turn = turn();
    let folder = tempfile::tempdir().unwrap();
    for precision in ["bf16", "f32"] {
        let preset = format!("precision.preset={precision}");
        let settings = ["steps=50", "evaluation.every=0", "checkpoints.every=0", &preset];
        let whole = folder.path().join(format!("{precision}-alone"));
        alone(&train(&whole, &settings));
        for (ranks, shard) in [
            (4, "none"),
            (2, "optimizer"),
            (4, "optimizer"),
            (4, "gradients"),
            (2, "weights"),
            (4, "weights"),
        ] {
            let out = folder.path().join(format!("{precision}-{ranks}-{shard}"));
            let shard = format!("cluster.shard={shard}");
            let settings: Vec<&str> = settings.iter().copied().chain([&*shard]).collect();
            run(&mut mpirun(ranks, &train(&out, &settings))).exits(0);
            assert_equal(&whole, &out);
        }
    }
}

#[test]
fn a_killed_rank_ends_the_job_and_the_resumed_run_has_the_bits_of_one_never_stopped() {
    let _turn = turn();
    let kills: usize = std::env::var("BALLAST_KILLS").map_or(3, |kills| kills.parse().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let settings = ["steps=40", "checkpoints.every=5", "evaluation.every=10", "cluster.shard=gradients"];
    let whole = folder.path().join("whole");
    alone(&train(&whole, &settings));
    let mut resumed = 0;
    for round in 0..kills {
        let out = folder.path().join(format!("killed-{round}"));
        let mut job = start(&mut mpirun(4, &train(&out, &settings)));
        let ranks = ranks_of(&mut job, 4);
        // Moments that cover the run, in an order that looks random, also within a step and while files are written.
        wait_for_steps(&mut job, &out, 3 + round * 7919 % 30);
        std::thread::sleep(Duration::from_millis((round * 13 % 23) as u64));
        signal(ranks[(round * 3 + 1) % 4], "-9");
        let (code, text) = end(job);
        assert_ne!(code, Some(0), "round {round}: the run ended before the signal");
        assert!(!text.contains("has not answered"), "the ranks waited for the killed one: {text}");
        for checkpoint in steps_saved(&out) {
            for file in
                ["state.json", "optimizer.safetensors", "model/model.safetensors", "model/config.json"]
            {
                assert!(checkpoint.join(file).is_file(), "{} lacks {file}", checkpoint.display());
            }
        }
        if steps_saved(&out).is_empty() {
            fs::remove_dir_all(&out).unwrap();
            run(&mut mpirun(2, &train(&out, &settings))).exits(0);
        } else {
            run(&mut mpirun([1, 2, 4][round % 3], &resume(&out))).exits(0);
            resumed += 1;
        }
        assert_equal(&whole, &out);
    }
    assert!(resumed >= kills / 2, "{resumed} of {kills} killed runs were resumed from a checkpoint");
    println!("{resumed} of {kills} killed runs were resumed from a checkpoint");
}

#[test]
fn a_rank_that_stops_answering_ends_the_job_with_its_number() {
    let _turn = turn();
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    let mut job = start(&mut mpirun(4, &train(&out, &["steps=100000", "cluster.timeout=3"])));
    let ranks = ranks_of(&mut job, 4);
    wait_for_steps(&mut job, &out, 2);
    signal(ranks[2], "-STOP");
    let (code, text) = end(job);
    assert_ne!(code, Some(0));
    assert!(text.contains("rank 2 has not answered for 3 s (cluster.timeout)"), "{text}");
}

/// One of two ranks has a long document, the other a short one.
#[test]
fn a_rank_that_computes_beyond_the_time_limit_is_waited_for() {
    let _turn = turn();
    let scratch = common::Scratch::with_text_model();
    let data = scratch.path("data.jsonl");
    let document = |words: usize| format!("{{\"text\": \"{}\"}}\n", "the cat and the hat ".repeat(words));
    fs::write(&data, document(4_000) + &document(1)).unwrap();
    let mut args =
        train(&scratch.path("out"), &["data.validation_fraction=0", "steps=1", "cluster.timeout=1"]);
    let step =
        ["data.packing=padded", "data.sequence_length=20000", "batch.groups=2", "batch.accumulation=2"];
    args.extend(step.iter().flat_map(|setting| ["--set".to_string(), setting.to_string()]));
    args.extend(["--model".into(), scratch.src().display().to_string()]);
    args.extend(["--data".into(), data.display().to_string()]);
    run(&mut mpirun(2, &args)).exits(0);
}

#[test]
fn an_interrupt_saves_once_and_the_run_can_be_resumed() {
    let _turn = turn();
    let folder = tempfile::tempdir().unwrap();
    let (out, whole) = (folder.path().join("run"), folder.path().join("whole"));
    let settings = ["steps=60", "checkpoints.every=0", "cluster.shard=weights"];
    alone(&train(&whole, &settings));
    // The job has time to save.
    let mut command = mpirun(2, &train(&out, &settings));
    let mut job = start(command.env("OMPI_MCA_odls_base_sigkill_timeout", "30"));
    wait_for_steps(&mut job, &out, 2);
    signal(job.id(), "-INT");
    let (code, text) = end(job);
    assert_ne!(code, Some(0), "{text}");
    assert_eq!(steps_saved(&out).len(), 1, "{text}");
    run(&mut mpirun(4, &resume(&out))).exits(0);
    assert_equal(&whole, &out);
}

#[test]
fn ranks_with_different_configurations_are_refused_with_the_difference() {
    let _turn = turn();
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    let mut command = mpirun(1, &train(&out, &["optimizer.learning_rate=1e-3"]));
    let other = ballast(["train"]);
    command
        .args([":", "-n", "1"])
        .arg(other.get_program())
        .args(train(&out, &["optimizer.learning_rate=2e-3"]));
    let ended = run(&mut command);
    assert_eq!(ended.code, Some(2), "{}", ended.stderr);
    let message = "rank 1 differs from rank 0 in `optimizer.learning_rate`: 0.002, but 0.001 on rank 0";
    assert_eq!(ended.stderr.matches(message).count(), 1, "{}", ended.stderr);
    assert!(!out.exists(), "nothing was written");
}

/// Two ranks whose commands differ; each has its own folder.
fn mpirun_of_two(folders: [&Path; 2], programs: [&Path; 2], args: &[String]) -> Command {
    let mut command = Command::new("mpirun");
    command.args(["--allow-run-as-root", "--oversubscribe"]).stdin(Stdio::null());
    for (rank, (folder, program)) in folders.into_iter().zip(programs).enumerate() {
        command.args([":"].iter().filter(|_| rank > 0)).args(["-n", "1", "-wdir"]).arg(folder);
        command.arg(program).args(args).arg("--quiet");
    }
    command
}

#[test]
fn ranks_with_different_data_models_or_programs_are_refused_with_the_difference() {
    let _turn = turn();
    let scratch = common::Scratch::with_text_model();
    let folders = ["first", "second"].map(|name| scratch.path(name));
    let text = |rank: usize| format!("{} ", ["the cat", "the hat"][rank]).repeat(400);
    for (rank, folder) in folders.iter().enumerate() {
        for model in ["model", "changed"] {
            fs::create_dir_all(folder.join(model)).unwrap();
            for entry in fs::read_dir(scratch.src()).unwrap().flatten() {
                fs::copy(entry.path(), folder.join(model).join(entry.file_name())).unwrap();
            }
        }
        let weights = folder.join("changed/model.safetensors");
        let mut bytes = fs::read(&weights).unwrap();
        *bytes.last_mut().unwrap() ^= rank as u8;
        fs::write(&weights, bytes).unwrap();
        fs::write(folder.join("data.txt"), text(rank)).unwrap();
        fs::write(folder.join("same.txt"), text(0)).unwrap();
    }
    let program = PathBuf::from(ballast([""; 0]).get_program());
    let other = scratch.path("other-program");
    let mut bytes = fs::read(&program).unwrap();
    bytes.push(0);
    fs::write(&other, bytes).unwrap();
    fs::set_permissions(&other, fs::metadata(&program).unwrap().permissions()).unwrap();
    let out = scratch.path("out");
    let args = |model: &str, data: &str| {
        let mut args = train(&out, &["data.validation_fraction=0", "steps=1"]);
        args.extend(["--model", model, "--data", data].map(String::from));
        args
    };
    let folders = [&*folders[0], &*folders[1]];
    for (programs, model, data, message) in [
        (
            [&*program, &*program],
            "model",
            "data.txt",
            "rank 1 differs from rank 0 in file 0 of `data.files`: ",
        ),
        ([&program, &program], "changed", "same.txt", "rank 1 differs from rank 0 in the weights: checksum "),
        ([&program, &other], "model", "same.txt", "rank 1 differs from rank 0 in program file: checksum "),
    ] {
        let ended = run(&mut mpirun_of_two(folders, programs, &args(model, data)));
        assert_eq!(ended.code, Some(2), "{}", ended.stderr);
        assert_eq!(ended.stderr.matches(message).count(), 1, "{}", ended.stderr);
    }
    run(&mut mpirun_of_two(folders, [&program, &program], &args("model", "same.txt"))).exits(0);
}

#[test]
fn a_folder_that_each_machine_has_of_its_own_is_refused_at_the_start_with_rank_and_folder() {
    let _turn = turn();
    let scratch = common::Scratch::new();
    let folders = ["first", "second"].map(|name| scratch.path(name));
    folders.iter().for_each(|folder| fs::create_dir_all(folder).unwrap());
    let program = PathBuf::from(ballast([""; 0]).get_program());
    let start =
        |args: &[String]| run(&mut mpirun_of_two([&folders[0], &folders[1]], [&program, &program], args));
    let refused = |args: &[String]| {
        let ended = start(args).exits(2);
        let place = folders[1].join("run/checkpoints").display().to_string();
        for words in ["`out` is not shared by all ranks", "rank 1 on ", &place] {
            assert_eq!(ended.stderr.matches(words).count(), 1, "{words}: {}", ended.stderr);
        }
        assert!(!folders[1].join("run").exists(), "nothing was written");
    };
    for shard in ["cluster.shard=none", "cluster.shard=weights"] {
        refused(&train(Path::new("run"), &["steps=1", shard]));
        assert!(steps_saved(&folders[0].join("run")).is_empty());
    }
    alone(&train(&folders[0].join("run"), &["steps=1"]));
    refused(&resume(Path::new("run")));
}

#[test]
fn an_error_of_one_rank_ends_all_with_its_code_and_text() {
    let _turn = turn();
    let scratch = common::Scratch::with_text_model();
    let folders = ["first", "second"].map(|name| scratch.path(name));
    for folder in &folders {
        fs::create_dir_all(folder).unwrap();
    }
    fs::write(folders[0].join("data.txt"), "the cat and the hat ".repeat(400)).unwrap();
    let program = PathBuf::from(ballast([""; 0]).get_program());
    let mut args = train(&scratch.path("out"), &["data.validation_fraction=0", "steps=1"]);
    args.extend(["--model".into(), scratch.src().display().to_string(), "--data".into(), "data.txt".into()]);
    let ended = run(&mut mpirun_of_two([&folders[0], &folders[1]], [&program, &program], &args));
    assert_eq!(ended.code, Some(3), "{}", ended.stderr);
    assert!(ended.stderr.contains("rank 1: data.txt: cannot open"), "{}", ended.stderr);
    assert!(!ended.stderr.contains("has not answered"), "{}", ended.stderr);
}

#[test]
fn a_disk_that_is_full_for_one_rank_leaves_no_checkpoint_and_does_not_end_the_run() {
    let _turn = turn();
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    let settings = ["steps=3", "checkpoints.every=2", "cluster.shard=optimizer"];
    let mut command = mpirun(1, &train(&out, &settings));
    let other = ballast(["train"]);
    // Files of at most 7,000 KiB, which MPI's shared memory needs, with an error instead of a signal. The optimizer's
    // state has more.
    let limited = "trap '' XFSZ; ulimit -f 7000; exec \"$@\"";
    command
        .args([":", "-n", "1", "bash", "-c", limited, "rank"])
        .arg(other.get_program())
        .args(train(&out, &settings));
    // The run has finished, without a checkpoint.
    let ended = run(&mut command).exits(4);
    assert!(ended.stderr.contains("save failed: the checkpoint of step 3"), "{}", ended.stderr);
    let metrics = fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    assert!(metrics.contains("save failed") && metrics.contains("rank 1: "), "{metrics}");
    assert!(steps_saved(&out).is_empty(), "{:?}", steps_saved(&out));
    assert!(out.join("model/model.safetensors").is_file(), "the first rank writes the model");
}
