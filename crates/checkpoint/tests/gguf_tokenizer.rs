//! Tokenizers in GGUF files: form, pre-tokenizer, special tokens and templates; what llama.cpp cannot express is
//! refused.

use std::path::Path;

use ballast_checkpoint::convert::{ConvertPlan, plan};
use ballast_checkpoint::layout::Naming;
use ballast_gguf::header::{Header, Value};
use serde_json::{Value as Json, json};

use crate::common::*;

/// Writes a model of 160 tokens with the tokenizer of fixtures/text, changed by `change`.
fn write_model(folder: &Path, change: &dyn Fn(&mut Json, &mut Json)) {
    std::fs::create_dir_all(folder).unwrap();
    let model = fixture("models/gemma2");
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(model.join(name), folder.join(name)).unwrap();
    }
    let read = |name: &str| -> Json {
        serde_json::from_slice(&std::fs::read(fixture("text/qwen3_5").join(name)).unwrap()).unwrap()
    };
    let (mut tokenizer, mut settings) = (read("tokenizer.json"), read("tokenizer_config.json"));
    change(&mut tokenizer, &mut settings);
    std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    std::fs::write(folder.join("tokenizer_config.json"), settings.to_string()).unwrap();
}

fn planned(folder: &Path) -> Result<ConvertPlan, String> {
    let source = open(folder);
    let mut options = options(&source, "strict");
    options.layout.naming = Some(Naming::Gguf);
    plan(&source, &options).map_err(|error| error.to_string())
}

fn header_of(change: &dyn Fn(&mut Json, &mut Json)) -> Header {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("source");
    write_model(&source, change);
    let source = open(&source);
    let mut options = options(&source, "strict");
    options.layout.naming = Some(Naming::Gguf);
    let path = folder.path().join("model.gguf");
    convert(&source, &path, &options);
    Header::parse(&path, std::fs::read(&path).unwrap()).unwrap()
}

fn text<'a>(header: &'a Header, key: &str) -> &'a str {
    header.entry(key).and_then(Value::text).unwrap_or_else(|| panic!("{key}"))
}

#[test]
fn a_byte_level_tokenizer_keeps_tokens_merges_special_ids_and_template() {
    let header = header_of(&|_, _| {});
    assert_eq!(text(&header, "tokenizer.ggml.model"), "gpt2");
    assert_eq!(text(&header, "tokenizer.ggml.pre"), "gpt-2");
    let tokens = header.entry("tokenizer.ggml.tokens").unwrap().elements().unwrap();
    assert_eq!((tokens.len(), tokens[159].text()), (160, Some("<|im_end|>")));
    let kinds = header.entry("tokenizer.ggml.token_type").unwrap().elements().unwrap();
    assert_eq!((&kinds[0], &kinds[159]), (&Value::I32(1), &Value::I32(3)));
    assert_eq!(header.entry("tokenizer.ggml.merges").unwrap().elements().unwrap().len(), 52);
    assert_eq!(header.entry("tokenizer.ggml.eos_token_id"), Some(&Value::U32(159)));
    assert_eq!(header.entry("tokenizer.ggml.padding_token_id"), Some(&Value::U32(157)));
    assert_eq!(header.entry("tokenizer.ggml.add_bos_token"), Some(&Value::Bool(false)));
    assert!(text(&header, "tokenizer.chat_template").contains("<|im_start|>"));
}

#[test]
fn the_regular_expression_chooses_the_pre_tokenizer() {
    let split = |regex: &str| json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false});
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "use_regex": false});
    let qwen2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    let qwen35 =
        qwen2.replace(r"\p{L}+|", r"[\p{L}\p{M}]+|").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]");
    let deepseek = "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| \
                    ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+";
    let cases = [
        (vec![split(qwen2)], "qwen2"),
        (vec![split(&qwen35)], "qwen35"),
        (vec![split(r"\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"), split(deepseek)], "deepseek-v3"),
    ];
    for (mut parts, expected) in cases {
        parts.push(bytes.clone());
        let header = header_of(&|tokenizer, _| {
            tokenizer["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": parts});
        });
        assert_eq!(text(&header, "tokenizer.ggml.pre"), expected);
    }
}

#[test]
fn a_tokenizer_of_characters_with_bytes_is_gemmas() {
    let header = header_of(&|tokenizer, settings| {
        tokenizer["normalizer"] =
            json!({"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"});
        tokenizer["pre_tokenizer"] = Json::Null;
        tokenizer["model"]["byte_fallback"] = true.into();
        tokenizer["model"]["vocab"] = json!({"<unk>": 0, "<0x0A>": 1, "a": 2, "b": 3, "ab": 4, "<bos>": 5});
        tokenizer["model"]["unk_token"] = "<unk>".into();
        tokenizer["model"]["merges"] = json!([["a", "b"]]);
        settings["bos_token"] = "<bos>".into();
        settings["add_bos_token"] = true.into();
    });
    assert_eq!(text(&header, "tokenizer.ggml.model"), "gemma4");
    let kinds = header.entry("tokenizer.ggml.token_type").unwrap().elements().unwrap();
    assert_eq!(kinds[..3], [Value::I32(2), Value::I32(6), Value::I32(1)]);
    assert_eq!(kinds[20], Value::I32(5), "an id without a token is unused");
    assert_eq!(header.entry("tokenizer.ggml.add_bos_token"), Some(&Value::Bool(true)));
    assert_eq!(header.entry("tokenizer.ggml.bos_token_id"), Some(&Value::U32(5)));
}

fn is_added(header: &Header) -> Option<&Value> {
    header.entry("tokenizer.ggml.add_bos_token")
}

#[test]
fn bos_is_added_where_the_tokenizer_adds_it_and_not_where_only_its_settings_say_so() {
    // DeepSeek: `add_bos_token` without a token in tokenizer.json, which transformers does not add.
    let says = |_: &mut Json, settings: &mut Json| {
        settings["bos_token"] = "<|im_start|>".into();
        settings["add_bos_token"] = true.into();
    };
    assert_eq!(is_added(&header_of(&says)), Some(&Value::Bool(false)));
    let folder = tempfile::tempdir().unwrap();
    write_model(folder.path(), &says);
    let notes = planned(folder.path()).unwrap().notes;
    assert!(notes.iter().any(|note| note.starts_with("add_bos_token of tokenizer_config.json")), "{notes:?}");
    // The token is the one of tokenizer.json's template.
    let header = header_of(&|tokenizer, settings| {
        settings["bos_token"] = "<|im_end|>".into();
        let special = json!({"SpecialToken": {"id": "<|im_start|>", "type_id": 0}});
        let single = json!([special, {"Sequence": {"id": "A", "type_id": 0}}]);
        tokenizer["post_processor"] = json!({"type": "TemplateProcessing", "single": single});
    });
    assert_eq!(is_added(&header), Some(&Value::Bool(true)));
    assert_eq!(header.entry("tokenizer.ggml.bos_token_id"), Some(&Value::U32(158)));
}

#[test]
fn added_tokens_that_look_special_are_control_tokens_as_in_llama_cpps_converter() {
    let names = ["<|end|>", "<\u{ff5c}User\u{ff5c}>", "<unused3>", "<think>"];
    let header = header_of(&|tokenizer, _| {
        for (i, name) in names.iter().enumerate() {
            let vocabulary = tokenizer["model"]["vocab"].as_object_mut().unwrap();
            vocabulary.retain(|_, id| *id != 40 + i);
            let added = json!({"id": 40 + i, "content": name, "special": false});
            tokenizer["added_tokens"].as_array_mut().unwrap().push(added);
        }
        tokenizer["model"]["merges"] = json!([]);
    });
    let kinds = header.entry("tokenizer.ggml.token_type").unwrap().elements().unwrap();
    assert_eq!(kinds[40..44], [3, 3, 3, 4].map(Value::I32));
}

#[test]
fn gemma_3s_token_of_images_is_dropped_where_the_embedding_has_no_row_for_it() {
    let folder = tempfile::tempdir().unwrap();
    write_model(folder.path(), &|tokenizer, _| {
        let image = json!({"id": 160, "content": "<image_soft_token>", "special": true});
        tokenizer["added_tokens"].as_array_mut().unwrap().push(image);
    });
    let error = planned(folder.path()).err().unwrap();
    assert!(error.contains("has id 160"), "Gemma 2: {error}");
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(fixture("models/gemma3").join(name), folder.path().join(name)).unwrap();
    }
    let path = folder.path().join("config.json");
    let mut config: Json = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config["query_pre_attn_scalar"] = 16.into();
    std::fs::write(&path, config.to_string()).unwrap();
    let notes = planned(folder.path()).unwrap().notes;
    let is_named = |note: &String| note.ends_with("1 tokens, first \"<image_soft_token>\"");
    assert!(notes.iter().any(is_named), "{notes:?}");
}

#[test]
fn a_model_without_a_tokenizer_is_written_with_a_note() {
    let plan = planned(&fixture("models/gemma2")).unwrap();
    assert!(plan.notes.iter().any(|note| note.contains("token ids only")), "{:?}", plan.notes);
}

#[test]
fn tokenizers_that_llama_cpp_does_not_have_are_refused() {
    type Change = fn(&mut Json, &mut Json);
    let cases: [(Change, &str); 10] = [
        (|t, _| t["model"]["type"] = "Unigram".into(), "only BPE"),
        (|t, _| t["normalizer"] = json!({"type": "Lowercase"}), "Lowercase"),
        (|t, _| t["pre_tokenizer"] = json!({"type": "Whitespace"}), "Whitespace"),
        (
            |t, _| {
                let bytes = t["pre_tokenizer"].clone();
                let split = json!({"type": "Split", "pattern": {"Regex": "[a-z]+"}, "behavior": "Isolated"});
                t["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [split, bytes]});
            },
            "[a-z]+",
        ),
        (|t, _| t["post_processor"] = json!({"type": "BertProcessing"}), "BertProcessing"),
        (|t, _| t["model"]["ignore_merges"] = true.into(), "ignore_merges"),
        (|t, _| t["model"]["merges"] = json!(["a b c"]), "a b c"),
        (|t, _| t["added_tokens"][0]["id"] = 160.into(), "has id 160"),
        (|t, _| t["added_tokens"][0]["content"] = "<|im_end|>".into(), "occurs twice"),
        (|_, s| s["add_bos_token"] = true.into(), "bos"),
    ];
    for (change, words) in cases {
        let folder = tempfile::tempdir().unwrap();
        write_model(folder.path(), &change);
        if words == "bos" {
            let path = folder.path().join("config.json");
            let mut config: Json = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
            config["bos_token_id"] = Json::Null;
            std::fs::write(&path, config.to_string()).unwrap();
        }
        let error = planned(folder.path()).err().unwrap();
        assert!(error.contains(words), "{words}: {error}");
    }
}
