//! The verdict of `audit` for checkpoints of many architectures (fixtures/contract/models.json): cast whole to bf16,
//! with the protected tensors in f32, and under a name that the table lacks.

use std::collections::BTreeSet;
use std::path::Path;

use ballast_checkpoint::audit::{AuditReport, audit};
use ballast_contract::Registry;
use ballast_files::jobs::Silent;
use safetensors::Dtype;
use serde_json::{Value, json};

use crate::common::{self, Tensor, open, policy, write_file};

struct Model {
    folder: String,
    config: Value,
    /// Names in a file, layer 3 for every number, and whether the tensor must be f32.
    tensors: Vec<(String, bool)>,
}

fn models() -> Vec<Model> {
    let text = std::fs::read_to_string(common::fixture("contract/models.json")).unwrap();
    let document: Value = serde_json::from_str(&text).unwrap();
    let model = |row: &Value| {
        let keeps = row["f32"].as_array().unwrap();
        let mut tensors = BTreeSet::new();
        for (name, saved) in row["tensors"].as_object().unwrap() {
            let keeps = keeps.contains(&json!(name));
            let saved = saved.as_array().unwrap().iter().map(|name| name.as_str().unwrap().replace('*', "3"));
            tensors.extend(saved.map(|name| (name, keeps)));
        }
        let folder = row["folder"].as_str().unwrap().to_owned();
        Model { folder, config: row["config"].clone(), tensors: tensors.into_iter().collect() }
    };
    document["models"].as_array().unwrap().iter().map(model).collect()
}

fn tensor(name: &str, dtype: Dtype) -> Tensor {
    let values = [0.1f32, 0.7, -1.3];
    let data = match dtype {
        Dtype::BF16 => values.iter().flat_map(|x| (x.to_bits() >> 16).to_le_bytes()[..2].to_vec()).collect(),
        _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
    };
    Tensor { name: name.into(), dtype, shape: vec![3], data }
}

/// Audits a checkpoint of the model, with the tensors that must be f32 in `protected` and all others in bf16.
fn verdict(home: &Path, config: &Value, tensors: &[(String, bool)], protected: Dtype) -> AuditReport {
    std::fs::write(home.join("config.json"), config.to_string()).unwrap();
    let dtype = |keeps: bool| if keeps { protected } else { Dtype::BF16 };
    let tensors: Vec<Tensor> = tensors.iter().map(|(name, keeps)| tensor(name, dtype(*keeps))).collect();
    write_file(&home.join("model.safetensors"), &tensors);
    audit(&open(home), Registry::builtin(), &policy("strict"), &Silent).unwrap()
}

#[test]
fn a_model_that_is_cast_whole_fails_with_every_tensor_named_and_one_that_keeps_them_passes() {
    let home = tempfile::tempdir().unwrap();
    let (mut failed, mut named) = (0, 0);
    for model in models() {
        let cast = verdict(home.path(), &model.config, &model.tensors, Dtype::BF16);
        let found: BTreeSet<&String> =
            cast.findings.iter().filter(|f| f.kind == "not-f32").flat_map(|f| &f.tensors).collect();
        let wanted: BTreeSet<&String> = model.tensors.iter().filter(|t| t.1).map(|t| &t.0).collect();
        assert!(wanted.is_subset(&found), "{}: {found:?} lacks some of {wanted:?}", model.folder);
        assert_eq!(cast.passed, wanted.is_empty(), "{}", model.folder);
        failed += usize::from(!cast.passed);
        named += wanted.len();
        // The weights of an indexer are kept by a rule of the table alone.
        if model.folder != "deepseek_v32" {
            let kept = verdict(home.path(), &model.config, &model.tensors, Dtype::F32);
            assert!(kept.passed, "{}: {:?}", model.folder, kept.findings);
        }
    }
    assert!(failed >= 50 && named >= 200, "{failed} models, {named} tensors");
}

#[test]
fn an_architecture_that_the_table_lacks_is_named_with_what_its_tensors_say() {
    let home = tempfile::tempdir().unwrap();
    let unknown = json!({"architectures": ["FooForCausalLM"]});
    let says = |tensors: &[&str], passes: bool, words: &str| {
        let tensors: Vec<_> = tensors.iter().map(|name| (name.to_string(), true)).collect();
        let report = verdict(home.path(), &unknown, &tensors, Dtype::BF16);
        assert_eq!(report.passed, passes, "{:?}", report.findings);
        assert!(report.notes.iter().any(|note| note.contains(words)), "{:?}", report.notes);
        report.findings.into_iter().next()
    };
    says(&["model.layers.0.mlp.up_proj.weight"], true, "FooForCausalLM is not in the table of architectures");
    let ssm = ["model.layers.0.ssm.A_log", "model.layers.0.ssm.conv1d.weight"];
    let finding = says(&ssm, false, "1 tensor is protected by structure").unwrap();
    assert_eq!(
        (finding.rule.as_deref(), &finding.tensors[..]),
        (Some("structure-a-log"), &[ssm[0].to_owned()][..])
    );
    assert!(finding.reason.starts_with("by structure: "));
    let qwen = ["model.layers.0.linear_attn.in_proj_qkv.weight", "model.layers.0.linear_attn.A_log"];
    says(&qwen, false, "its tensor names are those of qwen3_5");
}
