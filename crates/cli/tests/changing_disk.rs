//! A disk that is too small, fills up during a write, or has a shard that shrinks: an ordinary error.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ballast_checkpoint::Checkpoint;
use ballast_checkpoint::audit::audit;
use ballast_checkpoint::convert::{ConvertOptions, execute, plan};
use ballast_checkpoint::diff::diff;
use ballast_checkpoint::synthetic::SyntheticModel;
use ballast_contract::{Dtype, Registry};
use ballast_files::jobs::{Observer, Silent};
use ballast_files::{Error, ErrorKind};

use crate::common::{Scratch, ballast, on_small_disk, run, snapshot};

/// A checkpoint of some 3 MB in one shard at `src`.
fn scratch_with_model() -> Scratch {
    let scratch = Scratch::new();
    fs::remove_dir(scratch.src()).unwrap();
    let model = SyntheticModel { vocab_size: 16384, ..SyntheticModel::tiny() };
    model.write(&scratch.src(), u64::MAX).unwrap();
    scratch
}

fn names_on(disk: &Path) -> Vec<PathBuf> {
    snapshot(disk).into_keys().collect()
}

#[test]
fn a_disk_that_is_too_small_is_refused_before_anything_is_written() {
    on_small_disk(
        "changing_disk::a_disk_that_is_too_small_is_refused_before_anything_is_written",
        "size=1m",
        |disk| {
            let scratch = scratch_with_model();
            let before = scratch.snapshot();
            let target = disk.join("dst");
            let words =
                ["/dst: not enough disk space: ", " needed, 1.0 MiB available", "nothing was written"];
            let (source, target) = (scratch.src(), target.as_path());
            run(&mut ballast([Path::new("convert"), &source, target])).exits(4).says(&words);
            let repair = [Path::new("repair"), &source, target, Path::new("--original"), &source];
            run(&mut ballast(repair)).exits(4).says(&words);
            assert_eq!(names_on(disk), Vec::<PathBuf>::new());
            assert!(scratch.snapshot() == before, "the source changed");
        },
    );
}

#[test]
fn a_disk_that_is_too_small_keeps_the_old_destination() {
    on_small_disk("changing_disk::a_disk_that_is_too_small_keeps_the_old_destination", "size=1m", |disk| {
        let scratch = scratch_with_model();
        SyntheticModel::tiny().write(&disk.join("dst"), u64::MAX).unwrap();
        let before = snapshot(disk);
        let target = disk.join("dst");
        let args = [Path::new("convert"), &scratch.src(), &target, Path::new("--force")];
        run(&mut ballast(args)).exits(4).says(&["/dst: not enough disk space"]);
        assert!(snapshot(disk) == before, "the old destination changed");
    });
}

#[test]
fn a_disk_without_room_for_another_file_is_an_error_that_leaves_nothing() {
    // For the disk's own folder, the hidden folder, config.json, and two shards.
    let size = "size=64m,nr_inodes=5";
    on_small_disk(
        "changing_disk::a_disk_without_room_for_another_file_is_an_error_that_leaves_nothing",
        size,
        |disk| {
            let scratch = scratch_with_model();
            let before = scratch.snapshot();
            let (source, target) = (scratch.src(), disk.join("dst"));
            let args =
                ["convert", source.to_str().unwrap(), target.to_str().unwrap(), "--max-shard-size", "100KB"];
            let words = ["/model-0000", "-of-", ".safetensors: cannot create: No space left on device"];
            run(&mut ballast(args)).exits(4).says(&words);
            assert_eq!(names_on(disk), Vec::<PathBuf>::new());
            assert!(scratch.snapshot() == before, "the source changed");
        },
    );
}

#[test]
fn a_disk_without_room_for_the_other_files_is_an_error_that_leaves_nothing() {
    on_small_disk(
        "changing_disk::a_disk_without_room_for_the_other_files_is_an_error_that_leaves_nothing",
        "size=4m",
        |disk| {
            let scratch = scratch_with_model();
            scratch.put("src/tokenizer.json", vec![b' '; 4 << 20]);
            let target = disk.join("dst");
            let args = [Path::new("convert"), &scratch.src(), &target];
            run(&mut ballast(args)).exits(4).says(&["dst: not enough disk space", "nothing was written"]);
            assert_eq!(names_on(disk), Vec::<PathBuf>::new());
        },
    );
}

/// Calls a function once, after the first piece of work.
struct AfterTheFirstPiece<F: Fn() + Sync> {
    done: AtomicBool,
    action: F,
}

impl<F: Fn() + Sync> AfterTheFirstPiece<F> {
    fn new(action: F) -> Self {
        AfterTheFirstPiece { done: AtomicBool::new(false), action }
    }
}

impl<F: Fn() + Sync> Observer for AfterTheFirstPiece<F> {
    fn advance(&self, _: u64) {
        if !self.done.swap(true, Ordering::SeqCst) {
            (self.action)();
        }
    }
}

fn options(dtype: Option<Dtype>) -> ConvertOptions {
    ConvertOptions { dtype, ..ConvertOptions::new(Registry::builtin().policy("strict").unwrap()) }
}

/// A conversion on one thread, so that the first piece is not the last.
fn convert(
    source: &Path,
    target: &Path,
    dtype: Option<Dtype>,
    observer: &(dyn Observer + Sync),
) -> Result<(), Error> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    pool.install(|| {
        let source = Arc::new(Checkpoint::open_consistent(source)?);
        let options = options(dtype);
        execute(&source, plan(&source, &options)?, target, &options, observer).map(|_| ())
    })
}

#[test]
fn a_disk_that_fills_up_while_it_is_written_is_an_error_that_leaves_nothing() {
    on_small_disk(
        "changing_disk::a_disk_that_fills_up_while_it_is_written_is_an_error_that_leaves_nothing",
        "size=64m",
        |disk| {
            for dtype in [None, Some(Dtype::F32)] {
                // Two shards: a copy inside the kernel takes one piece for each.
                let folder = tempfile::tempdir().unwrap();
                let source = folder.path().join("src");
                SyntheticModel { vocab_size: 65536, ..SyntheticModel::tiny() }
                    .write(&source, 8 << 20)
                    .unwrap();
                let before = snapshot(&source);
                let filler = disk.join("filler");
                let fill = AfterTheFirstPiece::new(|| {
                    let mut file = File::create_new(&filler).unwrap();
                    while file.write(&[1; 4096]).is_ok_and(|n| n > 0) {}
                });
                let error = convert(&source, &disk.join("dst"), dtype, &fill).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Space, "{error}");
                assert!(error.to_string().contains("cannot write: No space left on device"), "{error}");
                assert_eq!(names_on(disk), [PathBuf::from("filler")]);
                assert!(snapshot(&source) == before, "the source changed");
                fs::remove_file(&filler).unwrap();
            }
        },
    );
}

/// Cuts the one shard of `src` down to its first `bytes` bytes.
fn shrink(scratch: &Scratch, bytes: u64) {
    let shard = scratch.path("src/model.safetensors");
    File::options().write(true).open(shard).unwrap().set_len(bytes).unwrap();
}

#[track_caller]
fn assert_shrunk(error: Error) {
    let message = error.to_string();
    assert_eq!(error.kind(), ErrorKind::Input, "{message}");
    assert!(
        message.contains("src/model.safetensors, byte ") && message.contains("has it been changed?"),
        "{message}"
    );
}

#[test]
fn a_shard_that_shrank_after_it_was_opened_is_an_error_of_the_audit() {
    let scratch = scratch_with_model();
    let checkpoint = Checkpoint::open(&scratch.src()).unwrap();
    shrink(&scratch, 1 << 20);
    let registry = Registry::builtin();
    assert_shrunk(audit(&checkpoint, registry, &registry.policy("strict").unwrap(), &Silent).unwrap_err());
}

#[test]
fn a_shard_that_shrank_after_it_was_opened_is_an_error_of_the_diff() {
    let scratch = scratch_with_model();
    let checkpoint = Arc::new(Checkpoint::open(&scratch.src()).unwrap());
    shrink(&scratch, 1 << 20);
    assert_shrunk(diff(&checkpoint, &checkpoint, &Silent).unwrap_err());
}

#[test]
fn a_shard_that_shrinks_while_it_is_converted_is_an_error_that_leaves_nothing() {
    for dtype in [None, Some(Dtype::F32)] {
        let scratch = scratch_with_model();
        let checkpoint = Arc::new(Checkpoint::open(&scratch.src()).unwrap());
        let options = options(dtype);
        let plan = plan(&checkpoint, &options).unwrap();
        // Before the first piece for copies, which may all be one piece.
        if dtype.is_none() {
            shrink(&scratch, 1 << 20);
        }
        let observer = AfterTheFirstPiece::new(|| shrink(&scratch, 1 << 20));
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        let result = pool.install(|| execute(&checkpoint, plan, &scratch.dst(), &options, &observer));
        assert_shrunk(result.err().unwrap());
        assert_eq!(fs::read_dir(scratch.path("")).unwrap().count(), 1, "only src is there");
    }
}

#[test]
fn a_shard_that_was_touched_while_it_was_converted_is_an_error_that_leaves_nothing() {
    let scratch = scratch_with_model();
    let shard = scratch.path("src/model.safetensors");
    let observer = AfterTheFirstPiece::new(|| {
        let file = File::options().write(true).open(&shard).unwrap();
        file.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
    });
    let error = convert(&scratch.src(), &scratch.dst(), None, &observer).unwrap_err().to_string();
    assert!(error.contains("src/model.safetensors: the file was changed while it was read"), "{error}");
    assert_eq!(fs::read_dir(scratch.path("")).unwrap().count(), 1, "only src is there");
}

#[test]
fn a_file_beyond_the_allowed_size_is_an_error_that_leaves_nothing() {
    let scratch = scratch_with_model();
    let before = scratch.snapshot();
    let words = ["model.safetensors: cannot ", "File too large"];
    scratch.run_under("-f 64", &["convert", "src", "dst", "--dtype", "f32"]).exits(4).says(&words);
    assert!(scratch.snapshot() == before, "something was left");
}

#[test]
fn threads_that_cannot_start_are_an_error() {
    let scratch = scratch_with_model();
    for command in [&["audit", "src"][..], &["convert", "src", "dst", "--force"]] {
        // Every thread takes a stack of 2 MiB of address space.
        let limits = (30..100).step_by(10).map(|mebibytes| format!("-v {}", mebibytes << 10));
        let runs = limits.map(|limit| scratch.run_under(&limit, &[command, &["--threads", "16"]].concat()));
        let refused: Vec<_> = runs.filter(|run| run.stderr.contains("cannot start a thread")).collect();
        assert!(!refused.is_empty(), "{command:?} started its threads under every limit");
        for run in refused {
            run.exits(4).says(&["--threads", "ulimit -v"]);
        }
    }
}

#[test]
fn every_limit_of_memory_is_success_or_exit_code_4() {
    let scratch = scratch_with_model();
    let (mut done, mut refused) = (0, 0);
    // With less, the loader cannot map the program.
    let starts = |mebibytes: &u32| {
        let run = scratch.run_under(&format!("-v {}", mebibytes << 10), &["--version"]);
        [0, 4].map(Some).contains(&run.code)
    };
    let least = (20..100).find(starts).expect("the program starts in 100 MiB");
    for mebibytes in (least..30).chain((least.max(30)..270).step_by(15)) {
        let out = format!("run-{mebibytes}");
        for args in [&["train", "--steps", "1", "--out", &out][..], &["convert", "src", "dst", "--force"]] {
            let args = [args, &["--threads", "2"]].concat();
            let run = scratch.run_under(&format!("-v {}", mebibytes << 10), &args);
            let explained =
                ["not enough memory", "cannot start a thread"].iter().any(|why| run.stderr.contains(why));
            match run.code {
                Some(0) => done += 1,
                Some(4) if explained => refused += 1,
                other => panic!("{args:?} with {mebibytes} MiB: {other:?}: {}", run.stderr),
            }
        }
    }
    assert!(done > 2 && refused > 2, "{done} done, {refused} refused");
}
