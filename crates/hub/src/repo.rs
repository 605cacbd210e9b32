//! Finds and downloads checkpoints by their address.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ballast_files::header::Header;
use ballast_files::index::{INDEX_SUFFIX, Index};
use ballast_files::jobs::{Observer, parallel};
use ballast_files::regular::read_regular;
use ballast_files::{Error, Folder, Result, ShardFile, is_sidecar, open_shard, read_header};
use serde_json::Value;

use crate::address::{Address, RepoAddress, Url, encode, is_commit, is_path};
use crate::cache::Cache;
use crate::client::{Client, Failure};
use crate::settings::Settings;
use crate::{Location, Part, Remote, RemoteFile, download};

/// Largest config.json, index or list of files.
const MOST_TEXT_BYTES: u64 = 64 << 20;

/// A hub, and a connection to it.
#[derive(Clone, Debug)]
pub struct Hub {
    client: Arc<Client>,
}

/// The commit of a revision.
enum Resolved {
    /// A commit and the files it has.
    Listed { commit: String, files: Vec<String> },
    /// A commit whose weights are in the cache, and a remark.
    Cached { commit: String, place: PathBuf, note: Option<String> },
}

impl Hub {
    /// Prepares the connection; makes no request.
    pub fn new(settings: Settings) -> Result<Hub> {
        Ok(Hub { client: Arc::new(Client::new(settings)?) })
    }

    /// Finds the checkpoint at an address; reads nothing of it but the list of its files.
    pub fn locate(&self, path: &Path) -> Result<(Location, Remote)> {
        match parse(path)? {
            Address::Repo(address) => self.locate_repo(&address),
            Address::Url(url) => self.locate_url(url),
        }
    }

    /// Downloads the checkpoint of a repository into the cache. Returns its folder or file there.
    pub fn download(&self, path: &Path, part: Part, observer: &dyn Observer) -> Result<PathBuf> {
        let address = match parse(path)? {
            Address::Repo(address) => address,
            Address::Url(url) => {
                let problem = "the cache holds models of a hub only; give hf://ORG/NAME, or download the \
                               files and give their local path"
                    .into();
                return Err(Error::Hub { address: url.to_string(), problem });
            }
        };
        let (commit, files) = match self.resolve(&address, Some(part))? {
            Resolved::Cached { place, .. } => return Ok(place),
            Resolved::Listed { commit, files } => (commit, files),
        };
        let cache = self.cache(&address);
        let at = address.at(&commit);
        let inner = self.inner(&at, &files)?;
        let folder = RepoFolder::new(self, &at, &inner.folder, &files, &cache);
        let mut names: Vec<PathBuf> =
            folder.names.iter().filter(|name| is_sidecar(&name.to_string_lossy())).cloned().collect();
        if part == Part::All {
            names.extend(folder.weights(inner.file.as_deref())?);
        }
        let paths: Vec<String> = names.iter().map(|name| folder.full(name)).collect();
        download::download(&self.client, &cache, &at, &paths, observer)?;
        cache.set_commit(address.revision(), &commit)?;
        Ok(match address.path.as_str() {
            "" => cache.snapshot(&commit),
            path => cache.snapshot(&commit).join(path),
        })
    }

    fn cache(&self, address: &RepoAddress) -> Cache {
        Cache::new(&self.client.settings.cache, &address.repo)
    }

    fn remote(&self, address: String, note: Option<String>) -> Remote {
        let (traffic, parallel) = (self.client.traffic.clone(), self.client.settings.limits.parallel);
        Remote { address, note, traffic, parallel }
    }

    fn locate_repo(&self, address: &RepoAddress) -> Result<(Location, Remote)> {
        match self.resolve(address, None)? {
            Resolved::Cached { commit, place, note } => {
                Ok((Location::Cached(place), self.remote(address.at(&commit).to_string(), note)))
            }
            Resolved::Listed { commit, files } => {
                let at = address.at(&commit);
                let inner = self.inner(&at, &files)?;
                let folder = RepoFolder::new(self, &at, &inner.folder, &files, &self.cache(address));
                let location =
                    Location::Server { folder: Box::new(folder), file: inner.file.map(PathBuf::from) };
                Ok((location, self.remote(at.to_string(), None)))
            }
        }
    }

    fn locate_url(&self, url: Url) -> Result<(Location, Remote)> {
        let fail = |problem: &str| Err(Error::Hub { address: url.to_string(), problem: problem.into() });
        if self.client.settings.offline {
            return fail("HF_HUB_OFFLINE is set");
        }
        let name = url.file_name().to_string();
        if !name.ends_with(".safetensors") && !name.ends_with(INDEX_SUFFIX) {
            return fail("not the URL of a safetensors file or its index; a model of a hub is hf://ORG/NAME");
        }
        let config = self.client.read_all(&url.beside("config.json"), MOST_TEXT_BYTES);
        let config = match config {
            Ok((text, _)) => Some(text),
            // A store answers 403 for a file that is not there if it may not be listed.
            Err(failure) if matches!(failure.status, Some(400..=404 | 410)) => None,
            Err(failure) => return Err(failure.error(&url.beside("config.json").to_string())),
        };
        let shown = url.to_string();
        let path = PathBuf::from(shown.rsplit_once('/').map_or(shown.as_str(), |(folder, _)| folder));
        let folder = UrlFolder { hub: self.clone(), url: url.clone(), path, config };
        let location = Location::Server { folder: Box::new(folder), file: Some(name.into()) };
        Ok((location, self.remote(shown, None)))
    }

    /// Finds the commit of a revision; `part` is what will be downloaded of it.
    fn resolve(&self, address: &RepoAddress, part: Option<Part>) -> Result<Resolved> {
        let (revision, cache) = (address.revision(), self.cache(address));
        let cached = |note: Option<String>| {
            let commit = cache.commit_of(revision)?;
            let place = match part {
                Some(Part::BesideWeights) => cache.beside_weights(&commit, &address.path)?,
                _ => cache.complete(&commit, &address.path)?,
            };
            Some(Resolved::Cached { commit, place, note })
        };
        if self.client.settings.offline {
            return cached(None).ok_or_else(|| Error::Hub {
                address: address.to_string(),
                problem: "HF_HUB_OFFLINE is set, and the cache does not have all of its files".into(),
            });
        }
        if is_commit(revision)
            && let Some(Resolved::Cached { commit, place, note }) = cached(None)
            && (part.is_none() || place.is_file() || place.join("tokenizer_config.json").is_file())
        {
            return Ok(Resolved::Cached { commit, place, note });
        }
        let listed = self.list(address);
        match listed {
            Err(failure) if failure.is_unreachable() => {
                let note = format!("the hub did not answer ({}); read from the cache", failure.problem);
                cached(Some(note)).ok_or_else(|| failure.error(&address.to_string()))
            }
            listed => listed.map_err(|failure| failure.error(&address.to_string())),
        }
    }

    /// Asks the hub for the commit of a revision and its files.
    fn list(&self, address: &RepoAddress) -> Result<Resolved, Failure> {
        let (repo, revision) = (&address.repo, encode(address.revision()).replace('/', "%2F"));
        let url = format!(
            "{}/api/models/{repo}/revision/{revision}?expand=sha&expand=siblings",
            self.client.settings.endpoint
        );
        let (text, _) =
            self.client.read_all(&Url::parse(&url).map_err(Failure::lasting)?, MOST_TEXT_BYTES)?;
        let (commit, files) = parse_listing(&text).map_err(Failure::lasting)?;
        if is_commit(address.revision()) && commit != address.revision() {
            let problem = format!("the hub answers with commit {commit}");
            return Err(Failure::lasting(problem));
        }
        Ok(Resolved::Listed { commit, files })
    }

    /// Finds the folder and the file that the path of an address names.
    fn inner(&self, address: &RepoAddress, files: &[String]) -> Result<Inner> {
        let path = &address.path;
        if files.contains(path) {
            let (folder, file) = path.rsplit_once('/').unwrap_or(("", path));
            return Ok(Inner { folder: folder.into(), file: Some(file.into()) });
        }
        let inside = format!("{path}/");
        if !path.is_empty() && !files.iter().any(|file| file.starts_with(&inside)) {
            let problem = "not found in the repository".into();
            return Err(Error::Hub { address: address.to_string(), problem });
        }
        Ok(Inner { folder: path.clone(), file: None })
    }
}

/// Reads a hub's description of a revision: the commit and the names of its files, sorted. A name that leads out of
/// the repository is an error: leaving it out would hide that the hub is not to be trusted.
pub fn parse_listing(text: &[u8]) -> Result<(String, Vec<String>), String> {
    let unclear = || "the hub's list of files is not as expected".to_string();
    let listing: Value = serde_json::from_slice(text).map_err(|_| unclear())?;
    let commit = listing["sha"].as_str().filter(|commit| is_commit(commit)).ok_or_else(unclear)?;
    let siblings = listing["siblings"].as_array().ok_or_else(unclear)?;
    let name_of = |sibling: &Value| {
        let name = sibling["rfilename"].as_str().ok_or_else(unclear)?;
        let problem = || format!("the hub lists a file {name:?}, which is no path inside a repository");
        is_path(name).then(|| name.to_string()).ok_or_else(problem)
    };
    let mut files = siblings.iter().map(name_of).collect::<Result<Vec<String>, String>>()?;
    files.sort();
    Ok((commit.to_string(), files))
}

/// A folder of a repository, and a file in it if the address names one.
struct Inner {
    folder: String,
    file: Option<String>,
}

fn parse(path: &Path) -> Result<Address> {
    let text = path.to_str().ok_or_else(|| Error::Refused(format!("{path:?}: the address is not UTF-8")))?;
    Address::parse(text)
}

/// A folder of a repository at a commit. Files that are in the cache are read there.
struct RepoFolder {
    hub: Hub,
    repo: String,
    commit: String,
    /// Path inside the repository; empty for its root.
    inside: String,
    /// Address of the folder.
    path: PathBuf,
    names: Vec<PathBuf>,
    /// The same folder in the cache, which may have some of the files.
    cached: PathBuf,
}

impl RepoFolder {
    fn new(hub: &Hub, address: &RepoAddress, inside: &str, files: &[String], cache: &Cache) -> RepoFolder {
        let commit = address.revision().to_string();
        let prefix = if inside.is_empty() { String::new() } else { format!("{inside}/") };
        let names = files.iter().filter_map(|file| file.strip_prefix(&prefix));
        let snapshot = cache.snapshot(&commit);
        RepoFolder {
            hub: hub.clone(),
            repo: address.repo.clone(),
            inside: inside.into(),
            path: RepoAddress { path: inside.into(), ..address.clone() }.to_string().into(),
            names: names.filter(|name| !name.contains('/')).map(PathBuf::from).collect(),
            cached: if inside.is_empty() { snapshot } else { snapshot.join(inside) },
            commit,
        }
    }

    /// Returns the path of a file in the repository.
    fn full(&self, name: &Path) -> String {
        match self.inside.as_str() {
            "" => name.to_string_lossy().into_owned(),
            inside => format!("{inside}/{}", name.to_string_lossy()),
        }
    }

    /// Returns the weights: `file` and, if it is an index, its shards; else those of the folder.
    fn weights(&self, file: Option<&str>) -> Result<Vec<PathBuf>> {
        let standard = ["model.safetensors.index.json", "model.safetensors"];
        let has = |name: &&str| self.names.iter().any(|known| known == Path::new(name));
        match file.or_else(|| standard.into_iter().find(has)) {
            Some(index) if index.ends_with(INDEX_SUFFIX) => {
                let path = self.path.join(index);
                let parsed = Index::parse(&path, &self.read(Path::new(index))?)?;
                let shards = parsed.shards().iter().map(PathBuf::from).collect();
                Ok([vec![PathBuf::from(index)], shards].concat())
            }
            Some(file) => Ok(vec![file.into()]),
            None => {
                let is_shard = |name: &&PathBuf| name.extension().is_some_and(|e| e == "safetensors");
                let all: Vec<PathBuf> = self.names.iter().filter(is_shard).cloned().collect();
                if all.is_empty() {
                    let problem =
                        "no safetensors file and no index in the repository; other formats must be \
                                   downloaded first"
                            .into();
                    return Err(Error::NoCheckpoint { path: self.path.clone(), problem });
                }
                Ok(all)
            }
        }
    }
}

impl Folder for RepoFolder {
    fn path(&self) -> &Path {
        &self.path
    }

    fn names(&self) -> Result<Vec<PathBuf>> {
        Ok(self.names.clone())
    }

    fn has(&self, name: &Path) -> Result<bool> {
        Ok(self.names.iter().any(|known| known == name))
    }

    fn read(&self, name: &Path) -> Result<Vec<u8>> {
        let cached = self.cached.join(name);
        if cached.is_file() {
            return read_regular(&cached).map_err(Error::io(&cached, "read"));
        }
        let url = file_url(&self.hub.client, &self.repo, &self.commit, &self.full(name))?;
        let fail = |failure: Failure| failure.error(&self.path.join(name).display().to_string());
        let (bytes, answer) = self.hub.client.read_all(&url, MOST_TEXT_BYTES).map_err(fail)?;
        match answer.commit.filter(|commit| *commit != self.commit) {
            Some(other) => {
                let problem = format!("the server sent commit {other}, wanted {}", self.commit);
                Err(fail(Failure::lasting(problem)))
            }
            None => Ok(bytes),
        }
    }

    fn open(&self, names: &[PathBuf]) -> Result<Vec<(ShardFile, Header)>> {
        let client = &self.hub.client;
        parallel(names, client.settings.limits.parallel, |name| {
            let cached = self.cached.join(name);
            if cached.is_file() {
                return open_shard(&cached);
            }
            let url = file_url(client, &self.repo, &self.commit, &self.full(name))?;
            open_remote(client, url, &self.path.join(name), Some(&self.commit))
        })
    }
}

/// Returns the URL of a file of a repository at a commit.
pub(super) fn file_url(client: &Client, repo: &str, commit: &str, path: &str) -> Result<Url> {
    let text = format!("{}/{repo}/resolve/{commit}/{}", client.settings.endpoint, encode(path));
    Url::parse(&text).map_err(|problem| Error::Hub { address: text.clone(), problem: problem.into() })
}

fn open_remote(
    client: &Arc<Client>,
    url: Url,
    path: &Path,
    commit: Option<&str>,
) -> Result<(ShardFile, Header)> {
    let file = RemoteFile::open(client, url, path.display().to_string(), commit)?;
    let file = ShardFile::from_source(path, file.bytes, file);
    let header = read_header(&file)?;
    Ok((file, header))
}

/// The folder of a file on a web server, which cannot be listed.
struct UrlFolder {
    hub: Hub,
    /// URL of the file, with a query that may be a signature.
    url: Url,
    path: PathBuf,
    /// Content of config.json beside the file.
    config: Option<Vec<u8>>,
}

impl UrlFolder {
    fn url_of(&self, name: &Path) -> Url {
        let name = name.to_string_lossy();
        if name == self.url.file_name() { self.url.clone() } else { self.url.beside(&name) }
    }
}

impl Folder for UrlFolder {
    fn path(&self) -> &Path {
        &self.path
    }

    fn names(&self) -> Result<Vec<PathBuf>> {
        Ok(vec![self.url.file_name().into()])
    }

    fn has(&self, name: &Path) -> Result<bool> {
        Ok(name != Path::new("config.json") || self.config.is_some())
    }

    fn read(&self, name: &Path) -> Result<Vec<u8>> {
        if let Some(config) = self.config.as_ref().filter(|_| name == Path::new("config.json")) {
            return Ok(config.clone());
        }
        let url = self.url_of(name);
        let read = self.hub.client.read_all(&url, MOST_TEXT_BYTES);
        Ok(read.map_err(|failure| failure.error(&url.to_string()))?.0)
    }

    fn open(&self, names: &[PathBuf]) -> Result<Vec<(ShardFile, Header)>> {
        let client = &self.hub.client;
        parallel(names, client.settings.limits.parallel, |name| {
            open_remote(client, self.url_of(name), &self.path.join(name), None)
        })
    }
}
