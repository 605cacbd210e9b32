//! Low-rank adapters (LoRA): target modules, initialization, and merging into the weights.
//!
//! ```text
//! y = x W^T + (alpha / rank) (x A^T) B^T        A [rank, in] uniform in +-in^-1/2, B [out, rank] zero
//! ```
//! Initialization follows PEFT and module names follow transformers, so PEFT can read the written adapters. A
//! weight that transformers stores in another form, or not as a linear layer, is refused with the reason. So
//! are the dense parts of Qwen3-Next and DeepSeek: because transformers fuses their experts, PEFT (0.21)
//! takes every gate_proj, up_proj and down_proj of such a model for an expert's, and silently skips the dense
//! ones.

mod peft;
mod settings;

use ballast_kernels::Scratch;
use ballast_kernels::linear::{Dims, linear_backward_input_add, linear_scratch};
use rayon::prelude::*;

use crate::error::{Error, Result};
use crate::init::draw;
use crate::model::Model;
use crate::params::{Adapter, Spec, Weight};
pub use settings::AdapterSettings;

/// Maximum number of modules listed in an error.
const SHOWN: usize = 20;

impl Model {
    /// Lists the modules that can have an adapter, by their names in transformers.
    pub fn adapter_targets(&self) -> Vec<String> {
        let can = |spec: &&Spec| self.refusal(spec).is_none();
        self.specs.weights.iter().filter(can).map(|spec| self.module(spec)).collect()
    }

    /// Adds an adapter with B = 0 to every module that `targets` selects, and returns the number of adapters.
    /// Fails without changing the model if no module is selected or a selected one cannot have an adapter.
    pub fn add_adapters(
        &mut self,
        targets: &dyn Fn(&str) -> bool,
        rank: usize,
        alpha: f32,
        seed: u64,
    ) -> Result<usize> {
        if rank == 0 || !alpha.is_finite() {
            let problem = format!(
                "adapter rank must be at least 1 and alpha finite, got rank {rank} and alpha {alpha}"
            );
            return Err(Error::Input(problem));
        }
        if !self.params.adapters.is_empty() {
            return Err(Error::Input("the model already has adapters; merge them first".into()));
        }
        self.check_targets(targets)?;
        let adapter = |spec: &Spec| {
            let (outputs, inputs) = (spec.shape[0], spec.shape[1]);
            let mut a = vec![0.0; rank * inputs];
            let bound = (inputs as f64).powf(-0.5);
            let name = format!("{}.lora_A", spec.name);
            draw(&mut a, &name, seed, |rng| [(); 2].map(|()| bound * (2.0 * rng.unit() - 1.0)));
            Adapter { a, b: vec![0.0; outputs * rank], rank, scale: alpha / rank as f32 }
        };
        let wanted = |spec: &Spec| self.refusal(spec).is_none() && targets(&self.module(spec));
        self.params.adapters =
            self.specs.weights.iter().map(|spec| wanted(spec).then(|| adapter(spec))).collect();
        Ok(self.params.adapters.iter().flatten().count())
    }

    /// Gives every module that `targets` selects an adapter without values, for plans. Fails like
    /// [`Model::add_adapters`].
    pub fn outline_adapters(&mut self, targets: &dyn Fn(&str) -> bool, rank: usize) -> Result {
        self.check_targets(targets)?;
        let adapter = || Adapter { a: Vec::new(), b: Vec::new(), rank, scale: 1.0 };
        let wanted = |spec: &Spec| self.refusal(spec).is_none() && targets(&self.module(spec));
        self.params.adapters = self.specs.weights.iter().map(|spec| wanted(spec).then(adapter)).collect();
        Ok(())
    }

    /// Bytes of the values of all adapters, also of those without values.
    pub fn adapter_bytes(&self) -> usize {
        let one = |(low, spec): (&Option<Adapter>, &Spec)| {
            low.as_ref().map_or(0, |low| 4 * low.rank * (spec.shape[0] + spec.shape[1]))
        };
        self.params.adapters.iter().zip(&self.specs.weights).map(one).sum()
    }

    /// Removes the adapters without merging them.
    pub fn drop_adapters(&mut self) {
        self.params.adapters.clear();
    }

    /// Merges the adapters into their weights: W + scale B A, computed in f32 and rounded to the weight's
    /// type. Returns the number of adapters merged.
    pub fn merge_adapters(&mut self) -> Result<usize> {
        let adapters = std::mem::take(&mut self.params.adapters);
        let scratch = Scratch::new(0);
        for (weight, low) in self.params.weights.iter_mut().zip(&adapters) {
            let Some(low) = low else { continue };
            let storage = weight.storage();
            let mut sum = weight.to_f32();
            let b: Vec<f32> = low.b.par_iter().map(|b| low.scale * b).collect();
            let dims = Dims { inputs: low.a.len() / low.rank, outputs: low.rank };
            linear_backward_input_add(&mut sum, &b, &low.a, dims, &scratch)?;
            *weight = Weight::F32(sum).cast(storage);
        }
        Ok(adapters.iter().flatten().count())
    }

    /// Number of f32 values that one scratch slot needs for the adapters.
    pub(crate) fn adapter_scratch(&self, tokens: usize) -> usize {
        let one = |(low, spec): (&Option<Adapter>, &Spec)| {
            let rank = low.as_ref()?.rank;
            let down = linear_scratch(Dims { inputs: spec.shape[1], outputs: rank }, tokens);
            Some(down.max(linear_scratch(Dims { inputs: rank, outputs: spec.shape[0] }, tokens)))
        };
        self.params.adapters.iter().zip(&self.specs.weights).filter_map(one).max().unwrap_or(0)
    }

    /// Returns the name of a parameter's module in transformers.
    fn module(&self, spec: &Spec) -> String {
        let name = self.parameter_name(spec);
        name.strip_suffix(".weight").map_or(name.clone(), str::to_string)
    }

    /// Returns the reason why a parameter cannot have an adapter, or `None` if it can.
    fn refusal(&self, spec: &Spec) -> Option<&'static str> {
        let name = spec.name.as_str();
        Some(match spec.shape.len() {
            _ if name.starts_with("embed_tokens") => "an embedding",
            _ if name.starts_with("lm_head.") => "the output head",
            _ if name.contains(".experts.") => "the matrices of all experts in one tensor",
            _ if name.ends_with(".mlp.gate.weight") => {
                "a router, which is not a linear layer in transformers"
            }
            _ if self.config.model_type == "qwen3_next" && name.contains(".linear_attn.in_proj_") => {
                "part of in_proj_qkvz or in_proj_ba in transformers, whose rows lie in another order"
            }
            _ if self.peft_means_experts(name) => "a name that PEFT reserves for experts",
            2 => return None,
            _ => "not a matrix",
        })
    }

    fn peft_means_experts(&self, name: &str) -> bool {
        let parts = ["gate_proj.weight", "up_proj.weight", "down_proj.weight"];
        ["qwen3_next", "deepseek_v32"].contains(&self.config.model_type.as_str())
            && parts.iter().any(|part| name.ends_with(part))
    }

    fn check_targets(&self, targets: &dyn Fn(&str) -> bool) -> Result {
        let bias = |spec: &&Spec| spec.name.ends_with(".bias");
        let matched = |spec: &&Spec| targets(&self.module(spec));
        let weights = self.specs.weights.iter().filter(|spec| !bias(spec) && matched(spec));
        let refused = weights.clone().filter_map(|spec| Some((spec, self.refusal(spec)?)));
        let protected = self.specs.protected.iter().filter(matched).map(|spec| (spec, "protected"));
        let refused: Vec<String> = refused
            .chain(protected)
            .map(|(spec, reason)| format!("{}: {reason}", self.module(spec)))
            .collect();
        if !refused.is_empty() {
            let shown = refused.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join("; ");
            let more = match refused.len().saturating_sub(SHOWN) {
                0 => String::new(),
                more => format!("; and {more} more"),
            };
            return Err(Error::Input(format!(
                "these modules cannot have an adapter; exclude them: {shown}{more}"
            )));
        }
        if weights.count() == 0 {
            let known: std::collections::BTreeSet<String> = self
                .adapter_targets()
                .iter()
                .map(|module| module.rsplit('.').next().unwrap_or_default().to_string())
                .collect();
            let known: Vec<String> = known.into_iter().collect();
            let problem = format!("no module matches the adapter targets; known: {}", known.join(", "));
            return Err(Error::Input(problem));
        }
        Ok(())
    }
}
