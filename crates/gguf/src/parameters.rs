//! Hyperparameters: config.json to entries of the header. What llama.cpp cannot express is refused.

use std::collections::HashMap;

use ballast_files::Result;
use serde_json::Value as Json;

use super::family::{Config, Family, Rope};
use super::header::{Entry, Value};

/// Entries of the header, under an architecture's prefix.
pub struct Entries {
    prefix: &'static str,
    /// Keys and values, in their order.
    pub list: Vec<Entry>,
}

impl Entries {
    fn add(&mut self, key: &str, value: Value) {
        self.list.push((format!("{}.{key}", self.prefix), value));
    }

    /// Adds a count.
    fn count(&mut self, key: &str, value: u64) {
        // Counts of config.json are at most 2^24; products of two of them are capped by the tensors' shapes.
        self.add(key, Value::U32(u32::try_from(value).unwrap_or(u32::MAX)));
    }

    fn number(&mut self, key: &str, value: f64) {
        self.add(key, Value::F32(value as f32));
    }

    /// Adds a count for each layer, or one for all if they are equal.
    fn counts(&mut self, key: &str, values: &[u64]) {
        match values {
            [first, rest @ ..] if rest.iter().all(|x| x == first) => self.count(key, *first),
            _ => {
                let all = values.iter().map(|x| Value::U32(u32::try_from(*x).unwrap_or(u32::MAX))).collect();
                self.add(key, Value::array(all));
            }
        }
    }

    fn flags(&mut self, key: &str, values: impl Iterator<Item = bool>) {
        self.add(key, Value::array(values.map(Value::Bool).collect()));
    }
}

/// Returns the hyperparameters of a model with `predictors` blocks of multi-token prediction.
pub fn parameters(family: Family, config: &Config, predictors: u64) -> Result<Entries> {
    let mut out = Entries { prefix: family.name(), list: Vec::new() };
    let layers = config.count("num_hidden_layers")?;
    if layers == 0 || layers + predictors > 512 {
        return Err(config.refuse(&format!("llama.cpp takes 1 to 512 layers, got {layers}")));
    }
    out.count("block_count", layers + predictors);
    if predictors > 0 {
        out.count("nextn_predict_layers", predictors);
    }
    out.count("context_length", config.count_or("max_position_embeddings", 32768)?);
    out.count("embedding_length", config.count("hidden_size")?);
    out.count("vocab_size", config.count("vocab_size")?);
    out.number("attention.layer_norm_rms_epsilon", config.number("rms_norm_eps")?);
    out.counts("attention.head_count", &[config.count("num_attention_heads")?]);
    if config.flag("attention_bias", false)? {
        return Err(config.refuse("attention_bias: llama.cpp has no biases in this architecture"));
    }
    match family {
        Family::Qwen35 | Family::Qwen35Moe | Family::Qwen3Next => {
            hybrid(family, config, layers, predictors, &mut out)?
        }
        Family::Gemma2 | Family::Gemma3 => gemma(family, config, layers, &mut out)?,
        Family::Gemma4 => gemma4(config, layers, &mut out)?,
        Family::Deepseek32 => deepseek(config, layers, &mut out)?,
    }
    Ok(out)
}

/// Returns an error unless the activation is the one that llama.cpp computes.
fn require_activation(config: &Config, key: &str, wanted: &[&str]) -> Result<()> {
    let Some(found) = config.get(key).and_then(|value| value.as_str()) else { return Ok(()) };
    if wanted.contains(&found) {
        return Ok(());
    }
    Err(config.refuse(&format!("`{key}` must be {} for llama.cpp, got {found:?}", wanted[0])))
}

/// Returns an error unless the rotary frequencies are plain.
fn require_default_rope(config: &Config, rope: &Rope, what: &str) -> Result<()> {
    if rope.kind() == "default" {
        return Ok(());
    }
    Err(config
        .refuse(&format!("rope type {:?} of {what} is not written as GGUF; \"default\" is", rope.kind())))
}

fn hybrid(family: Family, config: &Config, layers: u64, predictors: u64, out: &mut Entries) -> Result<()> {
    require_activation(config, "hidden_act", &["silu"])?;
    if !config.flag("attn_output_gate", true)? {
        return Err(config.refuse("attn_output_gate is false: llama.cpp always has the gate"));
    }
    let head_dim = config.count("head_dim")?;
    out.counts("attention.head_count_kv", &[config.count("num_key_value_heads")?]);
    out.count("attention.key_length", head_dim);
    out.count("attention.value_length", head_dim);
    let rope = config.rope("full_attention");
    require_default_rope(config, &rope, "this architecture")?;
    out.number("rope.freq_base", rope.number("rope_theta").map_or_else(|| config.number("rope_theta"), Ok)?);
    let partial =
        rope.number("partial_rotary_factor").or_else(|| config.number("partial_rotary_factor").ok());
    let rotated = (head_dim as f64 * partial.unwrap_or(0.25)) as u64;
    out.count("rope.dimension_count", rotated);
    if family != Family::Qwen3Next {
        out.add("rope.dimension_sections", sections(config, &rope)?);
    }

    let (key_dim, value_dim) = (config.count("linear_key_head_dim")?, config.count("linear_value_head_dim")?);
    if key_dim != value_dim {
        return Err(config.refuse(&format!(
            "linear_key_head_dim is {key_dim} and linear_value_head_dim is {value_dim}: llama.cpp has one width for both"
        )));
    }
    let value_heads = config.count("linear_num_value_heads")?;
    out.count("ssm.conv_kernel", config.count("linear_conv_kernel_dim")?);
    out.count("ssm.state_size", key_dim);
    out.count("ssm.group_count", config.count("linear_num_key_heads")?);
    out.count("ssm.time_step_rank", value_heads);
    out.count("ssm.inner_size", value_heads * value_dim);
    recurrent_layers(config, layers, predictors, out)?;
    if family == Family::Qwen35 {
        out.count("feed_forward_length", config.count("intermediate_size")?);
        return Ok(());
    }
    if !config.flag("norm_topk_prob", true)? {
        return Err(
            config.refuse("norm_topk_prob is false: llama.cpp always normalizes the experts' weights")
        );
    }
    let is_dense = config.get("mlp_only_layers").and_then(|v| v.as_array()).is_some_and(|v| !v.is_empty());
    if is_dense || config.count_or("decoder_sparse_step", 1)? != 1 {
        return Err(config.refuse(
            "mlp_only_layers or decoder_sparse_step: llama.cpp needs experts in every layer of this architecture",
        ));
    }
    out.count("feed_forward_length", config.count_or("intermediate_size", 0)?);
    out.count("expert_count", config.count("num_experts")?);
    out.count("expert_used_count", config.count("num_experts_per_tok")?);
    out.count("expert_feed_forward_length", config.count("moe_intermediate_size")?);
    out.count("expert_shared_feed_forward_length", config.count("shared_expert_intermediate_size")?);
    Ok(())
}

/// Returns the sections of multi-axis rotary positions; text has the same position on every axis.
fn sections(config: &Config, rope: &Rope) -> Result<Value> {
    let found = rope.get("mrope_section").and_then(|value| value.as_array());
    let Some(found) = found else {
        return Ok(Value::array([11, 11, 10, 0].map(Value::I32).to_vec()));
    };
    let mut sections = Vec::new();
    for value in found.iter().take(4) {
        sections.push(Value::I32(config.as_count("mrope_section", value)? as i32));
    }
    sections.resize(4, Value::I32(0));
    Ok(Value::array(sections))
}

/// Writes which layers are recurrent: by their period, or one by one.
fn recurrent_layers(config: &Config, layers: u64, predictors: u64, out: &mut Entries) -> Result<()> {
    let Some(types) = config.layer_types(layers)? else {
        out.count("full_attention_interval", config.count_or("full_attention_interval", 4)?);
        return Ok(());
    };
    let recurrent: Vec<bool> = types.iter().map(|t| *t == "linear_attention").collect();
    if let Some(other) = types.iter().find(|t| !["linear_attention", "full_attention"].contains(t)) {
        return Err(config.refuse(&format!("layer type {other:?} is unknown to llama.cpp")));
    }
    if (0..layers).all(|i| recurrent[i as usize] == ((i + 1) % 4 != 0)) {
        out.count("full_attention_interval", 4);
        return Ok(());
    }
    let predicting = (0..predictors).map(|_| false);
    out.flags("attention.recurrent_layers", recurrent.into_iter().chain(predicting));
    Ok(())
}

fn gemma(family: Family, config: &Config, layers: u64, out: &mut Entries) -> Result<()> {
    require_activation(config, "hidden_activation", &["gelu_pytorch_tanh"])?;
    require_tied(config)?;
    let (heads, head_dim) = (config.count("num_attention_heads")?, config.count("head_dim")?);
    out.counts("attention.head_count_kv", &[config.count("num_key_value_heads")?]);
    out.count("attention.key_length", head_dim);
    out.count("attention.value_length", head_dim);
    out.count("feed_forward_length", config.count("intermediate_size")?);
    query_scale(family, config, layers, heads, head_dim)?;
    if config.flag("use_bidirectional_attention", false)? {
        return Err(config.refuse("use_bidirectional_attention: llama.cpp is causal in this architecture"));
    }
    let full = config.rope("full_attention");
    let theta = full.number("rope_theta").or_else(|| config.number("rope_theta").ok());
    out.number("rope.freq_base", theta.unwrap_or(if family == Family::Gemma2 { 1e4 } else { 1e6 }));
    if family == Family::Gemma2 {
        require_default_rope(config, &full, "Gemma 2")?;
        for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
            if config.get(key).is_none() {
                return Err(
                    config.refuse(&format!("`{key}` is null: llama.cpp always caps the logits of Gemma 2"))
                );
            }
            out.number(key, config.number(key)?);
        }
    } else {
        gemma3_rope(config, &full, out)?;
        if config.get("attn_logit_softcapping").is_some() {
            return Err(config.refuse("attn_logit_softcapping: llama.cpp does not have it in Gemma 3"));
        }
        if config.get("final_logit_softcapping").is_some() {
            out.number("final_logit_softcapping", config.number("final_logit_softcapping")?);
        }
    }
    windows(family, config, layers, out)
}

/// Writes the scaling of Gemma 3's full layers and the base of its sliding ones.
fn gemma3_rope(config: &Config, full: &Rope, out: &mut Entries) -> Result<()> {
    match (full.kind(), full.number("factor")) {
        ("default", _) => {}
        ("linear", Some(factor)) => {
            out.add("rope.scaling.type", Value::String("linear".into()));
            out.number("rope.scaling.factor", factor);
        }
        _ => require_default_rope(config, full, "full attention")?,
    }
    let sliding = config.rope("sliding_attention");
    // Without parameters for each type, older configurations have the base apart.
    let has_types = config.get("rope_parameters").is_some_and(|p| p.get("sliding_attention").is_some());
    if has_types {
        require_default_rope(config, &sliding, "sliding attention")?;
    }
    let theta =
        if has_types { sliding.number("rope_theta") } else { config.number("rope_local_base_freq").ok() };
    out.number("rope.freq_base_swa", theta.unwrap_or(1e4));
    Ok(())
}

/// Checks the scale of queries: llama.cpp computes it from the head's width, or by the size of the model.
fn query_scale(family: Family, config: &Config, layers: u64, heads: u64, head_dim: u64) -> Result<()> {
    let found = match config.get("query_pre_attn_scalar") {
        Some(_) => config.number("query_pre_attn_scalar")?,
        None => 256.0,
    };
    // The two models of 27B, by their number of layers.
    let is_27b = layers == if family == Family::Gemma2 { 46 } else { 62 };
    let expected = if is_27b { config.count("hidden_size")? / heads.max(1) } else { head_dim };
    if found == expected as f64 {
        return Ok(());
    }
    Err(config.refuse(&format!(
        "query_pre_attn_scalar is {found}, but llama.cpp computes with {expected} for {layers} layers; it would give \
         another model"
    )))
}

/// Returns an error unless the output head is the embedding.
fn require_tied(config: &Config) -> Result<()> {
    match config.get_outer("tie_word_embeddings").is_none_or(|v| v.as_bool() != Some(false)) {
        true => Ok(()),
        false => Err(config.refuse("tie_word_embeddings is false: llama.cpp ties the output head of Gemma")),
    }
}

/// Writes the sliding window and the layers that have it.
fn windows(family: Family, config: &Config, layers: u64, out: &mut Entries) -> Result<()> {
    let default = if family == Family::Gemma2 { 2 } else { 6 };
    let types = config.layer_types(layers)?;
    let is_full = |i: u64, period: u64| (i + 1).is_multiple_of(period);
    let sliding: Vec<bool> = match &types {
        Some(types) => types.iter().map(|t| *t == "sliding_attention").collect(),
        None => {
            let period = config.count_or("sliding_window_pattern", default)?.max(1);
            (0..layers).map(|i| !is_full(i, period)).collect()
        }
    };
    if let Some(other) = types.iter().flatten().find(|t| !["sliding_attention", "full_attention"].contains(t))
    {
        return Err(config.refuse(&format!("layer type {other:?} is unknown to llama.cpp")));
    }
    if !sliding.contains(&true) {
        return match family {
            // Without a window, all layers of Gemma 3 are full.
            Family::Gemma3 => Ok(()),
            _ => Err(config.refuse("no layer has a sliding window: llama.cpp needs one in Gemma 2")),
        };
    }
    out.count("attention.sliding_window", config.count("sliding_window")?);
    let matches = |period: u64| (0..layers).all(|i| sliding[i as usize] != is_full(i, period));
    if matches(default) {
        return Ok(());
    }
    match (2..=layers).find(|period| matches(*period)) {
        Some(period) => out.count("attention.sliding_window_pattern", period),
        None => out.flags("attention.sliding_window_pattern", sliding.into_iter()),
    }
    Ok(())
}

fn gemma4(config: &Config, layers: u64, out: &mut Entries) -> Result<()> {
    require_activation(config, "hidden_activation", &["gelu_pytorch_tanh"])?;
    let types = config
        .layer_types(layers)?
        .ok_or_else(|| config.fail("field `layer_types` is missing; GGUF needs it".into()))?;
    let sliding: Vec<bool> = types.iter().map(|t| *t == "sliding_attention").collect();
    out.count("attention.sliding_window", config.count("sliding_window")?);
    out.flags("attention.sliding_window_pattern", sliding.iter().copied());
    let heads = Gemma4Heads::of(config, &sliding)?;
    out.count("attention.key_length", heads.full_dim);
    out.count("attention.value_length", heads.full_dim);
    out.count("attention.key_length_swa", heads.sliding_dim);
    out.count("attention.value_length_swa", heads.sliding_dim);
    let kv_heads = |s: &bool| if *s { heads.sliding_kv } else { heads.full_kv };
    out.counts("attention.head_count_kv", &sliding.iter().map(kv_heads).collect::<Vec<_>>());
    gemma4_rope(config, &heads, out)?;

    let shared = config.count_or("num_kv_shared_layers", 0)?;
    out.count("attention.shared_kv_layers", shared);
    out.count("embedding_length_per_layer_input", config.count_or("hidden_size_per_layer_input", 0)?);
    let width = config.count("intermediate_size")?;
    let is_double = config.flag("use_double_wide_mlp", false)?;
    let width_of = |i: u64| if is_double && i + shared >= layers { 2 * width } else { width };
    out.counts("feed_forward_length", &(0..layers).map(width_of).collect::<Vec<_>>());
    if config.get("final_logit_softcapping").is_some() {
        out.number("final_logit_softcapping", config.number("final_logit_softcapping")?);
    }
    if config.flag("enable_moe_block", false)? {
        out.count("expert_count", config.count("num_experts")?);
        out.count("expert_used_count", config.count("top_k_experts")?);
        let width = match config.get("moe_intermediate_size") {
            Some(_) => config.count("moe_intermediate_size")?,
            None => config.count("expert_intermediate_size")?,
        };
        out.count("expert_feed_forward_length", width);
    }
    Ok(())
}

/// Divisor of a frequency that does not rotate.
const NO_ROTATION: f32 = 1e30;

/// Returns the divisors of Gemma 4's frequencies in full layers: all but the first do not rotate.
pub fn gemma4_rope_divisors(config: &Config, layers: u64) -> Result<Vec<f32>> {
    let types = config.layer_types(layers)?.unwrap_or_default();
    let sliding: Vec<bool> = types.iter().map(|t| *t == "sliding_attention").collect();
    let half = Gemma4Heads::of(config, &sliding)?.full_dim / 2;
    let rope = config.rope("full_attention");
    let rotated = match rope.kind() {
        "proportional" => (half as f64 * rope.number("partial_rotary_factor").unwrap_or(1.0)) as u64,
        _ => half,
    };
    let value = |i: u64| if i < rotated { 1.0 } else { NO_ROTATION };
    Ok((0..half).map(value).collect())
}

/// Heads of Gemma 4's two kinds of layers.
struct Gemma4Heads {
    full_dim: u64,
    sliding_dim: u64,
    full_kv: u64,
    sliding_kv: u64,
}

impl Gemma4Heads {
    /// Reads the heads; layers of one kind must be alike.
    fn of(config: &Config, sliding: &[bool]) -> Result<Gemma4Heads> {
        let (dim, kv) = (config.count("head_dim")?, config.count("num_key_value_heads")?);
        let full_dim = config.count_or("global_head_dim", dim)?;
        let is_shared = config.flag("attention_k_eq_v", false)?;
        let full_kv = if is_shared { config.count_or("num_global_key_value_heads", kv)? } else { kv };
        // Newer configurations list the layers that differ.
        let listed = per_layer(config, sliding.len())?;
        let own = |layer: usize, key: &str, default: u64| {
            let value = listed.get(&layer).and_then(|own| own.get(key));
            value.filter(|v| !v.is_null()).map_or(Ok(default), |v| config.as_count(key, v))
        };
        let mut kinds: [Option<(u64, u64)>; 2] = [None; 2];
        for (layer, is_sliding) in sliding.iter().enumerate() {
            let (dim, kv) = if *is_sliding { (dim, kv) } else { (full_dim, full_kv) };
            let found = (own(layer, "head_dim", dim)?, own(layer, "num_key_value_heads", kv)?);
            let kind = &mut kinds[*is_sliding as usize];
            if kind.is_some_and(|known| known != found) {
                let problem = format!(
                    "per_layer_config: layer {layer} differs from others of its type; llama.cpp has one width for each type"
                );
                return Err(config.refuse(&problem));
            }
            *kind = Some(found);
        }
        let [full, windowed] = kinds;
        let Some((full_dim, full_kv)) = full else {
            return Err(config.refuse("no layer has full attention: llama.cpp needs one in Gemma 4"));
        };
        let (sliding_dim, sliding_kv) = windowed.unwrap_or((dim, kv));
        Ok(Gemma4Heads { full_dim, sliding_dim, full_kv, sliding_kv })
    }
}

/// Returns `per_layer_config`, settings of single layers. Keys are layer numbers, possibly padded with zeros.
fn per_layer<'a>(config: &Config<'a>, layers: usize) -> Result<HashMap<usize, &'a Json>> {
    let mut found = HashMap::new();
    for (key, own) in config.get("per_layer_config").and_then(Json::as_object).into_iter().flatten() {
        let number = key.parse().ok().filter(|layer| *layer < layers && !key.starts_with('+'));
        if number.is_none_or(|layer| found.insert(layer, own).is_some()) {
            let problem =
                format!("`per_layer_config`: {key:?} is not one of {layers} layers, or names one twice");
            return Err(config.fail(problem));
        }
    }
    Ok(found)
}

fn gemma4_rope(config: &Config, heads: &Gemma4Heads, out: &mut Entries) -> Result<()> {
    let (full, sliding) = (config.rope("full_attention"), config.rope("sliding_attention"));
    require_default_rope(config, &sliding, "sliding attention")?;
    if !["default", "proportional"].contains(&full.kind()) {
        let problem = format!("rope type {:?} of full attention is unknown to llama.cpp", full.kind());
        return Err(config.refuse(&problem));
    }
    out.number("rope.freq_base", full.number("rope_theta").unwrap_or(1e6));
    out.number("rope.freq_base_swa", sliding.number("rope_theta").unwrap_or(1e4));
    // The frequencies of full layers are in a tensor, rope_freqs.
    out.count("rope.dimension_count", heads.full_dim);
    let partial = sliding.number("partial_rotary_factor").unwrap_or(1.0);
    out.count("rope.dimension_count_swa", (heads.sliding_dim as f64 * partial) as u64);
    Ok(())
}

fn deepseek(config: &Config, layers: u64, out: &mut Entries) -> Result<()> {
    require_activation(config, "hidden_act", &["silu"])?;
    let (rope_dim, nope_dim) = (config.count("qk_rope_head_dim")?, config.count("qk_nope_head_dim")?);
    let rank = config.count("kv_lora_rank")?;
    // Absorbed attention has one key for all heads.
    out.count("attention.head_count_kv", 1);
    out.count("attention.q_lora_rank", config.count("q_lora_rank")?);
    out.count("attention.kv_lora_rank", rank);
    out.count("attention.key_length", rank + rope_dim);
    out.count("attention.value_length", rank);
    out.count("attention.key_length_mla", nope_dim + rope_dim);
    out.count("attention.value_length_mla", config.count("v_head_dim")?);
    out.count("rope.dimension_count", rope_dim);
    indexer(config, rope_dim, out)?;
    experts(config, layers, out)?;
    let rope = config.rope("full_attention");
    out.number("rope.freq_base", rope.number("rope_theta").map_or_else(|| config.number("rope_theta"), Ok)?);
    yarn(config, &rope, out)
}

fn indexer(config: &Config, rope_dim: u64, out: &mut Entries) -> Result<()> {
    let width = config.count("index_head_dim")?;
    // llama.cpp rotates the indexer's heads by a Hadamard matrix of at least 64 rows.
    if width < 64 || !width.is_power_of_two() || width < rope_dim {
        return Err(config.refuse(&format!(
            "index_head_dim is {width}: llama.cpp needs a power of two of at least 64, and at least qk_rope_head_dim"
        )));
    }
    out.count("attention.indexer.head_count", config.count("index_n_heads")?);
    out.count("attention.indexer.key_length", width);
    out.count("attention.indexer.top_k", config.count("index_topk")?);
    Ok(())
}

fn experts(config: &Config, layers: u64, out: &mut Entries) -> Result<()> {
    let dense = config.count_or("first_k_dense_replace", 0)?;
    if let Some(types) = config.get("mlp_layer_types").and_then(|v| v.as_array()) {
        let is_dense = |i: usize| types[i].as_str() == Some("dense");
        if types.len() as u64 != layers || (0..types.len()).any(|i| is_dense(i) != ((i as u64) < dense)) {
            let problem =
                "mlp_layer_types: llama.cpp needs all dense layers first, as many as first_k_dense_replace";
            return Err(config.refuse(problem));
        }
    }
    if config.get("scoring_func").is_some_and(|v| v.as_str() != Some("sigmoid")) {
        return Err(config.refuse("scoring_func must be \"sigmoid\""));
    }
    if config.count_or("moe_layer_freq", 1)? != 1 {
        return Err(config.refuse("moe_layer_freq must be 1 for llama.cpp"));
    }
    let (count, groups) = (config.count("n_routed_experts")?, config.count_or("n_group", 1)?);
    let used = config.count_or("topk_group", 1)?;
    if groups > 1 && (groups >= count || count % groups != 0 || used == 0 || used >= groups) {
        return Err(config.refuse(&format!(
            "n_group {groups} with topk_group {used} and {count} experts: llama.cpp needs topk_group < n_group < experts"
        )));
    }
    out.count("leading_dense_block_count", dense);
    out.count("feed_forward_length", config.count("intermediate_size")?);
    out.count("expert_count", count);
    out.count("expert_used_count", config.count("num_experts_per_tok")?);
    out.count("expert_group_count", groups);
    out.count("expert_group_used_count", used);
    out.count("expert_feed_forward_length", config.count("moe_intermediate_size")?);
    out.count("expert_shared_count", config.count("n_shared_experts")?);
    out.number("expert_weights_scale", config.number("routed_scaling_factor")?);
    out.add("expert_weights_norm", Value::Bool(config.flag("norm_topk_prob", true)?));
    // 2 is the sigmoid.
    out.count("expert_gating_func", 2);
    Ok(())
}

fn yarn(config: &Config, rope: &Rope, out: &mut Entries) -> Result<()> {
    if rope.kind() != "yarn" {
        return require_default_rope(config, rope, "DeepSeek (other than yarn)");
    }
    let number = |key: &str| {
        let missing = || config.fail(format!("`{key}` of the rope parameters is missing; yarn needs it"));
        rope.number(key).ok_or_else(missing)
    };
    let (factor, all) = (number("factor")?, rope.number("mscale_all_dim").unwrap_or(0.0));
    let mscale = rope.number("mscale").unwrap_or(1.0);
    // llama.cpp scales rotated parts by nothing and all scores by mscale_all_dim, which is right for equal ones.
    if mscale != all || rope.get("attention_factor").is_some() {
        return Err(config.refuse(&format!(
            "mscale is {mscale} and mscale_all_dim is {all}: llama.cpp computes with equal ones only"
        )));
    }
    out.add("rope.scaling.type", Value::String("yarn".into()));
    out.number("rope.scaling.factor", factor);
    out.count("rope.scaling.original_context_length", number("original_max_position_embeddings")? as u64);
    out.number("rope.scaling.yarn_beta_fast", rope.number("beta_fast").unwrap_or(32.0));
    out.number("rope.scaling.yarn_beta_slow", rope.number("beta_slow").unwrap_or(1.0));
    // llama.cpp divides by 0.1 again.
    out.number("rope.scaling.yarn_log_multiplier", 0.1 * all);
    Ok(())
}
