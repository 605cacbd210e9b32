//! The published form of protected tensors: it tells a tensor that has lost f32 bits from one that never had them.
//!
//! It comes from the original, if it is at hand; else from the table of releases, by the name of the model.

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

use crate::layout::{Layout, Naming, relayout};
use crate::open::{Checkpoint, StoredTensor};
use crate::view::View;

/// The source of the published form of a checkpoint's tensors.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Publication {
    /// The original, or the name of the release.
    pub name: String,
    /// The option, or the reason why the table has the release.
    pub source: String,
}

/// The published form of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Published {
    /// F32 values that no type of fewer bits represents.
    F32,
    /// Values of fewer bits, whatever they are stored as.
    Narrow,
}

/// The published form of a checkpoint's protected tensors.
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
        let layout = Layout::detect(checkpoint);
        if layout.naming == Naming::Gguf {
            let problem = "a GGUF file has other types and values by its format and cannot be compared with an original; \
                           audit the checkpoint that it was made from";
            return Err(Error::Refused(format!("{}: {problem}", checkpoint.root.display())));
        }
        let originals = original_views(original, &layout)?;
        let shapes: HashMap<(usize, String), &Vec<u64>> =
            checkpoint.tensors.iter().map(|t| ((t.rank, plain_name(&t.name)), &t.shape)).collect();
        let mut found = HashMap::new();
        for (place, view) in originals.into_iter().filter(|(_, view)| is_protected(&view.name)) {
            let Some(shape) = shapes.get(&place) else { continue };
            same_shape(&view.name, shape, &view).map_err(|e| e.of(&checkpoint.root))?;
            if let Some(published) = published(&view).map_err(|e| e.of(&original.root))? {
                found.insert(place, published);
            }
        }
        let name = original
            .remote
            .as_ref()
            .map_or_else(|| original.root.display().to_string(), |remote| remote.summary().address);
        let publication = Publication { name, source: "--original".into() };
        Ok(Released { publication, of: Known::Original(found) })
    }

    /// Returns the published form of a tensor that `rule` protects.
    pub(crate) fn of(&self, tensor: &StoredTensor, rule: &Rule) -> Option<Published> {
        match &self.of {
            Known::Original(found) => found.get(&(tensor.rank, plain_name(&tensor.name))).copied(),
            Known::Table(release) => release.stored.get(&rule.id).map(|dtype| match dtype {
                Dtype::F32 => Published::F32,
                _ => Published::Narrow,
            }),
        }
    }
}

/// Returns the form of a tensor of the original; `None` for types whose values are not those of a float.
fn published(view: &View) -> Result<Option<Published>> {
    if !view.dtype.widens_exactly_to(Dtype::F32) {
        return Ok(None);
    }
    if view.dtype != Dtype::F32 {
        return Ok(Some(Published::Narrow));
    }
    // A shifted gamma has other bits than the stored one.
    let values = read_f32(&view.clone().shifted(-view.shift))?;
    let narrow = Fit::of(bytemuck::cast_slice(&values)).rounded_to();
    Ok(Some(if narrow.is_some() { Published::Narrow } else { Published::F32 }))
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
    let root = checkpoint.config_path();
    let root = root.parent().unwrap_or(&checkpoint.root);
    let root = root.canonicalize().unwrap_or_else(|_| root.to_path_buf());
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

/// Tensors by rank and plain name.
pub(crate) type Views = HashMap<(usize, String), View>;

/// Returns the original's tensors in the layout of the checkpoint.
pub(crate) fn original_views(original: &Arc<Checkpoint>, layout: &Layout) -> Result<Views> {
    let own = Layout::detect(original);
    let wanted = Layout { prefix: own.prefix.clone(), ..layout.clone() };
    let ranks = relayout(original, &own, &wanted)?.into_iter().enumerate();
    Ok(ranks
        .flat_map(|(rank, views)| views.into_iter().map(move |v| ((rank, plain_name(&v.name)), v)))
        .collect())
}

/// Refuses an original of another shape than the tensor `name` has.
pub(crate) fn same_shape(name: &str, shape: &[u64], original: &View) -> Result<()> {
    if original.shape == shape {
        return Ok(());
    }
    let problem =
        format!("shape {shape:?} does not match the original's {:?}; is it another model?", original.shape);
    Err(Error::tensor(name, problem))
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
