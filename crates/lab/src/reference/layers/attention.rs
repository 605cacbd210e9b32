//! Softmax attention:
//! ```text
//! q, k = rotate(norm(W_q x)), rotate(norm(W_k x))      v = W_v x, norm(W_v x) or norm(W_k x)
//! y = W_o (attention(q, k, v) * sigmoid(gate))         gate beside each head's query in W_q x, or none
//! ```
//! A layer without its own keys and values shares those of an earlier layer.

use ballast_kernels::glu::Activation;
use ballast_kernels::rotary::Heads;
use ballast_model::config::{Attention, Values};

use super::layer::KeyValues;
use crate::Result;
use crate::reference::layer_run::LayerRun;
use crate::reference::ops::{self, Gamma};
use crate::reference::tape::Value;

/// Returns y [tokens, H] from x [tokens, H] and, if they are shared, another layer's k and v; and the k and v
/// used.
pub fn attention(
    pass: &mut LayerRun<'_, '_>,
    x: &Value,
    shape: &Attention,
    shared: Option<KeyValues>,
) -> Result<(Value, KeyValues)> {
    let hidden = pass.setting.config.hidden;
    let Attention { heads, kv_heads, head_dim: hd, bias, .. } = *shape;
    let per_head = if shape.gated { 2 * hd } else { hd };
    let raw = pass.affine(x, "self_attn.q_proj", hidden, heads * per_head, bias)?;
    let q = ops::columns(&mut pass.tape, &raw, per_head, 0..hd);
    let q = normalize_and_rotate(pass, &q, "self_attn.q_norm", shape, heads)?;
    let kv = match shared {
        Some(kv) => {
            pass.see("self_attn.q", &q);
            kv
        }
        None => {
            let kv = key_values(pass, x, shape)?;
            pass.see("self_attn.q", &q);
            pass.see("self_attn.k", &kv.k);
            pass.see("self_attn.v", &kv.v);
            kv
        }
    };
    let mask = ops::Attention {
        heads,
        kv_heads,
        head_dim: hd,
        value_dim: hd,
        scale: shape.scale as f64,
        window: shape.window,
        soft_cap: shape.soft_cap.map(f64::from),
        selected: None,
        cu_seqlens: pass.setting.batch.cu_seqlens.clone(),
    };
    let mut o = ops::attention(&mut pass.tape, &q, &kv.k, &kv.v, mask);
    pass.see("self_attn.o", &o);
    if shape.gated {
        let gate = ops::columns(&mut pass.tape, &raw, per_head, hd..2 * hd);
        o = ops::gated(&mut pass.tape, &gate, &o, Activation::Sigmoid);
    }
    Ok((pass.affine(&o, "self_attn.o_proj", heads * hd, hidden, bias)?, kv))
}

fn key_values(pass: &mut LayerRun<'_, '_>, x: &Value, shape: &Attention) -> Result<KeyValues> {
    let (hidden, eps) = (pass.setting.config.hidden, pass.setting.config.eps as f64);
    let Attention { kv_heads, head_dim: hd, bias, .. } = *shape;
    let raw = pass.affine(x, "self_attn.k_proj", hidden, kv_heads * hd, bias)?;
    let k = normalize_and_rotate(pass, &raw, "self_attn.k_norm", shape, kv_heads)?;
    let v = match shape.values {
        Values::KeysNormed => raw,
        _ => pass.affine(x, "self_attn.v_proj", hidden, kv_heads * hd, bias)?,
    };
    let v = match shape.values {
        Values::Projected => v,
        _ => ops::rms_norm(&mut pass.tape, &v, Gamma::Weightless, eps, hd),
    };
    Ok(KeyValues { k, v })
}

/// Applies the norm, if q and k have one, and the rotary embedding.
fn normalize_and_rotate(
    pass: &mut LayerRun<'_, '_>,
    x: &Value,
    norm: &str,
    shape: &Attention,
    heads: usize,
) -> Result<Value> {
    let rotation = pass.setting.rotation(&shape.rope)?;
    let x = if shape.qk_norm { pass.norm(x, norm, shape.head_dim)? } else { x.clone() };
    let heads = Heads { heads, width: shape.head_dim, offset: 0 };
    Ok(ops::rotary(&mut pass.tape, &x, &rotation, heads))
}
