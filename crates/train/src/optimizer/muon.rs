//! Muon: orthogonalized momentum for the matrices inside the layers. The kernel is [`ballast_kernels::muon`].
//!
//! Muon updates the projections of attention, linear attention and feed-forward parts. AdamW updates
//! everything else: embeddings, the output head, norms, biases, convolutions, gates (routers, `in_proj_a`,
//! `in_proj_b`, `shared_expert_gate`), protected tensors and LoRA adapters, whose A and B are factors of one
//! matrix and not matrices of the model.
//!
//! A stored tensor that holds several projections is orthogonalized projection by projection, never as a
//! whole and never head by head:
//! ```text
//! in_proj_qkv                 q, k, v
//! q_proj with an output gate  q, gate                   rows of each head: query, then gate
//! kv_a_proj_with_mqa          compressed kv, rotating key
//! kv_b_proj                   k, v                      rows of each head: key, then value
//! experts.gate_up_proj        gate, up of each expert
//! experts.down_proj           each expert
//! per_layer_model_projection  each layer
//! ```

use std::ops::Range;

use ballast_kernels::Rounding;
use ballast_kernels::muon::{Options, Parts, muon_fault, muon_step, muon_step_workspace};
use ballast_model::Config;
use ballast_model::config::Mixer;
use ballast_model::params::Spec;
use ballast_model::precision::Storage;
use half::bf16;

use super::rule::{BadElement, StateKind, Step, UpdateRule};
use crate::config::MuonConfig;
use crate::error::Result;

/// Parts of the names of matrices that AdamW updates.
const ADAMW: [&str; 9] = [
    "embed_tokens",
    "lm_head",
    "norm",
    "conv1d",
    ".in_proj_a.",
    ".in_proj_b.",
    ".mlp.gate.",
    ".shared_expert_gate.",
    ".router.",
];

/// The momentum.
static STATE: [StateKind; 1] = [StateKind {
    prefix: "momentum",
    label: "momentum",
    shape: <[usize]>::to_vec,
    signed: true,
    is_valid: f32::is_finite,
}];

/// Muon for one parameter.
#[derive(Clone, Debug)]
pub(super) struct Muon {
    parts: Parts,
    lr_ratio: f64,
    options: Options,
}

impl Muon {
    /// The configured Muon for a weight, or nothing if AdamW updates it.
    pub(super) fn new(config: &MuonConfig, model: &Config, spec: &Spec) -> Option<Muon> {
        let parts = matrices(model, spec)?;
        let MuonConfig {
            lr_ratio,
            adjust_lr,
            momentum,
            nesterov,
            weight_decay,
            eps,
            ns_steps,
            ns_coefficients,
        } = *config;
        let options =
            Options { lr: 0.0, momentum, nesterov, weight_decay, eps, ns_steps, ns_coefficients, adjust_lr };
        Some(Muon { parts, lr_ratio, options })
    }

    fn options(&self, lr: f64) -> Options {
        Options { lr: lr * self.lr_ratio, ..self.options }
    }
}

/// The matrices of a weight that Muon updates, or nothing if AdamW updates it.
fn matrices(model: &Config, spec: &Spec) -> Option<Parts> {
    let name = spec.name.as_str();
    if ADAMW.iter().any(|part| name.contains(part)) {
        return None;
    }
    let (rows, columns, count) = match spec.shape[..] {
        [rows, columns] => (rows, columns, 1),
        [experts, rows, columns] if name.contains(".experts.") => (rows, columns, experts),
        _ => return None,
    };
    let widths = widths(model, name, rows);
    let period: usize = widths.iter().sum();
    if period == 0 || rows % period != 0 {
        return Some(Parts::whole(count * rows, columns));
    }
    let part = |expert: usize, offset: usize, width: usize| -> Vec<Range<usize>> {
        let begins = (0..rows / period).map(|repeat| expert * rows + repeat * period + offset);
        begins.map(|begin| begin..begin + width).collect()
    };
    let mut parts = Vec::new();
    for expert in 0..count {
        let mut offset = 0;
        for width in &widths {
            parts.push(part(expert, offset, *width));
            offset += width;
        }
    }
    // Every row is in one part by construction.
    Parts::new(count * rows, columns, parts).ok()
}

/// Rows of each projection in a stored matrix; if they sum to fewer than all rows, they repeat from head to
/// head.
fn widths(model: &Config, name: &str, rows: usize) -> Vec<usize> {
    let module = name.strip_suffix(".weight").unwrap_or(name);
    let index = name.strip_prefix("layers.").and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
    let mixer = index.and_then(|index| model.layers.get(index)).map(|layer| &layer.mixer);
    let last = module.rsplit('.').next().unwrap_or_default();
    match (last, mixer) {
        ("in_proj_qkv", Some(Mixer::Linear(shape))) => {
            let keys = shape.key_heads * shape.key_dim;
            vec![keys, keys, shape.value_heads * shape.value_dim]
        }
        ("q_proj", Some(Mixer::Softmax(shape))) if shape.gated => vec![shape.head_dim; 2],
        ("kv_a_proj_with_mqa", Some(Mixer::Latent(shape))) => vec![shape.kv_rank, shape.rope_dim],
        ("kv_b_proj", Some(Mixer::Latent(shape))) => vec![shape.nope_dim, shape.value_dim],
        ("gate_up_proj", _) => vec![rows / 2; 2],
        ("per_layer_model_projection", _) => {
            let layers = model.layers.len().max(1);
            vec![rows / layers; layers]
        }
        _ => vec![rows],
    }
}

impl UpdateRule for Muon {
    fn name(&self) -> &'static str {
        "Muon"
    }

    fn state_name(&self) -> &'static str {
        "momentum"
    }

    fn state(&self) -> &'static [StateKind] {
        &STATE
    }

    fn workspace(&self) -> usize {
        muon_step_workspace(&self.parts)
    }

    fn bad_element(
        &self,
        w: &[f32],
        state: &[&[f32]],
        step: &Step<'_>,
        storage: Storage,
    ) -> Result<Option<BadElement>> {
        let [momentum] = state else { unreachable!("Muon has one state tensor") };
        let (m, options, mut work) = (momentum, self.options(step.lr), Vec::new());
        let Step { gradient: g, scale, .. } = *step;
        let fault = match storage {
            Storage::F32 => muon_fault::<f32>(w, m, g, scale, &self.parts, &options, &mut work)?,
            Storage::Bf16 => muon_fault::<bf16>(w, m, g, scale, &self.parts, &options, &mut work)?,
        };
        Ok(fault.map(|fault| {
            let mut value = [fault.value];
            if storage == Storage::Bf16 {
                Rounding::Bf16.round_all(&mut value);
            }
            let state = vec![(STATE[0].label, fault.momentum)];
            BadElement { element: fault.element, value: value[0], state }
        }))
    }

    fn update(
        &self,
        w: &mut [f32],
        copy: Option<&mut [bf16]>,
        state: &mut [&mut [f32]],
        step: &Step<'_>,
        workspace: &mut [f32],
    ) -> Result {
        let [momentum] = state else { unreachable!("Muon has one state tensor") };
        let options = self.options(step.lr);
        Ok(muon_step(w, copy, momentum, step.gradient, step.scale, &self.parts, &options, workspace)?)
    }
}

#[cfg(test)]
mod tests {
    use ballast_model::{Model, Precision};

    use super::*;
    use crate::config::TrainConfig;

    /// Shapes of the matrices of every weight of a preset; `None` for AdamW.
    fn shapes(preset: &str) -> Vec<(String, Option<Vec<[usize; 2]>>)> {
        let setting = format!("model.preset={preset}");
        let config = TrainConfig::from_table(Default::default(), &[setting], None).unwrap();
        let model: Model = crate::setup::model(&config).unwrap();
        assert_eq!(model.precision(), &Precision::f32());
        let parts = |spec: &Spec| matrices(&model.config, spec).map(|parts| parts.shapes().collect());
        model.specs.weights.iter().map(|spec| (spec.name.clone(), parts(spec))).collect()
    }

    #[test]
    fn matrices_inside_the_layers_are_muons_and_fused_ones_are_split() {
        for preset in ["hybrid", "hybrid-moe", "gemma", "deepseek"] {
            let all = shapes(preset);
            let (mut muon, mut adamw) = (0, 0);
            for (name, shapes) in &all {
                let by_adamw = ADAMW.iter().any(|part| name.contains(part)) || name.ends_with(".bias");
                let is_vector = name.contains("per_expert_scale") || name.contains("layer_scalar");
                assert_eq!(shapes.is_none(), by_adamw || is_vector, "{preset}: {name}");
                muon += usize::from(shapes.is_some());
                adamw += usize::from(shapes.is_none());
                let fused = ["in_proj_qkv", "kv_a_proj", "kv_b_proj", ".experts."];
                let expected = fused.iter().any(|part| name.contains(part));
                let gated = name.contains("self_attn.q_proj") && preset.starts_with("hybrid");
                let parts = shapes.as_ref().map_or(0, Vec::len);
                assert!(parts > 1 || !(expected || gated), "{preset}: {name} has {parts} parts");
            }
            assert!(muon > 8 && adamw > 4, "{preset}: {muon} {adamw}");
        }
    }

    #[test]
    fn query_and_gate_of_each_head_belong_to_two_matrices() {
        let all = shapes("hybrid");
        let (name, shapes) = all.iter().find(|(name, _)| name.contains("q_proj")).unwrap();
        let [q, gate] = shapes.as_ref().unwrap()[..] else { panic!("{name}") };
        assert_eq!(q, gate);
        let (name, shapes) = all.iter().find(|(name, _)| name.contains("in_proj_qkv")).unwrap();
        let [q, k, _] = shapes.as_ref().unwrap()[..] else { panic!("{name}") };
        assert_eq!(q, k);
    }
}
