//! Parameters from a checkpoint in any layout.
//!
//! In memory the names are Hugging Face's, with split projections and fused experts; the checkpoint's layout gives
//! views of that form, and each is read once, into its final type.

use std::path::Path;
use std::sync::Arc;

use ballast_checkpoint::cast::{self, Buffer};
use ballast_checkpoint::layout::{self, Form, Layout, Naming, is_carried};
use ballast_checkpoint::tied::{self, StoredHead};
use ballast_checkpoint::{Checkpoint, View};
use ballast_contract::Dtype;
use half::bf16;
use rayon::prelude::*;

use crate::config::Config;
use crate::error::{Error, Mismatch, Result};
use crate::memory;
use crate::model::Model;
use crate::params::{Protected, Spec, Weight};
use crate::precision::{Precision, Storage};

/// Where a model's parameters came from.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    pub(crate) checkpoint: Arc<Checkpoint>,
    /// The checkpoint's layout.
    pub(crate) layout: Layout,
    /// What stands before the names of [`Spec`].
    pub(crate) prefix: String,
    /// Tensors that are no part of the text model, under their own names.
    pub(crate) carried: Vec<View>,
}

impl Model {
    /// Reads a model; `precision` is made for its configuration.
    pub fn load(path: &Path, precision: impl FnOnce(&Config) -> Result<Precision>) -> Result<Model> {
        let (checkpoint, config, warnings) = open(path)?;
        let precision = precision(&config)?;
        let mut model = Model::build(config, precision.clone())?;
        model.warnings = warnings;
        memory::check("the model's parameters", model.specs.bytes(precision.params) as u64)?;
        model.source = Some(model.read_params(checkpoint)?);
        model.set_precision(precision);
        Ok(model)
    }

    /// Takes the parameters of another checkpoint of the same model, in the precision that this one has; where it is saved
    /// and what it carries stay as they are.
    pub fn reload(&mut self, path: &Path) -> Result {
        self.read_params(Arc::new(Checkpoint::open_consistent(path)?))?;
        self.set_precision(self.precision().clone());
        Ok(())
    }

    fn read_params(&mut self, checkpoint: Arc<Checkpoint>) -> Result<Source> {
        let source_layout = Layout::detect(&checkpoint);
        let views: Vec<View> =
            layout::relayout(&checkpoint, &source_layout, &canonical(&source_layout))?.concat();
        let (views, source) = sort(self, views, checkpoint, source_layout)?;
        let storage = self.precision().params;
        let (weights, protected) = views.split_at(self.specs.weights.len());
        self.params.weights =
            weights.par_iter().map(|view| read_weight(view, storage)).collect::<Result<_>>()?;
        self.params.protected =
            protected.iter().map(|view| Ok(Protected::new(read_f32(view)?))).collect::<Result<_>>()?;
        Ok(source)
    }
}

/// A checkpoint, its configuration, and warnings for the user.
pub(crate) fn open(path: &Path) -> Result<(Arc<Checkpoint>, Config, Vec<String>)> {
    let checkpoint = Arc::new(Checkpoint::open_consistent(path)?);
    let Some(json) = &checkpoint.config else {
        let problem = "is not there, and without it the tensors cannot be understood".to_string();
        return Err(Error::Config { file: checkpoint.config_path(), field: "config.json".into(), problem });
    };
    let mut config = Config::parse(json, &checkpoint.config_path())?;
    let warnings = untie(&checkpoint, &mut config)?.into_iter().collect();
    Ok((checkpoint, config, warnings))
}

/// Unties embedding and head where the checkpoint stores both with different values, as transformers does, and says so.
fn untie(checkpoint: &Checkpoint, config: &mut Config) -> Result<Option<String>> {
    if !config.tied {
        return Ok(None);
    }
    let Some(StoredHead { head, embedding, equal: false }) = tied::stored_head(checkpoint)? else {
        return Ok(None);
    };
    config.tied = false;
    Ok(Some(format!(
        "{}: `tie_word_embeddings` is true, but {head} and {embedding} are stored with different values; they are not \
         tied, as in transformers; set `tie_word_embeddings` to false",
        checkpoint.config_path().display()
    )))
}

/// The view of every parameter, in the order of the specs; an error that lists all that does not fit.
pub(crate) fn sort(
    model: &Model,
    views: Vec<View>,
    checkpoint: Arc<Checkpoint>,
    layout: Layout,
) -> Result<(Vec<View>, Source)> {
    let own = |view: &&View| !is_carried(&view.name);
    let prefix = views
        .iter()
        .filter(own)
        .filter_map(|view| view.name.strip_suffix("embed_tokens.weight"))
        .min_by_key(|prefix| prefix.len())
        .unwrap_or(&layout.prefix)
        .to_string();
    let mut by_name: std::collections::HashMap<String, View> =
        views.into_iter().map(|view| (view.name.clone(), view)).collect();
    if model.config.tied {
        // A copy of the embedding: carried along it would be left behind by training.
        by_name.remove(&head_name(&prefix));
    }
    let mut problems = Mismatch::default();
    let mut found = Vec::new();
    for spec in model.specs.all() {
        let name = full_name(&prefix, spec);
        let shape: Vec<u64> = spec.shape.iter().map(|d| *d as u64).collect();
        match by_name.remove(&name) {
            None => problems.missing.push(name),
            Some(view) if view.shape != shape => problems.misshapen.push((name, view.shape, shape)),
            Some(view) => found.push(view),
        }
    }
    let (mut extra, mut carried): (Vec<View>, Vec<View>) =
        by_name.into_values().partition(|view| is_extra(model, &prefix, &view.name));
    extra.sort_by(|a, b| a.name.cmp(&b.name));
    carried.sort_by(|a, b| a.name.cmp(&b.name));
    problems.extra = extra.into_iter().map(|view| view.name).collect();
    if !problems.is_empty() {
        return Err(Error::Tensors { root: checkpoint.root.clone(), problems });
    }
    Ok((found, Source { checkpoint, layout, prefix, carried }))
}

/// The layout that parameters have in memory, of a checkpoint in `layout`.
pub(crate) fn canonical(layout: &Layout) -> Layout {
    Layout {
        naming: Naming::Hf,
        projections: layout.projections.map(|_| Form::Split),
        experts: layout.experts.map(|_| Form::Fused),
        ranks: 1,
        ..layout.clone()
    }
}

/// The name in the Hugging Face layout.
pub(crate) fn full_name(prefix: &str, spec: &Spec) -> String {
    if spec.name == "lm_head.weight" { head_name(prefix) } else { format!("{prefix}{}", spec.name) }
}

/// The name of the output head, which stands beside `model`.
fn head_name(prefix: &str) -> String {
    format!(
        "{}lm_head.weight",
        prefix.strip_suffix("model.").filter(|front| front.ends_with('.')).unwrap_or_default()
    )
}

/// Whether a tensor that no parameter asked for is a mistake; others are carried.
fn is_extra(model: &Model, prefix: &str, name: &str) -> bool {
    if is_carried(name)
        || !name.starts_with(prefix) && !name.starts_with("lm_head.") && name != head_name(prefix)
    {
        return false;
    }
    // Constants and copies that some files hold: rotary frequencies, keys of layers that share others'.
    let shares = |layer: usize| {
        let layer = model.config.layers.get(layer);
        layer.is_some_and(
            |layer| matches!(&layer.mixer, crate::config::Mixer::Softmax(a) if a.shared_from.is_some()),
        )
    };
    let layer = name
        .strip_prefix(prefix)
        .and_then(|rest| rest.strip_prefix("layers.")?.split_once('.'))
        .and_then(|(index, rest)| Some((index.parse::<usize>().ok()?, rest)));
    let unused_keys = layer.is_some_and(|(index, rest)| {
        shares(index)
            && ["self_attn.k_proj.", "self_attn.v_proj.", "self_attn.k_norm.", "self_attn.v_norm."]
                .iter()
                .any(|part| rest.starts_with(part))
    });
    // A DeepSeek file's layer after the last is its mtp.
    let after_last = layer.is_some_and(|(index, _)| index >= model.config.layers.len())
        && model.config.model_type == "deepseek_v32";
    !(unused_keys || after_last || name.ends_with("rotary_emb.inv_freq"))
}

/// Bytes of a view, in its own type.
fn read(view: &View) -> Result<Buffer> {
    let (mut data, mut scratch) = (Buffer::default(), Buffer::default());
    view.read(0..view.units(), &mut data, &mut scratch)?;
    Ok(data)
}

/// The values in f32; only types that f32 holds exactly.
pub(crate) fn read_f32(view: &View) -> Result<Vec<f32>> {
    if !view.dtype.widens_exactly_to(Dtype::F32) {
        return Err(Error::Checkpoint(ballast_checkpoint::Error::Tensor {
            checkpoint: None,
            tensor: view.name.clone(),
            problem: format!(
                "it is {}, which f32 cannot hold; convert the checkpoint to F32 or BF16 first",
                view.dtype
            ),
        }));
    }
    let data = read(view)?;
    let mut values = vec![0f32; view.elements() as usize];
    cast::convert(data.as_ref(), view.dtype, bytemuck::cast_slice_mut(&mut values), Dtype::F32);
    Ok(values)
}

fn read_weight(view: &View, storage: Storage) -> Result<Weight> {
    if storage == Storage::Bf16 && view.dtype == Dtype::Bf16 {
        let data = read(view)?;
        return Ok(Weight::Bf16(bytemuck::cast_slice::<u8, bf16>(data.as_ref()).to_vec()));
    }
    Ok(Weight::F32(read_f32(view)?).cast(storage))
}
