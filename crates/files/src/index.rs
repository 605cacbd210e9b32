//! The index `model.safetensors.index.json`: the shard of every tensor.

use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::header::UniqueMap;

/// Suffix of the name of an index file.
pub const INDEX_SUFFIX: &str = ".safetensors.index.json";

/// A parsed index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Index {
    /// `metadata.total_size`, if present.
    pub total_size: Option<u64>,
    /// Tensors and their shards, in the file's order.
    pub weight_map: Vec<(String, String)>,
}

/// A disagreement between an index and its shards.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "issue", rename_all = "kebab-case")]
#[non_exhaustive]
pub enum IndexIssue {
    /// The index places a tensor in a shard that does not hold it.
    NotInShard {
        /// The tensor.
        tensor: String,
        /// The shard that the index names.
        shard: String,
    },
    /// A shard holds a tensor that the index does not place there.
    NotInIndex {
        /// The tensor.
        tensor: String,
        /// The shard that holds it.
        shard: String,
    },
    /// Two shards hold the same tensor.
    Duplicate {
        /// The tensor.
        tensor: String,
        /// One shard.
        shard: String,
        /// The other.
        other: String,
    },
    /// `total_size` is not the sum of the tensors' bytes.
    TotalSize {
        /// Value in the index.
        stated: u64,
        /// Sum over the shards.
        actual: u64,
    },
}

impl fmt::Display for IndexIssue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            IndexIssue::NotInShard { tensor, shard } => {
                write!(f, "the index places {tensor:?} in {shard}, which does not hold it")
            }
            IndexIssue::NotInIndex { tensor, shard } => {
                write!(f, "{shard} holds {tensor:?}, which the index does not place there")
            }
            IndexIssue::Duplicate { tensor, shard, other } => {
                write!(f, "{tensor:?} is in both {shard} and {other}")
            }
            IndexIssue::TotalSize { stated, actual } => {
                write!(f, "total_size is {stated}, but the tensors have {actual} bytes")
            }
        }
    }
}

#[derive(Deserialize)]
struct RawIndex {
    #[serde(default)]
    metadata: Option<serde_json::Map<String, serde_json::Value>>,
    weight_map: UniqueMap,
}

impl Index {
    /// Parses the index in `text`; `file` is for messages.
    pub fn parse(file: &Path, text: &[u8]) -> Result<Index> {
        let fail = |problem: String| Error::Index { file: file.into(), problem };
        let raw: RawIndex =
            serde_json::from_slice(text).map_err(|e| fail(format!("not a valid index: {e}")))?;
        if let Some((tensor, shard)) = raw.weight_map.0.iter().find(|(_, shard)| !is_plain_file_name(shard)) {
            return Err(fail(format!(
                "the shard {shard:?} (tensor {tensor:?}) is not a plain file name; shards must be in the folder of the index"
            )));
        }
        if raw.weight_map.0.is_empty() {
            return Err(fail("weight_map is empty".into()));
        }
        let total_size = match raw.metadata.as_ref().and_then(|m| m.get("total_size")) {
            // Some writers store it as a float.
            Some(value) => Some(whole_number(value).ok_or_else(|| {
                fail(format!("metadata.total_size is {value}, not a whole number of bytes"))
            })?),
            None => None,
        };
        Ok(Index { total_size, weight_map: raw.weight_map.0 })
    }

    /// Returns the text of the index file.
    pub fn to_text(&self) -> String {
        let weight_map: serde_json::Map<_, _> =
            self.weight_map.iter().map(|(tensor, shard)| (tensor.clone(), shard.clone().into())).collect();
        let metadata = match self.total_size {
            Some(total_size) => serde_json::json!({ "total_size": total_size }),
            None => serde_json::json!({}),
        };
        let index = serde_json::json!({ "metadata": metadata, "weight_map": weight_map });
        format!("{index:#}\n")
    }

    /// Returns the names of the shards, sorted, without duplicates.
    pub fn shards(&self) -> Vec<&str> {
        let mut shards: Vec<&str> = self.weight_map.iter().map(|(_, shard)| shard.as_str()).collect();
        shards.sort_unstable();
        shards.dedup();
        shards
    }
}

fn whole_number(value: &serde_json::Value) -> Option<u64> {
    let float = |v: f64| (v >= 0.0 && v.fract() == 0.0 && v < 9e15).then_some(v as u64);
    value.as_u64().or_else(|| float(value.as_f64()?))
}

fn is_plain_file_name(name: &str) -> bool {
    !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\\', '\0'])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Index> {
        Index::parse(Path::new("model.safetensors.index.json"), text.as_bytes())
    }

    #[test]
    fn an_index_survives_writing_and_reading() {
        let weight_map = vec![("b".into(), "2.safetensors".into()), ("a".into(), "1.safetensors".into())];
        let index = Index { total_size: Some(12), weight_map };
        assert_eq!(parse(&index.to_text()).unwrap(), index);
        assert_eq!(index.shards(), ["1.safetensors", "2.safetensors"]);
        assert_eq!(
            parse(r#"{"metadata":{"total_size":1e3},"weight_map":{"a":"b"}}"#).unwrap().total_size,
            Some(1000)
        );
        let sizeless = parse(r#"{"weight_map":{"a":"b"}}"#).unwrap();
        assert_eq!(sizeless.total_size, None);
        assert_eq!(parse(&sizeless.to_text()).unwrap(), sizeless);
    }

    #[test]
    fn a_bad_index_says_what_is_wrong() {
        for (text, words) in [
            ("", "not a valid index"),
            ("[]", "not a valid index"),
            ("{}", "weight_map"),
            (r#"{"weight_map":{}}"#, "empty"),
            (r#"{"weight_map":{"a":"x","a":"y"}}"#, "twice"),
            (r#"{"weight_map":{"a":3}}"#, "not a valid index"),
            (r#"{"weight_map":{"a":"../x"}}"#, "plain file name"),
            (r#"{"weight_map":{"a":"/etc/passwd"}}"#, "plain file name"),
            (r#"{"weight_map":{"a":".."}}"#, "plain file name"),
            (r#"{"metadata":{"total_size":"big"},"weight_map":{"a":"b"}}"#, "total_size"),
            (r#"{"metadata":{"total_size":-1},"weight_map":{"a":"b"}}"#, "total_size"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(
                error.contains(words) && error.contains("model.safetensors.index.json"),
                "{text}: {error}"
            );
        }
    }
}
