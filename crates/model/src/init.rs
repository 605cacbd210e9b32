//! A new model: parameters drawn at random, as transformers starts them.
//!
//! | tensor | start |
//! |---|---|
//! | matrices, convolutions, embeddings | N(0, `initializer_range`); the padding token's embedding 0 |
//! | biases, weights of norms that multiply by 1 + w, the routers' correction | 0 |
//! | weights of other norms, `dt_bias`, scales | 1 |
//! | `A_log` | ln U(0.01, 16): no head without decay, none whose logarithm is infinite |
//!
//! With `dt_bias` at 1 most heads forget within a few tokens. [`Model::draw_time_steps`] makes some that remember, as Megatron
//! and the Mamba models start: softplus(dt_bias) = dt, ln dt drawn evenly between ln 0.001 and ln 0.1.
//!
//! All values are drawn in f32 and then cast, block by block of a tensor, each with a generator seeded by the model's seed,
//! the tensor's name and the block: neither threads nor other tensors nor the storage type change them.

use std::path::Path;
use std::sync::Arc;

use ballast_checkpoint::Checkpoint;
use ballast_checkpoint::layout::{Form, Layout, Naming};
use rayon::prelude::*;
use serde_json::{Value, json};

use crate::config::{Config, Mixer};
use crate::error::Result;
use crate::load::Source;
use crate::memory;
use crate::model::Model;
use crate::params::{Init, Protected, Spec, Weight};
use crate::precision::Precision;
use crate::random::Rng;

/// Elements that one generator draws.
const BLOCK: usize = 1 << 16;

/// What the decay rates are drawn from.
const DECAY_RATES: std::ops::Range<f64> = 0.01..16.0;

/// What time steps are drawn from.
const TIME_STEPS: std::ops::Range<f64> = 0.001..0.1;

impl Model {
    /// Draws the `dt_bias` of every head anew, so that a model that was just made, in f32, has heads that remember for long. Returns
    /// how many tensors that are.
    pub fn draw_time_steps(&mut self, seed: u64) -> usize {
        let (from, to) = (TIME_STEPS.start.ln(), TIME_STEPS.end.ln());
        let mut tensors = 0;
        for (spec, tensor) in self.specs.protected.iter().zip(&mut self.params.protected) {
            if !spec.name.ends_with(".linear_attn.dt_bias") {
                continue;
            }
            let mut values = vec![0.0; spec.len()];
            draw(&mut values, &spec.name, seed, |rng| {
                [(); 2].map(|()| {
                    let dt = (from + rng.unit() * (to - from)).exp();
                    // The inverse of softplus: ln(e^dt - 1).
                    dt + (-(-dt).exp_m1()).ln()
                })
            });
            *tensor = Protected::new(values);
            tensors += 1;
        }
        tensors
    }

    /// A new model of a config.json's content; `precision` is made for its configuration. Of a configuration with a vision
    /// part, the text model. [`Model::save`] writes it in the layout that transformers has for it.
    pub fn init(
        config: &Value,
        precision: impl FnOnce(&Config) -> Result<Precision>,
        seed: u64,
    ) -> Result<Model> {
        let file = Path::new("config.json");
        let parsed = Config::parse(config, file)?;
        let json = text_json(config, &parsed);
        let precision = precision(&parsed)?;
        let layout = layout(&parsed);
        let mut model = Model::build(parsed, precision.clone())?;
        memory::check("the model's parameters", model.specs.bytes(precision.params) as u64)?;
        let draw = |spec: &Spec| values(spec, &model.config, seed);
        let weights = model.specs.weights.par_iter();
        let weights = weights.map(|spec| Weight::F32(draw(spec)).cast(precision.params)).collect();
        let protected = model.specs.protected.iter().map(|spec| Protected::new(draw(spec))).collect();
        (model.params.weights, model.params.protected) = (weights, protected);
        model.source = Some(Source {
            checkpoint: Arc::new(Checkpoint::blank(json)),
            prefix: layout.prefix.clone(),
            layout,
            carried: Vec::new(),
        });
        model.set_precision(precision);
        Ok(model)
    }
}

/// The values that a parameter starts with.
fn values(spec: &Spec, config: &Config, seed: u64) -> Vec<f32> {
    let mut values = vec![0.0; spec.len()];
    match spec.init {
        Init::Zeros => {}
        Init::Ones => values.fill(1.0),
        Init::Normal | Init::Embedding => {
            let deviation = config.initializer_range as f64;
            draw(&mut values, &spec.name, seed, |rng| rng.normals().map(|x| deviation * x));
        }
        Init::ALog => draw(&mut values, &spec.name, seed, |rng| {
            [(); 2].map(|()| {
                let rate = DECAY_RATES.start + rng.unit() * (DECAY_RATES.end - DECAY_RATES.start);
                rate.ln()
            })
        }),
    }
    if let (Init::Embedding, Some(padding)) = (spec.init, config.padding) {
        let width = spec.shape[1];
        if let Some(row) = values.chunks_mut(width).nth(padding as usize) {
            row.fill(0.0);
        }
    }
    values
}

/// Fills a tensor with pairs of draws.
pub(crate) fn draw(values: &mut [f32], name: &str, seed: u64, pair: impl Fn(&mut Rng) -> [f64; 2] + Sync) {
    values.par_chunks_mut(BLOCK).enumerate().for_each(|(block, values)| {
        let mut rng = Rng::of(seed, name, block as u64);
        for values in values.chunks_mut(2) {
            for (value, drawn) in values.iter_mut().zip(pair(&mut rng)) {
                *value = drawn as f32;
            }
        }
    });
}

/// The text part of a config.json, with what a reader needs to know without it.
fn text_json(config: &Value, parsed: &Config) -> Value {
    let mut json = config.get("text_config").filter(|text| !text.is_null()).unwrap_or(config).clone();
    json["model_type"] = json!(parsed.model_type);
    json["tie_word_embeddings"] = json!(parsed.tied);
    json["dtype"] = json!("float32"); // until it is saved
    if parsed.final_cap.is_none() && json.get("final_logit_softcapping").is_some() {
        // Gemma 3 has no such cap inside a model with vision.
        json["final_logit_softcapping"] = Value::Null;
    }
    if let Some(class) = class(&parsed.model_type) {
        json["architectures"] = json!([class]);
    }
    json
}

/// The class of transformers that runs a text model.
fn class(model_type: &str) -> Option<&'static str> {
    Some(match model_type {
        "qwen3_next" => "Qwen3NextForCausalLM",
        "qwen3_5_text" => "Qwen3_5ForCausalLM",
        "qwen3_5_moe_text" => "Qwen3_5MoeForCausalLM",
        "gemma2" => "Gemma2ForCausalLM",
        "gemma3_text" => "Gemma3ForCausalLM",
        "gemma4_text" => "Gemma4ForCausalLM",
        "deepseek_v32" => "DeepseekV32ForCausalLM",
        _ => return None,
    })
}

/// The layout that transformers writes for a model.
fn layout(config: &Config) -> Layout {
    let next = config.model_type == "qwen3_next";
    let gemma = config.model_type.starts_with("gemma");
    let linear = config.layers.iter().any(|layer| matches!(layer.mixer, Mixer::Linear(_)));
    let experts = config.layers.iter().any(|layer| layer.experts.is_some());
    Layout {
        naming: Naming::Hf,
        projections: linear.then_some(if next { Form::Fused } else { Form::Split }),
        experts: experts.then_some(if gemma { Form::Fused } else { Form::Split }),
        ranks: 1,
        zero_centered_gamma: true,
        prefix: "model.".into(),
    }
}
