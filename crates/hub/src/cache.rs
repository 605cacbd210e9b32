//! The local cache, in the hub's own layout, which its other tools read and write too.
//!
//! ```text
//! models--ORG--NAME/refs/REVISION            the commit of a branch or tag
//! models--ORG--NAME/blobs/ETAG               content; ETAG.incomplete while it is downloaded
//! models--ORG--NAME/snapshots/COMMIT/PATH    a link to the content
//! .locks/models--ORG--NAME/ETAG.lock         held during a download
//! ```

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use ballast_files::index::{INDEX_SUFFIX, Index};
use ballast_files::regular::{read_regular, read_regular_text};
use ballast_files::staging::create_folders;
use ballast_files::{Disk, Error, Folder, Result};

use crate::address::is_commit;

/// The part of the cache that belongs to a repository.
#[derive(Clone, Debug)]
pub(super) struct Cache {
    root: PathBuf,
    /// Name of the repository's folder.
    name: String,
}

impl Cache {
    pub(super) fn new(root: &Path, repo: &str) -> Cache {
        Cache { root: root.into(), name: format!("models--{}", repo.replace('/', "--")) }
    }

    pub(super) fn snapshot(&self, commit: &str) -> PathBuf {
        self.folder().join("snapshots").join(commit)
    }

    pub(super) fn blob(&self, key: &str) -> PathBuf {
        self.folder().join("blobs").join(key)
    }

    fn folder(&self) -> PathBuf {
        self.root.join(&self.name)
    }

    /// Returns the commit that a revision had when it was last resolved.
    pub(super) fn commit_of(&self, revision: &str) -> Option<String> {
        if is_commit(revision) {
            return Some(revision.to_string());
        }
        let text = read_regular_text(&self.folder().join("refs").join(revision)).ok()?;
        Some(text.trim().to_string()).filter(|commit| is_commit(commit))
    }

    /// Records the commit of a revision.
    pub(super) fn set_commit(&self, revision: &str, commit: &str) -> Result<()> {
        if is_commit(revision) || self.commit_of(revision).as_deref() == Some(commit) {
            return Ok(());
        }
        let path = self.folder().join("refs").join(revision);
        create_folder_of(&path)?;
        // Threads of one process would share the name of the staged file.
        let _lock = self.lock("refs")?;
        let staged = path.with_file_name(format!(".{commit}.{}", std::process::id()));
        let written = File::create(&staged).and_then(|mut file| file.write_all(commit.as_bytes()));
        written.and_then(|()| fs::rename(&staged, &path)).map_err(Error::io(&path, "write"))
    }

    /// Waits for the lock of a file's content, which other tools take too. It ends when the file is dropped.
    pub(super) fn lock(&self, key: &str) -> Result<File> {
        let path = self.root.join(".locks").join(&self.name).join(format!("{key}.lock"));
        create_folder_of(&path)?;
        let open = File::options().create(true).write(true).truncate(false).open(&path);
        let file = open.map_err(Error::io(&path, "open"))?;
        file.lock().map_err(Error::io(&path, "lock"))?;
        Ok(file)
    }

    /// Links a path of a snapshot to its content.
    pub(super) fn link(&self, commit: &str, path: &str, key: &str) -> Result<()> {
        let place = self.snapshot(commit).join(path);
        create_folder_of(&place)?;
        let up = "../".repeat(2 + path.matches('/').count());
        let target = format!("{up}blobs/{key}");
        match std::os::unix::fs::symlink(&target, &place) {
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists && !place.exists() => {
                // A link to content that was removed.
                fs::remove_file(&place).and_then(|()| std::os::unix::fs::symlink(&target, &place))
            }
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
            linked => linked,
        }
        .map_err(Error::io(&place, "link"))
    }

    /// Returns the folder or file of a snapshot if it has all weights: the file itself, every shard of the
    /// index, or model.safetensors. Shards without their index may be a part of them only. Nor is a folder
    /// complete that has a link to content that was removed.
    pub(super) fn complete(&self, commit: &str, path: &str) -> Option<PathBuf> {
        let place = if path.is_empty() { self.snapshot(commit) } else { self.snapshot(commit).join(path) };
        if place.is_file() {
            let is_index = path.ends_with(INDEX_SUFFIX);
            return (!is_index || has_shards(&place)).then_some(place);
        }
        let index = place.join("model.safetensors.index.json");
        let weights =
            if index.is_file() { has_shards(&index) } else { place.join("model.safetensors").is_file() };
        let all = weights && place.join("config.json").is_file() && Disk(&place).names().is_ok();
        all.then_some(place)
    }

    /// Returns the folder of a snapshot if it has a config.json.
    pub(super) fn beside_weights(&self, commit: &str, path: &str) -> Option<PathBuf> {
        let place = self.snapshot(commit).join(path);
        place.join("config.json").is_file().then_some(place)
    }
}

/// Returns true if every shard of an index is beside it.
fn has_shards(index: &Path) -> bool {
    let parsed = read_regular(index).ok().and_then(|text| Index::parse(index, &text).ok());
    parsed.is_some_and(|parsed| parsed.shards().iter().all(|shard| index.with_file_name(shard).is_file()))
}

pub(super) fn create_folder_of(path: &Path) -> Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    create_folders(folder).map_err(Error::io(folder, "create"))
}
