//! A model of several shards on a hub of our own, and settings that make tests fast.

use std::path::{Path, PathBuf};
use std::time::Duration;

use ballast_checkpoint::Checkpoint;
use ballast_checkpoint::synthetic::SyntheticModel;
use ballast_files::Error;
use ballast_files::ErrorKind;
use ballast_files::jobs::Silent;
use ballast_hub::{Hub, Limits, Part, Settings, Token};

use super::server::{FakeHub, Request, name_etag};

pub const TOKEN: &str = "hf_TopSecretTokenOfTheTest";
pub const ADDRESS: &str = "hf://org/model";

/// Opens the checkpoint at an address by a hub that has settings of its own.
pub trait Open {
    fn open(&self, address: &Path) -> Result<Checkpoint, Error>;
}

impl Open for Hub {
    fn open(&self, address: &Path) -> Result<Checkpoint, Error> {
        let (location, remote) = self.locate(address)?;
        Checkpoint::open_remote(location, remote)
    }
}

/// A model in several shards with a tokenizer, a server that has it, and an empty cache.
pub struct Stage {
    pub folder: tempfile::TempDir,
    pub hub: FakeHub,
}

impl Stage {
    pub fn new() -> Stage {
        Stage::with_etag(name_etag)
    }

    pub fn with_etag(etag: fn(&Path) -> String) -> Stage {
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path().join("model");
        SyntheticModel::tiny().write(&model, 150_000).unwrap();
        std::fs::write(model.join("tokenizer_config.json"), "{}").unwrap();
        std::fs::write(model.join("README.md"), "a model").unwrap();
        std::fs::write(model.join("pytorch_model.bin"), "weights in another format").unwrap();
        Stage { hub: FakeHub::start(&model, etag), folder }
    }

    pub fn model(&self) -> PathBuf {
        self.folder.path().join("model")
    }

    pub fn cache(&self) -> PathBuf {
        self.folder.path().join("cache")
    }

    pub fn settings(&self) -> Settings {
        settings(&self.hub.endpoint(), &self.cache())
    }

    pub fn hub(&self) -> Hub {
        Hub::new(self.settings()).unwrap()
    }

    pub fn open(&self) -> Result<Checkpoint, Error> {
        self.hub().open(Path::new(ADDRESS))
    }

    pub fn download(&self) -> Result<PathBuf, Error> {
        self.hub().download(Path::new(ADDRESS), Part::All, &Silent)
    }

    /// Files of the cache that a reader would take for whole, and incomplete ones.
    pub fn cached(&self) -> (Vec<PathBuf>, Vec<PathBuf>) {
        let all = files_below(&self.cache());
        let all = all.into_iter().filter(|path| !path.to_string_lossy().contains(".locks"));
        all.partition(|path| !path.to_string_lossy().ends_with(".incomplete"))
    }
}

pub fn settings(endpoint: &str, cache: &Path) -> Settings {
    Settings {
        endpoint: endpoint.into(),
        token: Token::new(TOKEN, "the test").unwrap(),
        cache: cache.into(),
        offline: false,
        proxy: false,
        certificates: None,
        limits: Limits {
            connect: Duration::from_secs(5),
            stall: Duration::from_millis(300),
            attempts: 3,
            first_wait: Duration::from_millis(1),
            longest_wait: Duration::from_secs(2),
            parallel: 4,
            range_bytes: 20_000,
        },
    }
}

pub fn files_below(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut files = Vec::new();
    for entry in entries.flatten() {
        match entry.path().is_dir() {
            true => files.extend(files_below(&entry.path())),
            false => files.push(entry.path()),
        }
    }
    files
}

/// Asserts that an error has words, and neither the token nor a signature.
pub fn assert_says(error: &Error, words: &[&str]) {
    let text = format!("{error} {error:?}");
    for word in words {
        assert!(text.contains(word), "{word:?} is not in {text}");
    }
    assert!(!text.contains(TOKEN) && !text.contains("signature"), "{text}");
    assert_eq!(error.kind(), ErrorKind::Input);
}

pub fn is_shard(request: &Request) -> bool {
    request.path.contains(".safetensors?")
}
