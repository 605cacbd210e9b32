//! A safetensors file as a set of named arrays, for inputs and results of commands.

use std::fs::File;
use std::io::Write;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use ballast_contract::Dtype;
use ballast_files::cast::{self, Buffer};
use ballast_files::header::{self, Header, TensorInfo};
use ballast_files::jobs::Silent;
use ballast_files::staging::{Staging, check_space};
use ballast_files::{Error, Place, Result};

use crate::open::{Checkpoint, StoredTensor};

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

    /// Reads the bytes of the elements `range` of a tensor of this type and shape.
    pub fn range(&self, name: &str, dtype: Dtype, shape: &[usize], range: Range<usize>) -> Result<Vec<u8>> {
        let t = self.find(name)?;
        if t.dtype != dtype || !t.shape.iter().map(|d| *d as usize).eq(shape.iter().copied()) {
            let problem = format!("{} of shape {:?}, expected {dtype} of shape {shape:?}", t.dtype, t.shape);
            return Err(self.error(name, problem));
        }
        let width = dtype.bits() / 8;
        let mut bytes = vec![0; width as usize * range.len()];
        self.file.files[t.file].read_at(&mut bytes, t.begin + width * range.start as u64)?;
        Ok(bytes)
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

    fn find(&self, name: &str) -> Result<&StoredTensor> {
        self.file.tensors.iter().find(|t| t.name == name).ok_or_else(|| {
            let mut names: Vec<&str> = self.names().collect();
            names.sort_unstable();
            names.truncate(20);
            self.error(name, format!("not found; the file holds: {}", names.join(", ")))
        })
    }

    fn raw(&self, name: &str) -> Result<(Dtype, Vec<usize>, Buffer)> {
        let t = self.find(name)?;
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
        header::check_name(name)?;
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
    staging.commit(&Silent)
}

/// A file of tensors that several processes write together, each its own ranges. Not atomic: it belongs into a
/// staged folder.
#[derive(Debug)]
pub struct SharedFile {
    path: PathBuf,
    file: File,
    /// Position of each tensor in the file.
    begins: Vec<u64>,
}

/// Name, type and shape of a tensor in a [`SharedFile`].
pub type Described<'a> = (&'a str, Dtype, &'a [usize]);

impl SharedFile {
    /// Creates the file with its header and its full length; one process does this.
    pub fn create(path: &Path, tensors: &[Described<'_>]) -> Result<SharedFile> {
        let (header, begins, end) = shared_layout(tensors)?;
        check_space(path.parent().unwrap_or(Path::new(".")), path, end)?;
        let mut file = File::create_new(path).map_err(Error::io(path, "create"))?;
        file.write_all(&header).map_err(Error::io(path, "write"))?;
        file.set_len(end).map_err(Error::io(path, "extend"))?;
        Ok(SharedFile { path: path.into(), file, begins })
    }

    /// Opens a file that another process has created with the same tensors.
    pub fn open(path: &Path, tensors: &[Described<'_>]) -> Result<SharedFile> {
        let (_, begins, _) = shared_layout(tensors)?;
        let file = File::options().write(true).open(path).map_err(Error::io(path, "open"))?;
        Ok(SharedFile { path: path.into(), file, begins })
    }

    /// Writes bytes of a tensor, by its index, from byte `at` of the tensor on.
    pub fn write(&self, tensor: usize, at: u64, bytes: &[u8]) -> Result<()> {
        let at = self.begins[tensor] + at;
        self.file.write_all_at(bytes, at).map_err(Error::io(&self.path, "write"))
    }

    /// Flushes this rank's ranges to the disk.
    pub fn finish(self) -> Result<()> {
        self.file.sync_all().map_err(Error::io(&self.path, "flush"))
    }
}

/// Header of a file with these tensors, the position of each, and the length of the file.
fn shared_layout(tensors: &[Described<'_>]) -> Result<(Vec<u8>, Vec<u64>, u64)> {
    let mut header = Header { metadata: Vec::new(), tensors: Vec::new() };
    let mut begin = 0;
    for (name, dtype, shape) in tensors {
        header::check_name(name)?;
        let shape: Vec<u64> = shape.iter().map(|d| *d as u64).collect();
        let bytes = header::elements(&shape).and_then(|elements| dtype.bytes_for(elements));
        let bytes = bytes.ok_or_else(|| Error::tensor(*name, format!("shape {shape:?} is too large")))?;
        header.tensors.push(TensorInfo { name: name.to_string(), dtype: *dtype, shape, begin, bytes });
        begin += bytes;
    }
    let bytes = header.to_bytes();
    let front = bytes.len() as u64;
    let begins = header.tensors.iter().map(|tensor| front + tensor.begin).collect();
    Ok((bytes, begins, front + begin))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_written_in_pieces_is_like_one_written_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let values: Vec<f32> = (0..35).map(|i| i as f32).collect();
        let tensors = [("a", &[5, 5][..], &values[..25]), ("b", &[10][..], &values[25..])];
        let (whole, shared) = (folder.path().join("x.safetensors"), folder.path().join("y.safetensors"));
        write_f32(&whole, &tensors, &[], false).unwrap();
        let described = tensors.map(|(name, shape, _)| (name, Dtype::F32, shape));
        let first = SharedFile::create(&shared, &described).unwrap();
        let second = SharedFile::open(&shared, &described).unwrap();
        second.write(1, 0, bytemuck::cast_slice(&values[25..])).unwrap();
        second.write(0, 4 * 7, bytemuck::cast_slice(&values[7..25])).unwrap();
        first.write(0, 0, bytemuck::cast_slice(&values[..7])).unwrap();
        first.finish().unwrap();
        second.finish().unwrap();
        assert_eq!(std::fs::read(&whole).unwrap(), std::fs::read(&shared).unwrap());
        let file = TensorFile::open(&shared).unwrap();
        let read = |shape: &[usize]| file.range("a", Dtype::F32, shape, 3..9);
        assert_eq!(read(&[5, 5]).unwrap(), bytemuck::cast_slice::<f32, u8>(&values[3..9]));
        assert!(read(&[25]).unwrap_err().to_string().contains("expected F32 of shape [25]"));
        assert!(SharedFile::create(&shared, &described).is_err(), "no overwriting");
    }

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
