//! `ballast report`: the page of a run in PyTorch, and what it refuses.

use std::path::Path;

use crate::common::Scratch;

fn run_in_torch(scratch: &Scratch) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/training/torch");
    std::fs::create_dir_all(scratch.path("run")).unwrap();
    for name in ["metrics.jsonl", "ledger.json"] {
        std::fs::copy(source.join(name), scratch.path("run").join(name)).unwrap();
    }
}

#[test]
fn the_metrics_of_a_run_in_torch_become_a_page_and_an_existing_page_is_kept() {
    let scratch = Scratch::new();
    run_in_torch(&scratch);
    let drawn = scratch.run(&["report", "run", "--json"]).exits(0).json();
    assert_eq!((drawn["entries"].as_u64(), drawn["protected"].as_u64()), (Some(9), Some(7)));
    let page = std::fs::read_to_string(scratch.path("run/report.html")).unwrap();
    for part in ["4 steps on 80 tokens", "is the first site with non-finite values", "7 tensors, "] {
        assert!(page.contains(part), "{part}");
    }
    scratch.run(&["report", "run"]).exits(2).says(&["report.html", "--force"]);
    scratch.run(&["report", "run", "--out", "other.html"]).exits(0);
    std::fs::write(scratch.path("run/report.html"), "old").unwrap();
    scratch.run(&["report", "run", "--force"]).exits(0);
    assert_eq!(std::fs::read_to_string(scratch.path("run/report.html")).unwrap(), page);
}

#[test]
fn missing_metrics_and_a_malformed_ledger_are_refused_with_the_file() {
    let scratch = Scratch::new();
    scratch.run(&["report", "nowhere"]).exits(3).says(&["metrics.jsonl"]);
    run_in_torch(&scratch);
    std::fs::write(scratch.path("run/ledger.json"), "{").unwrap();
    scratch.run(&["report", "run"]).exits(3).says(&["ledger.json", "line 1"]);
    assert!(!scratch.path("run/report.html").exists());
}
