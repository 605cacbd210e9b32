//! Parses arbitrary text as a line of a data file. In a conversation formatted by a template, the trained
//! ranges must lie inside the text, in order, at character boundaries.

#![no_main]

use std::path::Path;
use std::sync::OnceLock;

use ballast_model::text::ChatTemplate;
use ballast_train::data::{Record, render};
use libfuzzer_sys::fuzz_target;

/// Template that drops reasoning from all but the last message and trims, so that not every message can be
/// found by its start.
const TEMPLATE: &str = r#"{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if '</think>' in content and not loop.last %}{% set content = content.split('</think>')[-1] %}{% endif %}
    {{- '<|im_start|>' + message.role + '\n' + content|trim }}
    {%- for call in message.tool_calls or [] %}{{ call.name ~ call.arguments|tojson }}{% endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"#;

fn template() -> &'static ChatTemplate {
    static TEMPLATES: OnceLock<ChatTemplate> = OnceLock::new();
    TEMPLATES.get_or_init(|| {
        ChatTemplate::new(&[("default", TEMPLATE)], Path::new("template")).expect("it is valid")
    })
}

fuzz_target!(|line: &str| {
    let Ok(Record::Chat(conversation)) = Record::parse(line) else { return };
    assert!(!conversation.messages.is_empty());
    for roles in [&["assistant"][..], &["user", "assistant", "system"]] {
        let roles: Vec<String> = roles.iter().map(|role| role.to_string()).collect();
        let Ok(rendered) = render(template(), &Default::default(), &conversation, &roles) else { return };
        let mut end = 0;
        for span in rendered.trained {
            assert!(end <= span.start && span.start < span.end);
            assert!(rendered.text.get(span.clone()).is_some());
            end = span.end;
        }
    }
});
