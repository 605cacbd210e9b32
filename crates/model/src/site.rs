//! Sites: the named places where a run may round to a narrower type.
//!
//! Storage may be bf16; arithmetic is f32. A lowered site rounds exactly where the table says, and nowhere
//! else. The table below generates [`Site`] and is the only list of sites: a new site needs one entry here
//! and the code that rounds.

use std::str::FromStr;

use ballast_kernels::Rounding;

use crate::config::{Config, Mixer};
use crate::error::{Error, Result};

/// Entry of the table of sites.
struct Entry {
    /// Key in configurations, in `--policies` and in lab.json.
    name: &'static str,
    /// Values that are rounded there.
    what: &'static str,
    /// Presets in which the site is bf16; it is f32 in the others.
    bf16_in: &'static [&'static str],
    /// Returns true if a model of this configuration has the site.
    exists: fn(&Config) -> bool,
    /// Probe sites that show a value rounded here, or the result of the kernel that rounds here; without
    /// `layers.N.`.
    probes: &'static [&'static str],
}

/// Declares [`Site`] and its table, in one order.
macro_rules! sites {
    ($($site:ident { $($field:ident: $value:expr,)* })*) => {
        /// A place where a run may round to a narrower type.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[allow(missing_docs)]
        pub enum Site {
            $($site,)*
        }

        impl Site {
            /// All sites, in the order of the table.
            pub const ALL: [Site; TABLE.len()] = [$(Site::$site,)*];
        }

        const TABLE: &[Entry] = &[$(Entry { $($field: $value,)* },)*];
    };
}

sites! {
    GateProjections {
        name: "gate_projections",
        what: "a and b of the delta rule, as they leave their projections",
        bf16_in: &["megatron", "nemo", "hf-bf16"],
        exists: has_delta_rule,
        probes: &["linear_attn.a", "linear_attn.b"],
    }
    DecayGate {
        name: "decay_gate",
        what: "the decay g = -exp(A_log) softplus(a + dt_bias)",
        bf16_in: &[],
        exists: has_delta_rule,
        probes: &["linear_attn.g"],
    }
    Beta {
        name: "beta",
        what: "beta = sigmoid(b)",
        bf16_in: &["hf-bf16"],
        exists: has_delta_rule,
        probes: &["linear_attn.beta"],
    }
    L2Norm {
        name: "l2norm",
        what: "q and k of the delta rule after their norm, outside the kernel",
        bf16_in: &["hf-bf16"],
        exists: has_delta_rule,
        probes: &["linear_attn.o"],
    }
    State {
        name: "state",
        what: "the recurrent state, from chunk to chunk",
        bf16_in: &[],
        exists: has_delta_rule,
        probes: &["linear_attn.o"],
    }
    QkProduct {
        name: "qk_product",
        what: "the product of q and k",
        bf16_in: &["maxtext-default", "hf-bf16"],
        exists: has_attention,
        probes: &["self_attn.logits", "self_attn.o"],
    }
    Logits {
        name: "logits",
        what: "attention logits and their softmax",
        bf16_in: &["maxtext-default"],
        exists: has_attention,
        probes: &["self_attn.logits", "self_attn.o"],
    }
    Probabilities {
        name: "probabilities",
        what: "attention probabilities, as they are multiplied by v",
        bf16_in: &["megatron", "nemo", "maxtext-default", "hf-bf16"],
        exists: has_attention,
        probes: &["self_attn.o"],
    }
    AttentionGradient {
        name: "attention_gradient",
        what: "probabilities and gradients of logits, as attention's backward multiplies them",
        bf16_in: &["bf16", "megatron", "nemo", "maxtext-default", "hf-bf16"],
        exists: has_attention,
        probes: &["self_attn.q", "self_attn.k", "self_attn.v"],
    }
    IndexerLogits {
        name: "indexer_logits",
        what: "the indexer's q.k, before the relu",
        bf16_in: &[],
        exists: Config::has_indexer,
        probes: &["self_attn.indexer.scores"],
    }
    Router {
        name: "router",
        what: "the router's logits",
        bf16_in: &["megatron", "nemo", "hf-bf16"],
        exists: has_experts,
        probes: &["mlp.router"],
    }
    Norms {
        name: "norms",
        what: "the output of every norm but the delta rule's",
        bf16_in: &["hf-bf16"],
        exists: always,
        probes: &[
            "input_layernorm",
            "per_layer_inputs",
            "norm",
            "self_attn.q",
            "self_attn.k",
            "self_attn.v",
            "self_attn.indexer.k",
        ],
    }
    Loss {
        name: "loss",
        what: "the output logits, before the softmax",
        bf16_in: &["hf-bf16"],
        exists: always,
        probes: &["logits"],
    }
    LossGradient {
        name: "loss_gradient",
        what: "the gradient of the output logits, as it is multiplied",
        bf16_in: &["bf16", "megatron", "nemo", "maxtext-default", "hf-bf16"],
        exists: always,
        probes: &["norm"],
    }
    Residual {
        name: "residual",
        what: "the residual stream and its gradient, after every sum",
        bf16_in: &["megatron", "nemo", "maxtext-default", "hf-bf16"],
        exists: always,
        probes: &["embed", "middle", "out"],
    }
}

fn always(_: &Config) -> bool {
    true
}

fn has_delta_rule(config: &Config) -> bool {
    config.layers.iter().any(|layer| matches!(layer.mixer, Mixer::Linear(_)))
}

fn has_attention(config: &Config) -> bool {
    config.layers.iter().any(|layer| !matches!(layer.mixer, Mixer::Linear(_)))
}

fn has_experts(config: &Config) -> bool {
    config.layers.iter().any(|layer| layer.experts.is_some())
}

impl Site {
    fn entry(self) -> &'static Entry {
        &TABLE[self as usize]
    }

    /// Returns the name: the key in configurations, in `--policies` and in lab.json.
    pub fn name(self) -> &'static str {
        self.entry().name
    }

    /// Describes the values that are rounded there, in a few words.
    pub fn what(self) -> &'static str {
        self.entry().what
    }

    /// Returns the rounding in a preset; [`crate::Precision::preset`] applies the exceptions for some models.
    pub(crate) fn rounding_in(self, preset: &str) -> Rounding {
        if self.entry().bf16_in.contains(&preset) { Rounding::Bf16 } else { Rounding::F32 }
    }

    /// Returns true if a model of this configuration has the site.
    pub fn is_in(self, config: &Config) -> bool {
        (self.entry().exists)(config)
    }

    /// Returns the site of this name, if there is one.
    pub fn named(name: &str) -> Option<Site> {
        Site::ALL.into_iter().find(|site| site.name() == name)
    }

    /// Returns the sites that may cause an error at a probe site: those that round its values and those
    /// inside the kernel that computes them. The gradient of a probe site has the same sites.
    pub fn behind(probe_site: &str) -> Vec<Site> {
        let seen = probe_site.strip_prefix("d.").unwrap_or(probe_site);
        let in_layer = seen.strip_prefix("layers.").and_then(|rest| Some(rest.split_once('.')?.1));
        let seen = in_layer.unwrap_or(seen);
        Site::ALL.into_iter().filter(|site| site.entry().probes.contains(&seen)).collect()
    }
}

impl FromStr for Site {
    type Err = Error;

    fn from_str(name: &str) -> Result<Site> {
        Site::named(name).ok_or_else(|| {
            let known = Site::ALL.map(Site::name).join(", ");
            Error::Input(format!("unknown site {name:?}; known: {known}"))
        })
    }
}
