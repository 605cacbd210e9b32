//! The model that the lab looks at when it is given none: what `ballast train` leaves after its 600 steps, in bf16 with its
//! protected tensors in f32.

use std::path::Path;

use crate::error::{Error, Result};

const FILES: [(&str, &[u8]); 2] = [
    ("config.json", include_bytes!("../model/config.json")),
    ("model.safetensors", include_bytes!("../model/model.safetensors")),
];

/// Writes it into a folder, from which it is read as any other.
pub fn write<F: AsRef<Path>>(folder: F) -> Result<F> {
    for (name, bytes) in FILES {
        let path = folder.as_ref().join(name);
        std::fs::write(&path, bytes)
            .map_err(|error| Error::Input(format!("{}: cannot write: {error}", path.display())))?;
    }
    Ok(folder)
}
