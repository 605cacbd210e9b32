//! Lays out the files of checkpoints in torch's formats.
//!
//! ```text
//! torch       latest_checkpointed_iteration.txt ("release"), release/mp_rank_TT[_EEE]/model_optim_rng.pt
//! torch_dist  latest_checkpointed_iteration.txt ("release"), release/{.metadata, __0_N.distcp, common.pt,
//!             metadata.json}
//! dcp         .metadata, __0_N.distcp
//! ```
//! A `.distcp` file is a sequence of files of `torch.save` with one tensor each, and `.metadata` has their
//! places. Tensors are whole, so that any number of ranks can load them.

use std::collections::HashSet;

use ballast_files::frame::Frame;
use ballast_files::header::TensorInfo;
use ballast_files::{Error, Result};
use serde_json::{Map, Value, json};

use super::megatron::COUNTS;
use super::pickler::{Pickler, StoredType, stored_type};
use super::zipper::{ALIGNMENT, Zip};

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

fn type_of(tensor: &TensorInfo) -> Result<StoredType> {
    stored_type(tensor.dtype).ok_or_else(|| {
        let problem = format!("{} cannot be written in torch's formats; use --dtype bf16", tensor.dtype);
        Error::tensor(&tensor.name, problem)
    })
}

/// Names of the modules of Transformer Engine that have these tensors.
fn engine_modules<'a>(tensors: impl Iterator<Item = &'a TensorInfo>) -> Vec<String> {
    let module = |tensor: &TensorInfo| {
        let (module, _) = tensor.name.rsplit_once('.')?;
        let last = module.rsplit('.').next()?;
        ENGINE_MODULES.contains(&last).then(|| module.to_string())
    };
    let mut modules: Vec<String> = tensors.filter_map(module).collect();
    modules.sort();
    modules.dedup();
    modules
}

/// Names of the extra state of these modules in a distributed checkpoint: one for each expert, or one.
fn extra_state_names(files: &[Vec<TensorInfo>]) -> Vec<String> {
    let experts = |module: &str| {
        let weight = format!("{module}.weight");
        let stacked =
            files.iter().flatten().find(|t| t.name == weight && module.contains(".experts.experts."));
        stacked.map_or(1, |tensor| tensor.shape[0])
    };
    let names = |module: &String| {
        let (module, count) = (module.clone(), experts(module));
        (0..count).map(move |number| format!("{module}._extra_state/shard_{number}_{count}"))
    };
    let mut modules = engine_modules(files.iter().flatten());
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

/// Lays out a rank's file of Megatron's legacy format.
pub fn legacy_file(tensors: &[TensorInfo], arguments: Option<&Value>) -> Result<Frame> {
    let mut modules = engine_modules(tensors.iter());
    modules.extend(core_attention(&modules));
    let stored: HashSet<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    modules.retain(|module| !stored.contains(format!("{module}._extra_state").as_str()));
    let types = tensors.iter().map(type_of).collect::<Result<Vec<_>>>()?;
    let mut pickle = Pickler::new();
    pickle.dict(|p| {
        start_arguments(p, arguments);
        p.text("model").dict(|p| {
            for (key, (tensor, dtype)) in tensors.iter().zip(types).enumerate() {
                p.text(&tensor.name).tensor(key, dtype, &tensor.shape);
            }
            for (number, module) in modules.iter().enumerate() {
                p.text(&format!("{module}._extra_state"));
                p.tensor(tensors.len() + number, EMPTY, &[0]);
            }
        });
    });
    let mut zip = start("model_optim_rng", 0, pickle.finish());
    let reserve = |(key, tensor): (usize, &TensorInfo)| zip.reserve(&format!("data/{key}"), tensor.bytes);
    let positions = tensors.iter().enumerate().map(reserve).collect();
    for number in 0..modules.len() {
        zip.add(&format!("data/{}", tensors.len() + number), Vec::new());
    }
    let bytes = finish(&mut zip);
    Ok(Frame { literals: zip.literals, positions, bytes, checksums: zip.checksums })
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

/// Returns the content of common.pt: all that is not a tensor of the model.
pub fn common_file(arguments: Option<&Value>) -> Vec<u8> {
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

/// The files of a distributed checkpoint.
pub struct Distributed {
    /// Files with tensors, by name.
    pub files: Vec<(String, Frame)>,
    /// Content of `.metadata`.
    pub metadata: Vec<u8>,
}

/// Lays out the files of a distributed checkpoint, with these tensors each.
pub fn distributed_files(files: &[Vec<TensorInfo>], is_megatron: bool) -> Result<Distributed> {
    let extra_state = if is_megatron { extra_state_names(files) } else { Vec::new() };
    let mut stored = Vec::new();
    let mut frames = Vec::new();
    for (number, tensors) in files.iter().enumerate() {
        let file = format!("__0_{number}.distcp");
        let mut frame = Frame::default();
        let mut at = 0;
        for tensor in tensors {
            let (dtype, shape) = (type_of(tensor)?, tensor.shape.clone());
            let mut pickle = Pickler::new();
            pickle.tensor(0, dtype, &shape);
            let mut zip = start("archive", at, pickle.finish());
            frame.positions.push(zip.reserve("data/0", tensor.bytes));
            let end = finish(&mut zip);
            stored.push(Stored {
                name: tensor.name.clone(),
                tensor: Some((dtype, shape)),
                file: file.clone(),
                offset: at,
                length: end - at,
            });
            frame.literals.append(&mut zip.literals);
            frame.checksums.append(&mut zip.checksums);
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
                frame.literals.push((at, state));
                at = end;
            }
        }
        frame.bytes = at;
        frames.push((file, frame));
    }
    Ok(Distributed { files: frames, metadata: metadata(&stored, is_megatron) })
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

/// Returns Megatron's arguments for a config.json of Qwen3.5 or Qwen3-Next, for so many tensor- and expert-parallel
/// ranks, in the legacy or the distributed format.
pub fn arguments(config: &Value, (tensor_ranks, expert_ranks): (usize, usize), is_legacy: bool) -> Value {
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
        "tensor_model_parallel_size": tensor_ranks,
        "expert_model_parallel_size": expert_ranks,
        "expert_tensor_parallel_size": tensor_ranks,
        "pipeline_model_parallel_size": 1,
        "normalization": "RMSNorm",
        "apply_layernorm_1p": true,
        "add_bias_linear": false,
        "swiglu": true,
        "qk_layernorm": true,
        "attention_output_gate": true,
        "position_embedding_type": "rope",
        "experimental_attention_variant": "gated_delta_net",
        "ckpt_format": if is_legacy { "torch" } else { "torch_dist" },
        "iteration": 0,
    });
    made.extend(fixed.as_object().cloned().unwrap_or_default());
    Value::Object(made)
}
