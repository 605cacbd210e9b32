//! `ballast data inspect`: figures, samples with the mask, boundaries, and errors.

use serde_json::json;

use crate::common::{Run, Scratch};

fn inspect(scratch: &Scratch, args: &[&str]) -> Run {
    scratch.run(&[&["data", "inspect", "--model", "src"], args].concat())
}

/// Two conversations, one of them without an answer, and a completion.
fn with_chats() -> Scratch {
    let scratch = Scratch::with_text_model();
    let lines = [
        json!({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello you."}]}),
        json!({"messages": [{"role": "user", "content": "Hi"}]}),
        json!({"prompt": "one,", "completion": " two"}),
    ];
    scratch.put("chats.jsonl", lines.map(|line| format!("{line}\n")).concat());
    scratch
}

#[test]
fn samples_show_what_is_trained_on_in_brackets() {
    let out = inspect(&with_chats(), &["chats.jsonl"]).exits(0).stdout;
    assert!(out.contains("<|im_start|>assistant\n⟦Hello you.<|im_end|>⟧\n"), "{out}");
    assert!(out.contains("one,⟦ two<|im_end|>⟧\n"), "{out}");
    assert!(out.contains("chats.jsonl, line 2: ") && out.contains(", 0 trained"), "{out}");
    for word in ["3, all read", "1 document", "median", "a packed micro-batch", "chats.jsonl, line 3"] {
        assert!(out.contains(word), "no {word} in\n{out}");
    }
    assert!(!out.contains('\u{1b}'), "{out}");
    let none = inspect(&with_chats(), &["chats.jsonl", "--samples", "0"]).exits(0).stdout;
    assert!(!none.contains('⟦'), "{none}");
}

#[test]
fn json_has_the_figures_of_the_table() {
    let report = inspect(&with_chats(), &["chats.jsonl", "--json", "--sequence-length", "8"]).exits(0).json();
    assert_eq!(report["schema"], "ballast.data.inspect/1");
    assert_eq!((&report["documents"], &report["documents_read"]), (&json!(3), &json!(3)));
    assert_eq!((&report["all_read"], &report["untrained_documents"]), (&json!(true), &json!(1)));
    let samples = report["samples"].as_array().unwrap();
    assert_eq!(samples.len(), 3);
    let sum = |name: &str| samples.iter().map(|sample| sample[name].as_u64().unwrap()).sum::<u64>();
    assert_eq!(report["tokens"], sum("tokens"));
    assert_eq!(report["trained_tokens"], sum("trained_tokens"));
    let most = samples.iter().map(|sample| sample["tokens"].as_u64().unwrap()).max();
    assert_eq!(report["lengths"]["most"].as_u64(), most);
    let sequences = report["micro_batch"]["sequences"].as_array().unwrap();
    let mut end = 0;
    for sequence in sequences {
        assert_eq!(sequence["begin"], end);
        end = sequence["end"].as_u64().unwrap();
        assert!((2..=8).contains(&(end - sequence["begin"].as_u64().unwrap())), "{sequence}");
    }
    assert_eq!(report["micro_batch"]["tokens"], end);
    assert!((30..=32).contains(&end), "{end}");
}

#[test]
fn padded_documents_are_shown_one_by_one() {
    let out =
        inspect(&with_chats(), &["chats.jsonl", "--packing", "padded", "--sequence-length", "6"]).exits(0);
    assert!(
        out.stdout.contains("a padded micro-batch: ") && out.stdout.contains("in 4 sequences"),
        "{}",
        out.stdout
    );
}

#[test]
fn many_documents_are_sampled_unless_all_are_wished() {
    let scratch = Scratch::with_text_model();
    let lines: String = (0..10_500).map(|n| format!("{{\"text\": \"{}\"}}\n", n % 7)).collect();
    scratch.put("many.jsonl", &lines);
    let out = inspect(&scratch, &["many.jsonl"]).exits(0).stdout;
    assert!(out.contains("10,500, a sample of 10,000 read (--all reads all)"), "{out}");
    let all = inspect(&scratch, &["many.jsonl", "--all", "--json"]).exits(0).json();
    assert_eq!((&all["documents_read"], &all["all_read"]), (&json!(10_500), &json!(true)));
    assert_eq!(all["tokens"], 21_000);
    scratch.put("bad.jsonl", lines + "{\"text\": 1}\n");
    inspect(&scratch, &["bad.jsonl", "--all"])
        .exits(3)
        .says(&["bad.jsonl, line 10501: `text` is not a string"]);
}

#[test]
fn roles_separators_and_ends_can_be_chosen() {
    let scratch = with_chats();
    let user = inspect(&scratch, &["chats.jsonl", "--train-roles", "user,assistant"]).exits(0).stdout;
    assert!(user.contains("⟦<|im_start|>user\nHi<|im_end|>⟧"), "{user}");
    scratch.put("plain.txt", "one\n--\ntwo\n");
    let args = ["plain.txt", "--document-separator", "--", "--no-eos"];
    let plain = inspect(&scratch, &args).exits(0).stdout;
    assert!(plain.contains("⟦one\n⟧") && plain.contains("⟦two\n⟧"), "{plain}");
}

#[test]
fn nothing_to_train_on_is_a_check_that_failed() {
    let out = inspect(&with_chats(), &["chats.jsonl", "--train-roles", "tool"]).exits(0).stdout;
    assert!(out.contains("one,⟦ two") && !out.contains("⟦Hello"), "a completion has no role: {out}");
    let scratch = Scratch::with_text_model();
    scratch.put("a.jsonl", "{\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}]}\n");
    let out = inspect(&scratch, &["a.jsonl"]).exits(1).stdout;
    assert!(out.contains("no tokens to train on"), "{out}");
}

#[test]
fn bad_data_is_refused_with_file_and_line() {
    let scratch = with_chats();
    inspect(&scratch, &["none.jsonl"]).exits(3).says(&["none.jsonl: cannot open"]);
    scratch.put("empty.txt", "");
    inspect(&scratch, &["empty.txt"]).exits(3).says(&["empty.txt: there is no document in it"]);
    scratch.put("bytes.jsonl", b"{}\n\xff");
    inspect(&scratch, &["bytes.jsonl"]).exits(3).says(&["bytes.jsonl, line 2: not UTF-8 at byte 3"]);
    scratch.put("fields.jsonl", "{\"text\": \"a\"}\n{\"body\": \"a\"}\n");
    inspect(&scratch, &["fields.jsonl"]).exits(3).says(&["fields.jsonl, line 2: no known field", "\"body\""]);
    assert!(
        inspect(&scratch, &["chats.jsonl", "--sequence-length", "1"])
            .exits(2)
            .stderr
            .contains("--sequence-length")
    );
    assert!(inspect(&scratch, &[]).exits(2).stderr.contains("FILE"));
    std::fs::remove_file(scratch.path("src/tokenizer.json")).unwrap();
    inspect(&scratch, &["chats.jsonl"]).exits(3).says(&["tokenizer.json: cannot read"]);
}
