//! Latent attention:
//! ```text
//! q_resid = norm(W_qa x)                       q = W_qb q_resid, each head nope | rope
//! c | k_rope = W_kva x                         k_nope | v of each head = W_kvb norm(c)
//! rope parts rotated                           k = k_nope | k_rope, one k_rope for all heads
//! y = W_o attention(q, k, v)                   over the keys that the indexer chooses
//! ```

use ballast_kernels::rotary::Heads;
use ballast_model::config::LatentAttention;

use super::indexer::{Indexed, select};
use crate::Result;
use crate::reference::layer_run::LayerRun;
use crate::reference::ops;
use crate::reference::tape::Value;

/// Epsilon of the two inner norms, independent of the other norms.
const EPS: f32 = 1e-6;

/// Returns y [tokens, H] from x [tokens, H].
pub fn latent_attention(pass: &mut LayerRun<'_, '_>, x: &Value, shape: &LatentAttention) -> Result<Value> {
    let hidden = pass.setting.config.hidden;
    let LatentAttention { heads, q_rank, nope_dim, rope_dim, value_dim, bias, .. } = *shape;
    let rotation = pass.setting.rotation(&shape.rope)?;
    let head_dim = nope_dim + rope_dim;
    let q_low = pass.affine(x, "self_attn.q_a_proj", hidden, q_rank, bias)?;
    let q_resid = pass.norm_with(&q_low, "self_attn.q_a_layernorm", q_rank, EPS)?;
    let q = pass.linear(&q_resid, "self_attn.q_b_proj", q_rank, heads * head_dim)?;
    let q = ops::rotary(&mut pass.tape, &q, &rotation, Heads { heads, width: head_dim, offset: nope_dim });
    let (k, v) = key_values(pass, x, shape)?;
    pass.see("self_attn.q", &q);
    pass.see("self_attn.k", &k);
    pass.see("self_attn.v", &v);
    let Indexed { selected, indexer } = select(pass, x, &q_resid, shape)?;
    let mask = ops::Attention {
        heads,
        kv_heads: heads,
        head_dim,
        value_dim,
        scale: shape.scale as f64,
        window: None,
        soft_cap: None,
        selected,
        cu_seqlens: pass.setting.batch.cu_seqlens.clone(),
    };
    if let Some(indexer) = indexer.filter(|_| pass.trains_indexers()) {
        let loss = ops::indexer_loss(&mut pass.tape, &indexer, &q, &k, mask.clone());
        pass.indexer_losses.push(loss);
    }
    let o = ops::attention(&mut pass.tape, &q, &k, &v, mask);
    pass.see("self_attn.o", &o);
    pass.affine(&o, "self_attn.o_proj", heads * value_dim, hidden, bias)
}

/// Returns k [tokens, heads, nope + rope] and v [tokens, heads, vd].
fn key_values(pass: &mut LayerRun<'_, '_>, x: &Value, shape: &LatentAttention) -> Result<(Value, Value)> {
    let hidden = pass.setting.config.hidden;
    let LatentAttention { heads, kv_rank, nope_dim, rope_dim, value_dim, bias, .. } = *shape;
    let rotation = pass.setting.rotation(&shape.rope)?;
    let (low, kv) = (kv_rank + rope_dim, nope_dim + value_dim);
    let both = pass.affine(x, "self_attn.kv_a_proj_with_mqa", hidden, low, bias)?;
    let c = ops::columns(&mut pass.tape, &both, low, 0..kv_rank);
    let c = pass.norm_with(&c, "self_attn.kv_a_layernorm", kv_rank, EPS)?;
    let k_rope = ops::columns(&mut pass.tape, &both, low, kv_rank..low);
    let one = Heads { heads: 1, width: rope_dim, offset: 0 };
    let k_rope = ops::rotary(&mut pass.tape, &k_rope, &rotation, one);
    let expanded = pass.linear(&c, "self_attn.kv_b_proj", kv_rank, heads * kv)?;
    let k_nope = ops::columns(&mut pass.tape, &expanded, kv, 0..nope_dim);
    let v = ops::columns(&mut pass.tape, &expanded, kv, nope_dim..kv);
    Ok((ops::beside(&mut pass.tape, &k_nope, &k_rope, [nope_dim, rope_dim], heads), v))
}
