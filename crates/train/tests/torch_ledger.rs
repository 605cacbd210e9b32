//! The report of a run in PyTorch: `ballast.torch.Ledger` writes the files of a run of Ballast.

use std::path::Path;

use ballast_train::ledger::Ledger;
use ballast_train::metrics::{self, MetricsEntry};
use ballast_train::report::{Report, html, ledger_rows};

#[test]
fn the_files_of_a_run_in_torch_are_read_and_drawn() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/training/torch");
    let records = metrics::read(&folder.join("metrics.jsonl")).unwrap();
    let kinds: Vec<(&str, u64)> = (records.iter())
        .map(|record| match record {
            MetricsEntry::Step(step) => ("step", step.step),
            MetricsEntry::Evaluation(evaluation) => ("evaluation", evaluation.step),
            MetricsEntry::Event(event) => ("event", event.step),
        })
        .collect();
    let expected = [
        ("step", 1),
        ("step", 2),
        ("evaluation", 2),
        ("event", 3),
        ("event", 3),
        ("step", 4),
        ("evaluation", 4),
        ("step", 5),
        ("evaluation", 5),
    ];
    assert_eq!(kinds, expected);
    let text = std::fs::read_to_string(folder.join("ledger.json")).unwrap();
    let ledger: Ledger = serde_json::from_str(&text).unwrap();
    assert_eq!(ledger.summary(), "7 protected tensors: f32 for 4/4 steps");
    let report =
        Report { title: "torch", records: &records, ledger: ledger_rows(&ledger), ..Report::default() };
    let page = html(&report);
    for part in [
        "4 steps on 80 tokens",
        "linear attention",
        "model.layers.1.linear_attn.in_proj_a is the first site with non-finite values",
        "7 tensors, ",
    ] {
        assert!(page.contains(part), "{part}");
    }
    assert!(!page.contains("Accuracy"), "the run has none");
}
