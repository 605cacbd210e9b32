//! Gated MLP and mixture of experts:
//! ```text
//! mlp(x) = D (act(G x) * U x)
//! logits = W_r x                       Gemma 4: H^-1/2 W_r (s r / rms(r)), r the residual
//! y = sum over the chosen of weight * expert(x)  +  sigmoid(w_g x) shared(x), or shared(x)
//! ```

use std::sync::Arc;

use ballast_kernels::glu::Activation;
use ballast_model::config::{Experts, Router};

use crate::Result;
use crate::reference::layer_run::LayerRun;
use crate::reference::ops::{self, Gamma};
use crate::reference::tape::Value;

/// Returns y [tokens, H] of the gated MLP of this name on x [tokens, H].
pub fn mlp(pass: &mut LayerRun<'_, '_>, x: &Value, name: &str, intermediate: usize) -> Result<Value> {
    let (hidden, activation) = (pass.setting.config.hidden, pass.setting.config.activation);
    let gate = pass.linear(x, &format!("{name}.gate_proj"), hidden, intermediate)?;
    let up = pass.linear(x, &format!("{name}.up_proj"), hidden, intermediate)?;
    let inner = ops::gated(&mut pass.tape, &gate, &up, activation);
    pass.linear(&inner, &format!("{name}.down_proj"), intermediate, hidden)
}

/// Returns y [tokens, H] from x [tokens, H] and the residual, which Gemma's router reads.
pub fn experts(pass: &mut LayerRun<'_, '_>, x: &Value, residual: &Value, shape: &Experts) -> Result<Value> {
    let Experts { count, top_k, router, .. } = *shape;
    let logits = logits(pass, x, residual, shape)?;
    pass.see("mlp.router", &logits);
    let bias = match router {
        Router::SigmoidGroups { .. } => Some(pass.param("mlp.gate.e_score_correction_bias", count)?),
        _ => None,
    };
    let bias = bias.map(|bias| bias.values());
    let chosen = Arc::new(ops::choose_experts(&logits, router, bias, count, top_k));
    let mut weights = ops::expert_weights(&mut pass.tape, &logits, router, &chosen, count, top_k);
    if router == Router::Normed {
        let factors = pass.param("router.per_expert_scale", count)?;
        weights = ops::scale_chosen(&mut pass.tape, &weights, &factors, &chosen);
    }
    pass.see("mlp.router_weights", &weights);
    let y = routed(pass, x, &weights, &chosen, shape)?;
    match shape.shared {
        None => Ok(y),
        Some(shared) => {
            let part = if shared.gated { "mlp.shared_expert" } else { "mlp.shared_experts" };
            let mut out = mlp(pass, x, part, shared.intermediate)?;
            if shared.gated {
                let hidden = pass.setting.config.hidden;
                let gate = pass.linear(x, "mlp.shared_expert_gate", hidden, 1)?;
                let factors = ops::activate(&mut pass.tape, &gate, Activation::Sigmoid);
                out = ops::mul_rows(&mut pass.tape, &out, &factors, hidden);
            }
            Ok(ops::add(&mut pass.tape, &y, &out))
        }
    }
}

fn logits(pass: &mut LayerRun<'_, '_>, x: &Value, residual: &Value, shape: &Experts) -> Result<Value> {
    let (hidden, eps) = (pass.setting.config.hidden, pass.setting.config.eps as f64);
    if shape.router != Router::Normed {
        return pass.linear(x, "mlp.gate", hidden, shape.count);
    }
    let gamma = Gamma::Plain(pass.param("router.scale", hidden)?);
    let normed = ops::rms_norm(&mut pass.tape, residual, gamma, eps, hidden);
    let logits = pass.linear(&normed, "router.proj", hidden, shape.count)?;
    Ok(ops::scale(&mut pass.tape, &logits, (hidden as f64).powf(-0.5)))
}

/// Returns the weighted sum of the chosen experts' outputs, computed expert by expert.
fn routed(
    pass: &mut LayerRun<'_, '_>,
    x: &Value,
    weights: &Value,
    chosen: &[usize],
    shape: &Experts,
) -> Result<Value> {
    let (hidden, activation) = (pass.setting.config.hidden, pass.setting.config.activation);
    let Experts { count, top_k, intermediate, .. } = *shape;
    let name = if shape.router == Router::Normed { "experts" } else { "mlp.experts" };
    let len = intermediate * hidden;
    let gate_up = pass.param(&format!("{name}.gate_up_proj"), count * 2 * len)?;
    let down = pass.param(&format!("{name}.down_proj"), count * len)?;
    let mut slots = vec![Vec::new(); count];
    for (slot, expert) in chosen.iter().enumerate() {
        slots[*expert].push(slot);
    }
    let mut parts = Vec::new();
    for (e, slots) in slots.into_iter().enumerate().filter(|(_, slots)| !slots.is_empty()) {
        let tokens = slots.iter().map(|slot| slot / top_k).collect();
        let x = ops::rows(&mut pass.tape, x, tokens, hidden);
        let (gate, up) = (gate_up.part(2 * e * len..(2 * e + 1) * len), (2 * e + 1) * len..2 * (e + 1) * len);
        let gate = ops::linear(&mut pass.tape, &x, &gate, hidden);
        let up = ops::linear(&mut pass.tape, &x, &gate_up.part(up), hidden);
        let inner = ops::gated(&mut pass.tape, &gate, &up, activation);
        let down = down.part(e * len..(e + 1) * len);
        parts.push((ops::linear(&mut pass.tape, &inner, &down, intermediate), slots));
    }
    Ok(ops::combine(&mut pass.tape, parts, weights, top_k))
}
