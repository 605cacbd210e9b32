//! Downloads of a model into the cache, against a server of our own on the loopback.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ballast_checkpoint::diff::diff;
use ballast_checkpoint::synthetic::SyntheticModel;
use ballast_files::ErrorKind;
use ballast_files::jobs::{Observer, Silent};
use ballast_hub::{Hub, Part, Settings};

use crate::common;
use crate::common::server::{COMMIT, Request, Response};
use crate::common::stage::{ADDRESS, Open, Stage, assert_says, files_below, is_shard, settings};

fn sha256_etag(path: &Path) -> String {
    let digest = ring::digest::digest(&ring::digest::SHA256, &std::fs::read(path).unwrap());
    digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn a_download_has_the_hubs_own_layout_and_every_file_of_the_model() {
    let stage = Stage::with_etag(sha256_etag);
    let folder = stage.download().unwrap();
    let repo = stage.cache().join("models--org--model");
    assert_eq!(folder, repo.join("snapshots").join(COMMIT));
    assert_eq!(std::fs::read_to_string(repo.join("refs/main")).unwrap(), COMMIT);
    let shard = folder.join("model-00001-of-00003.safetensors");
    let blob = format!("../../blobs/{}", sha256_etag(&shard));
    assert_eq!(std::fs::read_link(&shard).unwrap(), Path::new(&blob));
    for name in ["config.json", "tokenizer_config.json", "README.md", "model.safetensors.index.json"] {
        assert_eq!(
            std::fs::read(folder.join(name)).unwrap(),
            std::fs::read(stage.model().join(name)).unwrap()
        );
    }
    assert!(!folder.join("pytorch_model.bin").exists());
    let same = diff(&common::open(&folder), &common::open(&stage.model()), &Silent).unwrap();
    assert!(same.tensors.iter().all(|t| !t.differs(0.0, true)));
    assert!(stage.cached().1.is_empty(), "{:?}", stage.cached().1);
}

#[test]
fn the_files_beside_the_weights_are_downloaded_alone() {
    let stage = Stage::new();
    let folder = stage.hub().download(Path::new(ADDRESS), Part::BesideWeights, &Silent).unwrap();
    assert!(folder.join("config.json").is_file() && folder.join("tokenizer_config.json").is_file());
    assert!(stage.hub.cdn.requests().is_empty());
    assert!(files_below(&folder).iter().all(|file| !file.to_string_lossy().contains("safetensors")));
    // What is there is not taken for the whole model.
    let offline = Hub::new(Settings { offline: true, ..stage.settings() }).unwrap();
    assert_says(&offline.open(Path::new(ADDRESS)).unwrap_err(), &["does not have all of its files"]);
    assert_eq!(offline.download(Path::new(ADDRESS), Part::BesideWeights, &Silent).unwrap(), folder);
}

#[test]
fn a_snapshot_that_is_there_is_used_without_a_request() {
    let stage = Stage::new();
    let folder = stage.download().unwrap();
    let before = stage.hub.requests();
    let pinned = format!("{ADDRESS}@{COMMIT}");
    assert_eq!(stage.hub().download(Path::new(&pinned), Part::All, &Silent).unwrap(), folder);
    let opened = stage.hub().open(Path::new(&pinned)).unwrap();
    assert_eq!(stage.hub.requests(), before);
    let summary = opened.remote.unwrap().summary();
    assert_eq!((summary.bytes, summary.requests), (0, 0));
    // A branch is resolved by one request, and nothing is downloaded again.
    assert_eq!(stage.download().unwrap(), folder);
    stage.open().unwrap();
    assert_eq!(stage.hub.requests(), before + 2);
}

#[test]
fn a_file_whose_content_was_removed_is_downloaded_again() {
    let stage = Stage::new();
    let folder = stage.download().unwrap();
    let lost = std::fs::canonicalize(folder.join("tokenizer_config.json")).unwrap();
    std::fs::remove_file(lost).unwrap();
    let offline = Hub::new(Settings { offline: true, ..stage.settings() }).unwrap();
    assert_says(&offline.open(Path::new(ADDRESS)).unwrap_err(), &["does not have all of its files"]);
    let pinned = format!("{ADDRESS}@{COMMIT}");
    let again = stage.hub().download(Path::new(&pinned), Part::All, &Silent).unwrap();
    assert_eq!(again, folder);
    assert!(folder.join("tokenizer_config.json").is_file());
}

#[test]
fn offline_no_request_is_made() {
    let stage = Stage::new();
    let offline = || Hub::new(Settings { offline: true, ..stage.settings() }).unwrap();
    let missing = offline().open(Path::new(ADDRESS)).unwrap_err();
    assert_says(&missing, &["HF_HUB_OFFLINE"]);
    let folder = stage.download().unwrap();
    let before = stage.hub.requests();
    assert_eq!(offline().download(Path::new(ADDRESS), Part::All, &Silent).unwrap(), folder);
    offline().open(Path::new(ADDRESS)).unwrap();
    assert_says(&offline().open(Path::new("https://h.invalid/model.safetensors")).unwrap_err(), &["OFFLINE"]);
    assert_eq!(stage.hub.requests(), before);
}

#[test]
fn a_hub_that_does_not_answer_is_replaced_by_the_cache_with_a_note() {
    let stage = Stage::new();
    stage.download().unwrap();
    let closed = settings("http://127.0.0.1:1", &stage.cache());
    let opened = Hub::new(closed).unwrap().open(Path::new(ADDRESS)).unwrap();
    let note = opened.remote.unwrap().summary().note.unwrap();
    assert!(note.contains("did not answer"), "{note}");
}

#[test]
fn shards_in_the_cache_without_the_rest_are_not_taken_for_the_model() {
    let stage = Stage::new();
    let folder = stage.download().unwrap();
    std::fs::remove_file(folder.join("model-00002-of-00003.safetensors")).unwrap();
    let offline = || Hub::new(Settings { offline: true, ..stage.settings() }).unwrap();
    assert_says(&offline().open(Path::new(ADDRESS)).unwrap_err(), &["does not have all of its files"]);
    // The shards that are there are read there; the other one is asked for.
    let before = stage.hub.cdn.requests().len();
    let mixed = stage.open().unwrap();
    assert_eq!(stage.hub.cdn.requests().len(), before + 1);
    let local = common::open(&stage.model());
    assert!(diff(&Arc::new(mixed), &local, &Silent).unwrap().tensors.iter().all(|t| !t.differs(0.0, true)));
    std::fs::remove_file(folder.join("model.safetensors.index.json")).unwrap();
    assert_says(&offline().open(Path::new(ADDRESS)).unwrap_err(), &["does not have all of its files"]);
}

/// Cancels after a number of bytes.
struct Impatient {
    done: AtomicU64,
    most: u64,
}

impl Observer for Impatient {
    fn advance(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::SeqCst);
    }

    fn cancelled(&self) -> bool {
        self.done.load(Ordering::SeqCst) > self.most
    }
}

#[test]
fn an_interrupted_download_continues_where_it_was() {
    let stage = Stage::with_etag(sha256_etag);
    let impatient = Impatient { done: AtomicU64::new(0), most: 100_000 };
    let error = stage.hub().download(Path::new(ADDRESS), Part::All, &impatient).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Interrupted);
    let (_, incomplete) = stage.cached();
    assert_eq!(incomplete.len(), 1);
    let there = incomplete[0].metadata().unwrap().len();
    assert!(there > 0);
    assert!(!stage.cache().join("models--org--model/refs/main").exists());
    let before = stage.hub.cdn.requests().len();
    let folder = stage.download().unwrap();
    let part = incomplete[0].file_stem().unwrap().to_str().unwrap().to_string();
    let name = files_below(&folder).into_iter().find(|f| sha256_etag(f) == part).unwrap();
    let name = name.file_name().unwrap().to_str().unwrap().to_string();
    let again = stage.hub.cdn.requests().split_off(before);
    let ranges: Vec<_> = again.iter().filter(|r| r.path.contains(&name)).filter_map(Request::range).collect();
    // One request learns the size; all others begin behind what was there.
    assert!(ranges.iter().filter(|(first, _)| *first < there).count() <= 1, "{there}: {ranges:?}");
    let same = diff(&common::open(&folder), &common::open(&stage.model()), &Silent).unwrap();
    assert!(same.tensors.iter().all(|t| !t.differs(0.0, true)));
}

#[test]
fn a_download_that_breaks_leaves_nothing_that_looks_whole() {
    let stage = Stage::with_etag(sha256_etag);
    let broken = Arc::new(AtomicBool::new(true));
    let (model, is_broken) = (stage.model(), broken.clone());
    stage.hub.set_fault(move |request| {
        let name = request.path.split(['/', '?']).find(|part| part.ends_with(".safetensors"))?;
        let late = request.range().is_some_and(|(first, _)| first >= 60_000);
        let etag = format!("cdn-{}", sha256_etag(&model.join(name)));
        let response = Response::file(request, &model.join(name), &etag).cut_after(1);
        (is_shard(request) && late && is_broken.load(Ordering::SeqCst)).then_some(response)
    });
    assert_says(&stage.download().unwrap_err(), &["ended early"]);
    let snapshot = stage.cache().join("models--org--model/snapshots").join(COMMIT);
    assert!(files_below(&snapshot).iter().all(|f| !f.to_string_lossy().ends_with(".safetensors")));
    assert!(!stage.cached().1.is_empty());
    broken.store(false, Ordering::SeqCst);
    let folder = stage.download().unwrap();
    let same = diff(&common::open(&folder), &common::open(&stage.model()), &Silent).unwrap();
    assert!(same.tensors.iter().all(|t| !t.differs(0.0, true)));
}

#[test]
fn content_with_another_checksum_is_discarded() {
    let stage = Stage::with_etag(sha256_etag);
    let model = stage.model();
    stage.hub.set_fault(move |request| {
        let name = request.path.split(['/', '?']).find(|part| part.ends_with(".safetensors"))?;
        let mut bytes = std::fs::read(model.join(name)).unwrap();
        let (first, last) = request.range()?;
        let last = last.min(bytes.len() as u64 - 1);
        *bytes.last_mut().unwrap() ^= 1;
        let range = format!("bytes {first}-{last}/{}", bytes.len());
        let part = bytes[first as usize..=last as usize].to_vec();
        is_shard(request).then(|| Response::new(206, part).with("content-range", &range))
    });
    assert_says(&stage.download().unwrap_err(), &["checksum", "discarded"]);
    assert!(stage.cached().1.is_empty(), "{:?}", stage.cached().1);
    assert!(
        Hub::new(Settings { offline: true, ..stage.settings() }).unwrap().open(Path::new(ADDRESS)).is_err()
    );
}

#[test]
fn a_server_without_ranges_is_downloaded_from_in_one_stream() {
    let stage = Stage::with_etag(sha256_etag);
    let model = stage.model();
    let large = SyntheticModel { vocab_size: 200_000, ..SyntheticModel::tiny() };
    std::fs::remove_dir_all(&model).unwrap();
    large.write(&model, u64::MAX).unwrap();
    let root = model.clone();
    let mut count = 0;
    stage.hub.set_fault(move |request| {
        let name = request.path.split(['/', '?']).find(|part| part.ends_with(".safetensors"))?;
        is_shard(request).then_some(())?;
        count += 1;
        let whole = Request { headers: Vec::new(), ..request.clone() };
        let response = Response::file(&whole, &root.join(name), "x");
        // The second answer, the first of the download itself, is cut.
        Some(if count == 2 { response.cut_after(1_000_000) } else { response })
    });
    let folder = stage.download().unwrap();
    let same = diff(&common::open(&folder), &common::open(&model), &Silent).unwrap();
    assert!(same.tensors.iter().all(|t| !t.differs(0.0, true)));
}

#[test]
fn two_downloads_at_a_time_give_one_whole_model() {
    let stage = Stage::with_etag(sha256_etag);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| stage.download().unwrap());
        }
    });
    let folder = stage.download().unwrap();
    let same = diff(&common::open(&folder), &common::open(&stage.model()), &Silent).unwrap();
    assert!(same.tensors.iter().all(|t| !t.differs(0.0, true)));
}
