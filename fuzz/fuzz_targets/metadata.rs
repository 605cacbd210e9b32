//! Reads arbitrary bytes as the metadata of torch.distributed.checkpoint, with the content of its files after the
//! separator: an error or a list of tensors, in time and memory that the length bounds.

#![no_main]

use ballast_torch::list_distributed;
use libfuzzer_sys::fuzz_target;

const SEPARATOR: &[u8] = b"\n---\n";

fuzz_target!(|bytes: &[u8]| {
    let at = bytes.windows(SEPARATOR.len()).position(|part| part == SEPARATOR);
    let (metadata, content) = match at {
        Some(at) => (&bytes[..at], &bytes[at + SEPARATOR.len()..]),
        None => (bytes, &[][..]),
    };
    let _ = list_distributed(metadata, content.to_vec());
});
