//! Malformed safetensors files: every command names file, tensor and byte, and changes nothing.

use crate::common::{Scratch, data_start, raw_file, valid_file};

/// Every command refuses a `model.safetensors` of these bytes, with these words.
#[track_caller]
fn refused(file: &[u8], words: &[&str]) {
    let words = [&["src/model.safetensors"], words].concat();
    Scratch::with_model(file).every_command_refuses(&words);
}

/// Does the same for a header and `data` bytes; the error must name this tensor and byte, counted from the
/// start of the data.
#[track_caller]
fn header_refused(header: &str, data: usize, tensor: &str, byte: usize, words: &[&str]) {
    let tensor = if tensor.is_empty() { String::new() } else { format!(", tensor {tensor:?}") };
    let place = format!("src/model.safetensors{tensor}, byte {}: ", data_start(header) + byte);
    refused(&raw_file(header, data), &[&[place.as_str()], words].concat());
}

#[test]
fn an_empty_file_is_too_short() {
    refused(b"", &["model.safetensors, byte 0: 0 bytes are too few"]);
}

#[test]
fn a_file_shorter_than_its_length_field_is_too_short() {
    refused(&[3, 0, 0, 0, 0], &["model.safetensors, byte 0: 5 bytes are too few"]);
}

#[test]
fn a_header_longer_than_the_file_is_truncation() {
    let file = [&1000u64.to_le_bytes()[..], b"{\"a\":1    "].concat();
    refused(&file, &[", byte 0: the header claims 1000 bytes, but the file has only 18: truncated?"]);
}

#[test]
fn a_header_one_byte_longer_than_the_file_is_truncation() {
    let file = [&3u64.to_le_bytes()[..], b"{}"].concat();
    refused(&file, &["the header claims 3 bytes, but the file has only 10: truncated?"]);
}

#[test]
fn a_header_over_the_limit_is_refused_even_in_a_file_that_is_large_enough() {
    let scratch = Scratch::with_model(&100_000_001u64.to_le_bytes());
    let model = scratch.path("src/model.safetensors");
    // Sparse: no disk is used.
    std::fs::File::options().write(true).open(model).unwrap().set_len(100_000_100).unwrap();
    let words = ["model.safetensors, byte 0: ", "claims 100000001 bytes", "limit of 100000000"];
    scratch.refuses(&["inspect", "src"], 3, &words);
    scratch.convert_refuses(&[], 3, &words);
}

#[test]
fn the_largest_length_field_is_refused_without_overflow() {
    refused(&[0xff; 64], &[", byte 0: the header claims 18446744073709551615 bytes"]);
}

#[test]
fn an_empty_header_is_refused() {
    refused(&raw_file("", 16), &["model.safetensors, byte 8: the header does not start with `{`"]);
}

#[test]
fn a_header_that_is_not_utf_8_is_refused_at_its_first_bad_byte() {
    // The 8 bytes of the length, then `{"a`.
    refused(&raw_file(b"{\"a\xff\":1}", 0), &["model.safetensors, byte 11: the header is not UTF-8"]);
}

#[test]
fn a_header_that_is_not_json_is_refused_at_its_first_bad_byte() {
    // The bad `!` is the seventh character of the header.
    refused(&raw_file("{\"a\": !}", 0), &["model.safetensors, byte 14: the header is not valid: "]);
}

#[test]
fn a_header_with_text_behind_its_json_is_refused() {
    refused(&raw_file("{} {}", 0), &["model.safetensors, byte 11: ", "trailing characters"]);
}

#[test]
fn a_header_that_ends_inside_its_json_is_refused() {
    refused(&raw_file(r#"{"a":{"dtype":"F32""#, 0), &["model.safetensors, byte 2", "EOF"]);
}

#[test]
fn a_header_nested_without_end_is_refused() {
    let deep = format!("{{\"a\":{}", "[".repeat(1_000_000));
    refused(&raw_file(deep, 0), &["model.safetensors, byte ", "tensor \"a\""]);
}

#[test]
fn a_tensor_without_a_dtype_is_refused_by_name() {
    refused(
        &raw_file(r#"{"a":{"shape":[1],"data_offsets":[0,4]}}"#, 4),
        &["tensor \"a\"", "missing field `dtype`"],
    );
}

#[test]
fn a_negative_offset_is_refused_by_name() {
    let header = r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}}"#;
    refused(&raw_file(header, 4), &["tensor \"a\"", "`-4`"]);
}

#[test]
fn reversed_offsets_are_refused() {
    let header = r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[8,4]}}"#;
    header_refused(header, 8, "a", 8, &["its offsets are reversed: 8 > 4"]);
}

#[test]
fn overlapping_tensors_are_refused_at_the_second() {
    let header = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}"#;
    header_refused(header, 12, "b", 4, &["overlaps the tensor before it, which ends at data byte 8"]);
}

#[test]
fn a_tensor_past_the_end_is_refused() {
    let header = r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[4],"data_offsets":[4,20]}}"#;
    header_refused(header, 12, "b", 4, &["ends at data byte 20, but the data has 12 bytes: truncated?"]);
}

#[test]
fn offsets_at_the_end_of_64_bits_are_refused_without_overflow() {
    let header =
        r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[18446744073709551614,18446744073709551615]}}"#;
    refused(&raw_file(header, 8), &["tensor \"a\"", "ends at data byte 18446744073709551615"]);
}

#[test]
fn a_hole_between_tensors_is_refused_at_its_first_byte() {
    let header = r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[12,16]}}"#;
    header_refused(header, 16, "b", 4, &["8 bytes before it belong to no tensor"]);
}

#[test]
fn a_hole_before_the_first_tensor_is_refused() {
    let header = r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}}"#;
    header_refused(header, 12, "a", 0, &["8 bytes before it belong to no tensor"]);
}

#[test]
fn trailing_bytes_are_refused_at_the_first_of_them() {
    let header = r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
    header_refused(header, 7, "", 4, &["3 bytes after the last tensor"]);
}

#[test]
fn data_without_tensors_is_refused() {
    header_refused("{}", 5, "", 0, &["5 bytes after the last tensor"]);
}

#[test]
fn a_shape_that_does_not_fill_its_span_is_refused() {
    let header = r#"{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,20]}}"#;
    header_refused(header, 20, "a", 0, &["shape [2, 3] of F32 takes 24 bytes, but its offsets span 20"]);
}

#[test]
fn half_a_byte_of_elements_is_refused() {
    let header = r#"{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}}"#;
    header_refused(header, 2, "a", 0, &["shape [3] of F4 has no size in whole bytes"]);
}

#[test]
fn a_shape_whose_product_overflows_is_refused() {
    let header = r#"{"a":{"dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,0]}}"#;
    header_refused(header, 0, "a", 0, &["[4294967296, 4294967296, 4] of F32", "2^64"]);
}

#[test]
fn a_shape_whose_bytes_overflow_is_refused() {
    let header = r#"{"a":{"dtype":"F64","shape":[4611686018427387904],"data_offsets":[0,0]}}"#;
    header_refused(header, 0, "a", 0, &["[4611686018427387904] of F64", "2^64"]);
}

#[test]
fn a_hundred_thousand_tensors_on_one_range_are_refused_at_the_second() {
    let entry = |i: u32| format!(r#""t{i:06}":{{"dtype":"U8","shape":[1024],"data_offsets":[0,1024]}}"#);
    let header = format!("{{{}}}", (0..100_000).map(entry).collect::<Vec<_>>().join(","));
    header_refused(&header, 1024, "t000001", 0, &["overlaps the tensor before it"]);
}

#[test]
fn a_tensor_key_that_stands_there_twice_is_refused() {
    let header = r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
    refused(&raw_file(header, 1), &["the key \"a\" occurs twice", ", byte "]);
}

#[test]
fn a_metadata_key_that_stands_there_twice_is_refused() {
    refused(&raw_file(r#"{"__metadata__":{"x":"1","x":"2"}}"#, 0), &["the key \"x\" occurs twice"]);
}

#[test]
fn metadata_that_is_not_text_is_refused() {
    refused(&raw_file(r#"{"__metadata__":{"x":1}}"#, 0), &["__metadata__", "expected a string"]);
}

#[test]
fn an_unknown_dtype_is_refused_by_name() {
    let header = r#"{"a":{"dtype":"F13","shape":[4],"data_offsets":[0,4]}}"#;
    header_refused(header, 4, "a", 0, &["unknown dtype \"F13\""]);
}

#[test]
fn every_truncation_of_a_valid_file_is_refused() {
    let whole = valid_file(&[("a", "U8", &[3], b"abc"), ("b", "F32", &[1], &[0; 4])]);
    for length in 0..whole.len() {
        let scratch = Scratch::with_model(&whole[..length]);
        scratch.refuses(&["inspect", "src"], 3, &["src/model.safetensors", ", byte "]);
    }
    Scratch::with_model(&whole).run(&["inspect", "src"]).exits(0);
}

#[test]
fn an_error_is_also_a_json_document_when_json_is_asked_for() {
    let scratch = Scratch::with_model(b"short");
    let run = scratch.refuses(&["inspect", "src", "--json"], 3, &["5 bytes are too few"]);
    assert_eq!(run.json()["exit_code"], 3);
    assert!(run.json()["message"].as_str().unwrap().contains("5 bytes are too few"));
}
