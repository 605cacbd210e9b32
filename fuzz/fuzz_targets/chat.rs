//! Parses arbitrary text as a conversation and renders it with a template like ChatML's and Gemma's. Also
//! parses it as a template, which renders a fixed conversation.

#![no_main]

use std::path::Path;
use std::sync::OnceLock;

use ballast_model::text::{ChatTemplate, Conversation};
use libfuzzer_sys::fuzz_target;

const TEMPLATE: &str = r#"{{ bos_token }}{% if tools %}{% for tool in tools %}{{ tool|tojson }}{{ tool|tojson(indent=2, sort_keys=true) }}{% endfor %}{% endif %}
{%- for message in messages %}
    {%- if message.content is string %}
        {{- '<|im_start|>' + message.role + '\n' + message.content|trim + '<|im_end|>\n' }}
    {%- elif message.content is iterable %}
        {%- for item in message.content %}{{ item.text }}{{ item }}{% endfor %}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}{{ call.name ~ call.arguments|tojson(ensure_ascii=true) }}{% endfor %}
    {%- if '</think>' in message.content|string %}{{ (message.content|string).split('</think>')[-1].lstrip('\n') }}{% endif %}
    {{- message }}
{%- endfor %}"#;

/// Conversation for arbitrary templates: texts, parts, a tool call and a tool.
const CONVERSATION: &str = r#"{"messages": [{"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Wie spät ist es?"}, {"type": "image"}]},
    {"role": "assistant", "content": "<think>\nHm.\n</think>\n\n", "tool_calls": [{"name": "time", "arguments": {"zone": "CET", "n": 1.5}}]},
    {"role": "tool", "content": "12:00"}, {"role": "assistant", "content": "Noon\n"}],
    "tools": [{"type": "function", "function": {"name": "time", "parameters": {"zone": ["CET", null, true]}}}]}"#;

fn conversation() -> &'static Conversation {
    static PARSED: OnceLock<Conversation> = OnceLock::new();
    PARSED.get_or_init(|| Conversation::parse(CONVERSATION, Path::new("chat.json")).expect("it is valid"))
}

fuzz_target!(|text: &str| {
    let path = Path::new("chat.json");
    if let Ok(template) = ChatTemplate::new(&[("default", text)], path) {
        let _ = template.render(conversation(), &Default::default(), true);
    }
    let Ok(conversation) = Conversation::parse(text, path) else { return };
    assert!(!conversation.messages.is_empty());
    let template = ChatTemplate::new(&[("default", TEMPLATE)], path).expect("it is valid");
    let _ = template.render(&conversation, &Default::default(), true);
});
