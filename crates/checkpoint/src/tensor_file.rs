//! A safetensors file as a set of named arrays, for inputs and results of commands.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use ballast_contract::Dtype;

use crate::cast::{self, Buffer};
use crate::error::{Error, Place, Result};
use crate::header::{Header, TensorInfo};
use crate::open::Checkpoint;
use crate::staging::Staging;

/// An opened file.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    file: Checkpoint,
}

/// Shape and values of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Array<T> {
    /// Shape.
    pub shape: Vec<usize>,
    /// Values, row-major.
    pub values: Vec<T>,
}

impl TensorFile {
    /// Opens `path` and validates its header.
    pub fn open(path: &Path) -> Result<TensorFile> {
        Ok(TensorFile { path: path.into(), file: Checkpoint::open(path)? })
    }

    /// Returns true if there is a tensor called `name`.
    pub fn has(&self, name: &str) -> bool {
        self.file.tensors.iter().any(|t| t.name == name)
    }

    /// Returns the names of all tensors.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.file.tensors.iter().map(|t| t.name.as_str())
    }

    /// Returns a `__metadata__` value.
    pub fn metadata(&self, key: &str) -> Option<&str> {
        self.file.metadata_value(key)
    }

    /// Creates an error about the tensor `name` of this file.
    pub fn error(&self, name: &str, problem: impl Into<String>) -> Error {
        let place = Place { tensor: Some(name.into()), byte: None };
        Error::Header { file: self.path.clone(), place, problem: problem.into() }
    }

    /// Reads a float tensor, widened or rounded to f32.
    pub fn f32(&self, name: &str) -> Result<Array<f32>> {
        let (dtype, shape, mut data) = self.raw(name)?;
        if !dtype.is_plain_float() {
            return Err(self.error(name, format!("must be a float tensor, got {dtype}")));
        }
        let elements = data.as_ref().len() / dtype.bytes().unwrap_or(1) as usize;
        let mut wide = Buffer::default();
        cast::convert(data.as_mut(), dtype, wide.resize(elements * 4), Dtype::F32);
        Ok(Array { shape, values: bytemuck::cast_slice(wide.as_ref()).to_vec() })
    }

    /// Reads an I32 or I64 tensor.
    pub fn integers(&self, name: &str) -> Result<Array<i64>> {
        let (dtype, shape, data) = self.raw(name)?;
        let values = match dtype {
            Dtype::I64 => bytemuck::cast_slice(data.as_ref()).to_vec(),
            Dtype::I32 => bytemuck::cast_slice::<u8, i32>(data.as_ref()).iter().map(|x| *x as i64).collect(),
            _ => return Err(self.error(name, format!("must be I32 or I64, got {dtype}"))),
        };
        Ok(Array { shape, values })
    }

    fn raw(&self, name: &str) -> Result<(Dtype, Vec<usize>, Buffer)> {
        let Some(t) = self.file.tensors.iter().find(|t| t.name == name) else {
            let mut names: Vec<&str> = self.names().collect();
            names.sort_unstable();
            names.truncate(20);
            return Err(self.error(name, format!("not found; the file holds: {}", names.join(", "))));
        };
        let mut data = Buffer::default();
        self.file.files[t.file].read_at(data.resize(t.bytes as usize), t.begin)?;
        Ok((t.dtype, t.shape.iter().map(|d| *d as usize).collect(), data))
    }
}

/// A tensor to be written: name, shape, values.
pub type Named<'a, T = f32> = (&'a str, &'a [usize], &'a [T]);

/// Writes F32 tensors into the new file `path`, atomically.
pub fn write_f32(
    path: &Path,
    tensors: &[Named<'_>],
    metadata: &[(String, String)],
    force: bool,
) -> Result<()> {
    write(path, &raw(tensors, Dtype::F32), metadata, force)
}

/// Writes I64 tensors into the new file `path`, atomically.
pub fn write_integers(path: &Path, tensors: &[Named<'_, i64>]) -> Result<()> {
    write(path, &raw(tensors, Dtype::I64), &[], false)
}

/// Name, type, shape, bytes.
type Raw<'a> = (&'a str, Dtype, &'a [usize], &'a [u8]);

fn raw<'a, T: bytemuck::Pod>(tensors: &[Named<'a, T>], dtype: Dtype) -> Vec<Raw<'a>> {
    tensors.iter().map(|(name, shape, values)| (*name, dtype, *shape, bytemuck::cast_slice(values))).collect()
}

fn write(path: &Path, tensors: &[Raw<'_>], metadata: &[(String, String)], force: bool) -> Result<()> {
    let staging = Staging::new(path, true, force, &[])?;
    let mut header = Header { metadata: metadata.to_vec(), tensors: Vec::new() };
    let mut begin = 0;
    for (name, dtype, shape, data) in tensors {
        let bytes = data.len() as u64;
        let shape = shape.iter().map(|d| *d as u64).collect();
        header.tensors.push(TensorInfo { name: name.to_string(), dtype: *dtype, shape, begin, bytes });
        begin += bytes;
    }
    let staged = staging.staged();
    let header = header.to_bytes();
    staging.check_space(header.len() as u64 + begin)?;
    let mut file = File::create(&staged).map_err(Error::io(&staged, "create"))?;
    for part in std::iter::once(&header[..]).chain(tensors.iter().map(|(.., data)| *data)) {
        file.write_all(part).map_err(Error::io(&staged, "write"))?;
    }
    file.sync_all().map_err(Error::io(&staged, "flush"))?;
    staging.commit()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_survive_writing_and_reading_and_mistakes_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.safetensors");
        let array = Array { shape: vec![2, 3], values: vec![1.0, 2.5, -3.0, 0.0, 1e-30, f32::MAX] };
        write_f32(&path, &[("a", &array.shape, &array.values)], &[("scale".into(), "2".into())], false)
            .unwrap();
        let file = TensorFile::open(&path).unwrap();
        assert_eq!(file.f32("a").unwrap(), array);
        assert_eq!(file.metadata("scale"), Some("2"));
        let missing = file.f32("b").unwrap_err().to_string();
        assert!(
            missing.contains("x.safetensors") && missing.contains("\"b\"") && missing.contains("holds: a"),
            "{missing}"
        );
        assert!(file.integers("a").unwrap_err().to_string().contains("I32 or I64"));
        assert!(write_f32(&path, &[], &[], false).is_err(), "no overwriting");
        let path = folder.path().join("y.safetensors");
        write_integers(&path, &[("ids", &[1, 3], &[1, -100, 7])]).unwrap();
        assert_eq!(TensorFile::open(&path).unwrap().integers("ids").unwrap().values, [1, -100, 7]);
    }
}
