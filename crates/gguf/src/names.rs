//! Names of tensors in llama.cpp, by their hf names.

use super::family::Family;

/// Tensors outside of the layers: hf name without prefix, llama.cpp's name.
const GLOBAL: [(&str, &str); 6] = [
    ("embed_tokens.weight", "token_embd.weight"),
    ("norm.weight", "output_norm.weight"),
    ("lm_head.weight", "output.weight"),
    ("embed_tokens_per_layer.weight", "per_layer_token_embd.weight"),
    ("per_layer_model_projection.weight", "per_layer_model_proj.weight"),
    ("per_layer_projection_norm.weight", "per_layer_proj_norm.weight"),
];

/// Modules of a layer that every family has under the same name.
const COMMON: [(&str, &str); 10] = [
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("self_attn.o_proj", "attn_output"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

const QWEN: [(&str, &str); 14] = [
    ("post_attention_layernorm", "post_attention_norm"),
    ("linear_attn.in_proj_qkv", "attn_qkv"),
    ("linear_attn.in_proj_z", "attn_gate"),
    ("linear_attn.in_proj_a", "ssm_alpha"),
    ("linear_attn.in_proj_b", "ssm_beta"),
    ("linear_attn.in_proj_ba", "ssm_ba"),
    ("linear_attn.conv1d", "ssm_conv1d"),
    ("linear_attn.norm", "ssm_norm"),
    ("linear_attn.out_proj", "ssm_out"),
    ("mlp.gate", "ffn_gate_inp"),
    ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
    ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
    ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
];

const GEMMA: [(&str, &str); 3] = [
    ("post_attention_layernorm", "post_attention_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
];

const GEMMA4: [(&str, &str); 7] = [
    ("post_feedforward_layernorm_1", "post_ffw_norm_1"),
    ("post_feedforward_layernorm_2", "post_ffw_norm_2"),
    ("pre_feedforward_layernorm_2", "pre_ffw_norm_2"),
    ("router.proj", "ffn_gate_inp"),
    ("per_layer_input_gate", "inp_gate"),
    ("per_layer_projection", "proj"),
    ("post_per_layer_input_norm", "post_norm"),
];

const DEEPSEEK: [(&str, &str); 14] = [
    ("post_attention_layernorm", "ffn_norm"),
    ("self_attn.q_a_proj", "attn_q_a"),
    ("self_attn.q_a_layernorm", "attn_q_a_norm"),
    ("self_attn.q_b_proj", "attn_q_b"),
    ("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    ("self_attn.kv_a_layernorm", "attn_kv_a_norm"),
    ("self_attn.indexer.wq_b", "indexer.attn_q_b"),
    ("self_attn.indexer.wk", "indexer.attn_k"),
    ("self_attn.indexer.k_norm", "indexer.k_norm"),
    ("self_attn.indexer.weights_proj", "indexer.proj"),
    ("mlp.gate", "ffn_gate_inp"),
    ("mlp.shared_experts.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_experts.up_proj", "ffn_up_shexp"),
    ("mlp.shared_experts.down_proj", "ffn_down_shexp"),
];

/// Modules of a block of multi-token prediction, beside those of a layer.
const PREDICTOR: [(&str, &str); 6] = [
    ("eh_proj", "nextn.eh_proj"),
    ("enorm", "nextn.enorm"),
    ("hnorm", "nextn.hnorm"),
    ("shared_head.norm", "nextn.shared_head_norm"),
    ("shared_head.head", "nextn.shared_head_head"),
    ("embed_tokens", "nextn.embed_tokens"),
];

/// Qwen's names of these modules.
const QWEN_PREDICTOR: [(&str, &str); 4] = [
    ("fc", "eh_proj"),
    ("pre_fc_norm_embedding", "enorm"),
    ("pre_fc_norm_hidden", "hnorm"),
    ("norm", "shared_head.norm"),
];

/// Returns the name of a tensor outside of the layers.
pub fn global(name: &str) -> Option<&'static str> {
    GLOBAL.iter().find(|row| row.0 == name).map(|row| row.1)
}

/// Returns the name of a module of a layer, such as `attn_q` for `self_attn.q_proj`.
pub fn module(family: Family, module: &str) -> Option<&'static str> {
    let tables: &[&[(&str, &'static str)]] = match family {
        Family::Qwen35 | Family::Qwen35Moe | Family::Qwen3Next => &[&QWEN, &PREDICTOR],
        Family::Gemma2 | Family::Gemma3 => &[&GEMMA],
        Family::Gemma4 => &[&GEMMA, &GEMMA4],
        Family::Deepseek32 => &[&DEEPSEEK, &PREDICTOR],
    };
    let rows = COMMON.iter().chain(tables.iter().copied().flatten());
    rows.into_iter().find(|row| row.0 == module).map(|row| row.1)
}

/// Returns the common name of a module in Qwen's `mtp`.
pub fn qwen_predictor(module: &str) -> Option<&'static str> {
    QWEN_PREDICTOR.iter().find(|row| row.0 == module).map(|row| row.1)
}
