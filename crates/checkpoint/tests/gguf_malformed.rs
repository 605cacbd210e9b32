//! Malformed GGUF files, one test each: an error with file, byte and reason, never a panic.

use std::path::Path;

use ballast_contract::Dtype;
use ballast_files::header::TensorInfo;
use ballast_gguf::header::{Header, Value};
use proptest::prelude::*;

fn tensor(name: &str, dtype: Dtype, shape: &[u64], begin: u64) -> TensorInfo {
    let bytes = dtype.bytes_for(shape.iter().product()).unwrap();
    TensorInfo { name: name.into(), dtype, shape: shape.to_vec(), begin, bytes }
}

fn valid() -> Header {
    Header {
        entries: vec![
            ("general.architecture".into(), Value::String("qwen35".into())),
            ("qwen35.block_count".into(), Value::U32(4)),
            ("tokenizer.ggml.tokens".into(), Value::strings(["a".to_string(), "b".to_string()])),
            ("qwen35.flags".into(), Value::array(vec![Value::Bool(true), Value::Bool(false)])),
        ],
        tensors: vec![
            tensor("token_embd.weight", Dtype::Bf16, &[3, 5], 0),
            tensor("output_norm.weight", Dtype::F32, &[5], 32),
            tensor("blk.0.ffn_up.weight", Dtype::Q8_0, &[2, 32], 64),
        ],
    }
}

fn bytes_of(header: &Header) -> Vec<u8> {
    let mut bytes = header.to_bytes();
    bytes.resize(bytes.len() + 64 + 68, 7);
    bytes
}

fn parse(bytes: Vec<u8>) -> Result<Header, String> {
    Header::parse(Path::new("x.gguf"), bytes).map_err(|error| error.to_string())
}

fn assert_refused(bytes: Vec<u8>, words: &[&str]) {
    let error = parse(bytes).unwrap_err();
    assert!(error.starts_with("x.gguf"), "{error}");
    for word in words {
        assert!(error.contains(word), "{error:?} lacks {word:?}");
    }
}

/// Replaces the first occurrence of `from`.
fn replaced(mut bytes: Vec<u8>, from: &[u8], to: &[u8]) -> Vec<u8> {
    let at = bytes.windows(from.len()).position(|window| window == from).unwrap();
    bytes.splice(at..at + from.len(), to.iter().copied());
    bytes
}

#[test]
fn a_written_header_reads_back() {
    let header = valid();
    let back = parse(bytes_of(&header)).unwrap();
    assert_eq!(back.entries, header.entries);
    let data = header.to_bytes().len() as u64;
    for (a, b) in header.tensors.iter().zip(&back.tensors) {
        assert_eq!(&TensorInfo { begin: a.begin + data, ..a.clone() }, b);
    }
}

#[test]
fn a_file_with_another_magic_is_refused() {
    assert_refused(replaced(bytes_of(&valid()), b"GGUF", b"GGML"), &["byte 0", "not a GGUF file"]);
}

#[test]
fn an_empty_file_is_refused() {
    assert_refused(Vec::new(), &["byte 0", "truncated"]);
}

#[test]
fn version_1_is_refused() {
    assert_refused(replaced(bytes_of(&valid()), b"GGUF\x03", b"GGUF\x01"), &["byte 4", "got 1"]);
}

#[test]
fn a_big_endian_file_is_refused() {
    let swapped = replaced(bytes_of(&valid()), b"GGUF\x03\0\0\0", b"GGUF\0\0\0\x03");
    assert_refused(swapped, &["byte 4", "big endian"]);
}

#[test]
fn a_billion_tensors_are_refused_before_memory_is_taken() {
    let mut bytes = bytes_of(&valid());
    bytes[8..16].copy_from_slice(&1_000_000_000u64.to_le_bytes());
    assert_refused(bytes, &["byte 8", "limit"]);
}

#[test]
fn more_entries_than_bytes_are_refused() {
    let mut bytes = bytes_of(&valid());
    bytes[16..24].copy_from_slice(&100_000u64.to_le_bytes());
    assert_refused(bytes, &["entries", "truncated"]);
}

#[test]
fn a_string_longer_than_the_file_is_refused() {
    let bytes = replaced(bytes_of(&valid()), b"\x06\0\0\0\0\0\0\0qwen35", b"\xff\xff\0\0\0\0\0\0qwen35");
    assert_refused(bytes, &["a string needs 65535 bytes"]);
}

#[test]
fn a_string_over_the_limit_is_refused() {
    let bytes =
        replaced(bytes_of(&valid()), b"\x06\0\0\0\0\0\0\0qwen35", b"\xff\xff\xff\xff\xff\xff\xff\xffqwen35");
    assert_refused(bytes, &["over the limit"]);
}

#[test]
fn a_string_that_is_not_utf8_is_refused() {
    assert_refused(replaced(bytes_of(&valid()), b"qwen35", b"qwen\xff5"), &["not UTF-8"]);
}

#[test]
fn a_key_that_occurs_twice_is_refused() {
    let mut header = valid();
    header.entries.push(header.entries[1].clone());
    assert_refused(bytes_of(&header), &["qwen35.block_count", "twice"]);
}

#[test]
fn an_unknown_type_of_a_value_is_refused() {
    let bytes = replaced(bytes_of(&valid()), b"block_count\x04", b"block_count\x0d");
    assert_refused(bytes, &["unknown type 13"]);
}

#[test]
fn a_bool_of_two_is_refused() {
    let bytes = replaced(
        bytes_of(&valid()),
        b"\x07\0\0\0\x02\0\0\0\0\0\0\0\x01",
        b"\x07\0\0\0\x02\0\0\0\0\0\0\0\x02",
    );
    assert_refused(bytes, &["bool", "got 2"]);
}

#[test]
fn an_array_longer_than_the_file_is_refused() {
    let bytes =
        replaced(bytes_of(&valid()), b"\x08\0\0\0\x02\0\0\0\0\0\0\0", b"\x08\0\0\0\xff\xff\x03\0\0\0\0\0");
    assert_refused(bytes, &["an array needs 262143 bytes"]);
}

#[test]
fn deeply_nested_arrays_are_refused() {
    let mut header = valid();
    let nested = (0..9).fold(Value::U32(1), |inner, _| Value::array(vec![inner]));
    header.entries.push(("x".into(), nested));
    assert_refused(bytes_of(&header), &["nested"]);
}

#[test]
fn a_tensor_that_occurs_twice_is_refused() {
    let mut header = valid();
    header.tensors[1].name = "token_embd.weight".into();
    assert_refused(bytes_of(&header), &["token_embd.weight", "twice"]);
}

#[test]
fn a_tensor_of_five_dimensions_is_refused() {
    let mut header = valid();
    header.tensors[0].shape = vec![1, 1, 1, 3, 5];
    assert_refused(bytes_of(&header), &["token_embd.weight", "5 dimensions"]);
}

#[test]
fn a_shape_that_overflows_is_refused() {
    let mut header = valid();
    header.tensors[0].shape = vec![u64::MAX, 16];
    assert_refused(bytes_of(&header), &["token_embd.weight", "below 2^64"]);
}

#[test]
fn rows_that_are_not_whole_blocks_are_refused() {
    let mut header = valid();
    header.tensors[2].shape = vec![4, 16];
    assert_refused(bytes_of(&header), &["blk.0.ffn_up.weight", "whole blocks"]);
}

#[test]
fn a_type_that_is_not_read_is_named() {
    let name = b"output_norm.weight\x01\0\0\0\x05\0\0\0\0\0\0\0";
    let bytes = replaced(bytes_of(&valid()), &[&name[..], &[0]].concat(), &[&name[..], &[12]].concat());
    assert_refused(bytes, &["output_norm.weight", "Q4_K", "not supported"]);
}

#[test]
fn tensors_that_overlap_are_refused() {
    let mut header = valid();
    header.tensors[1].begin = 0;
    assert_refused(bytes_of(&header), &["output_norm.weight", "offset 0", "expected 32"]);
}

#[test]
fn a_gap_between_tensors_is_refused() {
    let mut header = valid();
    header.tensors[1].begin = 64;
    assert_refused(bytes_of(&header), &["output_norm.weight", "expected 32"]);
}

#[test]
fn an_offset_near_the_end_of_u64_is_refused() {
    let mut header = valid();
    header.tensors[0].begin = u64::MAX - 8;
    assert_refused(bytes_of(&header), &["token_embd.weight", "expected 0"]);
}

#[test]
fn a_truncated_file_is_refused() {
    let mut bytes = bytes_of(&valid());
    bytes.truncate(bytes.len() - 1);
    assert_refused(bytes, &["blk.0.ffn_up.weight", "truncated"]);
}

#[test]
fn an_alignment_that_is_no_power_of_two_is_refused() {
    let mut header = valid();
    header.entries.push(("general.alignment".into(), Value::U32(24)));
    assert_refused(bytes_of(&header), &["general.alignment", "24"]);
}

#[test]
fn a_long_name_is_refused() {
    let mut header = valid();
    header.tensors[0].name = "x".repeat(64);
    assert_refused(bytes_of(&header), &["63 bytes"]);
}

proptest! {
    #[test]
    fn a_damaged_file_is_an_error_never_a_panic(at in 0usize..600, byte in any::<u8>()) {
        let mut bytes = bytes_of(&valid());
        let length = bytes.len();
        bytes[at % length] = byte;
        let _ = parse(bytes);
    }

    #[test]
    fn a_cut_file_is_an_error_never_a_panic(end in 0usize..600) {
        let bytes = bytes_of(&valid());
        let end = end.min(bytes.len() - 1);
        prop_assert!(parse(bytes[..end].to_vec()).is_err());
    }
}
