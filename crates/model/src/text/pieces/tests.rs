use std::path::Path;

use serde_json::{Value, json};

use super::*;
use crate::text::tokenizer::tests::fixture;

fn from_json(json: &Value) -> (tempfile::TempDir, Tokenizer) {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), json.to_string()).unwrap();
    let tokenizer = Tokenizer::load(folder.path()).unwrap();
    (folder, tokenizer)
}

fn fixture_json() -> Value {
    serde_json::from_slice(&std::fs::read(fixture().join("tokenizer.json")).unwrap()).unwrap()
}

fn added(id: u32, content: &str) -> Value {
    json!({ "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true })
}

/// Post-processor that adds one special token before the text and one after it.
fn around() -> Value {
    let special = |id: &str| json!({ "SpecialToken": { "id": id, "type_id": 0 } });
    let text = |id: &str| json!({ "Sequence": { "id": id, "type_id": 0 } });
    let entry = |id: &str, number: u32| json!({ "id": id, "ids": [number], "tokens": [id] });
    json!({
        "type": "TemplateProcessing",
        "single": [special("<bos>"), text("A"), special("<eos>")],
        "pair": [text("A"), text("B")],
        "special_tokens": { "<bos>": entry("<bos>", 1), "<eos>": entry("<eos>", 2) },
    })
}

/// BPE over characters and bytes with spaces as `▁`, as in SentencePiece, without pre-tokenizer.
fn sentence_bpe(normalizer: Value) -> Value {
    let mut tokens: Vec<String> = ["<unk>", "<bos>", "<eos>"].map(String::from).to_vec();
    tokens.extend((0..=255).map(|byte| format!("<0x{byte:02X}>")));
    tokens.extend("▁abcdefghijklmnopqrstuvwxyz0123456789.,\n".chars().map(String::from));
    let merges = [
        "▁ t",
        "h e",
        "▁t he",
        "a n",
        "an d",
        "▁ and",
        "a a",
        "aa aa",
        "▁ ▁",
        "▁▁ ▁▁",
        "e r",
        "i n",
        "in g",
        "o n",
        "s t",
        "\n \n",
        "0 0",
        "00 0",
    ];
    tokens.extend(merges.iter().map(|merge| merge.replace(' ', "")));
    let vocabulary: serde_json::Map<String, Value> =
        tokens.iter().enumerate().map(|(id, token)| (token.clone(), json!(id))).collect();
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [added(0, "<unk>"), added(1, "<bos>"), added(2, "<eos>")],
        "normalizer": normalizer, "pre_tokenizer": null, "post_processor": around(), "decoder": null,
        "model": { "type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
                   "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
                   "vocab": vocabulary, "merges": merges },
    })
}

fn unigram() -> Value {
    let mut pieces = vec![json!(["<unk>", 0.0]), json!(["<bos>", 0.0]), json!(["<eos>", 0.0])];
    for (rank, piece) in ["▁the", "▁and", "ing", "an", "▁a", "er", "st", "00"].iter().enumerate() {
        pieces.push(json!([piece, -3.0 - 0.25 * rank as f64]));
    }
    for character in "▁abcdefghijklmnopqrstuvwxyz0123456789.,\n".chars() {
        pieces.push(json!([character, -8.0]));
    }
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [added(0, "<unk>"), added(1, "<bos>"), added(2, "<eos>")],
        "normalizer": null,
        "pre_tokenizer": { "type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true },
        "post_processor": around(), "decoder": null,
        "model": { "type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": false },
    })
}

fn word_piece() -> Value {
    let mut tokens: Vec<String> =
        ["[UNK]", "<bos>", "<eos>", "the", "and", "##ing", "##er"].map(String::from).to_vec();
    for character in "abcdefghijklmnopqrstuvwxyz0123456789".chars() {
        tokens.extend([character.to_string(), format!("##{character}")]);
    }
    tokens.extend([".", ","].map(String::from));
    let vocabulary: serde_json::Map<String, Value> =
        tokens.iter().enumerate().map(|(id, token)| (token.clone(), json!(id))).collect();
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [added(0, "[UNK]"), added(1, "<bos>"), added(2, "<eos>")],
        "normalizer": { "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
                        "strip_accents": null, "lowercase": true },
        "pre_tokenizer": { "type": "BertPreTokenizer" },
        "post_processor": around(), "decoder": null,
        "model": { "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                   "max_input_chars_per_word": 100, "vocab": vocabulary },
    })
}

/// One tokenizer of every kind.
fn tokenizers() -> Vec<(&'static str, Value)> {
    let replace = json!({ "type": "Replace", "pattern": { "String": " " }, "content": "▁" });
    let prepend = json!({ "type": "Prepend", "prepend": "▁" });
    let mut trimmed = fixture_json();
    trimmed["post_processor"] =
        json!({ "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true });
    let mut cut = fixture_json();
    cut["truncation"] =
        json!({ "direction": "Right", "max_length": 7, "strategy": "LongestFirst", "stride": 0 });
    vec![
        ("the fixture's", fixture_json()),
        ("the fixture's with trimmed offsets", trimmed),
        ("the fixture's with truncation", cut),
        ("spaces replaced", sentence_bpe(replace.clone())),
        ("a space in front", sentence_bpe(json!({ "type": "Sequence", "normalizers": [prepend, replace] }))),
        ("unigram", unigram()),
        ("word pieces", word_piece()),
    ]
}

/// Reproducible random numbers.
struct Draw(u64);

impl Draw {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) as usize) % n
    }
}

/// Words, runs of spaces, digits and line breaks, special tokens, characters of several bytes.
fn text(draw: &mut Draw, bytes: usize) -> String {
    const PARTS: [&str; 24] = [
        "the",
        " the",
        " and",
        "sing",
        "er",
        " ",
        "  ",
        "\n",
        "\n\n",
        "\r\n",
        "\t",
        "0",
        "00017",
        "3.14",
        ",",
        ".",
        "é",
        "e\u{301}",
        "模型",
        "😀",
        "<|im_end|>",
        "<bos>",
        "aaaa",
        "'s",
    ];
    let mut text = String::new();
    while text.len() < bytes {
        let part = PARTS[draw.below(PARTS.len())];
        let times = if draw.below(40) == 0 { 1 + draw.below(300) } else { 1 };
        text.push_str(&part.repeat(times));
    }
    text
}

/// Encodes a text in parts of random lengths.
fn in_pieces(tokenizer: &Tokenizer, text: &str, special: bool, window: usize, draw: &mut Draw) -> Vec<Token> {
    let mut encoder = PieceEncoder::with_window(tokenizer, special, window);
    let (mut tokens, mut rest) = (Vec::new(), text);
    while !rest.is_empty() {
        let part = floor_char(rest, 4 + draw.below(9000));
        tokens.extend(encoder.push(&rest[..part]).unwrap());
        rest = &rest[part..];
    }
    tokens.extend(encoder.finish().unwrap());
    tokens
}

fn whole(tokenizer: &Tokenizer, text: &str, special: bool) -> Vec<Token> {
    let encoding = tokenizer.encoding(text, special).unwrap();
    let token = |(id, (_, end)): (&u32, &(usize, usize))| Token { id: *id, end: *end };
    encoding.get_ids().iter().zip(encoding.get_offsets()).map(token).collect()
}

#[test]
fn the_tokens_of_the_pieces_are_those_of_the_whole_for_every_kind_of_tokenizer() {
    for (name, json) in tokenizers() {
        let (_folder, tokenizer) = from_json(&json);
        let mut draw = Draw(7);
        for case in 0..12 {
            let bytes = 1 + draw.below(60_000);
            let text = text(&mut draw, bytes);
            for special in [false, true] {
                let expected = whole(&tokenizer, &text, special);
                let found = in_pieces(&tokenizer, &text, special, 4096, &mut draw);
                let first = expected.iter().zip(&found).position(|(a, b)| a != b);
                assert!(
                    found == expected,
                    "{name}, case {case}: {} tokens for {}, the first other one is {first:?}",
                    found.len(),
                    expected.len()
                );
            }
        }
    }
}

#[test]
fn a_text_without_a_place_to_cut_is_encoded_as_a_whole() {
    for (name, json) in tokenizers() {
        let (_folder, tokenizer) = from_json(&json);
        for unit in ["a", "ab", " ", "\n", "0", "é", "😀", "<bos>", "aab "] {
            let text = unit.repeat(20_000 / unit.len());
            let found = in_pieces(&tokenizer, &text, true, 4096, &mut Draw(3));
            assert!(found == whole(&tokenizer, &text, true), "{name}: {unit:?}");
        }
    }
}

#[test]
fn long_words_make_the_window_longer_and_the_next_ones_short_again() {
    let tokenizer = Tokenizer::load(&fixture()).unwrap();
    // The vocabulary has tokens with `er` and with `re`, so a token may span any two letters of the word.
    let text = ["the and ".repeat(2000), "er".repeat(15_000), " the and".repeat(40_000)].concat();
    let mut encoder = PieceEncoder::with_window(&tokenizer, false, 4096);
    let (mut tokens, mut longest, mut rest) = (Vec::new(), 0, text.as_str());
    while !rest.is_empty() {
        let part = floor_char(rest, 1000);
        tokens.extend(encoder.push(&rest[..part]).unwrap());
        rest = &rest[part..];
        longest = longest.max(encoder.text.len());
    }
    assert!(longest > 30_000 && encoder.text.len() < 3 * 4096, "{longest}, {}", encoder.text.len());
    tokens.extend(encoder.finish().unwrap());
    assert!(tokens == whole(&tokenizer, &text, false));
}

#[test]
fn plain_text_of_every_kind_is_cut_into_windows_of_the_usual_length() {
    let words = "the singer and the stone are in the sand, and on it. ";
    for (name, json) in tokenizers() {
        let (_folder, tokenizer) = from_json(&json);
        let mut encoder = PieceEncoder::with_window(&tokenizer, true, 4096);
        for _ in 0..600 {
            encoder.push(words).unwrap();
            assert!(encoder.text.len() <= 3 * 4096, "{name}: {}", encoder.text.len());
        }
    }
}

#[test]
fn the_first_tokens_take_only_the_begin_of_a_text() {
    let tokenizer = Tokenizer::load(&fixture()).unwrap();
    let text = "the and of it, ".repeat(20_000);
    let all = whole(&tokenizer, &text, true);
    for limit in [0, 1, 64, 30_000, all.len(), usize::MAX] {
        let (ids, ends) = tokenizer.encode_first(&text, true, limit).unwrap();
        let expected = &all[..limit.min(all.len())];
        assert!(
            ids.iter().zip(&ends).map(|(id, end)| Token { id: *id, end: *end }).eq(expected.iter().copied())
        );
    }
    assert_eq!(tokenizer.encode(&text, true).unwrap().len(), all.len());
}

#[test]
fn truncation_and_padding_of_the_file_are_not_applied() {
    let mut json = fixture_json();
    json["truncation"] =
        json!({ "direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0 });
    json["padding"] = json!({ "strategy": { "Fixed": 500 }, "direction": "Right", "pad_to_multiple_of": null,
                              "pad_id": 0, "pad_type_id": 0, "pad_token": "!" });
    let (folder, tokenizer) = from_json(&json);
    assert!(Path::new(folder.path()).is_dir());
    let plain = Tokenizer::load(&fixture()).unwrap();
    let text = "the cat and the hat, again and again";
    assert_eq!(tokenizer.encode(text, true).unwrap(), plain.encode(text, true).unwrap());
}
