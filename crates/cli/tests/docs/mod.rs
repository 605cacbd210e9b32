//! What the pages say is what the program does. Every shell block of README.md and docs/ runs here, and what a page
//! prints is compared; a block that cannot run says why, and its commands are parsed. Names of options, keys, files,
//! exit codes and versions are checked wherever they stand.
//!
//! The words after the language of a fenced block, which the rendered page does not show, are marks for the test:
//!
//! ```text
//! sh, console                run here; in `console`, lines after `$ ` are commands and the others what they print
//! not run: REASON            illustrative; its commands are parsed
//! exits 1                    the exit code of the last command (0 otherwise)
//! with --steps 2             arguments that make `ballast train` and `ballast lab` small
//! any numbers X              all numbers, and the word X, stand for whatever is printed
//! file run.toml              the block is this file, which later commands read
//! ```
//!
//! The runner is our own. trycmd wants placeholders in the page where figures of time and memory stand, which readers
//! would see; it gives every file a folder of its own, where our pages go on with the run of another one; and half of
//! what is checked here is not output.

mod page;
mod session;

use std::collections::BTreeSet;
use std::fs;

use self::page::{Page, root};
use self::session::{Room, compare};
use crate::common::{ballast, run};

/// Options of other programs that the pages name.
const FOREIGN: &[&str] = &[
    "--allow-run-as-root",
    "--bind-to",
    "--ckpt-format",
    "--features",
    "--mpi",
    "--nproc-per-node",
    "--oversubscribe",
    "--write",
];

/// README.md and docs/.
fn pages() -> Vec<Page> {
    let mut names: Vec<String> = vec!["README.md".into()];
    let docs = fs::read_dir(root().join("docs")).unwrap();
    names.extend(docs.map(|entry| format!("docs/{}", entry.unwrap().file_name().to_str().unwrap())));
    names.sort();
    names.iter().map(|name| Page::read(name)).collect()
}

/// The pages, the maps of the code and the READMEs of the crates.
fn texts() -> Vec<Page> {
    let crates = fs::read_dir(root().join("crates")).unwrap();
    let readmes =
        crates.map(|entry| format!("crates/{}/README.md", entry.unwrap().file_name().to_str().unwrap()));
    let names = ["ARCHITECTURE.md".into(), "CONTRIBUTING.md".into()].into_iter().chain(readmes);
    pages()
        .into_iter()
        .chain(names.filter(|name| root().join(name).exists()).map(|name| Page::read(&name)))
        .collect()
}

#[track_caller]
fn none(problems: impl IntoIterator<Item = String>) {
    let problems: Vec<String> = problems.into_iter().collect();
    assert!(problems.is_empty(), "{}\n", problems.join("\n\n"));
}

#[test]
fn the_commands_of_every_page_run_and_print_what_it_shows() {
    let only = std::env::var("BALLAST_PAGE").unwrap_or_default();
    let pages = pages();
    let room = Room::new();
    none(pages.iter().filter(|page| page.name.contains(&only)).flat_map(|page| room.copy().run_page(page)));
}

#[test]
fn the_memory_of_fine_tuning_is_that_of_the_plan() {
    let page = Page::read("docs/fine-tune.md");
    let rows: Vec<&str> = page.text.lines().filter_map(|line| line.strip_prefix("| Qwen3.5-")).collect();
    assert!(!rows.is_empty());
    for row in rows {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let settings = ["lora.rank=16", "precision.recompute=none", "precision.recompute=full"];
        for (cell, setting) in cells[1..].iter().zip(settings) {
            let mut plan =
                ballast("train --dry-run --ranks 1 --memory 64 --flops 300 --threads 8".split(' '));
            plan.arg("--model").arg(format!("examples/models/qwen3.5-{}", cells[0].to_lowercase()));
            plan.args(["--set", setting]).current_dir(root()).env("BALLAST_SIMD", "avx2");
            let printed = run(&mut plan).exits(0).stdout;
            let total = printed.lines().find_map(|line| line.trim().strip_prefix("total ")).map(str::trim);
            assert_eq!(total, Some(*cell), "{setting}: {printed}");
        }
    }
}

#[test]
fn every_block_is_run_or_says_why_not() {
    let mut problems = Vec::new();
    for page in pages() {
        problems.extend(page.indented());
        for block in &page.blocks {
            let runs = match block.language.as_str() {
                "sh" | "console" => true,
                "python" => page.name.starts_with("docs/python"), // whose blocks run in python/tests
                _ => block.marks.file.is_some(),
            };
            if !runs && !block.marks.not_run {
                problems.push(format!("{}: a block of {:?} without a mark", block.place, block.language));
            }
        }
    }
    none(problems);
}

#[test]
fn every_command_in_a_block_is_one_that_the_program_takes() {
    let mut problems = Vec::new();
    for page in texts() {
        let shell =
            page.blocks.iter().filter(|block| ["sh", "console", "bash"].contains(&block.language.as_str()));
        for block in shell {
            for (line, _) in block.commands() {
                for words in invocations(&line) {
                    if let Err(error) = ballast_ml::command().try_get_matches_from(&words) {
                        let error = error.to_string();
                        let shown = error.starts_with("error:"); // not the text of --help
                        problems.extend(shown.then(|| format!("{}: {line}\n{error}", block.place)));
                    }
                }
            }
        }
    }
    none(problems);
}

#[test]
fn every_command_and_option_in_a_text_exists() {
    let mut command = ballast_ml::command();
    command.build();
    let mut problems = Vec::new();
    for page in texts() {
        for (place, span) in page.spans() {
            for words in invocations(span) {
                problems.extend(
                    unknown(&command, &words[1..]).map(|word| format!("{place}: {word} in `{span}`")),
                );
            }
            let option = span.split([' ', '=']).next().filter(|word| word.starts_with("--"));
            let known = |option: &str| FOREIGN.contains(&option) || has_option(&command, option);
            problems
                .extend(option.filter(|option| !known(option)).map(|option| format!("{place}: {option}")));
        }
    }
    none(problems);
}

/// The command lines of `ballast` in a line of a shell, without signs of a synopsis: `[--option A | B] ...`.
fn invocations(line: &str) -> Vec<Vec<String>> {
    let words = shlex::split(line).unwrap_or_default();
    let starts = words.iter().enumerate().filter(|(_, word)| *word == "ballast").map(|(start, _)| start);
    let command = |start: usize| {
        let mut command: Vec<String> = Vec::new();
        let mut words = words[start..].iter();
        while let Some(word) = words.next() {
            match word.as_str() {
                "|" => drop(words.next()), // an alternative
                ">" | "&&" | ";" => break,
                "..." if !command.last().is_some_and(|last| last.starts_with("--")) => {}
                word => command.push(word.trim_matches(['[', ']', ';']).into()),
            }
        }
        command
    };
    starts.map(command).collect()
}

/// Returns the first word that is no command or option.
fn unknown<'a>(mut command: &clap::Command, words: &'a [String]) -> Option<&'a str> {
    for word in words {
        if let Some(inner) = command.find_subcommand(word) {
            command = inner;
        } else if let Some(name) = word.strip_prefix("--") {
            let name = name.split('=').next().unwrap_or_default();
            if !command.get_arguments().any(|argument| argument.get_long() == Some(name)) {
                return Some(word);
            }
        } else if command.has_subcommands() && word.chars().all(|c| c.is_ascii_lowercase()) {
            return Some(word);
        }
    }
    None
}

fn has_option(command: &clap::Command, option: &str) -> bool {
    let own = command.get_arguments().any(|argument| argument.get_long() == option.strip_prefix("--"));
    own || command.get_subcommands().any(|inner| has_option(inner, option))
}

#[test]
fn every_configuration_key_in_a_text_exists() {
    let document = run(&mut ballast(["train", "--keys", "--json"])).exits(0).json();
    let keys: BTreeSet<&str> = document.as_object().unwrap().keys().map(String::as_str).collect();
    let sections: BTreeSet<&str> = keys.iter().filter_map(|key| Some(key.split_once('.')?.0)).collect();
    let exists = |path: &str| {
        let path = path.trim_end_matches(".*");
        let site = path.starts_with("precision.sites.");
        let below =
            |key: &&str| key.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
        path == "KEY" || site || keys.iter().any(below)
    };
    // Files and tensors have names like keys: `model.safetensors`, `model.layers.0`. Experts have no key, says a page.
    let is_key = |path: &str| {
        let (section, key) = path.split_once('.').unwrap_or_default();
        let first = key.split('.').next().unwrap_or_default();
        let others = [
            "",
            "layers",
            "language_model",
            "visual",
            "safetensors",
            "gguf",
            "pt",
            "state",
            "norm",
            "rs",
            "py",
            "experts",
        ];
        let letters = |c: char| c.is_ascii_lowercase() || "._*0123456789".contains(c);
        sections.contains(section) && path.chars().all(letters) && !others.contains(&first)
    };
    let mut problems = Vec::new();
    for page in texts() {
        let spans = page.spans().into_iter().map(|(place, span)| (place, span.to_string()));
        let blocks = page.blocks.iter().flat_map(|block| {
            block.lines.iter().map(|line| (block.place.clone(), line.clone())).collect::<Vec<_>>()
        });
        for (place, code) in spans.chain(blocks) {
            let set = code.split("--set ").skip(1).filter_map(|rest| Some(rest.split_once('=')?.0));
            let named = code.split([' ', '=', '"']).filter(|word| is_key(word));
            let wrong = set.chain(named).filter(|path| !exists(path));
            problems.extend(wrong.map(|path| format!("{place}: no key `{path}`")));
        }
    }
    none(problems);
}

#[test]
fn every_link_and_every_path_of_the_project_leads_somewhere() {
    const FOLDERS: [&str; 8] =
        ["crates/", "docs/", "examples/", "fixtures/", "bench/", "fuzz/", "python/", ".ci/"];
    let mut problems = Vec::new();
    for page in texts() {
        let folder = root().join(&page.name).parent().unwrap().to_path_buf();
        for link in page.links().into_iter().filter(|link| !link.contains("://")) {
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let name = if file.is_empty() { root().join(&page.name) } else { folder.join(file) };
            let there = name.exists()
                && (anchor.is_empty() || {
                    let target = Page::read(name.to_str().unwrap());
                    target.anchors().iter().any(|other| other == anchor)
                });
            problems.extend((!there).then(|| format!("{}: link to {link}", page.name)));
        }
        let in_path = |c: char| c.is_ascii_alphanumeric() || "_./-*{".contains(c);
        for word in page.text.split(|c| !in_path(c)) {
            let path = word.trim_end_matches('.');
            let ours = FOLDERS.iter().any(|folder| path.starts_with(folder)) && !path.contains(['*', '{']);
            let there =
                root().join(path).exists() || folder.join(path).exists() || path == "fixtures/missing";
            problems.extend((ours && !there).then(|| format!("{}: {path}", page.name)));
        }
    }
    none(problems);
}

#[test]
fn the_exit_codes_of_the_pages_are_those_of_the_help() {
    let help = run(&mut ballast(["--help"])).exits(0).stdout;
    let section = help.split_once("Exit codes:\n").expect("a section").1;
    let codes: Vec<(&str, &str)> = section.lines().filter_map(|line| line.trim().split_once("  ")).collect();
    let list: Vec<String> = codes.iter().map(|(code, meaning)| format!("{code} {meaning}")).collect();
    let sentence = format!("Exit codes: {}.", list.join(", "));
    let readme = Page::read("README.md").text;
    assert!(readme.contains(&sentence), "README.md does not say: {sentence}");
    for page in texts() {
        for words in ["exit code ", "exits with "] {
            for rest in page.text.split(words).skip(1) {
                let code: String = rest.chars().take_while(char::is_ascii_digit).collect();
                let known = code.is_empty() || codes.iter().any(|(other, _)| *other == code);
                assert!(known, "{}: {words}{code}", page.name);
            }
        }
    }
}

#[test]
fn the_rust_version_is_one_number() {
    let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let manifest: toml::Table = manifest.parse().unwrap();
    let wanted = manifest["workspace"]["package"]["rust-version"].as_str().unwrap();
    for page in texts() {
        for rest in page.text.split("Rust ").skip(1) {
            let rest = rest.strip_prefix("toolchain (").unwrap_or(rest);
            let found = rest.split(|c: char| !c.is_ascii_digit() && c != '.').next().unwrap_or_default();
            assert!(found.is_empty() || found == wanted, "{}: Rust {found}, not {wanted}", page.name);
        }
    }
}

#[test]
fn no_package_is_installed_from_a_registry_that_does_not_have_it() {
    let mut problems = Vec::new();
    for page in texts() {
        for line in page.text.lines() {
            let cargo = ["cargo install", "cargo add"].iter().any(|words| line.contains(words));
            let from_registry = cargo && !line.contains("--path") && !line.contains("--git");
            if from_registry || line.contains("pip install") && line.contains("install 'ballast") {
                problems.push(format!("{}: {line}", page.name));
            }
        }
    }
    none(problems);
}

#[test]
fn a_page_that_says_something_else_is_found() {
    let any = |words: &[&str]| words.iter().map(|word| word.to_string()).collect::<Vec<_>>();
    let (printed, none) =
        ("loss  0.25, 600 steps\n 1 min 36 s, 12,832 tokens/s, peak memory 85.9 MiB\nPASSED", any(&[]));
    for page in [
        "loss 0.25, 600 steps\n2 s, 9 tokens/s, peak memory 1.5 GiB\nPASSED",
        "loss ...\nPASSED",
        "... 600 steps ...",
        "...",
    ] {
        assert_eq!(compare(page, printed, &none), Ok(()), "{page}");
    }
    for page in ["loss 0.25, 600 steps", "PASSED", "... 0.26, ...", "600 steps ...", "loss ... FAILED", ""] {
        assert!(compare(page, printed, &none).is_err(), "{page}");
    }
    assert_eq!(compare("loss 0.3, 7 steps ... PASSED", printed, &any(&["numbers"])), Ok(()));
    assert_eq!(compare("loss ... steps ... X", printed, &any(&["X"])), Ok(()));
    assert!(unknown(&ballast_ml::command(), &["generate".into(), "--model".into()]).is_some());
}
