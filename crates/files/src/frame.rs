//! A file to write, without the data of its tensors: where every byte goes.

use std::ops::Range;

/// Everything of a file but the data of its tensors.
#[derive(Clone, Debug, Default)]
pub struct Frame {
    /// Bytes beside the tensors, by position.
    pub literals: Vec<(u64, Vec<u8>)>,
    /// First byte of every tensor.
    pub positions: Vec<u64>,
    /// Size of the file.
    pub bytes: u64,
    /// Checksums that are written after the data.
    pub checksums: Vec<Checksum>,
}

/// A checksum (CRC-32) of a range of a file.
#[derive(Clone, Debug)]
pub struct Checksum {
    /// The range.
    pub data: Range<u64>,
    /// Bytes at which it is written.
    pub places: [u64; 2],
}

impl Frame {
    /// A header, and after it tensors of these sizes that start at multiples of `alignment`.
    pub fn aligned(header: Vec<u8>, sizes: impl Iterator<Item = u64>, alignment: u64) -> Frame {
        let mut bytes = header.len() as u64;
        let mut positions = Vec::new();
        for size in sizes {
            positions.push(bytes);
            bytes = (bytes + size).next_multiple_of(alignment);
        }
        Frame { literals: vec![(0, header)], positions, bytes, checksums: Vec::new() }
    }
}
