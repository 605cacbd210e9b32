//! Parses arbitrary lines as a run's metrics.jsonl. Every record survives a round trip, and any records give
//! a report.

#![no_main]

use ballast_train::metrics::MetricsEntry;
use ballast_train::report::{Report, html};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let records: Vec<MetricsEntry> =
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    for record in &records {
        let written = serde_json::to_string(record).expect("every float has a form");
        let again: MetricsEntry = serde_json::from_str(&written).expect("what was written can be read");
        assert_eq!(serde_json::to_string(&again).unwrap(), written);
    }
    let report = Report { records: &records, ..Report::default() };
    assert!(html(&report).ends_with("</html>\n"));
});
