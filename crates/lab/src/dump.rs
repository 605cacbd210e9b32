//! Tensors that another framework wrote, by the names of our sites: safetensors files in a folder.
//!
//! A tensor belongs to a site when it has its name and as many elements; [B, T, ...] and [tokens, ...] are the same. Gradients
//! of parameters are `grad.<name>`.

use std::ops::Range;
use std::path::Path;

use ballast_checkpoint::tensor_file::TensorFile;

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
        for file in &self.files {
            for name in file.names().filter(|name| belongs(name)) {
                let values = file.f32(name)?.values.iter().map(|x| *x as f64).collect();
                sites.push(Site { name: name.into(), dtype: "file", values });
            }
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

    /// Gradients of the parameters of a part; whatever stands before our name is left out.
    pub fn gradients(&self, part: Part, names: &[&str]) -> Result<Vec<Gradient>> {
        let mut found = Vec::new();
        for file in &self.files {
            for name in file.names().filter(|name| name.starts_with("grad.")) {
                let ours = names
                    .iter()
                    .find(|ours| name.strip_suffix(**ours).is_some_and(|rest| rest.ends_with('.')));
                // A tied head's gradient is whole in the file, and counted with the embedding.
                if let Some(ours) = ours
                    && !(part == Part::Head && *ours == "embed_tokens.weight")
                {
                    let values = file.f32(name)?.values.iter().map(|x| *x as f64).collect();
                    found.push((ours.to_string(), values));
                }
            }
        }
        Ok(found)
    }
}
