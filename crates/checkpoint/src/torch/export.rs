//! Plans checkpoints in torch's formats.
//!
//! ```text
//! torch       latest_checkpointed_iteration.txt ("release"), release/mp_rank_TT[_EEE]/model_optim_rng.pt
//! torch_dist  latest_checkpointed_iteration.txt ("release"), release/{.metadata, __0_N.distcp, common.pt,
//!             metadata.json}
//! dcp         .metadata, __0_N.distcp
//! ```
//! A `.distcp` file is a sequence of files of `torch.save` with one tensor each, and `.metadata` has their
//! places. Tensors are whole, so that any number of ranks can load them.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

use ballast_contract::Dtype;
use serde_json::{Map, Value, json};

use super::distributed::METADATA;
use super::megatron::{COUNTS, PACKED};
use super::pickler::{Pickler, StoredType, stored_type};
use super::zipper::{ALIGNMENT, Zip};
use super::{RANK_FILE, RELEASE, TRACKER};
use crate::error::{Error, Result};
use crate::layout::{Geometry, Ranks, is_extra_state};
use crate::open::Checkpoint;
use crate::ranks::rank_folder;
use crate::view::View;
use crate::write::{Output, Shard, WritePlan};

/// File format of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum FileFormat {
    /// Safetensors.
    #[default]
    Safetensors,
    /// Megatron's legacy format: one file of `torch.save` for each rank.
    Torch,
    /// Megatron's distributed format.
    TorchDist,
    /// torch.distributed.checkpoint with the names of transformers, for FSDP2.
    Dcp,
}

impl FileFormat {
    /// Returns the folder of config.json and other files in the folder of the checkpoint.
    pub(crate) fn folder(self, root: &Path) -> PathBuf {
        match self {
            FileFormat::Safetensors | FileFormat::Dcp => root.into(),
            FileFormat::Torch | FileFormat::TorchDist => root.join(RELEASE),
        }
    }
}

/// Modules of Transformer Engine: their state dicts have an `_extra_state`, empty without FP8.
const ENGINE_MODULES: [&str; 14] = [
    "in_proj",
    "out_norm",
    "out_proj",
    "linear_qkv",
    "linear_proj",
    "q_layernorm",
    "k_layernorm",
    "linear_fc1",
    "linear_fc2",
    "pre_mlp_layernorm",
    "final_layernorm",
    "enorm",
    "hnorm",
    "eh_proj",
];

/// Plans the files in `folder` for these tensors, by rank; the configuration is that of `source`.
pub(crate) fn plan(
    format: FileFormat,
    folder: &Path,
    outputs: Vec<Vec<Output>>,
    ranks: Ranks,
    source: &Checkpoint,
    max_shard_bytes: u64,
) -> Result<WritePlan> {
    let mut outputs: Vec<Vec<Output>> = outputs.into_iter().map(without_empty_extra_state).collect();
    let content = format.folder(folder);
    let arguments = source.config.as_ref().map(|config| arguments(config, ranks, format));
    let mut files = Vec::new();
    if format != FileFormat::Dcp {
        files.push((folder.join(TRACKER), RELEASE.into()));
    }
    let shards = match format {
        FileFormat::Torch => {
            let path = |rank| content.join(rank_folder(rank, ranks.expert)).join(RANK_FILE);
            let file = |(rank, outputs)| legacy_file(path(rank), outputs, arguments.as_ref());
            outputs.into_iter().enumerate().map(file).collect::<Result<Vec<Shard>>>()?
        }
        _ => {
            let outputs = outputs.pop().unwrap_or_default();
            let outputs = match format {
                FileFormat::TorchDist => by_part(outputs, source)?,
                _ => outputs,
            };
            let (shards, metadata) =
                distributed_files(&content, outputs, format == FileFormat::TorchDist, max_shard_bytes)?;
            files.push((content.join(METADATA), metadata));
            if format == FileFormat::TorchDist {
                files.push((content.join("common.pt"), common_file(arguments.as_ref())));
                let backend = json!({
                    "sharded_backend": "torch_dist",
                    "sharded_backend_version": 1,
                    "common_backend": "torch",
                    "common_backend_version": 1,
                });
                files.push((content.join("metadata.json"), backend.to_string().into_bytes()));
            }
            shards
        }
    };
    Ok(WritePlan::of_shards(shards, files))
}

fn without_empty_extra_state(outputs: Vec<Output>) -> Vec<Output> {
    outputs.into_iter().filter(|o| o.view.elements() > 0 || !is_extra_state(&o.view.name)).collect()
}

fn type_of(output: &Output) -> Result<StoredType> {
    stored_type(output.dtype).ok_or_else(|| {
        let problem = format!("{} cannot be written in torch's formats; use --dtype bf16", output.dtype);
        Error::tensor(&output.view.name, problem)
    })
}

/// Names of the modules of Transformer Engine that have these tensors.
fn engine_modules(outputs: &[Output]) -> Vec<String> {
    let module = |output: &Output| {
        let (module, _) = output.view.name.rsplit_once('.')?;
        let last = module.rsplit('.').next()?;
        ENGINE_MODULES.contains(&last).then(|| module.to_string())
    };
    let mut modules: Vec<String> = outputs.iter().filter_map(module).collect();
    modules.sort();
    modules.dedup();
    modules
}

/// Names of the extra state of these modules in a distributed checkpoint: one for each expert, or one.
fn extra_state_names(outputs: &[Output]) -> Vec<String> {
    let experts = |module: &str| {
        let weight = format!("{module}.weight");
        let stacked = outputs.iter().find(|o| o.view.name == weight && module.contains(".experts.experts."));
        stacked.map_or(1, |output| output.view.shape[0])
    };
    let names = |module: &String| {
        let (module, count) = (module.clone(), experts(module));
        (0..count).map(move |number| format!("{module}._extra_state/shard_{number}_{count}"))
    };
    let mut modules = engine_modules(outputs);
    // Megatron leaves out the extra state of attention in the decoder, but not in the layer for prediction.
    modules.extend(core_attention(&modules).into_iter().filter(|module| module.starts_with("mtp.")));
    modules.iter().flat_map(names).collect()
}

/// Modules of attention beside these projections.
fn core_attention(modules: &[String]) -> Vec<String> {
    let attention = modules.iter().filter_map(|module| module.strip_suffix(".linear_qkv"));
    attention.map(|module| format!("{module}.core_attention")).collect()
}

/// Adds what every file of `torch.save` has after the tensors.
fn finish(zip: &mut Zip) -> u64 {
    zip.add("version", b"3\n".to_vec());
    zip.finish()
}

fn start(folder: &'static str, begin: u64, pickle: Vec<u8>) -> Zip {
    let mut zip = Zip::new(folder, begin);
    zip.add("data.pkl", pickle);
    zip.add("byteorder", b"little".to_vec());
    zip
}

/// A file of Megatron's legacy format.
fn legacy_file(path: PathBuf, outputs: Vec<Output>, arguments: Option<&Value>) -> Result<Shard> {
    let mut modules = engine_modules(&outputs);
    modules.extend(core_attention(&modules));
    let stored: HashSet<&str> = outputs.iter().map(|output| output.view.name.as_str()).collect();
    modules.retain(|module| !stored.contains(format!("{module}._extra_state").as_str()));
    let types = outputs.iter().map(type_of).collect::<Result<Vec<_>>>()?;
    let mut pickle = Pickler::new();
    pickle.dict(|p| {
        start_arguments(p, arguments);
        p.text("model").dict(|p| {
            for (key, (output, dtype)) in outputs.iter().zip(types).enumerate() {
                p.text(&output.view.name).tensor(key, dtype, &output.view.shape);
            }
            for (number, module) in modules.iter().enumerate() {
                p.text(&format!("{module}._extra_state"));
                p.tensor(outputs.len() + number, EMPTY, &[0]);
            }
        });
    });
    let mut zip = start("model_optim_rng", 0, pickle.finish());
    let reserve = |(key, output): (usize, &Output)| zip.reserve(&format!("data/{key}"), output.bytes());
    let positions = outputs.iter().enumerate().map(reserve).collect();
    for number in 0..modules.len() {
        zip.add(&format!("data/{}", outputs.len() + number), Vec::new());
    }
    let bytes = finish(&mut zip);
    Ok(Shard { path, literals: zip.literals, outputs, positions, bytes, checksums: zip.checksums })
}

const EMPTY: StoredType = StoredType { name: "uint8", storage: "ByteStorage" };

fn start_arguments(pickle: &mut Pickler, arguments: Option<&Value>) {
    if let Some(arguments) = arguments {
        pickle.text("args").object("argparse", "Namespace", |p| {
            p.json(arguments);
        });
    }
    pickle.text("checkpoint_version").float(3.0).text("iteration").integer(0);
}

/// common.pt: all that is not a tensor of the model.
fn common_file(arguments: Option<&Value>) -> Vec<u8> {
    let mut pickle = Pickler::new();
    pickle.dict(|p| start_arguments(p, arguments));
    let mut zip = start("common", 0, pickle.finish());
    zip.add("version", b"3\n".to_vec());
    zip.into_bytes()
}

/// A file of `torch.save` with the empty extra state of a module, as Megatron saves it: in a list.
fn empty_state() -> Vec<u8> {
    let mut pickle = Pickler::new();
    pickle.list(|p| {
        p.tensor(0, EMPTY, &[0]);
    });
    let mut zip = start("archive", 0, pickle.finish());
    zip.add("data/0", Vec::new());
    zip.add("version", b"3\n".to_vec());
    zip.into_bytes()
}

/// A range of a file, for a tensor or other data.
struct Stored {
    name: String,
    tensor: Option<(StoredType, Vec<u64>)>,
    file: String,
    offset: u64,
    length: u64,
}

/// The files of a distributed checkpoint, and `.metadata`.
fn distributed_files(
    folder: &Path,
    outputs: Vec<Output>,
    is_megatron: bool,
    max_shard_bytes: u64,
) -> Result<(Vec<Shard>, Vec<u8>)> {
    let extra_state = if is_megatron { extra_state_names(&outputs) } else { Vec::new() };
    let mut stored = Vec::new();
    let mut shards = Vec::new();
    for (number, outputs) in crate::write::group(outputs, max_shard_bytes).into_iter().enumerate() {
        let file = format!("__0_{number}.distcp");
        let (mut literals, mut checksums, mut positions) = (Vec::new(), Vec::new(), Vec::new());
        let mut at = 0;
        for output in &outputs {
            let (dtype, shape) = (type_of(output)?, output.view.shape.clone());
            let mut pickle = Pickler::new();
            pickle.tensor(0, dtype, &shape);
            let mut zip = start("archive", at, pickle.finish());
            positions.push(zip.reserve("data/0", output.bytes()));
            let end = finish(&mut zip);
            stored.push(Stored {
                name: output.view.name.clone(),
                tensor: Some((dtype, shape)),
                file: file.clone(),
                offset: at,
                length: end - at,
            });
            literals.append(&mut zip.literals);
            checksums.append(&mut zip.checksums);
            at = end.next_multiple_of(ALIGNMENT);
        }
        if number == 0 {
            for name in &extra_state {
                let state = empty_state();
                stored.push(Stored {
                    name: name.clone(),
                    tensor: None,
                    file: file.clone(),
                    offset: at,
                    length: state.len() as u64,
                });
                let end = at + state.len() as u64;
                literals.push((at, state));
                at = end;
            }
        }
        let path = folder.join(&file);
        shards.push(Shard { path, literals, outputs, positions, bytes: at, checksums });
    }
    Ok((shards, metadata(&stored, is_megatron)))
}

const CLASSES: &str = "torch.distributed.checkpoint.metadata";

/// The content of `.metadata`.
fn metadata(stored: &[Stored], is_megatron: bool) -> Vec<u8> {
    let mut pickle = Pickler::new();
    pickle.object(CLASSES, "Metadata", |p| {
        p.dict(|p| {
            p.text("state_dict_metadata").dict(|p| {
                for entry in stored {
                    p.text(&entry.name);
                    match &entry.tensor {
                        Some((dtype, shape)) => tensor_metadata(p, *dtype, shape),
                        None => {
                            p.object(CLASSES, "BytesStorageMetadata", |p| {
                                p.dict(|_| {});
                            });
                        }
                    }
                }
            });
            p.text("planner_data");
            match is_megatron {
                true => p.none(),
                false => p.dict(|p| {
                    for entry in stored {
                        p.text(&entry.name).tuple(|p| {
                            p.text(&entry.name);
                        });
                    }
                }),
            };
            p.text("storage_data").dict(|p| stored.iter().for_each(|entry| storage(p, entry)));
            p.text("storage_meta").none();
        });
    });
    pickle.finish()
}

fn tensor_metadata(pickle: &mut Pickler, dtype: StoredType, shape: &[u64]) {
    pickle.object(CLASSES, "TensorStorageMetadata", |p| {
        p.dict(|p| {
            p.text("properties").object(CLASSES, "TensorProperties", |p| {
                p.tuple(|p| {
                    p.global("torch", dtype.name);
                    p.global("torch.serialization", "_get_layout").tuple(|p| {
                        p.text("torch.strided");
                    });
                    p.call().truth(false);
                    p.global(CLASSES, "_MEM_FORMAT_ENCODING").tuple(|p| {
                        p.integer(0);
                    });
                    p.call().truth(false);
                });
            });
            p.text("size").size(shape);
            p.text("chunks").list(|p| {
                p.object(CLASSES, "ChunkStorageMetadata", |p| {
                    p.dict(|p| {
                        p.text("offsets").size(&vec![0; shape.len()]).text("sizes").size(shape);
                    });
                });
            });
        });
    });
}

fn storage(pickle: &mut Pickler, entry: &Stored) {
    pickle.object(CLASSES, "MetadataIndex", |p| {
        p.dict(|p| {
            p.text("fqn").text(&entry.name).text("offset");
            match &entry.tensor {
                Some((_, shape)) => p.size(&vec![0; shape.len()]).text("index").integer(0),
                None => p.none().text("index").none(),
            };
        });
    });
    pickle.object("torch.distributed.checkpoint.filesystem", "_StorageInfo", |p| {
        p.dict(|p| {
            p.text("relative_path").text(&entry.file);
            p.text("offset").integer(entry.offset as i64);
            p.text("length").integer(entry.length as i64);
            p.text("transform_descriptors").none();
        });
    });
}

/// Divides packed projections by part, and stacks experts: tensors that do not depend on the number of ranks.
fn by_part(outputs: Vec<Output>, source: &Checkpoint) -> Result<Vec<Output>> {
    let mut made = Vec::new();
    let mut experts: BTreeMap<(String, Dtype), Vec<(u64, View)>> = BTreeMap::new();
    for Output { view, dtype } in outputs {
        if let Some((_, parts)) = PACKED.iter().find(|(suffix, _)| view.name.ends_with(suffix)) {
            let g = Geometry::of(source)?;
            let rows = [g.qk_rows(), g.qk_rows(), g.v_rows(), g.v_rows(), g.value_heads, g.value_heads];
            let mut at = 0;
            for (part, rows) in parts.iter().zip(rows) {
                let slice = view.slice(0, at..at + rows)?.renamed(format!("{}.{part}", view.name));
                made.push(Output { view: slice, dtype });
                at += rows;
            }
            if at != view.shape[0] {
                let problem = format!("{} rows, but config.json describes {at}", view.shape[0]);
                return Err(Error::tensor(&view.name, problem));
            }
            continue;
        }
        let Some((name, number)) = expert_of(&view.name) else {
            made.push(Output { view, dtype });
            continue;
        };
        let shape = [&[1], view.shape.as_slice()].concat();
        let view = view.reshaped(&shape)?;
        experts.entry((name, dtype)).or_default().push((number, view));
    }
    for ((name, dtype), mut members) in experts {
        members.sort_by_key(|(number, _)| *number);
        let views: Vec<View> = members.into_iter().map(|(_, view)| view).collect();
        made.push(Output { view: View::concat(name, 0, &views)?, dtype });
    }
    Ok(made)
}

/// The stacked tensor of an expert's tensor, and the number of the expert.
fn expert_of(name: &str) -> Option<(String, u64)> {
    let (module, leaf) = name.split_once(".mlp.experts.linear_fc")?;
    let (layer, number) = leaf.split_once(".weight")?;
    Some((format!("{module}.mlp.experts.experts.linear_fc{layer}.weight"), number.parse().ok()?))
}

/// Megatron's arguments for a config.json of Qwen3.5 or Qwen3-Next.
fn arguments(config: &Value, ranks: Ranks, format: FileFormat) -> Value {
    let text = config.get("text_config").unwrap_or(config);
    let rope = text.get("rope_parameters");
    let get = |key: &str| text.get(key).cloned();
    let rotary = |key: &str| rope.and_then(|rope| rope.get(key)).cloned().or_else(|| get(key));
    let mut made = Map::new();
    let counts = COUNTS.iter().map(|(key, argument)| (*argument, get(key)));
    let others = [
        ("norm_epsilon", get("rms_norm_eps")),
        ("num_experts", get("num_experts")),
        ("rotary_base", rotary("rope_theta")),
        ("rotary_percent", rotary("partial_rotary_factor")),
    ];
    for (argument, value) in counts.chain(others) {
        if let Some(value) = value {
            made.insert(argument.into(), value);
        }
    }
    if let Some(kinds) = get("layer_types").as_ref().and_then(Value::as_array) {
        let linear = kinds.iter().map(|kind| json!((kind == "linear_attention") as u8)).collect();
        made.insert("linear_attention_freq".into(), Value::Array(linear));
    }
    let tied = text.get("tie_word_embeddings").or_else(|| config.get("tie_word_embeddings"));
    let tied = tied.and_then(Value::as_bool).unwrap_or(false);
    let fixed = json!({
        "untie_embeddings_and_output_weights": !tied,
        "tensor_model_parallel_size": ranks.tensor,
        "expert_model_parallel_size": ranks.expert,
        "expert_tensor_parallel_size": ranks.tensor,
        "pipeline_model_parallel_size": 1,
        "normalization": "RMSNorm",
        "apply_layernorm_1p": true,
        "add_bias_linear": false,
        "swiglu": true,
        "qk_layernorm": true,
        "attention_output_gate": true,
        "position_embedding_type": "rope",
        "experimental_attention_variant": "gated_delta_net",
        "ckpt_format": if format == FileFormat::Torch { "torch" } else { "torch_dist" },
        "iteration": 0,
    });
    made.extend(fixed.as_object().cloned().unwrap_or_default());
    Value::Object(made)
}
