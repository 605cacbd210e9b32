//! The dtypes of protected tensors in releases.
//!
//! A release may itself store a tensor below F32; then a file that has it so has lost nothing. The table is the embedded
//! `releases.toml`.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use serde::Deserialize;

use crate::Dtype;
use crate::pattern::wildcard_matches;

/// Models that were published alike.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Release {
    /// Patterns of `ORG/NAME`, with `*` for any characters.
    pub names: Vec<String>,
    /// dtype that is stored, by the id of the rule that protects the tensor.
    pub stored: BTreeMap<String, Dtype>,
    /// Evidence for the dtypes.
    pub source: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ReleasesFile {
    release: Vec<Release>,
}

impl Release {
    /// Returns all releases of the table.
    pub fn all() -> &'static [Release] {
        static ALL: OnceLock<Vec<Release>> = OnceLock::new();
        ALL.get_or_init(|| {
            let file = toml::from_str::<ReleasesFile>(include_str!("releases.toml"));
            file.expect("a test parses the embedded table").release
        })
    }

    /// Returns the release called `name`: `ORG/NAME`, or `NAME` alone.
    pub fn named(name: &str) -> Option<&'static Release> {
        let fits = |pattern: &str| {
            let alone = pattern.split_once('/').map_or(pattern, |(_, alone)| alone);
            wildcard_matches(if name.contains('/') { pattern } else { alone }, name)
        };
        Release::all().iter().find(|release| release.names.iter().any(|pattern| fits(pattern)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Registry;

    #[test]
    fn a_release_is_found_by_its_name_with_and_without_an_organization() {
        let stored = |name: &str| Release::named(name).map(|release| release.stored["gdn-a-log"]);
        assert_eq!(stored("Qwen/Qwen3.5-0.8B"), Some(Dtype::F32));
        assert_eq!(stored("Qwen3.5-27B-FP8"), Some(Dtype::F32));
        assert_eq!(stored("Qwen/Qwen3-Next-80B-A3B-Instruct"), Some(Dtype::Bf16));
        assert_eq!(stored("somebody/Qwen3.5-0.8B"), None);
        assert_eq!(stored("Qwen3"), None);
        assert_eq!(stored(""), None);
    }

    #[test]
    fn every_row_names_rules_of_the_table() {
        for release in Release::all() {
            assert!(!release.names.is_empty() && !release.source.is_empty());
            for rule in release.stored.keys() {
                assert!(Registry::builtin().rules.iter().any(|r| &r.id == rule), "{rule}");
            }
        }
    }
}
