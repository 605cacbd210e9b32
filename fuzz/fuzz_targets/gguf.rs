//! Reads arbitrary bytes as a GGUF file: an error, or tensors that lie in the file without overlap; what is read can
//! be written and read again.

#![no_main]

use std::path::Path;

use ballast_gguf::header::Header;
use ballast_files::header::elements;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|file: &[u8]| {
    let path = Path::new("x.gguf");
    let Ok(header) = Header::parse(path, file.to_vec()) else { return };
    let mut end = 0;
    for t in &header.tensors {
        assert_eq!(elements(&t.shape).and_then(|n| t.dtype.bytes_for(n)), Some(t.bytes));
        assert!(t.begin >= end && t.begin + t.bytes <= file.len() as u64);
        end = t.begin + t.bytes;
    }
    let entries = Header { entries: header.entries, tensors: Vec::new() };
    let again = Header::parse(path, entries.to_bytes()).expect("what was read can be written");
    assert_eq!(format!("{:?}", again.entries), format!("{:?}", entries.entries));
});
