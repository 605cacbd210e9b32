//! Dumps: tensors that another framework wrote, as safetensors files with the names of our sites.
//!
//! A tensor is compared with the site of its name and must have as many elements; [B, T, ...] and [tokens,
//! ...] are the same. Gradients are `grad.<parameter>`, with or without the checkpoint's prefix before
//! `layers.`. Parameters that a framework fuses and we do not, or the other way round (experts, the
//! projections of Qwen3-Next), are not compared and are listed in the notes.

use std::ops::Range;
use std::path::Path;

use ballast_checkpoint::tensor_file::TensorFile;
use ballast_model::LazyCheckpoint;
use ballast_model::params::Part;

use crate::engine::{Gradient, SiteTensor};
use crate::error::{Error, Result};

/// The files of a dump.
pub struct Dump {
    files: Vec<TensorFile>,
    vocabulary: usize,
}

impl Dump {
    /// Opens a safetensors file, or all safetensors files of a folder.
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
            return Err(Error::Input(format!("{}: no safetensors file found", path.display())));
        }
        Ok(Dump { files, vocabulary })
    }

    /// Names of all tensors, in file order.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.files.iter().flat_map(TensorFile::names)
    }

    fn tensor(&self, name: &str) -> Result<Option<Vec<f64>>> {
        match self.files.iter().find(|file| file.has(name)) {
            None => Ok(None),
            Some(file) => Ok(Some(file.f32(name)?.values.iter().map(|x| *x as f64).collect())),
        }
    }

    /// Returns true if the dump has logits.
    pub(crate) fn has_logits(&self) -> bool {
        self.files.iter().any(|file| file.has("logits"))
    }

    /// Reads the tensors of a part of the model.
    pub(crate) fn sites(&self, part: Part) -> Result<Vec<SiteTensor>> {
        let belongs = |name: &str| match part {
            Part::Embedding => name == "embed" || name == "per_layer_inputs",
            Part::Layer(index) => name.starts_with(&format!("layers.{index}.")),
            Part::Head => name == "norm",
        };
        let mut sites = Vec::new();
        for name in self.names().filter(|name| belongs(name)) {
            let values = self.tensor(name)?.unwrap_or_default();
            sites.push(SiteTensor { name: name.into(), dtype: "file", values });
        }
        Ok(sites)
    }

    /// Reads the logits of these tokens.
    pub(crate) fn logits(&self, rows: Range<usize>) -> Result<Vec<f64>> {
        let all = self.tensor("logits")?.unwrap_or_default();
        let (begin, end) = (rows.start * self.vocabulary, rows.end * self.vocabulary);
        match all.get(begin..end) {
            Some(slice) => Ok(slice.to_vec()),
            None => Err(Error::Input(format!(
                "logits: expected at least {} elements (tokens x vocabulary {}), got {}; is the dump of the same input?",
                end,
                self.vocabulary,
                all.len()
            ))),
        }
    }

    /// Reads the gradients of a part. That of a tied head is whole in the file and belongs to the embedding.
    pub(crate) fn gradients(&self, part: Part, checkpoint: &LazyCheckpoint) -> Result<Vec<Gradient>> {
        let mut found = Vec::new();
        for spec in checkpoint.specs.all().filter(|spec| spec.part == part) {
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
