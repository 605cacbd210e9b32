//! Selection and order of documents.

use ballast_train::Error;
use ballast_train::data::{Cursor, DataConfig, Document, Documents, Files, Split};

use super::{Data, all, chat, decode, lines, marked, take, text, train};

#[test]
fn an_epoch_has_every_document_once_in_an_order_of_its_own() {
    let data = Data::numbered("a.jsonl", 50);
    let config = data.config(&["a.jsonl"]);
    let epochs = |seed| {
        let mut files = train(&config, seed).unwrap();
        [lines(&take(&mut files, 50)), lines(&take(&mut files, 50))]
    };
    let [first, second] = epochs(1);
    assert_eq!(epochs(1)[1], second);
    assert_ne!(first, second);
    assert_ne!(first, epochs(2)[0]);
    for mut epoch in [first, second] {
        epoch.sort_unstable();
        assert_eq!(epoch, (1..=50).collect::<Vec<_>>());
    }
    let mut ordered = train(&DataConfig { shuffle: false, ..config.clone() }, 1).unwrap();
    assert_eq!(lines(&take(&mut ordered, 50)), (1..=50).collect::<Vec<_>>());
}

#[test]
fn groups_together_have_every_document_once_in_each_epoch() {
    for (documents, groups) in [(12, 4), (10, 4), (7, 3), (3, 8), (5, 1)] {
        let data = Data::numbered("a.jsonl", documents);
        let mut epochs = vec![Vec::new(); 3];
        let mut files = train(&data.config(&["a.jsonl"]), 5).unwrap();
        // The position of a stream is its own.
        take(&mut files, 2);
        for group in 0..groups {
            let mut files = files.share(group as u64, groups as u64);
            for place in (group..epochs.len() * documents).step_by(groups) {
                epochs[place / documents].extend(lines(&take(&mut *files, 1)));
            }
        }
        for (epoch, mut lines) in epochs.into_iter().enumerate() {
            lines.sort_unstable();
            let every: Vec<u64> = (1..=documents as u64).collect();
            assert_eq!(lines, every, "{documents} documents, {groups} groups, epoch {epoch}");
        }
    }
}

#[test]
fn held_out_documents_are_never_trained_on_and_come_in_one_order() {
    let data = Data::numbered("a.jsonl", 60);
    let mut config = data.config(&["a.jsonl"]);
    config.validation_fraction = 0.2;
    let mut trained = train(&config, 3).unwrap();
    let mut held = Files::open(&config, Split::Validation, text(), 3).unwrap();
    assert_eq!((trained.len(), held.len()), (48, 12));
    let (trained, first) = (lines(&take(&mut trained, 200)), lines(&take(&mut held, 12)));
    assert!(first.iter().all(|line| !trained.contains(line)));
    assert_eq!(lines(&take(&mut held, 12)), first, "again from the start");
    take(&mut held, 5);
    held.seek(&Cursor::default()).unwrap();
    assert_eq!(lines(&take(&mut held, 5)), first[..5]);
    config.shuffle = false;
    let in_order = lines(&take(&mut Files::open(&config, Split::Validation, text(), 3).unwrap(), 12));
    let mut sorted = first.clone();
    sorted.sort_unstable();
    assert_eq!(in_order, sorted, "the split does not depend on the order");
}

#[test]
fn a_validation_file_is_used_as_a_whole_and_nothing_else_is_held_out() {
    let data = Data::numbered("a.jsonl", 10);
    std::fs::write(data.path("v.jsonl"), "{\"text\": \"held\"}\n{\"text\": \"out\"}\n").unwrap();
    let mut config = data.config(&["a.jsonl"]);
    (config.validation, config.validation_fraction) = (Some(data.path("v.jsonl")), 0.5);
    assert_eq!(train(&config, 0).unwrap().len(), 10);
    assert_eq!(Files::open(&config, Split::Validation, text(), 0).unwrap().len(), 2);
    config.validation = Some(data.path("a.jsonl"));
    let refused = train(&config, 0).err().unwrap();
    assert!(
        matches!(&refused, Error::Config { problem, .. } if problem.contains("training file too")),
        "{refused}"
    );
}

#[test]
fn files_are_drawn_by_weight_whatever_their_size() {
    let data = Data::numbered("a.jsonl", 3);
    std::fs::write(data.path("b.jsonl"), "{\"text\": \"b\"}\n".repeat(100)).unwrap();
    let mut config = data.config(&["a.jsonl", "b.jsonl", "missing.jsonl"]);
    (config.files[0].weight, config.files[1].weight, config.files[2].weight) = (3.0, 1.0, 0.0);
    const DRAWS: usize = 4000;
    let drawn = take(&mut train(&config, 5).unwrap(), DRAWS);
    let from_a = drawn.iter().filter(|document| document.origin.source.ends_with("a.jsonl")).count() as f64;
    let deviation = (0.75 * 0.25 * DRAWS as f64).sqrt();
    assert!((from_a - 0.75 * DRAWS as f64).abs() < 4.0 * deviation, "{from_a}");
}

#[test]
fn blank_lines_are_no_documents_and_count_as_lines() {
    let content = b"\xef\xbb\xbf\n{\"text\": \"a\"}\r\n\n  \n{\"text\": \"b\"}\n{\"text\": \"c\"}";
    let data = Data::new(&[("a.jsonl", content)]);
    let files = train(&data.config(&["a.jsonl"]), 0).unwrap();
    let found: Vec<(u64, String)> =
        all(&files).iter().map(|document| (document.origin.number, decode(&document.ids[..1]))).collect();
    assert_eq!(found, [(2, "a".into()), (5, "b".into()), (6, "c".into())]);
    assert!(files.document(1).unwrap().origin.to_string().ends_with("a.jsonl, line 5"));
}

#[test]
fn plain_text_is_one_document_or_several_with_a_line_between_them() {
    let data = Data::new(&[("a.txt", b"---\none\n\ntwo\n---\r\n---\n \n---\nthree\n----\n---")]);
    let mut config = data.config(&["a.txt"]);
    assert_eq!(train(&config, 0).unwrap().len(), 1);
    config.document_separator = Some("---".into());
    let documents = all(&train(&config, 0).unwrap());
    assert_eq!(lines(&documents), [2, 9]);
    let texts: Vec<String> = documents.iter().map(marked).collect();
    assert_eq!(texts, ["⟦one\n\ntwo\n<|im_end|>⟧", "⟦three\n----\n<|im_end|>⟧"]);
}

#[test]
fn long_text_is_cut_into_pieces_that_lose_nothing() {
    let line = "Kéln and the rest of it, 10 € or 😀 more. ".repeat(7) + "\n";
    let (lines, words, solid) = (line.repeat(300), "wérter ".repeat(20_000), "é".repeat(40_000));
    let content = format!("{lines}{words}{solid}\n{}", "\n".repeat(70_000));
    let data = Data::new(&[("a.txt", content.as_bytes())]);
    let pieces = all(&train(&data.config(&["a.txt"]), 0).unwrap());
    assert!(pieces.len() >= 5, "{}", pieces.len());
    let (last, others) = pieces.split_last().unwrap();
    let eos = text().eos;
    let is_end = |document: &Document| document.ids.last().copied() == eos;
    assert!(is_end(last) && !others.iter().any(is_end), "the document ends once");
    let together: String = pieces.iter().map(|piece| decode(&piece.ids)).collect();
    assert!(together.trim_end_matches("<|im_end|>").trim_end() == content.trim_end());
}

#[test]
fn a_separator_inside_a_cut_line_is_none() {
    let long = "a".repeat(64 << 10) + "---\nb\n---\nc\n";
    let data = Data::new(&[("a.txt", long.as_bytes())]);
    let mut config = data.config(&["a.txt"]);
    config.document_separator = Some("---".into());
    let pieces = all(&train(&config, 0).unwrap());
    let texts: Vec<String> = pieces[1..].iter().map(marked).collect();
    assert_eq!(texts, ["⟦---\nb\n<|im_end|>⟧", "⟦c\n<|im_end|>⟧"]);
}

#[test]
fn many_short_documents_are_found_across_blocks() {
    let text: String = (0..30_000).map(|n| format!("{n}\n%%\n")).collect();
    let lines: String = (0..80_000).map(|n| format!("{{\"text\": \"{n}\"}}\n")).collect();
    assert!(lines.len() > 1 << 20);
    let data = Data::new(&[("a.txt", text.as_bytes()), ("a.jsonl", lines.as_bytes())]);
    let mut config = data.config(&["a.txt", "a.jsonl"]);
    config.document_separator = Some("%%".into());
    let files = train(&config, 0).unwrap();
    assert_eq!(files.len(), 110_000);
    for (first, documents, end, lines_each) in [(0, 30_000, "\n", 2), (30_000, 80_000, "", 1)] {
        for number in (0..documents).step_by(9_999) {
            let document = files.document(first + number).unwrap();
            assert_eq!(decode(&document.ids), format!("{number}{end}<|im_end|>"));
            assert_eq!(document.origin.number, (lines_each * number + 1) as u64);
        }
    }
}

#[test]
fn documents_that_train_nothing_are_passed_over_and_counted() {
    let (none, some) = (chat(&[("user", "a")]), chat(&[("user", "a"), ("assistant", "b")]));
    let data = Data::new(&[
        ("a.jsonl", format!("{none}\n{some}\n{none}\n").as_bytes()),
        ("b.jsonl", format!("{none}\n{none}\n").as_bytes()),
    ]);
    let mut files = train(&data.config(&["a.jsonl"]), 0).unwrap();
    assert_eq!(lines(&take(&mut files, 4)), [2; 4]);
    assert!((6..=8).contains(&files.skipped()), "{}", files.skipped());
    let error = train(&data.config(&["b.jsonl"]), 0).unwrap().next().unwrap_err().to_string();
    assert!(
        error.contains("b.jsonl: nothing in it is trained on") && error.contains("(assistant)"),
        "{error}"
    );
}
