//! A folder in which the commands of a page run, and the comparison of what they print with what the page says.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::page::{Block, Page, root};
use crate::common::{Scratch, text_golden};

/// A folder with a small file or model under every name that the pages use.
pub(super) struct Room {
    scratch: Scratch,
}

impl Room {
    pub(super) fn new() -> Room {
        let room = Room { scratch: Scratch::with_text_model() };
        let link = |target: &Path, name: &str| symlink(target, room.scratch.path(name)).unwrap();
        for folder in ["fixtures", "examples"] {
            link(&root().canonicalize().unwrap().join(folder), folder);
        }
        for name in ["Qwen3.5", "MODEL", "CKPT", "A", "B", "TUNED", "ORIG", "tuned"] {
            link(Path::new("src"), name);
        }
        link(Path::new("fixtures/models/qwen3_5_moe"), "MoE");
        let text = text_golden("evaluation.json")["text"].as_str().unwrap().to_string();
        let line = |value: serde_json::Value| format!("{value}\n");
        let chat = |question: &str| serde_json::json!([{ "role": "user", "content": question }, { "role": "assistant", "content": text }]);
        let chats =
            ["the", "a word", "in"].map(|question| line(serde_json::json!({ "messages": chat(question) })));
        room.scratch.put("chats.jsonl", chats.concat());
        room.scratch.put("messages.json", chat("the").to_string());
        let run = "out = \"runs/mine\"\n[model]\npreset = \"hybrid\"\n[data]\ntask = \"recall\"\nsequence_length = 128\n";
        room.scratch.put("run.toml", run);
        room.scratch.put("text.txt", format!("{text}\n{text}"));
        room.scratch.put("text.jsonl", line(serde_json::json!({ "text": text })).repeat(3));
        // Of the embedded run, the pages share two steps.
        for command in [
            "ballast train --steps 2",
            "ballast convert fixtures/models/deepseek_v32 DeepSeek-V3.2 --dtype fp8",
            "cp src/tokenizer*.json DeepSeek-V3.2",
        ] {
            let (code, printed) = room.run(command);
            assert_eq!(code, 0, "{command}\n{printed}");
        }
        room
    }

    /// A copy for one page.
    pub(super) fn copy(&self) -> Room {
        let room = Room { scratch: Scratch::new() };
        let (code, printed) = self.run(&format!("cp -a . '{}'", room.scratch.path("").display()));
        assert_eq!(code, 0, "{printed}");
        room
    }

    /// Runs the blocks of a page in their order. Returns what is wrong.
    pub(super) fn run_page(&self, page: &Page) -> Vec<String> {
        let mut problems = Vec::new();
        for block in &page.blocks {
            if let Some(name) = &block.marks.file {
                self.scratch.put(name, block.lines.join("\n"));
            }
            if matches!(block.language.as_str(), "console" | "sh") && !block.marks.not_run {
                problems.extend(self.run_block(block));
            }
        }
        problems
    }

    fn run_block(&self, block: &Block) -> Vec<String> {
        let mut folder = self.scratch.path("");
        let mut problems = Vec::new();
        let commands = block.commands();
        let last = commands.len() - 1;
        for (i, (command, page)) in commands.iter().enumerate() {
            if let Some(path) = command.strip_prefix("cd ") {
                folder = folder.join(path);
                continue;
            }
            let (code, printed) = self.run_in(&folder, &block.marks.completes(command));
            let wanted = if i == last { block.marks.exit_code } else { 0 };
            if code != wanted {
                problems
                    .push(format!("{}: exit code {code}, not {wanted}: {command}\n{printed}", block.place));
            } else if !page.is_empty()
                && let Err(problem) = compare(&page.join("\n"), &printed, &block.marks.any)
            {
                problems.push(format!("{}: {command}\n{problem}\nprinted:\n{printed}", block.place));
            }
        }
        problems
    }

    /// Runs a line of a shell in the room. Returns its exit code, and what it printed on both outputs.
    fn run(&self, line: &str) -> (i32, String) {
        self.run_in(&self.scratch.path(""), line)
    }

    fn run_in(&self, folder: &Path, line: &str) -> (i32, String) {
        let binary = PathBuf::from(env!("CARGO_BIN_EXE_ballast"));
        let path = std::env::var("PATH").unwrap_or_default();
        let output = Command::new("sh")
            .args(["-c", &format!("exec 2>&1; {line}")])
            .current_dir(folder)
            .env("PATH", format!("{}:{path}", binary.parent().unwrap().display()))
            .env("BALLAST_SIMD", "avx2") // other instruction sets may differ in the last bit
            .env("HF_HUB_OFFLINE", "1")
            .stdin(Stdio::null())
            .output()
            .expect("sh starts");
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        let results = printed.lines().filter(|line| !line.contains(", ETA ")); // progress depends on the load
        (output.status.code().unwrap_or(-1), results.collect::<Vec<_>>().join("\n"))
    }
}

/// Compares what a page shows with what was printed, word by word: the widths of columns follow the figures in them.
/// `...` stands for any words, and a word of `any` for any one word. Times, rates and measured memory are not compared.
pub(super) fn compare(page: &str, printed: &str, any: &[String]) -> Result<(), String> {
    let (page, printed) = (words(page, any), words(printed, any));
    let same = |page: &[String], printed: &[String]| {
        let pairs = page.iter().zip(printed);
        page.len() == printed.len()
            && pairs.into_iter().all(|(word, other)| word == other || any.contains(word))
    };
    let mut rest = &printed[..];
    let parts: Vec<&[String]> = page.split(|word| word == "...").collect();
    for (i, part) in parts.iter().enumerate() {
        let places = 0..(rest.len() + 1).saturating_sub(part.len());
        let place = places.into_iter().find(|place| {
            (i > 0 || *place == 0)
                && (i + 1 < parts.len() || place + part.len() == rest.len())
                && same(part, &rest[*place..place + part.len()])
        });
        match place {
            Some(place) => rest = &rest[place + part.len()..],
            None => return Err(format!("not printed here: {}", part.join(" "))),
        }
    }
    Ok(())
}

/// Words of a text without the rules of its tables. A time, a rate and a measured amount of memory are `#`, one for
/// several in a row; so is every number if `numbers` are in `any`.
fn words(text: &str, any: &[String]) -> Vec<String> {
    let all_numbers = any.iter().any(|word| word == "numbers");
    let mut words: Vec<String> = Vec::new();
    for word in text.split_whitespace().filter(|word| !word.starts_with('─')) {
        let before = |n: usize| words.len().checked_sub(n).map_or("", |i| words[i].as_str());
        let is_figure = match word.trim_end_matches([',', ';', ')']) {
            "ms" | "s" | "min" | "h" | "tokens/s" => is_number(before(1)) || before(1) == "#",
            "MiB" | "GiB" => before(2) == "memory" && is_number(before(1)) || before(1) == "#",
            rate => all_numbers && is_number(word) || rate.strip_suffix("/s").is_some_and(is_number),
        };
        if is_figure
            && is_number(before(1))
            && !is_number(word)
            && !word.contains(|c: char| c.is_ascii_digit())
        {
            words.pop();
        }
        match is_figure {
            true if words.last().is_some_and(|last| last == "#") => {}
            true => words.push("#".into()),
            false => words.push(word.into()),
        }
    }
    words
}

fn is_number(word: &str) -> bool {
    let of_number = |c: char| "0123456789.,;:e+-~%/()[]".contains(c);
    word.chars().all(of_number) && word.contains(|c: char| c.is_ascii_digit())
}
