//! Rules by structure: tensors that must be f32 in a model that the table does not know.
//!
//! A name alone proves little, so such a rule also asks for a neighbor: an `A_log` beside a `dt_bias`, a
//! correction bias beside a router. What it finds becomes a rule with the names found, their numbers as `*`.

use std::collections::{HashMap, HashSet};

use crate::holder::strip_fp32_holder_key;
use crate::pattern;
use crate::rules::{Rule, TensorPattern};

/// Returns the rules by structure among `rules` with the tensors that they find in `names`, except those that are
/// `known`.
///
/// Time: one pass over the names for the candidates, one for their neighbors.
pub(crate) fn resolve<'a>(
    rules: &[Rule],
    names: impl Iterator<Item = &'a str> + Clone,
    known: impl Fn(&str) -> bool,
) -> Vec<Rule> {
    let rules: Vec<&Rule> = rules.iter().filter(|r| r.is_structural()).collect();
    // The rule's number, the module and the pattern that fits.
    let mut candidates: Vec<(usize, String, &TensorPattern)> = Vec::new();
    let mut below: HashMap<String, Vec<String>> = HashMap::new();
    for name in names.clone() {
        let name = strip_fp32_holder_key(name);
        for (number, rule) in rules.iter().enumerate() {
            for tensor in &rule.tensors {
                let Some(module) = tensor.module_of(&name, &tensor.param) else { continue };
                if !known(&name) {
                    below.entry(module.to_owned()).or_default();
                    if let Some((around, _)) = module.rsplit_once('.') {
                        below.entry(around.to_owned()).or_default();
                    }
                    candidates.push((number, module.to_owned(), tensor));
                }
            }
        }
    }
    if candidates.is_empty() {
        return Vec::new();
    }
    for name in names {
        let name = strip_fp32_holder_key(name);
        for (at, _) in name.match_indices('.') {
            if let Some(inside) = below.get_mut(&name[..at]) {
                inside.push(name[at + 1..].to_owned());
            }
        }
    }
    let mut found: Vec<HashSet<(String, &str)>> = vec![HashSet::new(); rules.len()];
    for (number, module, tensor) in candidates {
        let is_near = |place: &str| {
            let inside = below.get(place).map(Vec::as_slice).unwrap_or_default();
            inside.iter().any(|name| rules[number].near.iter().any(|p| pattern::wildcard_matches(p, name)))
        };
        if is_near(&module) || module.rsplit_once('.').is_some_and(|(around, _)| is_near(around)) {
            found[number].insert((without_numbers(&module), &tensor.param));
        }
    }
    let resolved = rules.iter().zip(found).filter(|(_, found)| !found.is_empty()).map(|(rule, found)| {
        let mut tensors: Vec<TensorPattern> =
            found.into_iter().map(|(module, param)| TensorPattern { module, param: param.into() }).collect();
        tensors.sort_by(|a, b| (&a.module, &a.param).cmp(&(&b.module, &b.param)));
        Rule { tensors, near: Vec::new(), ..(*rule).clone() }
    });
    resolved.collect()
}

/// Returns a module's path with `*` for each number.
fn without_numbers(module: &str) -> String {
    let segment = |s: &str| if s.bytes().all(|b| b.is_ascii_digit()) { "*".to_owned() } else { s.to_owned() };
    module.split('.').map(segment).collect::<Vec<_>>().join(".")
}
