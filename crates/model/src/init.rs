//! Random initialization of a new model, as in transformers.
//!
//! | tensor | initial value |
//! |---|---|
//! | matrices, convolutions, embeddings | N(0, `initializer_range`); the padding token's embedding 0 |
//! | biases, weights of norms that multiply by 1 + w, the routers' correction | 0 |
//! | weights of other norms, `dt_bias`, scales | 1 |
//! | `A_log` | ln U(0.01, 16): every head decays, and every logarithm is finite |
//!
//! With `dt_bias` at 1 most heads forget within a few tokens. [`Model::draw_time_steps`] gives some a long
//! memory, as Megatron and the Mamba models do: softplus(dt_bias) = dt, ln dt uniform between ln 0.001 and ln
//! 0.1.
//!
//! All values are drawn in f32 and then cast, block by block of a tensor, each with a generator seeded by the
//! model's seed, the tensor's name and the block: neither threads nor other tensors nor the storage type
//! change them.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use ballast_checkpoint::Checkpoint;
use ballast_checkpoint::layout::{Form, Layout, Naming, Ranks};
use rayon::prelude::*;
use serde_json::{Value, json};

use crate::config::{Config, Mixer};
use crate::error::Result;
use crate::load::{Source, make_weights};
use crate::memory;
use crate::model::Model;
use crate::params::{Init, Protected, Spec, Specs, Weight};
use crate::precision::Precision;
use crate::random::Rng;

/// Number of elements drawn by one generator.
const BLOCK: usize = 1 << 16;

/// Range of the decay rates.
const DECAY_RATES: std::ops::Range<f64> = 0.01..16.0;

/// Range of the time steps.
const TIME_STEPS: std::ops::Range<f64> = 0.001..0.1;

impl Model {
    /// Redraws the `dt_bias` of every head of a new f32 model, so that some heads have a long memory. Returns
    /// the number of tensors changed.
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

    /// Creates a new model from the content of a config.json; `precision` is called with the parsed
    /// configuration. A configuration with a vision part gives the text model. [`Model::save`] writes it in
    /// transformers' layout.
    pub fn init(
        config: &Value,
        precision: impl FnOnce(&Config) -> Result<Precision>,
        seed: u64,
    ) -> Result<Model> {
        Model::init_shares(config, precision, seed, |_, _| None)
    }

    /// [`Model::init`] of a model of which this process holds a share: see [`Model::load_shares`].
    pub fn init_shares(
        config: &Value,
        precision: impl FnOnce(&Config) -> Result<Precision>,
        seed: u64,
        shares: impl FnOnce(&Config, &Specs) -> Option<Vec<Range<usize>>>,
    ) -> Result<Model> {
        let file = Path::new("config.json");
        let parsed = Config::parse(config, file)?;
        let json = text_json(config, &parsed);
        let precision = precision(&parsed)?;
        let layout = layout(&parsed);
        let mut model = Model::build(parsed, precision.clone())?;
        let shares = shares(&model.config, &model.specs);
        memory::check("the model's parameters", model.share_bytes(precision.params, shares.as_deref()))?;
        let draw = |spec: &Spec| values(spec, &model.config, seed);
        let share = |index: usize| shares.as_ref().map(|shares| shares[index].clone());
        let weight = |index: usize| {
            let whole = Weight::F32(draw(&model.specs.weights[index]));
            Ok(whole.into_share(share(index)).cast(precision.params))
        };
        let weights = make_weights(&model.specs, shares.is_some(), weight)?;
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

/// Returns the initial values of a parameter.
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

/// Fills a tensor with pairs of random values.
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

/// Returns the text part of a config.json, completed so that it can stand alone.
fn text_json(config: &Value, parsed: &Config) -> Value {
    let mut json = config.get("text_config").filter(|text| !text.is_null()).unwrap_or(config).clone();
    json["model_type"] = json!(parsed.model_type);
    json["tie_word_embeddings"] = json!(parsed.tied);
    json["dtype"] = json!("float32"); // until it is saved
    if parsed.final_cap.is_none() && json.get("final_logit_softcapping").is_some() {
        // Gemma 3 has no logit cap inside a vision model.
        json["final_logit_softcapping"] = Value::Null;
    }
    if let Some(class) = class(&parsed.model_type) {
        json["architectures"] = json!([class]);
    }
    json
}

/// Returns the transformers class of a text model.
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

/// Returns the layout that transformers writes for a model.
fn layout(config: &Config) -> Layout {
    let next = config.model_type == "qwen3_next";
    let gemma = config.model_type.starts_with("gemma");
    let linear = config.layers.iter().any(|layer| matches!(layer.mixer, Mixer::Linear(_)));
    let experts = config.layers.iter().any(|layer| layer.experts.is_some());
    Layout {
        naming: Naming::Hf,
        projections: linear.then_some(if next { Form::Fused } else { Form::Split }),
        experts: experts.then_some(if gemma { Form::Fused } else { Form::Split }),
        ranks: Ranks::ONE,
        zero_centered_gamma: true,
        prefix: "model.".into(),
    }
}
