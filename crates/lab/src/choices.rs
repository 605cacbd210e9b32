//! Precision choices to compare with the reference.
//!
//! A choice is a list of terms joined by `+`: optionally a preset first (default f32), then single tensors or
//! sites to lower.
//!
//! ```text
//! bf16                   a preset
//! A_log                  f32, but this protected tensor rounded to bf16
//! logits                 f32, but this site in bf16
//! logits=f16             the same in f16
//! bf16+A_log+state=f16   several at once
//! all-sites              f32 storage, but every tensor and site above at once
//! ```

use ballast_kernels::Rounding;
use ballast_model::params::Specs;
use ballast_model::precision::{PRESETS, Storage};
use ballast_model::{Config, Precision, Site};

use crate::error::{Error, Result};
use crate::findings::Kind;

/// A precision choice.
#[derive(Clone, Debug)]
pub struct Choice {
    /// Name, as in `--policies`.
    pub name: String,
    /// Short description.
    pub what: String,
    /// Kind of the choice.
    pub kind: Kind,
    /// Precision of the model.
    pub precision: Precision,
}

/// Short names and descriptions of protected tensors, by the end of their full name. A protected tensor that
/// is not listed here goes by its name within the layer.
const NAMES: [(&str, &str, &str); 7] = [
    ("linear_attn.A_log", "A_log", "the logarithm of the decay rate"),
    ("linear_attn.dt_bias", "dt_bias", "the bias of the decay's time step"),
    ("linear_attn.norm.weight", "out_norm", "the scale of the delta rule's output norm"),
    ("gate.e_score_correction_bias", "e_score_correction_bias", "the bias of the experts' choice"),
    ("indexer.weights_proj.weight", "weights_proj", "the indexer's weights of heads"),
    ("router.proj.weight", "router.proj", "the router's projection"),
    ("router.scale", "router.scale", "the scale of the router's input"),
];

/// A protected tensor of a model, in all layers that have it.
struct Tensor {
    /// Name in `--policies`.
    name: String,
    /// Common end of the full names.
    end: String,
    what: String,
}

/// The protected tensors of a model, in the order of [`NAMES`].
fn tensors(specs: &Specs) -> Vec<Tensor> {
    let in_layer = |name: &str| match name.strip_prefix("layers.").and_then(|rest| rest.split_once('.')) {
        Some((_, rest)) => rest.to_string(),
        None => name.to_string(),
    };
    let mut ends: Vec<String> = specs.protected.iter().map(|spec| in_layer(&spec.name)).collect();
    ends.sort();
    ends.dedup();
    let known = |end: &str| NAMES.iter().position(|(known, ..)| end.ends_with(known));
    ends.sort_by_key(|end| known(end).unwrap_or(NAMES.len()));
    let tensor = |end: String| match known(&end) {
        Some(at) => Tensor { name: NAMES[at].1.into(), end, what: NAMES[at].2.into() },
        None => Tensor { name: end.clone(), what: format!("{end} of every layer"), end },
    };
    ends.into_iter().map(tensor).collect()
}

const STORAGE: [(&str, &str); 2] =
    [("params", "weights stored in bf16, strict contract"), ("activations", "activations stored in bf16")];

const EVERY: &str = "all-sites";

impl Choice {
    /// The f32 run, the floor of all others.
    pub fn f32() -> Choice {
        Choice {
            name: "f32".into(),
            what: "everything in f32".into(),
            kind: Kind::Preset,
            precision: Precision::f32(),
        }
    }

    /// Parses a choice for a model. A term without effect on the model is an error: it would measure nothing.
    pub fn parse(text: &str, config: &Config, specs: &Specs) -> Result<Choice> {
        let tensors = tensors(specs);
        let refused = |problem: String| Err(unknown(text, &problem, config, &tensors));
        let terms: Vec<&str> = text.split('+').map(str::trim).collect();
        let mut precision = Precision::f32();
        let (mut what, mut kind) = (Vec::new(), Kind::Several);
        for (i, term) in terms.iter().enumerate() {
            let (name, dtype) = term.split_once('=').unwrap_or((term, "bf16"));
            if let Some((_, words)) = PRESETS.iter().find(|(preset, _)| preset == term) {
                if i > 0 {
                    return refused(format!("the preset {term} must come first"));
                }
                precision = Precision::preset(term, config)?;
                (what, kind) = (vec![words.to_string()], Kind::Preset);
            } else if let Some(tensor) = tensors.iter().find(|tensor| tensor.name == name) {
                if dtype != "bf16" {
                    return refused(format!("{name} can be rounded to bf16 only"));
                }
                precision.rounded.push(tensor.end.clone());
                what.push(format!("{}, rounded to bf16", tensor.what));
                kind = Kind::Tensor;
            } else if let Some(site) = Site::named(name) {
                if !site.is_in(config) {
                    return refused(format!("this model has no {name}"));
                }
                let before = precision.clone();
                precision.set_site(name, dtype)?;
                if dtype == "f32" && precision == before {
                    return refused(format!("{name} is in f32 already"));
                }
                what.push(format!("{}, in {dtype}", site.what()));
                kind = Kind::Site;
            } else if let Some((_, words)) = STORAGE.iter().find(|(part, _)| part == term) {
                if *term == "params" {
                    precision.params = Storage::Bf16;
                } else {
                    precision.activations = Storage::Bf16;
                    precision.set(Site::Residual, Precision::bf16().site(Site::Residual));
                }
                what.push(words.to_string());
                kind = Kind::Several;
            } else if *term == EVERY {
                lower_all(&mut precision, &tensors);
                what.push("every tensor and site below at once, f32 storage".into());
                kind = Kind::Several;
            } else if NAMES.iter().any(|(_, known, _)| *known == name) {
                return refused(format!("this model has no protected tensor {name}"));
            } else if specs.weights.iter().any(|spec| spec.name.ends_with(&format!(".{name}"))) {
                return refused(format!(
                    "{name} is not protected in this model; it is stored like the other weights (params)"
                ));
            } else {
                return refused(format!("unknown term {term:?}"));
            }
        }
        if terms.len() > 1 {
            kind = Kind::Several;
        }
        precision.name = text.into();
        Ok(Choice { name: text.into(), what: what.join("; "), kind, precision })
    }

    /// The default choices of a model: presets, each tensor and site alone, and all of them at once.
    pub fn defaults(config: &Config, specs: &Specs) -> Result<Vec<Choice>> {
        let mut names: Vec<String> = PRESETS[1..].iter().map(|(name, _)| name.to_string()).collect();
        names.extend(tensors(specs).into_iter().map(|tensor| tensor.name));
        names.extend(sites(config).map(|site| site.name().to_string()));
        let in_f16 = |site: Site| format!("{}=f16", site.name());
        if Site::Logits.is_in(config) {
            names.extend([Site::QkProduct, Site::Logits].map(in_f16));
        }
        if Site::IndexerLogits.is_in(config) {
            names.push(in_f16(Site::IndexerLogits));
        }
        names.extend(STORAGE.iter().map(|(name, _)| name.to_string()));
        names.push(EVERY.into());
        names.iter().map(|name| Choice::parse(name, config, specs)).collect()
    }

    /// Returns true if one tensor or site is lowered and everything else is f32.
    pub fn is_single(&self) -> bool {
        matches!(self.kind, Kind::Tensor | Kind::Site)
    }
}

fn lower_all(precision: &mut Precision, tensors: &[Tensor]) {
    precision.rounded = tensors.iter().map(|tensor| tensor.end.clone()).collect();
    for site in Site::ALL {
        precision.set(site, Rounding::Bf16);
    }
}

/// The sites that a model has.
fn sites(config: &Config) -> impl Iterator<Item = Site> {
    Site::ALL.into_iter().filter(|site| site.is_in(config))
}

fn unknown(text: &str, problem: &str, config: &Config, tensors: &[Tensor]) -> Error {
    let presets = PRESETS.map(|(name, _)| name).join(", ");
    let tensors = match tensors {
        [] => "none in this model".to_string(),
        tensors => tensors.iter().map(|tensor| tensor.name.as_str()).collect::<Vec<_>>().join(", "),
    };
    let sites = sites(config).map(Site::name).collect::<Vec<_>>().join(", ");
    Error::Choice(format!(
        "{text:?}: {problem}\npresets: {presets}\ntensors: {tensors}\nsites (=bf16, =f16): {sites}\n\
         storage: params, activations; everything: {EVERY}; several with +"
    ))
}
