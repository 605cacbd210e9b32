//! Tied models whose files also store the output head: the results of audit and train.

use crate::common::{Scratch, f32_bytes, read_tensors, valid_file};

/// The small tied model with a stored head: a copy of the embedding, with one other value if `different`.
fn with_head(different: bool) -> Scratch {
    let scratch = Scratch::with_text_model();
    let tensors = read_tensors(&scratch.path("src/model.safetensors"));
    let mut all: Vec<(&str, &str, Vec<u64>, Vec<u8>)> = tensors
        .iter()
        .map(|(name, (dtype, shape, data))| {
            (&name[..], &dtype[..], shape.iter().map(|d| *d as u64).collect(), data.clone())
        })
        .collect();
    let embedding = all.iter().find(|(name, ..)| *name == "model.embed_tokens.weight").unwrap();
    let mut head = ("lm_head.weight", embedding.1, embedding.2.clone(), embedding.3.clone());
    if different {
        assert_eq!(head.1, "F32");
        head.3[..4].copy_from_slice(&f32_bytes(&[3.5]));
    }
    all.push(head);
    let named: Vec<(&str, &str, &[u64], &[u8])> =
        all.iter().map(|(name, dtype, shape, data)| (*name, *dtype, &shape[..], &data[..])).collect();
    scratch.put("src/model.safetensors", valid_file(&named));
    scratch
}

#[test]
fn audit_finds_the_head_of_a_tied_model_and_says_what_to_do() {
    for (different, kind, code) in [(false, "tied-head-copy", 0), (true, "tied-head-differs", 1)] {
        let report = with_head(different).run(&["audit", "src", "--json"]).exits(code).json();
        let finding = report["findings"].as_array().unwrap().iter().find(|f| f["kind"] == kind);
        let finding = finding.unwrap_or_else(|| panic!("{report}"));
        assert_eq!(finding["tensors"][0], "lm_head.weight");
        assert!(finding["fix"].as_str().unwrap().contains("remove the head"), "{finding}");
    }
    let report = Scratch::with_text_model().run(&["audit", "src", "--json"]).exits(0).json();
    assert_eq!(report["findings"].as_array().map(Vec::len), Some(0), "{report}");
}

#[test]
fn training_a_tied_model_leaves_no_stale_head() {
    for different in [false, true] {
        let scratch = with_head(different);
        scratch.put("text.txt", "one two three four five six seven eight nine ten ".repeat(40));
        let train = [
            &[
                "train",
                "--model",
                "src",
                "--data",
                "text.txt",
                "--steps",
                "2",
                "--out",
                "run",
                "--precision",
                "f32",
            ][..],
            &[
                "--set",
                "data.sequence_length=32",
                "--set",
                "batch.sequences=1",
                "--set",
                "samples.count=0",
                "--set",
                "data.validation_fraction=0",
            ],
        ]
        .concat();
        let trained = scratch.run(&train).exits(0);
        assert_eq!(trained.stderr.contains("warning: ") && trained.stderr.contains("not tied"), different);
        let tensors = read_tensors(&scratch.path("run/model/model.safetensors"));
        let before = read_tensors(&scratch.path("src/model.safetensors"));
        let config = std::fs::read(scratch.path("run/model/config.json")).unwrap();
        let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
        assert_eq!(config["tie_word_embeddings"], !different);
        match tensors.get("lm_head.weight") {
            None => assert!(!different, "the head is gone"),
            Some(head) => assert!(different && *head != before["lm_head.weight"], "the head was not trained"),
        }
        scratch.run(&["audit", "run/model"]).exits(0);
    }
}

#[test]
fn convert_keeps_the_head_of_a_tied_model_bit_for_bit() {
    for different in [false, true] {
        let scratch = with_head(different);
        scratch.converts(&[]);
        assert!(
            read_tensors(&scratch.path("dst/model.safetensors"))
                == read_tensors(&scratch.path("src/model.safetensors"))
        );
    }
}

#[test]
fn generate_and_eval_warn_of_a_head_that_differs() {
    let scratch = with_head(true);
    scratch.put("text.txt", "one two three four five six seven");
    for args in [
        &["generate", "src", "--prompt", "one", "--max-tokens", "1"][..],
        &["eval", "src", "--data", "text.txt"],
    ] {
        let run = scratch.run(args).exits(0);
        assert!(
            run.stderr.contains("warning: src/config.json: `tie_word_embeddings` is true"),
            "{}",
            run.stderr
        );
    }
}
