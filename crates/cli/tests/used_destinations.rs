//! Destinations that change while a command runs: of two runs one succeeds, and no data of others is lost.

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;

use ballast_checkpoint::Checkpoint;
use ballast_checkpoint::convert::{ConvertOptions, execute, plan};
use ballast_checkpoint::repair::repair;
use ballast_checkpoint::synthetic::SyntheticModel;
use ballast_contract::Registry;
use ballast_files::ErrorKind;
use ballast_files::jobs::Observer;

use crate::common::{Scratch, ballast, on_small_disk, run, snapshot};

fn scratch_with_model() -> Scratch {
    let scratch = Scratch::new();
    fs::remove_dir(scratch.src()).unwrap();
    SyntheticModel::tiny().write(&scratch.src(), u64::MAX).unwrap();
    scratch
}

/// Calls a function after every piece of work.
struct Meanwhile<F: Fn() + Sync>(F);

impl<F: Fn() + Sync> Observer for Meanwhile<F> {
    fn advance(&self, _: u64) {
        (self.0)();
    }
}

#[test]
fn a_destination_that_appears_while_it_is_written_is_left_as_it_is() {
    for force in [false, true] {
        let scratch = scratch_with_model();
        let source = Arc::new(Checkpoint::open_consistent(&scratch.src()).unwrap());
        let policy = Registry::builtin().policy("strict").unwrap();
        let options = ConvertOptions { force, ..ConvertOptions::new(policy.clone()) };
        let others = Meanwhile(|| scratch.put("dst/model.safetensors", "of another"));
        let converted = execute(&source, plan(&source, &options).unwrap(), &scratch.dst(), &options, &others);
        let repaired = || {
            fs::remove_dir_all(scratch.dst()).unwrap();
            repair(&source, &source, Some(&scratch.dst()), &policy, force, &others).map(drop)
        };
        // One after the other: each begins without a destination.
        let errors = [converted.map(drop).unwrap_err(), repaired().unwrap_err()];
        for error in errors {
            assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
            assert!(error.to_string().contains("dst was created or filled by another process"), "{error}");
        }
        assert_eq!(fs::read(scratch.path("dst/model.safetensors")).unwrap(), b"of another");
        assert_eq!(fs::read_dir(scratch.path("")).unwrap().count(), 2, "only src and dst are there");
    }
}

#[test]
fn of_two_conversions_to_one_destination_exactly_one_succeeds() {
    for flags in [&[][..], &["--force"]] {
        for _ in 0..8 {
            let scratch = scratch_with_model();
            let start = || {
                let mut command = ballast([&["convert", "src", "dst"], flags].concat());
                command.current_dir(scratch.path("")).stdout(Stdio::null()).stderr(Stdio::piped());
                command.spawn().unwrap()
            };
            let runs = [start(), start()].map(|child| child.wait_with_output().unwrap());
            let mut codes = runs.iter().map(|run| run.status.code().unwrap()).collect::<Vec<_>>();
            codes.sort_unstable();
            // With --force, the later run may start after the first is done and replace its result.
            let expected = if flags.is_empty() { &[[0, 2]][..] } else { &[[0, 2], [0, 0]] };
            assert!(expected.iter().any(|expected| codes == expected), "{codes:?} {runs:?}");
            scratch.run(&["diff", "src", "dst"]).exits(0);
            assert_eq!(fs::read_dir(scratch.path("")).unwrap().count(), 2, "only src and dst are there");
        }
    }
}

#[test]
fn a_destination_with_a_name_of_240_or_255_bytes_is_written_and_replaced() {
    let scratch = scratch_with_model();
    for name in ["d".repeat(240), "e".repeat(255)] {
        scratch.run(&["convert", "src", &name]).exits(0);
        scratch.run(&["convert", "src", &name, "--force"]).exits(0);
        scratch.run(&["diff", "src", &name]).exits(0);
    }
    assert_eq!(fs::read_dir(scratch.path("")).unwrap().count(), 3);
}

#[test]
fn a_file_whose_name_is_not_utf_8_can_be_written() {
    use std::os::unix::ffi::OsStrExt;
    let scratch = scratch_with_model();
    let name = std::ffi::OsStr::from_bytes(b"m\xff.safetensors");
    let mut command = ballast([Path::new("convert"), Path::new("src"), Path::new(name)]);
    run(command.current_dir(scratch.path(""))).exits(0);
    assert!(scratch.path("").join(name).is_file());
}

#[test]
fn an_empty_mount_point_is_filled_and_one_with_a_checkpoint_is_refused() {
    let test = "used_destinations::an_empty_mount_point_is_filled_and_one_with_a_checkpoint_is_refused";
    on_small_disk(test, "size=64m", |disk| {
        let scratch = scratch_with_model();
        let (source, target) = (scratch.src(), disk);
        // Entries of a fresh ext4 volume, and leftovers of a run that died.
        fs::create_dir(disk.join("lost+found")).unwrap();
        let name = disk.file_name().unwrap().to_str().unwrap();
        let dead = disk.join(format!(".{name}.ballast-partial-999999999"));
        fs::create_dir_all(dead.join("new")).unwrap();
        let convert = [Path::new("convert"), &source, target];
        run(&mut ballast(convert)).exits(0);
        run(&mut ballast([Path::new("diff"), &source, target])).exits(0);
        let before = snapshot(disk);
        assert!(before.keys().all(|path| !path.to_string_lossy().contains("ballast-partial")), "{before:?}");
        run(&mut ballast(convert)).exits(2).says(&["exists; add --force"]);
        let forced = [&convert[..], &[Path::new("--force")]].concat();
        run(&mut ballast(forced)).exits(2).says(&["is a mount point", "empty it first"]);
        assert!(snapshot(disk) == before, "the checkpoint on it changed");
    });
}
