//! Tensors that another framework wrote, by the names of our sites: safetensors files in a folder.
//!
//! A tensor belongs to a site when it has its name; it must have as many elements, [B, T, ...] and [tokens, ...] are the same.
//! Gradients are `grad.<name of the parameter>`, with or without what stands before `layers.` in a checkpoint; where a framework
//! fuses what we have apart, or the other way round (experts, the projections of Qwen3-Next), they are told as compared with
//! nothing.

use std::ops::Range;
use std::path::Path;

use ballast_checkpoint::tensor_file::TensorFile;
use ballast_model::LazyCheckpoint;

use crate::engine::{Gradient, Part, Site};
use crate::error::{Error, Result};

/// The files.
pub struct Dump {
    files: Vec<TensorFile>,
    vocabulary: usize,
}

impl Dump {
    /// Opens a safetensors file, or all of a folder.
    pub fn open(path: &Path, vocabulary: usize) -> Result<Dump> {
        let cannot =
            |error: std::io::Error| Error::Input(format!("{}: cannot read: {error}", path.display()));
        let mut files = Vec::new();
        if path.is_dir() {
            let mut paths = Vec::new();
            for entry in std::fs::read_dir(path).map_err(cannot)? {
                paths.push(entry.map_err(cannot)?.path());
            }
            paths.sort();
            for file in paths.iter().filter(|file| file.extension().is_some_and(|e| e == "safetensors")) {
                files.push(TensorFile::open(file)?);
            }
        } else {
            files.push(TensorFile::open(path)?);
        }
        if files.is_empty() {
            return Err(Error::Input(format!("{}: no safetensors file in it", path.display())));
        }
        Ok(Dump { files, vocabulary })
    }

    /// All names, in the order of the files.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.files.iter().flat_map(TensorFile::names)
    }

    fn tensor(&self, name: &str) -> Result<Option<Vec<f64>>> {
        match self.files.iter().find(|file| file.has(name)) {
            None => Ok(None),
            Some(file) => Ok(Some(file.f32(name)?.values.iter().map(|x| *x as f64).collect())),
        }
    }

    /// Whether there are logits.
    pub fn has_logits(&self) -> bool {
        self.files.iter().any(|file| file.has("logits"))
    }

    /// The tensors of a part of the model.
    pub fn sites(&self, part: Part) -> Result<Vec<Site>> {
        let belongs = |name: &str| match part {
            Part::Embedding => name == "embed" || name == "per_layer_inputs",
            Part::Layer(index) => name.starts_with(&format!("layers.{index}.")),
            Part::Head => name == "norm",
        };
        let mut sites = Vec::new();
        for name in self.names().filter(|name| belongs(name)) {
            let values = self.tensor(name)?.unwrap_or_default();
            sites.push(Site { name: name.into(), dtype: "file", values });
        }
        Ok(sites)
    }

    /// Logits of these tokens.
    pub fn logits(&self, rows: Range<usize>) -> Result<Vec<f64>> {
        let all = self.tensor("logits")?.unwrap_or_default();
        let (begin, end) = (rows.start * self.vocabulary, rows.end * self.vocabulary);
        match all.get(begin..end) {
            Some(slice) => Ok(slice.to_vec()),
            None => Err(Error::Input(format!(
                "logits: {} elements, and the input has tokens beyond them with a vocabulary of {}",
                all.len(),
                self.vocabulary
            ))),
        }
    }

    /// Gradients of the parameters of a part; that of a tied head is whole in the file, and counted with the embedding.
    pub fn gradients(&self, part: Part, checkpoint: &LazyCheckpoint) -> Result<Vec<Gradient>> {
        let mut found = Vec::new();
        for spec in checkpoint.specs.all().filter(|spec| part.has(spec, false)) {
            for name in [checkpoint.full_name(spec), spec.name.clone()] {
                if let Some(values) = self.tensor(&format!("grad.{name}"))? {
                    found.push((spec.name.clone(), values));
                    break;
                }
            }
        }
        Ok(found)
    }
}
