//! Checkpoints in torch's own formats, opened as any other: nothing in them is executed.
//!
//! | path | format |
//! |---|---|
//! | `*.pt`, `*.pth`, `*.bin`, `*.ckpt` | one file of `torch.save` |
//! | folder with `.metadata` | torch.distributed.checkpoint, or Megatron's `torch_dist` |
//! | folder with `mp_rank_TT[_EEE]/model_optim_rng.pt` | Megatron's legacy format, by tensor- and expert-parallel rank |
//! | folder with `latest_checkpointed_iteration.txt` | its iteration, in one of the two |
//! | folder with `pytorch_model*.bin` | Hugging Face, before safetensors |
//! | folder of safetensors with `DCP_SHARDING_INFO` | NeMo Automodel, tensors in pieces |
//!
//! - Pickles. [`pickle`]: the data. `machine.rs`: the machine that reads it. `globals.rs`: names that it may have.
//! - Files of `torch.save`. `archive.rs`: the zip around a pickle; `legacy.rs`: the form before torch 1.6. `saved.rs`:
//!   one tensor; `numpy.rs`: an array; `contents.rs`: all of them. `division.rs`: which of them are the model.
//! - `distributed.rs`: tensors in parts, over many files. `pieces.rs`: the same in safetensors
//!   files. `megatron.rs`: Megatron's names and arguments.
//! - Writing. `export.rs`: the files of each format. `pickler.rs`: pickles. `zipper.rs`: zip files.

#![forbid(unsafe_code)]

mod archive;
mod contents;
mod distributed;
mod division;
pub mod export;
mod globals;
mod legacy;
mod machine;
mod megatron;
mod numpy;
pub mod pickle;
mod pickler;
mod pieces;
mod saved;
mod zipper;

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ballast_contract::Dtype;
use serde_json::Value;

use self::archive::{Archive, failure};
use self::contents::{Contents, contents};
pub use self::distributed::METADATA;
use self::division::{Divided, Item, divide};
pub use self::megatron::PACKED;
use self::pickle::Pickle;
pub use self::saved::Found;
use ballast_files::assembly::Assembly;
use ballast_files::left_out::{self, LeftOut};
use ballast_files::ranks::{RELEASE, RankFolders, TRACKER, is_rank_folder};
use ballast_files::regular::read_regular_text;
use ballast_files::{Error, Result, ShardFile};

use self::saved::SavedPickle;

/// Tensors of a checkpoint in one of torch's formats.
#[derive(Default)]
#[non_exhaustive]
pub struct TorchCheckpoint {
    /// Tensors of the model, by rank.
    pub ranks: Vec<Vec<Found>>,
    /// Number of expert-parallel ranks for each tensor-parallel one.
    pub expert_ranks: usize,
    /// Tensors beside the model: optimizer state.
    pub state: Vec<Found>,
    /// Everything else that the files have.
    pub left_out: Vec<LeftOut>,
    /// config.json by the arguments that Megatron saves.
    pub config: Option<Value>,
    /// Files, each once.
    pub files: Vec<Arc<ShardFile>>,
}

/// The format of a path.
pub enum Format {
    /// Files of `torch.save` with one state dict together.
    Files(Vec<PathBuf>),
    /// A folder with `.metadata`.
    Distributed(PathBuf),
    /// A folder with files of `torch.save`, one for each rank.
    Ranks(PathBuf),
    /// Safetensors files with pieces of tensors.
    Pieces(Vec<PathBuf>),
}

/// Kind of tensors beside the model that are not supported.
const UNSUPPORTED: &str = "unsupported tensors";
/// File of a rank in Megatron's legacy format.
pub const RANK_FILE: &str = "model_optim_rng.pt";

/// Folder of a Megatron checkpoint's iteration, if `path` is the folder above it.
pub fn iteration(path: &Path) -> Result<Option<PathBuf>> {
    let tracker = path.join(TRACKER);
    if !tracker.is_file() || path.join(distributed::METADATA).is_file() {
        return Ok(None);
    }
    let text = read_regular_text(&tracker).map_err(Error::io(&tracker, "read"))?;
    let folder = match text.trim() {
        RELEASE => RELEASE.to_string(),
        number => match number.parse::<u64>() {
            Ok(number) => format!("iter_{number:07}"),
            Err(_) => {
                let problem = format!("expected an iteration or \"release\", got {:?}", text.trim());
                return Err(Error::Index { file: tracker, problem });
            }
        },
    };
    Ok(Some(path.join(folder)))
}

/// Returns the format of a path, or none if it is not one of torch's.
pub fn format_of(path: &Path) -> Option<Format> {
    if path.is_file() {
        let name = path.file_name()?.to_string_lossy().into_owned();
        let is_torch = [".pt", ".pth", ".bin", ".ckpt"].iter().any(|suffix| name.ends_with(suffix));
        return is_torch.then(|| Format::Files(vec![path.into()]));
    }
    if path.join(distributed::METADATA).is_file() {
        return Some(Format::Distributed(path.into()));
    }
    let mut names: Vec<String> =
        fs::read_dir(path).ok()?.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
    names.sort();
    if names.iter().any(|name| is_rank_folder(name) && path.join(name).join(RANK_FILE).is_file()) {
        return Some(Format::Ranks(path.into()));
    }
    let files = |wanted: &dyn Fn(&str) -> bool| -> Vec<PathBuf> {
        names.iter().filter(|name| wanted(name)).map(|name| path.join(name)).collect()
    };
    // A folder with safetensors files is read from them.
    let safetensors = files(&|name| name.ends_with(".safetensors"));
    if let Some(first) = safetensors.first() {
        return pieces::is_piece(first).then_some(Format::Pieces(safetensors));
    }
    let shards = files(&|name| name.starts_with("pytorch_model") && name.ends_with(".bin"));
    (!shards.is_empty()).then_some(Format::Files(shards))
}

/// Reads the descriptions of all tensors.
pub fn read(format: Format) -> Result<TorchCheckpoint> {
    let mut checkpoint = TorchCheckpoint { expert_ranks: 1, ..TorchCheckpoint::default() };
    match format {
        Format::Files(paths) => checkpoint.read_files(&paths)?,
        Format::Ranks(folder) => checkpoint.read_ranks(folder)?,
        Format::Pieces(paths) => checkpoint.read_pieces(&paths)?,
        Format::Distributed(folder) => checkpoint.read_distributed(&folder)?,
    }
    for tensors in &checkpoint.ranks {
        let mut names = HashSet::new();
        if let Some(twice) = tensors.iter().find(|tensor| !names.insert(&tensor.name)) {
            return Err(Error::tensor(
                &twice.name,
                "two tensors would have this name; rename one of their keys",
            ));
        }
    }
    Ok(checkpoint)
}

impl TorchCheckpoint {
    fn open(&mut self, path: &Path) -> Result<Arc<ShardFile>> {
        let file = Arc::new(ShardFile::open(path)?);
        self.files.push(file.clone());
        Ok(file)
    }

    /// Adds what a file has beside its model, which is returned.
    fn add(&mut self, saved: SavedFile) -> Vec<Found> {
        self.state.extend(saved.state);
        left_out::join(&mut self.left_out, saved.left_out);
        self.config = self.config.take().or(saved.config);
        saved.model
    }

    /// The files of one model.
    fn read_files(&mut self, paths: &[PathBuf]) -> Result<()> {
        let mut model = Vec::new();
        for path in paths {
            let saved = read_file(&self.open(path)?)?;
            model.extend(self.add(saved));
        }
        self.ranks.push(model);
        Ok(())
    }

    /// Megatron's folders, one for each rank.
    fn read_ranks(&mut self, folder: PathBuf) -> Result<()> {
        let Some(ranks) = RankFolders::in_folder(&folder)? else {
            let problem = "the folders of its ranks have disappeared".into();
            return Err(Error::NoCheckpoint { path: folder, problem });
        };
        self.expert_ranks = ranks.expert_ranks;
        for folder in ranks.folders {
            let file = self.open(&folder.join(RANK_FILE))?;
            let mut saved = read_file(&file)?;
            if let Some(problem) = saved.unsupported_ranks.take() {
                return Err(Error::NoCheckpoint { path: file.path.clone(), problem });
            }
            let model = self.add(saved);
            self.ranks.push(model);
        }
        Ok(())
    }

    /// Files of safetensors that have pieces of tensors.
    fn read_pieces(&mut self, paths: &[PathBuf]) -> Result<()> {
        let found = pieces::read(paths, &mut |file| {
            let file = Arc::new(file);
            self.files.push(file.clone());
            file
        })?;
        self.ranks.push(found);
        Ok(())
    }

    /// A folder of torch.distributed.checkpoint.
    fn read_distributed(&mut self, folder: &Path) -> Result<()> {
        let mut opened: HashMap<PathBuf, Arc<ShardFile>> = HashMap::new();
        let distributed::Tensors { items, left_out } = distributed::read(folder, &mut |path| {
            if let Some(file) = opened.get(path) {
                return Ok(file.clone());
            }
            let file = self.open(path)?;
            opened.insert(path.into(), file.clone());
            Ok(file)
        })?;
        let is_nested = items.iter().any(|item| !item.cuts.is_empty());
        let divided =
            divide(items).map_err(|problem| Error::NoCheckpoint { path: folder.into(), problem })?;
        let (model, beside) = (divided.model, divided.beside);
        let tensors = |items: Vec<Item>| items.into_iter().filter_map(|item| item.tensor.ok()).collect();
        let found = megatron::as_one_rank(tensors(model))?;
        let (state, model): (Vec<Found>, Vec<Found>) =
            found.into_iter().partition(|t| is_optimizer_state(&t.name));
        // What wraps a nested model is known by its keys.
        self.ranks.push(if is_nested { model } else { without_wrapper(model) });
        self.state = megatron::as_one_rank(tensors(beside))?;
        self.state.extend(state);
        self.left_out = left_out;
        let common = folder.join("common.pt");
        if common.is_file() {
            let (config, left_out) = read_common(&common)?;
            self.config = config;
            left_out::join(&mut self.left_out, left_out);
        }
        Ok(())
    }
}

fn is_optimizer_state(name: &str) -> bool {
    ["optimizer.", "optim.", "chained_0.", "chained_1."].iter().any(|prefix| name.starts_with(prefix))
}

/// Removes the key under which a whole model was saved: `model.model.layers...` and `model.lm_head...`.
fn without_wrapper(mut model: Vec<Found>) -> Vec<Found> {
    let inner = |name: &str| name.strip_prefix("model.").map(str::to_string);
    let is_wrapped = !model.is_empty()
        && model.iter().all(|t| inner(&t.name).is_some())
        && model.iter().any(|t| inner(&t.name).is_some_and(|name| name.starts_with("model.")));
    if is_wrapped {
        for tensor in &mut model {
            tensor.name = inner(&tensor.name).unwrap_or_default();
        }
    }
    model
}

/// Lists the tensors of a file of `torch.save` that is in memory: names, types and shapes.
pub fn list(path: &Path, bytes: Vec<u8>) -> Result<Vec<(String, Dtype, Vec<u64>)>> {
    let saved = read_file(&Arc::new(ShardFile::in_memory(path, bytes)))?;
    let described = |tensor: Found| {
        let Found { name, dtype, shape, parts } = tensor;
        Assembly::new(&name, &shape, dtype.bytes().unwrap_or(1), parts)?;
        Ok((name, dtype, shape))
    };
    saved.model.into_iter().chain(saved.state).map(described).collect()
}

/// Lists the tensors that the metadata of torch.distributed.checkpoint describes, all of whose files have this
/// content.
pub fn list_distributed(metadata: &[u8], content: Vec<u8>) -> Result<Vec<String>> {
    let folder = Path::new("folder");
    let file = Arc::new(ShardFile::in_memory(&folder.join("__0_0.distcp"), content));
    let tensors = distributed::parse(Path::new(".metadata"), metadata, folder, &mut |_| Ok(file.clone()))?;
    Ok(tensors.items.into_iter().map(|item| item.name).collect())
}

/// Content of one file of `torch.save`.
struct SavedFile {
    /// Tensors of the model.
    model: Vec<Found>,
    /// Tensors beside it.
    state: Vec<Found>,
    /// Values that are no tensors, and tensors beside the model that are not supported.
    left_out: Vec<LeftOut>,
    /// config.json by Megatron's arguments.
    config: Option<Value>,
    /// Why the file cannot be joined with those of other ranks, by Megatron's arguments.
    unsupported_ranks: Option<String>,
}

fn read_file(file: &Arc<ShardFile>) -> Result<SavedFile> {
    let archive = Archive::whole(file)?;
    let (bytes, begin) = archive.pickle()?;
    let pickle = Pickle::parse(&bytes, &file.path, begin)?;
    let saved = SavedPickle::new(&pickle, &archive, begin);
    let fail = |problem: String| failure(file, begin, problem);
    if pickle.entries(pickle.root()).is_none() {
        let problem = format!(
            "expected a dict of tensors (a state dict), got a {}; save a model by its state_dict()",
            left_out::shortened(&pickle.kind(pickle.root()))
        );
        return Err(fail(problem));
    }
    let Contents { items, mut left_out } = contents(&saved)?;
    let Divided { model, beside } = divide(items).map_err(fail)?;
    let supported = |item: Item| item.tensor.map_err(|reason| saved.error(&item.name, reason));
    let model = model.into_iter().map(supported).collect::<Result<Vec<Found>>>()?;
    let mut state = Vec::new();
    for item in beside {
        match item.tensor {
            Ok(tensor) => state.push(tensor),
            Err(_) => left_out::count(&mut left_out, UNSUPPORTED, || item.name),
        }
    }
    let config = megatron::config_from_args(&pickle);
    Ok(SavedFile { model, state, left_out, config, unsupported_ranks: megatron::unsupported_ranks(&pickle) })
}

/// Megatron's arguments in common.pt, as a config.json, and what else the file has.
fn read_common(path: &Path) -> Result<(Option<Value>, Vec<LeftOut>)> {
    let file = Arc::new(ShardFile::open(path)?);
    let archive = Archive::whole(&file)?;
    let (bytes, begin) = archive.pickle()?;
    let pickle = Pickle::parse(&bytes, &file.path, begin)?;
    let Contents { items, mut left_out } = contents(&SavedPickle::new(&pickle, &archive, begin))?;
    for item in items {
        left_out::count(&mut left_out, "tensors of common.pt", || item.name);
    }
    Ok((megatron::config_from_args(&pickle), left_out))
}

/// The examples of README.md, run as tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
