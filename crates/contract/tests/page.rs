//! docs/rules.md, the page of all rules, is what the table says.

use std::fmt::Write;
use std::path::Path;

use ballast_contract::{Registry, Rule};

const UPDATE: &str = "BALLAST_UPDATE=1 cargo test -p ballast-contract --test tests page::";

const HEAD: &str = "# Tensors that must be f32

`ballast audit --rules` prints this table, `ballast audit --rules qwen3_5` the rules of one family (its name, a
`model_type` or an entry of `architectures`), and `--json` gives either as a document. [A policy](check-a-checkpoint.md#policies)
selects rules; a policy file adds and removes them.

A rule covers tensors by name: `*` is one part of a name, `**` any number. The architecture of a checkpoint comes from its
config.json. If the table lacks that architecture, or there is no config.json, it is recognized by tensor names; and
tensors that no rule of the table knows are found by structure. So a name in config.json never takes a rule away.
";

const LISTS: &str = "
## Lists of the authors

Tensors that the authors of a model in transformers keep in f32 (`_keep_in_fp32_modules_strict`): module or parameter,
anywhere in the name, with the names in files where they differ. `python3 fixtures/contract/make.py` makes this part
again from an installed transformers. All belong to the policy `strict`.

| rule | tensors | families | reason |
|---|---|---|---|
";

fn code(words: impl IntoIterator<Item = String>) -> String {
    words.into_iter().map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", ")
}

fn tensors(rule: &Rule) -> String {
    code(rule.tensors.iter().map(|t| match t.param.as_str() {
        "**" => format!("{}.**", t.module),
        param => format!("{}.{param}", t.module),
    }))
}

fn page() -> String {
    let registry = Registry::builtin();
    let mut page =
        format!("<!-- Made from crates/contract/src; do not edit. To rewrite it: {UPDATE} -->\n\n{HEAD}");
    let own = |rule: &&Rule| !rule.general && !rule.is_structural();
    page += "\n## Rules\n";
    for rule in registry.rules.iter().filter(own) {
        let families = match rule.families[..] == ["*"] {
            true => "every architecture".to_owned(),
            false => code(rule.families.clone()),
        };
        let (first, rest) = rule.reason.split_at(1);
        write!(page, "\n### {}\n\n{}{rest}.\n\n", rule.id, first.to_uppercase()).unwrap();
        let tensors = tensors(rule);
        writeln!(page, "- tensors: {tensors}\n- families: {families}").unwrap();
        writeln!(page, "- policies: {}\n- source: {}", code(rule.policies.clone()), rule.source).unwrap();
    }
    page += "\n## By structure\n\nFor tensors that no rule above or below knows. A name beside the tensor is one of its \
             module or of the module around it.\n\n| rule | tensors | beside one of | policies | reason |\n|---|---|---|---|---|\n";
    for rule in registry.rules.iter().filter(|rule| rule.is_structural()) {
        let (tensors, near) = (tensors(rule), code(rule.near.clone()));
        let policies = code(rule.policies.clone());
        let reason = rule.reason.trim_start_matches("by structure: ");
        writeln!(page, "| {} | {tensors} | {near} | {policies} | {reason} |", rule.id).unwrap();
    }
    page += LISTS;
    for rule in registry.rules.iter().filter(|rule| rule.general) {
        let families = code(rule.families.clone());
        writeln!(page, "| {} | {} | {families} | {} |", rule.id, tensors(rule), rule.reason).unwrap();
    }
    page += "\n## Families\n\n| family | architectures | model types | recognized by |\n|---|---|---|---|\n";
    for family in &registry.families {
        let [architectures, types, signature] =
            [&family.architectures, &family.model_types, &family.signature].map(|words| code(words.clone()));
        writeln!(page, "| {} | {architectures} | {types} | {signature} |", family.name).unwrap();
    }
    page
}

#[test]
fn the_page_of_the_rules_is_made_from_the_table() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/rules.md");
    if std::env::var_os("BALLAST_UPDATE").is_some() {
        std::fs::write(&path, page()).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(found == page(), "docs/rules.md is out of date; rewrite it: {UPDATE}");
}
