//! The sites of a precision, by their own names and by those that a probe sees.

use ballast_kernels::Precision as Rounding;
use ballast_model::Precision;

use crate::error::{Error, Result};

/// Lets a site compute in `f32`, `bf16` or `f16`.
pub fn set(precision: &mut Precision, site: &str, dtype: &str) -> Result {
    let rounding = match dtype {
        "f32" => Rounding::F32,
        "bf16" => Rounding::Bf16,
        "f16" => Rounding::F16,
        _ => return Err(Error::Config(format!("`precision.sites.{site}` is {dtype:?}: f32, bf16 or f16"))),
    };
    let known = precision.sites().map(|(name, _)| name).join(", ");
    match precision.site_mut(site) {
        Some(place) => *place = rounding,
        None => return Err(Error::Config(format!("`precision.sites.{site}` is not known; there are {known}"))),
    }
    Ok(())
}

/// Ends of the names that a probe sees, and the sites whose rounding makes them.
const MADE_BY: [(&str, &[&str]); 16] = [
    ("linear_attn.a", &["gate_projections"]),
    ("linear_attn.b", &["gate_projections"]),
    ("linear_attn.g", &["decay_gate"]),
    ("linear_attn.beta", &["beta"]),
    ("linear_attn.o", &["state", "l2norm", "decay_gate", "beta"]),
    ("linear_attn.norm", &["state", "l2norm"]),
    ("indexer.scores", &["indexer_logits"]),
    ("self_attn.q", &["norms"]),
    ("self_attn.k", &["norms"]),
    ("self_attn.v", &["norms"]),
    ("self_attn.logits", &["qk_product", "logits"]),
    ("self_attn.o", &["qk_product", "logits"]),
    ("mlp.router", &["router"]),
    ("mlp.router_weights", &["router"]),
    ("layernorm", &["norms"]),
    ("norm", &["norms"]),
];

/// The lowered sites that lead to what a probe saw.
pub fn lowered_at(precision: &Precision, seen: &str) -> Vec<&'static str> {
    let lowered = |name: &&'static str| {
        precision.sites().iter().any(|(site, rounding)| site == name && *rounding != Rounding::F32)
    };
    let name = seen.trim_start_matches("d.");
    // The output logits have a name of their own; a gradient that begins there comes from the loss.
    if name == "logits" || name == "norm" && seen.starts_with("d.") {
        return ["loss"].into_iter().filter(lowered).collect();
    }
    let made_by = MADE_BY.iter().find(|(end, _)| name.ends_with(end)).map_or(&[][..], |(_, sites)| sites);
    made_by.iter().copied().filter(lowered).collect()
}
