//! `ballast.contract`: policies and the `_fp32_params` helpers.

use ballast_contract::family::Tensor;
use ballast_contract::{Architecture, Family, Registry, Rule, holder};
use pyo3::prelude::*;
use serde_json::{Value, json};

use crate::errors::UsageError;

/// A policy with the families named by its rules.
#[pyclass(frozen, module = "ballast._native")]
pub(crate) struct Policy {
    policy: ballast_contract::Policy,
    families: Vec<Family>,
}

/// A rule in Python: name, reason, required dtype, tensor patterns, families, source.
type RuleFields = (String, String, String, Vec<String>, Vec<String>, String);

fn fields(rule: &Rule) -> RuleFields {
    let tensors = rule.tensors.iter().map(|t| format!("{}.{}", t.module, t.param)).collect();
    let families = rule.families.clone();
    (rule.id.clone(), rule.reason.clone(), rule.dtype.to_string(), tensors, families, rule.source.clone())
}

fn invalid(error: impl std::fmt::Display) -> PyErr {
    UsageError::new_err(error.to_string())
}

impl Policy {
    /// Returns the registry that the policy belongs to, and the policy.
    pub(crate) fn with_registry(&self) -> (Registry, ballast_contract::Policy) {
        let registry = Registry { families: self.families.clone(), ..Registry::builtin().clone() };
        (registry, self.policy.clone())
    }
}

#[pymethods]
impl Policy {
    /// Restores a policy from the state that `__getnewargs__` returns.
    #[new]
    fn new(state: &str) -> PyResult<Policy> {
        let (policy, families) = serde_json::from_str(state).map_err(invalid)?;
        Ok(Policy { policy, families })
    }

    fn __getnewargs__(&self) -> PyResult<(String,)> {
        Ok((serde_json::to_string(&(&self.policy, &self.families)).map_err(invalid)?,))
    }

    /// Returns a built-in policy.
    #[staticmethod]
    fn named(name: &str) -> PyResult<Policy> {
        let registry = Registry::builtin();
        let policy = registry.policy(name).map_err(invalid)?;
        Ok(Policy { policy, families: registry.families.clone() })
    }

    /// Parses the text of a policy file.
    #[staticmethod]
    fn parse(text: &str) -> PyResult<Policy> {
        let (registry, policy) = Registry::builtin().with_policy_file(text).map_err(invalid)?;
        Ok(Policy { policy, families: registry.families })
    }

    #[getter]
    fn name(&self) -> &str {
        &self.policy.name
    }

    #[getter]
    fn description(&self) -> &str {
        &self.policy.description
    }

    fn rules(&self) -> Vec<RuleFields> {
        self.policy.rules.iter().map(fields).collect()
    }

    fn rule_for(&self, name: &str) -> Option<RuleFields> {
        self.policy.rule_for(name).map(fields)
    }

    /// Returns the policy reduced to the architecture of a config.json, or of the tensors (names and numbers of
    /// elements) where it names none that the table knows; and the families.
    fn for_architecture(
        &self,
        config: Option<&str>,
        tensors: Vec<(String, u64)>,
    ) -> PyResult<(Policy, Vec<String>)> {
        let config: Option<Value> = config.map(serde_json::from_str).transpose().map_err(invalid)?;
        let known: Vec<Tensor<'_>> =
            tensors.iter().map(|(name, elements)| Tensor { name, elements: *elements }).collect();
        let architecture = config
            .and_then(|config| Architecture::of(&config, &known, &self.families))
            .unwrap_or_else(|| Architecture::from_tensors(&known, &self.families));
        let policy = self.policy.for_model(&architecture, tensors.iter().map(|(name, _)| name.as_str()));
        Ok((Policy { policy, families: self.families.clone() }, architecture.families))
    }

    /// Returns the policy for a part of a model that says nothing of its architecture.
    fn for_part(&self, names: Vec<String>) -> Policy {
        let policy = self.policy.for_part(names.iter().map(String::as_str));
        Policy { policy, families: self.families.clone() }
    }
}

#[pyfunction]
pub(crate) fn has_contract(architectures: Vec<String>) -> bool {
    holder::has_gated_delta_net_fp32_checkpoint_contract(&json!({ "architectures": architectures }))
}

#[pyfunction]
pub(crate) fn is_param_key(key: &str, param_names: Vec<String>) -> bool {
    holder::is_param_key(key, &param_names)
}

#[pyfunction]
pub(crate) fn route_param_key(key: &str, param_names: Vec<String>) -> String {
    holder::route_param_key(key, &param_names).into_owned()
}

#[pyfunction]
pub(crate) fn strip_holder_key(key: &str) -> String {
    holder::strip_fp32_holder_key(key).into_owned()
}
