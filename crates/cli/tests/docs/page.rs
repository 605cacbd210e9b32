//! A page of Markdown: its fenced blocks with their marks, and what the text beside them names.

use std::fs;
use std::path::{Path, PathBuf};

/// The root of the project.
pub(super) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

pub(super) struct Page {
    /// Path below the root.
    pub(super) name: String,
    pub(super) text: String,
    pub(super) blocks: Vec<Block>,
    /// The lines outside blocks, with their numbers.
    prose: Vec<(usize, String)>,
}

/// A fenced block.
pub(super) struct Block {
    /// Page and line, for messages.
    pub(super) place: String,
    pub(super) language: String,
    pub(super) marks: Marks,
    pub(super) lines: Vec<String>,
}

/// The words after the language, which the rendered page does not show.
#[derive(Default)]
pub(super) struct Marks {
    /// `not run: REASON`
    pub(super) not_run: bool,
    /// `exits N`: the exit code of the last command.
    pub(super) exit_code: i32,
    /// `with ARGUMENTS`: added to `ballast train` and `ballast lab`, to make them small.
    with: Option<String>,
    /// `any WORDS`: words of the page that stand for any word; `numbers` for all of them.
    pub(super) any: Vec<String>,
    /// `file NAME`: the block is the content of a file that commands of the page read.
    pub(super) file: Option<String>,
}

impl Marks {
    fn parse(text: &str, place: &str) -> Marks {
        let mut marks = Marks::default();
        for mark in text.split(", ").map(str::trim).filter(|mark| !mark.is_empty()) {
            match mark.split_once(' ') {
                Some(("not", reason)) if reason.len() > "run: ".len() => marks.not_run = true,
                Some(("exits", code)) => marks.exit_code = code.parse().expect(place),
                Some(("with", arguments)) => marks.with = Some(arguments.into()),
                Some(("any", words)) => marks.any = words.split(' ').map(String::from).collect(),
                Some(("file", name)) => marks.file = Some(name.into()),
                _ => panic!("{place}: unknown mark {mark:?}"),
            }
        }
        marks
    }

    /// Returns the command with the arguments that the test adds.
    pub(super) fn completes(&self, command: &str) -> String {
        match &self.with {
            Some(arguments) if command.contains("ballast train") || command.contains("ballast lab") => {
                format!("{} {arguments}", command.split(" # ").next().unwrap_or_default())
            }
            _ => command.into(),
        }
    }
}

impl Page {
    pub(super) fn read(name: &str) -> Page {
        let text = fs::read_to_string(root().join(name)).expect(name);
        let (mut blocks, mut prose) = (Vec::new(), Vec::new());
        let mut open: Option<Block> = None;
        for (number, line) in (1..).zip(text.lines()) {
            let place = format!("{name}:{number}");
            match (line.strip_prefix("```"), &mut open) {
                (Some(_), Some(_)) => blocks.extend(open.take()),
                (None, Some(block)) => block.lines.push(line.into()),
                (Some(info), None) => {
                    let (language, marks) = info.split_once(' ').unwrap_or((info, ""));
                    let (language, marks) = (language.into(), Marks::parse(marks, &place));
                    open = Some(Block { place, language, marks, lines: Vec::new() });
                }
                (None, None) => prose.push((number, line.into())),
            }
        }
        assert!(open.is_none(), "{name}: a block is not closed");
        Page { name: name.into(), text, blocks, prose }
    }

    /// Lines of code that are not in a fenced block, and so escape every check.
    pub(super) fn indented(&self) -> Vec<String> {
        let lines = self.prose.iter().filter(|(_, line)| line.starts_with("    "));
        lines.map(|(number, line)| format!("{}:{number}: {line}", self.name)).collect()
    }

    /// Code in the text, with the place of each.
    pub(super) fn spans<'a>(&'a self) -> Vec<(String, &'a str)> {
        let spans = |(number, line): &'a (usize, String)| {
            let place = format!("{}:{number}", self.name);
            line.split('`').skip(1).step_by(2).map(move |span| (place.clone(), span))
        };
        self.prose.iter().flat_map(spans).collect()
    }

    /// The targets of links.
    pub(super) fn links(&self) -> Vec<&str> {
        let after = self.prose.iter().flat_map(|(_, line)| line.split("](").skip(1));
        after.filter_map(|rest| Some(rest.split_once(')')?.0)).collect()
    }

    /// The anchors of the headings, as GitHub makes them.
    pub(super) fn anchors(&self) -> Vec<String> {
        let headings = self.prose.iter().filter_map(|(_, line)| line.strip_prefix('#'));
        let kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
        let anchor =
            |text: &str| text.chars().filter(kept).collect::<String>().to_lowercase().replace(' ', "-");
        headings.map(|text| anchor(text.trim_start_matches('#').trim())).collect()
    }
}

impl Block {
    /// The commands of a shell block, each with what the page prints below it. Lines that end in `\` are joined.
    pub(super) fn commands(&self) -> Vec<(String, Vec<&str>)> {
        let mut commands: Vec<(String, Vec<&str>)> = Vec::new();
        let mut continued = false;
        for line in &self.lines {
            let command = match (self.language.as_str(), line.strip_prefix("$ ")) {
                ("console", Some(command)) => Some(command),
                ("console", None) if !continued => None,
                _ => Some(line.as_str()),
            };
            match (command, commands.last_mut()) {
                (Some(rest), Some((command, _))) if continued => {
                    *command = format!("{} {}", command.trim_end_matches('\\'), rest.trim());
                }
                (Some(command), _) if !command.trim().is_empty() => {
                    commands.push((command.into(), Vec::new()))
                }
                (None, Some((_, printed))) => printed.push(line),
                (None, None) => panic!("{}: output before the first command", self.place),
                _ => {}
            }
            continued = command.is_some_and(|command| command.ends_with('\\'));
        }
        commands
    }
}
