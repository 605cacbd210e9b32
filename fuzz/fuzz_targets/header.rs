//! Parses arbitrary bytes as a safetensors file. Accepted tensors cover the data exactly, and the header
//! survives a round trip.

#![no_main]

use std::path::Path;

use ballast_files::header::{Header, TensorInfo, elements, json_bytes};
use libfuzzer_sys::fuzz_target;

fn parse(file: &[u8]) -> Option<(Header, u64)> {
    let path = Path::new("x.safetensors");
    let length = json_bytes(path, file.len() as u64, &file[..file.len().min(8)]).ok()? as usize;
    let header = Header::parse(path, file.len() as u64, &file[8..8 + length]).ok()?;
    Some((header, 8 + length as u64))
}

/// Returns the header with offsets relative to the start of the data, as it is written.
fn relative(header: &Header, data_start: u64) -> Header {
    let tensors = header.tensors.iter();
    let tensors = tensors.map(|t| TensorInfo { begin: t.begin - data_start, ..t.clone() }).collect();
    Header { metadata: header.metadata.clone(), tensors }
}

fuzz_target!(|file: &[u8]| {
    let Some((header, data_start)) = parse(file) else { return };
    let mut at = data_start;
    for t in &header.tensors {
        assert_eq!(t.begin, at, "a hole or an overlap");
        assert_eq!(elements(&t.shape).and_then(|n| t.dtype.bytes_for(n)), Some(t.bytes));
        at += t.bytes;
    }
    assert_eq!(at, file.len() as u64, "bytes behind the last tensor");

    let header = relative(&header, data_start);
    let written = header.to_bytes();
    assert_eq!(written.len() % 8, 0);
    let again = [&written[..], &file[data_start as usize..]].concat();
    let (read, data_start) = parse(&again).expect("what was written parses");
    assert_eq!(relative(&read, data_start), header);
});
