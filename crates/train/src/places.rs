//! Checks of paths: what a run writes must not overlap what it reads, and must not overwrite another run.
//!
//! They run before anything is created; otherwise a run could train to its end and have nowhere to write the
//! result.

use std::io;
use std::path::{Path, PathBuf};

use ballast_checkpoint::Checkpoint;
use ballast_files::staging::Staging;

use crate::config::TrainConfig;
use crate::error::{Error, Result};
use crate::state;

/// Files and folders that a run writes in its folder.
const WRITTEN: [&str; 10] = [
    "checkpoints",
    "model",
    "adapter",
    "metrics.jsonl",
    "report.html",
    "config.toml",
    "faults",
    "tensorboard",
    "tokenizer",
    ".lock",
];

/// Returns an error if a new run would write where it reads, or over another run.
pub fn check_new(config: &TrainConfig) -> Result {
    check_overlap(config)?;
    let out = &config.out;
    if !state::steps_in(&out.join("checkpoints"))?.is_empty() {
        return Err(Error::HasRun { out: out.clone() });
    }
    let path = result(config);
    if is_free(&path) { Ok(()) } else { Err(Error::Exists { path }) }
}

/// Returns an error if a resumed run would write where it reads, or could not replace its earlier result.
pub(crate) fn check_resumed(config: &TrainConfig) -> Result {
    check_overlap(config)?;
    // Created and dropped: it refuses now what it would refuse at the end of the run.
    let result = result(config);
    Staging::new(&result, false, !is_free(&result), &[])?;
    Ok(())
}

/// The finished model, or the finished adapters.
pub(crate) fn result(config: &TrainConfig) -> PathBuf {
    config.out.join(if config.lora.is_some() { "adapter" } else { "model" })
}

fn check_overlap(config: &TrainConfig) -> Result {
    let out = resolved(&config.out).map_err(Error::io(&config.out, "resolve"))?;
    let (m, data) = (&config.model, &config.data);
    let files = data.files.iter().map(|file| ("data.files", &file.path));
    let others = [
        ("data.validation", &data.validation),
        ("model.tokenizer", &m.tokenizer),
        ("model.config", &m.config),
        ("model.checkpoint", &m.checkpoint),
    ];
    let others = others.into_iter().filter_map(|(key, path)| Some((key, path.as_ref()?)));
    for (key, path) in files.chain(others) {
        // A checkpoint is its whole folder and the targets of its links; one that cannot be opened is
        // reported when it is loaded. In other folders, only files are read.
        let is_checkpoint = key == "model.checkpoint";
        let checkpoint = is_checkpoint.then(|| Checkpoint::open(path).ok()).flatten();
        let sources = checkpoint.map_or_else(|| vec![path.clone()], |checkpoint| checkpoint.paths());
        for source in sources.iter().filter_map(|source| source.canonicalize().ok()) {
            let overlaps = |name: &&str| {
                let written = out.join(name);
                source.starts_with(&written) || is_checkpoint && written.starts_with(&source)
            };
            if let Some(name) = WRITTEN.into_iter().find(overlaps) {
                return Err(Error::config(
                    key,
                    format!(
                        "`{key}` {} overlaps {}, which the run would write; set another `out`",
                        path.display(),
                        config.out.join(name).display()
                    ),
                ));
            }
        }
    }
    Ok(())
}

/// Returns true if nothing or an empty folder is at the path.
fn is_free(path: &Path) -> bool {
    match std::fs::symlink_metadata(path) {
        Err(error) => error.kind() == io::ErrorKind::NotFound,
        Ok(found) => {
            found.is_dir() && std::fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none())
        }
    }
}

/// The path without links and `..`; a part that does not exist yet stays as given.
fn resolved(path: &Path) -> io::Result<PathBuf> {
    match path.canonicalize() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => match (path.parent(), path.file_name()) {
            (Some(parent), Some(name)) if parent.as_os_str().is_empty() => {
                Ok(Path::new(".").canonicalize()?.join(name))
            }
            (Some(parent), Some(name)) => Ok(resolved(parent)?.join(name)),
            _ => Err(error),
        },
        result => result,
    }
}
