//! Rotary settings (RoPE), from all places where old and new config.json files keep them, read as
//! transformers 5.22 does.
//!
//! | family | dictionary | source of a missing key |
//! |---|---|---|
//! | qwen, gemma2, deepseek | `rope_scaling` if it has entries, else `rope_parameters` | beside it: `rope_theta`, `partial_rotary_factor`, then the default |
//! | gemma3, full layers | `rope_parameters.full_attention`, overridden key by key by `rope_scaling` | `rope_theta` beside it, then 1e6 |
//! | gemma3, sliding layers | `rope_parameters.sliding_attention` | `rope_local_base_freq` beside it, then 1e4 |
//! | gemma4 | `rope_scaling` or `rope_parameters`, by layer type | none: `rope_theta` is required |
//!
//! Only Qwen models and type `proportional` rotate a part of the head; elsewhere type `default` ignores
//! `partial_rotary_factor`. An ignored key is not read, so the list of unread keys reports it.

use ballast_kernels::rotary::{Frequencies, Layout, Rotary, Yarn, yarn_mscale};

use super::fields::Fields;
use crate::error::Result;

/// Rotary position embedding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    /// Base of the frequencies (`rope_theta`).
    pub theta: f64,
    /// Rule that derives the frequencies from the base.
    pub frequencies: Frequencies,
    /// Placement of the two elements of a rotated pair.
    pub layout: Layout,
}

impl Rope {
    /// Creates the sines and cosines; fails on invalid settings.
    pub fn rotary(&self) -> Result<Rotary> {
        Ok(Rotary::new(self.frequencies, self.theta, self.layout)?)
    }

    /// Factor of DeepSeek's softmax scale when yarn extends the context.
    pub(super) fn softmax_factor(&self) -> f64 {
        match self.frequencies {
            Frequencies::Yarn { yarn, .. } => match yarn.mscale_all_dim {
                Some(mscale) if mscale != 0.0 => yarn_mscale(yarn.factor, mscale).powi(2),
                _ => 1.0,
            },
            _ => 1.0,
        }
    }
}

/// Defaults and abilities of a model family.
pub(super) struct Family {
    /// Default of `rope_theta`.
    pub(super) theta: f64,
    /// Default of `partial_rotary_factor`.
    pub(super) partial: f64,
    /// True if the family can rotate only the first part of a head.
    pub(super) rotates_part: bool,
    pub(super) max_positions: usize,
}

/// Places where the settings of one rotary embedding are read from.
struct Settings<'a> {
    /// Dictionaries that hold the keys, by descending precedence.
    own: Vec<Fields<'a>>,
    /// Object that contains the dictionaries.
    around: Fields<'a>,
    /// True if `type`, the older name, is read when `rope_type` is missing.
    older_name: bool,
    theta: Theta,
    /// Dictionary that holds `truncate`.
    truncate: Option<Fields<'a>>,
    /// True if `original_max_position_embeddings` beside the dictionaries takes precedence over theirs.
    original_beside: bool,
}

/// Source of `rope_theta` when the dictionaries lack it.
enum Theta {
    /// This field beside the dictionary, else this default.
    Beside(&'static str, f64),
    /// None: a missing key is an error.
    Required,
}

/// Reads the rotary embedding of a family that uses one for all layers; `layer_types` are its layer types.
pub(super) fn flat(
    fields: &Fields<'_>,
    layer_types: &[&str],
    head_dim: usize,
    family: &Family,
) -> Result<Rope> {
    let own = flat_dictionary(fields)?;
    if let Some(own) = &own
        && let Some(nested) = own.keys().find(|key| layer_types.contains(&key.as_str()))
    {
        return Err(own.error(
            nested,
            "has settings by layer type; this family has one rotary embedding for all layers",
        ));
    }
    let settings = Settings {
        truncate: own.clone(),
        own: own.into_iter().collect(),
        around: fields.clone(),
        older_name: true,
        theta: Theta::Beside("rope_theta", family.theta),
        original_beside: true,
    };
    settings.rope(head_dim, family)
}

/// Returns the dictionary of a family with one rotary embedding: `rope_scaling` replaces `rope_parameters`.
pub(super) fn flat_dictionary<'a>(fields: &Fields<'a>) -> Result<Option<Fields<'a>>> {
    let parameters = fields.object("rope_parameters")?;
    let scaling = fields.object("rope_scaling")?.filter(|scaling| scaling.keys().next().is_some());
    Ok(scaling.or(parameters))
}

/// Reads the rotary embedding of Gemma 3's full or sliding layers.
pub(super) fn gemma3(fields: &Fields<'_>, full: bool, head_dim: usize, family: &Family) -> Result<Rope> {
    let layer_type = if full { "full_attention" } else { "sliding_attention" };
    let parameters = fields.object("rope_parameters")?;
    let by_type = parameters.as_ref().map(|all| all.object(layer_type)).transpose()?.flatten();
    let scaling = if full { fields.object("rope_scaling")? } else { None };
    if let (Some(_), Some(parameters), None) = (&scaling, &parameters, &by_type) {
        return Err(parameters.error(layer_type, "is missing; `rope_scaling` overrides its keys"));
    }
    // Without a dictionary of its own a layer type starts from one that has `rope_type`.
    let older_name = by_type.is_some();
    let (theta, default) = if full { ("rope_theta", 1e6) } else { ("rope_local_base_freq", 1e4) };
    let settings = Settings {
        own: scaling.into_iter().chain(by_type).collect(),
        around: fields.clone(),
        older_name,
        theta: Theta::Beside(theta, default),
        truncate: parameters,
        original_beside: false,
    };
    settings.rope(head_dim, family)
}

/// Reads the rotary embedding of Gemma 4's full or sliding layers.
pub(super) fn gemma4(fields: &Fields<'_>, full: bool, head_dim: usize, family: &Family) -> Result<Rope> {
    let layer_type = if full { "full_attention" } else { "sliding_attention" };
    let (parameters, scaling) = (fields.object("rope_parameters")?, fields.object("rope_scaling")?);
    if parameters.is_some() && scaling.is_some() {
        let problem = "and `rope_parameters` are both set; keep one of them";
        return Err(fields.error("rope_scaling", problem));
    }
    let Some(all) = scaling.or(parameters) else {
        let frequencies = if full {
            Frequencies::Proportional { head_dim, partial: 0.25, factor: 1.0 }
        } else {
            Frequencies::Plain { dims: head_dim }
        };
        let theta = if full { 1e6 } else { 1e4 };
        return checked(fields, Rope { theta, frequencies, layout: Layout::HalfSplit });
    };
    let Some(own) = all.object(layer_type)? else {
        return Err(all.error(layer_type, "is missing; Gemma 4 needs rotary settings for each layer type"));
    };
    let settings = Settings {
        own: vec![own],
        around: fields.clone(),
        older_name: true,
        theta: Theta::Required,
        truncate: Some(all),
        original_beside: false,
    };
    settings.rope(head_dim, family)
}

impl<'a> Settings<'a> {
    /// Returns the first dictionary that contains `field`, even if it is null.
    fn dictionary_with(&self, field: &str) -> Option<&Fields<'a>> {
        self.own.iter().find(|own| own.contains(field))
    }

    /// Reads `field` from the first dictionary that contains it; `None` if none does.
    fn find<T>(&self, field: &str, read: impl Fn(&Fields<'a>, &str) -> Result<T>) -> Result<Option<T>> {
        self.dictionary_with(field).map(|own| read(own, field)).transpose()
    }

    fn rope(&self, head_dim: usize, family: &Family) -> Result<Rope> {
        let kind = self.kind()?;
        let theta = match (self.find("rope_theta", |own, field| own.positive(field, 1.0))?, &self.theta) {
            (Some(theta), Theta::Beside(field, _)) => {
                self.around.mark_copy_read(field, theta);
                theta
            }
            (Some(theta), Theta::Required) => theta,
            (None, Theta::Beside(field, default)) => self.around.positive(field, *default)?,
            (None, Theta::Required) => return Err(self.place().error("rope_theta", "is missing")),
        };
        let frequencies = match kind {
            "default" if family.rotates_part => Frequencies::Plain { dims: self.dims(head_dim, family)? },
            "default" => Frequencies::Plain { dims: head_dim },
            "linear" => {
                let Some(factor) = self.find("factor", |own, field| own.positive(field, 1.0))? else {
                    return Err(self.place().error("factor", "is missing; type linear needs it"));
                };
                Frequencies::Linear { dims: self.dims(head_dim, family)?, factor }
            }
            "proportional" => Frequencies::Proportional {
                head_dim,
                partial: self.partial(family)?,
                factor: self.find("factor", |own, field| own.positive(field, 1.0))?.unwrap_or(1.0),
            },
            "yarn" => Frequencies::Yarn {
                dims: self.dims(head_dim, family)?,
                yarn: self.yarn(family.max_positions)?,
            },
            other => {
                let known = "default, linear, proportional, yarn";
                let problem = format!("is {other:?}, which is not supported; use {known}");
                return Err(self.place().error("rope_type", problem));
            }
        };
        checked(self.place(), Rope { theta, frequencies, layout: Layout::HalfSplit })
    }

    /// Returns the object that errors name.
    fn place(&self) -> &Fields<'a> {
        self.own.first().unwrap_or(&self.around)
    }

    fn kind(&self) -> Result<&'a str> {
        let text = |own: &Fields<'a>, field: &str| match own.text(field)? {
            Some(text) => Ok(text),
            None => Err(own.error(field, "is null; set a value or remove it")),
        };
        if let Some(kind) = self.find("rope_type", text)? {
            self.own.iter().for_each(|own| own.mark_copy_read("type", kind));
            return Ok(kind);
        }
        match self.find("type", text)? {
            Some(kind) if kind != "default" && !self.older_name => {
                let problem = format!("is {kind:?}, which transformers ignores here; name it `rope_type`");
                Err(self.place().error("type", problem))
            }
            kind => Ok(kind.unwrap_or("default")),
        }
    }

    /// Reads `partial_rotary_factor` from the dictionaries, else beside them, else the default.
    fn partial(&self, family: &Family) -> Result<f64> {
        let field = "partial_rotary_factor";
        let partial = match self.find(field, |own, field| own.positive(field, 1.0))? {
            Some(partial) => {
                self.around.mark_copy_read(field, partial);
                partial
            }
            // Null beside the dictionary means the whole head.
            None if self.around.contains(field) => self.around.positive_or_none(field)?.unwrap_or(1.0),
            None => family.partial,
        };
        if partial > 1.0 {
            let place = self.dictionary_with(field).unwrap_or(&self.around);
            return Err(place.error(field, format!("must be at most 1, got {partial}")));
        }
        Ok(partial)
    }

    /// Number of dimensions of a head that rotate.
    fn dims(&self, head_dim: usize, family: &Family) -> Result<usize> {
        let partial = self.partial(family)?;
        let dims = (head_dim as f64 * partial) as usize;
        if dims < head_dim && !family.rotates_part {
            let field = "partial_rotary_factor";
            let place = self.dictionary_with(field).unwrap_or(&self.around);
            let problem =
                format!("must be 1 for this family unless the rope type is proportional, got {partial}");
            return Err(place.error(field, problem));
        }
        Ok(dims)
    }

    fn yarn(&self, max_positions: usize) -> Result<Yarn> {
        let usual = Yarn::new(1.0, max_positions);
        let field = "original_max_position_embeddings";
        let original = if self.original_beside && self.around.contains(field) {
            self.around.count(field, max_positions)?
        } else {
            self.find(field, |own, field| own.count(field, max_positions))?.unwrap_or(max_positions)
        };
        let Some(factor) = self.find("factor", Fields::positive_or_none)? else {
            return Err(self.place().error("factor", "is missing; type yarn needs it"));
        };
        // 0 and null mean the default.
        let beta = |field: &str| -> Result<Option<f64>> {
            Ok(self.find(field, Fields::number)?.flatten().filter(|beta| *beta != 0.0))
        };
        Ok(Yarn {
            factor: factor.unwrap_or(max_positions as f64 / original as f64),
            original_context: original,
            beta_fast: beta("beta_fast")?.unwrap_or(usual.beta_fast),
            beta_slow: beta("beta_slow")?.unwrap_or(usual.beta_slow),
            mscale: self.find("mscale", Fields::number)?.flatten(),
            mscale_all_dim: self.find("mscale_all_dim", Fields::number)?.flatten(),
            attention_factor: self.find("attention_factor", Fields::positive_or_none)?.flatten(),
            truncate: self.truncate.as_ref().map_or(Ok(true), |place| place.flag("truncate", true))?,
        })
    }
}

/// Returns `rope` if its sines and cosines can be computed.
fn checked(place: &Fields<'_>, rope: Rope) -> Result<Rope> {
    rope.rotary().map_err(|e| place.error("rope_theta", format!("is invalid: {e}")))?;
    Ok(rope)
}
