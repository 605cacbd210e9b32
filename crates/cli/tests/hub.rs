//! Commands on a model of a hub: a server of our own on the loopback.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use ballast_checkpoint::synthetic::SyntheticModel;
use tempfile::TempDir;

use crate::common::{self, Run, Scratch, run};
use crate::server::{COMMIT, FakeHub, Response, name_etag};

const TOKEN: &str = "hf_TopSecretTokenOfTheTest";
const ADDRESS: &str = "hf://org/model";

/// A hub with a model, and a home with a token file and an empty cache.
struct Stage {
    folder: TempDir,
    hub: FakeHub,
}

impl Stage {
    fn new(write: impl FnOnce(&Path)) -> Stage {
        let folder = TempDir::new().unwrap();
        let model = folder.path().join("model");
        write(&model);
        std::fs::create_dir(folder.path().join("home")).unwrap();
        std::fs::write(folder.path().join("home/token"), format!("{TOKEN}\n")).unwrap();
        Stage { hub: FakeHub::start(&model, name_etag), folder }
    }

    fn synthetic() -> Stage {
        Stage::new(|model| SyntheticModel::tiny().write(model, 150_000).unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = common::ballast(args);
        for name in ["ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY", "HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE"] {
            command.env_remove(name).env_remove(name.to_lowercase());
        }
        command.env("HF_ENDPOINT", self.hub.endpoint()).env("HF_HOME", self.path("home"));
        command.current_dir(self.folder.path());
        command
    }

    /// Runs a command, and asserts that the token is nowhere in what it prints.
    fn run(&self, args: &[&str]) -> Run {
        let run = run(&mut self.command(args));
        assert!(!format!("{}{}", run.stdout, run.stderr).contains(TOKEN), "{}{}", run.stdout, run.stderr);
        run
    }
}

#[test]
fn an_audit_of_a_hub_says_what_it_read_in_text_and_json() {
    let stage = Stage::synthetic();
    let text = stage.run(&["audit", ADDRESS]).exits(0).stdout;
    let words = ["of protected values read", "PASSED", "--full", "requests from hf://org/model@", COMMIT];
    assert!(words.iter().all(|word| text.contains(word)), "{text}");
    let json = stage.run(&["audit", ADDRESS, "--json"]).exits(0).json();
    let requests = stage.hub.requests() as u64 / 2;
    assert_eq!(json["remote"]["requests"], requests);
    assert_eq!(json["remote"]["address"], format!("{ADDRESS}@{COMMIT}"));
    assert!(json["remote"]["bytes"].as_u64().unwrap() > json["bytes"].as_u64().unwrap());
    assert_eq!(json["values"], "protected");
    let full = stage.run(&["audit", ADDRESS, "--full", "--json"]).exits(0).json();
    assert_eq!(full["values"], "all");
    let bearer = format!("Bearer {TOKEN}");
    assert!(stage.hub.hub.requests().iter().all(|r| r.header("authorization") == Some(&bearer)));
    assert!(stage.hub.cdn.requests().iter().all(|r| r.header("authorization").is_none()));
}

#[test]
fn inspect_and_diff_read_from_a_hub() {
    let stage = Stage::synthetic();
    let text = stage.run(&["inspect", ADDRESS]).exits(0).stdout;
    assert!(text.contains("Qwen3_5ForCausalLM") && text.contains("requests from hf://org/model@"), "{text}");
    let text = stage.run(&["diff", ADDRESS, "model"]).exits(0).stdout;
    assert!(text.contains("EQUAL") && text.contains("requests from"), "{text}");
    assert!(!stage.path("home/hub").exists(), "nothing is cached by a question");
}

#[test]
fn convert_goes_through_the_cache_and_repair_reads_the_original_on_the_hub() {
    let stage = Stage::synthetic();
    stage.run(&["convert", ADDRESS, "broken", "--dtype", "bf16", "--policy", "none"]).exits(0);
    let snapshot = stage.path("home/hub/models--org--model/snapshots").join(COMMIT);
    assert!(snapshot.join("model.safetensors.index.json").is_file());
    // The second conversion downloads nothing.
    let before = stage.hub.cdn.requests().len();
    stage.run(&["convert", ADDRESS, "same"]).exits(0);
    assert_eq!(stage.hub.cdn.requests().len(), before);
    std::fs::remove_dir_all(stage.path("home/hub")).unwrap();
    let text = stage.run(&["repair", "broken", "fixed", "--original", ADDRESS]).exits(0).stdout;
    assert!(text.contains("restored") && text.contains("requests from"), "{text}");
    assert!(!stage.path("home/hub").exists(), "the protected tensors alone were read");
    stage.run(&["diff", "fixed", "model"]).exits(0);
    assert_eq!(run(stage.command(&["audit", ADDRESS]).env("HF_HUB_OFFLINE", "1")).code, Some(3));
}

#[test]
fn a_wait_for_a_busy_hub_is_announced_and_ends_with_a_signal() {
    let stage = Stage::synthetic();
    stage.hub.set_fault(|_| Some(Response::new(429, "").with("retry-after", "200")));
    let mut command = stage.command(&["convert", ADDRESS, "unused"]);
    let mut child = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    stderr.read_line(&mut line).unwrap();
    assert!(line.starts_with("waiting 200 s: 429 from "), "{line}");
    let signal = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(signal.success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert_eq!(stage.hub.requests(), 1, "no second attempt");
}

#[test]
fn refusals_of_a_hub_are_one_line_without_the_token() {
    let stage = Stage::synthetic();
    stage.hub.set_fault(|request| {
        let said = request.header("authorization").unwrap_or_default().to_string();
        Some(Response::new(403, said.clone()).with("x-error-message", &said))
    });
    stage.run(&["audit", ADDRESS]).exits(3).says(&["hf://org/model", "403", "terms"]);
    let json = stage.run(&["audit", ADDRESS, "--json"]).exits(3).json();
    assert_eq!(json["exit_code"], 3);
    stage.run(&["audit", "hf://model"]).exits(2).says(&["hf://model", "ORG/NAME"]);
    stage.run(&["generate", "https://h.invalid/model.safetensors", "--prompt", "x"]).exits(3);
}

#[test]
fn a_proxy_of_the_environment_is_used() {
    let stage = Stage::synthetic();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let proxy = format!("http://{}", listener.local_addr().unwrap());
    let seen = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut line = String::new();
        BufReader::new(&stream).read_line(&mut line).unwrap();
        stream.write_all(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n").unwrap();
        line
    });
    let mut command = stage.command(&["audit", ADDRESS]);
    command.env("HF_ENDPOINT", "http://hub.invalid").env("HTTP_PROXY", proxy);
    let mut child = command.stderr(std::process::Stdio::null()).spawn().unwrap();
    let line = seen.join().unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(line.contains("hub.invalid"), "{line}");
}

#[test]
fn a_model_of_a_hub_generates_evaluates_and_trains() {
    let scratch = Scratch::with_text_model();
    let stage = Stage::new(|model| {
        std::fs::create_dir(model).unwrap();
        for entry in std::fs::read_dir(scratch.src()).unwrap().flatten() {
            std::fs::copy(entry.path(), model.join(entry.file_name())).unwrap();
        }
    });
    let local = stage.run(&["generate", "model", "--prompt", "a b", "--max-tokens", "4", "--json"]).exits(0);
    let remote = stage.run(&["generate", ADDRESS, "--prompt", "a b", "--max-tokens", "4", "--json"]).exits(0);
    assert_eq!(remote.json()["tokens"], local.json()["tokens"]);
    let before = stage.hub.cdn.requests().len();
    std::fs::write(stage.path("text.txt"), "a b c\n\nd e f\n\ng h i\n").unwrap();
    stage.run(&["eval", ADDRESS, "--data", "text.txt"]).exits(0);
    let data = ["train", "--model", ADDRESS, "--data", "text.txt", "--steps", "1", "--out", "run"];
    stage.run(&[&data[..], &["--set", "data.validation_fraction=0"]].concat()).exits(0);
    assert_eq!(stage.hub.cdn.requests().len(), before, "the cache has it");
    let config = std::fs::read_to_string(stage.path("run/config.toml")).unwrap();
    assert!(config.contains(COMMIT), "{config}");
}
