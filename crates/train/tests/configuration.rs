//! docs/configuration.md, the page of all configuration keys, is what the table of keys says.

use std::path::Path;

use ballast_train::config::{KEYS, Key};
use ballast_train::setup::PRESETS;

/// What rewrites the page.
const UPDATE: &str = "BALLAST_UPDATE=1 cargo test -p ballast-train --test tests configuration::";

fn section(key: &Key) -> &'static str {
    key.name.rsplit_once('.').map_or("", |(section, _)| section)
}

fn page() -> String {
    let mut text = format!(
        "<!-- Made from crates/train/src/config/keys.rs; do not edit. To rewrite it: {UPDATE} -->\n
# Configuration keys

A key is set in the TOML file of `ballast train --config FILE`, or by `--set optimizer.learning_rate=1e-3`, which
replaces the value of the file. `ballast train --keys` lists the keys, and `--print-config` prints the values of all. An unknown key, a value of another
type and a value out of range are errors.

## On resume

`ballast train --resume OUT --set KEY=VALUE` applies a new value from the next step on, or refuses it. No setting is
ignored. The column \"on resume\" has the rule of a key:

- *applies*: the new value applies from the next step.
- *applies; discards the best held-out loss*: as before, but held-out losses can no longer be compared.
- *must keep ...*: the new value applies if it leads to the same content, which is checked. Files are compared by
  checksum: they may be moved, not changed.
- *refused*: a new value is an error, for this reason.
"
    );
    for section_keys in KEYS.chunk_by(|a, b| section(a) == section(b)) {
        let title = match section(&section_keys[0]) {
            "" => "The run".to_string(),
            section => format!("`[{section}]`"),
        };
        text += &format!(
            "\n## {title}\n\n| key | values | default | on resume | meaning |\n|---|---|---|---|---|\n"
        );
        for key in section_keys {
            let default = key.default().map_or(String::new(), |value| format!("`{value}`"));
            let (name, values, rule, help) = (key.name, key.values(), key.on_resume, key.help());
            text += &format!("| `{name}` | {values} | {default} | {rule} | {help} |\n");
        }
    }
    text += "\n## Embedded architectures\n\n| `model.preset` | architecture |\n|---|---|\n";
    for (name, architecture, _) in PRESETS {
        text += &format!("| `{name}` | {architecture} |\n");
    }
    text
}

#[test]
fn the_page_of_keys_is_what_the_table_of_keys_says() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/configuration.md");
    if std::env::var_os("BALLAST_UPDATE").is_some() {
        std::fs::write(&path, page()).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap();
    assert!(found == page(), "docs/configuration.md is out of date; rewrite it: {UPDATE}");
}
