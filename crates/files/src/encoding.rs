//! The byte-order mark that some editors write at the start of a UTF-8 file. It is not part of the text.

/// The mark in UTF-8.
pub const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Removes a mark from the start of a file.
pub fn without_mark(bytes: &[u8]) -> &[u8] {
    bytes.strip_prefix(BYTE_ORDER_MARK).unwrap_or(bytes)
}

/// Removes a mark from the start of a text.
pub fn text_without_mark(text: &str) -> &str {
    text.strip_prefix('\u{feff}').unwrap_or(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_at_the_begin_is_left_out_once_and_nowhere_else() {
        assert_eq!(without_mark(b"\xef\xbb\xbf{}"), b"{}");
        assert_eq!(without_mark(b"{}\xef\xbb\xbf"), b"{}\xef\xbb\xbf");
        assert_eq!(text_without_mark("\u{feff}\u{feff}a"), "\u{feff}a");
        assert_eq!(text_without_mark(""), "");
    }
}
