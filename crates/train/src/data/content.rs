//! A checksum of a file's content, made while the file is indexed.

use super::shuffle::mix;

/// Bytes in one order, eight at a time. Where they are cut into pieces makes no difference.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Content {
    sum: u64,
    /// Bytes that do not fill a word yet, the first one lowest.
    word: u64,
    /// Bytes so far.
    pub(crate) length: u64,
}

impl Content {
    /// Adds the next bytes.
    pub(crate) fn add(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() && !self.length.is_multiple_of(8) {
            self.push(bytes[0]);
            bytes = &bytes[1..];
        }
        let (words, rest) = bytes.as_chunks::<8>();
        for word in words {
            self.fold(u64::from_le_bytes(*word));
        }
        self.length += 8 * words.len() as u64;
        rest.iter().for_each(|byte| self.push(*byte));
    }

    fn push(&mut self, byte: u8) {
        self.word |= (byte as u64) << (8 * (self.length % 8));
        self.length += 1;
        if self.length.is_multiple_of(8) {
            self.fold(self.word);
            self.word = 0;
        }
    }

    fn fold(&mut self, word: u64) {
        self.sum = (self.sum ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    }

    /// The checksum of all bytes so far.
    pub(crate) fn checksum(&self) -> u64 {
        mix(mix(self.sum ^ self.word) ^ self.length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn checksum(bytes: &[u8]) -> u64 {
        let mut content = Content::default();
        content.add(bytes);
        content.checksum()
    }

    proptest! {
        #[test]
        fn cuts_make_no_difference(bytes: Vec<u8>, cuts: Vec<usize>) {
            let mut content = Content::default();
            let mut rest = &bytes[..];
            for cut in cuts {
                let (piece, after) = rest.split_at(cut % (rest.len() + 1));
                content.add(piece);
                rest = after;
            }
            content.add(rest);
            prop_assert_eq!(content.checksum(), checksum(&bytes));
        }

        #[test]
        fn a_changed_byte_changes_the_checksum(bytes in prop::collection::vec(any::<u8>(), 1..100), at: usize, change in 1u8..) {
            let mut other = bytes.clone();
            other[at % bytes.len()] ^= change;
            prop_assert_ne!(checksum(&other), checksum(&bytes));
        }
    }

    #[test]
    fn order_and_length_matter() {
        assert_ne!(checksum(b"abcdefgh12345678"), checksum(b"12345678abcdefgh"));
        assert_ne!(checksum(b""), checksum(b"\0"));
        assert_ne!(checksum(b"a\0"), checksum(b"a"));
    }
}
