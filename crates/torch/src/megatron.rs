//! Megatron's own names in `torch_dist` checkpoints, and the geometry in its arguments.
//!
//! There, tensors do not depend on the number of ranks: the packed projections are stored by part, and experts
//! in one tensor. Put together they are the tensors of one rank:
//! ```text
//! in_proj.weight.{query,key,value,z,beta,alpha}   in_proj.weight, rows in this order
//! conv1d.weight.{query,key,value}                 conv1d.weight
//! mlp.experts.experts.linear_fcN.weight [E, ...]  mlp.experts.linear_fcN.weight{e}
//! ```

use std::collections::HashMap;

use ballast_files::assembly::rows_of;
use ballast_files::ranks::PIPELINE;
use ballast_files::{Error, Result};
use serde_json::{Map, Value, json};

use super::pickle::{Id, Node, Pickle};
use super::saved::Found;

/// Packed projections, and their parts in `torch_dist` checkpoints.
pub const PACKED: [(&str, &[&str]); 2] = [
    (".in_proj.weight", &["query", "key", "value", "z", "beta", "alpha"]),
    (".conv1d.weight", &["query", "key", "value"]),
];

/// Counts in config.json, and the arguments of Megatron that they are.
pub(super) const COUNTS: [(&str, &str); 16] = [
    ("hidden_size", "hidden_size"),
    ("num_hidden_layers", "num_layers"),
    ("intermediate_size", "ffn_hidden_size"),
    ("num_attention_heads", "num_attention_heads"),
    ("num_key_value_heads", "num_query_groups"),
    ("head_dim", "kv_channels"),
    ("linear_conv_kernel_dim", "linear_conv_kernel_dim"),
    ("linear_key_head_dim", "linear_key_head_dim"),
    ("linear_value_head_dim", "linear_value_head_dim"),
    ("linear_num_key_heads", "linear_num_key_heads"),
    ("linear_num_value_heads", "linear_num_value_heads"),
    ("vocab_size", "padded_vocab_size"),
    ("num_experts_per_tok", "moe_router_topk"),
    ("moe_intermediate_size", "moe_ffn_hidden_size"),
    ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    ("max_position_embeddings", "max_position_embeddings"),
];

/// Most experts of a layer; each becomes a tensor.
const MOST_EXPERTS: u64 = 1 << 16;

/// Assembles the tensors as on a single rank.
pub(crate) fn as_one_rank(found: Vec<Found>) -> Result<Vec<Found>> {
    let mut made: Vec<Found> = Vec::new();
    let mut packed: HashMap<String, Vec<Option<Found>>> = HashMap::new();
    for tensor in found {
        if let Some((whole, number, count)) = packed_part(&tensor.name) {
            let parts = packed.entry(whole.clone()).or_insert_with(|| vec![None; count]);
            parts[number] = Some(tensor);
            if parts.iter().all(Option::is_some) {
                let parts: Vec<Found> = packed.remove(&whole).into_iter().flatten().flatten().collect();
                made.push(stacked(whole, parts)?);
            }
        } else if let Some((module, leaf)) = tensor.name.split_once(".mlp.experts.experts.") {
            let (count, rest) = match tensor.shape.as_slice() {
                [count, rest @ ..] if !rest.is_empty() && *count <= MOST_EXPERTS => (*count, rest.to_vec()),
                other => {
                    let problem = format!(
                        "shape {other:?}, expected [experts, ...] with at most {MOST_EXPERTS} experts"
                    );
                    return Err(Error::tensor(&tensor.name, problem));
                }
            };
            let width = tensor.dtype.bytes().unwrap_or(1);
            for expert in 0..count {
                let name = format!("{module}.mlp.experts.{leaf}{expert}");
                let mut parts = rows_of(&tensor.parts, width, expert..expert + 1);
                for part in &mut parts {
                    part.offsets.remove(0);
                    part.sizes.remove(0);
                    part.strides.remove(0);
                }
                made.push(Found { name, dtype: tensor.dtype, shape: rest.clone(), parts });
            }
        } else {
            made.push(tensor);
        }
    }
    if let Some((whole, parts)) = packed.into_iter().next() {
        let names =
            PACKED.iter().find(|(suffix, _)| whole.ends_with(suffix)).map_or(&[][..], |(_, names)| names);
        let missing = parts.iter().zip(names).find(|(part, _)| part.is_none()).map_or("", |(_, name)| name);
        return Err(Error::tensor(&whole, format!("its part {missing} is missing")));
    }
    Ok(made)
}

/// The packed tensor of a part, the number of the part, and the number of all parts.
fn packed_part(name: &str) -> Option<(String, usize, usize)> {
    PACKED.iter().find_map(|(suffix, names)| {
        let (whole, part) = name.rsplit_once('.')?;
        let number = names.iter().position(|name| *name == part)?;
        whole.ends_with(suffix).then(|| (whole.to_string(), number, names.len()))
    })
}

/// Tensors below each other.
fn stacked(name: String, tensors: Vec<Found>) -> Result<Found> {
    let mut whole: Option<Found> = None;
    for tensor in tensors {
        let Some(upper) = &mut whole else {
            whole = Some(Found { name: name.clone(), ..tensor });
            continue;
        };
        if upper.dtype != tensor.dtype
            || tensor.shape.is_empty()
            || upper.shape.get(1..) != tensor.shape.get(1..)
        {
            let problem = format!(
                "{} {:?} cannot be put below {} {:?}",
                tensor.dtype, tensor.shape, upper.dtype, upper.shape
            );
            return Err(Error::tensor(&tensor.name, problem));
        }
        let rows = upper.shape[0];
        let joined = rows.checked_add(tensor.shape[0]);
        upper.shape[0] = joined.ok_or_else(|| Error::tensor(&name, "too many rows"))?;
        upper.parts.extend(tensor.parts.into_iter().map(|mut part| {
            part.offsets[0] += rows;
            part
        }));
    }
    whole.ok_or_else(|| Error::tensor(name, "no parts"))
}

/// A config.json from the arguments that Megatron saves: `args` of the root of common.pt or of a rank's file.
pub(crate) fn config_from_args(pickle: &Pickle<'_>) -> Option<Value> {
    let args = pickle.state(pickle.entry(pickle.root(), "args")?, "Namespace")?;
    let field = |name: &str| pickle.entry(args, name).and_then(|id| plain(pickle, id));
    let count = |name: &str| field(name).filter(Value::is_u64);
    let mut config = Map::new();
    let mut set = |key: &str, value: Option<Value>| {
        if let Some(value) = value {
            config.insert(key.into(), value);
        }
    };
    let experts = count("num_experts");
    let family = if experts.is_some() { "qwen3_5_moe_text" } else { "qwen3_5_text" };
    let class = if experts.is_some() { "Qwen3_5MoeForCausalLM" } else { "Qwen3_5ForCausalLM" };
    set("architectures", Some(json!([class])));
    set("model_type", Some(json!(family)));
    for (key, argument) in COUNTS {
        set(key, count(argument));
    }
    set("num_experts", experts);
    set("rms_norm_eps", Some(field("norm_epsilon").unwrap_or(json!(1e-6))));
    set("hidden_act", Some(json!("silu")));
    let untied = field("untie_embeddings_and_output_weights").and_then(|v| v.as_bool());
    set("tie_word_embeddings", untied.map(|untied| json!(!untied)));
    let layers = pickle.entry(args, "linear_attention_freq");
    set("layer_types", layers.and_then(|id| layer_types(pickle, id, count("num_layers")?.as_u64()?)));
    let rope = json!({
        "rope_type": "default",
        "rope_theta": field("rotary_base"),
        "partial_rotary_factor": field("rotary_percent"),
    });
    set("rope_parameters", field("rotary_base").map(|_| rope));
    Some(Value::Object(config))
}

/// Returns why the files of these ranks cannot be joined, by the arguments that Megatron saves.
pub(crate) fn unsupported_ranks(pickle: &Pickle<'_>) -> Option<String> {
    let args = pickle.state(pickle.entry(pickle.root(), "args")?, "Namespace")?;
    let count = |name: &str| pickle.entry(args, name).and_then(|id| pickle.count(id));
    if count("pipeline_model_parallel_size").is_some_and(|ranks| ranks > 1) {
        return Some(PIPELINE.into());
    }
    let (tensor, expert) = (count("tensor_model_parallel_size")?, count("expert_tensor_parallel_size")?);
    (count("num_experts").is_some() && tensor != expert).then(|| {
        format!(
            "experts are divided among {expert} tensor-parallel ranks and the rest among {tensor}, which is not \
             supported; save with --ckpt-format torch_dist, which has no ranks"
        )
    })
}

/// A number, string, truth value or none.
fn plain(pickle: &Pickle<'_>, id: Id) -> Option<Value> {
    match pickle.node(id) {
        Node::Bool(value) => Some(json!(value)),
        Node::Int(value) => Some(json!(value)),
        Node::Float(value) => Some(json!(value)),
        Node::Text(_) => pickle.text(id).map(Value::from),
        _ => None,
    }
}

/// Kinds of layers: a list with 1 for linear attention, or n, for which every n-th layer is softmax attention.
fn layer_types(pickle: &Pickle<'_>, id: Id, layers: u64) -> Option<Value> {
    const MOST_LAYERS: u64 = 1 << 16;
    let kind = |linear: bool| if linear { "linear_attention" } else { "full_attention" };
    let kinds: Vec<&str> = match pickle.count(id) {
        Some(every) if every > 0 && layers <= MOST_LAYERS => {
            (1..=layers).map(|layer| kind(layer % every != 0)).collect()
        }
        Some(_) => return None,
        None => pickle.counts(id)?.into_iter().map(|flag| kind(flag == 1)).collect(),
    };
    Some(json!(kinds))
}

#[cfg(test)]
mod tests {
    use ballast_contract::Dtype;

    use super::*;

    #[test]
    fn experts_without_values_do_not_become_tensors_without_end() {
        let name = "decoder.layers.0.mlp.experts.experts.linear_fc1.weight".to_string();
        let tensor = Found { name, dtype: Dtype::Bf16, shape: vec![1 << 40, 0, 8], parts: Vec::new() };
        let error = as_one_rank(vec![tensor]).unwrap_err().to_string();
        assert!(error.contains("linear_fc1") && error.contains("at most 65536 experts"), "{error}");
    }
}
