//! Linear attention:
//! ```text
//! q | k | v = silu(conv(W_qkv x))        z = W_z x        a, b = W_a x, W_b x
//! g = -exp(A_log) softplus(a + dt_bias)                   beta = sigmoid(b)
//! o = delta rule of l2norm(q), l2norm(k), v, g, beta
//! y = W_out (w o / rms(o) * silu(z))
//! ```

use ballast_kernels::gated_delta_rule::L2NORM_EPS;
use ballast_kernels::glu::Activation;
use ballast_model::config::LinearAttention;

use crate::Result;
use crate::reference::layer_run::LayerRun;
use crate::reference::ops::{self, Gamma, RuleInputs};
use crate::reference::tape::Value;

/// Returns y [tokens, H] from x [tokens, H].
pub fn linear_attention(pass: &mut LayerRun<'_, '_>, x: &Value, shape: LinearAttention) -> Result<Value> {
    let (hidden, eps) = (pass.setting.config.hidden, pass.setting.config.eps as f64);
    let LinearAttention { key_heads, value_heads, key_dim, value_dim, conv_width } = shape;
    let (kd, vd) = (key_heads * key_dim, value_heads * value_dim);
    let channels = 2 * kd + vd;
    let cu_seqlens = pass.setting.batch.cu_seqlens.clone();
    let raw = pass.linear(x, "linear_attn.in_proj_qkv", hidden, channels)?;
    let taps = pass.param("linear_attn.conv1d.weight", channels * conv_width)?;
    let mixed = ops::conv(&mut pass.tape, &raw, &taps, conv_width, &cu_seqlens);
    let mixed = ops::activate(&mut pass.tape, &mixed, Activation::Silu);
    let q = ops::columns(&mut pass.tape, &mixed, channels, 0..kd);
    let k = ops::columns(&mut pass.tape, &mixed, channels, kd..2 * kd);
    let v = ops::columns(&mut pass.tape, &mixed, channels, 2 * kd..channels);
    let z = pass.linear(x, "linear_attn.in_proj_z", hidden, vd)?;
    let a = pass.linear(x, "linear_attn.in_proj_a", hidden, value_heads)?;
    let b = pass.linear(x, "linear_attn.in_proj_b", hidden, value_heads)?;
    let a_log = pass.param("linear_attn.A_log", value_heads)?;
    let dt_bias = pass.param("linear_attn.dt_bias", value_heads)?;
    let g = ops::decay(&mut pass.tape, &a, &a_log, &dt_bias);
    let beta = ops::activate(&mut pass.tape, &b, Activation::Sigmoid);
    let shown = [&q, &k, &v, &z, &a, &b, &g, &beta];
    for (name, value) in ["q", "k", "v", "z", "a", "b", "g", "beta"].into_iter().zip(shown) {
        pass.see(&format!("linear_attn.{name}"), value);
    }
    let q = ops::l2_norm(&mut pass.tape, &q, L2NORM_EPS as f64, key_dim);
    let k = ops::l2_norm(&mut pass.tape, &k, L2NORM_EPS as f64, key_dim);
    let o = ops::delta_rule(&mut pass.tape, RuleInputs { q, k, v, g, beta }, shape, &cu_seqlens);
    pass.see("linear_attn.o", &o);
    let gamma = Gamma::Plain(pass.param("linear_attn.norm.weight", value_dim)?);
    let normed = ops::rms_norm(&mut pass.tape, &o, gamma, eps, value_dim);
    let normed = ops::gated(&mut pass.tape, &z, &normed, Activation::Silu);
    pass.see("linear_attn.norm", &normed);
    pass.linear(&normed, "linear_attn.out_proj", vd, hidden)
}
