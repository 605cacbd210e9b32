//! HTML page: one file with its style inside and no external resources, and escaping of untrusted text.

/// Returns an HTML page with this heading and `body` (HTML) below it. It refers to no other file or host.
pub fn page(title: &str, body: &str) -> String {
    let title = inline(title);
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
         <title>{title}</title>\n<style>\n{}</style></head>\n<body><main>\n<h1>{title}</h1>\n{body}</main></body></html>\n",
        include_str!("page.css")
    )
}

/// Escapes untrusted text for one line of HTML or for an attribute. Invisible characters (controls, direction
/// marks, zero-width characters) are shown as their code points, `[U+202E]`.
pub fn inline(text: &str) -> String {
    escape(text, false)
}

/// Escapes a sentence; text between backticks becomes `<code>`.
pub fn prose(text: &str) -> String {
    let parts: Vec<&str> = text.split('`').collect();
    let mut html = String::with_capacity(text.len());
    for (index, part) in parts.iter().enumerate() {
        match (index % 2 == 1, index + 1 == parts.len()) {
            (false, _) => html += &inline(part),
            (true, false) => html += &format!("<code>{}</code>", inline(part)),
            (true, true) => html += &format!("`{}", inline(part)),
        }
    }
    html
}

/// Escapes untrusted text of several lines; line breaks and tabs stay.
pub fn block(text: &str) -> String {
    escape(text, true)
}

fn escape(text: &str, keep_lines: bool) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            '\n' | '\t' if keep_lines => escaped.push(character),
            '\n' => escaped.push('↵'),
            '\0'..='\u{1f}'
            | '\u{7f}'..='\u{9f}'
            | '\u{ad}'
            | '\u{61c}'
            | '\u{200b}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}'
            | '\u{feff}' => escaped.push_str(&format!("[U+{:04X}]", character as u32)),
            _ => escaped.push(character),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_from_outside_stays_text() {
        assert_eq!(inline("<script>'\"&"), "&lt;script&gt;&#39;&quot;&amp;");
        assert_eq!(inline("a\nb\tc\0\u{1b}\u{7f}\r"), "a↵b[U+0009]c[U+0000][U+001B][U+007F][U+000D]");
        assert_eq!(block("a\nb\tc\r"), "a\nb\tc[U+000D]");
        assert_eq!(inline("\u{202e}\u{85}\u{200b}"), "[U+202E][U+0085][U+200B]");
        assert_eq!(inline("köln 東京 🚩"), "köln 東京 🚩");
    }

    #[test]
    fn names_between_backticks_are_code_and_a_backtick_alone_is_text() {
        assert_eq!(prose("`a<b` is <c>"), "<code>a&lt;b</code> is &lt;c&gt;");
        assert_eq!(prose("one `two"), "one `two");
        assert_eq!(prose("`a` and `b` and `c"), "<code>a</code> and <code>b</code> and `c");
        assert_eq!(prose(""), "");
    }
}
