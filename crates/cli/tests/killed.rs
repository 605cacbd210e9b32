//! Conversions that are killed or interrupted at any time: the source is untouched, and the destination is
//! complete or missing.

use std::collections::hash_map::DefaultHasher;
use std::fs;
use std::hash::Hasher;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ballast_checkpoint::synthetic::SyntheticModel;

use crate::common::{self, Scratch, ballast};

/// Number of kills for each of the two kinds of destination.
const KILLS: usize = 40;

/// A conversion that keeps all values, copies nothing inside the kernel, and is slow.
const CHANGE: [&str; 6] = ["--layout", "nemo", "--dtype", "f32", "--threads", "1"];

/// Held by one test at a time: each keeps the disk busy.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A checkpoint of some 50 MB in several shards at `folder`.
fn write_model(folder: &Path, seed: u64) {
    let model = SyntheticModel {
        hidden_size: 512,
        intermediate_size: 1024,
        vocab_size: 32768,
        head_dim: 64,
        heads: 8,
        kv_heads: 2,
        linear_key_heads: 4,
        linear_value_heads: 8,
        linear_head_dim: 64,
        seed,
        ..SyntheticModel::tiny()
    };
    model.write(folder, 10_000_000).unwrap();
}

/// A scratch folder with a model at `src`.
fn scratch_with_model() -> Scratch {
    let scratch = Scratch::new();
    fs::remove_dir(scratch.src()).unwrap();
    write_model(&scratch.src(), 1);
    scratch
}

/// Returns a checksum of every name and byte below `folder`.
fn hash(folder: &Path) -> u64 {
    let mut hasher = DefaultHasher::new();
    for (path, content) in common::snapshot(folder) {
        hasher.write(path.as_os_str().as_encoded_bytes());
        hasher.write(&content);
    }
    hasher.finish()
}

fn start(scratch: &Scratch, flags: &[&str]) -> Child {
    let mut command = ballast([&["convert", "src", "dst"], &CHANGE[..], flags].concat());
    command.current_dir(scratch.path("")).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().unwrap()
}

/// Returns the bytes of a folder's files that have been written: shards get their length before their data.
fn written(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let bytes = |entry: fs::DirEntry| match entry.metadata() {
        Ok(found) if found.is_dir() => written(&entry.path()),
        Ok(found) => found.blocks() * 512,
        Err(_) => 0,
    };
    entries.map(bytes).sum()
}

/// Waits until a conversion has written this many bytes, or has ended.
fn wait_for_bytes(scratch: &Scratch, child: &mut Child, bytes: u64) {
    let partial = scratch.path(&format!(".dst.ballast-partial-{}", child.id()));
    while written(&partial) < bytes && child.try_wait().unwrap().is_none() {
        std::thread::sleep(Duration::from_micros(200));
    }
}

fn undisturbed(scratch: &Scratch, flags: &[&str]) {
    assert!(start(scratch, flags).wait().unwrap().success());
}

/// A moment of a conversion: so many bytes are written, and then so much time has passed.
#[derive(Clone, Copy, Debug)]
struct Moment(u64, Duration);

impl Moment {
    fn wait(self, scratch: &Scratch, child: &mut Child) {
        wait_for_bytes(scratch, child, self.0);
        std::thread::sleep(self.1);
    }
}

/// Returns the last moment of an undisturbed conversion, which reads everything back after the last byte; `dst`
/// exists afterwards.
fn last_moment(scratch: &Scratch) -> Moment {
    undisturbed(scratch, &[]);
    let bytes = written(&scratch.dst());
    let mut child = start(scratch, &["--force"]);
    wait_for_bytes(scratch, &mut child, bytes);
    let begun = Instant::now();
    assert!(child.wait().unwrap().success());
    Moment(bytes, begun.elapsed())
}

/// Returns `KILLS` moments in a fixed random order: two of three while data is written, the others up to slightly
/// after the end.
fn moments(last: Moment) -> impl Iterator<Item = Moment> {
    let mut state = 1u64;
    (0..KILLS).map(move |n| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let part = (state >> 11) as f64 / (1u64 << 53) as f64;
        if n % 3 < 2 {
            Moment((part * last.0 as f64) as u64, Duration::ZERO)
        } else {
            Moment(last.0, last.1.mul_f64(1.2 * part))
        }
    })
}

/// Returns leftovers of a conversion besides its destination.
fn leftovers(scratch: &Scratch) -> Vec<String> {
    let entries = fs::read_dir(scratch.path("")).unwrap().flatten();
    let names = entries.map(|e| e.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.contains(".ballast-partial-")).collect()
}

fn assert_equal_to_source(scratch: &Scratch) {
    let run = scratch.run(&["diff", "src", "dst"]).exits(0);
    assert!(run.stdout.contains("EQUAL"), "{}", run.stdout);
}

#[test]
fn a_killed_conversion_leaves_the_source_untouched_and_the_destination_whole_or_absent() {
    let _alone = alone();
    let scratch = scratch_with_model();
    let source = hash(&scratch.src());
    let last = last_moment(&scratch);
    assert_equal_to_source(&scratch);
    fs::remove_dir_all(scratch.dst()).unwrap();

    let (mut killed, mut died_writing, mut finished) = (0, 0, 0);
    for moment in moments(last) {
        let mut child = start(&scratch, &[]);
        moment.wait(&scratch, &mut child);
        child.kill().unwrap();
        killed += usize::from(child.wait().unwrap().signal() == Some(9));
        let own = format!(".dst.ballast-partial-{}", child.id());
        died_writing += usize::from(leftovers(&scratch).contains(&own));
        assert_eq!(hash(&scratch.src()), source, "the source changed, killed after {moment:?}");
        if scratch.dst().exists() {
            assert_equal_to_source(&scratch);
            fs::remove_dir_all(scratch.dst()).unwrap();
            finished += 1;
        }
    }
    eprintln!("{KILLS} runs: {killed} killed, {died_writing} while writing, {finished} finished");
    assert!(killed >= KILLS / 4 && died_writing >= KILLS / 8, "the moments do not cover the conversion");

    undisturbed(&scratch, &[]);
    assert_equal_to_source(&scratch);
    assert_eq!(leftovers(&scratch), Vec::<String>::new());
    assert_eq!(hash(&scratch.src()), source);
}

#[test]
fn a_killed_replacement_leaves_the_old_destination_or_the_new_one() {
    let _alone = alone();
    let scratch = scratch_with_model();
    let source = hash(&scratch.src());
    let last = last_moment(&scratch);
    let new = hash(&scratch.dst());
    assert_equal_to_source(&scratch);
    write_model(&scratch.path("old"), 2);
    let old = hash(&scratch.path("old"));
    assert_ne!(old, new);

    let restore_old = || {
        fs::remove_dir_all(scratch.dst()).unwrap();
        fs::create_dir(scratch.dst()).unwrap();
        for entry in fs::read_dir(scratch.path("old")).unwrap().flatten() {
            fs::hard_link(entry.path(), scratch.dst().join(entry.file_name())).unwrap();
        }
    };
    restore_old();
    let (mut killed, mut replaced) = (0, 0);
    for moment in moments(last) {
        let mut child = start(&scratch, &["--force"]);
        moment.wait(&scratch, &mut child);
        child.kill().unwrap();
        killed += usize::from(child.wait().unwrap().signal() == Some(9));
        assert_eq!(hash(&scratch.src()), source, "the source changed, killed after {moment:?}");
        let destination = hash(&scratch.dst());
        assert!(destination == old || destination == new, "a mixture, killed after {moment:?}");
        if destination == new {
            replaced += 1;
            restore_old();
        }
    }
    eprintln!("{KILLS} runs: {killed} killed, {replaced} replaced the destination");
    assert!(killed >= KILLS / 4, "the moments do not cover the conversion");

    undisturbed(&scratch, &["--force"]);
    assert_eq!(hash(&scratch.dst()), new);
    assert_eq!(leftovers(&scratch), Vec::<String>::new());
    assert_eq!(hash(&scratch.src()), source);
}

/// Sends a signal by the name that `kill` knows it by.
fn send(child: &Child, signal: &str) {
    let sent = Command::new("kill").arg(format!("-{signal}")).arg(child.id().to_string()).status();
    assert!(sent.unwrap().success());
}

/// Waits until a conversion starts to write; returns false if it ended before.
fn is_writing(scratch: &Scratch, child: &mut Child) -> bool {
    while leftovers(scratch).is_empty() {
        if child.try_wait().unwrap().is_some() {
            return false;
        }
    }
    true
}

/// Sends `signal` while a conversion writes; asserts that it stops with 130 and leaves nothing.
fn interrupt(signal: &str) {
    let _alone = alone();
    let scratch = scratch_with_model();
    let source = hash(&scratch.src());
    for _ in 0..20 {
        let mut child = start(&scratch, &[]);
        if is_writing(&scratch, &mut child) {
            send(&child, signal);
        }
        let status = child.wait().unwrap();
        assert_eq!(hash(&scratch.src()), source);
        assert_eq!(leftovers(&scratch), Vec::<String>::new());
        if status.success() {
            // The signal came too late.
            assert_equal_to_source(&scratch);
            fs::remove_dir_all(scratch.dst()).unwrap();
            continue;
        }
        assert_eq!(status.code(), Some(130));
        assert!(!scratch.dst().exists());
        return;
    }
    panic!("20 conversions ended before the signal arrived");
}

#[test]
fn an_interrupted_conversion_ends_with_130_and_leaves_nothing() {
    interrupt("INT");
}

#[test]
fn a_terminated_conversion_ends_with_130_and_leaves_nothing() {
    interrupt("TERM");
}

#[test]
fn a_shard_that_shrinks_under_a_conversion_is_an_error_and_no_signal() {
    let _alone = alone();
    for _ in 0..20 {
        let scratch = scratch_with_model();
        let mut child = start(&scratch, &[]);
        if !is_writing(&scratch, &mut child) {
            continue;
        }
        send(&child, "STOP");
        for entry in fs::read_dir(scratch.src()).unwrap().flatten() {
            if entry.path().extension().is_some_and(|e| e == "safetensors") {
                fs::File::options().write(true).open(entry.path()).unwrap().set_len(1000).unwrap();
            }
        }
        send(&child, "CONT");
        let status = child.wait().unwrap();
        assert_eq!(leftovers(&scratch), Vec::<String>::new());
        if !status.success() {
            assert_eq!(status.code(), Some(3));
            assert!(!scratch.dst().exists());
            return;
        }
    }
    panic!("20 conversions ended before their source shrank");
}
