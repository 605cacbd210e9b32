//! Unusual but valid input: it survives a conversion unchanged and is printed safely.

use crate::common::{self, HYBRID_CONFIG, Scratch, read_tensors, valid_file};

/// Runs a command that must succeed with 60 seconds of processor time, after which the system kills it: a hundred times
/// what it needs, far less than a quadratic algorithm takes. Other processes do not count.
#[track_caller]
fn quick(scratch: &Scratch, args: &[&str]) {
    scratch.run_under("-t 60", args).exits(0);
}

/// All commands that read or write `src`.
#[track_caller]
fn every_command_is_quick(scratch: &Scratch) {
    quick(scratch, &["inspect", "src"]);
    quick(scratch, &["audit", "src"]);
    quick(scratch, &["convert", "src", "dst"]);
    quick(scratch, &["diff", "src", "dst"]);
    quick(scratch, &["convert", "src", "wide", "--dtype", "f32"]);
    quick(scratch, &["repair", "dst", "repaired", "--original", "src"]);
}

#[test]
fn a_hundred_thousand_tensors_are_handled_in_reasonable_time() {
    let names: Vec<String> = (0..100_000).map(|i| format!("model.tiny_{i:06}.weight")).collect();
    let data: Vec<[u8; 2]> = (0..100_000u32).map(|i| [(i % 251) as u8, 60]).collect();
    let tensors: Vec<(&str, &str, &[u64], &[u8])> =
        names.iter().zip(&data).map(|(n, d)| (n.as_str(), "BF16", &[1u64][..], &d[..])).collect();
    let scratch = Scratch::with_model(&valid_file(&tensors));
    every_command_is_quick(&scratch);
    let (source, copy) = ["src/model.safetensors", "dst/model.safetensors"]
        .map(|file| read_tensors(&scratch.path(file)))
        .into();
    assert!(source == copy && copy.len() == 100_000);
}

#[test]
fn a_hundred_thousand_metadata_entries_are_handled_in_reasonable_time() {
    let entries: Vec<String> = (0..100_000).map(|i| format!("\"k{i}\":\"v\"")).collect();
    let header = format!("{{\"__metadata__\":{{{}}}}}", entries.join(","));
    every_command_is_quick(&Scratch::with_model(&common::raw_file(header, 0)));
}

/// Names that could be mistaken for a path, a pattern, markup or a terminal command.
const ODD_NAMES: [&str; 14] = [
    "../../outside",
    "/etc/passwd",
    "..",
    "",
    " ",
    "a b\tc",
    "line\nPASSED: 0 violations",
    "\u{1b}[31mred\u{1b}]0;title\u{7}",
    "\u{9b}31mred",
    "back\u{8}\r\u{7f}",
    "\u{202e}desrever",
    "\"quoted\\\"",
    "{}%s$(true)`true`*",
    "\u{e9}\u{4e2d}\u{1f980}",
];

/// Returns true if printing `text` could do more than show characters on lines.
fn is_harmless(text: &str) -> bool {
    !text.chars().any(|c| {
        c.is_control() && c != '\n' || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    })
}

fn with_odd_names() -> Scratch {
    let data: Vec<[u8; 4]> = (0..ODD_NAMES.len()).map(|i| (i as f32 + 0.5).to_le_bytes()).collect();
    let tensors: Vec<(&str, &str, &[u64], &[u8])> =
        ODD_NAMES.iter().zip(&data).map(|(n, d)| (*n, "F32", &[1u64][..], &d[..])).collect();
    Scratch::with_model(&valid_file(&tensors))
}

#[test]
fn odd_names_are_carried_through_a_conversion_unharmed() {
    let scratch = with_odd_names();
    scratch.converts(&["--max-shard-size", "16"]);
    scratch.run(&["convert", "dst", "back"]).exits(0);
    let (source, back) = ["src/model.safetensors", "back/model.safetensors"]
        .map(|file| read_tensors(&scratch.path(file)))
        .into();
    assert_eq!(source, back);
    assert_eq!(source.len(), ODD_NAMES.len());
    scratch.run(&["diff", "src", "dst"]).exits(0);
}

#[test]
fn odd_names_are_printed_without_harm() {
    let scratch = with_odd_names();
    let infinite = f32::INFINITY.to_le_bytes();
    let bad: Vec<(&str, &str, &[u64], &[u8])> =
        ODD_NAMES.iter().map(|n| (*n, "F32", &[1u64][..], &infinite[..])).collect();
    scratch.put("bad/model.safetensors", valid_file(&bad));
    for args in [
        &["inspect", "src", "--tensors"][..],
        &["audit", "src"],
        &["audit", "bad"],
        &["convert", "src", "dst", "--dtype", "bf16"],
        &["convert", "src", "other", "--dtype", "bf16", "--dry-run"],
        &["diff", "src", "bad", "--all"],
    ] {
        let run = scratch.run(args);
        assert!(is_harmless(&run.stdout) && is_harmless(&run.stderr), "{args:?}: {:?}", run.stdout);
    }
}

#[test]
fn an_error_about_an_odd_name_is_printed_without_harm() {
    for name in ODD_NAMES {
        let bad = valid_file(&[(name, "F13", &[1], &[0])]);
        let run = Scratch::with_model(&bad).refuses(&["inspect", "src"], 3, &["unknown dtype \"F13\""]);
        assert!(is_harmless(&run.stderr), "{:?}", run.stderr);
        let overflow = valid_file(&[(name, "F32", &[1], &1e9f32.to_le_bytes())]);
        let scratch = Scratch::with_model(&overflow);
        let run = scratch.convert_refuses(&["--dtype", "f16"], 3, &["exceed the range of F16"]);
        assert!(is_harmless(&run.stderr), "{:?}", run.stderr);
    }
}

#[test]
fn a_name_cannot_forge_a_line_of_the_output() {
    let forged = "x\nPASSED: 0 violations, 0 warnings";
    let infinite = f32::INFINITY.to_le_bytes();
    let scratch = Scratch::with_model(&valid_file(&[(forged, "F32", &[1], &infinite)]));
    let run = scratch.run(&["audit", "src"]).exits(1);
    assert!(
        !run.stdout.lines().any(|line| line.contains("PASSED") && !line.contains("\\n")),
        "{}",
        run.stdout
    );
    assert!(run.stdout.contains("FAILED: 1 violation, 0 warnings"));
}

#[test]
fn odd_text_in_index_and_config_is_printed_without_harm() {
    let odd = "\u{1b}[2J\u{9b}1m\nx";
    let scratch = Scratch::with_model(&valid_file(&[("a", "U8", &[1], &[0])]));
    scratch.put("src/config.json", serde_json::json!({ "architectures": [odd] }).to_string());
    let run = scratch.run(&["inspect", "src"]).exits(0);
    assert!(is_harmless(&run.stdout), "{:?}", run.stdout);
    assert!(is_harmless(&scratch.run(&["audit", "src"]).exits(0).stdout));
    let index = serde_json::json!({ "weight_map": { "a": odd } }).to_string();
    scratch.put("src/model.safetensors.index.json", index);
    let run = scratch.refuses(&["inspect", "src"], 3, &["not found"]);
    assert!(is_harmless(&run.stderr), "{:?}", run.stderr);
}

#[test]
fn tensors_without_elements_survive_a_conversion() {
    let scratch = Scratch::with_model(&valid_file(&[
        ("empty", "F32", &[0], b""),
        ("flat", "BF16", &[3, 0, 2], b""),
        ("half", "F4", &[0, 3], b""),
        ("full", "BF16", &[2], &[1, 2, 3, 4]),
        ("scalar", "F32", &[], &[0, 0, 128, 63]),
        ("last", "I64", &[0, 7], b""),
        ("vast", "I64", &[0, 1 << 40, 1 << 40], b""),
    ]));
    scratch.converts(&[]);
    let (source, copy) = ["src/model.safetensors", "dst/model.safetensors"]
        .map(|file| read_tensors(&scratch.path(file)))
        .into();
    assert_eq!(source, copy);
    scratch.run(&["diff", "src", "dst"]).exits(0);
    scratch.run(&["audit", "dst"]).exits(0);
    scratch.run(&["convert", "src", "wide", "--dtype", "f32"]).exits(0);
    assert_eq!(read_tensors(&scratch.path("wide/model.safetensors"))["flat"].1, [3, 0, 2]);
}

#[test]
fn a_checkpoint_of_empty_protected_tensors_survives_every_command() {
    let a_log = common::A_LOG;
    let scratch = Scratch::with_model(&valid_file(&[(a_log, "BF16", &[0], b"")]));
    scratch.put("src/config.json", HYBRID_CONFIG);
    scratch.converts(&[]);
    scratch.run(&["convert", "src", "nemo", "--layout", "nemo"]).exits(0);
    scratch.run(&["diff", "src", "dst"]).exits(0);
    scratch.run(&["inspect", "dst"]).exits(0);
    scratch.run(&["repair", "src", "repaired", "--original", "dst"]).exits(0);
    assert_eq!(read_tensors(&scratch.path("dst/model.safetensors"))[a_log].0, "F32");
}

#[test]
fn a_file_without_tensors_survives_a_conversion() {
    let scratch = Scratch::with_model(&valid_file(&[]));
    scratch.converts(&[]);
    assert!(read_tensors(&scratch.path("dst/model.safetensors")).is_empty());
}
