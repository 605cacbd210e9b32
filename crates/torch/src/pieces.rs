//! Safetensors files in pieces, as NeMo Automodel writes them: every file holds boxes of tensors, and its
//! metadata says where each begins in the whole.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ballast_files::assembly::{Part, row_major};
use ballast_files::{Error, Place, Result, ShardFile, header, open_shard};
use serde::Deserialize;

use super::saved::Found;

/// Key of a file's `__metadata__` with the offsets of its pieces.
const KEY: &str = "DCP_SHARDING_INFO";

#[derive(Deserialize)]
struct Piece {
    saved_offsets: Vec<u64>,
}

/// Returns true if a safetensors file holds pieces.
pub(crate) fn is_piece(path: &Path) -> bool {
    open_shard(path).is_ok_and(|(_, header)| header.metadata.iter().any(|(key, _)| key == KEY))
}

/// Reads the tensors of all files together.
pub(crate) fn read(
    paths: &[PathBuf],
    open: &mut dyn FnMut(ShardFile) -> Arc<ShardFile>,
) -> Result<Vec<Found>> {
    let mut found: BTreeMap<String, Found> = BTreeMap::new();
    for path in paths {
        let (file, header) = open_shard(path)?;
        let file = open(file);
        let fail = |tensor: Option<&str>, problem: String| Error::Header {
            file: path.clone(),
            place: Place { tensor: tensor.map(String::from), byte: None },
            problem,
        };
        let text = header.metadata.iter().find(|(key, _)| key == KEY).map(|(_, text)| text);
        let text =
            text.ok_or_else(|| fail(None, format!("metadata {KEY} is missing; other files have it")))?;
        let pieces: HashMap<String, Piece> =
            serde_json::from_str(text).map_err(|e| fail(None, format!("metadata {KEY}: {e}")))?;
        for tensor in header.tensors {
            let name = tensor.name;
            let offsets = pieces.get(&name).map(|piece| piece.saved_offsets.clone());
            let offsets = offsets.filter(|offsets| offsets.len() == tensor.shape.len());
            let Some(offsets) = offsets else {
                return Err(fail(Some(&name), format!("metadata {KEY} does not say where its piece begins")));
            };
            let ends = offsets.iter().zip(&tensor.shape).map(|(offset, size)| offset.checked_add(*size));
            let Some(ends) = ends.collect::<Option<Vec<u64>>>() else {
                return Err(fail(Some(&name), format!("offsets {offsets:?} are too large")));
            };
            let whole = found.entry(name.clone()).or_insert_with(|| {
                let shape = vec![0; ends.len()];
                Found { name: name.clone(), dtype: tensor.dtype, shape, parts: Vec::new() }
            });
            if whole.dtype != tensor.dtype || whole.shape.len() != ends.len() {
                let problem = format!(
                    "a piece is {} {:?}, another one {} of {} dimensions",
                    tensor.dtype,
                    tensor.shape,
                    whole.dtype,
                    whole.shape.len()
                );
                return Err(fail(Some(&name), problem));
            }
            whole.shape.iter_mut().zip(&ends).for_each(|(size, end)| *size = (*size).max(*end));
            let strides = row_major(&tensor.shape);
            let sizes = tensor.shape;
            whole.parts.push(Part { offsets, sizes, strides, file: file.clone(), begin: tensor.begin });
        }
    }
    for tensor in found.values() {
        if header::elements(&tensor.shape).and_then(|n| tensor.dtype.bytes_for(n)).is_none() {
            return Err(Error::tensor(&tensor.name, format!("shape {:?} is too large", tensor.shape)));
        }
    }
    Ok(found.into_values().collect())
}
