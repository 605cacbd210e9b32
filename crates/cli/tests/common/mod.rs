//! Runs the binary in a scratch folder and inspects the files it leaves.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;

/// The config of an architecture whose `linear_attn` tensors are protected.
pub(crate) const HYBRID_CONFIG: &str = r#"{"architectures": ["Qwen3_5ForCausalLM"], "dtype": "bfloat16"}"#;

/// A protected tensor of that architecture.
pub(crate) const A_LOG: &str = "model.layers.0.linear_attn.A_log";

/// The output and exit code of a run of the binary.
pub(crate) struct Run {
    /// The exit code; `None` after a signal.
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Run {
    /// Asserts the exit code, and that nothing panicked.
    #[track_caller]
    pub(crate) fn exits(self, code: i32) -> Run {
        let all = format!("{}{}", self.stdout, self.stderr);
        assert_eq!(self.code, Some(code), "stdout:\n{}\nstderr:\n{}", self.stdout, self.stderr);
        assert!(!all.contains("panicked") && !all.contains("RUST_BACKTRACE"), "{all}");
        self
    }

    /// Asserts that stderr is one line of an error with all these words.
    #[track_caller]
    pub(crate) fn says(self, words: &[&str]) -> Run {
        for word in words {
            assert!(self.stderr.contains(word), "no {word:?} in: {}", self.stderr);
        }
        assert!(self.stderr.starts_with("ballast: "), "{}", self.stderr);
        assert_eq!(self.stderr.lines().count(), 1, "{}", self.stderr);
        self
    }

    /// stdout as JSON.
    #[track_caller]
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e}: {}", self.stdout))
    }
}

/// Returns the results of transformers in fixtures/text/`name`.
pub(crate) fn text_golden(name: &str) -> serde_json::Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/text").join(name);
    serde_json::from_slice(&fs::read(path).expect("a fixture")).expect("JSON")
}

/// The binary with these arguments.
pub(crate) fn ballast<S: AsRef<std::ffi::OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ballast"));
    command.args(args).arg("--quiet").stdin(Stdio::null());
    command
}

/// Runs a command to its end.
pub(crate) fn run(command: &mut Command) -> Run {
    let Output { status, stdout, stderr } = command.output().expect("the command starts");
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    Run { code: status.code(), stdout: text(stdout), stderr: text(stderr) }
}

/// A temporary folder with a source checkpoint `src`, and room for a destination `dst`.
pub(crate) struct Scratch {
    folder: TempDir,
}

impl Scratch {
    /// With an empty `src`.
    pub(crate) fn new() -> Scratch {
        let scratch = Scratch { folder: tempfile::tempdir().expect("a temporary folder") };
        fs::create_dir(scratch.src()).expect("a new folder");
        scratch
    }

    /// With this as `src/model.safetensors`.
    pub(crate) fn with_model(file: &[u8]) -> Scratch {
        let scratch = Scratch::new();
        scratch.put("src/model.safetensors", file);
        scratch
    }

    /// With a small model that has a tokenizer as `src`: weights of fixtures/models, the other files of
    /// fixtures/text.
    pub(crate) fn with_text_model() -> Scratch {
        let scratch = Scratch::new();
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures");
        for (folder, names) in [
            ("models/qwen3_5", &["config.json", "model.safetensors"][..]),
            ("text/qwen3_5", &["tokenizer.json", "tokenizer_config.json", "generation_config.json"]),
        ] {
            for name in names {
                fs::copy(fixtures.join(folder).join(name), scratch.src().join(name)).expect("a fixture");
            }
        }
        scratch
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn src(&self) -> PathBuf {
        self.path("src")
    }

    pub(crate) fn dst(&self) -> PathBuf {
        self.path("dst")
    }

    /// Writes a file, and the folders above it.
    pub(crate) fn put(&self, name: &str, content: impl AsRef<[u8]>) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().expect("inside the scratch folder")).expect("a folder");
        fs::write(path, content).expect("a file");
    }

    /// Runs the binary inside the scratch folder.
    pub(crate) fn run(&self, args: &[&str]) -> Run {
        run(ballast(args).current_dir(self.folder.path()))
    }

    /// Runs the binary inside the scratch folder under a limit of the shell, such as `-v 100000` for `ulimit`.
    pub(crate) fn run_under(&self, limit: &str, args: &[&str]) -> Run {
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("ulimit {limit} && exec \"$0\" \"$@\"")]);
        let ballast = ballast(args);
        run(shell.arg(ballast.get_program()).args(ballast.get_args()).current_dir(self.path("")))
    }

    /// Every path below the scratch folder with its content.
    pub(crate) fn snapshot(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        snapshot(self.folder.path())
    }

    /// Asserts that a command fails with this code and these words, and that no byte of the scratch folder
    /// changed.
    #[track_caller]
    pub(crate) fn refuses(&self, args: &[&str], code: i32, words: &[&str]) -> Run {
        let before = self.snapshot();
        let run = self.run(args).exits(code).says(words);
        let after = self.snapshot();
        let names = |s: &BTreeMap<PathBuf, Vec<u8>>| s.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&before), names(&after), "files appeared or vanished");
        assert!(before == after, "the content of a file changed");
        run
    }

    /// [`Scratch::refuses`] for `convert src dst` with these flags.
    #[track_caller]
    pub(crate) fn convert_refuses(&self, flags: &[&str], code: i32, words: &[&str]) -> Run {
        self.refuses(&[&["convert", "src", "dst"], flags].concat(), code, words)
    }

    /// Every command that opens a checkpoint refuses `src` with exit code 3 and these words.
    #[track_caller]
    pub(crate) fn every_command_refuses(&self, words: &[&str]) {
        for args in [
            &["inspect", "src"][..],
            &["audit", "src"],
            &["convert", "src", "dst"],
            &["convert", "src", "dst.safetensors", "--dtype", "f32"],
            &["diff", "src", "src"],
            &["repair", "src", "dst", "--original", "src"],
        ] {
            self.refuses(args, 3, words);
        }
    }

    /// `convert src dst` with these flags succeeds, and leaves nothing but the destination.
    #[track_caller]
    pub(crate) fn converts(&self, flags: &[&str]) -> Run {
        let before = self.snapshot();
        let run = self.run(&[&["convert", "src", "dst"], flags].concat()).exits(0);
        let mut after = self.snapshot();
        after.retain(|path, _| !path.starts_with("dst"));
        assert!(before == after, "convert changed something besides its destination");
        run
    }
}

/// Returns every path below `folder`, relative to it, with its content (empty for folders and unreadable
/// files).
pub(crate) fn snapshot(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    fn visit(root: &Path, folder: &Path, found: &mut BTreeMap<PathBuf, Vec<u8>>) {
        for entry in fs::read_dir(folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            let kind = fs::symlink_metadata(&path).expect("it is there").file_type();
            let unread = kind.is_dir() || kind.is_symlink() || kind.is_fifo();
            let content = if unread { Vec::new() } else { fs::read(&path).unwrap_or_default() };
            found.insert(path.strip_prefix(root).expect("below the root").to_path_buf(), content);
            if kind.is_dir() {
                visit(root, &path, found);
            }
        }
    }
    let mut found = BTreeMap::new();
    visit(folder, folder, &mut found);
    found
}

/// A safetensors file with this header, right or wrong, and `data` bytes of data.
pub(crate) fn raw_file(header: impl AsRef<[u8]>, data: usize) -> Vec<u8> {
    let header = header.as_ref();
    let data: Vec<u8> = (0..data).map(|i| (i % 251) as u8).collect();
    [&(header.len() as u64).to_le_bytes()[..], header, &data].concat()
}

/// Returns the offset of the data after this header.
pub(crate) fn data_start(header: &str) -> usize {
    8 + header.len()
}

/// A valid file of these tensors: name, dtype, shape, data.
pub(crate) fn valid_file(tensors: &[(&str, &str, &[u64], &[u8])]) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    let mut all = Vec::new();
    for (name, dtype, shape, data) in tensors {
        let offsets = [all.len(), all.len() + data.len()];
        all.extend_from_slice(data);
        let entry = serde_json::json!({ "dtype": dtype, "shape": shape, "data_offsets": offsets });
        header.insert(name.to_string(), entry);
    }
    let header = serde_json::Value::Object(header).to_string().into_bytes();
    [&(header.len() as u64).to_le_bytes()[..], &header, &all].concat()
}

/// Name, dtype, shape and data of every tensor of a file, as the `safetensors` crate reads them.
pub(crate) fn read_tensors(path: &Path) -> BTreeMap<String, (String, Vec<usize>, Vec<u8>)> {
    let bytes = fs::read(path).expect("a file");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("a valid file");
    let tensors = file.tensors().into_iter();
    tensors.map(|(n, t)| (n, (t.dtype().to_string(), t.shape().to_vec(), t.data().to_vec()))).collect()
}

/// The bytes of these f32 values.
pub(crate) fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// Returns true if files without permissions can be read, as by root.
pub(crate) fn permissions_do_not_bind(folder: &Path) -> bool {
    let path = folder.join("permission-probe");
    fs::write(&path, "x").expect("a file");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o000)).expect("own file");
    let readable = fs::File::open(&path).is_ok();
    fs::remove_file(&path).expect("own file");
    readable
}

/// Variable with the path of the small disk, in the process that has one.
const SMALL_DISK: &str = "BALLAST_TEST_SMALL_DISK";

/// Calls `body` with the path of a separate disk of this size. This needs a mount namespace: the test called
/// `test`, with its module, is run again inside one. If the system allows none, the test prints that and passes.
pub(crate) fn on_small_disk(test: &str, size: &str, body: impl FnOnce(&Path)) {
    if let Some(disk) = std::env::var_os(SMALL_DISK) {
        return body(Path::new(&disk));
    }
    let disk = tempfile::tempdir().unwrap();
    for namespace in ["-m", "-rm"] {
        let script = "mount -t tmpfs -o \"$1\" tmpfs \"$2\" || exit 99; shift 2; exec \"$@\"";
        let mut command = Command::new("unshare");
        command.arg(namespace).args(["sh", "-c", script, "sh", size]).arg(disk.path());
        command.arg(std::env::current_exe().unwrap()).args(["--exact", test, "--nocapture"]);
        let result = command.env(SMALL_DISK, disk.path()).stdin(Stdio::null()).output();
        let Ok(output) = result else { continue };
        let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        match output.status.code() {
            Some(0) if text.contains("1 passed") => return,
            // A failed test exits with 101; 0 without a test means a wrong name.
            Some(0 | 101) => panic!("on the small disk:\n{text}"),
            _ => {}
        }
    }
    eprintln!("skipped {test}: no mount namespace can be had here");
}
