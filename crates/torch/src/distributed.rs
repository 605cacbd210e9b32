//! Folders of torch.distributed.checkpoint: `.metadata` says which box of which tensor lies in which range of
//! which `.distcp` file. Megatron's `torch_dist` is the same with names of its own ([`super::megatron`]).
//!
//! Every range is a file of `torch.save` with one tensor, or with other data, which is looked at only to see
//! whether it is empty.

use std::collections::HashMap;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use ballast_contract::Dtype;
use ballast_files::assembly::Part;
use ballast_files::left_out::{self, LeftOut};
use ballast_files::regular::{open_regular, read_bounded};
use ballast_files::{Error, Place, Result, ShardFile, header};

use super::archive::Archive;
use super::division::Item;
use super::pickle::{Id, MOST_BYTES, Node, Pickle};
use super::saved::{Found, SavedPickle, Value, dtype_of, single_tensor};

/// Name of the file that describes the folder.
pub const METADATA: &str = ".metadata";

/// Most parts of one tensor.
const MOST_PARTS: usize = 1 << 14;

/// Most fields of an object of the metadata.
const MOST_FIELDS: usize = 64;

struct Metadata<'a> {
    path: PathBuf,
    pickle: &'a Pickle<'a>,
}

/// A range of a file.
struct StorageInfo {
    file: String,
    offset: u64,
    length: u64,
}

/// The tensors of a folder, and what else it has.
pub(super) struct Tensors {
    pub(super) items: Vec<Item>,
    pub(super) left_out: Vec<LeftOut>,
}

/// Reads the tensors of a folder; `open` opens a file of it, each once.
pub(super) fn read(folder: &Path, open: &mut dyn FnMut(&Path) -> Result<Arc<ShardFile>>) -> Result<Tensors> {
    let path = folder.join(METADATA);
    let bytes = open_regular(&path).and_then(|file| read_bounded(file, MOST_BYTES));
    parse(&path, &bytes.map_err(Error::io(&path, "read"))?, folder, open)
}

/// Reads the tensors that the bytes of a metadata file describe.
pub(super) fn parse(
    path: &Path,
    bytes: &[u8],
    folder: &Path,
    open: &mut dyn FnMut(&Path) -> Result<Arc<ShardFile>>,
) -> Result<Tensors> {
    let pickle = Pickle::parse(bytes, path, 0)?;
    let metadata = Metadata { path: path.into(), pickle: &pickle };
    let (places, cuts) = (metadata.places()?, metadata.cuts());
    let mut all = Tensors { items: Vec::new(), left_out: Vec::new() };
    for (key, value) in metadata.part(metadata.state(pickle.root(), "Metadata")?, "state_dict_metadata")? {
        let name = pickle.text(key).ok_or_else(|| metadata.malformed("a tensor without a name"))?;
        let tensor = if pickle.callable(value).is_none_or(|(_, class)| class != "BytesStorageMetadata") {
            Some(metadata.tensor(name, value, &places, folder, open)?)
        } else if name.contains("._extra_state") {
            // Only the extra state of a module belongs to the model.
            metadata.bytes(name, &places, folder, open)?
        } else {
            // Random states, schedules and the like.
            left_out::count(&mut all.left_out, "saved objects", || name.into());
            None
        };
        if let Some(tensor) = tensor {
            let cuts = cuts.get(name).cloned().unwrap_or_default();
            all.items.push(Item { name: name.into(), cuts, tensor: Ok(tensor) });
        }
    }
    Ok(all)
}

type Places<'a> = HashMap<(&'a str, Option<Vec<u64>>), StorageInfo>;

impl<'a> Metadata<'a> {
    fn malformed(&self, problem: &str) -> Error {
        let problem = format!("{problem}; it is not the metadata of torch.distributed.checkpoint");
        Error::Header { file: self.path.clone(), place: Place::default(), problem }
    }

    fn of_tensor(&self, name: &str, problem: String) -> Error {
        let place = Place { tensor: Some(name.into()), byte: None };
        Error::Header { file: self.path.clone(), place, problem }
    }

    /// The fields of an object of this class.
    fn state(&self, id: Id, class: &str) -> Result<Id> {
        self.pickle.state(id, class).ok_or_else(|| self.malformed(&format!("expected a {class}")))
    }

    fn field(&self, state: Id, name: &str) -> Result<Id> {
        // One object may be written once and be used by every tensor.
        if self.pickle.entries(state).is_some_and(|entries| entries.len() > MOST_FIELDS) {
            return Err(self.malformed(&format!("an object with more than {MOST_FIELDS} fields")));
        }
        self.pickle.entry(state, name).ok_or_else(|| self.malformed(&format!("field {name} is missing")))
    }

    /// The entries of a field that is a dict.
    fn part(&self, state: Id, name: &str) -> Result<Vec<(Id, Id)>> {
        let field = self.field(state, name)?;
        let entries = self.pickle.entries(field);
        Ok(entries.ok_or_else(|| self.malformed(&format!("field {name} is not a dict")))?.to_vec())
    }

    /// Ends of the keys that lead through nested dicts, by name of a tensor: `planner_data` has the keys of each.
    fn cuts(&self) -> HashMap<&'a str, Vec<u32>> {
        let metadata = self.state(self.pickle.root(), "Metadata").ok();
        let planned = metadata.and_then(|metadata| self.pickle.entry(metadata, "planner_data"));
        let entries = planned.and_then(|planned| self.pickle.entries(planned)).unwrap_or_default();
        let path = |(name, keys): &(Id, Id)| {
            let (name, mut end, mut cuts) = (self.pickle.text(*name)?, 0, Vec::new());
            let keys = self.pickle.elements(*keys).filter(|keys| keys.len() <= MOST_FIELDS)?;
            for key in keys {
                end += match self.pickle.text(*key) {
                    Some(text) => text.len(),
                    None => self.pickle.int(*key)?.to_string().len(),
                };
                cuts.push(end as u32);
                end += 1;
            }
            cuts.pop();
            // The keys with dots between them are the name.
            let is_dot = |cut: &u32| name.as_bytes().get(*cut as usize) == Some(&b'.');
            (end == name.len() + 1 && cuts.iter().all(is_dot)).then_some((name, cuts))
        };
        entries.iter().filter_map(path).filter(|(_, cuts)| !cuts.is_empty()).collect()
    }

    /// The range of every part of every tensor.
    fn places(&self) -> Result<Places<'a>> {
        let mut places = HashMap::new();
        for (key, value) in self.part(self.state(self.pickle.root(), "Metadata")?, "storage_data")? {
            let key = self.state(key, "MetadataIndex")?;
            let name = self.pickle.text(self.field(key, "fqn")?);
            let name = name.ok_or_else(|| self.malformed("a part without the name of its tensor"))?;
            let offsets = self.pickle.entry(key, "offset").and_then(|id| self.pickle.shape(id));
            let info = self.state(value, "_StorageInfo")?;
            let file = self.pickle.text(self.field(info, "relative_path")?);
            let numbers = [self.field(info, "offset")?, self.field(info, "length")?];
            let (Some(file), [Some(offset), Some(length)]) = (file, numbers.map(|id| self.pickle.count(id)))
            else {
                return Err(self.of_tensor(name, "its place in the files is not stated".into()));
            };
            if let Some(transforms) = self.pickle.entry(info, "transform_descriptors")
                && self.pickle.elements(transforms).is_some_and(|all| !all.is_empty())
            {
                return Err(self.of_tensor(name, "it is compressed or encrypted".into()));
            }
            let info = StorageInfo { file: file.into(), offset, length };
            if places.insert((name, offsets), info).is_some() {
                return Err(self.of_tensor(name, "a part of it has two places".into()));
            }
        }
        Ok(places)
    }

    /// Opens the file of a range, which must lie in the folder.
    fn open(
        &self,
        name: &str,
        info: &StorageInfo,
        folder: &Path,
        open: &mut dyn FnMut(&Path) -> Result<Arc<ShardFile>>,
    ) -> Result<(Arc<ShardFile>, std::ops::Range<u64>)> {
        let relative = Path::new(&info.file);
        if !relative.components().all(|part| matches!(part, Component::Normal(_))) {
            return Err(self.of_tensor(name, format!("its file {:?} lies outside of the folder", info.file)));
        }
        let file = open(&folder.join(relative))?;
        let end = info.offset.checked_add(info.length);
        let end = end.ok_or_else(|| self.of_tensor(name, "its place exceeds 2^64 bytes".into()))?;
        Ok((file, info.offset..end))
    }

    fn tensor(
        &self,
        name: &str,
        value: Id,
        places: &Places<'_>,
        folder: &Path,
        open: &mut dyn FnMut(&Path) -> Result<Arc<ShardFile>>,
    ) -> Result<Found> {
        let state = self.state(value, "TensorStorageMetadata")?;
        let properties = self.state(self.field(state, "properties")?, "TensorProperties")?;
        // The state of TensorProperties is a tuple that begins with the type.
        let dtype = self.pickle.elements(properties).and_then(|all| self.pickle.global(*all.first()?));
        let dtype = dtype.and_then(|(_, name)| dtype_of(name));
        let dtype = dtype.ok_or_else(|| self.of_tensor(name, "its type is unknown".into()))?;
        let shape = self.pickle.shape(self.field(state, "size")?);
        let shape = shape.filter(|shape| header::elements(shape).and_then(|n| dtype.bytes_for(n)).is_some());
        let shape = shape.ok_or_else(|| self.of_tensor(name, "its shape has no size below 2^64".into()))?;
        let chunks = self.pickle.elements(self.field(state, "chunks")?);
        let chunks = chunks.ok_or_else(|| self.of_tensor(name, "its parts are not a list".into()))?;
        if chunks.len() > MOST_PARTS {
            return Err(
                self.of_tensor(name, format!("{} parts; at most {MOST_PARTS} are read", chunks.len()))
            );
        }
        let mut parts = Vec::with_capacity(chunks.len());
        for chunk in chunks {
            let chunk = self.state(*chunk, "ChunkStorageMetadata")?;
            let bounds = [self.field(chunk, "offsets")?, self.field(chunk, "sizes")?];
            let [Some(offsets), Some(sizes)] = bounds.map(|id| self.pickle.shape(id)) else {
                return Err(self.of_tensor(name, "a part of it has no offsets or sizes".into()));
            };
            let Some(info) = places.get(&(name, Some(offsets.clone()))) else {
                return Err(
                    self.of_tensor(name, format!("its part at {offsets:?} has no place in the files"))
                );
            };
            let (file, window) = self.open(name, info, folder, open)?;
            let stored = single_tensor(&file, window, name)?;
            if stored.dtype != dtype || stored.shape != sizes {
                let problem = format!(
                    "its part at {offsets:?} is {} {:?} in {}, expected {dtype} {sizes:?}",
                    stored.dtype, stored.shape, info.file
                );
                return Err(self.of_tensor(name, problem));
            }
            parts.extend(stored.parts.into_iter().map(|part| Part { offsets: offsets.clone(), ..part }));
        }
        Ok(Found { name: name.into(), dtype, shape, parts })
    }

    /// Extra state of a module: nothing if it is empty, else a tensor of bytes that stands for it.
    fn bytes(
        &self,
        name: &str,
        places: &Places<'_>,
        folder: &Path,
        open: &mut dyn FnMut(&Path) -> Result<Arc<ShardFile>>,
    ) -> Result<Option<Found>> {
        let Some(info) = places.get(&(name, None)) else {
            return Err(self.of_tensor(name, "it has no place in the files".into()));
        };
        let (file, window) = self.open(name, info, folder, open)?;
        if is_empty(&file, window.clone())? {
            return Ok(None);
        }
        let shape = vec![info.length];
        let part = ballast_files::assembly::whole(&file, window.start, &shape);
        Ok(Some(Found { name: name.into(), dtype: Dtype::U8, shape, parts: vec![part] }))
    }
}

/// Returns true if a file of `torch.save` has no tensor with elements and no other data.
fn is_empty(file: &Arc<ShardFile>, window: std::ops::Range<u64>) -> Result<bool> {
    let archive = Archive::open(file, window)?;
    let (bytes, begin) = archive.pickle()?;
    // Data of unknown classes is not empty.
    let Ok(pickle) = Pickle::parse(&bytes, &file.path, begin) else { return Ok(false) };
    let saved = SavedPickle::new(&pickle, &archive, begin);
    let nothing = |id: Id| match pickle.node(id) {
        Node::None => true,
        Node::Bytes(span) => span.length == 0,
        _ => false,
    };
    let root = pickle.root();
    let values: Vec<Id> = pickle.elements(root).map_or(vec![root], <[Id]>::to_vec);
    for value in values {
        let is_empty_tensor =
            matches!(saved.value(value, "")?, Value::Tensor(tensor, _) if tensor.shape.contains(&0));
        if !is_empty_tensor && !nothing(value) {
            return Ok(false);
        }
    }
    Ok(true)
}
