//! Records: the lines of a `.jsonl` file.

use ballast_model::text::{Conversation, check_integers};
use serde_json::{Map, Value};

/// A document before tokenization.
#[derive(Clone, Debug, PartialEq)]
pub enum Record {
    /// `text`: trained on as a whole.
    Text(String),
    /// `messages`, with optional `tools`: rendered by the chat template; messages of some roles are trained
    /// on.
    Chat(Conversation),
    /// `prompt` and `completion`: the completion is trained on.
    Completion {
        /// The given text.
        prompt: String,
        /// The text to predict.
        completion: String,
    },
}

const KNOWN: &str = "`messages` (and `tools`), `prompt` and `completion`, or `text`";

impl Record {
    /// Parses a line; other fields are ignored. `messages` take precedence over `prompt` and `completion`,
    /// and these over `text`.
    pub fn parse(line: &str) -> Result<Record, String> {
        let mut fields = match serde_json::from_str(line) {
            Ok(Value::Object(fields)) => {
                check_integers(line).map_err(|(at, problem)| format!("column {}: {problem}", at + 1))?;
                fields
            }
            Ok(_) => return Err(format!("not a JSON object; expected one with {KNOWN}")),
            Err(error) => return Err(format!("not valid JSON at column {}: {error}", error.column())),
        };
        let mut take = |name: &str| fields.remove(name).filter(|value| !value.is_null());
        if let Some(messages) = take("messages") {
            let (messages, tools) = (list("messages", messages)?, take("tools"));
            for (number, message) in (1..).zip(&messages) {
                check_message(message).map_err(|problem| format!("message {number} {problem}"))?;
            }
            if messages.is_empty() {
                return Err("`messages` is empty".into());
            }
            let tools = tools.map(|tools| list("tools", tools)).transpose()?;
            return Ok(Record::Chat(Conversation { messages, tools }));
        }
        match (take("prompt"), take("completion"), take("text")) {
            (Some(prompt), Some(completion), _) => Ok(Record::Completion {
                prompt: string("prompt", prompt)?,
                completion: string("completion", completion)?,
            }),
            (_, _, Some(text)) => Ok(Record::Text(string("text", text)?)),
            (Some(_), None, _) => Err("a `prompt` without `completion`".into()),
            (None, Some(_), _) => Err("a `completion` without `prompt`".into()),
            (None, None, None) => {
                Err(format!("no known field; expected are {KNOWN}; it has {}", names(&fields)))
            }
        }
    }
}

fn list(name: &str, value: Value) -> Result<Vec<Value>, String> {
    match value {
        Value::Array(items) => Ok(items),
        _ => Err(format!("`{name}` is not an array")),
    }
}

fn string(name: &str, value: Value) -> Result<String, String> {
    match value {
        Value::String(text) => Ok(text),
        _ => Err(format!("`{name}` is not a string")),
    }
}

/// Checks that a message has a role, and content unless it calls tools.
fn check_message(message: &Value) -> Result<(), String> {
    let Some(fields) = message.as_object() else { return Err("is not an object".into()) };
    match fields.get("role") {
        Some(Value::String(_)) => {}
        Some(_) => return Err("has a `role` that is not a string".into()),
        None => return Err("has no `role`".into()),
    }
    match fields.get("content") {
        Some(Value::String(_) | Value::Array(_)) => Ok(()),
        None | Some(Value::Null) if fields.get("tool_calls").is_some_and(Value::is_array) => Ok(()),
        None | Some(Value::Null) => Err("has no `content`".into()),
        Some(_) => Err("has a `content` that is neither a string nor a list of parts".into()),
    }
}

/// The first few field names.
fn names(fields: &Map<String, Value>) -> String {
    const SHOWN: usize = 8;
    let shown: Vec<String> = fields.keys().take(SHOWN).map(|name| format!("{name:?}")).collect();
    match fields.len() {
        0 => "none".into(),
        n if n > SHOWN => format!("{} and {} more", shown.join(", "), n - SHOWN),
        _ => shown.join(", "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(line: &str) -> String {
        Record::parse(line).unwrap_err()
    }

    #[test]
    fn integers_that_would_lose_digits_are_refused() {
        let line = |id: &str| {
            format!(r#"{{"messages": [{{"role": "user", "content": "a", "tool_calls": [{{"id": {id}}}]}}]}}"#)
        };
        assert!(Record::parse(&line("18446744073709551615")).is_ok());
        let line = line("18446744073709551616");
        let column = 1 + line.find("18446744073709551616").unwrap();
        assert!(refused(&line).contains("does not fit in 64 bits"));
        assert!(refused(&line).starts_with(&format!("column {column}: the integer")), "{}", refused(&line));
    }

    #[test]
    fn every_kind_of_line_is_known_by_its_fields() {
        let text = Record::Text("a".into());
        assert_eq!(Record::parse(r#"{"id": 1, "text": "a", "prompt": null}"#).unwrap(), text);
        assert_eq!(Record::parse(r#"{"text": "a", "prompt": "b"}"#).unwrap(), text);
        assert_eq!(
            Record::parse(r#"{"prompt": "a", "completion": "b", "text": "ab"}"#).unwrap(),
            Record::Completion { prompt: "a".into(), completion: "b".into() }
        );
        let chat = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": []}], "tools": [{}]}"#;
        let Record::Chat(chat) = Record::parse(chat).unwrap() else { panic!("a chat") };
        assert_eq!((chat.messages.len(), chat.tools.map(|tools| tools.len())), (2, Some(1)));
    }

    #[test]
    fn a_bad_line_is_refused_with_its_own_words() {
        for (line, problem) in [
            ("{\"text\": ", "not valid JSON at column 9"),
            ("[1]", "not a JSON object"),
            (r#"{"body": "a", "id": 1}"#, r#"no known field; expected are `messages`"#),
            (r#"{"body": "a", "id": 1}"#, r#"it has "body", "id""#),
            ("{}", "it has none"),
            (r#"{"text": 1}"#, "`text` is not a string"),
            (r#"{"prompt": "a"}"#, "a `prompt` without `completion`"),
            (r#"{"completion": "a"}"#, "a `completion` without `prompt`"),
            (r#"{"prompt": "a", "completion": []}"#, "`completion` is not a string"),
            (r#"{"messages": {}}"#, "`messages` is not an array"),
            (r#"{"messages": []}"#, "`messages` is empty"),
            (r#"{"messages": ["a"]}"#, "message 1 is not an object"),
            (r#"{"messages": [{"content": "a"}]}"#, "message 1 has no `role`"),
            (r#"{"messages": [{"role": 1, "content": "a"}]}"#, "a `role` that is not a string"),
            (
                r#"{"messages": [{"role": "user", "content": "a"}, {"role": "user"}]}"#,
                "message 2 has no `content`",
            ),
            (r#"{"messages": [{"role": "user", "content": 1}]}"#, "neither a string nor a list"),
            (r#"{"messages": [{"role": "user", "content": "a"}], "tools": {}}"#, "`tools` is not an array"),
        ] {
            assert!(refused(line).contains(problem), "{line}: {}", refused(line));
        }
    }
}
