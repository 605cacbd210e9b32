//! Signs that a folder without an index does not have all shards of its checkpoint: the numbers in the files'
//! names, and the layers of config.json.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;

/// Returns the name before the number, the number and the count of `NAME-00001-of-00002.safetensors`.
fn numbered(name: &Path) -> Option<(String, u64, u64)> {
    let name = name.to_str()?.strip_suffix(".safetensors")?;
    let (rest, count) = name.rsplit_once("-of-")?;
    let (prefix, number) = rest.rsplit_once('-')?;
    Some((prefix.into(), number.parse().ok()?, count.parse().ok()?))
}

/// Returns the problem if these are not all files that their own names count.
pub(crate) fn missing_file(names: &[PathBuf]) -> Option<String> {
    let mut found: BTreeMap<(String, u64), Vec<u64>> = BTreeMap::new();
    for (prefix, number, count) in names.iter().filter_map(|name| numbered(name)) {
        found.entry((prefix, count)).or_default().push(number);
    }
    found.into_iter().find_map(|((prefix, count), mut numbers)| {
        numbers.sort_unstable();
        // Some writers count from 0.
        let first = numbers.first().copied().unwrap_or(1).min(1);
        let expected = (first..).zip(&numbers).find(|(expected, number)| expected != *number);
        let missing = expected.map_or(first + numbers.len() as u64, |(expected, _)| expected);
        (numbers.len() as u64 != count).then(|| {
            format!(
                "no index, and {prefix}-{missing:05}-of-{count:05}.safetensors not found ({} of {count} shards are \
                 there); copy all shards and the index",
                numbers.len()
            )
        })
    })
}

/// Returns the problem if tensors are numbered by layer, and a layer that config.json counts has none.
pub(crate) fn missing_layer<'a>(
    config: Option<&Value>,
    names: impl Iterator<Item = &'a str>,
) -> Option<String> {
    let config = config?;
    let count = config.get("text_config").unwrap_or(config).get("num_hidden_layers")?.as_u64()?;
    let layer = |name: &str| -> Option<u64> {
        let (_, rest) = name.split_once("layers.")?;
        rest.split_once('.')?.0.parse().ok()
    };
    let found: std::collections::BTreeSet<u64> = names.filter_map(layer).collect();
    let missing = (0..count).find(|layer| !found.is_empty() && !found.contains(layer))?;
    Some(format!(
        "no index, and no tensor of layer {missing} found, while config.json has {count} layers; copy all shards and the \
         index"
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn missing(names: &[&str]) -> Option<String> {
        missing_file(&names.iter().map(PathBuf::from).collect::<Vec<_>>())
    }

    #[test]
    fn files_are_counted_by_their_names() {
        for whole in [
            &["a.safetensors", "b.safetensors"][..],
            &["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
            &["model-0-of-2.safetensors", "model-1-of-2.safetensors"],
            &["x-00001-of-00001.safetensors", "y-00001-of-00001.safetensors"],
            &["one-of-many.safetensors"],
        ] {
            assert_eq!(missing(whole), None, "{whole:?}");
        }
        for (part, name) in [
            (&["model-00001-of-00002.safetensors"][..], "model-00002-of-00002.safetensors"),
            (&["model-00002-of-00002.safetensors"], "model-00001-of-00002.safetensors"),
            (
                &["m-00001-of-00003.safetensors", "m-00003-of-00003.safetensors"],
                "m-00002-of-00003.safetensors not found (2 of 3 shards are there)",
            ),
            (&["x-00001-of-00001.safetensors", "y-00001-of-00002.safetensors"], "y-00002-of-00002"),
        ] {
            let problem = missing(part).unwrap();
            assert!(problem.contains(name), "{part:?}: {problem}");
        }
    }

    #[test]
    fn layers_are_counted_if_the_tensors_are_numbered() {
        let config = json!({ "text_config": { "num_hidden_layers": 2 } });
        let check = |names: &[&str]| missing_layer(Some(&config), names.iter().copied());
        assert_eq!(check(&["a", "b"]), None);
        assert_eq!(check(&["model.layers.0.x", "model.layers.1.x", "model.layers.2.x"]), None);
        assert!(check(&["model.layers.1.x"]).unwrap().contains("layer 0"));
        assert!(check(&["decoder.layers.0.x"]).unwrap().contains("layer 1"));
        assert_eq!(missing_layer(None, ["model.layers.1.x"].into_iter()), None);
    }
}
