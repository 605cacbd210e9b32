//! Masks of trained tokens.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use ballast_model::text::{ChatTemplate, Conversation};
use ballast_train::data::{DataConfig, Files, Split, TextEncoder, render};
use serde_json::{Value, json};

use super::{Data, chat, fixture, marked, train};

fn mask_with(line: &Value, change: impl FnOnce(&mut DataConfig)) -> String {
    let data = Data::new(&[("a.jsonl", line.to_string().as_bytes())]);
    let mut config = data.config(&["a.jsonl"]);
    change(&mut config);
    marked(&train(&config, 0).unwrap().document(0).unwrap())
}

fn mask(line: Value) -> String {
    mask_with(&line, |_| ())
}

#[test]
fn a_text_and_its_end_are_trained_on() {
    assert_eq!(mask(json!({"text": "the end"})), "⟦the end<|im_end|>⟧");
    assert_eq!(mask(json!({"text": "the end<|im_end|>"})), "⟦the end<|im_end|>⟧", "not twice");
    assert_eq!(mask_with(&json!({"text": "the end"}), |config| config.add_eos = false), "⟦the end⟧");
}

#[test]
fn a_completion_and_its_end_are_trained_on_and_the_prompt_is_not() {
    let line = json!({"prompt": "the é is", "completion": " in the west"});
    assert_eq!(mask(line), "the é is⟦ in the west<|im_end|>⟧");
}

#[test]
fn assistant_text_is_trained_on_with_the_token_that_ends_its_turn() {
    let line = chat(&[
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", "Hello."),
        ("user", "?"),
        ("assistant", "é\n"),
    ]);
    assert_eq!(
        mask(line),
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n\
         <|im_start|>assistant\n⟦Hello.<|im_end|>⟧\n<|im_start|>user\n?<|im_end|>\n\
         <|im_start|>assistant\n⟦é\n<|im_end|>⟧\n"
    );
}

#[test]
fn other_roles_are_trained_on_by_their_whole_turn_if_so_wished() {
    let line = chat(&[("system", "s"), ("user", "Hi"), ("assistant", "Hello."), ("user", "?")]);
    let mask = |roles: &[&str]| {
        let roles = roles.iter().map(|role| role.to_string()).collect();
        mask_with(&line, |config| config.train_roles = roles)
    };
    assert_eq!(
        mask(&["user"]),
        "<|im_start|>system\ns<|im_end|>\n⟦<|im_start|>user\nHi<|im_end|>⟧\n<|im_start|>assistant\nHello.<|im_end|>\n\
         ⟦<|im_start|>user\n?<|im_end|>⟧\n"
    );
    assert!(mask(&["system"]).starts_with("⟦<|im_start|>system\ns<|im_end|>⟧\n<|im_start|>user"));
    let both = mask(&["assistant", "user"]);
    let expected = "⟦<|im_start|>user\nHi<|im_end|>⟧\n<|im_start|>assistant\n⟦Hello.<|im_end|>⟧";
    assert!(both.contains(expected), "{both}");
}

#[test]
fn tool_calls_are_trained_on_and_reasoning_that_the_template_leaves_out_is_not_looked_for() {
    let call = json!([{"function": {"name": "f", "arguments": {"a": 1}}}]);
    let line = json!({"messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello."},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": null, "tool_calls": call},
        {"role": "tool", "content": "c"},
        {"role": "tool", "content": "d"},
        {"role": "assistant", "content": "<think>e</think>f"},
    ]});
    assert_eq!(
        mask(line),
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n⟦Hello.<|im_end|>⟧\n<|im_start|>user\nb<|im_end|>\n\
         <|im_start|>assistant\n⟦\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call><|im_end|>⟧\n\
         <|im_start|>user\n<tool_response>\nc\n</tool_response>\n<tool_response>\nd\n</tool_response><|im_end|>\n\
         <|im_start|>assistant\n⟦<think>e</think>f<|im_end|>⟧\n"
    );
}

/// The spans of a template, in words.
fn spans(template: &str, conversation: &Value, role: &str) -> Result<Vec<String>, String> {
    let special: BTreeMap<String, String> = [("bos_token".into(), "<bos>".into())].into();
    let template = ChatTemplate::new(&[("default", template)], Path::new("t")).unwrap();
    let conversation = Conversation::parse(&conversation.to_string(), Path::new("c")).unwrap();
    let rendered = render(&template, &special, &conversation, &[role.to_string()])?;
    Ok(rendered.trained.iter().map(|span| rendered.text[span.clone()].to_string()).collect())
}

#[test]
fn every_golden_template_shows_the_assistants_words() {
    let golden = std::fs::read_to_string(fixture().with_file_name("chats.json")).unwrap();
    let cases: Vec<Value> = serde_json::from_str(&golden).unwrap();
    let mut found = Vec::new();
    for case in cases.iter().filter(|case| case["add_generation_prompt"] == false) {
        found.extend(spans(case["template"].as_str().unwrap(), case, "assistant").unwrap());
    }
    let call = "\n<tool_call>\n{\"name\": \"wetter\", \"arguments\": {\"ort\": \"Köln\", \"tage\": 2}}\n</tool_call>";
    assert_eq!(
        found,
        [
            "<think>\nhm\n</think>\n\nHello.<|im_end|>".to_string(),
            "Hello.<|im_end|>".into(),
            format!("{call}<|im_end|>"),
            "<think>\nhm\n</think>\n\nHello.<end_of_turn>".into(),
        ]
    );
}

/// Opens the reasoning itself, closes it when a message has none, and leaves it out of all but the last
/// answer.
const THINKS: &str = "{% for m in messages %}<{{ m.role }}>\
    {% if m.role == 'assistant' and loop.last %}<think>{{ m.reasoning or '' }}</think>{% endif %}{{ m.content }}<end>\n\
    {% endfor %}{% if add_generation_prompt %}<assistant><think>{% endif %}";

#[test]
fn the_template_prefix_of_an_answer_is_not_trained_on_and_the_rest_is() {
    let line = json!({"messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning": "r"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "reasoning": "s"},
    ]});
    assert_eq!(spans(THINKS, &line, "assistant").unwrap(), ["b<end>", "s</think>d<end>"]);
    let line = chat(&[("user", "a"), ("assistant", "b")]);
    assert_eq!(spans(THINKS, &line, "assistant").unwrap(), ["</think>b<end>"]);
}

#[test]
fn a_template_that_refuses_half_a_conversation_is_no_hindrance() {
    let refuses = "{% if messages|length < 3 %}{{ raise_exception('too short') }}{% endif %}\
        {% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}";
    let line = chat(&[("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]);
    let error = spans(refuses, &line, "assistant").unwrap_err();
    assert!(error.contains("message 2 cannot be found"), "{error}");
    let line = chat(&[("user", "a"), ("user", "b"), ("assistant", "d")]);
    assert_eq!(spans(refuses, &line, "assistant").unwrap(), ["d</s>"]);
}

#[test]
fn a_message_that_cannot_be_found_is_an_error_with_its_line() {
    let line = chat(&[("user", "a"), ("assistant", "b")]).to_string();
    let data = Data::new(&[("a.jsonl", line.as_bytes())]);
    let template = ChatTemplate::new(&[("default", "{{ messages|length }}")], Path::new("t")).unwrap();
    let text = TextEncoder { template: Some(template), ..TextEncoder::load(&fixture()).unwrap() };
    let files = Files::open(&data.config(&["a.jsonl"]), Split::Train, Arc::new(text), 0).unwrap();
    let error = files.document(0).unwrap_err().to_string();
    assert!(error.contains("a.jsonl, line 1: message 2 cannot be found"), "{error}");
}
