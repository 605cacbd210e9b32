//! The same file, by its content.

use ballast_train::data::{DataConfig, Documents};

use super::{Data, train};

/// Goes on in `after` from a cursor that was taken in `before`.
fn resumed(name: &str, before: &[u8], after: &[u8], separator: Option<&str>) -> Result<(), String> {
    let files = |content: &[u8]| {
        let data = Data::new(&[(name, content)]);
        let document_separator = separator.map(String::from);
        let config = DataConfig { document_separator, ..data.config(&[name]) };
        (train(&config, 0).unwrap(), data)
    };
    let (mut first, _data) = files(before);
    first.next().unwrap();
    let (mut second, _data) = files(after);
    second.seek(&first.cursor()).map_err(|error| error.to_string())
}

#[test]
fn other_content_of_the_same_size_is_refused() {
    let lines: String = (0..40_000).map(|n| format!("{{\"text\": \"number {n:06}\"}}\n")).collect();
    let last = lines.replace("039999", "039998");
    for (name, before, after) in [("a.jsonl", &lines, &last), ("a.txt", &lines, &last)] {
        assert_eq!(resumed(name, before.as_bytes(), before.as_bytes(), None), Ok(()));
        let error = resumed(name, before.as_bytes(), after.as_bytes(), None).unwrap_err();
        assert!(error.contains("its content has changed since the run was saved"), "{error}");
        assert!(error.contains(name) && error.contains("resume with the same data"), "{error}");
    }
}

#[test]
fn separators_and_marks_do_not_hide_a_change() {
    let text = "one\n---\ntwo\n---\n".repeat(20_000);
    let changed = text.replacen("two", "owt", 1);
    assert_eq!(resumed("a.txt", text.as_bytes(), text.as_bytes(), Some("---")), Ok(()));
    assert!(resumed("a.txt", text.as_bytes(), changed.as_bytes(), Some("---")).is_err());
    let marked = |text: &str| format!("\u{feff}{text}");
    assert_eq!(resumed("a.txt", marked(&text).as_bytes(), marked(&text).as_bytes(), Some("---")), Ok(()));
    assert!(resumed("a.txt", marked(&text).as_bytes(), marked(&changed).as_bytes(), Some("---")).is_err());
}
