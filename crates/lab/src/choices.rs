//! Precision choices: what is compared with the reference.
//!
//! A choice is written as terms with `+` between them: a preset to begin with (f32 without one), then single things to lower.
//!
//! ```text
//! bf16                   a preset
//! A_log                  f32, but this protected tensor rounded to bf16
//! logits                 f32, but this site in bf16
//! logits=f16             the same in f16
//! bf16+A_log+state=f16   several
//! all-sites              f32 storage, but every tensor and site above at once
//! ```

use ballast_model::config::Mixer;
use ballast_model::precision::{PRESETS, Storage};
use ballast_model::{Config, Precision};

use crate::error::{Error, Result};
use crate::findings::Kind;

/// One choice.
#[derive(Clone, Debug)]
pub struct Choice {
    /// As it is asked for.
    pub name: String,
    /// What it does, in a few words.
    pub what: String,
    /// What it changes.
    pub kind: Kind,
    /// The same for the model.
    pub precision: Precision,
}

/// Protected tensors by a short name, the end of their full one, and what they are.
const TENSORS: [(&str, &str, &str); 8] = [
    ("A_log", "linear_attn.A_log", "the logarithm of the decay rate"),
    ("dt_bias", "linear_attn.dt_bias", "the bias of the decay's time step"),
    ("out_norm", "linear_attn.norm.weight", "the scale of the delta rule's output norm"),
    ("e_score_correction_bias", "e_score_correction_bias", "the bias of the experts' choice"),
    ("weights_proj", "indexer.weights_proj.weight", "the indexer's weights of heads"),
    ("router.proj", "router.proj.weight", "the router's projection"),
    ("router.scale", "router.scale", "the scale of the router's input"),
    ("per_expert_scale", "per_expert_scale", "the scale of each expert"),
];

/// Sites by name and what is rounded there.
const SITES: [(&str, &str); 11] = [
    ("gate_projections", "a and b of the delta rule, as they leave their projections"),
    ("decay_gate", "the decay g = -exp(A_log) softplus(a + dt_bias)"),
    ("beta", "beta = sigmoid(b)"),
    ("l2norm", "q and k of the delta rule after their norm, outside the kernel"),
    ("state", "the recurrent state, from chunk to chunk"),
    ("qk_product", "the product of q and k"),
    ("logits", "attention logits and their softmax"),
    ("indexer_logits", "the indexer's q.k, before the relu"),
    ("router", "the router's logits"),
    ("norms", "the output of every norm but the delta rule's"),
    ("loss", "the output logits, before the softmax"),
];

const STORAGE: [(&str, &str); 2] = [
    ("params", "weights stored in bf16, strict contract"),
    ("activations", "everything that flows stored in bf16"),
];

const EVERY: &str = "all-sites";

impl Choice {
    /// The run in f32, which is the floor of all others.
    pub fn f32() -> Choice {
        Choice {
            name: "f32".into(),
            what: "everything in f32".into(),
            kind: Kind::Preset,
            precision: Precision::f32(),
        }
    }

    /// The choice that is written as `text`, for a model of this configuration.
    pub fn parse(text: &str, config: &Config) -> Result<Choice> {
        let terms: Vec<&str> = text.split('+').map(str::trim).collect();
        let mut precision = Precision::f32();
        let (mut what, mut kind) = (Vec::new(), Kind::Several);
        for (i, term) in terms.iter().enumerate() {
            let (name, dtype) = term.split_once('=').unwrap_or((term, "bf16"));
            if let Some((_, words)) = PRESETS.iter().find(|(preset, _)| preset == term) {
                if i > 0 {
                    return Err(unknown(text, &format!("{term} is a preset, which can only come first")));
                }
                precision = Precision::preset(term, config)?;
                (what, kind) = (vec![words.to_string()], Kind::Preset);
            } else if let Some((_, end, words)) = TENSORS.iter().find(|(tensor, ..)| *tensor == name) {
                if dtype != "bf16" {
                    return Err(unknown(text, &format!("{name} can be rounded to bf16 only")));
                }
                precision.rounded.push(end);
                what.push(format!("{words}, rounded to bf16"));
                kind = Kind::Tensor;
            } else if let Some((_, words)) = SITES.iter().find(|(site, _)| *site == name) {
                precision.set_site(name, dtype)?;
                what.push(format!("{words}, in {dtype}"));
                kind = Kind::Site;
            } else if let Some((_, words)) = STORAGE.iter().find(|(part, _)| part == term) {
                let place =
                    if *term == "params" { &mut precision.params } else { &mut precision.activations };
                *place = Storage::Bf16;
                what.push(words.to_string());
                kind = Kind::Several;
            } else if *term == EVERY {
                lower_all(&mut precision);
                what.push("every tensor and site below at once, f32 storage".into());
                kind = Kind::Several;
            } else {
                return Err(unknown(text, &format!("nothing is called {term:?}")));
            }
        }
        if terms.len() > 1 {
            kind = Kind::Several;
        }
        precision.name = text.into();
        Ok(Choice { name: text.into(), what: what.join("; "), kind, precision })
    }

    /// The choices that mean something for a model: presets, every tensor and site by itself, and all of them at once.
    /// `protected` are the names of its protected tensors.
    pub fn defaults(config: &Config, protected: &[&str]) -> Result<Vec<Choice>> {
        let mut names: Vec<String> = PRESETS[1..].iter().map(|(name, _)| name.to_string()).collect();
        let tensor = |(_, end, _): &&(&str, &str, &str)| protected.iter().any(|name| name.ends_with(end));
        names.extend(TENSORS.iter().filter(tensor).map(|(name, ..)| name.to_string()));
        names.extend(
            SITES.iter().filter(|(name, _)| has_site(config, name)).map(|(name, _)| name.to_string()),
        );
        if has_site(config, "logits") {
            names.extend(["qk_product=f16".into(), "logits=f16".into()]);
        }
        if has_site(config, "indexer_logits") {
            names.push("indexer_logits=f16".into());
        }
        names.extend(STORAGE.iter().map(|(name, _)| name.to_string()));
        names.push(EVERY.into());
        names.iter().map(|name| Choice::parse(name, config)).collect()
    }

    /// Whether storage and everything that is not named are f32, so that its first difference from f32 is its own.
    pub fn is_single(&self) -> bool {
        matches!(self.kind, Kind::Tensor | Kind::Site)
    }
}

fn lower_all(precision: &mut Precision) {
    precision.rounded = TENSORS.iter().map(|(_, end, _)| *end).collect();
    for (name, _) in SITES {
        precision.set_site(name, "bf16").expect("the sites are the model's");
    }
}

/// Whether a model has anything at a site.
fn has_site(config: &Config, site: &str) -> bool {
    let mixer = |wanted: fn(&Mixer) -> bool| config.layers.iter().any(|layer| wanted(&layer.mixer));
    match site {
        "gate_projections" | "decay_gate" | "beta" | "l2norm" | "state" => {
            mixer(|mixer| matches!(mixer, Mixer::Linear(_)))
        }
        "qk_product" | "logits" => mixer(|mixer| !matches!(mixer, Mixer::Linear(_))),
        "indexer_logits" => config.has_indexer(),
        "router" => config.layers.iter().any(|layer| layer.experts.is_some()),
        _ => true,
    }
}

fn unknown(text: &str, problem: &str) -> Error {
    let presets = PRESETS.map(|(name, _)| name).join(", ");
    let tensors = TENSORS.map(|(name, ..)| name).join(", ");
    let sites = SITES.map(|(name, _)| name).join(", ");
    Error::Choice(format!(
        "{text:?}: {problem}\npresets: {presets}\ntensors: {tensors}\nsites (=bf16, =f16): {sites}\n\
         storage: params, activations; everything: {EVERY}; several with +"
    ))
}
