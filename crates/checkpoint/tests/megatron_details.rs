//! Details of Megatron's layout: multi-token prediction, experts without grouped products, expert-parallel ranks,
//! more ranks than key/value heads.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use ballast_checkpoint::Checkpoint;
use ballast_checkpoint::convert::{ConvertOptions, plan};
use ballast_checkpoint::layout::{Layout, LayoutRequest, Naming};
use safetensors::tensor::Dtype;

use crate::common::{Tensor, convert, fixture, open, options, read_folder, write_file};

type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

fn to(source: &Arc<Checkpoint>, naming: Naming, ranks: Option<usize>, target: &Path) {
    let layout = LayoutRequest { naming: Some(naming), ranks, ..LayoutRequest::default() };
    convert(source, target, &ConvertOptions { layout, ..options(source, "none") });
}

fn write(folder: &Path, tensors: Tensors, like: &Path) {
    std::fs::create_dir_all(folder).unwrap();
    let tensors: Vec<Tensor> =
        tensors.into_iter().map(|(name, (dtype, shape, data))| Tensor { name, dtype, shape, data }).collect();
    write_file(&folder.join("model.safetensors"), &tensors);
    std::fs::copy(like.join("config.json"), folder.join("config.json")).unwrap();
}

#[test]
fn multi_token_prediction_has_megatrons_names_on_every_rank_and_comes_back() {
    let work = tempfile::tempdir().unwrap();
    let source = open(&fixture("release/qwen3_5"));
    for ranks in [1, 2] {
        let there = work.path().join(format!("megatron{ranks}"));
        to(&source, Naming::Megatron, Some(ranks), &there);
        let written = open(&there);
        for rank in 0..ranks {
            let shape = |name: &str| {
                let tensor = written.tensors.iter().find(|t| t.rank == rank && t.name == name);
                tensor.unwrap_or_else(|| panic!("{name} on rank {rank}")).shape.clone()
            };
            let part = ranks as u64;
            assert_eq!(shape("mtp.layers.0.enorm.weight"), [48]);
            assert_eq!(shape("mtp.layers.0.hnorm.weight"), [48]);
            assert_eq!(shape("mtp.layers.0.eh_proj.weight"), [48 / part, 96]);
            assert_eq!(shape("mtp.layers.0.final_layernorm.weight"), [48]);
            let inner = "mtp.layers.0.transformer_layer";
            assert_eq!(shape(&format!("{inner}.self_attention.linear_qkv.weight")), [192 / part, 48]);
            assert_eq!(shape(&format!("{inner}.mlp.linear_fc1.weight")), [192 / part, 48]);
        }
        let back = work.path().join(format!("hf{ranks}"));
        to(&written, Naming::Hf, None, &back);
        let (got, expected) = (read_folder(&back), read_folder(&fixture("release/qwen3_5")));
        for tensor in &source.tensors {
            assert_eq!(got[&tensor.name], expected[&tensor.name], "{}", tensor.name);
        }
        assert_eq!(got.len(), source.tensors.len());
    }
}

#[test]
fn the_newer_name_of_the_prediction_layer_and_experts_without_grouped_products_are_read() {
    let work = tempfile::tempdir().unwrap();
    for (model, grouped, other) in [
        ("release/qwen3_5", ".transformer_layer.", ".mtp_model_layer."),
        ("models/qwen3_5_moe", ".mlp.experts.linear_fc", ".mlp.experts.local_experts."),
    ] {
        let source = open(&fixture(model));
        let name = model.replace('/', "_");
        let (there, changed) = (work.path().join(&name), work.path().join(format!("{name}_changed")));
        to(&source, Naming::Megatron, None, &there);
        let mut count = 0;
        let rename = |(name, tensor): (String, (Dtype, Vec<usize>, Vec<u8>))| {
            let Some((before, after)) = name.split_once(grouped) else { return (name, tensor) };
            count += 1;
            let name = match after.split_once(".weight") {
                Some((layer, expert)) if grouped.contains("experts") => {
                    format!("{before}{other}{expert}.linear_fc{layer}.weight")
                }
                _ => format!("{before}{other}{after}"),
            };
            (name, tensor)
        };
        let tensors: Tensors = read_folder(&there).into_iter().map(rename).collect();
        assert!(count > 5, "{model}: {count}");
        write(&changed, tensors, &there);
        let back = work.path().join(format!("{name}_back"));
        let changed = open(&changed);
        let from = Layout::detect(&source);
        let layout = LayoutRequest {
            naming: Some(Naming::Hf),
            experts: from.experts,
            projections: from.projections,
            ..LayoutRequest::default()
        };
        convert(&changed, &back, &ConvertOptions { layout, ..options(&changed, "none") });
        let (got, expected) = (read_folder(&back), read_folder(&fixture(model)));
        for tensor in &source.tensors {
            assert_eq!(got[&tensor.name], expected[&tensor.name], "{}", tensor.name);
        }
    }
}

/// Converts a model with experts to so many tensor- and expert-parallel ranks.
fn to_ranks(
    source: &Arc<Checkpoint>,
    ranks: usize,
    expert_ranks: usize,
    target: &Path,
) -> Result<(), String> {
    let naming = Some(Naming::Megatron);
    let (ranks, expert_ranks) = (Some(ranks), Some(expert_ranks));
    let layout = LayoutRequest { naming, ranks, expert_ranks, ..LayoutRequest::default() };
    let options = ConvertOptions { layout, ..options(source, "none") };
    plan(source, &options).map_err(|e| e.to_string())?;
    convert(source, target, &options);
    Ok(())
}

#[test]
fn expert_parallel_ranks_have_their_experts_and_the_same_rest() {
    let work = tempfile::tempdir().unwrap();
    for model in ["qwen3_5_moe", "qwen3_next"] {
        let source = open(&fixture(&format!("models/{model}")));
        let whole = work.path().join(format!("{model}_whole"));
        to_ranks(&source, 2, 1, &whole).unwrap();
        let there = work.path().join(format!("{model}_there"));
        to_ranks(&source, 2, 2, &there).unwrap();
        let mut experts = 0;
        for (tensor_rank, expert_rank) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let folder = format!("mp_rank_{tensor_rank:02}_{expert_rank:03}");
            let found = read_folder(&there.join(folder));
            let mut expected = read_folder(&whole.join(format!("mp_rank_{tensor_rank:02}")));
            let numbers = expected.keys().filter_map(|name| name.split_once(".experts.linear_fc1.weight"));
            let count: usize = numbers.map(|(_, number)| number.parse::<usize>().unwrap() + 1).max().unwrap();
            for (name, tensor) in found {
                let name = match name.split_once(".mlp.experts.linear_fc") {
                    Some((layer, rest)) => {
                        let (fc, number) = rest.split_once(".weight").unwrap();
                        let number = number.parse::<usize>().unwrap() + expert_rank * count / 2;
                        experts += 1;
                        format!("{layer}.mlp.experts.linear_fc{fc}.weight{number}")
                    }
                    None => name,
                };
                assert!(expected.remove(&name).unwrap_or_else(|| panic!("{name}")) == tensor, "{name}");
            }
            // What is left is the experts of the other rank.
            assert!(expected.keys().all(|name| name.contains(".mlp.experts.")), "{:?}", expected.keys());
            assert!(!expected.is_empty());
        }
        assert!(experts >= 16, "{experts}");
        let back = work.path().join(format!("{model}_back"));
        to(&open(&there), Naming::Hf, None, &back);
        let (got, expected) = (read_folder(&back), read_folder(&fixture(&format!("models/{model}"))));
        for tensor in &source.tensors {
            assert_eq!(got[&tensor.name], expected[&tensor.name], "{model} {}", tensor.name);
        }
        assert_eq!(got.len(), source.tensors.len());
    }
}

#[test]
fn expert_parallel_ranks_that_disagree_are_refused() {
    let work = tempfile::tempdir().unwrap();
    let there = work.path().join("there");
    to_ranks(&open(&fixture("models/qwen3_5_moe")), 1, 2, &there).unwrap();
    let (folder, name) = (there.join("mp_rank_00_001"), "embedding.word_embeddings.weight");
    let mut tensors = read_folder(&folder);
    let data = &mut tensors.get_mut(name).unwrap().2;
    *data.last_mut().unwrap() ^= 1;
    write(&folder, tensors, &there);
    std::fs::remove_file(folder.join("config.json")).unwrap();
    let damaged = open(&there);
    let layout = LayoutRequest { naming: Some(Naming::Hf), ..LayoutRequest::default() };
    let problem = plan(&damaged, &ConvertOptions { layout, ..options(&damaged, "none") }).err().unwrap();
    let problem = problem.to_string();
    assert!(problem.contains(name) && problem.contains("differs between rank 0 and rank 1"), "{problem}");
}

#[test]
fn experts_that_cannot_be_divided_are_refused() {
    let work = tempfile::tempdir().unwrap();
    let target = work.path().join("unused");
    let refused = |model: &str, ranks| to_ranks(&open(&fixture(model)), 1, ranks, &target).unwrap_err();
    let uneven = refused("models/qwen3_5_moe", 3);
    assert!(uneven.contains("--ep 3: ") && uneven.contains("cannot be divided among 3 ranks"), "{uneven}");
    let none = refused("models/qwen3_5", 2);
    assert!(none.contains("--ep 2: this model has no experts"), "{none}");
    let zero = refused("models/qwen3_5_moe", 0);
    assert!(zero.contains("--ep must be 1 to 512, got 0"), "{zero}");
}

#[test]
fn more_ranks_than_key_value_heads_divide_the_rows_of_a_group() {
    let work = tempfile::tempdir().unwrap();
    // The fixture with one key/value head instead of two: keys and values of the first.
    let source = fixture("models/qwen3_5");
    let mut tensors = read_folder(&source);
    tensors.retain(|name, _| source_has(&source, name));
    for (name, (dtype, shape, data)) in &mut tensors {
        if name.ends_with("k_proj.weight") || name.ends_with("v_proj.weight") {
            assert_eq!(*dtype, Dtype::F32);
            shape[0] /= 2;
            data.truncate(data.len() / 2);
        }
    }
    let one = work.path().join("one");
    write(&one, tensors.clone(), &source);
    let config = std::fs::read_to_string(one.join("config.json")).unwrap();
    let config = config.replace("\"num_key_value_heads\": 2", "\"num_key_value_heads\": 1");
    std::fs::write(one.join("config.json"), config).unwrap();
    let there = work.path().join("megatron");
    to(&open(&one), Naming::Megatron, Some(2), &there);
    let back = work.path().join("back");
    to(&open(&there), Naming::Hf, None, &back);
    assert_eq!(read_folder(&back), tensors);
}

/// True for the tensors of the model, not for golden values beside it.
fn source_has(source: &Path, name: &str) -> bool {
    open(source).tensors.iter().any(|tensor| tensor.name == name)
}
