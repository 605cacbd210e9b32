//! The role of a tensor in a model, by its name, in any layout.

use std::fmt;

use serde::Serialize;

/// The role of a tensor in a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs)] // the names are the documentation
pub enum Role {
    Embedding,
    LinearAttention,
    Attention,
    Indexer,
    Mlp,
    Experts,
    Router,
    Norm,
    OutputHead,
    Mtp,
    Vision,
    Other,
}

impl Role {
    /// Returns the role of the tensor called `name`.
    pub fn of(name: &str) -> Role {
        let segments: Vec<&str> = name.split('.').collect();
        let has = |words: &[&str]| segments.iter().any(|s| words.contains(s));
        let (last, owner) = match segments.as_slice() {
            [.., owner, last] => (*last, *owner),
            _ => (name, ""),
        };
        let gdn_only = ["A_log", "dt_bias", "out_norm", "out_proj", "in_proj", "conv1d"];
        if has(&["visual", "vision_tower", "vision_model", "multi_modal_projector", "audio_tower"]) {
            Role::Vision
        } else if has(&["mtp"]) {
            Role::Mtp
        } else if has(&["linear_attn"])
            || has(&["self_attention"]) && has(&gdn_only) && last != "layer_norm_weight"
        {
            Role::LinearAttention
        } else if has(&["embed_tokens", "embedding", "word_embeddings"]) || name.contains("per_layer") {
            Role::Embedding
        } else if has(&["lm_head", "output_layer"]) {
            Role::OutputHead
        } else if has(&["indexer"]) {
            Role::Indexer
        } else if matches!(last, "layer_norm_weight" | "layer_scalar")
            || owner.contains("norm") && !has(&["self_attn", "self_attention"])
        {
            Role::Norm
        } else if has(&["self_attn", "self_attention"]) {
            Role::Attention
        } else if has(&["router"]) || has(&["mlp", "block_sparse_moe"]) && owner == "gate" {
            Role::Router
        } else if has(&["experts", "shared_expert", "shared_experts", "shared_expert_gate"]) {
            Role::Experts
        } else if has(&["mlp"]) {
            Role::Mlp
        } else {
            Role::Other
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Role::Embedding => "embedding",
            Role::LinearAttention => "linear attention",
            Role::Attention => "attention",
            Role::Indexer => "indexer",
            Role::Mlp => "mlp",
            Role::Experts => "experts",
            Role::Router => "router",
            Role::Norm => "norm",
            Role::OutputHead => "output head",
            Role::Mtp => "mtp",
            Role::Vision => "vision",
            Role::Other => "other",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_every_layout_get_their_role() {
        for (name, role) in [
            ("model.embed_tokens.weight", Role::Embedding),
            ("embedding.word_embeddings.weight", Role::Embedding),
            ("model.layers.0.linear_attn.A_log", Role::LinearAttention),
            ("model.layers.0.linear_attn._fp32_params.A_log", Role::LinearAttention),
            ("model.layers.0.linear_attn.norm.weight", Role::LinearAttention),
            ("decoder.layers.0.self_attention.out_norm.weight", Role::LinearAttention),
            ("decoder.layers.0.self_attention.in_proj.weight", Role::LinearAttention),
            ("decoder.layers.0.self_attention.in_proj.layer_norm_weight", Role::Norm),
            ("decoder.layers.3.self_attention.linear_qkv.weight", Role::Attention),
            ("model.layers.3.self_attn.q_norm.weight", Role::Attention),
            ("model.layers.3.self_attn.indexer.wk.weight", Role::Indexer),
            ("model.layers.0.mlp.gate_proj.weight", Role::Mlp),
            ("model.layers.0.mlp.gate.weight", Role::Router),
            ("model.layers.0.mlp.experts.7.up_proj.weight", Role::Experts),
            ("model.layers.0.mlp.shared_expert_gate.weight", Role::Experts),
            ("model.layers.0.input_layernorm.weight", Role::Norm),
            ("model.norm.weight", Role::Norm),
            ("model.layers.0.post_feedforward_layernorm_1.weight", Role::Norm),
            ("model.layers.0.layer_scalar", Role::Norm),
            ("model.layers.0.per_layer_projection.weight", Role::Embedding),
            ("lm_head.weight", Role::OutputHead),
            ("mtp.layers.0.self_attn.q_proj.weight", Role::Mtp),
            ("model.visual.blocks.0.norm1.weight", Role::Vision),
            ("something", Role::Other),
        ] {
            assert_eq!(Role::of(name), role, "{name}");
        }
    }
}
