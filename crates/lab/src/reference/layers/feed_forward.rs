//! Feed-forward part of a layer, with its norms:
//! ```text
//! Qwen, DeepSeek   f(norm(x))                                              f the MLP or the experts
//! Gemma            after(f(norm(x)))
//! Gemma 4 MoE      after(after_1(mlp(norm(x))) + after_2(experts(norm_2(x))))         router on x
//! ```

use std::sync::Arc;

use ballast_model::config::Layer;

use super::experts::{experts, mlp};
use crate::Result;
use crate::reference::layer_run::LayerRun;
use crate::reference::ops;
use crate::reference::tape::Value;

/// Returns the update that is added to x [tokens, H].
pub fn feed_forward(pass: &mut LayerRun<'_, '_>, x: &Value, shape: &Layer) -> Result<Value> {
    let (hidden, norms_after) = (pass.setting.config.hidden, pass.setting.config.norms_after);
    let before = if norms_after { "pre_feedforward_layernorm" } else { "post_attention_layernorm" };
    let normed = pass.norm(x, before, hidden)?;
    let y = match (shape.dense, &shape.experts) {
        (Some(dense), None) => mlp(pass, &normed, "mlp", dense)?,
        (None, Some(shape)) => experts(pass, &normed, x, shape)?,
        (Some(dense), Some(shape)) => {
            let dense = mlp(pass, &normed, "mlp", dense)?;
            let dense = pass.norm(&dense, "post_feedforward_layernorm_1", hidden)?;
            let input = pass.norm(x, "pre_feedforward_layernorm_2", hidden)?;
            let mixture = experts(pass, &input, x, shape)?;
            let mixture = pass.norm(&mixture, "post_feedforward_layernorm_2", hidden)?;
            ops::add(&mut pass.tape, &dense, &mixture)
        }
        (None, None) => pass.tape.leaf(Arc::new(vec![0.0; x.len()])),
    };
    pass.see("mlp.out", &y);
    if norms_after { pass.norm(&y, "post_feedforward_layernorm", hidden) } else { Ok(y) }
}
