//! One layer:
//! ```text
//! x = x + mixer(norm(x))          Gemma: x + after(mixer(norm(x)))
//! x = x + feed_forward(x)
//! Gemma 4:  x = x + after(W_p (gelu(W_g x) * per-layer input)),  then  x = s x
//! ```

use ballast_model::config::Mixer;

use super::attention::attention;
use super::feed_forward::feed_forward;
use super::latent_attention::latent_attention;
use super::linear_attention::linear_attention;
use super::per_layer_input::add_per_layer_input;
use crate::Result;
use crate::reference::layer_run::LayerRun;
use crate::reference::ops;
use crate::reference::tape::Value;

/// Keys and values, [tokens, kv heads, hd] each, after norm and rotary embedding.
#[derive(Clone, Debug)]
pub struct KeyValues {
    pub k: Value,
    pub v: Value,
}

/// Inputs and outputs of a layer besides the residual stream.
#[derive(Clone, Debug, Default)]
pub struct Links {
    /// Per-layer input [tokens, P], if the model has them
    pub per_layer_input: Option<Value>,
    /// Before: keys and values of the layer to share; after: those that were used
    pub key_values: Option<KeyValues>,
}

/// Returns the residual stream [tokens, H] after layer `index`.
pub fn layer(pass: &mut LayerRun<'_, '_>, index: usize, x: &Value, links: &mut Links) -> Result<Value> {
    let setting = pass.setting.clone();
    let (config, shape) = (&setting.config, &setting.config.layers[index]);
    let normed = pass.norm(x, "input_layernorm", config.hidden)?;
    pass.see("input_layernorm", &normed);
    let mut mixed = match &shape.mixer {
        Mixer::Linear(shape) => linear_attention(pass, &normed, *shape)?,
        Mixer::Latent(shape) => latent_attention(pass, &normed, shape)?,
        Mixer::Softmax(shape) => {
            let (y, used) = attention(pass, &normed, shape, links.key_values.take())?;
            links.key_values = Some(used);
            y
        }
    };
    pass.see("mixer.out", &mixed);
    if config.norms_after {
        mixed = pass.norm(&mixed, "post_attention_layernorm", config.hidden)?;
    }
    let middle = ops::add(&mut pass.tape, x, &mixed);
    pass.see("middle", &middle);
    let out = feed_forward(pass, &middle, shape)?;
    let mut out = ops::add(&mut pass.tape, &middle, &out);
    if let (Some(inputs), Some(input)) = (config.per_layer_inputs, &links.per_layer_input) {
        out = add_per_layer_input(pass, &out, input, inputs.width)?;
    }
    if config.layer_scalar {
        // A constant, not a trained parameter.
        let scalar = pass.param("layer_scalar", 1)?.at(0);
        out = ops::scale(&mut pass.tape, &out, scalar);
    }
    pass.see("out", &out);
    Ok(out)
}
