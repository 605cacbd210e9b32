//! What the authors of a model published: whether a protected tensor that is not F32, or is F32 in name only, has lost
//! bits or never had them.
//!
//! The original itself says it, if it is at hand; else the table of releases, by the name of the model.

use std::collections::HashMap;
use std::path::Component;
use std::sync::Arc;

use ballast_contract::holder::strip_fp32_holder_key;
use ballast_contract::rounded::Fit;
use ballast_contract::{Dtype, Policy, Release, Rule};
use ballast_files::cast::Buffer;
use ballast_files::{Error, Result};
use serde::Serialize;
use serde_json::Value;

use crate::layout::{Layout, relayout, stored_views};
use crate::open::{Checkpoint, StoredTensor};
use crate::view::View;

/// Where it is known from what the authors published.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Publication {
    /// The original, or the name of the release.
    pub name: String,
    /// How it is known.
    pub source: String,
}

/// What was published of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Published {
    /// F32 values that no type of fewer bits represents.
    F32,
    /// Values of fewer bits: their type, in words.
    Narrow(String),
}

/// What was published of the protected tensors of a checkpoint.
pub(crate) struct Released {
    pub(crate) publication: Publication,
    of: Known,
}

enum Known {
    /// By rank and plain name.
    Original(HashMap<(usize, String), Published>),
    Table(&'static Release),
}

impl Released {
    /// Finds the release that the checkpoint is named after.
    pub(crate) fn by_name(checkpoint: &Checkpoint) -> Option<Released> {
        let (name, release) = names(checkpoint)
            .into_iter()
            .find_map(|name| Release::named(&name).map(|found| (name, found)))?;
        let publication = Publication { name, source: release.source.clone() };
        Some(Released { publication, of: Known::Table(release) })
    }

    /// Reads the protected tensors of `original` in the layout of `checkpoint`.
    pub(crate) fn by_original(
        checkpoint: &Checkpoint,
        original: &Arc<Checkpoint>,
        policy: &Policy,
    ) -> Result<Released> {
        let is_protected = |name: &str| policy.rule_for(name).is_some();
        original.prefetch(original.tensors.iter().filter(|t| is_protected(&t.name)))?;
        let (own, wanted) = (Layout::detect(original), Layout::detect(checkpoint));
        let ranks = match own == wanted {
            true => stored_views(original),
            false => relayout(original, &own, &Layout { prefix: own.prefix.clone(), ..wanted })?,
        };
        let shapes: HashMap<(usize, String), &Vec<u64>> =
            checkpoint.tensors.iter().map(|t| ((t.rank, plain_name(&t.name)), &t.shape)).collect();
        let mut found = HashMap::new();
        for (rank, views) in ranks.into_iter().enumerate() {
            for view in views.into_iter().filter(|view| is_protected(&view.name)) {
                let place = (rank, plain_name(&view.name));
                let Some(shape) = shapes.get(&place) else { continue };
                if **shape != view.shape {
                    let problem = format!(
                        "shape {shape:?} does not match the original's {:?}; is it another model?",
                        view.shape
                    );
                    return Err(Error::tensor(&view.name, problem).of(&checkpoint.root));
                }
                if let Some(published) = published(&view).map_err(|e| e.of(&original.root))? {
                    found.insert(place, published);
                }
            }
        }
        let name = original
            .remote
            .as_ref()
            .map_or_else(|| original.root.display().to_string(), |remote| remote.summary().address);
        let publication = Publication { name, source: "--original".into() };
        Ok(Released { publication, of: Known::Original(found) })
    }

    /// Returns what was published of a tensor that `rule` protects.
    pub(crate) fn of(&self, tensor: &StoredTensor, rule: &Rule) -> Option<Published> {
        match &self.of {
            Known::Original(found) => found.get(&(tensor.rank, plain_name(&tensor.name))).cloned(),
            Known::Table(release) => release.stored.get(&rule.id).map(|dtype| match dtype {
                Dtype::F32 => Published::F32,
                narrow => Published::Narrow(narrow.to_string()),
            }),
        }
    }
}

/// Returns what a tensor of the original has; `None` for types whose values are not those of a float.
fn published(view: &View) -> Result<Option<Published>> {
    if !view.dtype.widens_exactly_to(Dtype::F32) {
        return Ok(None);
    }
    if view.dtype != Dtype::F32 {
        return Ok(Some(Published::Narrow(view.dtype.to_string())));
    }
    // A shifted gamma has other bits than the stored one.
    let values = read_f32(&view.clone().shifted(-view.shift))?;
    let narrow = Fit::of(bytemuck::cast_slice(&values)).rounded_to();
    Ok(Some(narrow.map_or(Published::F32, |narrow| Published::Narrow(format!("{narrow} values in F32")))))
}

/// Returns the names by which a release may be found: the address, the folder of a hub's cache, the name that config.json
/// has kept, and the folder's own.
fn names(checkpoint: &Checkpoint) -> Vec<String> {
    let mut names = Vec::new();
    if let Some(remote) = &checkpoint.remote {
        let address = remote.summary().address;
        let path = address.strip_prefix("hf://").unwrap_or_default();
        names.push(path.split(['@', ':']).next().unwrap_or_default().to_owned());
    }
    let root = checkpoint.root.canonicalize().unwrap_or_else(|_| checkpoint.root.clone());
    let parts: Vec<String> = root
        .components()
        .filter_map(|c| match c {
            Component::Normal(part) => Some(part.to_string_lossy().into_owned()),
            _ => None,
        })
        .collect();
    names.extend(parts.iter().filter_map(|part| Some(part.strip_prefix("models--")?.replacen("--", "/", 1))));
    let config = checkpoint.config.as_ref().and_then(|c| c.get("_name_or_path")).and_then(Value::as_str);
    names.extend(config.map(str::to_owned));
    names.extend(parts.last().cloned());
    names
}

/// Returns the values as the bits of f32.
pub(crate) fn read_f32(view: &View) -> Result<Vec<u32>> {
    let mut values = Buffer::default();
    view.clone().widened(Dtype::F32).read(0..view.units(), &mut values, &mut Buffer::default())?;
    Ok(bytemuck::cast_slice(values.as_ref()).to_vec())
}

/// Removes the holder and the prefix of nested models, which may differ between the two.
pub(crate) fn plain_name(name: &str) -> String {
    let name = strip_fp32_holder_key(name);
    name.strip_prefix("model.language_model.")
        .map_or_else(|| name.to_string(), |rest| format!("model.{rest}"))
}
