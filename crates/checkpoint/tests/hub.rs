//! Checkpoints on a hub or a web server, read in place, against a server of our own on the loopback.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ballast_checkpoint::Checkpoint;
use ballast_checkpoint::audit::{AuditOptions, Values, audit, audit_with};
use ballast_checkpoint::convert::ConvertOptions;
use ballast_checkpoint::diff::diff;
use ballast_checkpoint::inspect::inspect;
use ballast_checkpoint::repair::{Outcome, repair};
use ballast_checkpoint::synthetic::SyntheticModel;
use ballast_contract::{Dtype, Registry};
use ballast_files::Error;
use ballast_files::jobs::Silent;
use ballast_hub::{Hub, Part, Settings};

use crate::common::server::{COMMIT, REPO, Request, Response, Server};
use crate::common::stage::{ADDRESS, Open, Stage, TOKEN, assert_says, is_shard, settings};
use crate::common::{self, convert, options, policy};

// Reading

#[test]
fn a_model_on_a_hub_has_the_inspection_of_the_same_model_on_disk() {
    let stage = Stage::new();
    let (registry, strict) = (Registry::builtin(), policy("strict"));
    let remote = stage.open().unwrap();
    let mut theirs = inspect(&remote, registry, &strict).unwrap();
    let summary = theirs.remote.take().unwrap();
    let mut ours = inspect(&Checkpoint::open(&stage.model()).unwrap(), registry, &strict).unwrap();
    ours.sidecars.sort();
    assert_eq!(serde_json::to_value(&theirs).unwrap(), serde_json::to_value(&ours).unwrap());
    assert_eq!(summary.address, format!("hf://{REPO}@{COMMIT}"));
    assert_eq!(summary.requests as usize, stage.hub.requests());
    assert!(summary.bytes > 0 && stage.cached().0.is_empty());
}

#[test]
fn an_audit_reads_the_protected_values_alone_and_a_full_one_all() {
    let stage = Stage::new();
    let (registry, strict) = (Registry::builtin(), policy("strict"));
    let remote = stage.open().unwrap();
    let options = AuditOptions { values: Values::Protected, ..AuditOptions::default() };
    let report = audit_with(&remote, registry, &strict, options, &Silent).unwrap();
    let local = audit(&Checkpoint::open(&stage.model()).unwrap(), registry, &strict, &Silent).unwrap();
    assert!(report.passed && report.findings.is_empty());
    assert_eq!(report.decay[0].heads, local.decay[0].heads);
    assert_eq!(report.decay[0].worst, local.decay[0].worst);
    assert!(report.bytes < local.bytes / 50, "{} of {}", report.bytes, local.bytes);
    assert!(report.notes[0].contains("--full"), "{:?}", report.notes);
    let full = audit(&stage.open().unwrap(), registry, &strict, &Silent).unwrap();
    assert_eq!((full.bytes, full.passed), (local.bytes, local.passed));
    assert!(full.remote.unwrap().bytes > local.bytes);
}

#[test]
fn two_revisions_are_compared_on_the_hub() {
    let stage = Stage::new();
    let open = |address: &str| Arc::new(stage.hub().open(Path::new(address)).unwrap());
    let report = diff(&open(ADDRESS), &open("hf://org/model@v1"), &Silent).unwrap();
    assert!(report.tensors.iter().all(|t| !t.differs(0.0, true)));
    assert_eq!(report.remote.len(), 2);
}

#[test]
fn an_audit_against_a_hub_reads_the_protected_tensors_of_the_original_alone() {
    let stage = Stage::new();
    let source = common::open(&stage.model());
    let broken = stage.folder.path().join("broken");
    convert(&source, &broken, &ConvertOptions { dtype: Some(Dtype::Bf16), ..options(&source, "none") });
    let original = Arc::new(stage.open().unwrap());
    let opened = original.remote.as_ref().unwrap().summary().bytes;
    let audited =
        AuditOptions { original: Some(&original), accept_released: true, ..AuditOptions::default() };
    let broken = common::open(&broken);
    let report = audit_with(&broken, Registry::builtin(), &policy("strict"), audited, &Silent).unwrap();
    assert!(!report.passed && report.findings.iter().all(|f| f.kind == "lost"), "{:?}", report.findings);
    assert_eq!(report.findings.iter().map(|f| f.tensors.len()).sum::<usize>(), report.protected);
    assert_eq!(report.released.unwrap().name, format!("hf://{REPO}@{COMMIT}"));
    let read = original.remote.as_ref().unwrap().summary().bytes - opened;
    let is_protected = |name: &str| policy("strict").rule_for(name).is_some();
    let protected: u64 = source.tensors.iter().filter(|t| is_protected(&t.name)).map(|t| t.bytes).sum();
    assert!(read <= protected, "{read} bytes for {protected} of protected tensors");
}

#[test]
fn a_repair_reads_the_protected_tensors_of_the_original_alone() {
    let stage = Stage::new();
    let original = common::open(&stage.model());
    let broken = stage.folder.path().join("broken");
    let mut whole_cast = options(&original, "none");
    whole_cast.dtype = Some(Dtype::Bf16);
    convert(&original, &broken, &whole_cast);
    let remote = Arc::new(stage.open().unwrap());
    let opened = remote.remote.as_ref().unwrap().summary().bytes;
    let fixed = stage.folder.path().join("fixed");
    let report = repair(
        &common::open(&broken),
        &remote,
        Some(&fixed),
        &options(&original, "strict").policy,
        false,
        &Silent,
    )
    .unwrap();
    assert!(report.tensors.iter().all(|t| t.outcome == Outcome::Restored));
    let read = report.remote.unwrap().bytes - opened;
    let protected: u64 = report.tensors.iter().map(|t| 4 * t.elements).sum();
    assert!(read <= protected, "{read} bytes for {protected} of protected tensors");
    let same = diff(&common::open(&fixed), &original, &Silent).unwrap();
    assert!(same.tensors.iter().all(|t| !t.differs(0.0, true)));
}

#[test]
fn one_file_of_a_repository_is_opened_alone() {
    let stage = Stage::new();
    let names: Vec<PathBuf> =
        common::open(&stage.model()).files.iter().map(|file| file.path.clone()).collect();
    let name = names[1].file_name().unwrap().to_str().unwrap();
    let one = stage.hub().open(Path::new(&format!("{ADDRESS}@v1/{name}"))).unwrap();
    assert!(one.is_single_file() && one.config.is_some());
    assert_eq!(one.tensors.len(), Checkpoint::open(&names[1]).unwrap().tensors.len());
    let missing = stage.hub().open(Path::new("hf://org/model/other.safetensors")).unwrap_err();
    assert_says(&missing, &["hf://org/model@", "other.safetensors", "not found in the repository"]);
}

#[test]
fn a_url_of_a_file_is_opened_with_the_config_beside_it() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    SyntheticModel::tiny().write(&model, u64::MAX).unwrap();
    let root = model.clone();
    let server = Server::start(move |request| {
        let name = request.path[1..].split('?').next().unwrap();
        Response::file(request, &root.join(name), "x")
    });
    let url = format!("http://{}/model.safetensors?signature=abc", server.address);
    let hub = Hub::new(settings("https://hub.invalid", folder.path())).unwrap();
    let remote = hub.open(Path::new(&url)).unwrap();
    assert!(remote.config.is_some() && remote.is_single_file());
    assert!(remote.root.to_str().unwrap().ends_with("/model.safetensors"));
    let out = folder.path().join("out");
    let remote = Arc::new(remote);
    convert(&remote, &out, &options(&remote, "strict"));
    let same = diff(&common::open(&out), &common::open(&model), &Silent).unwrap();
    assert!(same.tensors.iter().all(|t| !t.differs(0.0, true)));
    // The token is not the server's, and the signature is the file's only.
    for request in server.requests() {
        assert_eq!(request.header("authorization"), None);
        assert_eq!(request.path.contains("signature"), request.path.contains("safetensors"));
    }
    let error = hub.download(Path::new(&url), Part::All, &Silent).unwrap_err();
    assert_says(&error, &["the cache holds models of a hub only"]);
}

// The token

#[test]
fn the_token_goes_to_the_endpoint_and_not_to_the_host_it_redirects_to() {
    let stage = Stage::new();
    let report = audit(&stage.open().unwrap(), Registry::builtin(), &policy("strict"), &Silent).unwrap();
    let expected = format!("Bearer {TOKEN}");
    let (hub, cdn) = (stage.hub.hub.requests(), stage.hub.cdn.requests());
    assert!(hub.len() > 4 && cdn.len() > 4);
    assert!(hub.iter().all(|r| r.header("authorization") == Some(&expected)));
    assert!(cdn.iter().all(|r| !format!("{r:?}").contains(TOKEN)));
    assert!(cdn.iter().all(|r| r.header("host").unwrap().starts_with("localhost")));
    assert!(!serde_json::to_string(&report).unwrap().contains(TOKEN));
    assert!(!format!("{:?} {:?}", stage.settings(), stage.open().unwrap()).contains(TOKEN));
}

#[test]
fn a_server_that_repeats_the_token_does_not_get_it_into_an_error() {
    let stage = Stage::new();
    stage.hub.set_fault(|request| {
        let message = format!("who is {}?", request.header("authorization").unwrap_or_default());
        Some(Response::new(403, "").with("x-error-message", &message))
    });
    assert_says(&stage.open().unwrap_err(), &["403", "who is Bearer ***?"]);
}

// Refusals

#[test]
fn a_refusal_says_what_to_do() {
    for (status, words) in [
        (401, "the server did not accept the token"),
        (403, "have the model's terms been accepted?"),
        (404, "not found"),
    ] {
        let stage = Stage::new();
        stage.hub.set_fault(move |_| Some(Response::new(status, "")));
        assert_says(&stage.open().unwrap_err(), &["hf://org/model", &status.to_string(), words]);
        assert_eq!(stage.hub.requests(), 1, "another attempt would be refused too");
    }
    let stage = Stage::new();
    stage.hub.set_fault(|_| Some(Response::new(401, "")));
    let without = Settings { token: None, ..stage.settings() };
    let error = Hub::new(without).unwrap().open(Path::new(ADDRESS)).unwrap_err();
    assert_says(&error, &["HF_TOKEN"]);
    assert_says(
        &stage.hub().open(Path::new("hf://org/model@gone")).unwrap_err(),
        &["hf://org/model@gone", "401"],
    );
}

#[test]
fn an_unknown_revision_and_an_unknown_repository_are_errors() {
    let stage = Stage::new();
    let open = |address: &str| stage.hub().open(Path::new(address)).unwrap_err();
    assert_says(&open("hf://org/model@gone"), &["hf://org/model@gone", "404", "Invalid rev id"]);
    assert_says(&open("hf://org/other"), &["hf://org/other", "Repository not found"]);
}

#[test]
fn a_file_that_is_shorter_than_its_header_says_is_an_error() {
    let stage = Stage::new();
    let remote = stage.open().unwrap();
    stage.hub.set_fault(|request| {
        let response = Response::new(416, "").with("content-range", "bytes */10");
        is_shard(request).then_some(response)
    });
    let error = audit(&remote, Registry::builtin(), &policy("strict"), &Silent).unwrap_err();
    assert_says(&error, &["416", "shorter than expected", "model-0000"]);
}

// Passing failures

#[test]
fn a_busy_server_is_asked_again_after_the_time_that_it_names() {
    let stage = Stage::new();
    let count = AtomicUsize::new(0);
    stage.hub.set_fault(move |_| {
        let first = count.fetch_add(1, Ordering::SeqCst) == 0;
        first.then(|| Response::new(429, "").with("retry-after", "1"))
    });
    let begun = Instant::now();
    stage.open().unwrap();
    assert!(begun.elapsed() >= Duration::from_secs(1));
    stage.hub.set_fault(|_| Some(Response::new(429, "").with("retry-after", "3600")));
    assert_says(&stage.open().unwrap_err(), &["429", "too many requests", "wait 3600 s"]);
    stage.hub.set_fault(|_| Some(Response::new(503, "")));
    assert_says(&stage.open().unwrap_err(), &["503", "3 attempts"]);
}

#[test]
fn a_truncated_answer_is_continued_and_then_an_error() {
    let stage = Stage::new();
    let model = stage.model();
    // The first two answers for every file are cut.
    let cut = |model: PathBuf, most: usize| {
        let mut seen = std::collections::HashMap::new();
        move |request: &Request| {
            let name = request.path.split(['/', '?']).find(|part| part.ends_with(".safetensors"))?;
            is_shard(request).then_some(())?;
            let seen = seen.entry(name.to_string()).or_insert(0);
            *seen += 1;
            let whole = Response::file(request, &model.join(name), &format!("cdn-etag-of-{name}"));
            (*seen <= most).then(|| whole.cut_after(100))
        }
    };
    stage.hub.set_fault(cut(model.clone(), 2));
    let remote = stage.open().unwrap();
    let report = audit(&remote, Registry::builtin(), &policy("strict"), &Silent).unwrap();
    assert!(report.passed);
    stage.hub.set_fault(cut(model, usize::MAX));
    assert_says(&stage.open().unwrap_err(), &["ended early", "3 attempts"]);
}

#[test]
fn a_stalled_answer_is_given_up() {
    let stage = Stage::new();
    let model = stage.model();
    stage.hub.set_fault(move |request| {
        let response = Response::file(request, &model.join("config.json"), "x");
        is_shard(request).then(|| response.stall())
    });
    let error = stage.open().unwrap_err();
    assert_says(&error, &["model-0000"]);
    // A server that accepts and says nothing.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", silent.local_addr().unwrap());
    let hub = Hub::new(settings(&endpoint, &stage.cache())).unwrap();
    assert_says(&hub.open(Path::new(ADDRESS)).unwrap_err(), &["no answer from", "3 attempts"]);
}

#[test]
fn a_location_that_has_expired_is_asked_for_again() {
    let stage = Stage::new();
    let remote = stage.open().unwrap();
    let before = stage.hub.hub.requests().len();
    let mut expired = std::collections::HashSet::new();
    stage.hub.set_fault(move |request| {
        (is_shard(request) && expired.insert(request.path.clone())).then(|| Response::new(403, "expired"))
    });
    assert!(audit(&remote, Registry::builtin(), &policy("strict"), &Silent).unwrap().passed);
    assert!(stage.hub.hub.requests().len() > before);
}

// Wrong answers

/// Opens a model after `change` was applied to the answers for shards.
fn open_with(change: impl Fn(Response) -> Response + Send + 'static) -> Error {
    let stage = Stage::new();
    let model = stage.model();
    stage.hub.set_fault(move |request| {
        let name = request.path.split(['/', '?']).find(|part| part.ends_with(".safetensors"))?;
        let whole = Response::file(request, &model.join(name), "x");
        is_shard(request).then(|| change(whole))
    });
    stage.open().unwrap_err()
}

#[test]
fn answers_that_are_not_what_was_asked_for_are_errors() {
    let wrong_start = open_with(|r| r.with("content-range", "bytes 8-65543/1000000"));
    assert_says(&wrong_start, &["instead of", "from byte 0"]);
    assert_says(&open_with(|r| r.with("content-range", "bytes 9-8/10")), &["Content-Range", "not valid"]);
    let none = open_with(|mut r| {
        r.headers.retain(|(name, _)| name != "content-range");
        r
    });
    assert_says(&none, &["does not state the file's size"]);
    let gzip = open_with(|r| r.with("content-encoding", "gzip"));
    assert_says(&gzip, &["\"gzip\"", "identity was asked for"]);
    assert_says(&open_with(|r| r.with("content-length", "77")), &["announced 77 bytes"]);
    let itself = "/cdn/model-00001-of-00003.safetensors?signature=1";
    let loops = open_with(move |_| Response::new(302, "").with("location", itself));
    assert_says(&loops, &["more than 8 redirects"]);
    let elsewhere = open_with(|_| Response::new(302, "").with("location", "file:///etc/passwd"));
    assert_says(&elsewhere, &["redirect", "refused"]);
}

#[test]
fn a_gzipped_list_or_config_is_an_error_and_never_decoded() {
    let stage = Stage::new();
    stage.hub.set_fault(|_| Some(Response::new(200, "{}").with("content-encoding", "gzip")));
    assert_says(&stage.open().unwrap_err(), &["\"gzip\""]);
    assert!(stage.hub.hub.requests().iter().all(|r| r.header("accept-encoding") == Some("identity")));
}

#[test]
fn a_list_of_files_that_leads_elsewhere_is_not_followed() {
    let stage = Stage::new();
    for list in [
        "nonsense",
        "{}",
        "{\"sha\": \"../../x\", \"siblings\": []}",
        &format!("{{\"sha\": \"{COMMIT}\"}}"),
        &format!("{{\"sha\": \"{COMMIT}\", \"siblings\": [{{\"rfilename\": \"../../model.safetensors\"}}]}}"),
    ] {
        let list = list.to_string();
        stage.hub.set_fault(move |_| Some(Response::new(200, list.clone())));
        stage.open().unwrap_err();
        stage.download().unwrap_err();
        assert!(stage.cached().0.is_empty());
    }
}

#[test]
fn a_header_that_claims_a_billion_bytes_is_refused_before_it_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    std::fs::write(&file, 1_000_000_000u64.to_le_bytes()).unwrap();
    std::fs::File::options().write(true).open(&file).unwrap().set_len(2_000_000_000).unwrap();
    let served = file.clone();
    let server = Server::start(move |request| match request.path.as_str() {
        "/model.safetensors" => Response::file(request, &served, "x"),
        _ => Response::new(404, ""),
    });
    let hub = Hub::new(settings("https://hub.invalid", folder.path())).unwrap();
    let error = hub.open(Path::new(&format!("http://{}/model.safetensors", server.address))).unwrap_err();
    assert_says(&error, &["claims 1000000000 bytes", "limit"]);
    assert_eq!(server.requests().len(), 2, "config.json and the start of the file");
}

#[test]
fn a_file_that_changes_between_two_reads_is_an_error() {
    let changed = |fault: Box<dyn Fn(Response) -> Response + Send>| {
        let stage = Stage::new();
        let (remote, model) = (stage.open().unwrap(), stage.model());
        stage.hub.set_fault(move |request| {
            let name = request.path.split(['/', '?']).find(|part| part.ends_with(".safetensors"))?;
            let same = Response::file(request, &model.join(name), &format!("cdn-etag-of-{name}"));
            is_shard(request).then(|| fault(same))
        });
        let error = audit(&remote, Registry::builtin(), &policy("strict"), &Silent).unwrap_err();
        assert_says(&error, &["the file was changed on the server"]);
    };
    changed(Box::new(|r| r.with("etag", "\"other\"")));
    changed(Box::new(|r| {
        let range = r.headers.iter().find(|(name, _)| name == "content-range").unwrap().1.clone();
        let (part, _) = range.split_once('/').unwrap();
        let range = format!("{part}/999999999");
        r.with("content-range", &range)
    }));
    // Another commit by the endpoint.
    let stage = Stage::new();
    let model = stage.model();
    stage.hub.set_fault(move |request| {
        let response = Response::file(request, &model.join("config.json"), "x");
        request.path.ends_with("config.json").then(|| response.with("x-repo-commit", &"f".repeat(40)))
    });
    assert_says(&stage.open().unwrap_err(), &["config.json", "sent commit ffff"]);
}

// Servers without ranges

/// A server that ignores ranges.
fn without_ranges(file: PathBuf) -> Server {
    Server::start(move |request| match request.path.as_str() {
        "/model.safetensors" => {
            Response::file(&Request { headers: Vec::new(), ..request.clone() }, &file, "x")
        }
        _ => Response::new(404, ""),
    })
}

#[test]
fn a_small_file_is_read_whole_from_a_server_without_ranges() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    SyntheticModel::tiny().write(&model, u64::MAX).unwrap();
    let server = without_ranges(model.join("model.safetensors"));
    let hub = Hub::new(settings("https://hub.invalid", folder.path())).unwrap();
    let url = format!("http://{}/model.safetensors", server.address);
    let remote = hub.open(Path::new(&url)).unwrap();
    let report = audit(&remote, Registry::builtin(), &policy("strict"), &Silent).unwrap();
    assert!(report.passed);
    assert_eq!(server.requests().len(), 2);
}

#[test]
fn a_large_file_on_a_server_without_ranges_is_inspected_but_its_values_are_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    let large = SyntheticModel { vocab_size: 200_000, ..SyntheticModel::tiny() };
    large.write(&model, u64::MAX).unwrap();
    let server = without_ranges(model.join("model.safetensors"));
    let hub = Hub::new(settings("https://hub.invalid", folder.path())).unwrap();
    let remote = hub.open(Path::new(&format!("http://{}/model.safetensors", server.address))).unwrap();
    let read = remote.remote.as_ref().unwrap().summary().bytes;
    assert!(read < 200_000, "{read}");
    let error = audit(&remote, Registry::builtin(), &policy("strict"), &Silent).unwrap_err();
    assert_says(&error, &["no range requests", "download the file", "model.safetensors"]);
}
