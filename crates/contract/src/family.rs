//! The architecture of a checkpoint.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::pattern;

/// One row of the registry's family table.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Family {
    /// Name that rules refer to.
    pub name: String,
    /// Entries of `architectures` in config.json.
    #[serde(default)]
    pub architectures: Vec<String>,
    /// Values of `model_type` in config.json.
    #[serde(default)]
    pub model_types: Vec<String>,
    /// Patterns of tensor names that identify the family if config.json does not.
    #[serde(default)]
    pub signature: Vec<String>,
    /// Patterns of tensor names that no member of the family has.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lacks: Vec<String>,
    /// Owner of a decay, where the names alone do not identify the family.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decay: Option<Decay>,
}

/// Owner of a decay in a delta rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Decay {
    /// A head: `dt_bias` and `A_log` have one value for each.
    Head,
    /// A channel of a head: `dt_bias` has a value for each, `A_log` one for each head.
    Channel,
}

/// A tensor as an architecture is recognized by it.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    /// Name.
    pub name: &'a str,
    /// Number of elements; 0 if unknown.
    pub elements: u64,
}

impl Family {
    fn is_recognized(&self, tensors: &[Tensor<'_>]) -> bool {
        // The last segment is no star; comparing it first leaves few names to divide.
        let has = |p: &str| {
            let last = p.rsplit('.').next().unwrap_or(p);
            tensors.iter().any(|t| t.name.ends_with(last) && pattern::matches(p, t.name))
        };
        let any = |patterns: &[String]| patterns.iter().any(|p| has(p));
        any(&self.signature) && !any(&self.lacks) && self.decay.is_none_or(|d| decay(tensors) == d)
    }
}

/// Returns the owner of a decay, by the first `A_log` with a `dt_bias` beside it.
fn decay(tensors: &[Tensor<'_>]) -> Decay {
    let channels = tensors.iter().find_map(|a| {
        let module = a.name.strip_suffix("A_log")?;
        let bias = tensors.iter().find(|t| t.name.strip_prefix(module) == Some("dt_bias"))?;
        Some(bias.elements > a.elements)
    });
    if channels == Some(true) { Decay::Channel } else { Decay::Head }
}

/// The architecture of a checkpoint, as far as it is known.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Architecture {
    /// Name in config.json, or the family's name if it was found by tensor names.
    pub name: Option<String>,
    /// Families of the registry that it belongs to.
    pub families: Vec<String>,
    /// Source of the families: `config.json` or `tensor names`.
    pub source: &'static str,
}

impl Architecture {
    /// Identifies the architecture by `architectures` or `model_type`, at the top level of `config` and in
    /// its `text_config`. Returns `None` if the config has neither.
    pub fn from_config(config: &Value, families: &[Family]) -> Option<Architecture> {
        let architectures = architectures(config);
        let model_types: Vec<&str> = [Some(config), config.get("text_config")]
            .into_iter()
            .flatten()
            .filter_map(|c| c.get("model_type")?.as_str())
            .collect();
        let name = architectures.first().or(model_types.first())?.to_string();
        let member = |f: &&Family| {
            architectures.iter().any(|a| f.architectures.iter().any(|x| x == a))
                || model_types.iter().any(|t| f.model_types.iter().any(|x| x == t))
        };
        let families = families.iter().filter(member).map(|f| f.name.clone()).collect();
        Some(Architecture { name: Some(name), families, source: "config.json" })
    }

    /// Identifies the architecture of a checkpoint without config.json by the families' signatures.
    pub fn from_names<'a>(names: impl Iterator<Item = &'a str>, families: &[Family]) -> Architecture {
        let tensors: Vec<Tensor<'_>> = names.map(|name| Tensor { name, elements: 0 }).collect();
        Architecture::from_tensors(&tensors, families)
    }

    /// Identifies the architecture of a checkpoint without config.json by the names and sizes of its tensors.
    pub fn from_tensors(tensors: &[Tensor<'_>], families: &[Family]) -> Architecture {
        let recognized = families.iter().filter(|f| f.is_recognized(tensors));
        let families: Vec<String> = recognized.map(|f| f.name.clone()).collect();
        Architecture { name: families.first().cloned(), families, source: "tensor names" }
    }

    /// Identifies the architecture by `config`, or by the tensors if the table has nothing that `config` names:
    /// a name in config.json adds rules, and never takes one away. Returns `None` if `config` names nothing.
    pub fn of(config: &Value, tensors: &[Tensor<'_>], families: &[Family]) -> Option<Architecture> {
        let named = Architecture::from_config(config, families)?;
        if !named.families.is_empty() {
            return Some(named);
        }
        let found = Architecture::from_tensors(tensors, families);
        Some(if found.families.is_empty() { named } else { Architecture { name: named.name, ..found } })
    }
}

/// Returns all entries of `architectures`, of the config and of its `text_config`.
pub(crate) fn architectures(config: &Value) -> Vec<&str> {
    [Some(config), config.get("text_config")]
        .into_iter()
        .flatten()
        .filter_map(|c| c.get("architectures")?.as_array())
        .flatten()
        .filter_map(Value::as_str)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Registry;
    use serde_json::json;

    #[test]
    fn a_family_is_found_by_architecture_model_type_nested_config_or_names() {
        let families = &Registry::builtin().families;
        let of = |config| Architecture::from_config(&config, families).map(|a| a.families);
        let next = Some(vec!["qwen3_next".to_string()]);
        let dense = Some(vec!["qwen3_5".to_string()]);
        assert_eq!(of(json!({"architectures": ["Qwen3NextForCausalLM"]})), next);
        assert_eq!(of(json!({"model_type": "qwen3_next"})), next);
        assert_eq!(of(json!({"text_config": {"model_type": "qwen3_5_text"}})), dense);
        assert_eq!(of(json!({"text_config": {"architectures": ["Qwen3_5ForCausalLM"]}})), dense);
        assert_eq!(of(json!({"architectures": ["LlamaForCausalLM"]})), Some(vec![]));
        assert_eq!(of(json!({"architectures": []})), None);
        assert_eq!(of(json!({})), None);
        let names = ["model.layers.0.linear_attn.in_proj_qkvz.weight"];
        assert_eq!(Architecture::from_names(names.into_iter(), families).families, ["qwen3_next"]);
        assert!(Architecture::from_names(["x.weight"].into_iter(), families).families.is_empty());
    }
}
