//! Conversations, and the chat template that formats them as text.
//!
//! Templates are Jinja2 as transformers runs it: blocks trimmed, `raise_exception` and `strftime_now` (in
//! UTC), Python's way of writing values and JSON, loop controls, `{% generation %}` blocks that leave no
//! trace.

use std::collections::BTreeMap;
use std::path::Path;

use ballast_files::encoding::text_without_mark;
use ballast_files::regular::read_regular_text;
use minijinja::context;
use serde_json::Value;

use super::template::Templates;
use super::{check_integers, read_object, text_error};
use crate::error::Result;

/// Messages and available tools.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Conversation {
    /// Objects with a `role`, most with a `content`.
    pub messages: Vec<Value>,
    /// Tool descriptions, in the form that the template expects.
    pub tools: Option<Vec<Value>>,
}

impl Conversation {
    /// Parses the text of a file: a JSON array of messages, an object with `messages` and perhaps `tools`, or
    /// JSON lines of one message each.
    pub fn parse(text: &str, file: &Path) -> Result<Conversation> {
        check_integers(text).map_err(|(at, problem)| {
            let line = 1 + text[..at].matches('\n').count();
            text_error(file, format!("line {line}: {problem}"))
        })?;
        let conversation = match serde_json::from_str(text) {
            Ok(Value::Array(messages)) => Conversation { messages, tools: None },
            Ok(Value::Object(mut fields)) if fields.contains_key("messages") => {
                let mut list = |name: &str| match fields.remove(name) {
                    None | Some(Value::Null) => Ok(None),
                    Some(Value::Array(items)) => Ok(Some(items)),
                    Some(_) => Err(text_error(file, format!("`{name}` is not an array"))),
                };
                Conversation { messages: list("messages")?.unwrap_or_default(), tools: list("tools")? }
            }
            Ok(message @ Value::Object(_)) => Conversation { messages: vec![message], tools: None },
            Ok(_) => {
                return Err(text_error(file, "expected an array of messages or an object with `messages`"));
            }
            Err(whole) => Conversation { messages: lines(text, file, &whole)?, tools: None },
        };
        for (i, message) in conversation.messages.iter().enumerate() {
            if !message.get("role").is_some_and(Value::is_string) {
                let problem = format!("message {} is not an object with a `role`", i + 1);
                return Err(text_error(file, problem));
            }
        }
        if conversation.messages.is_empty() {
            return Err(text_error(file, "no messages"));
        }
        Ok(conversation)
    }

    /// Appends a message.
    pub fn say(&mut self, role: &str, content: &str) {
        self.messages.push(serde_json::json!({ "role": role, "content": content }));
    }
}

/// Parses one message per line; `whole` is the error of parsing the text as one JSON document.
fn lines(text: &str, file: &Path, whole: &serde_json::Error) -> Result<Vec<Value>> {
    let lines: Vec<(usize, &str)> =
        text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()).collect();
    // A document over several lines that is broken, not lines of documents.
    let is_lines = lines.first().is_some_and(|(_, line)| serde_json::from_str::<Value>(line).is_ok());
    if !is_lines {
        return Err(text_error(file, format!("not valid JSON: {whole}")));
    }
    lines
        .into_iter()
        .map(|(i, line)| {
            let value: Value = serde_json::from_str(line)
                .map_err(|error| text_error(file, format!("line {}: not valid JSON: {error}", i + 1)))?;
            if value.get("messages").is_some() {
                let problem = format!(
                    "line {}: a conversation per line is not supported; the file must hold one",
                    i + 1
                );
                return Err(text_error(file, problem));
            }
            Ok(value)
        })
        .collect()
}

/// Chat templates by name: `default`, and optionally `tool_use` for conversations with tools.
#[derive(Debug)]
pub struct ChatTemplate {
    templates: Templates,
}

impl ChatTemplate {
    /// Loads the template from the folder of a model: `chat_template.jinja`, else `chat_template` of
    /// `tokenizer_config.json`; `None` where there is neither.
    pub fn load(folder: &Path) -> Result<Option<ChatTemplate>> {
        let file = folder.join("chat_template.jinja");
        if ballast_files::look_at(&file)?.is_some() {
            let source = read_regular_text(&file)
                .map_err(|error| text_error(&file, format!("cannot read: {error}")))?;
            return ChatTemplate::new(&[("default", text_without_mark(&source))], &file).map(Some);
        }
        let file = folder.join("tokenizer_config.json");
        match read_object(&file)?.get("chat_template") {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(source)) => ChatTemplate::new(&[("default", source)], &file).map(Some),
            Some(Value::Array(named)) => {
                let field =
                    |entry: &'_ Value, name: &str| entry.get(name).and_then(Value::as_str).map(String::from);
                let sources: Option<Vec<(String, String)>> = named
                    .iter()
                    .map(|entry| Some((field(entry, "name")?, field(entry, "template")?)))
                    .collect();
                let sources = sources.ok_or_else(|| {
                    text_error(&file, "`chat_template` has an entry without `name` or `template`")
                })?;
                let sources: Vec<(&str, &str)> =
                    sources.iter().map(|(n, s)| (n.as_str(), s.as_str())).collect();
                ChatTemplate::new(&sources, &file).map(Some)
            }
            Some(_) => Err(text_error(&file, "`chat_template` is neither a string nor a list")),
        }
    }

    /// Creates templates from sources by name; errors name `file`.
    pub fn new(sources: &[(&str, &str)], file: &Path) -> Result<ChatTemplate> {
        Templates::new(sources, file).map(|templates| ChatTemplate { templates })
    }

    /// Formats a conversation; `special` are the tokenizer's special tokens by name, as templates use them
    /// (`bos_token`).
    pub fn render(
        &self,
        conversation: &Conversation,
        special: &BTreeMap<String, String>,
        add_generation_prompt: bool,
    ) -> Result<String> {
        let with_tools = conversation.tools.is_some() && self.templates.has("tool_use");
        self.templates.render(if with_tools { "tool_use" } else { "default" }, || {
            let own = context! {
                messages => conversation.messages,
                tools => conversation.tools,
                documents => (),
                add_generation_prompt,
            };
            context! { ..own, ..minijinja::Value::from_serialize(special) }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::tokenizer::tests::{fixture, golden};
    use super::*;

    fn special() -> BTreeMap<String, String> {
        [("bos_token", "<bos>"), ("eos_token", "<eos>")].map(|(k, v)| (k.to_string(), v.to_string())).into()
    }

    fn parse(text: &str) -> Result<Conversation> {
        Conversation::parse(text, Path::new("chat.json"))
    }

    fn refused(text: &str) -> String {
        parse(text).unwrap_err().to_string()
    }

    fn render(template: &str, messages: &str) -> Result<String> {
        ChatTemplate::new(&[("default", template)], Path::new("t"))?.render(
            &parse(messages)?,
            &special(),
            true,
        )
    }

    #[test]
    fn an_integer_beyond_64_bits_is_refused_with_its_line() {
        let error = refused("[\n{\"role\": \"user\", \"id\": 18446744073709551616}\n]");
        let integer =
            "line 2: the integer 18446744073709551616 does not fit in 64 bits; write it as a string";
        assert!(error.ends_with(integer), "{error}");
    }

    #[test]
    fn templates_give_what_transformers_gives() {
        let golden = golden("chats.json");
        let cases = golden.as_array().unwrap();
        assert_eq!(cases.len(), 14);
        for case in cases {
            let text = |name: &str| case[name].as_str().unwrap();
            let template = ChatTemplate::new(&[("default", text("template"))], Path::new("t")).unwrap();
            let conversation = parse(&case.to_string()).unwrap();
            let prompt = case["add_generation_prompt"].as_bool().unwrap();
            let rendered = template.render(&conversation, &special(), prompt);
            assert_eq!(rendered.unwrap(), text("expected"), "{} {prompt}", text("name"));
        }
    }

    #[test]
    fn a_template_can_refuse_a_conversation_and_its_words_are_shown() {
        let error = render("{{ raise_exception('no system role') }}", r#"[{"role": "user"}]"#)
            .unwrap_err()
            .to_string();
        assert!(error.starts_with("t: the chat template: ") && error.contains("no system role"), "{error}");
        let error = render("{% for x in %}", r#"[{"role": "user"}]"#).unwrap_err().to_string();
        assert!(error.contains("cannot be read") && error.contains("default:1"), "{error}");
        let endless = "{% for a in range(9999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}";
        let error = render(endless, r#"[{"role": "user"}]"#).unwrap_err().to_string();
        assert!(error.contains("fuel"), "{error}");
        let error = render("{{ nothing|tojson }}", r#"[{"role": "user"}]"#).unwrap_err().to_string();
        assert!(error.contains("undefined"), "{error}");
    }

    #[test]
    fn the_time_is_there() {
        let text = render("{{ strftime_now('%Y') }}", r#"[{"role": "user"}]"#).unwrap();
        assert!(text.parse::<u32>().unwrap() >= 2026, "{text}");
    }

    #[test]
    fn templates_come_from_their_own_file_or_the_tokenizers_settings_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        let one = parse(r#"[{"role": "user", "content": "x"}]"#).unwrap();
        let tools = parse(r#"{"messages": [{"role": "user"}], "tools": [{}]}"#).unwrap();
        let load = || ChatTemplate::load(folder.path());
        assert!(load().unwrap().is_none());
        put(
            "tokenizer_config.json",
            r#"{"chat_template": [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]}"#,
        );
        let template = load().unwrap().unwrap();
        assert_eq!(template.render(&one, &special(), true).unwrap(), "d");
        assert_eq!(template.render(&tools, &special(), true).unwrap(), "t");
        put("tokenizer_config.json", r#"{"chat_template": [{"name": "default"}]}"#);
        assert!(load().unwrap_err().to_string().contains("without `name` or `template`"));
        put("tokenizer_config.json", r#"{"chat_template": 3}"#);
        assert!(load().unwrap_err().to_string().contains("neither a string nor a list"));
        put("chat_template.jinja", "own {{ bos_token }}");
        assert_eq!(load().unwrap().unwrap().render(&tools, &special(), true).unwrap(), "own <bos>");
        assert!(ChatTemplate::load(&fixture()).unwrap().is_some());
    }

    #[test]
    fn conversations_are_arrays_objects_or_lines() {
        let array =
            parse(r#"[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]"#).unwrap();
        let lines = parse(
            "{\"role\": \"user\", \"content\": \"a\"}\n\n{\"role\": \"assistant\", \"content\": \"b\"}\n",
        )
        .unwrap();
        assert_eq!(array, lines);
        let mut said = Conversation::default();
        said.say("user", "a");
        said.say("assistant", "b");
        assert_eq!(array, said);
        let one = parse(r#"{"role": "user", "content": "a"}"#).unwrap();
        assert_eq!(one.messages.len(), 1);
        let object = parse(r#"{"messages": [{"role": "user"}], "tools": [{"name": "f"}]}"#).unwrap();
        assert_eq!((object.messages.len(), object.tools.unwrap().len()), (1, 1));
    }

    #[test]
    fn a_malformed_conversation_is_refused_with_its_place() {
        assert!(refused("[").contains("chat.json: not valid JSON"));
        assert!(refused("").contains("not valid JSON"));
        assert!(refused("[]").contains("no messages"));
        assert!(refused("7").contains("expected an array of messages"));
        assert!(refused("[{\"content\": \"x\"}]").contains("message 1 is not an object with a `role`"));
        assert!(refused("{\"messages\": {}}").contains("`messages` is not an array"));
        assert!(
            refused("{\"messages\": [{\"role\": \"user\"}], \"tools\": 1}")
                .contains("`tools` is not an array")
        );
        assert!(refused("{\"role\": \"user\"}\n{\"role\":\n").contains("line 2: not valid JSON"));
        let two = "{\"messages\": [{\"role\": \"user\"}]}\n{\"messages\": [{\"role\": \"user\"}]}";
        assert!(refused(two).contains("line 1: a conversation per line"));
    }
}
