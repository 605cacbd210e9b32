//! Invalid data files, and their error messages.

use std::sync::Arc;

use ballast_train::Error;
use ballast_train::data::{
    Cursor, DataConfig, DataFile, Documents, Files, Packer, Packing, Split, TextEncoder,
};

use super::{Data, chat, fixture, text, train};

/// The error that a file gives, when it is opened or read.
fn refused(name: &str, content: &[u8]) -> String {
    let data = Data::new(&[(name, content)]);
    match train(&data.config(&[name]), 0).and_then(|mut files| files.next()) {
        Ok(document) => panic!("{document:?}"),
        Err(error @ Error::Data { .. }) => error.to_string(),
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn a_file_that_is_missing_is_refused() {
    let error = train(&Data::new(&[]).config(&["a.jsonl"]), 0).err().unwrap();
    assert!(matches!(error, Error::Io { action: "open", .. }), "{error}");
    assert!(error.to_string().contains("a.jsonl: cannot open"), "{error}");
}

#[test]
fn a_folder_is_refused() {
    let data = Data::new(&[]);
    let files = vec![DataFile { path: data.path("."), weight: 1.0 }];
    let error = train(&DataConfig { files, ..DataConfig::default() }, 0).err().unwrap().to_string();
    assert!(error.contains("not a file"), "{error}");
}

#[test]
fn an_empty_file_is_refused() {
    assert!(refused("a.jsonl", b"").contains("a.jsonl: there is no document in it"));
    assert!(refused("a.jsonl", b"\n \n").contains("there is no document in it"));
    assert!(refused("a.txt", b"\n\n").contains("there is no document in it"));
}

#[test]
fn bytes_that_are_not_utf8_are_refused_with_line_and_byte() {
    assert!(refused("a.txt", b"ab\nc\xffd").contains("a.txt, line 2: not UTF-8 at byte 4 of the file"));
    assert!(
        refused("a.jsonl", b"{\"text\": \"a\"}\n\"\xc3").contains("a.jsonl, line 2: not UTF-8 at byte 15")
    );
}

#[test]
fn a_line_that_is_not_json_is_refused() {
    assert!(refused("a.jsonl", b"\n{\"text\": \n").contains("a.jsonl, line 2: not valid JSON at column 9"));
}

#[test]
fn a_line_without_known_fields_is_refused() {
    let error = refused("a.jsonl", b"{\"body\": \"a\"}");
    assert!(error.contains("line 1: no known field; expected are `messages`"), "{error}");
}

#[test]
fn messages_without_role_or_content_are_refused() {
    assert!(
        refused("a.jsonl", b"{\"messages\": [{\"content\": \"a\"}]}").contains("message 1 has no `role`")
    );
    assert!(
        refused("a.jsonl", b"{\"messages\": [{\"role\": \"user\"}]}").contains("message 1 has no `content`")
    );
}

#[test]
fn messages_without_a_template_are_refused() {
    let data = Data::new(&[("a.jsonl", chat(&[("user", "a")]).to_string().as_bytes())]);
    let text = TextEncoder { template: None, ..TextEncoder::load(&fixture()).unwrap() };
    let files = Files::open(&data.config(&["a.jsonl"]), Split::Train, Arc::new(text), 0).unwrap();
    let error = files.document(0).unwrap_err().to_string();
    assert!(error.contains("line 1: `messages` need a chat template"), "{error}");
}

#[test]
fn an_end_token_that_the_tokenizer_does_not_have_is_refused() {
    let data = Data::numbered("a.jsonl", 2);
    let text = Arc::new(TextEncoder { eos: None, ..TextEncoder::load(&fixture()).unwrap() });
    let mut config = data.config(&["a.jsonl"]);
    let error = Files::open(&config, Split::Train, text.clone(), 0).err().unwrap().to_string();
    assert!(error.contains("data.add_eos") && error.contains("tokenizer_config.json"), "{error}");
    config.add_eos = false;
    Files::open(&config, Split::Train, text, 0).unwrap();
}

#[test]
fn a_split_that_holds_nothing_out_is_refused() {
    let data = Data::numbered("a.jsonl", 1);
    let config = DataConfig { validation_fraction: 0.05, ..data.config(&["a.jsonl"]) };
    assert_eq!(train(&config, 0).unwrap().len(), 1);
    let error = Files::open(&config, Split::Validation, text(), 0).err().unwrap().to_string();
    assert!(error.contains("too few documents"), "{error}");
}

#[test]
fn a_file_that_changes_its_size_while_it_is_read_is_refused() {
    let data = Data::numbered("a.jsonl", 5);
    let mut files = train(&data.config(&["a.jsonl"]), 0).unwrap();
    files.next().unwrap();
    std::fs::write(data.path("a.jsonl"), "{}").unwrap();
    let error = files.next().unwrap_err().to_string();
    assert!(error.contains("bytes when it was opened and has 2 now"), "{error}");
}

#[test]
fn a_cursor_of_other_data_is_refused() {
    let data = Data::numbered("a.jsonl", 5);
    let mut files = train(&data.config(&["a.jsonl"]), 0).unwrap();
    files.next().unwrap();
    let cursor = files.cursor();
    let seek = |data: &Data, names: &[&str]| {
        train(&data.config(names), 0).unwrap().seek(&cursor).unwrap_err().to_string()
    };
    let error = seek(&Data::numbered("a.jsonl", 6), &["a.jsonl"]);
    assert!(error.contains("when the run was saved; resume with the same data"), "{error}");
    let error = seek(&data, &["a.jsonl", "a.jsonl"]);
    assert!(error.contains("`data.files` has 2 files; the saved run had 1"), "{error}");
    let inside = Cursor { offset: 100, ..cursor };
    let mut packer = Packer::new(Box::new(files), Packing::Packed, 8, 1);
    let error = packer.seek(&inside).unwrap_err().to_string();
    assert!(error.contains("resume with the same data and tokenizer"), "{error}");
}
