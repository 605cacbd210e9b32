//! Per-layer inputs (Gemma 4), with P their width, L the number of layers, x the embeddings:
//! ```text
//! token   = P^1/2 E_p[id]                            [tokens, L, P]
//! context = norm(H^-1/2 W_c x)                       [tokens, L, P], normed over P
//! input_l = 2^-1/2 (token_l + context_l)
//! in the layer   x = x + after(W_p (gelu(W_g x) * input_l))
//! ```

use std::f64::consts::FRAC_1_SQRT_2;

use ballast_kernels::glu::Activation;
use ballast_model::config::PerLayerInputs;

use crate::Result;
use crate::reference::layer_run::LayerRun;
use crate::reference::ops;
use crate::reference::tape::Value;

/// Returns the inputs of all layers [tokens, L, P] from x [tokens, H].
pub fn per_layer_inputs(pass: &mut LayerRun<'_, '_>, x: &Value, shape: PerLayerInputs) -> Result<Value> {
    let setting = pass.setting.clone();
    let (hidden, width) = (setting.config.hidden, shape.width);
    let all = setting.config.layers.len() * width;
    let context = pass.linear(x, "per_layer_model_projection", hidden, all)?;
    let context = ops::scale(&mut pass.tape, &context, (hidden as f64).powf(-0.5));
    let context = pass.norm(&context, "per_layer_projection_norm", width)?;
    let table = pass.param("embed_tokens_per_layer.weight", shape.vocabulary * all)?;
    let (ids, padding, factor) = (&setting.batch.ids, setting.config.padding, (width as f64).sqrt());
    let token = ops::embedding(&mut pass.tape, &table, ids, padding, factor, all);
    let sum = ops::add(&mut pass.tape, &context, &token);
    let inputs = ops::scale(&mut pass.tape, &sum, FRAC_1_SQRT_2);
    pass.see("per_layer_inputs", &inputs);
    Ok(inputs)
}

/// Returns x [tokens, H] plus the contribution of a layer's input [tokens, P].
pub fn add_per_layer_input(
    pass: &mut LayerRun<'_, '_>,
    x: &Value,
    input: &Value,
    width: usize,
) -> Result<Value> {
    let hidden = pass.setting.config.hidden;
    let gate = pass.linear(x, "per_layer_input_gate", hidden, width)?;
    let inner = ops::gated(&mut pass.tape, &gate, input, Activation::GeluTanh);
    let y = pass.linear(&inner, "per_layer_projection", width, hidden)?;
    let y = pass.norm(&y, "post_per_layer_input_norm", hidden)?;
    Ok(ops::add(&mut pass.tape, x, &y))
}
