//! Precision of a run: which type tensors are stored and computed in.
//!
//! Storage types, the contract's policy, and a [`Rounding`] for each [`Site`]. `policy` says which of the contract's tensors
//! keep their f32 values; the others of them are rounded to bf16 when `params` is bf16. They stay in f32 storage: a
//! protected tensor has no other type. `rounded` names further ones that are rounded whatever `params` is, to see the
//! effect of one of them alone.

use ballast_checkpoint::Checkpoint;
use ballast_contract::{Dtype, Policy, Registry};
use ballast_kernels::Rounding;
use serde::Serialize;

use crate::config::{Config, Mixer};
use crate::error::{Error, Result};
use crate::site::Site;

/// What tensors are stored in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum Storage {
    F32,
    Bf16,
}

impl Storage {
    /// Bytes of an element.
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
    /// The preset that this is, or was before it was changed.
    pub name: String,
    /// Parameters that the contract does not protect.
    pub params: Storage,
    /// Everything that flows.
    pub activations: Storage,
    /// Which protected tensors keep their f32 values: a policy of the contract.
    pub policy: &'static str,
    /// Protected tensors that are rounded to bf16 whatever the policy says: by the end of their names.
    pub rounded: Vec<String>,
    /// By [`Site`].
    sites: [Rounding; Site::ALL.len()],
}

/// The presets and what they are.
pub const PRESETS: [(&str, &str); 6] = [
    ("f32", "everything in f32"),
    ("bf16", "bf16 storage, strict contract, every site f32, the residual stream too"),
    ("megatron", "bf16 storage; A_log and out_norm f32; a, b and the router's logits bf16"),
    ("nemo", "bf16 storage; A_log and dt_bias f32; a, b and the router's logits bf16"),
    ("maxtext-default", "bf16 storage, strict contract; qk product and attention logits bf16"),
    ("hf-bf16", "a whole-model cast to bf16, as transformers runs it"),
];

impl Precision {
    /// Everything in f32.
    pub fn f32() -> Precision {
        Precision::of("f32", Storage::F32, "strict")
    }

    /// bf16 storage with the strict contract and every site f32.
    pub fn bf16() -> Precision {
        Precision::of("bf16", Storage::Bf16, "strict")
    }

    /// Preset called `name`, with the roundings of the table of sites.
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

    /// The preset called `name`, for a model of this configuration.
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
        // Attention without soft caps keeps f32 there, whatever the default for the others is.
        if name == "maxtext-default" && is_softcapless_gemma(config) {
            precision.set(Site::QkProduct, Rounding::F32);
            precision.set(Site::Logits, Rounding::F32);
        }
        Ok(precision)
    }

    /// The name of the preset that suits a checkpoint: `bf16` where most of its values are stored in 16 bits, else `f32`.
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

    /// The policy itself.
    pub fn policy(&self) -> Policy {
        Registry::builtin().policy(self.policy).expect("presets name policies of the built-in registry")
    }

    /// Whether the values of a protected tensor are rounded to bf16; `name` is that of its [`crate::params::Spec`], `policy`
    /// is [`Precision::policy`].
    pub fn rounds(&self, policy: &Policy, name: &str) -> bool {
        let ends = |end: &String| {
            name.strip_suffix(end.as_str()).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
        };
        let left_out = || policy.rule_for(&format!("model.{name}")).is_none();
        self.rounded.iter().any(ends) || self.params == Storage::Bf16 && left_out()
    }

    /// Rounding at a site.
    pub fn site(&self, site: Site) -> Rounding {
        self.sites[site as usize]
    }

    /// Sets the rounding at a site.
    pub fn set(&mut self, site: Site, rounding: Rounding) {
        self.sites[site as usize] = rounding;
    }

    /// All sites with their roundings.
    pub fn sites(&self) -> impl Iterator<Item = (Site, Rounding)> {
        Site::ALL.into_iter().zip(self.sites)
    }

    /// Sets the site called `name` to `dtype`: f32, bf16 or f16. For configurations, where both are text.
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

/// Gemma 3 and 4: nothing but the precision keeps their attention logits in hand.
fn is_softcapless_gemma(config: &Config) -> bool {
    let uncapped = |mixer: &Mixer| matches!(mixer, Mixer::Softmax(a) if a.soft_cap.is_none());
    config.model_type.starts_with("gemma") && config.layers.iter().any(|layer| uncapped(&layer.mixer))
}
