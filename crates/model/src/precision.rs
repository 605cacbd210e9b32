//! Precision of a run: the types in which tensors are stored and computed.
//!
//! A precision has storage types, a policy of the contract, and a [`Rounding`] for each [`Site`]. `policy`
//! names the protected tensors that keep their f32 values; the other protected tensors are rounded to bf16 if
//! `params` is bf16. Their storage is f32 in any case. `rounded` names protected tensors to round whatever
//! `params` is, to measure the effect of one of them alone.

use ballast_checkpoint::Checkpoint;
use ballast_contract::{Dtype, Policy, Registry};
use ballast_kernels::Rounding;
use serde::Serialize;

use crate::config::{Config, Mixer};
use crate::error::{Error, Result};
use crate::site::Site;

/// Storage type of tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum Storage {
    F32,
    Bf16,
}

/// Evaluates `$body` with `$x` the content of a `$Type`, an enum of two variants, `F32` and `Bf16`.
macro_rules! with_storage {
    ($Type:ident, $value:expr, |$x:ident| $body:expr) => {
        match $value {
            $Type::F32($x) => $body,
            $Type::Bf16($x) => $body,
        }
    };
}
pub(crate) use with_storage;

impl Storage {
    /// Returns the bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            Storage::F32 => 4,
            Storage::Bf16 => 2,
        }
    }
}

/// Storage, sites and policy of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Precision {
    /// Name of the preset that this is or was derived from.
    pub name: String,
    /// Storage type of parameters that the contract does not protect.
    pub params: Storage,
    /// Storage type of activations.
    pub activations: Storage,
    /// Policy of the contract: selects the protected tensors that keep their f32 values.
    pub policy: &'static str,
    /// Protected tensors to round to bf16 whatever the policy says, by the last parts of their names.
    pub rounded: Vec<String>,
    /// Roundings, indexed by [`Site`].
    sites: [Rounding; Site::ALL.len()],
}

/// Presets: name and description.
pub const PRESETS: [(&str, &str); 6] = [
    ("f32", "everything in f32"),
    ("bf16", "bf16 storage, strict contract, f32 arithmetic; two backward factors in bf16"),
    (
        "megatron",
        "bf16 storage and residual stream; A_log and out_norm f32; a, b, the router's logits, attention's \
         probabilities and two backward factors in bf16",
    ),
    (
        "nemo",
        "bf16 storage and residual stream; A_log and dt_bias f32; a, b, the router's logits, attention's \
         probabilities and two backward factors in bf16",
    ),
    (
        "maxtext-default",
        "bf16 storage and residual stream, strict contract; qk product, attention logits, attention's \
         probabilities and two backward factors in bf16",
    ),
    ("hf-bf16", "a whole-model cast to bf16, as transformers runs it"),
];

impl Precision {
    /// Returns the preset `f32`: everything in f32.
    pub fn f32() -> Precision {
        Precision::of("f32", Storage::F32, "strict")
    }

    /// Returns the preset `bf16`: bf16 storage, the strict contract, every site f32 but `attention_gradient` and
    /// `loss_gradient`.
    pub fn bf16() -> Precision {
        Precision::of("bf16", Storage::Bf16, "strict")
    }

    /// Makes the preset called `name`, with the roundings of the table of sites.
    fn of(name: &str, storage: Storage, policy: &'static str) -> Precision {
        Precision {
            name: name.into(),
            params: storage,
            activations: storage,
            policy,
            rounded: Vec::new(),
            sites: Site::ALL.map(|site| site.rounding_in(name)),
        }
    }

    /// Returns the preset called `name`, for a model of this configuration.
    pub fn preset(name: &str, config: &Config) -> Result<Precision> {
        let policy = match name {
            "f32" => return Ok(Precision::f32()),
            "bf16" | "maxtext-default" => "strict",
            "megatron" => "megatron",
            "nemo" => "nemo",
            "hf-bf16" => "none",
            _ => return Err(Error::Precision(name.into())),
        };
        let mut precision = Precision::of(name, Storage::Bf16, policy);
        // Attention logits without a soft cap stay f32 in this preset.
        if name == "maxtext-default" && is_softcapless_gemma(config) {
            precision.set(Site::QkProduct, Rounding::F32);
            precision.set(Site::Logits, Rounding::F32);
        }
        Ok(precision)
    }

    /// Returns the name of the default preset for a checkpoint: `bf16` if most of its values are stored in 16
    /// bits, else `f32`.
    pub fn name_for(checkpoint: &Checkpoint) -> &'static str {
        let (mut short, mut all) = (0, 0);
        for tensor in &checkpoint.tensors {
            all += tensor.elements();
            if matches!(tensor.dtype, Dtype::Bf16 | Dtype::F16) {
                short += tensor.elements();
            }
        }
        if 2 * short > all { "bf16" } else { "f32" }
    }

    /// Returns the policy of the contract.
    pub fn policy(&self) -> Policy {
        Registry::builtin().policy(self.policy).expect("presets name policies of the built-in registry")
    }

    /// Returns true if the values of a protected tensor are rounded to bf16. `name` is the name in its
    /// [`crate::params::Spec`]; `policy` is [`Precision::policy`].
    pub fn rounds(&self, policy: &Policy, name: &str) -> bool {
        let ends = |end: &String| {
            name.strip_suffix(end.as_str()).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
        };
        let left_out = || policy.rule_for(&format!("model.{name}")).is_none();
        self.rounded.iter().any(ends) || self.params == Storage::Bf16 && left_out()
    }

    /// Returns the rounding at a site.
    pub fn site(&self, site: Site) -> Rounding {
        self.sites[site as usize]
    }

    /// Sets the rounding at a site.
    pub fn set(&mut self, site: Site, rounding: Rounding) {
        self.sites[site as usize] = rounding;
    }

    /// Returns all sites with their roundings.
    pub fn sites(&self) -> impl Iterator<Item = (Site, Rounding)> {
        Site::ALL.into_iter().zip(self.sites)
    }

    /// Sets the rounding at the site called `name` to `dtype`: f32, bf16 or f16.
    pub fn set_site(&mut self, name: &str, dtype: &str) -> Result {
        let rounding = match dtype {
            "f32" => Rounding::F32,
            "bf16" => Rounding::Bf16,
            "f16" => Rounding::F16,
            _ => return Err(Error::Input(format!("site {name} must be f32, bf16 or f16, got {dtype:?}"))),
        };
        self.set(name.parse()?, rounding);
        Ok(())
    }
}

/// Returns true for Gemma 3 and 4, whose attention logits are not bounded by a soft cap.
fn is_softcapless_gemma(config: &Config) -> bool {
    let uncapped = |mixer: &Mixer| matches!(mixer, Mixer::Softmax(a) if a.soft_cap.is_none());
    config.model_type.starts_with("gemma") && config.layers.iter().any(|layer| uncapped(&layer.mixer))
}
