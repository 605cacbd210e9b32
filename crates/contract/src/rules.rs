//! The table of tensors that must be f32, and the policies that select from it.
//!
//! The table is the embedded `rules.toml`, with `transformers.toml`, the lists of the authors of models. Three
//! kinds of rules apply: those of the architecture; rules by structure ([`Rule::near`]), which find tensors in
//! models that no rule knows; and, for names that belong to no known architecture, none of the general ones
//! ([`Rule::general`]).
//!
//! A user's policy file has the same `[[rule]]` entries, and may
//! extend a named policy and remove rules:
//!
//! ```toml
//! name = "ours"
//! extends = "strict"          # default: no rules
//! remove = ["gdn-dt-bias"]
//!
//! [[rule]]
//! id = "our-gate"
//! families = ["*"]            # default: every architecture
//! tensors = [{ module = "**.mlp", param = "gate_scale" }]
//! dtype = "F32"               # default
//! reason = "multiplied by the position"
//! ```

use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

use crate::holder::strip_fp32_holder_key;
use crate::kind::ErrorKind;
use crate::{Architecture, Dtype, Family, pattern, structure};

/// A rule: tensors that must be stored in `dtype`.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// Name of the rule, used in findings and in `remove`.
    pub id: String,
    /// Families that have such tensors; `*` for any architecture.
    #[serde(default = "any_family")]
    pub families: Vec<String>,
    /// Tensors that the rule covers.
    pub tensors: Vec<TensorPattern>,
    /// For a rule by structure: names below the tensor's module or the module around it, with `*` for any
    /// characters; the rule covers a tensor if one of them exists. It applies to models, not to single names:
    /// [`Policy::for_model`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub near: Vec<String>,
    /// True if the names are too general to mean anything in another architecture (`norm`). Such a rule applies
    /// after [`Policy::for_architecture`] only.
    #[serde(default, skip_serializing_if = "is_false")]
    pub general: bool,
    /// Required dtype.
    #[serde(default = "f32_dtype")]
    pub dtype: Dtype,
    /// Parameter of the same module; where it exists, the rule's tensor must exist too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub beside: Option<String>,
    /// Built-in policies that include the rule.
    #[serde(default)]
    pub policies: Vec<String>,
    /// Reason, in one line.
    pub reason: String,
    /// Source of the rule: a list of authors, a contract or a measurement.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub source: String,
}

/// Names of the form `<module>.<param>`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct TensorPattern {
    /// [`pattern`] of the module's path.
    pub module: String,
    /// Name of the parameter below the module, literally; `**` for the module itself and all that is below it.
    pub param: String,
}

impl TensorPattern {
    /// Returns the module's path if `name` is `param` of a module that matches.
    pub fn module_of<'a>(&self, name: &'a str, param: &str) -> Option<&'a str> {
        let module = name.strip_suffix(param)?.strip_suffix('.')?;
        pattern::matches(&self.module, module).then_some(module)
    }

    fn covers(&self, name: &str) -> bool {
        match self.param.as_str() {
            "**" => {
                // Comparing the last segment first leaves few names to divide.
                let last = self.module.rsplit('.').next().unwrap_or_default();
                (last.contains('*') || name.contains(last))
                    && pattern::matches(&format!("{}.**", self.module), name)
            }
            param => self.module_of(name, param).is_some(),
        }
    }
}

fn is_false(value: &bool) -> bool {
    !value
}

fn any_family() -> Vec<String> {
    vec!["*".into()]
}

fn f32_dtype() -> Dtype {
    Dtype::F32
}

impl Rule {
    fn covers(&self, name: &str) -> bool {
        self.tensors.iter().any(|t| t.covers(name))
    }

    /// Returns true if the rule can be applied to a name alone.
    fn is_ready(&self) -> bool {
        self.near.is_empty() && !self.general
    }

    /// Returns true if the rule finds tensors by structure.
    pub fn is_structural(&self) -> bool {
        !self.near.is_empty()
    }

    fn applies_to(&self, architecture: &Architecture) -> bool {
        self.families.iter().any(|f| f == "*" || architecture.families.contains(f))
    }

    /// Returns the name of the rule's tensor that must exist beside the existing tensor `name`.
    pub fn expected_beside(&self, name: &str) -> Option<String> {
        let beside = self.beside.as_ref()?;
        self.tensors
            .iter()
            .find_map(|t| t.module_of(name, beside).map(|module| format!("{module}.{}", t.param)))
    }
}

/// A named selection of rules.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Policy {
    /// `strict`, `megatron`, `nemo`, `none`, or the name in the user's file.
    pub name: String,
    /// Description in one line.
    pub description: String,
    /// Rules of the policy.
    pub rules: Vec<Rule>,
}

impl Policy {
    /// Returns the policy reduced to the rules of one architecture, without those by structure.
    pub fn for_architecture(&self, architecture: &Architecture) -> Policy {
        let of_it = self.rules.iter().filter(|r| r.applies_to(architecture) && !r.is_structural());
        let rules = of_it.map(|r| Rule { general: false, ..r.clone() }).collect();
        Policy { rules, ..self.clone() }
    }

    /// Returns the policy reduced to the rules of one model: those of its architecture, and for the tensors that
    /// the table does not know, those by structure.
    pub fn for_model<'a>(
        &self,
        architecture: &Architecture,
        names: impl Iterator<Item = &'a str> + Clone,
    ) -> Policy {
        let mut policy = self.for_architecture(architecture);
        let known = Registry::builtin().rules.iter().filter(|r| r.applies_to(architecture));
        let known: Vec<&Rule> = known.filter(|r| !r.is_structural()).chain(&policy.rules).collect();
        let found = structure::resolve(&self.rules, names, |name| known.iter().any(|r| r.covers(name)));
        policy.rules.extend(found);
        policy
    }

    /// Returns the policy for a part of a model, which says nothing of its architecture: the rules whose names
    /// mean the same everywhere, and those by structure.
    pub fn for_part<'a>(&self, names: impl Iterator<Item = &'a str> + Clone) -> Policy {
        let mut rules: Vec<Rule> = self.rules.iter().filter(|r| r.is_ready()).cloned().collect();
        let found = structure::resolve(&self.rules, names, |name| rules.iter().any(|r| r.covers(name)));
        rules.extend(found);
        Policy { rules, ..self.clone() }
    }

    /// Returns the rule that protects the tensor called `name`, bare or routed, if there is one.
    pub fn rule_for(&self, name: &str) -> Option<&Rule> {
        let name = strip_fp32_holder_key(name);
        self.rules.iter().find(|rule| rule.is_ready() && rule.covers(&name))
    }
}

/// An error in a policy or its name.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PolicyError {
    /// No built-in policy of that name.
    #[error("unknown policy `{0}`; use one of {1}, or a policy file (.toml)")]
    Unknown(String, String),
    /// The file is not valid TOML, or not a policy.
    // Not `#[from]`: the source's message would be printed twice.
    #[error("not a policy file: {0}")]
    Syntax(toml::de::Error),
    /// The file is valid TOML with a contradiction.
    #[error("{0}")]
    Meaning(String),
}

impl PolicyError {
    /// Returns the kind of this error.
    pub fn kind(&self) -> ErrorKind {
        ErrorKind::Usage
    }
}

impl From<toml::de::Error> for PolicyError {
    fn from(error: toml::de::Error) -> PolicyError {
        PolicyError::Syntax(error)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PolicyRow {
    name: String,
    description: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RegistryFile {
    #[serde(default)]
    policy: Vec<PolicyRow>,
    family: Vec<Family>,
    rule: Vec<Rule>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PolicyFile {
    name: String,
    #[serde(default)]
    description: String,
    #[serde(default)]
    extends: Option<String>,
    #[serde(default)]
    remove: Vec<String>,
    #[serde(default)]
    rule: Vec<Rule>,
    #[serde(default)]
    family: Vec<Family>,
}

/// The families, the rules, and the policies over them.
#[derive(Clone, Debug)]
pub struct Registry {
    /// Architectures that rules can name.
    pub families: Vec<Family>,
    /// All rules.
    pub rules: Vec<Rule>,
    /// Named policies, the default first.
    pub policies: Vec<Policy>,
}

impl Registry {
    /// Returns the embedded table.
    pub fn builtin() -> &'static Registry {
        static BUILTIN: OnceLock<Registry> = OnceLock::new();
        BUILTIN.get_or_init(|| {
            let parse =
                |text| toml::from_str::<RegistryFile>(text).expect("a test parses the embedded table");
            let mut file = parse(include_str!("rules.toml"));
            let lists = parse(include_str!("transformers.toml"));
            file.family.extend(lists.family);
            file.rule.extend(lists.rule);
            let selection = |row: PolicyRow| Policy {
                rules: file.rule.iter().filter(|r| r.policies.contains(&row.name)).cloned().collect(),
                name: row.name,
                description: row.description,
            };
            let policies = file.policy.into_iter().map(selection).collect();
            Registry { families: file.family, rules: file.rule, policies }
        })
    }

    /// Returns a built-in policy by name.
    pub fn policy(&self, name: &str) -> Result<Policy, PolicyError> {
        self.policies.iter().find(|p| p.name == name).cloned().ok_or_else(|| {
            let names: Vec<&str> = self.policies.iter().map(|p| p.name.as_str()).collect();
            PolicyError::Unknown(name.into(), names.join(", "))
        })
    }

    /// Parses a user's policy file. Returns the registry with its rules, and the policy.
    pub fn with_policy_file(&self, text: &str) -> Result<(Registry, Policy), PolicyError> {
        let file: PolicyFile = toml::from_str(text)?;
        let mut registry = self.clone();
        registry.families.extend(file.family);
        let mut rules = match &file.extends {
            Some(name) => self.policy(name)?.rules,
            None => Vec::new(),
        };
        for id in &file.remove {
            if !rules.iter().any(|r| &r.id == id) {
                let known: Vec<&str> = rules.iter().map(|r| r.id.as_str()).collect();
                return Err(PolicyError::Meaning(format!(
                    "`remove`: rule `{id}` is not in the policy; its rules are: {}",
                    known.join(", ")
                )));
            }
            rules.retain(|r| &r.id != id);
        }
        for rule in file.rule {
            check_rule(&rule, &registry.families)?;
            rules.retain(|r| r.id != rule.id);
            rules.push(rule.clone());
            registry.rules.retain(|r| r.id != rule.id);
            registry.rules.push(rule);
        }
        let policy = Policy { name: file.name, description: file.description, rules };
        registry.policies.push(policy.clone());
        Ok((registry, policy))
    }
}

fn check_rule(rule: &Rule, families: &[Family]) -> Result<(), PolicyError> {
    let unknown = rule.families.iter().find(|f| *f != "*" && !families.iter().any(|x| &x.name == *f));
    if let Some(family) = unknown {
        let known: Vec<&str> = families.iter().map(|f| f.name.as_str()).collect();
        return Err(PolicyError::Meaning(format!(
            "rule `{}`: unknown family `{family}`; known families: {}",
            rule.id,
            known.join(", ")
        )));
    }
    if rule.dtype != Dtype::F32 {
        let message = format!("rule `{}`: dtype must be F32, got {}", rule.id, rule.dtype);
        return Err(PolicyError::Meaning(message));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn architecture(family: &str) -> Architecture {
        Architecture { name: None, families: vec![family.into()], source: "test" }
    }

    fn protects(policy: &str, family: &str, name: &str) -> bool {
        let policy = Registry::builtin().policy(policy).unwrap().for_architecture(&architecture(family));
        policy.rule_for(name).is_some()
    }

    #[test]
    fn every_rule_names_known_families_and_policies_and_demands_f32() {
        let registry = Registry::builtin();
        for rule in &registry.rules {
            check_rule(rule, &registry.families).unwrap();
            assert!(!rule.policies.is_empty(), "{} is in no policy", rule.id);
            for policy in &rule.policies {
                registry.policy(policy).unwrap();
            }
        }
        assert_eq!(registry.policies[0].name, "strict");
        assert_eq!(registry.policy("none").unwrap().rules.len(), 0);
        assert_eq!(registry.policy("strict").unwrap().rules.len(), registry.rules.len());
    }

    #[test]
    fn the_policies_protect_what_the_table_of_the_contract_says() {
        let a_log = "model.layers.0.linear_attn.A_log";
        let dt_bias = "model.layers.0.linear_attn._fp32_params.dt_bias";
        let norm = "model.language_model.layers.7.linear_attn.norm.weight";
        for (policy, expected) in [
            ("strict", [true, true, true]),
            ("megatron", [true, false, true]),
            ("nemo", [true, true, false]),
            ("none", [false, false, false]),
        ] {
            for (name, expected) in [a_log, dt_bias, norm].into_iter().zip(expected) {
                assert_eq!(protects(policy, "qwen3_5", name), expected, "{policy} on {name}");
            }
        }
        let megatron_norm = "decoder.layers.0.self_attention.out_norm.weight";
        assert!(protects("megatron", "qwen3_next", megatron_norm));
        assert!(protects("strict", "qwen3_next", "decoder.layers.3.self_attention.dt_bias"));
    }

    #[test]
    fn other_architectures_have_their_own_rules_and_no_others() {
        for (family, name) in [
            ("deepseek_v32", "model.layers.4.mlp.gate.e_score_correction_bias"),
            ("deepseek_v32", "model.layers.4.self_attn.indexer.weights_proj.weight"),
            ("gemma4", "model.layers.4.router.proj.weight"),
            ("gemma4", "model.layers.4.router.scale"),
            ("nemotron_h", "backbone.layers.0.mixer.D"),
            ("mamba2_hybrid", "model.layers.0.mamba.dt_bias"),
            ("gpt_oss", "model.layers.0.self_attn.sinks"),
            ("ernie4_5_moe", "model.layers.1.mlp.gate.weight"),
            ("anything", "model.rotary_emb.inv_freq"),
        ] {
            assert!(protects("strict", family, name), "{family}: {name}");
        }
        assert!(!protects("strict", "qwen3_5_moe", "model.layers.1.mlp.gate.weight"));
        assert!(!protects("strict", "gpt_oss", "model.layers.0.linear_attn.A_log"));
        assert!(!protects("strict", "qwen3_5", "model.layers.0.linear_attn.A_log.lora_A.weight"));
        assert!(!protects("strict", "qwen3_5", "model.norm.weight"));
    }

    #[test]
    fn a_tensor_is_expected_beside_its_sibling() {
        let registry = Registry::builtin();
        let rule = registry.rules.iter().find(|r| r.id == "gdn-out-norm").unwrap();
        assert_eq!(
            rule.expected_beside("model.layers.0.linear_attn.conv1d.weight").as_deref(),
            Some("model.layers.0.linear_attn.norm.weight")
        );
        assert_eq!(
            rule.expected_beside("decoder.layers.0.self_attention.conv1d.weight").as_deref(),
            Some("decoder.layers.0.self_attention.out_norm.weight")
        );
        assert_eq!(rule.expected_beside("model.layers.0.self_attn.q_proj.weight"), None);
    }

    #[test]
    fn a_policy_file_adds_and_removes_rules() {
        let text = r#"
            name = "ours"
            extends = "strict"
            remove = ["gdn-dt-bias"]
            [[rule]]
            id = "gate-scale"
            tensors = [{ module = "**.mlp", param = "gate_scale" }]
            reason = "because"
        "#;
        let (_, policy) = Registry::builtin().with_policy_file(text).unwrap();
        let policy = policy.for_architecture(&architecture("qwen3_5"));
        assert!(policy.rule_for("a.linear_attn.A_log").is_some());
        assert!(policy.rule_for("a.linear_attn.dt_bias").is_none());
        assert!(policy.rule_for("layers.0.mlp.gate_scale").is_some());
    }

    #[test]
    fn a_bad_policy_file_says_what_is_wrong() {
        let error = |text: &str| Registry::builtin().with_policy_file(text).unwrap_err().to_string();
        assert!(error("name = ").contains("not a policy file"));
        assert!(error("name = 'x'\nrulez = []").contains("rulez"));
        assert!(error("name = 'x'\nextends = 'strictt'").contains("unknown policy `strictt`"));
        assert!(error("name = 'x'\nextends = 'strict'\nremove = ['nope']").contains("`nope`"));
        let rule = "name='x'\n[[rule]]\nid='r'\nreason='y'\ntensors=[{module='**',param='p'}]\n";
        assert!(error(&format!("{rule}families=['llama']")).contains("llama"));
        assert!(error(&format!("{rule}dtype='BF16'")).contains("must be F32"));
    }
}
