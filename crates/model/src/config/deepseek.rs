//! Parser of the DeepSeek family: deepseek_v32.

use ballast_kernels::glu::Activation;
use ballast_kernels::rotary::{Frequencies, Layout};

use super::fields::Fields;
use super::{
    Config, Experts, LatentAttention, Layer, Mixer, Rope, Router, SharedExpert, check_heads, check_top_k,
    padding, rope, unsupported_layer,
};
use crate::error::Result;

/// Name of the only layer type, and its older name.
const LAYER_TYPES: [&str; 2] = ["indexed_attention", "deepseek_sparse_attention"];

pub(super) fn parse(fields: &Fields<'_>) -> Result<Config> {
    fields.one_of("hidden_act", &["silu"])?;
    fields.one_of("scoring_func", &["sigmoid"])?;
    fields.one_of("topk_method", &["noaux_tc"])?;
    let layers = fields.layers(61)?;
    if let Some(types) = fields.texts("layer_types", layers)?
        && let Some(other) = types.iter().find(|kind| !LAYER_TYPES.contains(kind))
    {
        return Err(unsupported_layer(fields, other, &LAYER_TYPES.join(", ")));
    }
    let hidden = fields.count("hidden_size", 7168)?;
    let max_positions = fields.count("max_position_embeddings", 163840)?;
    let rope_dim = fields.count("qk_rope_head_dim", 64)?;
    let family = rope::Family { theta: 10000.0, partial: 1.0, rotates_part: false, max_positions };
    let indexer_rope = rope::flat(fields, &LAYER_TYPES, rope_dim, &family)?;
    if !matches!(indexer_rope.frequencies, Frequencies::Plain { .. } | Frequencies::Yarn { .. })
        && let Some(own) = rope::flat_dictionary(fields)?
    {
        // Transformers scales the softmax by it for every rope type except `default`.
        own.only("mscale_all_dim", 0)?;
    }
    let attention = attention(fields, rope_dim, indexer_rope)?;
    let experts = experts(fields)?;
    let dense = fields.count("intermediate_size", 18432)?;
    let vocabulary = fields.count("vocab_size", 129280)?;
    let first_dense = fields.whole("first_k_dense_replace")?.unwrap_or(3);
    let kinds = fields.texts("mlp_layer_types", layers)?;
    let layer = |i: usize| {
        let sparse = match kinds.as_ref().map(|kinds| kinds[i]) {
            None => i >= first_dense,
            Some("sparse") => true,
            Some("dense") => false,
            Some(other) => {
                let problem = format!("has {other:?}, which is not supported; use dense or sparse");
                return Err(fields.error("mlp_layer_types", problem));
            }
        };
        Ok(Layer {
            mixer: Mixer::Latent(attention.clone()),
            dense: (!sparse).then_some(dense),
            experts: sparse.then_some(experts),
        })
    };
    Ok(Config {
        model_type: "deepseek_v32".into(),
        vocabulary,
        hidden,
        eps: fields.positive("rms_norm_eps", 1e-6)? as f32,
        one_plus_norms: false,
        embedding_scale: 1.0,
        padding: padding(fields, None, vocabulary)?,
        tied: fields.flag("tie_word_embeddings", false)?,
        final_cap: None,
        activation: Activation::Silu,
        max_positions,
        norms_after: false,
        layer_scalar: false,
        per_layer_inputs: None,
        router_aux_loss: 0.0,
        initializer_range: super::initializer_range(fields)?,
        layers: (0..layers).map(layer).collect::<Result<_>>()?,
    })
}

fn attention(fields: &Fields<'_>, rope_dim: usize, indexer_rope: Rope) -> Result<LatentAttention> {
    let heads = fields.count("num_attention_heads", 128)?;
    fields.only("num_key_value_heads", heads)?;
    fields.only("moe_layer_freq", 1)?;
    fields.only("mlp_bias", false)?;
    fields.only("rope_interleave", true)?;
    let nope_dim = fields.count("qk_nope_head_dim", 128)?;
    let attention = LatentAttention {
        heads,
        q_rank: fields.count("q_lora_rank", 1536)?,
        kv_rank: fields.count("kv_lora_rank", 512)?,
        nope_dim,
        rope_dim,
        value_dim: fields.count("v_head_dim", 128)?,
        rope: Rope { layout: Layout::Interleaved, ..indexer_rope },
        indexer_rope,
        scale: (((nope_dim + rope_dim) as f64).powf(-0.5) * indexer_rope.softmax_factor()) as f32,
        index_heads: fields.count("index_n_heads", 64)?,
        index_dim: fields.count("index_head_dim", 128)?,
        index_topk: fields.count("index_topk", 2048)?,
        bias: fields.flag("attention_bias", false)?,
    };
    if attention.index_dim < rope_dim {
        return Err(fields.error(
            "index_head_dim",
            format!("must be at least qk_rope_head_dim ({rope_dim}), got {}", attention.index_dim),
        ));
    }
    Ok(attention)
}

fn experts(fields: &Fields<'_>) -> Result<Experts> {
    // Older and newer names of the same setting; transformers tries them in this order.
    let names = ["num_local_experts", "num_experts", "n_routed_experts"];
    let name = names.into_iter().find(|name| fields.get(name).is_some()).unwrap_or("n_routed_experts");
    let count = fields.count(name, 256)?;
    let top_k = fields.count("num_experts_per_tok", 8)?;
    let groups = fields.count("n_group", 8)?;
    let kept_groups = fields.count("topk_group", 4)?;
    check_top_k(fields, count, top_k, "num_experts_per_tok")?;
    check_heads(fields, count, groups, "n_group")?;
    if kept_groups > groups || kept_groups * (count / groups) < top_k {
        let least = top_k.div_ceil(count / groups);
        let problem = format!("must be {least} to {groups}, got {kept_groups}");
        return Err(fields.error("topk_group", problem));
    }
    let intermediate = fields.count("moe_intermediate_size", 2048)?;
    let shared = fields.whole("n_shared_experts")?.unwrap_or(1);
    Ok(Experts {
        count,
        top_k,
        intermediate,
        router: Router::SigmoidGroups {
            groups,
            kept_groups,
            normalize: fields.flag("norm_topk_prob", true)?,
            scaling: fields.positive("routed_scaling_factor", 2.5)? as f32,
        },
        shared: (shared > 0).then_some(SharedExpert { intermediate: shared * intermediate, gated: false }),
    })
}
