//! The help of every command, as files: a change of help is seen in review. `BALLAST_UPDATE=1` rewrites them.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// A command and those below it, each with the name of its file.
fn helps(command: &clap::Command, name: &str, found: &mut Vec<(String, String)>) {
    found.push((format!("{name}.txt"), format!("{}", command.clone().term_width(100).render_long_help())));
    for inner in command.get_subcommands().filter(|inner| inner.get_name() != "help") {
        helps(inner, &format!("{name}-{}", inner.get_name()), found);
    }
}

#[test]
fn the_help_of_every_command_is_as_reviewed() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/help");
    let mut command = ballast_ml::command();
    command.build();
    let mut found = Vec::new();
    helps(&command, "ballast", &mut found);
    if std::env::var_os("BALLAST_UPDATE").is_some() {
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir(&folder).unwrap();
        found.iter().for_each(|(name, help)| fs::write(folder.join(name), help).unwrap());
    }
    for (name, help) in &found {
        let reviewed = fs::read_to_string(folder.join(name)).unwrap_or_default();
        assert!(*help == reviewed, "{name} differs (BALLAST_UPDATE=1 rewrites it):\n{help}");
    }
    let there = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let wanted = found.into_iter().map(|(name, _)| name);
    assert_eq!(there.collect::<BTreeSet<_>>(), wanted.collect::<BTreeSet<_>>(), "files without a command");
}

#[test]
fn no_comment_of_a_command_hides_the_help_of_its_arguments() {
    let source =
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/commands/mod.rs")).unwrap();
    let commands = source.split_once("enum Command {").unwrap().1.split_once("\n}").unwrap().0;
    assert!(
        !commands.contains("///"),
        "help belongs on `*Args`; here it replaces the whole text there:{commands}"
    );
}
