//! Reads arbitrary bytes as a file of torch.save, as what follows the first bytes of one from before torch 1.6, and
//! as a bare pickle: an error or a list of tensors, in time and memory that the length of the file bounds.

#![no_main]

use std::path::Path;

use ballast_files::header::elements;
use ballast_torch::list;
use ballast_torch::pickle::{Node, Pickle};
use libfuzzer_sys::fuzz_target;

/// Magic number, protocol and system of a file from before torch 1.6.
const LEGACY: &[u8] = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}X\x0d\x00\x00\x00little_endian\x88s.";

fuzz_target!(|file: &[u8]| {
    let path = Path::new("x.pt");
    if let Ok(pickle) = Pickle::parse(file, path, 0) {
        // Every value that the root refers to exists.
        let root = pickle.root();
        for id in pickle.elements(root).unwrap_or_default() {
            pickle.node(*id);
        }
        for (key, value) in pickle.entries(root).unwrap_or_default() {
            assert!(!matches!(pickle.node(*key), Node::Text(_)) || pickle.text(*key).is_some());
            pickle.callable(*value);
        }
    }
    for whole in [file.to_vec(), [LEGACY, file].concat()] {
        let Ok(tensors) = list(path, whole) else { continue };
        for (name, dtype, shape) in tensors {
            let bytes = elements(&shape).and_then(|n| dtype.bytes_for(n));
            assert!(bytes.is_some(), "{name} has no size");
        }
    }
});
