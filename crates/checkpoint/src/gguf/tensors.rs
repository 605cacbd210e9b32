//! Tensors under llama.cpp's names, with its transforms.
//!
//! ```text
//! gamma      stored as 1 + w where the model computes with 1 + w (Qwen but the output norm of the delta rule,
//!            Gemma 2 and 3)
//! A_log      ssm_a = -exp(A_log)
//! conv1d     [C, 1, K] as [C, K]
//! qwen35     value heads, grouped by key head (k, v), become tiled (v, k): in the v part of in_proj_qkv and conv1d,
//!            in z, a, b, A_log, dt_bias, and in the columns of out_proj
//! experts    one tensor for all: gate, up, down
//! kv_b_proj  per head: k [nope, rank] transposed, and v [v_dim, rank]
//! ```

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use ballast_contract::Dtype;
use ballast_files::{Error, Result};

use crate::layout::{Geometry, Layout, Naming, Ranks, relayout};
use crate::open::{Checkpoint, MemoryTensor};
use crate::tied;
use crate::view::View;
use ballast_gguf::parameters::gemma4_rope_divisors;
use ballast_gguf::{Config, Family, names};

/// Tensors of a file.
pub(super) struct Tensors {
    pub(super) views: Vec<View>,
    /// Number of blocks of multi-token prediction.
    pub(super) predictors: u64,
    /// Tensors that are not written, by reason.
    pub(super) dropped: BTreeMap<&'static str, Vec<String>>,
}

/// Reason to leave out tensors of images and sound.
const VISION: &str = "llama.cpp loads vision and audio from a separate file (mmproj)";
/// Reason to leave out a stored head.
const HEAD: &str = "the output head is the embedding";

/// Shapes that the transforms depend on.
pub(super) struct Shapes {
    family: Family,
    layers: u64,
    linear: Option<Geometry>,
    /// DeepSeek: heads, width without position, width of values.
    latent: Option<[u64; 3]>,
}

/// Returns the tensors of a model for llama.cpp.
pub(super) fn tensors(source: &Arc<Checkpoint>, family: Family, config: &Config) -> Result<Tensors> {
    let shapes = Shapes::of(source, family, config)?;
    let from = Layout::detect(source);
    let split = from.projections.map(|_| crate::layout::Form::Split);
    let to = Layout { naming: Naming::Hf, projections: split, ranks: Ranks::ONE, ..from.clone() };
    let views = relayout(source, &from, &to)?.into_iter().flatten();
    let is_tied = source.config.as_ref().is_some_and(tied::is_tied);
    let is_head_tied = is_tied && tied::stored_head(source)?.is_some_and(|head| head.equal);
    let mut out = Tensors { views: Vec::new(), predictors: 0, dropped: BTreeMap::new() };
    let mut blocks: BTreeMap<u64, BTreeMap<String, View>> = BTreeMap::new();
    for view in views {
        let bare = bare_name(&view.name, &to.prefix);
        if is_vision(&view.name) {
            out.dropped.entry(VISION).or_default().push(view.name);
        } else if is_head_tied && bare == "lm_head.weight" {
            out.dropped.entry(HEAD).or_default().push(view.name);
        } else if family == Family::Gemma2 && bare == "lm_head.weight" {
            return Err(no_place(family, &view.name));
        } else if let Some(name) = names::global(&bare) {
            let view = shapes.gamma(view, &bare)?;
            out.views.push(view.renamed(name));
        } else if let Some((block, suffix)) = shapes.block(&bare) {
            out.predictors = out.predictors.max((block + 1).saturating_sub(shapes.layers));
            blocks.entry(block).or_default().insert(suffix, view);
        } else {
            return Err(no_place(family, &view.name));
        }
    }
    for (block, tensors) in blocks {
        out.views.extend(shapes.block_views(block, tensors)?);
    }
    if family == Family::Gemma4 {
        out.views.push(rope_frequencies(source, config, shapes.layers)?);
    }
    Ok(out)
}

/// Returns the error about a tensor that llama.cpp does not have.
pub(super) fn no_place(family: Family, name: &str) -> Error {
    Error::tensor(name, format!("llama.cpp has no place for this tensor in {}", family.name()))
}

/// Returns a name without the prefix of the text model.
pub(super) fn bare_name(name: &str, prefix: &str) -> String {
    let bare = name.strip_prefix(prefix).or_else(|| name.strip_prefix("model.")).unwrap_or(name);
    bare.to_string()
}

fn is_vision(name: &str) -> bool {
    let parts =
        ["visual", "vision_tower", "audio_tower", "multi_modal_projector", "embed_vision", "embed_audio"];
    name.split('.').any(|segment| parts.contains(&segment))
}

impl Shapes {
    pub(super) fn of(source: &Checkpoint, family: Family, config: &Config) -> Result<Shapes> {
        let latent = match family {
            Family::Deepseek32 => Some([
                config.count("num_attention_heads")?,
                config.count("qk_nope_head_dim")?,
                config.count("v_head_dim")?,
            ]),
            _ => None,
        };
        let linear = if family.is_hybrid() { Some(Geometry::of(source)?) } else { None };
        Ok(Shapes { family, layers: config.count("num_hidden_layers")?, linear, latent })
    }

    /// Returns the block of a tensor, and its name in it.
    pub(super) fn block(&self, bare: &str) -> Option<(u64, String)> {
        let (base, rest) = match bare.strip_prefix("mtp.") {
            Some(rest) => (self.layers, rest),
            None => (0, bare),
        };
        if let Some((number, suffix)) = rest.strip_prefix("layers.").and_then(|rest| rest.split_once('.')) {
            let number: u64 = number.parse().ok().filter(|n| *n < 1 << 16)?;
            return Some((base + number, suffix.to_string()));
        }
        let (module, leaf) = rest.rsplit_once('.').filter(|_| base > 0)?;
        Some((base, format!("{}.{leaf}", names::qwen_predictor(module)?)))
    }

    /// Adds one to a gamma that the model uses as 1 + w.
    fn gamma(&self, view: View, suffix: &str) -> Result<View> {
        let is_gamma = suffix.ends_with("norm.weight") && !suffix.ends_with("linear_attn.norm.weight");
        let is_shifted = self.family.is_hybrid() || matches!(self.family, Family::Gemma2 | Family::Gemma3);
        if !is_gamma || !is_shifted {
            return Ok(view);
        }
        require_f32_or_narrower(&view)?;
        Ok(view.widened(Dtype::F32).shifted(1))
    }

    /// Returns the tensors of one block.
    fn block_views(&self, block: u64, mut tensors: BTreeMap<String, View>) -> Result<Vec<View>> {
        let named = |name: &str| format!("blk.{block}.{name}");
        let mut out = experts(&mut tensors, block)?;
        if let Some(view) = tensors.remove("self_attn.kv_b_proj.weight") {
            let [k, v] = self.key_and_value(view)?;
            out.push(k.renamed(named("attn_k_b.weight")));
            out.push(v.renamed(named("attn_v_b.weight")));
        }
        if self.family == Family::Qwen3Next
            && let (Some(b), Some(a)) = (
                tensors.remove("linear_attn.in_proj_b.weight"),
                tensors.remove("linear_attn.in_proj_a.weight"),
            )
        {
            out.push(self.joined_gates(&b, &a)?.renamed(named("ssm_ba.weight")));
        }
        for (suffix, view) in tensors {
            let hf_name = view.name.clone();
            let view = self.gamma(view, &suffix)?;
            let view = match suffix.as_str() {
                "linear_attn.A_log" => {
                    require_f32_or_narrower(&view)?;
                    self.tiled(view, 0, 1)?.negative_exp()?.renamed(named("ssm_a"))
                }
                "linear_attn.dt_bias" => self.tiled(view, 0, 1)?.renamed(named("ssm_dt.bias")),
                "mlp.gate.e_score_correction_bias" => view.renamed(named("exp_probs_b.bias")),
                "layer_scalar" => view.reshaped(&[1])?.renamed(named("layer_output_scale.weight")),
                "router.scale" if self.family == Family::Gemma4 => view.renamed(named("ffn_gate_inp.scale")),
                "router.per_expert_scale" => view.renamed(named("ffn_down_exps.scale")),
                _ => {
                    let place = suffix.rsplit_once('.').and_then(|(module, leaf)| {
                        let leaf_fits = leaf == "weight" || suffix == "self_attn.indexer.k_norm.bias";
                        names::module(self.family, module).filter(|_| leaf_fits).map(|name| (name, leaf))
                    });
                    let (name, leaf) = place.ok_or_else(|| no_place(self.family, &hf_name))?;
                    self.shaped(view, &suffix)?.renamed(named(&format!("{name}.{leaf}")))
                }
            };
            out.push(view);
        }
        Ok(out)
    }

    /// Returns a weight in the shape and order of llama.cpp.
    pub(super) fn shaped(&self, view: View, suffix: &str) -> Result<View> {
        let Some(g) = &self.linear else { return Ok(view) };
        let v_part = 2 * g.qk_rows()..2 * g.qk_rows() + g.v_rows();
        match suffix {
            "linear_attn.conv1d.weight" => {
                let &[channels, 1, taps] = &view.shape[..] else {
                    return Err(Error::tensor(
                        &view.name,
                        format!("expected [channels, 1, taps], got {:?}", view.shape),
                    ));
                };
                self.tiled_part(view.reshaped(&[channels, taps])?, v_part, g.value_dim)
            }
            "linear_attn.in_proj_qkv.weight" => self.tiled_part(view, v_part, g.value_dim),
            "linear_attn.in_proj_z.weight" => self.tiled(view, 0, g.value_dim),
            "linear_attn.in_proj_a.weight" | "linear_attn.in_proj_b.weight" => self.tiled(view, 0, 1),
            "linear_attn.out_proj.weight" => self.tiled(view, 1, g.value_dim),
            "mlp.shared_expert_gate.weight" => {
                let elements = view.elements();
                view.reshaped(&[elements])
            }
            _ => Ok(view),
        }
    }

    /// Returns rows that belong to a weight, such as B of an adapter, in the order of llama.cpp.
    pub(super) fn rows(&self, view: View, suffix: &str) -> Result<View> {
        match suffix {
            "mlp.shared_expert_gate.weight" | "linear_attn.out_proj.weight" => Ok(view),
            _ => self.shaped(view, suffix),
        }
    }

    /// Splits rows of in_proj_qkvz of Qwen3-Next into those of attn_qkv and attn_gate.
    pub(super) fn split_qkvz(&self, view: &View) -> Result<[View; 2]> {
        let Some(g) = &self.linear else { return Err(no_place(self.family, &view.name)) };
        let v = g.value_heads / g.key_heads * g.value_dim;
        let mut parts = [const { Vec::new() }; 4];
        let mut at = 0;
        for _ in 0..g.key_heads {
            for (part, rows) in parts.iter_mut().zip([g.key_dim, g.key_dim, v, v]) {
                part.push(view.slice(0, at..at + rows)?);
                at += rows;
            }
        }
        let [q, k, v, z] = parts;
        let qkv = View::concat(view.name.clone(), 0, &[q, k, v].concat())?;
        Ok([qkv, View::concat(view.name.clone(), 0, &z)?])
    }

    /// Reorders value heads of `width` rows or columns from grouped to tiled order.
    fn tiled(&self, view: View, dim: usize, width: u64) -> Result<View> {
        let Some(g) = &self.linear else { return Ok(view) };
        let size = g.value_heads / g.key_heads;
        if self.family == Family::Qwen3Next {
            return Ok(view);
        }
        if dim == 1 {
            return view.regrouped(g.key_heads, size, width);
        }
        let name = view.name.clone();
        if view.shape.first() != Some(&(g.value_heads * width)) {
            let problem = format!("expected {} rows, got shape {:?}", g.value_heads * width, view.shape);
            return Err(Error::tensor(name, problem));
        }
        let order = (0..size).flat_map(|v| (0..g.key_heads).map(move |k| k * size + v));
        let heads = order.map(|head| view.slice(0, head * width..(head + 1) * width));
        View::concat(name, 0, &heads.collect::<Result<Vec<_>>>()?)
    }

    /// Reorders the value heads in `rows`, which are the last rows.
    fn tiled_part(&self, view: View, rows: Range<u64>, width: u64) -> Result<View> {
        if view.shape.first() != Some(&rows.end) {
            let problem = format!("expected {} rows, got shape {:?}", rows.end, view.shape);
            return Err(Error::tensor(&view.name, problem));
        }
        let (front, back) = (view.slice(0, 0..rows.start)?, view.slice(0, rows)?);
        View::concat(view.name.clone(), 0, &[front, self.tiled(back, 0, width)?])
    }

    /// Joins b and a of Qwen3-Next: per key head, b of its value heads, then a.
    fn joined_gates(&self, b: &View, a: &View) -> Result<View> {
        let Some(g) = &self.linear else { return Err(no_place(self.family, &b.name)) };
        let size = g.value_heads / g.key_heads;
        let mut parts = Vec::new();
        for head in 0..g.key_heads {
            for view in [b, a] {
                parts.push(view.slice(0, head * size..(head + 1) * size)?);
            }
        }
        View::concat(b.name.clone(), 0, &parts)
    }

    /// Splits kv_b_proj into the transposed keys and the values of every head.
    fn key_and_value(&self, view: View) -> Result<[View; 2]> {
        let Some([heads, nope, value]) = self.latent else { return Err(no_place(self.family, &view.name)) };
        let &[_, rank] = &view.shape[..] else {
            return Err(Error::tensor(&view.name, format!("expected a matrix, got shape {:?}", view.shape)));
        };
        let by_head = view.reshaped(&[heads, nope + value, rank])?;
        let k = by_head.slice(1, 0..nope)?.transposed()?;
        Ok([k, by_head.slice(1, nope..nope + value)?])
    }
}

fn require_f32_or_narrower(view: &View) -> Result<()> {
    match view.dtype.widens_exactly_to(Dtype::F32) {
        true => Ok(()),
        false => Err(Error::tensor(&view.name, format!("stored in {}; GGUF needs it in F32", view.dtype))),
    }
}

/// Takes the experts of a block out of its tensors, as one tensor each for gate, up and down.
fn experts(tensors: &mut BTreeMap<String, View>, block: u64) -> Result<Vec<View>> {
    let named = |name: &str| format!("blk.{block}.ffn_{name}_exps.weight");
    let mut out = Vec::new();
    for module in ["mlp.experts.", "experts."] {
        let Some(gate_up) = tensors.remove(&format!("{module}gate_up_proj")) else { continue };
        let &[_, rows, _] = &gate_up.shape[..] else {
            return Err(Error::tensor(gate_up.name, "fused experts must have three dimensions"));
        };
        if module == "experts." {
            out.push(gate_up.renamed(named("gate_up")));
        } else {
            out.push(gate_up.slice(1, 0..rows / 2)?.renamed(named("gate")));
            out.push(gate_up.slice(1, rows / 2..rows)?.renamed(named("up")));
        }
        if let Some(down) = tensors.remove(&format!("{module}down_proj")) {
            out.push(down.renamed(named("down")));
        }
    }
    for part in ["gate", "up", "down"] {
        let of_expert = |e: u64| format!("mlp.experts.{e}.{part}_proj.weight");
        let mut parts = Vec::new();
        while let Some(view) = tensors.remove(&of_expert(parts.len() as u64)) {
            let shape = [&[1], &view.shape[..]].concat();
            parts.push(view.reshaped(&shape)?);
        }
        if !parts.is_empty() {
            out.push(View::concat(named(part), 0, &parts)?);
        }
    }
    Ok(out)
}

/// Returns the divisors of Gemma 4's frequencies in full layers.
fn rope_frequencies(source: &Arc<Checkpoint>, config: &Config, layers: u64) -> Result<View> {
    let divisors = gemma4_rope_divisors(config, layers)?;
    let data = divisors.iter().flat_map(|divisor| divisor.to_le_bytes()).collect();
    let name = "rope_freqs.weight".to_string();
    let tensor = MemoryTensor { name, dtype: Dtype::F32, shape: vec![divisors.len() as u64], data };
    Ok(View::stored(&Arc::new(Checkpoint::in_memory(source, vec![tensor], &[])?), 0))
}
