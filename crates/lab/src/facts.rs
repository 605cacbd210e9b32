//! Facts that need no run: protected tensors of the checkpoint, and memory of the q/k norm.

use std::collections::HashSet;

use ballast_kernels::Rounding;
use ballast_kernels::gated_delta_rule::{self as gdn, L2Norm};
use ballast_model::config::Mixer;
use ballast_model::{Config, LazyCheckpoint};
use half::bf16;

use crate::error::Result;
use crate::findings::{L2NormBytes, ProtectedTensor};

/// Sequence lengths for which the memory of the q/k norm is given.
pub const LENGTHS: [usize; 3] = [8 << 10, 32 << 10, 128 << 10];

/// Describes every protected tensor: its dtype, and how many of its values are not exact in bf16.
pub fn protected(checkpoint: &LazyCheckpoint) -> Result<Vec<ProtectedTensor>> {
    let names: HashSet<&str> = checkpoint.specs.protected.iter().map(|spec| spec.name.as_str()).collect();
    let values = checkpoint.read(|spec| names.contains(spec.name.as_str()))?;
    let moved = |x: &f32| (Rounding::Bf16.round(*x) as f64 - *x as f64).abs();
    let relative = |x: &f32| if *x == 0.0 { 0.0 } else { moved(x) / x.abs() as f64 };
    let tensors = checkpoint.protected_dtypes().zip(values.protected());
    let described = tensors.map(|((spec, dtype), tensor)| ProtectedTensor {
        name: spec.name.clone(),
        dtype: dtype.to_string(),
        elements: tensor.values().len() as u64,
        beyond_bf16: tensor.values().iter().filter(|x| moved(x) > 0.0).count() as u64,
        bf16_error: tensor.values().iter().map(relative).fold(0.0, f64::max),
    });
    Ok(described.collect())
}

/// Bytes saved for backward for q, k and their norm in bf16, over all layers with linear attention.
pub fn l2norm(config: &Config) -> Vec<L2NormBytes> {
    let bytes = |l2norm: L2Norm, tokens: usize| -> u64 {
        let one = |mixer: &Mixer| match mixer {
            Mixer::Linear(shape) => {
                let dims = gdn::Dims {
                    key_heads: shape.key_heads,
                    value_heads: shape.value_heads,
                    key_dim: shape.key_dim,
                    value_dim: shape.value_dim,
                };
                let saved = |l2norm| {
                    let options = gdn::Options { l2norm, ..gdn::Options::default() };
                    gdn::saved_bytes::<bf16>(dims, &options, &[0, tokens])
                };
                let raw = 2 * tokens * shape.key_heads * shape.key_dim * size_of::<bf16>();
                raw + saved(l2norm) - saved(L2Norm::Off)
            }
            _ => 0,
        };
        config.layers.iter().map(|layer| one(&layer.mixer) as u64).sum()
    };
    let has_linear = config.layers.iter().any(|layer| matches!(layer.mixer, Mixer::Linear(_)));
    let row = |tokens| L2NormBytes {
        tokens,
        inside: bytes(L2Norm::Inside, tokens),
        outside: bytes(L2Norm::Outside, tokens),
    };
    if has_linear { LENGTHS.map(row).to_vec() } else { Vec::new() }
}
