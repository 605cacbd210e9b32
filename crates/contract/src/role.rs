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
        if let [block, ..] = segments[..]
            && (block == "blk" || GGUF_GLOBAL.iter().any(|row| row.0 == block))
        {
            return Role::of_gguf(&segments);
        }
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

/// Tensors outside of the layers in GGUF.
const GGUF_GLOBAL: [(&str, Role); 7] = [
    ("token_embd", Role::Embedding),
    ("per_layer_token_embd", Role::Embedding),
    ("per_layer_model_proj", Role::Embedding),
    ("per_layer_proj_norm", Role::Embedding),
    ("output_norm", Role::Norm),
    ("output", Role::OutputHead),
    ("rope_freqs", Role::Attention),
];

impl Role {
    /// Returns the role of a tensor in GGUF: `token_embd.weight` or `blk.3.attn_q.weight`.
    fn of_gguf(segments: &[&str]) -> Role {
        let module = match segments {
            ["blk", _, module, ..] => *module,
            [global, ..] => {
                let row = GGUF_GLOBAL.iter().find(|row| row.0 == *global);
                return row.map_or(Role::Other, |row| row.1);
            }
            [] => return Role::Other,
        };
        match module {
            "nextn" => Role::Mtp,
            "indexer" => Role::Indexer,
            "attn_qkv" | "attn_gate" => Role::LinearAttention,
            "ffn_gate_inp" | "exp_probs_b" => Role::Router,
            "inp_gate" | "proj" | "post_norm" => Role::Embedding,
            "layer_output_scale" => Role::Norm,
            m if m.starts_with("ssm_") => Role::LinearAttention,
            m if m.ends_with("_exps") || m.ends_with("_shexp") => Role::Experts,
            "attn_norm" | "post_attention_norm" | "ffn_norm" => Role::Norm,
            m if m.starts_with("post_ffw_norm") || m.starts_with("pre_ffw_norm") => Role::Norm,
            m if m.starts_with("attn_") => Role::Attention,
            m if m.starts_with("ffn_") => Role::Mlp,
            _ => Role::Other,
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
            ("token_embd.weight", Role::Embedding),
            ("blk.0.ssm_a", Role::LinearAttention),
            ("blk.0.attn_qkv.weight", Role::LinearAttention),
            ("blk.3.attn_q_norm.weight", Role::Attention),
            ("blk.3.attn_norm.weight", Role::Norm),
            ("blk.3.ffn_gate_inp.weight", Role::Router),
            ("blk.3.ffn_up_shexp.weight", Role::Experts),
            ("blk.3.ffn_up.weight", Role::Mlp),
            ("output.weight", Role::OutputHead),
            ("something", Role::Other),
        ] {
            assert_eq!(Role::of(name), role, "{name}");
        }
    }
}
