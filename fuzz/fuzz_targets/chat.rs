//! Parses arbitrary text as a conversation and renders it with templates like ChatML's and Gemma's. Also
//! parses it as a template, which is not run: the memory that a template uses is up to its author.

#![no_main]

use std::path::Path;

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

fuzz_target!(|text: &str| {
    let path = Path::new("chat.json");
    let _ = ChatTemplate::new(&[("default", text)], path);
    let Ok(conversation) = Conversation::parse(text, path) else { return };
    assert!(!conversation.messages.is_empty());
    let template = ChatTemplate::new(&[("default", TEMPLATE)], path).expect("it is valid");
    let _ = template.render(&conversation, &Default::default(), true);
});
