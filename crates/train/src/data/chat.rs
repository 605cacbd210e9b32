//! Trained spans of a conversation's text.
//!
//! The template renders the whole conversation as one text F. The span of message i in F is found by
//! rendering the conversation up to i:
//!
//! - it begins where the conversation before it ends, including the generation prompt if the role is
//!   `assistant`, because the model is always given that;
//! - it ends where the conversation including it ends, with the end-of-turn token, without white space after
//!   it.
//!
//! Both texts must be prefixes of F. Some templates render a message differently when others follow (without
//! its reasoning, say). Then the conversation is rendered with a mark in place of the message, and the text
//! before and after the mark must be a prefix and a suffix of F. The end-of-turn token is the text after the
//! mark that stays when the conversation ends there.

use std::collections::BTreeMap;
use std::ops::Range;

use ballast_model::text::{ChatTemplate, Conversation};
use serde_json::{Value, json};

/// A rendered conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendered {
    /// The whole text.
    pub text: String,
    /// Byte ranges that are trained on: ordered and disjoint.
    pub trained: Vec<Range<usize>>,
}

/// Renders a conversation and finds the messages of `roles`; `special` are the tokenizer's special tokens by
/// name.
pub fn render(
    template: &ChatTemplate,
    special: &BTreeMap<String, String>,
    conversation: &Conversation,
    roles: &[String],
) -> Result<Rendered, String> {
    let writer = Writer { template, special, conversation };
    let text = writer.write(&conversation.messages, false).map_err(|error| error.to_string())?;
    let mut trained: Vec<Range<usize>> = Vec::new();
    for (i, message) in conversation.messages.iter().enumerate() {
        let role = message.get("role").and_then(Value::as_str).unwrap_or_default();
        if !roles.iter().any(|trained| trained == role) {
            continue;
        }
        let span = writer.span(&text, i, role).ok_or_else(|| {
            format!(
                "message {} cannot be found in the rendered conversation: the chat template writes it differently when \
                 other messages follow; remove its role from data.train_roles or use another template",
                i + 1
            )
        })?;
        let begin = trained.last().map_or(0, |last| last.end).max(span.start);
        if begin < span.end {
            trained.push(begin..span.end);
        }
    }
    Ok(Rendered { text, trained })
}

struct Writer<'a> {
    template: &'a ChatTemplate,
    special: &'a BTreeMap<String, String>,
    conversation: &'a Conversation,
}

impl Writer<'_> {
    fn write(&self, messages: &[Value], add_generation_prompt: bool) -> ballast_model::Result<String> {
        let conversation =
            Conversation { messages: messages.to_vec(), tools: self.conversation.tools.clone() };
        self.template.render(&conversation, self.special, add_generation_prompt)
    }

    /// Byte range of message `i` in `text`.
    fn span(&self, text: &str, i: usize, role: &str) -> Option<Range<usize>> {
        let messages = &self.conversation.messages;
        // A template may reject a part of a conversation.
        let is_begin =
            |part: ballast_model::Result<String>| part.ok().filter(|part| text.starts_with(part.as_str()));
        let before = match (i, role) {
            (0, role) if role != "assistant" => Some(String::new()),
            _ => is_begin(self.write(&messages[..i], role == "assistant")),
        };
        let with = is_begin(self.write(&messages[..=i], false));
        match (before, with) {
            (Some(before), Some(with)) if before.len() <= with.trim_end().len() => {
                Some(before.len()..with.trim_end().len())
            }
            (before, _) => {
                let marked = self.marked(text, i, role)?;
                Some(before.map_or(marked.start, |before| before.len().min(marked.end))..marked.end)
            }
        }
    }

    /// Byte range of message `i`, found with a mark in its place.
    fn marked(&self, text: &str, i: usize, role: &str) -> Option<Range<usize>> {
        let mark = ('\u{e000}'..='\u{f8ff}').find(|mark| !text.contains(*mark))?;
        let mut messages = self.conversation.messages.clone();
        messages[i] = json!({ "role": role, "content": mark.to_string() });
        let whole = self.write(&messages, false).ok()?;
        let (before, after) = (whole.split(mark).next()?, whole.rsplit(mark).next()?);
        if before.len() == whole.len() || !text.starts_with(before) || !text.ends_with(after) {
            return None;
        }
        let content = before.len()..text.len() - after.len();
        let alone = self.write(&messages[..=i], false).ok()?;
        let end_of_turn = alone.rsplit(mark).next()?.trim_end();
        let common = after.chars().zip(end_of_turn.chars()).take_while(|(a, b)| a == b);
        let end = content.end + common.map(|(a, _)| a.len_utf8()).sum::<usize>();
        (content.start <= content.end).then_some(content.start..end)
    }
}
