//! A checkpoint on disk: one safetensors file, a folder with or without an index, a folder of tensor-parallel
//! ranks, one of torch's formats ([`ballast_torch`]), or a GGUF file ([`ballast_gguf`]); or a checkpoint on a
//! server ([`ballast_hub`]).
//!
//! Tensors are read by position, not memory-mapped: a mapped file that shrinks kills the process with a
//! signal, a positional read returns an error. A checkpoint is never loaded into memory as a whole.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ballast_contract::family::Tensor;
use ballast_contract::{Architecture, Dtype, Policy, Registry};
use ballast_files::assembly::Assembly;
use ballast_files::cast::{self, Buffer};
use ballast_files::encoding::without_mark;
use ballast_files::header::{self, Header, TensorInfo};
use ballast_files::index::{INDEX_SUFFIX, Index, IndexIssue};
use ballast_files::left_out::LeftOut;
use ballast_files::ranks::RankFolders;
use ballast_files::regular::read_regular;
use ballast_files::{Disk, Error, Folder, Result, ShardFile, is_sidecar, look_at, open_shard};
use ballast_hub::{Location, Remote, is_address};
use serde_json::Value;

use crate::shards::{missing_file, missing_layer};

/// A tensor in memory that is treated like one in a file.
#[derive(Clone, Debug)]
pub struct MemoryTensor {
    /// Name.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Shape.
    pub shape: Vec<u64>,
    /// Elements as stored in a file.
    pub data: Vec<u8>,
}

/// A tensor in a file.
#[derive(Clone, Debug)]
pub struct StoredTensor {
    /// Name.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Shape.
    pub shape: Vec<u64>,
    /// Index into [`Checkpoint::files`].
    pub file: usize,
    /// First byte in that file.
    pub begin: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Rank whose files have it; 0 without ranks.
    pub rank: usize,
}

impl StoredTensor {
    /// Number of elements.
    pub fn elements(&self) -> u64 {
        header::elements(&self.shape).expect("checked when the header was parsed")
    }
}

/// An opened checkpoint.
#[derive(Debug)]
pub struct Checkpoint {
    /// Path of the file or folder.
    pub root: PathBuf,
    /// Files, and after them the tensors that are put together from several.
    pub files: Vec<Arc<ShardFile>>,
    /// All tensors of the model, file by file in the order of their data.
    pub tensors: Vec<StoredTensor>,
    /// Tensors beside the model, in torch's formats: optimizer state.
    pub state: Vec<StoredTensor>,
    /// `__metadata__` of the files, merged.
    pub metadata: Vec<(String, String)>,
    /// Content of config.json, if there is one.
    pub config: Option<Value>,
    /// Files beside the weights that belong to the checkpoint, relative to `root`.
    pub sidecars: Vec<PathBuf>,
    /// Safetensors files in the folder that are not part of the checkpoint.
    pub ignored: Vec<PathBuf>,
    /// Values in torch's formats that are neither tensors of the model nor optimizer state.
    pub left_out: Vec<LeftOut>,
    /// Number of ranks with files of their own; 1 for an ordinary checkpoint.
    pub ranks: usize,
    /// Number of expert-parallel ranks for each tensor-parallel one.
    pub expert_ranks: usize,
    /// Disagreements between indexes and shards.
    pub issues: Vec<IndexIssue>,
    /// Address that it was opened by, if it was not a path.
    pub remote: Option<Remote>,
    in_memory: bool,
}

impl Checkpoint {
    /// Opens `path` and validates every header. Disagreements between index and shards are not an error; they
    /// are in [`Checkpoint::issues`].
    pub fn open(path: &Path) -> Result<Checkpoint> {
        if is_address(path) {
            let (location, remote) = ballast_hub::locate(path)?;
            return Checkpoint::open_remote(location, remote);
        }
        let kind = fs::metadata(path).map_err(Error::io(path, "open"))?;
        if let Some(folder) = ballast_torch::iteration(path)? {
            return Checkpoint::open(&folder);
        }
        let mut checkpoint = Checkpoint::empty(path);
        if kind.is_file() && ballast_gguf::header::is_gguf(path)? {
            checkpoint.add_gguf(path)?;
            return Ok(checkpoint);
        }
        let folder = match path.parent() {
            Some(parent) if kind.is_file() && parent.as_os_str().is_empty() => Path::new("."),
            Some(parent) if kind.is_file() => parent,
            _ => path,
        };
        checkpoint.config = read_config(&folder.join("config.json"))?;
        if let Some(format) = ballast_torch::format_of(path) {
            if kind.is_dir() {
                checkpoint.sidecars = sidecars(&Disk(folder))?;
                // It states the format of Megatron's files, which the tensors may leave.
                checkpoint.sidecars.retain(|name| name != Path::new("metadata.json"));
            }
            checkpoint.add_torch(ballast_torch::read(format)?)?;
            return Ok(checkpoint);
        }
        if kind.is_file() && !path.to_string_lossy().ends_with(INDEX_SUFFIX) {
            checkpoint.add_files(vec![open_shard(path)?], 0);
            return Ok(checkpoint);
        }
        checkpoint.root = folder.to_path_buf();
        checkpoint.sidecars = sidecars(&Disk(folder))?;
        if kind.is_file() {
            checkpoint.add_indexed(&Disk(folder), Path::new(path.file_name().unwrap_or_default()), 0)?;
            return Ok(checkpoint);
        }
        let Some(ranks) = RankFolders::in_folder(folder)? else {
            checkpoint.add_folder(&Disk(folder), 0)?;
            return Ok(checkpoint);
        };
        for (rank, rank_folder) in ranks.folders.iter().enumerate() {
            checkpoint.add_folder(&Disk(rank_folder), rank)?;
        }
        (checkpoint.ranks, checkpoint.expert_ranks) = (ranks.folders.len(), ranks.expert_ranks);
        Ok(checkpoint)
    }

    /// Opens what an address leads to, and reads its config, index and headers.
    pub fn open_remote(location: Location, remote: Remote) -> Result<Checkpoint> {
        let mut checkpoint = match location {
            Location::Cached(path) => Checkpoint::open(&path)?,
            Location::Server { folder, file } => Checkpoint::open_in(folder.as_ref(), file.as_deref())?,
        };
        checkpoint.remote = Some(remote);
        Ok(checkpoint)
    }

    fn open_in(folder: &dyn Folder, file: Option<&Path>) -> Result<Checkpoint> {
        let mut checkpoint = Checkpoint::empty(folder.path());
        let config = Path::new("config.json");
        if folder.has(config)? {
            let path = folder.path().join(config);
            checkpoint.config = Some(parse_config(&path, &folder.read(config)?)?);
        }
        match file {
            Some(file) if !file.to_string_lossy().ends_with(INDEX_SUFFIX) => {
                checkpoint.root = folder.path().join(file);
                checkpoint.add_files(folder.open(&[file.to_path_buf()])?, 0);
            }
            Some(index) => {
                checkpoint.sidecars = sidecars(folder)?;
                checkpoint.add_indexed(folder, index, 0)?;
            }
            None => {
                checkpoint.sidecars = sidecars(folder)?;
                checkpoint.add_folder(folder, 0)?;
            }
        }
        Ok(checkpoint)
    }

    fn empty(root: &Path) -> Checkpoint {
        Checkpoint {
            root: root.to_path_buf(),
            files: Vec::new(),
            tensors: Vec::new(),
            state: Vec::new(),
            metadata: Vec::new(),
            config: None,
            sidecars: Vec::new(),
            ignored: Vec::new(),
            left_out: Vec::new(),
            ranks: 1,
            expert_ranks: 1,
            issues: Vec::new(),
            remote: None,
            in_memory: false,
        }
    }

    /// Creates a checkpoint with a config.json and no tensors, as the template of [`Checkpoint::in_memory`]
    /// for a new model.
    pub fn blank(config: Value) -> Checkpoint {
        Checkpoint {
            metadata: vec![("format".into(), "pt".into())],
            config: Some(config),
            sidecars: vec!["config.json".into()],
            in_memory: true,
            ..Checkpoint::empty(Path::new(""))
        }
    }

    /// Creates a checkpoint of tensors in memory that takes config, metadata and other files from `like`, and
    /// those of its tensors that `carried` names.
    pub fn in_memory(like: &Checkpoint, tensors: Vec<MemoryTensor>, carried: &[&str]) -> Result<Checkpoint> {
        let mut checkpoint = like.without_tensors();
        for tensor in tensors {
            let MemoryTensor { name, dtype, shape, data } = tensor;
            let expected = header::elements(&shape).and_then(|elements| dtype.bytes_for(elements));
            let bytes = data.len() as u64;
            if expected != Some(bytes) {
                let problem = format!("data of {bytes} bytes does not match {dtype} of shape {shape:?}");
                return Err(Error::tensor(name, problem));
            }
            let path = like.root.join(format!("{name} (in memory)"));
            let file = checkpoint.files.len();
            checkpoint.files.push(Arc::new(ShardFile::in_memory(&path, data)));
            checkpoint.tensors.push(StoredTensor { name, dtype, shape, file, begin: 0, bytes, rank: 0 });
        }
        let mut reopened: HashMap<usize, usize> = HashMap::new();
        for tensor in like.tensors.iter().filter(|t| t.rank == 0 && carried.contains(&t.name.as_str())) {
            let file = match reopened.get(&tensor.file) {
                Some(file) => *file,
                None => {
                    checkpoint.files.push(like.files[tensor.file].clone());
                    reopened.insert(tensor.file, checkpoint.files.len() - 1);
                    checkpoint.files.len() - 1
                }
            };
            checkpoint.tensors.push(StoredTensor { file, ..tensor.clone() });
        }
        Ok(checkpoint)
    }

    /// A checkpoint in memory with the same config, metadata and other files.
    fn without_tensors(&self) -> Checkpoint {
        Checkpoint {
            metadata: self.metadata.clone(),
            config: self.config.clone(),
            sidecars: self.sidecars.clone(),
            in_memory: true,
            ..Checkpoint::empty(&self.root)
        }
    }

    /// A checkpoint with the same tensors, of which some are then replaced by computed ones.
    pub(crate) fn derived(&self) -> Checkpoint {
        Checkpoint {
            files: self.files.clone(),
            tensors: self.tensors.clone(),
            ranks: self.ranks,
            expert_ranks: self.expert_ranks,
            remote: self.remote.clone(),
            ..self.without_tensors()
        }
    }

    /// Reads elements of a tensor that [`cast::convert`] takes to F32.
    pub(crate) fn read_f32(
        &self,
        tensor: &StoredTensor,
        elements: &Range<u64>,
        out: &mut Buffer,
        scratch: &mut Buffer,
    ) -> Result<()> {
        let (width, count) = (tensor.dtype.bytes().unwrap_or(1), elements.end - elements.start);
        let stored = scratch.resize((count * width) as usize);
        self.files[tensor.file].read_at(stored, tensor.begin + elements.start * width)?;
        cast::convert(stored, tensor.dtype, out.resize(count as usize * 4), Dtype::F32);
        Ok(())
    }

    /// Adds all tensors of a safetensors file.
    pub fn add_tensors_of(&mut self, path: &Path) -> Result<()> {
        let (shard, header) = open_shard(path)?;
        let file = self.files.len();
        self.files.push(Arc::new(shard));
        for TensorInfo { name, dtype, shape, begin, bytes } in header.tensors {
            self.tensors.push(StoredTensor { name, dtype, shape, file, begin, bytes, rank: 0 });
        }
        Ok(())
    }

    /// Opens `path` like [`Checkpoint::open`]; disagreements between index and shards are an error.
    pub fn open_consistent(path: &Path) -> Result<Checkpoint> {
        let checkpoint = Checkpoint::open(path)?;
        if checkpoint.issues.is_empty() {
            Ok(checkpoint)
        } else {
            Err(Error::Inconsistent { root: path.into(), issues: checkpoint.issues })
        }
    }

    /// Returns true if the checkpoint was opened as a single file, not as a folder.
    pub fn is_single_file(&self) -> bool {
        self.files.first().is_some_and(|file| file.path == self.root)
    }

    /// Returns true if the checkpoint is not that of a folder; [`Checkpoint::config`] then takes precedence
    /// over config.json on disk.
    pub(crate) fn is_in_memory(&self) -> bool {
        self.in_memory
    }

    /// Returns the root and every file on disk; a file may be a link to elsewhere.
    pub fn paths(&self) -> Vec<PathBuf> {
        if self.root.as_os_str().is_empty() || is_address(&self.root) {
            return Vec::new();
        }
        // A config.json by Megatron's arguments is not on disk.
        let sidecars = self.sidecars.iter().map(|name| self.root.join(name));
        let sidecars = sidecars.filter(|path| !matches!(look_at(path), Ok(None)));
        let files = self.files.iter().filter(|f| f.handle().is_some()).map(|f| f.path.clone());
        std::iter::once(self.root.clone()).chain(files).chain(sidecars).collect()
    }

    /// Returns the number of bytes of all tensors.
    pub(crate) fn tensor_bytes(&self) -> u64 {
        self.tensors.iter().map(|t| t.bytes).sum()
    }

    /// Returns the number of bytes of the other files.
    pub(crate) fn sidecar_bytes(&self) -> Result<u64> {
        let found = self.sidecars.iter().map(|name| look_at(&self.root.join(name)));
        found.map(|found| Ok(found?.map_or(0, |file| file.len()))).sum()
    }

    /// Returns the architecture by config.json, or by the tensors if the table lacks what config.json names.
    pub fn architecture(&self, registry: &Registry) -> Result<Architecture> {
        let tensors = self.tensors.iter().map(|t| Tensor { name: &t.name, elements: t.elements() });
        let tensors: Vec<Tensor<'_>> = tensors.collect();
        let Some(config) = &self.config else {
            let mut found = Architecture::from_tensors(&tensors, &registry.families);
            if let Some(name) = self.metadata_value(ballast_gguf::ARCHITECTURE) {
                (found.name, found.source) = (Some(name.into()), ballast_gguf::ARCHITECTURE);
            }
            return Ok(found);
        };
        Architecture::of(config, &tensors, &registry.families).ok_or_else(|| Error::Config {
            file: self.config_path(),
            problem: "no `architectures` and no `model_type`: the tensors that must be f32 are unknown; add \
                      \"architectures\": [...] as published with the model"
                .into(),
        })
    }

    /// Returns the architecture, and the policy reduced to the rules of this checkpoint.
    pub fn contract(&self, registry: &Registry, policy: &Policy) -> Result<(Architecture, Policy)> {
        let architecture = self.architecture(registry)?;
        let policy = policy.for_model(&architecture, self.tensors.iter().map(|t| t.name.as_str()));
        Ok((architecture, policy))
    }

    /// Returns the path of a file as a report names it: inside the checkpoint, or its own name.
    pub fn shown_path(&self, path: &Path) -> String {
        let inside = path.strip_prefix(&self.root).ok().filter(|p| !p.as_os_str().is_empty());
        inside.unwrap_or(path.file_name().map_or(path, Path::new)).to_string_lossy().into_owned()
    }

    /// Returns the path of config.json, whether it exists or not.
    pub fn config_path(&self) -> PathBuf {
        if self.is_single_file() {
            self.root.with_file_name("config.json")
        } else {
            self.root.join("config.json")
        }
    }

    /// Returns a `__metadata__` value.
    pub fn metadata_value(&self, key: &str) -> Option<&str> {
        self.metadata.iter().find(|(k, _)| k == key).map(|(_, v)| v.as_str())
    }

    fn add_gguf(&mut self, path: &Path) -> Result<()> {
        let file = ShardFile::open(path)?;
        let header = ballast_gguf::header::Header::read(&file)?;
        self.files.push(Arc::new(file));
        self.metadata = header.entries.iter().map(|(key, value)| (key.clone(), value.to_string())).collect();
        for TensorInfo { name, dtype, shape, begin, bytes } in header.tensors {
            self.tensors.push(StoredTensor { name, dtype, shape, file: 0, begin, bytes, rank: 0 });
        }
        Ok(())
    }

    fn add_torch(&mut self, found: ballast_torch::TorchCheckpoint) -> Result<()> {
        (self.ranks, self.expert_ranks) = (found.ranks.len(), found.expert_ranks);
        if self.config.is_none() && found.config.is_some() {
            self.config = found.config;
            self.sidecars.push("config.json".into());
        }
        self.files = found.files;
        self.left_out = found.left_out;
        let opened = self.files.len();
        for (rank, tensors) in found.ranks.into_iter().enumerate() {
            for tensor in tensors {
                let stored = self.store(tensor, rank, opened)?;
                self.tensors.push(stored);
            }
        }
        for tensor in found.state {
            let stored = self.store(tensor, 0, opened)?;
            self.state.push(stored);
        }
        self.tensors.sort_by_key(|t| (t.file, t.begin));
        Ok(())
    }

    /// Returns a tensor by its place in one of the first `opened` files; one that is in several places becomes a file
    /// of its own.
    fn store(&mut self, tensor: ballast_torch::Found, rank: usize, opened: usize) -> Result<StoredTensor> {
        let ballast_torch::Found { name, dtype, shape, parts } = tensor;
        let width = dtype.bytes().unwrap_or(1);
        let assembly = Assembly::new(&name, &shape, width, parts)?;
        let bytes = assembly.bytes();
        // An array of numpy may be in memory, in none of the files.
        let plain = assembly.plain().and_then(|part| {
            let file = self.files[..opened].iter().position(|file| Arc::ptr_eq(file, &part.file))?;
            Some((file, part.begin))
        });
        let (file, begin) = plain.unwrap_or_else(|| {
            let path = assembly.paths().next().cloned().unwrap_or_default();
            self.files.push(Arc::new(ShardFile::from_source(&path, bytes, assembly)));
            (self.files.len() - 1, 0)
        });
        Ok(StoredTensor { name, dtype, shape, file, begin, bytes, rank })
    }

    fn add_folder(&mut self, folder: &dyn Folder, rank: usize) -> Result<()> {
        let names = folder.names()?;
        let of_kind = |suffix: &str| -> Vec<PathBuf> {
            names.iter().filter(|name| name.to_string_lossy().ends_with(suffix)).cloned().collect()
        };
        let (indexes, shards) = (of_kind(INDEX_SUFFIX), of_kind(".safetensors"));
        let (standard_index, standard_file) =
            (PathBuf::from("model.safetensors.index.json"), PathBuf::from("model.safetensors"));
        let first = self.files.len();
        let index = match indexes.as_slice() {
            [] => None,
            [index] => Some(index),
            _ if indexes.contains(&standard_index) => Some(&standard_index),
            several => {
                let names: Vec<_> = several.iter().map(|name| name.to_string_lossy()).collect();
                let problem = format!("several indexes ({}); give the path of one of them", names.join(", "));
                return Err(Error::NoCheckpoint { path: folder.path().into(), problem });
            }
        };
        if let Some(index) = index {
            self.add_indexed(folder, index, rank)?;
        } else if shards.contains(&standard_file) {
            self.add_files(folder.open(&[standard_file])?, rank);
        } else if shards.is_empty() {
            let problem = "no safetensors file and no index in this folder".into();
            return Err(Error::NoCheckpoint { path: folder.path().into(), problem });
        } else {
            let refused = |problem| Error::NoCheckpoint { path: folder.path().into(), problem };
            if let Some(problem) = missing_file(&shards) {
                return Err(refused(problem));
            }
            let before = self.tensors.len();
            self.add_files(folder.open(&shards)?, rank);
            let names = self.tensors[before..].iter().map(|t| t.name.as_str());
            if let Some(problem) = missing_layer(self.config.as_ref(), names) {
                return Err(refused(problem));
            }
        }
        let used: Vec<&OsStr> = self.files[first..].iter().filter_map(|file| file.path.file_name()).collect();
        let unused = shards.iter().filter(|shard| !used.contains(&shard.as_os_str()));
        let unused: Vec<PathBuf> = unused.map(|shard| folder.path().join(shard)).collect();
        self.ignored.extend(unused);
        Ok(())
    }

    fn add_indexed(&mut self, folder: &dyn Folder, index_name: &Path, rank: usize) -> Result<()> {
        let index_path = folder.path().join(index_name);
        let text = folder.read(index_name)?;
        let index = Index::parse(&index_path, without_mark(&text))?;
        let shards: Vec<PathBuf> = index.shards().iter().map(PathBuf::from).collect();
        let mut missing = Vec::new();
        for shard in &shards {
            if !folder.has(shard)? {
                missing.push(shard);
            }
        }
        if let Some(first) = missing.first() {
            let problem = format!(
                "shard {first:?} not found ({} of {} shards are missing)",
                missing.len(),
                shards.len()
            );
            return Err(Error::Index { file: index_path, problem });
        }
        let first = self.tensors.len();
        self.add_files(folder.open(&shards)?, rank);
        let shard_of = |t: &StoredTensor| {
            self.files[t.file].path.file_name().unwrap_or_default().to_string_lossy().into_owned()
        };
        let placed: HashMap<&str, &str> =
            index.weight_map.iter().map(|(t, s)| (t.as_str(), s.as_str())).collect();
        let mut found: HashMap<&str, Vec<String>> = HashMap::new();
        let mut issues = Vec::new();
        for t in &self.tensors[first..] {
            let shard = shard_of(t);
            if placed.get(t.name.as_str()) != Some(&shard.as_str()) {
                issues.push(IndexIssue::NotInIndex { tensor: t.name.clone(), shard: shard.clone() });
            }
            found.entry(&t.name).or_default().push(shard);
        }
        for (tensor, shard) in &index.weight_map {
            if !found.get(tensor.as_str()).is_some_and(|shards| shards.contains(shard)) {
                issues.push(IndexIssue::NotInShard { tensor: tensor.clone(), shard: shard.clone() });
            }
        }
        let actual = self.tensors[first..].iter().map(|t| t.bytes).sum();
        if let Some(stated) = index.total_size.filter(|stated| *stated != actual) {
            issues.push(IndexIssue::TotalSize { stated, actual });
        }
        self.issues.extend(issues);
        Ok(())
    }

    fn add_files(&mut self, opened: Vec<(ShardFile, Header)>, rank: usize) {
        let mut holders: HashMap<String, String> = HashMap::new();
        let mut known: HashSet<String> = self.metadata.iter().map(|(key, _)| key.clone()).collect();
        for (file, header) in opened {
            let shard = file.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let index = self.files.len();
            self.files.push(Arc::new(file));
            for (key, value) in header.metadata {
                if known.insert(key.clone()) {
                    self.metadata.push((key, value));
                }
            }
            for t in header.tensors {
                if let Some(other) = holders.insert(t.name.clone(), shard.clone()) {
                    let issue =
                        IndexIssue::Duplicate { tensor: t.name.clone(), shard: other, other: shard.clone() };
                    self.issues.push(issue);
                }
                let (name, dtype, shape, begin, bytes) = (t.name, t.dtype, t.shape, t.begin, t.bytes);
                self.tensors.push(StoredTensor { name, dtype, shape, file: index, begin, bytes, rank });
            }
        }
    }
}

/// Returns the files to copy with the weights: all but safetensors files, indexes, hidden files and weights
/// in other formats.
fn sidecars(folder: &dyn Folder) -> Result<Vec<PathBuf>> {
    let named = |name: &PathBuf| is_sidecar(&name.to_string_lossy());
    Ok(folder.names()?.into_iter().filter(named).collect())
}

fn read_config(path: &Path) -> Result<Option<Value>> {
    if look_at(path)?.is_none() {
        return Ok(None);
    }
    parse_config(path, &read_regular(path).map_err(Error::io(path, "read"))?).map(Some)
}

fn parse_config(path: &Path, text: &[u8]) -> Result<Value> {
    let fail = |problem| Error::Config { file: path.into(), problem };
    let config: Value =
        serde_json::from_slice(without_mark(text)).map_err(|e| fail(format!("not valid JSON: {e}")))?;
    if !config.is_object() {
        return Err(fail("not a JSON object".into()));
    }
    Ok(config)
}
