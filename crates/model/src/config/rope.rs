//! Rotary settings, in the places where configurations of several ages keep them.
//!
//! Newest first: `rope_parameters`, by layer type where there are several; else `rope_theta`, `partial_rotary_factor`
//! and `rope_scaling` of their own.

use ballast_kernels::rotary::{Frequencies, Layout, Rotary, Yarn, yarn_mscale};

use super::fields::Fields;
use crate::error::Result;

/// A rotation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f64,
    /// How they follow from it.
    pub frequencies: Frequencies,
    /// Where the members of a pair lie.
    pub layout: Layout,
}

impl Rope {
    /// Sines and cosines can be made of this.
    pub fn rotary(&self) -> Result<Rotary> {
        Ok(Rotary::new(self.frequencies, self.theta, self.layout)?)
    }

    /// What DeepSeek multiplies its softmax scale with when yarn stretches the context.
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

/// What holds where the file says nothing.
pub(super) struct Default {
    pub(super) theta: f64,
    pub(super) partial: f64,
    pub(super) proportional: bool,
    pub(super) max_positions: usize,
}

/// The rotation of heads of width `head_dim`, in layers of type `layer_type` where types have their own.
pub(super) fn parse(
    fields: Fields<'_>,
    layer_type: Option<&str>,
    head_dim: usize,
    default: Default,
) -> Result<Rope> {
    let all = fields.object("rope_parameters", "rope_parameters.")?;
    let own = match (all, layer_type) {
        (Some(all), Some(layer_type)) => {
            all.object(layer_type, "rope_parameters.<layer type>.")?.or(Some(all))
        }
        (all, _) => all,
    };
    let scaling = fields.object("rope_scaling", "rope_scaling.")?;
    // Older Gemma 3: the sliding layers have a base of their own, and the scaling is not theirs.
    let sliding = layer_type == Some("sliding_attention");
    let old_theta = if sliding { "rope_local_base_freq" } else { "rope_theta" };
    let theta = match own {
        Some(own) => own.positive("rope_theta", default.theta)?,
        None => fields.positive(old_theta, default.theta)?,
    };
    let from = own.or(if sliding { None } else { scaling });
    let partial = match own.map(|own| own.positive_or_none("partial_rotary_factor")).transpose()?.flatten() {
        Some(partial) => partial,
        None => fields.positive("partial_rotary_factor", default.partial)?,
    };
    if partial > 1.0 {
        return Err(fields.error("partial_rotary_factor", format!("is {partial}; at most 1")));
    }
    let kind = match from {
        Some(from) => from.text("rope_type")?.or(from.text("type")?),
        None => None,
    };
    let kind = kind.unwrap_or(if default.proportional { "proportional" } else { "default" });
    let dims = (head_dim as f64 * partial) as usize;
    let factor = |name: &str| match from {
        Some(from) => from.positive(name, 1.0),
        None => Ok(1.0),
    };
    let frequencies = match kind {
        "default" | "mrope" => Frequencies::Plain { dims },
        "linear" => Frequencies::Linear { dims, factor: factor("factor")? },
        "proportional" => Frequencies::Proportional { head_dim, partial, factor: factor("factor")? },
        "yarn" => Frequencies::Yarn { dims, yarn: yarn(from.unwrap_or(fields), default.max_positions)? },
        other => {
            let known = "default, linear, proportional, yarn";
            let place = from.unwrap_or(fields);
            return Err(
                place.error("rope_type", format!("is {other:?}, which is not supported; known: {known}"))
            );
        }
    };
    let rope = Rope { theta, frequencies, layout: Layout::HalfSplit };
    rope.rotary().map_err(|e| from.unwrap_or(fields).error("rope_theta", format!("cannot be used: {e}")))?;
    Ok(rope)
}

fn yarn(fields: Fields<'_>, max_positions: usize) -> Result<Yarn> {
    let usual = Yarn::new(1.0, max_positions);
    let original = fields.count("original_max_position_embeddings", max_positions)?;
    Ok(Yarn {
        factor: fields.positive("factor", max_positions as f64 / original as f64)?,
        original_context: original,
        beta_fast: fields.positive("beta_fast", usual.beta_fast)?,
        beta_slow: fields.positive("beta_slow", usual.beta_slow)?,
        mscale: fields.number("mscale")?,
        mscale_all_dim: fields.number("mscale_all_dim")?,
        attention_factor: fields.positive_or_none("attention_factor")?,
        truncate: fields.flag("truncate", true)?,
    })
}
