//! Loading: reads the parameters of a checkpoint in any layout.
//!
//! In memory, parameters have Hugging Face names, split projections and fused experts. The checkpoint's
//! layout provides views in that form; each view is read once, into its final type.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use ballast_checkpoint::layout::{self, Form, Layout, Naming, Ranks, is_carried};
use ballast_checkpoint::tied::{self, StoredHead};
use ballast_checkpoint::{Checkpoint, View, fp8};
use ballast_contract::Dtype;
use ballast_files::cast::{self, Buffer};
use half::bf16;
use rayon::prelude::*;

use crate::config::Config;
use crate::error::{Error, Mismatch, Result};
use crate::memory;
use crate::model::Model;
use crate::params::{Protected, Spec, Specs, Weight};
use crate::precision::{Precision, Storage};

/// Checkpoint that a model was loaded from.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    pub(crate) checkpoint: Arc<Checkpoint>,
    /// The checkpoint's layout.
    pub(crate) layout: Layout,
    /// Prefix of the names of [`Spec`] in the Hugging Face layout.
    pub(crate) prefix: String,
    /// Tensors outside the text model, under their own names; saving copies them.
    pub(crate) carried: Vec<View>,
}

impl Model {
    /// Loads a model; `precision` chooses the precision from its configuration.
    pub fn load(path: &Path, precision: impl FnOnce(&Config) -> Result<Precision>) -> Result<Model> {
        Model::load_shares(path, precision, |_, _| None)
    }

    /// Loads a model of which this process holds a share: `shares` gives the elements of each weight to keep, by
    /// the model's specs; `None` keeps all.
    pub fn load_shares(
        path: &Path,
        precision: impl FnOnce(&Config) -> Result<Precision>,
        shares: impl FnOnce(&Config, &Specs) -> Option<Vec<Range<usize>>>,
    ) -> Result<Model> {
        let (checkpoint, config, warnings) = open(path)?;
        let precision = precision(&config)?;
        let mut model = Model::build(config, precision.clone())?;
        model.warnings = warnings;
        let shares = shares(&model.config, &model.specs);
        memory::check("the model's parameters", model.share_bytes(precision.params, shares.as_deref()))?;
        model.source = Some(model.read_params(checkpoint, shares.as_deref())?);
        model.set_precision(precision);
        Ok(model)
    }

    /// Bytes of the parameters, of which `shares` are held.
    pub(crate) fn share_bytes(&self, storage: Storage, shares: Option<&[Range<usize>]>) -> u64 {
        let left_out = |(spec, share): (&Spec, &Range<usize>)| (spec.len() - share.len()) * storage.bytes();
        let left_out: usize = self.specs.weights.iter().zip(shares.unwrap_or_default()).map(left_out).sum();
        (self.specs.bytes(storage) - left_out) as u64
    }

    /// Replaces the parameters by those of another checkpoint of the same model and keeps the precision. The
    /// layout for saving and the tensors outside the text model stay those of the first checkpoint. Of each weight, the
    /// elements `shares` are read; `None` for all.
    pub fn reload_shares(&mut self, path: &Path, shares: Option<&[Range<usize>]>) -> Result {
        self.read_params(fp8::dequantized(&Arc::new(Checkpoint::open_consistent(path)?))?, shares)?;
        self.set_precision(self.precision().clone());
        Ok(())
    }

    fn read_params(
        &mut self,
        checkpoint: Arc<Checkpoint>,
        shares: Option<&[Range<usize>]>,
    ) -> Result<Source> {
        let source_layout = Layout::detect(&checkpoint);
        let views: Vec<View> =
            layout::relayout(&checkpoint, &source_layout, &canonical(&source_layout))?.concat();
        let (views, source) = sort(self, views, checkpoint, source_layout)?;
        let storage = self.precision().params;
        let (weights, protected) = views.split_at(self.specs.weights.len());
        let share = |index: usize| shares.map(|shares| shares[index].clone());
        let read = |index: usize| Ok(read_weight(&weights[index], storage)?.into_share(share(index)));
        self.params.weights = make_weights(&self.specs, shares.is_some(), read)?;
        self.params.protected =
            protected.iter().map(|view| Ok(Protected::new(read_f32(view)?))).collect::<Result<_>>()?;
        Ok(source)
    }
}

/// f32 bytes of whole weights that exist at once where a share of each is kept.
const WHOLE_BYTES: usize = 1 << 30;

/// Ranges of weights that are made at once: all, or where a share of each is kept, as many as fit in
/// [`WHOLE_BYTES`], at least one.
fn batches(specs: &Specs, shared: bool) -> Vec<Range<usize>> {
    let mut batches: Vec<Range<usize>> = Vec::new();
    let mut bytes = 0;
    for (index, spec) in specs.weights.iter().enumerate() {
        bytes += 4 * spec.len();
        match batches.last_mut() {
            Some(batch) if !shared || bytes <= WHOLE_BYTES => batch.end = index + 1,
            _ => {
                bytes = 4 * spec.len();
                batches.push(index..index + 1);
            }
        }
    }
    batches
}

/// Makes all weights, in parallel. `shared` says that `make` returns a share of the weight that it has whole.
pub(crate) fn make_weights(
    specs: &Specs,
    shared: bool,
    make: impl Fn(usize) -> Result<Weight> + Sync,
) -> Result<Vec<Weight>> {
    let mut weights = Vec::with_capacity(specs.weights.len());
    for batch in batches(specs, shared) {
        weights.extend(batch.into_par_iter().map(&make).collect::<Result<Vec<_>>>()?);
    }
    Ok(weights)
}

impl Specs {
    /// Bytes of whole weights that exist at once while a model is made of which a share is kept.
    pub fn bytes_at_once(&self) -> usize {
        let bytes =
            |batch: Range<usize>| self.weights[batch].iter().map(|spec| 4 * spec.len()).sum::<usize>();
        batches(self, true).into_iter().map(bytes).max().unwrap_or(0)
    }
}

/// Opens a checkpoint; returns it with its configuration and warnings for the user.
pub(crate) fn open(path: &Path) -> Result<(Arc<Checkpoint>, Config, Vec<String>)> {
    let checkpoint = fp8::dequantized(&Arc::new(Checkpoint::open_consistent(path)?))?;
    let Some(json) = &checkpoint.config else {
        let problem = "not found; it is needed to interpret the tensors".to_string();
        return Err(Error::Config { file: checkpoint.config_path(), field: "config.json".into(), problem });
    };
    let mut config = Config::parse(json, &checkpoint.config_path())?;
    let warnings = untie(&checkpoint, &mut config)?.into_iter().collect();
    Ok((checkpoint, config, warnings))
}

/// Unties embedding and head if the checkpoint stores both with different values, as transformers does;
/// returns a warning.
fn untie(checkpoint: &Checkpoint, config: &mut Config) -> Result<Option<String>> {
    if !config.tied {
        return Ok(None);
    }
    let Some(StoredHead { head, embedding, equal: false }) = tied::stored_head(checkpoint)? else {
        return Ok(None);
    };
    config.tied = false;
    Ok(Some(format!(
        "{}: `tie_word_embeddings` is true, but {head} and {embedding} are stored with different values; they \
         are not tied, as in transformers; set `tie_word_embeddings` to false",
        checkpoint.config_path().display()
    )))
}

/// Returns the view of every parameter, in the order of the specs. The error lists all missing, extra and
/// misshapen tensors.
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
        // The head is a copy of the embedding: if saved unchanged, it would be out of date after training.
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

/// Returns the layout that the parameters of a checkpoint in `layout` have in memory.
pub(crate) fn canonical(layout: &Layout) -> Layout {
    Layout {
        naming: Naming::Hf,
        projections: layout.projections.map(|_| Form::Split),
        experts: layout.experts.map(|_| Form::Fused),
        ranks: Ranks::ONE,
        ..layout.clone()
    }
}

/// Returns the name in the Hugging Face layout.
pub(crate) fn full_name(prefix: &str, spec: &Spec) -> String {
    if spec.name == "lm_head.weight" { head_name(prefix) } else { format!("{prefix}{}", spec.name) }
}

/// Returns the name of the output head, a sibling of `model`.
fn head_name(prefix: &str) -> String {
    format!(
        "{}lm_head.weight",
        prefix.strip_suffix("model.").filter(|front| front.ends_with('.')).unwrap_or_default()
    )
}

/// Returns true if a tensor that matches no parameter is an error; the others are kept and saved unchanged.
fn is_extra(model: &Model, prefix: &str, name: &str) -> bool {
    if is_carried(name)
        || !name.starts_with(prefix) && !name.starts_with("lm_head.") && name != head_name(prefix)
    {
        return false;
    }
    // Some files store unused tensors: rotary frequencies, and keys of layers that use another layer's.
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
    // DeepSeek stores its multi-token prediction (MTP) module as the layer after the last.
    let after_last = layer.is_some_and(|(index, _)| index >= model.config.layers.len())
        && model.config.model_type == "deepseek_v32";
    !(unused_keys || after_last || name.ends_with("rotary_emb.inv_freq"))
}

/// Reads a view in its stored type.
fn read(view: &View) -> Result<Buffer> {
    let (mut data, mut scratch) = (Buffer::default(), Buffer::default());
    view.read(0..view.units(), &mut data, &mut scratch)?;
    Ok(data)
}

/// Reads a view as f32; an error unless f32 holds its type exactly.
pub(crate) fn read_f32(view: &View) -> Result<Vec<f32>> {
    if !view.dtype.widens_exactly_to(Dtype::F32) {
        return Err(Error::Checkpoint(ballast_files::Error::Tensor {
            checkpoint: None,
            tensor: view.name.clone(),
            problem: format!(
                "type {} does not convert to f32 exactly; convert the checkpoint to F32 or BF16 first",
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
