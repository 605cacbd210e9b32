//! The table against the names of the tensors of many architectures, as transformers builds and saves them
//! (fixtures/contract/models.json).

use ballast_contract::family::Tensor;
use ballast_contract::{Architecture, Policy, Registry};
use serde::Deserialize;
use serde_json::{Value, json};

#[derive(Deserialize)]
struct Models {
    models: Vec<Model>,
}

/// An architecture: names in the module tree with those in a file, the numbers in them as `*`.
#[derive(Deserialize)]
struct Model {
    folder: String,
    config: Value,
    tensors: serde_json::Map<String, Value>,
    f32: Vec<String>,
}

impl Model {
    /// Returns the names, in the module tree or in a file, with layer 3 for every number.
    fn names(&self, in_file: bool, only_f32: bool) -> Vec<String> {
        let chosen = self.tensors.iter().filter(|(name, _)| !only_f32 || self.f32.contains(name));
        let names = chosen.flat_map(|(name, saved)| match in_file {
            true => saved.as_array().unwrap().iter().map(|s| s.as_str().unwrap().to_owned()).collect(),
            false => vec![name.clone()],
        });
        names.map(|name| name.replace('*', "3")).collect()
    }
}

fn models() -> Vec<Model> {
    let text = include_str!("../../../fixtures/contract/models.json");
    serde_json::from_str::<Models>(text).unwrap().models
}

fn policy_for(config: Option<&Value>, names: &[String]) -> (Architecture, Policy) {
    let families = &Registry::builtin().families;
    let tensors: Vec<Tensor<'_>> = names.iter().map(|name| Tensor { name, elements: 0 }).collect();
    let architecture = match config {
        Some(config) => Architecture::of(config, &tensors, families).unwrap(),
        None => Architecture::from_tensors(&tensors, families),
    };
    let strict = Registry::builtin().policy("strict").unwrap();
    let policy = strict.for_model(&architecture, names.iter().map(String::as_str));
    (architecture, policy)
}

/// Returns the tensors that the table protects and those that it should protect, in order.
fn protected(model: &Model, config: Option<&Value>, in_file: bool) -> (Vec<String>, Vec<String>) {
    let names = model.names(in_file, false);
    let (_, policy) = policy_for(config, &names);
    let mut found: Vec<String> = names.into_iter().filter(|name| policy.rule_for(name).is_some()).collect();
    let mut wanted = model.names(in_file, true);
    found.sort();
    wanted.sort();
    (found, wanted)
}

/// Tensors beyond the lists of the authors, which rules of this table protect for reasons of their own.
fn is_beyond_lists(model: &Model, name: &str) -> bool {
    let rules: &[(&str, &str)] = &[("deepseek_v32", "indexer.weights_proj.weight")];
    rules.iter().any(|(folder, end)| model.folder == *folder && name.ends_with(end))
}

#[test]
fn every_architecture_has_its_tensors_protected_and_no_others_in_a_file_and_in_the_module_tree() {
    let (mut architectures, mut tensors) = (0, 0);
    for model in models() {
        for in_file in [true, false] {
            let (mut found, wanted) = protected(&model, Some(&model.config), in_file);
            found.retain(|name| !is_beyond_lists(&model, name));
            assert_eq!(found, wanted, "{} in a file: {in_file}", model.folder);
            tensors += wanted.len();
        }
        architectures += usize::from(!model.f32.is_empty());
    }
    assert!(architectures >= 50 && tensors >= 400, "{architectures} architectures, {tensors} tensors");
}

#[test]
fn a_name_that_the_table_lacks_does_not_switch_recognition_off() {
    let recurrences = ["A_log", "dt_bias", "D", "e_score_correction_bias"];
    let unknown = json!({"architectures": ["FooForCausalLM"], "model_type": "foo"});
    let mut found_by_structure = 0;
    for model in models() {
        for config in [Some(&unknown), None] {
            let names = model.names(false, true);
            let (_, policy) = policy_for(config, &model.names(false, false));
            for name in &names {
                if recurrences.iter().any(|end| name.ends_with(&format!(".{end}"))) {
                    let rule = policy.rule_for(name).unwrap_or_else(|| panic!("{}: {name}", model.folder));
                    found_by_structure += usize::from(rule.reason.starts_with("by structure"));
                }
            }
        }
        if model.f32.is_empty() {
            let (found, _) = protected(&model, Some(&unknown), true);
            assert_eq!(found, Vec::<String>::new(), "{}", model.folder);
        }
    }
    assert!(found_by_structure >= 8, "{found_by_structure}");
}

#[test]
fn layers_of_megatron_are_recognized_as_themselves() {
    let layer = |names: &[(&'static str, u64)]| {
        let tensors: Vec<Tensor<'static>> =
            names.iter().map(|&(name, elements)| Tensor { name, elements }).collect();
        Architecture::from_tensors(&tensors, &Registry::builtin().families).families
    };
    let [a_log, dt_bias, conv] = [
        "decoder.layers.0.self_attention.A_log",
        "decoder.layers.0.self_attention.dt_bias",
        "decoder.layers.0.self_attention.conv1d.weight",
    ];
    assert_eq!(layer(&[(a_log, 32), (dt_bias, 32), (conv, 64)]), ["qwen3_5"]);
    assert_eq!(layer(&[(a_log, 16), (dt_bias, 2048), (conv, 64)]), ["megatron_gdn2"]);
    let beta = "decoder.layers.0.self_attention.beta_proj.weight";
    assert_eq!(layer(&[(a_log, 16), (dt_bias, 2048), (beta, 64)]), ["megatron_kda"]);
    let mixer = ["decoder.layers.0.mixer.A_log", "decoder.layers.0.mixer.dt_bias"];
    assert_eq!(layer(&[(mixer[0], 8), (mixer[1], 8)]), ["gated_delta_product"]);
    let scan = [(mixer[0], 8), (mixer[1], 8), ("decoder.layers.0.mixer.D", 8)];
    assert_eq!(layer(&scan), ["nemotron_h"]);
}

#[test]
fn rules_by_structure_need_a_neighbour_and_leave_to_the_table_what_it_knows() {
    let by_structure = |policy: &str, family: &[&str], names: &[&str], name: &str| {
        let families = family.iter().map(|f| f.to_string()).collect();
        let architecture = Architecture { name: None, families, source: "test" };
        let policy = Registry::builtin().policy(policy).unwrap();
        policy.for_model(&architecture, names.iter().copied()).rule_for(name).map(|r| r.id.clone())
    };
    let a_log = "model.layers.11.ssm.A_log";
    let rule = Some("structure-a-log".to_owned());
    assert_eq!(by_structure("strict", &[], &[a_log, "model.layers.11.ssm.conv1d.weight"], a_log), rule);
    assert_eq!(by_structure("megatron", &[], &[a_log, "model.layers.11.ssm.dt_bias"], a_log), rule);
    assert_eq!(by_structure("none", &[], &[a_log, "model.layers.11.ssm.dt_bias"], a_log), None);
    assert_eq!(by_structure("strict", &[], &[a_log, "model.layers.11.mlp.weight"], a_log), None);
    // The gate is a module of its own beside the convolution.
    let gate = "layers.0.attn.forget.A_log";
    assert_eq!(by_structure("strict", &[], &[gate, "layers.0.attn.q_conv1d.weight"], gate), rule);
    // Names that are routed into the holder are those of the module.
    let routed = ["l.0.linear_attn._fp32_params.A_log", "l.0.linear_attn._fp32_params.dt_bias"];
    assert_eq!(by_structure("strict", &[], &routed, routed[0]), rule);
    // A policy that leaves out a tensor of the table means it.
    let dt_bias = "model.layers.0.linear_attn.dt_bias";
    let layer = [dt_bias, "model.layers.0.linear_attn.A_log"];
    assert_eq!(by_structure("megatron", &["qwen3_5"], &layer, dt_bias), None);
    let (_, without) = Registry::builtin()
        .with_policy_file("name = 'ours'\nextends = 'strict'\nremove = ['gdn-dt-bias']")
        .unwrap();
    let qwen = Architecture { name: None, families: vec!["qwen3_5".into()], source: "test" };
    let policy = without.for_model(&qwen, layer.iter().copied());
    assert!(policy.rule_for(dt_bias).is_none() && policy.rule_for(layer[1]).is_some());
    // Without a model there is no structure, and a general name means nothing.
    let strict = Registry::builtin().policy("strict").unwrap();
    assert!(strict.rule_for(a_log).is_none() && strict.rule_for("model.norm.weight").is_none());
    let part = strict.for_part([gate, "layers.0.attn.q_conv1d.weight", "norm.weight"].into_iter());
    assert!(part.rule_for(gate).is_some() && part.rule_for("norm.weight").is_none());
}

#[test]
fn every_rule_of_the_table_has_a_source_and_every_name_is_used_once() {
    let registry = Registry::builtin();
    for rule in &registry.rules {
        assert!(!rule.source.is_empty(), "{}", rule.id);
        assert_eq!(registry.rules.iter().filter(|r| r.id == rule.id).count(), 1, "{}", rule.id);
    }
    for family in &registry.families {
        assert_eq!(registry.families.iter().filter(|f| f.name == family.name).count(), 1, "{}", family.name);
    }
}
