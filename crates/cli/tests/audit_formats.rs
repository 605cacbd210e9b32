//! An audit as Markdown, a page and SARIF, and the action and the hook that use it.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::common::{Run, Scratch, ballast, run};

fn release() -> String {
    format!("{}/../../fixtures/release/qwen3_5", env!("CARGO_MANIFEST_DIR"))
}

fn audit(scratch: &Scratch, format: &str) -> Run {
    let release = release();
    let cast = ["convert", &release, "cast", "--dtype", "bf16", "--policy", "none"];
    if !scratch.path("cast").exists() {
        scratch.run(&cast).exits(0);
    }
    scratch.run(&["audit", "cast", "--original", &release, "--format", format]).exits(1)
}

#[test]
fn sarif_has_every_tensor_of_every_finding_at_its_file() {
    let scratch = Scratch::new();
    let document: Value = serde_json::from_str(&audit(&scratch, "sarif").stdout).unwrap();
    assert_eq!(document["version"], "2.1.0");
    let run = &document["runs"][0];
    assert_eq!(run["tool"]["driver"]["name"], "ballast");
    let rules: Vec<&str> = run["tool"]["driver"]["rules"]
        .as_array()
        .unwrap()
        .iter()
        .map(|r| r["id"].as_str().unwrap())
        .collect();
    assert_eq!(rules, ["lost/gdn-a-log", "lost/gdn-out-norm", "as-released/gdn-dt-bias"]);
    let results = run["results"].as_array().unwrap();
    assert_eq!(results.len(), 9);
    for result in results {
        assert!(rules.contains(&result["ruleId"].as_str().unwrap()));
        let place = &result["locations"][0];
        let file = place["physicalLocation"]["artifactLocation"]["uri"].as_str().unwrap();
        assert!(scratch.path("cast").join(file).is_file(), "{file}");
        let name = place["logicalLocations"][0]["fullyQualifiedName"].as_str().unwrap();
        assert!(result["message"]["text"].as_str().unwrap().starts_with(name));
    }
    let levels = |level: &str| results.iter().filter(|r| r["level"] == level).count();
    assert_eq!((levels("error"), levels("warning"), levels("note")), (6, 0, 3));
    assert_eq!(run["properties"]["passed"], false);
}

#[test]
fn markdown_and_the_page_name_the_verdict_the_findings_and_the_original() {
    let scratch = Scratch::new();
    let markdown = audit(&scratch, "markdown").stdout;
    let page = audit(&scratch, "html").stdout;
    for words in
        ["6 violations, 0 warnings, 3 as released", "lost: gdn-a-log", "layers.2.linear_attn.dt_bias"]
    {
        assert!(markdown.contains(words) && page.contains(words), "{words}");
    }
    // Every row of a table has the columns of its head.
    let columns = |line: &str| line.replace("\\|", "").matches('|').count();
    let rows: Vec<&str> = markdown.lines().skip_while(|l| !l.starts_with("| finding")).take(5).collect();
    assert!(rows.iter().all(|row| columns(row) == columns(rows[0])), "{markdown}");
    assert!(page.starts_with("<!doctype html>") && !page.contains("<script"));
    let json = audit(&scratch, "json").json();
    assert_eq!(json["schema"], "ballast.audit/1");
    assert_eq!(json["released"]["source"], "--original");
}

#[test]
fn a_gguf_file_has_no_original_to_compare_with() {
    let scratch = Scratch::new();
    scratch.run(&["convert", &release(), "model.gguf", "--dtype", "bf16"]).exits(0);
    let audit = ["audit", "model.gguf", "--original", &release()];
    scratch.run(&audit).exits(2).says(&["model.gguf: a GGUF file", "audit the checkpoint"]);
}

#[test]
fn a_name_from_a_file_stays_text() {
    let scratch = Scratch::new();
    let name = "x|<b>`y`\\.linear_attn.A_log";
    let header = format!("{{{:?}:{{\"dtype\":\"BF16\",\"shape\":[1],\"data_offsets\":[0,2]}}}}", name);
    let header = format!("{header:<width$}", width = header.len().next_multiple_of(8));
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend([0x80, 0x3f]);
    std::fs::create_dir(scratch.path("odd")).unwrap();
    std::fs::write(scratch.path("odd/model.safetensors"), file).unwrap();
    scratch.put("odd/config.json", r#"{"architectures": ["Qwen3_5ForCausalLM"]}"#);
    let text = |format: &str| scratch.run(&["audit", "odd", "--format", format]).exits(1).stdout;
    assert!(text("markdown").contains("x\\|&lt;b>'y'\\\\.linear_attn.A_log"), "{}", text("markdown"));
    assert!(text("html").contains("x|&lt;b&gt;`y`\\.linear_attn.A_log"));
    assert!(serde_json::from_str::<Value>(&text("sarif")).is_ok());
}

#[test]
fn the_commands_of_the_action_and_the_hook_are_those_of_the_program() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let action = std::fs::read_to_string(root.join("action.yml")).unwrap();
    let hook = std::fs::read_to_string(root.join(".pre-commit-hooks.yaml")).unwrap();
    let help = run(&mut ballast(["audit", "--help"])).exits(0).stdout;
    for option in ["--original", "--policy", "--format", "--quiet"] {
        assert!(action.contains(option) || hook.contains(option), "{option}");
        assert!(help.contains(option), "{option}");
    }
    // The hook's own line, on a file that passes and on one that fails.
    let scratch = Scratch::new();
    audit(&scratch, "text");
    let program = Path::new(env!("CARGO_BIN_EXE_ballast")).parent().unwrap();
    let entry = hook.lines().find_map(|line| line.trim().strip_prefix("entry: ")).unwrap();
    let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap());
    let hook = |files: &str| {
        let line = format!("{entry} {files}");
        let mut shell = Command::new("bash");
        shell
            .args(["-c", &line])
            .env("PATH", &path)
            .current_dir(scratch.path(""))
            .output()
            .unwrap()
            .status
            .code()
    };
    let cast = std::fs::read_dir(scratch.path("cast")).unwrap().flatten().map(|entry| entry.path());
    let shard = cast.filter(|path| path.extension().is_some_and(|e| e == "safetensors")).min().unwrap();
    assert_eq!(hook(&format!("{}", shard.display())), Some(1));
    let passes = format!("{}/../../fixtures/models/gemma2/model.safetensors", env!("CARGO_MANIFEST_DIR"));
    assert_eq!(hook(&passes), Some(0));
    assert_eq!(hook(&format!("{} {passes}", shard.display())), Some(1));
    assert_eq!(hook(""), Some(0));
}
