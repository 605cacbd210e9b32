//! What is stored and computed in which precision: one value for a whole run.
//!
//! bf16 is storage, f32 is arithmetic; a lowered site rounds exactly where it is named, and nowhere else:
//!
//! | site | what is rounded |
//! |---|---|
//! | `gate_projections` | a and b, as they leave their projections |
//! | `decay_gate` | g = -exp(A_log) softplus(a + dt_bias) |
//! | `beta` | sigmoid(b) |
//! | `l2norm` | q and k of the delta rule, after they were normalised |
//! | `state` | the recurrent state, each time that a chunk or a step hands it on |
//! | `qk_product`, `logits` | of softmax attention, see [`ballast_kernels::attention`] |
//! | `indexer_logits` | q.k of the sparse indexer, before the relu |
//! | `router` | the router's logits |
//! | `norms` | the output of every norm but the delta rule's |
//! | `loss` | the output logits, before the softmax |
//!
//! `policy` says which of the contract's tensors keep their f32 values; the others of them are rounded to bf16 when
//! `params` is bf16. They stay in f32 storage: a protected tensor has no other type. `rounded` names further ones that are
//! rounded whatever `params` is: to see what one of them alone does.

use ballast_checkpoint::Checkpoint;
use ballast_contract::{Dtype, Policy, Registry};
use ballast_kernels::Rounding;
use serde::Serialize;

use crate::config::{Config, Mixer};
use crate::error::{Error, Result};

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
    /// See the module.
    pub gate_projections: Rounding,
    /// See the module.
    pub decay_gate: Rounding,
    /// See the module.
    pub beta: Rounding,
    /// See the module.
    pub l2norm: Rounding,
    /// See the module.
    pub state: Rounding,
    /// See the module.
    pub qk_product: Rounding,
    /// See the module.
    pub logits: Rounding,
    /// See the module.
    pub indexer_logits: Rounding,
    /// See the module.
    pub router: Rounding,
    /// See the module.
    pub norms: Rounding,
    /// See the module.
    pub loss: Rounding,
}

/// The presets and what they are.
pub const PRESETS: [(&str, &str); 6] = [
    ("f32", "everything in f32"),
    ("bf16", "bf16 storage, strict contract, every site f32"),
    ("megatron", "bf16 storage; A_log and out_norm f32; a, b and the router's logits bf16"),
    ("nemo", "bf16 storage; A_log and dt_bias f32; a, b and the router's logits bf16"),
    ("maxtext-default", "bf16 storage, strict contract; qk product and attention logits bf16"),
    ("hf-bf16", "a whole-model cast to bf16, as transformers runs it"),
];

impl Precision {
    /// Everything in f32.
    pub fn f32() -> Precision {
        Precision {
            name: "f32".into(),
            params: Storage::F32,
            activations: Storage::F32,
            policy: "strict",
            rounded: Vec::new(),
            gate_projections: Rounding::F32,
            decay_gate: Rounding::F32,
            beta: Rounding::F32,
            l2norm: Rounding::F32,
            state: Rounding::F32,
            qk_product: Rounding::F32,
            logits: Rounding::F32,
            indexer_logits: Rounding::F32,
            router: Rounding::F32,
            norms: Rounding::F32,
            loss: Rounding::F32,
        }
    }

    /// bf16 storage with the strict contract and every site f32.
    pub fn bf16() -> Precision {
        Precision {
            name: "bf16".into(),
            params: Storage::Bf16,
            activations: Storage::Bf16,
            ..Precision::f32()
        }
    }

    /// The preset called `name`, for a model of this configuration.
    pub fn preset(name: &str, config: &Config) -> Result<Precision> {
        let bf16 = Rounding::Bf16;
        let framework = Precision { gate_projections: bf16, router: bf16, ..Precision::bf16() };
        let precision = match name {
            "f32" => Precision::f32(),
            "bf16" => Precision::bf16(),
            "megatron" => Precision { policy: "megatron", ..framework },
            "nemo" => Precision { policy: "nemo", ..framework },
            // Softcap-less attention keeps f32 there, whatever the default for the others is.
            "maxtext-default" if is_softcapless_gemma(config) => Precision::bf16(),
            "maxtext-default" => Precision { qk_product: bf16, logits: bf16, ..Precision::bf16() },
            "hf-bf16" => Precision {
                policy: "none",
                beta: bf16,
                l2norm: bf16,
                qk_product: bf16,
                norms: bf16,
                loss: bf16,
                ..framework
            },
            _ => return Err(Error::Precision(name.into())),
        };
        Ok(Precision { name: name.into(), ..precision })
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

    /// The sites by name, as the module lists them.
    pub fn sites(&self) -> [(&'static str, Rounding); 11] {
        [
            ("gate_projections", self.gate_projections),
            ("decay_gate", self.decay_gate),
            ("beta", self.beta),
            ("l2norm", self.l2norm),
            ("state", self.state),
            ("qk_product", self.qk_product),
            ("logits", self.logits),
            ("indexer_logits", self.indexer_logits),
            ("router", self.router),
            ("norms", self.norms),
            ("loss", self.loss),
        ]
    }

    /// Computes the site called `name` in `dtype`: f32, bf16 or f16.
    pub fn set_site(&mut self, name: &str, dtype: &str) -> Result {
        let rounding = match dtype {
            "f32" => Rounding::F32,
            "bf16" => Rounding::Bf16,
            "f16" => Rounding::F16,
            _ => return Err(Error::Input(format!("{name} in {dtype:?}: a site can be f32, bf16 or f16"))),
        };
        let known = self.sites().map(|(name, _)| name);
        let unknown = || Error::Input(format!("no site is called {name:?}; known: {}", known.join(", ")));
        *self.site_mut(name).ok_or_else(unknown)? = rounding;
        Ok(())
    }

    /// The sites that may round what a probe sees as `probe_site`, or something inside the kernel that makes it: where to
    /// look when its values are off. The gradient of a site has the site's own.
    pub fn site_of(probe_site: &str) -> &'static [&'static str] {
        let site = probe_site.strip_prefix("d.").unwrap_or(probe_site);
        let in_layer = site.strip_prefix("layers.").and_then(|rest| Some(rest.split_once('.')?.1));
        match in_layer.unwrap_or(site) {
            "linear_attn.a" | "linear_attn.b" => &["gate_projections"],
            "linear_attn.g" => &["decay_gate"],
            "linear_attn.beta" => &["beta"],
            "linear_attn.o" => &["l2norm", "state"],
            "self_attn.logits" | "self_attn.o" => &["qk_product", "logits"],
            "self_attn.indexer.scores" => &["indexer_logits"],
            "mlp.router" => &["router"],
            "input_layernorm"
            | "per_layer_inputs"
            | "norm"
            | "self_attn.q"
            | "self_attn.k"
            | "self_attn.v"
            | "self_attn.indexer.k" => &["norms"],
            "logits" => &["loss"],
            _ => &[],
        }
    }

    /// The site called `name`, to be changed.
    fn site_mut(&mut self, name: &str) -> Option<&mut Rounding> {
        Some(match name {
            "gate_projections" => &mut self.gate_projections,
            "decay_gate" => &mut self.decay_gate,
            "beta" => &mut self.beta,
            "l2norm" => &mut self.l2norm,
            "state" => &mut self.state,
            "qk_product" => &mut self.qk_product,
            "logits" => &mut self.logits,
            "indexer_logits" => &mut self.indexer_logits,
            "router" => &mut self.router,
            "norms" => &mut self.norms,
            "loss" => &mut self.loss,
            _ => return None,
        })
    }
}

/// Gemma 3 and 4: nothing but the precision keeps their attention logits in hand.
fn is_softcapless_gemma(config: &Config) -> bool {
    let uncapped = |mixer: &Mixer| matches!(mixer, Mixer::Softmax(a) if a.soft_cap.is_none());
    config.model_type.starts_with("gemma") && config.layers.iter().any(|layer| uncapped(&layer.mixer))
}
