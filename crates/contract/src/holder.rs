//! The `_fp32_params` convention of Gated-DeltaNet checkpoints.
//!
//! At run time some frameworks keep `A_log` and `dt_bias` in a holder module `_fp32_params` below
//! `linear_attn`, so that a cast of the whole model skips them. These functions recognize the tracked keys,
//! route them into the holder, strip it again, upcast the values, and force F32 on export.
//!
//! They follow the public helper module, with four differences:
//! - the last path segment must be the name: `x.linear_attn.my_A_log` is not tracked (there, any suffix
//!   matches);
//! - `architectures` is also read from a nested `text_config`;
//! - a bare and a routed key for one tensor are an error ([`find_holder_collision`]), not "last wins";
//! - F64 is not narrowed and FP8 is not cast without its scale: both are errors.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};

use half::{bf16, f16};
use serde_json::Value;

use crate::family::architectures;
use crate::{Dtype, ErrorKind};

/// Parameters in the holder.
pub const FP32_GDN_PARAM_NAMES: [&str; 2] = ["A_log", "dt_bias"];

/// Name of the holder.
pub const HOLDER_NAME: &str = "_fp32_params";

/// Architectures whose checkpoints follow the convention.
pub const CONTRACT_ARCHITECTURES: [&str; 5] = [
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
];

const MODULE: &str = ".linear_attn.";
const MODULE_WITH_HOLDER: &str = ".linear_attn._fp32_params.";

/// Returns true if any entry of `architectures` (top level or in `text_config`) follows the convention.
pub fn has_gated_delta_net_fp32_checkpoint_contract(config: &Value) -> bool {
    architectures(config).iter().any(|a| CONTRACT_ARCHITECTURES.contains(a))
}

/// Returns true if `key` is a tracked parameter below `linear_attn`, bare or routed.
pub fn is_gated_delta_net_fp32_param_key(key: &str) -> bool {
    is_param_key(key, &FP32_GDN_PARAM_NAMES)
}

/// Like [`is_gated_delta_net_fp32_param_key`], for any list of parameters.
pub fn is_param_key(key: &str, param_names: &[impl AsRef<str>]) -> bool {
    let last = |name: &str| key.strip_suffix(name).is_some_and(|module| module.ends_with('.'));
    key.contains(MODULE) && param_names.iter().any(|name| last(name.as_ref()))
}

/// Maps `...linear_attn.X` to `...linear_attn._fp32_params.X` at the last `.linear_attn.`. Returns a key
/// unchanged if it is already routed, not below `linear_attn`, or not tracked.
pub fn route_fp32_holder_key(key: &str) -> Cow<'_, str> {
    route_param_key(key, &FP32_GDN_PARAM_NAMES)
}

/// Like [`route_fp32_holder_key`], for any list of parameters.
pub fn route_param_key<'a>(key: &'a str, param_names: &[impl AsRef<str>]) -> Cow<'a, str> {
    if !is_param_key(key, param_names) || key.contains(MODULE_WITH_HOLDER) {
        return Cow::Borrowed(key);
    }
    match key.rfind(MODULE) {
        Some(at) => {
            let (head, tail) = key.split_at(at + MODULE.len());
            Cow::Owned(format!("{head}{HOLDER_NAME}.{tail}"))
        }
        None => Cow::Borrowed(key),
    }
}

/// Removes `._fp32_params` after `.linear_attn`, every occurrence.
pub fn strip_fp32_holder_key(key: &str) -> Cow<'_, str> {
    if !key.contains(MODULE_WITH_HOLDER) {
        return Cow::Borrowed(key);
    }
    let mut stripped = key.replace(MODULE_WITH_HOLDER, MODULE);
    // A nested holder appears only once the outer one is removed.
    while stripped.contains(MODULE_WITH_HOLDER) {
        stripped = stripped.replace(MODULE_WITH_HOLDER, MODULE);
    }
    Cow::Owned(stripped)
}

/// Returns the first tensor that occurs twice, bare and routed.
pub fn find_holder_collision<'a>(keys: impl IntoIterator<Item = &'a str>) -> Option<(&'a str, String)> {
    let mut seen = HashSet::new();
    for key in keys {
        let bare = strip_fp32_holder_key(key);
        if !seen.insert(bare.to_string()) {
            return Some((key, bare.into_owned()));
        }
    }
    None
}

/// The stored content of one tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct StateTensor<'a> {
    /// Element type of `data`.
    pub dtype: Dtype,
    /// Shape.
    pub shape: Vec<u64>,
    /// Elements, little endian.
    pub data: Cow<'a, [u8]>,
}

/// The reason why a tracked tensor cannot become F32.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UpcastError {
    /// F64 would lose bits.
    #[error("{key} is F64: a cast to F32 would lose bits and must be requested explicitly")]
    Narrowing {
        /// The tensor.
        key: String,
    },
    /// The values are meaningless without a scale stored elsewhere.
    #[error("{key} is {dtype}: it cannot be cast without its scale")]
    Scaled {
        /// The tensor.
        key: String,
        /// Its dtype.
        dtype: Dtype,
    },
}

impl UpcastError {
    /// Returns the kind of this error.
    pub fn kind(&self) -> ErrorKind {
        ErrorKind::Input
    }
}

/// Casts a tracked float tensor to F32. F32 tensors, integers and all other keys are returned unchanged, without a
/// copy.
pub fn upcast_gated_delta_net_fp32_state_tensor<'a>(
    key: &str,
    tensor: StateTensor<'a>,
) -> Result<StateTensor<'a>, UpcastError> {
    if !is_gated_delta_net_fp32_param_key(key) {
        return Ok(tensor);
    }
    let widen: fn([u8; 2]) -> f32 = match tensor.dtype {
        Dtype::Bf16 => |b| bf16::from_le_bytes(b).to_f32(),
        Dtype::F16 => |b| f16::from_le_bytes(b).to_f32(),
        Dtype::F64 => return Err(UpcastError::Narrowing { key: key.into() }),
        dtype if dtype.is_scaled_float() => return Err(UpcastError::Scaled { key: key.into(), dtype }),
        _ => return Ok(tensor),
    };
    let data = tensor.data.chunks_exact(2).flat_map(|b| widen([b[0], b[1]]).to_le_bytes()).collect();
    Ok(StateTensor { dtype: Dtype::F32, shape: tensor.shape, data: Cow::Owned(data) })
}

/// Returns `{key: F32}` for the tracked float tensors of a state. On export it overrides the source's header
/// and a requested dtype.
pub fn forced_gated_delta_net_fp32_dtype_mapping<'a>(
    state: impl IntoIterator<Item = (&'a str, Dtype)>,
) -> BTreeMap<&'a str, Dtype> {
    let tracked = |(key, dtype): &(&str, Dtype)| {
        is_gated_delta_net_fp32_param_key(key) && (dtype.is_plain_float() || dtype.is_scaled_float())
    };
    state.into_iter().filter(tracked).map(|(key, _)| (key, Dtype::F32)).collect()
}
