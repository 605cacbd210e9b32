//! The embedded model, the default of the lab: the result of `ballast train` without arguments (600 steps),
//! in bf16 with its protected tensors in f32.

use std::path::Path;

use crate::error::{Error, Result};

const FILES: [(&str, &[u8]); 2] = [
    ("config.json", include_bytes!("../model/config.json")),
    ("model.safetensors", include_bytes!("../model/model.safetensors")),
];

/// Writes the embedded model into a folder, to be read like any other.
pub fn write<F: AsRef<Path>>(folder: F) -> Result<F> {
    for (name, bytes) in FILES {
        let path = folder.as_ref().join(name);
        std::fs::write(&path, bytes)
            .map_err(|error| Error::Input(format!("{}: cannot write: {error}", path.display())))?;
    }
    Ok(folder)
}
