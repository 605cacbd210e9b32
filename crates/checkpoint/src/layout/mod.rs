//! Layouts: the names and grouping of a checkpoint's tensors, and conversions between them.
//!
//! | aspect | values |
//! |---|---|
//! | naming | `hf`; `nemo` (hf with A_log and dt_bias in `_fp32_params`); `megatron` (packed, whole or by rank); `gguf` (llama.cpp's, written by [`crate::gguf`]) |
//! | projections | `split` (Qwen3.5: in_proj_qkv, z, b, a) or `fused` (Qwen3-Next: in_proj_qkvz, in_proj_ba) |
//! | experts | `split` (one tensor per expert) or `fused` (gate_up_proj and down_proj over all experts) |
//!
//! A layout is recognized by the names. Tensors that a change of layout does not know (vision, mtp, anything
//! new) are copied under their own names.

mod experts;
mod megatron;
mod projections;

use std::sync::Arc;

use ballast_contract::holder::{find_holder_collision, route_fp32_holder_key, strip_fp32_holder_key};
use ballast_files::{Error, Result};
use serde::Serialize;
use serde_json::Value;

use crate::open::Checkpoint;
use crate::view::View;

pub(crate) use self::megatron::{is_extra_state, usual_name};
/// The naming convention of a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum Naming {
    Hf,
    Nemo,
    Megatron,
    Gguf,
}

impl std::fmt::Display for Naming {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Naming::Hf => "hf",
            Naming::Nemo => "nemo",
            Naming::Megatron => "megatron",
            Naming::Gguf => "gguf",
        })
    }
}

/// The form of tensors that belong together: one each, or one for all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum Form {
    Split,
    Fused,
}

/// Numbers of ranks among which tensors are divided. The files of a checkpoint are in the order of the
/// tensor-parallel ranks, and for each of them in the order of the expert-parallel ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Ranks {
    /// Number of tensor-parallel ranks.
    #[serde(rename = "ranks")]
    pub tensor: usize,
    /// Number of expert-parallel ranks.
    #[serde(rename = "expert_ranks")]
    pub expert: usize,
}

impl Ranks {
    /// A checkpoint that is not divided.
    pub const ONE: Ranks = Ranks { tensor: 1, expert: 1 };

    /// Returns the number of all ranks.
    pub fn count(self) -> usize {
        self.tensor * self.expert
    }
}

/// The layout of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Layout {
    /// Naming convention.
    pub naming: Naming,
    /// Form of the linear-attention input projections, if any; for megatron, the form in the hf layout.
    pub projections: Option<Form>,
    /// Form of the experts, if any; for megatron, the form in the hf layout.
    pub experts: Option<Form>,
    /// Ranks among which tensors are divided.
    #[serde(flatten)]
    pub ranks: Ranks,
    /// Megatron only: out_norm.weight is stored minus one.
    pub zero_centered_gamma: bool,
    /// Prefix before `layers.` in the hf names.
    pub prefix: String,
}

/// A requested layout; `None` keeps the source's.
#[derive(Clone, Copy, Debug, Default)]
pub struct LayoutRequest {
    /// Naming convention.
    pub naming: Option<Naming>,
    /// Form of the projections.
    pub projections: Option<Form>,
    /// Form of the experts.
    pub experts: Option<Form>,
    /// Number of tensor-parallel ranks to write.
    pub ranks: Option<usize>,
    /// Number of expert-parallel ranks to write.
    pub expert_ranks: Option<usize>,
    /// True if Megatron's out_norm is stored minus one: in the source if it is a Megatron checkpoint, else in
    /// the destination. Default: as the file says, else true.
    pub zero_centered_gamma: Option<bool>,
}

/// Keys of `__metadata__` in files of other layouts than hf, needed to convert back.
pub mod metadata {
    #![allow(missing_docs)]
    pub const LAYOUT: &str = "ballast.layout";
    pub const PREFIX: &str = "ballast.hf_prefix";
    pub(crate) const PROJECTIONS: &str = "ballast.projections";
    pub(crate) const EXPERTS: &str = "ballast.experts";
    pub(crate) const ZERO_CENTERED_GAMMA: &str = "ballast.zero_centered_gamma";
    pub const ALL: [&str; 5] = [LAYOUT, PREFIX, PROJECTIONS, EXPERTS, ZERO_CENTERED_GAMMA];
}

impl Layout {
    /// Detects the layout of a checkpoint by its names, and by the metadata that Ballast writes.
    pub fn detect(checkpoint: &Checkpoint) -> Layout {
        let names = || checkpoint.tensors.iter().map(|t| t.name.as_str()).filter(|n| !is_carried(n));
        let said = |key| checkpoint.metadata_value(key);
        let form = |text: &str| if text == "fused" { Form::Fused } else { Form::Split };
        let naming = if said(ballast_gguf::ARCHITECTURE).is_some() {
            Naming::Gguf
        } else if names()
            .any(|n| n.starts_with("decoder.layers.") || n.starts_with("embedding.word_embeddings."))
        {
            Naming::Megatron
        } else if names().any(|n| n.contains(".linear_attn._fp32_params."))
            // A model without linear attention has no holder keys.
            || said(metadata::LAYOUT) == Some("nemo") && !names().any(|n| n.contains(".linear_attn."))
        {
            Naming::Nemo
        } else {
            Naming::Hf
        };
        let model_type =
            text_config(checkpoint).and_then(|c| c.get("model_type")?.as_str()).unwrap_or_default();
        let (projections, experts, prefix) = if naming == Naming::Megatron {
            let nested = checkpoint.config.as_ref().is_some_and(|c| c.get("text_config").is_some());
            let next = model_type == "qwen3_next";
            let experts = names().any(|n| n.contains(".mlp.experts."));
            (
                Some(said(metadata::PROJECTIONS).map_or(if next { Form::Fused } else { Form::Split }, form)),
                experts.then(|| {
                    said(metadata::EXPERTS).map_or(if next { Form::Split } else { Form::Fused }, form)
                }),
                said(metadata::PREFIX)
                    .unwrap_or(if nested { "model.language_model." } else { "model." })
                    .to_string(),
            )
        } else {
            let nested = names().any(|n| n.starts_with("model.language_model."));
            (
                form_found(names().any(projections::is_fused), names().any(projections::is_projection)),
                form_found(
                    names().any(experts::is_fused),
                    names().any(|n| experts::expert_index(n).is_some()),
                ),
                if nested { "model.language_model." } else { "model." }.to_string(),
            )
        };
        let zero_centered_gamma = said(metadata::ZERO_CENTERED_GAMMA) != Some("false");
        let expert = checkpoint.expert_ranks;
        let ranks = Ranks { tensor: checkpoint.ranks / expert, expert };
        Layout { naming, projections, experts, ranks, zero_centered_gamma, prefix }
    }

    /// Returns the layout to write for a request; `self` is the layout of the source.
    pub fn requested(&self, request: &LayoutRequest) -> Result<Layout> {
        let naming = request.naming.unwrap_or(self.naming);
        let own = if naming == self.naming { self.ranks } else { Ranks::ONE };
        let ranks = Ranks {
            tensor: request.ranks.unwrap_or(own.tensor),
            expert: request.expert_ranks.unwrap_or(own.expert),
        };
        for (option, ranks, most) in [("--tp", ranks.tensor, 64), ("--ep", ranks.expert, 512)] {
            if ranks == 0 || ranks > most {
                return Err(Error::Refused(format!("{option} must be 1 to {most}, got {ranks}")));
            }
            if ranks > 1 && naming != Naming::Megatron {
                let message = format!("{option} {ranks} needs the megatron layout; add --layout megatron");
                return Err(Error::Refused(message));
            }
        }
        Ok(Layout {
            naming,
            projections: self.projections.map(|own| request.projections.unwrap_or(own)),
            experts: self.experts.map(|own| request.experts.unwrap_or(own)),
            ranks,
            zero_centered_gamma: request.zero_centered_gamma.unwrap_or(self.zero_centered_gamma),
            prefix: self.prefix.clone(),
        })
    }

    /// Returns the `__metadata__` entries of a file in this layout.
    pub fn describe(&self) -> Vec<(String, String)> {
        let entry = |key: &str, value: &str| (key.to_string(), value.to_string());
        let form = |f: Form| if f == Form::Fused { "fused" } else { "split" };
        match self.naming {
            Naming::Hf | Naming::Gguf => Vec::new(),
            Naming::Nemo => vec![entry(metadata::LAYOUT, "nemo")],
            Naming::Megatron => [
                Some(entry(metadata::LAYOUT, "megatron")),
                Some(entry(metadata::PREFIX, &self.prefix)),
                self.projections.map(|f| entry(metadata::PROJECTIONS, form(f))),
                self.experts.map(|f| entry(metadata::EXPERTS, form(f))),
                Some(entry(metadata::ZERO_CENTERED_GAMMA, &self.zero_centered_gamma.to_string())),
            ]
            .into_iter()
            .flatten()
            .collect(),
        }
    }
}

fn form_found(fused: bool, any: bool) -> Option<Form> {
    match (fused, any) {
        (true, _) => Some(Form::Fused),
        (false, true) => Some(Form::Split),
        (false, false) => None,
    }
}

/// Returns the tensors of a checkpoint as views, by rank.
pub(crate) fn stored_views(checkpoint: &Arc<Checkpoint>) -> Vec<Vec<View>> {
    let mut ranks = vec![Vec::new(); checkpoint.ranks];
    for (i, t) in checkpoint.tensors.iter().enumerate() {
        ranks[t.rank].push(View::stored(checkpoint, i));
    }
    ranks
}

/// Returns [`stored_views`] by rank and name.
pub(crate) fn stored_by_name(
    checkpoint: &Arc<Checkpoint>,
) -> std::collections::HashMap<(usize, String), View> {
    let ranks = stored_views(checkpoint).into_iter().enumerate();
    ranks.flat_map(|(rank, views)| views.into_iter().map(move |v| ((rank, v.name.clone()), v))).collect()
}

/// Converts the tensors of `checkpoint` from layout `from` to layout `to`. Returns views by rank.
pub fn relayout(checkpoint: &Arc<Checkpoint>, from: &Layout, to: &Layout) -> Result<Vec<Vec<View>>> {
    rearranged(checkpoint, from, to).map_err(|e| e.of(&checkpoint.root))
}

fn rearranged(checkpoint: &Arc<Checkpoint>, from: &Layout, to: &Layout) -> Result<Vec<Vec<View>>> {
    let keys = checkpoint.tensors.iter().filter(|t| t.rank == 0).map(|t| t.name.as_str());
    if let Some((key, bare)) = find_holder_collision(keys) {
        let problem = format!("stored twice, bare and as {key}; remove one of them");
        return Err(Error::tensor(bare, problem));
    }
    let ranks = stored_views(checkpoint);
    if from == to {
        return Ok(ranks);
    }
    if from.naming == Naming::Gguf || to.naming == Naming::Gguf {
        let problem = "a GGUF file is for llama.cpp and cannot be converted back; convert the checkpoint that it was made from";
        return Err(Error::Refused(format!("{}: {problem}", checkpoint.root.display())));
    }
    if [from.naming, to.naming].contains(&Naming::Megatron) {
        megatron::check_architecture(checkpoint)?;
    }
    // The geometry is read only if needed: a checkpoint without config.json can still be renamed.
    let geometry = || Geometry::of(checkpoint);
    let packed = |form: Option<Form>| form.map(|_| Form::Split);
    let (mut views, projections, experts) = match from.naming {
        Naming::Megatron => {
            (megatron::to_hf(ranks, from, &geometry()?)?, packed(from.projections), packed(from.experts))
        }
        _ => (renamed(ranks, strip_fp32_holder_key), from.projections, from.experts),
    };
    let (wanted_projections, wanted_experts) = match to.naming {
        Naming::Megatron => (packed(to.projections), packed(to.experts)),
        _ => (to.projections, to.experts),
    };
    if projections != wanted_projections {
        views = match wanted_projections {
            Some(Form::Fused) => projections::fuse(views, &geometry()?)?,
            _ => projections::split(views, &geometry()?)?,
        };
    }
    if experts != wanted_experts {
        views = match wanted_experts {
            Some(Form::Fused) => experts::fuse(views)?,
            _ => experts::split(views)?,
        };
    }
    match to.naming {
        Naming::Hf => Ok(vec![views]),
        Naming::Nemo => Ok(vec![renamed(vec![views], route_fp32_holder_key)]),
        Naming::Megatron => megatron::from_hf(views, to, &geometry()?),
        Naming::Gguf => unreachable!("refused above"),
    }
}

fn renamed(ranks: Vec<Vec<View>>, rename: fn(&str) -> std::borrow::Cow<'_, str>) -> Vec<View> {
    let views = ranks.into_iter().flatten();
    views
        .map(|view| {
            let name = rename(&view.name).into_owned();
            view.renamed(name)
        })
        .collect()
}

/// Returns true for vision, audio and mtp tensors, which no change of layout affects.
pub fn is_carried(name: &str) -> bool {
    name.split('.')
        .any(|s| matches!(s, "mtp" | "visual" | "vision_tower" | "audio_tower" | "multi_modal_projector"))
}

fn text_config(checkpoint: &Checkpoint) -> Option<&Value> {
    let config = checkpoint.config.as_ref()?;
    Some(config.get("text_config").unwrap_or(config))
}

/// Head counts and widths that the packed forms depend on.
pub(crate) struct Geometry {
    /// Linear attention: key heads, value heads, their widths.
    pub(crate) key_heads: u64,
    pub(crate) value_heads: u64,
    pub(crate) key_dim: u64,
    pub(crate) value_dim: u64,
    /// Softmax attention: query heads, key/value heads, their width.
    pub(crate) heads: u64,
    pub(crate) kv_heads: u64,
    pub(crate) head_dim: u64,
}

impl Geometry {
    pub(crate) fn of(checkpoint: &Checkpoint) -> Result<Geometry> {
        let file = checkpoint.config_path();
        let fail = |problem: String| Error::Config { file: file.clone(), problem };
        let config = text_config(checkpoint).ok_or_else(|| {
            fail("config.json not found; its head counts are needed to change the layout".into())
        })?;
        let field = |name: &str| match config.get(name).map(|v| (v.as_u64(), v)) {
            Some((Some(value), _)) if (1..1 << 24).contains(&value) => Ok(value),
            Some((_, value)) => {
                Err(fail(format!("`{name}` must be a count from 1 to 16777215, got {value}")))
            }
            None => Err(fail(format!("field `{name}` is missing; it is needed to change the layout"))),
        };
        let geometry = Geometry {
            key_heads: field("linear_num_key_heads")?,
            value_heads: field("linear_num_value_heads")?,
            key_dim: field("linear_key_head_dim")?,
            value_dim: field("linear_value_head_dim")?,
            heads: field("num_attention_heads")?,
            kv_heads: field("num_key_value_heads")?,
            head_dim: field("head_dim")?,
        };
        if !geometry.value_heads.is_multiple_of(geometry.key_heads)
            || !geometry.heads.is_multiple_of(geometry.kv_heads)
        {
            let problem = "value heads must be a multiple of key heads, and attention heads a multiple of key/value heads";
            return Err(fail(problem.into()));
        }
        Ok(geometry)
    }

    /// Number of rows of q (and of k) in the linear-attention projections.
    pub(crate) fn qk_rows(&self) -> u64 {
        self.key_heads * self.key_dim
    }

    /// Number of rows of v (and of z).
    pub(crate) fn v_rows(&self) -> u64 {
        self.value_heads * self.value_dim
    }
}

/// Views that can be taken out by name; the rest keeps its order.
pub(crate) struct Pool {
    views: Vec<Option<View>>,
    places: std::collections::HashMap<String, usize>,
}

impl Pool {
    pub(crate) fn new(views: Vec<View>) -> Pool {
        let places = views.iter().enumerate().map(|(i, v)| (v.name.clone(), i)).collect();
        Pool { views: views.into_iter().map(Some).collect(), places }
    }

    /// Takes the tensor called `name`; the error names `needed_for`.
    pub(crate) fn take(&mut self, name: &str, needed_for: &str) -> Result<View> {
        let view = self.places.get(name).and_then(|&i| self.views[i].take());
        view.ok_or_else(|| Error::tensor(name, format!("missing; it is needed for {needed_for}")))
    }

    /// Returns the views that were not taken.
    pub(crate) fn rest(self) -> Vec<View> {
        self.views.into_iter().flatten().collect()
    }
}
