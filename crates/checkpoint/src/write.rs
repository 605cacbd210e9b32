//! Writing a checkpoint: shards of bounded size, and an index.
//!
//! The header of a shard is known before its data, so the position of every byte is known, and all threads
//! write pieces in any order: unchanged bytes are copied inside the kernel, the rest is read, converted and
//! written in chunks. Tensors of a shard are sorted by descending width of their elements, then by name, as
//! the `safetensors` crate does: this keeps every tensor aligned.

use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ballast_contract::Dtype;
use ballast_files::cast::{self, Buffer};
use ballast_files::frame::{Checksum, Frame};
use ballast_files::header::{Header, TensorInfo, check_name};
use ballast_files::index::Index;
use ballast_files::jobs::{self, CHUNK_BYTES, Workspace};
use ballast_files::ranks::rank_folder;
use ballast_files::{Error, Result, ShardFile};
use rayon::prelude::*;

use crate::open::Checkpoint;
use crate::view::View;

/// Default size of a shard in bytes.
pub const DEFAULT_SHARD_BYTES: u64 = 5_000_000_000;

/// Number of bytes of one in-kernel copy: large enough for low overhead, small enough to balance threads.
const COPY_BYTES: u64 = 16 << 20;

/// A tensor to write.
#[derive(Clone, Debug)]
pub struct Output {
    /// Source of the elements.
    pub view: View,
    /// dtype in the file.
    pub dtype: Dtype,
}

impl Output {
    /// Returns the number of bytes in the file.
    pub fn bytes(&self) -> u64 {
        if self.dtype == self.view.dtype {
            self.view.bytes()
        } else {
            self.dtype.bytes_for(self.view.elements()).expect("a cast is between whole-byte types")
        }
    }

    /// Returns the description of the tensor in a file whose data has it from byte `begin` on.
    pub(crate) fn info(&self, begin: u64) -> TensorInfo {
        let (name, shape) = (self.view.name.clone(), self.view.shape.clone());
        TensorInfo { name, dtype: self.dtype, shape, begin, bytes: self.bytes() }
    }
}

/// One file to write.
pub(crate) struct Shard {
    pub(crate) path: PathBuf,
    pub(crate) frame: Frame,
    pub(crate) outputs: Vec<Output>,
}

/// The plan of a write: the position of every byte.
pub struct WritePlan {
    shards: Vec<Shard>,
    /// Whole files by path: indexes, metadata.
    files: Vec<(PathBuf, Vec<u8>)>,
    /// Number of bytes of all tensors.
    pub tensor_bytes: u64,
}

impl WritePlan {
    /// Plans the files in `folder` (or the single file `single_file` in it) for these tensors, by rank, with
    /// `expert_ranks` for each tensor-parallel rank.
    pub fn new(
        folder: &Path,
        single_file: Option<&str>,
        ranks: Vec<Vec<Output>>,
        expert_ranks: usize,
        metadata: &[(String, String)],
        max_shard_bytes: u64,
    ) -> Result<WritePlan> {
        let mut plan = WritePlan { shards: Vec::new(), files: Vec::new(), tensor_bytes: 0 };
        let rank_count = ranks.len();
        for (rank, outputs) in ranks.into_iter().enumerate() {
            let folder = match rank_count {
                1 => folder.to_path_buf(),
                _ => folder.join(rank_folder(rank, expert_ranks)),
            };
            let total: u64 = outputs.iter().map(Output::bytes).sum();
            outputs.iter().try_for_each(|output| check_name(&output.view.name))?;
            let mut names = std::collections::HashSet::new();
            if let Some(twice) = outputs.iter().find(|o| !names.insert(&o.view.name)) {
                return Err(Error::tensor(
                    &twice.view.name,
                    "two tensors would have this name in the destination",
                ));
            }
            let limit = if single_file.is_some() { u64::MAX } else { max_shard_bytes };
            let groups = group(outputs, limit);
            let count = groups.len();
            let mut weight_map = Vec::new();
            for (i, outputs) in groups.into_iter().enumerate() {
                let name = match single_file {
                    Some(name) => name.to_string(),
                    None if count == 1 => "model.safetensors".to_string(),
                    None => format!("model-{:05}-of-{count:05}.safetensors", i + 1),
                };
                weight_map.extend(outputs.iter().map(|o| (o.view.name.clone(), name.clone())));
                plan.shards.push(shard(folder.join(&name), outputs, metadata)?);
            }
            if count > 1 {
                weight_map.sort();
                let index = Index { total_size: Some(total), weight_map };
                plan.files.push((folder.join("model.safetensors.index.json"), index.to_text().into()));
            }
            plan.tensor_bytes += total;
        }
        Ok(plan)
    }

    /// Plans one file with a given header, after which every tensor starts at a multiple of `alignment`.
    pub(crate) fn single(path: PathBuf, header: Vec<u8>, outputs: Vec<Output>, alignment: u64) -> WritePlan {
        let tensor_bytes = outputs.iter().map(Output::bytes).sum();
        let frame = Frame::aligned(header, outputs.iter().map(Output::bytes), alignment);
        let shards = vec![Shard { path, frame, outputs }];
        WritePlan { shards, files: Vec::new(), tensor_bytes }
    }

    /// Plans these files, and `files` with their content.
    pub(crate) fn of_shards(shards: Vec<Shard>, files: Vec<(PathBuf, Vec<u8>)>) -> WritePlan {
        let tensor_bytes = shards.iter().flat_map(|shard| &shard.outputs).map(Output::bytes).sum();
        WritePlan { shards, files, tensor_bytes }
    }

    /// Returns the number of files with tensors.
    pub fn file_count(&self) -> usize {
        self.shards.len()
    }

    /// Returns the number of bytes of all files, with headers and indexes.
    pub fn file_bytes(&self) -> u64 {
        let shards: u64 = self.shards.iter().map(|shard| shard.frame.bytes).sum();
        shards + self.files.iter().map(|(_, content)| content.len() as u64).sum::<u64>()
    }

    /// Creates all files in their full size, with headers and indexes but without data.
    pub(crate) fn create(&self) -> Result<Vec<File>> {
        let create = |shard: &Shard| {
            let folder = shard.path.parent().expect("a shard lies in a folder");
            fs::create_dir_all(folder).map_err(Error::io(folder, "create"))?;
            let file = File::options()
                .read(true)
                .write(true)
                .create_new(true)
                .open(&shard.path)
                .map_err(Error::io(&shard.path, "create"))?;
            file.set_len(shard.frame.bytes).map_err(Error::io(&shard.path, "size"))?;
            for (at, bytes) in &shard.frame.literals {
                file.write_all_at(bytes, *at).map_err(Error::io(&shard.path, "write"))?;
            }
            Ok(file)
        };
        let files = self.shards.iter().map(create).collect::<Result<_>>()?;
        for (path, content) in &self.files {
            fs::write(path, content).map_err(Error::io(path, "write"))?;
            File::open(path).and_then(|f| f.sync_all()).map_err(Error::io(path, "flush"))?;
        }
        Ok(files)
    }

    /// Writes the checksums of a shard, whose data is written.
    pub(crate) fn seal(&self, shard: usize, file: &File) -> Result<()> {
        let Shard { path, frame, .. } = &self.shards[shard];
        frame.checksums.par_iter().try_for_each(|Checksum { data, places }| {
            let mut hasher = crc32fast::Hasher::new();
            let mut buffer = Buffer::default();
            for piece in jobs::pieces(data.end - data.start, 1, CHUNK_BYTES) {
                let bytes = buffer.resize((piece.end - piece.start) as usize);
                file.read_exact_at(bytes, data.start + piece.start).map_err(Error::io(path, "read back"))?;
                hasher.update(bytes);
            }
            let checksum = hasher.finalize().to_le_bytes();
            places
                .iter()
                .try_for_each(|at| file.write_all_at(&checksum, *at).map_err(Error::io(path, "write")))
        })
    }

    /// Returns the path of shard `shard`.
    pub(crate) fn shard_path(&self, shard: usize) -> &Path {
        &self.shards[shard].path
    }

    /// Executes a job; `file` is the job's shard.
    pub(crate) fn do_job(&self, job: &Job, file: &File, workspace: &mut Workspace) -> Result<()> {
        let shard = &self.shards[job.shard];
        let write = |data: &[u8]| file.write_all_at(data, job.at).map_err(Error::io(&shard.path, "write"));
        let output = match &job.piece {
            Piece::Copy { source, file: index, from } => {
                let source = &source.files[*index];
                return copy(source, *from, file, &shard.path, job.at, job.bytes, &mut workspace.a);
            }
            Piece::Stream { output, range } => {
                let output = &shard.outputs[*output];
                output.view.read(range.clone(), &mut workspace.a, &mut workspace.scratch)?;
                output
            }
        };
        if output.dtype == output.view.dtype {
            return write(workspace.a.as_ref());
        }
        let target = workspace.b.resize(job.bytes as usize);
        let overflowed = cast::convert(workspace.a.as_ref(), output.view.dtype, target, output.dtype);
        if overflowed > 0 {
            let problem = format!(
                "values exceed the range of {} and would become infinite ({overflowed} or more); choose another dtype",
                output.dtype
            );
            return Err(Error::tensor(&output.view.name, problem));
        }
        write(target)
    }

    /// Returns the jobs that write the data of shard `index`.
    pub(crate) fn jobs(&self, index: usize) -> Vec<Job> {
        let shard = &self.shards[index];
        let mut jobs: Vec<Job> = Vec::new();
        let mut copies: Vec<Job> = Vec::new();
        for ((number, output), mut at) in
            shard.outputs.iter().enumerate().zip(shard.frame.positions.iter().copied())
        {
            let runs = if output.dtype == output.view.dtype { output.view.plain_runs() } else { None };
            if let Some(runs) = runs {
                for run in runs {
                    let bytes = run.bytes.end - run.bytes.start;
                    let piece = Piece::Copy { source: run.checkpoint, file: run.file, from: run.bytes.start };
                    push_copy(&mut copies, Job { shard: index, at, bytes, piece });
                    at += bytes;
                }
                continue;
            }
            // Units of the view and bytes of the file that belong together; a chunk has whole blocks.
            let (units, stored) = match output.dtype.block() {
                Some(block) if output.dtype != output.view.dtype => block,
                _ => (1, output.dtype.bytes().unwrap_or(1)),
            };
            let widest = stored.max(output.view.unit_bytes() * units);
            for range in jobs::pieces(output.view.units() / units, widest, CHUNK_BYTES) {
                let bytes = (range.end - range.start) * stored;
                let at = at + range.start * stored;
                let range = range.start * units..range.end * units;
                jobs.push(Job { shard: index, at, bytes, piece: Piece::Stream { output: number, range } });
            }
        }
        jobs.extend(copies.into_iter().flat_map(divided));
        jobs
    }
}

/// Groups tensors into shards, in the given order; a shard stays below the limit unless one tensor exceeds
/// it.
pub(crate) fn group(outputs: Vec<Output>, limit: u64) -> Vec<Vec<Output>> {
    let mut groups: Vec<Vec<Output>> = vec![Vec::new()];
    let mut bytes = 0u64;
    for output in outputs {
        let size = output.bytes();
        if bytes > 0 && bytes.saturating_add(size) > limit {
            groups.push(Vec::new());
            bytes = 0;
        }
        bytes += size;
        groups.last_mut().expect("never empty").push(output);
    }
    groups
}

fn shard(path: PathBuf, mut outputs: Vec<Output>, metadata: &[(String, String)]) -> Result<Shard> {
    outputs.sort_by(|a, b| b.dtype.bits().cmp(&a.dtype.bits()).then_with(|| a.view.name.cmp(&b.view.name)));
    let mut begin = 0;
    let mut header = Header { metadata: metadata.to_vec(), tensors: Vec::new() };
    for output in &outputs {
        header.tensors.push(output.info(begin));
        begin += output.bytes();
    }
    let frame = Frame::aligned(header.to_bytes(), outputs.iter().map(Output::bytes), 1);
    Ok(Shard { path, frame, outputs })
}

/// A piece of a shard's data.
pub(crate) struct Job {
    pub(crate) shard: usize,
    /// First byte in the shard's file.
    at: u64,
    pub(crate) bytes: u64,
    piece: Piece,
}

enum Piece {
    /// Bytes of a source file from `from` on, unchanged.
    Copy { source: Arc<Checkpoint>, file: usize, from: u64 },
    /// Units of an output, read and converted if needed.
    Stream { output: usize, range: Range<u64> },
}

/// Adds a copy; merges it with the previous one if both are adjacent in source and destination.
fn push_copy(copies: &mut Vec<Job>, job: Job) {
    if let Some(last) = copies.last_mut()
        && let (Piece::Copy { source: a, file: fa, from: x }, Piece::Copy { source: b, file: fb, from: y }) =
            (&last.piece, &job.piece)
        && Arc::ptr_eq(a, b)
        && fa == fb
        && x + last.bytes == *y
        && last.at + last.bytes == job.at
    {
        last.bytes += job.bytes;
        return;
    }
    copies.push(job);
}

/// Divides a copy into pieces of bounded size.
fn divided(job: Job) -> impl Iterator<Item = Job> {
    let Piece::Copy { source, file, from } = job.piece else { unreachable!("only copies are divided") };
    jobs::pieces(job.bytes, 1, COPY_BYTES).map(move |range| Job {
        shard: job.shard,
        at: job.at + range.start,
        bytes: range.end - range.start,
        piece: Piece::Copy { source: source.clone(), file, from: from + range.start },
    })
}

/// Copies `bytes` bytes of `source` from `from` on to byte `at` of `target`.
fn copy(
    source: &ShardFile,
    mut from: u64,
    target: &File,
    path: &Path,
    mut at: u64,
    bytes: u64,
    buffer: &mut Buffer,
) -> Result<()> {
    let end = from + bytes;
    #[cfg(target_os = "linux")]
    while let (true, Some(handle)) = (from < end, source.handle()) {
        let (mut read, mut written) = (from, at);
        let count = usize::try_from(end - from).unwrap_or(usize::MAX);
        match rustix::fs::copy_file_range(handle, Some(&mut read), target, Some(&mut written), count) {
            // Nothing copied: the source ended early (the loop below reports that), or the file systems do
            // not support it.
            Ok(0) => break,
            Ok(copied) => (from, at) = (from + copied as u64, at + copied as u64),
            Err(rustix::io::Errno::INTR) => {}
            Err(e) if e == rustix::io::Errno::NOSPC => return Err(Error::io(path, "write")(e.into())),
            Err(_) => break,
        }
    }
    while from < end {
        let piece = buffer.resize((end - from).min(CHUNK_BYTES) as usize);
        source.read_at(piece, from)?;
        target.write_all_at(piece, at).map_err(Error::io(path, "write"))?;
        (from, at) = (from + piece.len() as u64, at + piece.len() as u64);
    }
    Ok(())
}
