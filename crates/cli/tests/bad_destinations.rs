//! Destinations that must not or cannot be written: the source is not touched, no partial output is left, and
//! only a checkpoint is replaced.

use std::fs;
use std::os::unix::fs::symlink;

use crate::common::{self, A_LOG, HYBRID_CONFIG, Scratch, f32_bytes, read_tensors, valid_file};

/// A small hybrid at `src`.
fn source() -> Scratch {
    let file = valid_file(&[(A_LOG, "F32", &[1], &f32_bytes(&[0.1])), ("x", "BF16", &[2], &[1, 2, 3, 4])]);
    let scratch = Scratch::with_model(&file);
    scratch.put("src/config.json", HYBRID_CONFIG);
    scratch
}

/// Another small checkpoint at `dst`.
fn with_destination() -> Scratch {
    let scratch = source();
    scratch.put("dst/model.safetensors", valid_file(&[("old", "U8", &[1], &[7])]));
    scratch
}

#[test]
fn an_existing_destination_is_not_replaced_without_force() {
    let scratch = with_destination();
    scratch.convert_refuses(&[], 2, &["dst exists; add --force to replace it"]);
    let repair = ["repair", "src", "dst", "--original", "src"];
    scratch.refuses(&repair, 2, &["dst exists; add --force to replace it"]);
}

#[test]
fn an_existing_file_is_not_replaced_without_force() {
    let scratch = source();
    scratch.put("out.safetensors", valid_file(&[("old", "U8", &[1], &[7])]));
    let convert = ["convert", "src", "out.safetensors"];
    scratch.refuses(&convert, 2, &["out.safetensors exists; add --force to replace it"]);
    scratch.run(&[&convert[..], &["--force"]].concat()).exits(0);
    assert!(read_tensors(&scratch.path("out.safetensors")).contains_key(A_LOG));
}

#[test]
fn an_existing_checkpoint_is_replaced_whole_with_force() {
    let scratch = with_destination();
    scratch.put("dst/old.txt", "goes with the old checkpoint");
    scratch.run(&["convert", "src", "dst", "--force"]).exits(0);
    assert_eq!(common::snapshot(&scratch.dst()).len(), 2, "model.safetensors and config.json");
    assert_eq!(common::snapshot(&scratch.path("")).len(), 6, "nothing but src and dst");
}

#[test]
fn an_empty_folder_is_filled_without_force() {
    let scratch = source();
    fs::create_dir(scratch.dst()).unwrap();
    scratch.run(&["convert", "src", "dst"]).exits(0);
    assert!(scratch.path("dst/model.safetensors").exists());
}

#[test]
fn a_destination_that_fails_to_be_replaced_stays_as_it_was() {
    let scratch = with_destination();
    scratch.put("src/model.safetensors", valid_file(&[(A_LOG, "F64", &[1], &[0; 8])]));
    scratch.convert_refuses(&["--force"], 3, &["src", A_LOG, "--narrow-f64"]);
    scratch.put("src/model.safetensors", valid_file(&[("x", "F32", &[1], &f32_bytes(&[1e9]))]));
    scratch.convert_refuses(&["--force", "--dtype", "f16"], 3, &["src", "\"x\"", "exceed the range of F16"]);
}

#[test]
fn the_source_is_no_destination() {
    let scratch = source();
    let words = ["source", "and destination", "overlap; choose another destination"];
    for destination in ["src", "src/", "./src", "src/../src"] {
        scratch.refuses(&["convert", "src", destination, "--force"], 2, &words);
    }
    scratch.refuses(&["repair", "src", "src", "--original", "src", "--force"], 2, &words);
}

#[test]
fn the_source_file_is_no_destination() {
    let scratch = source();
    let model = "src/model.safetensors";
    scratch.refuses(&["convert", model, model, "--force"], 2, &["overlap", "src/model.safetensors"]);
}

#[test]
fn the_source_under_another_name_is_no_destination() {
    let scratch = source();
    symlink(scratch.src(), scratch.path("link")).unwrap();
    scratch.refuses(&["convert", "src", "link", "--force"], 2, &["overlap"]);
    scratch.refuses(&["convert", "link", "src", "--force"], 2, &["overlap"]);
}

#[test]
fn a_folder_that_the_source_links_into_is_no_destination() {
    let scratch = source();
    fs::create_dir(scratch.path("links")).unwrap();
    symlink(scratch.path("src/model.safetensors"), scratch.path("links/model.safetensors")).unwrap();
    scratch.refuses(&["convert", "links", "src", "--force"], 2, &["overlap", "src/model.safetensors"]);
}

#[test]
fn the_original_of_a_repair_is_no_destination() {
    let scratch = with_destination();
    fs::rename(scratch.dst(), scratch.path("original")).unwrap();
    let args = ["repair", "src", "original", "--original", "original", "--force"];
    scratch.refuses(&args, 2, &["overlap", "original"]);
}

#[test]
fn a_destination_inside_the_source_is_refused() {
    let scratch = source();
    for destination in ["src/dst", "src/new/folders/dst", "src/out.safetensors"] {
        scratch.refuses(&["convert", "src", destination], 2, &["source", "and destination", "overlap"]);
    }
}

#[test]
fn a_destination_around_the_source_is_refused() {
    let scratch = Scratch::new();
    scratch.put("outer/model.safetensors", valid_file(&[]));
    scratch.put("outer/inner/model.safetensors", valid_file(&[("x", "U8", &[1], &[1])]));
    let args = ["convert", "outer/inner", "outer", "--force"];
    scratch.refuses(&args, 2, &["source", "and destination", "overlap"]);
    let args = ["convert", "outer/inner/model.safetensors", "outer/inner", "--force"];
    scratch.refuses(&args, 2, &["source", "and destination", "overlap"]);
}

#[test]
fn force_does_not_replace_a_folder_that_is_no_checkpoint() {
    let scratch = source();
    scratch.put("dst/thesis.tex", "years of work");
    let words = ["dst exists and does not look like a checkpoint; --force does not replace it"];
    scratch.convert_refuses(&["--force"], 2, &words);
}

#[test]
fn force_does_not_replace_a_file_that_is_no_checkpoint() {
    let scratch = source();
    scratch.put("dst", "a file");
    scratch.convert_refuses(&["--force"], 2, &["dst exists and does not look like a checkpoint"]);
}

#[test]
fn force_does_not_replace_a_checkpoint_with_foreign_folders_in_it() {
    let scratch = with_destination();
    scratch.put("dst/other-models/model.safetensors", valid_file(&[]));
    let words = ["dst contains the folder \"other-models\", which is not part of a checkpoint"];
    scratch.convert_refuses(&["--force"], 2, &words);
}

#[test]
fn folders_above_the_destination_are_made_and_go_again_when_the_conversion_fails() {
    let scratch = source();
    scratch.put("bad/model.safetensors", valid_file(&[("x", "F32", &[1], &f32_bytes(&[1e9]))]));
    let words = ["bad", "\"x\"", "exceed the range of F16"];
    scratch.refuses(&["convert", "bad", "new/folders/dst", "--dtype", "f16"], 3, &words);
    scratch.run(&["convert", "src", "new/folders/dst"]).exits(0);
    assert!(scratch.path("new/folders/dst/model.safetensors").exists());
}

#[test]
fn a_destination_below_a_file_is_refused() {
    let scratch = source();
    scratch.put("file", "");
    scratch.refuses(&["convert", "src", "file/dst"], 3, &["file", "Not a directory"]);
}

#[test]
fn a_destination_without_a_name_is_refused() {
    let scratch = source();
    for destination in ["..", "/", "nowhere/.."] {
        let words = [destination, "not a valid name for an output"];
        scratch.refuses(&["convert", "src", destination], 2, &words);
    }
}

#[test]
fn ranks_without_the_megatron_layout_are_refused() {
    let words = ["--tp 2 needs the megatron layout; add --layout megatron"];
    source().convert_refuses(&["--tp", "2"], 2, &words);
}

#[test]
fn an_impossible_number_of_ranks_is_refused() {
    for ranks in ["0", "65", "18446744073709551615"] {
        let words = [&format!("--tp must be 1 to 64, got {ranks}")[..]];
        source().convert_refuses(&["--layout", "megatron", "--tp", ranks], 2, &words);
    }
}

#[test]
fn a_dry_run_writes_nothing() {
    let scratch = source();
    let before = scratch.snapshot();
    scratch.run(&["convert", "src", "new/dst", "--dtype", "f32", "--dry-run"]).exits(0);
    scratch.run(&["repair", "src", "new/dst", "--original", "src", "--dry-run"]).exits(0);
    assert!(scratch.snapshot() == before);
}

#[test]
fn leftovers_of_a_run_that_died_are_removed_by_the_next() {
    let scratch = source();
    scratch.put(".dst.ballast-partial-999999999/model.safetensors", "half");
    scratch.put(".dst.ballast-partial-999999998-old/model.safetensors", "old");
    scratch.put(".other.ballast-partial-1/model.safetensors", "of another destination");
    scratch.run(&["convert", "src", "dst"]).exits(0);
    let hidden: Vec<_> =
        scratch.snapshot().into_keys().filter(|p| p.starts_with(".other.ballast-partial-1")).collect();
    assert_eq!(hidden.len(), 2);
    let all = scratch.snapshot();
    assert!(!all.keys().any(|p| p.to_string_lossy().contains(".dst.")), "{:?}", all.keys());
}

#[test]
fn a_folder_that_may_not_be_written_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let scratch = source();
    if common::permissions_do_not_bind(&scratch.path("")) {
        eprintln!("skipped: permissions do not bind this user");
        return;
    }
    fs::create_dir(scratch.path("locked")).unwrap();
    fs::set_permissions(scratch.path("locked"), fs::Permissions::from_mode(0o555)).unwrap();
    scratch.refuses(&["convert", "src", "locked/dst"], 3, &["locked", "cannot create: Permission denied"]);
}
