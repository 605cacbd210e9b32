//! Choice of the held-out documents.
//!
//! To hold out v of n documents, the file is cut into v stretches of equal length, and a hash chooses one
//! document of each. The choice depends only on seed and stretch, so it is the same in every epoch and order,
//! and both splits keep the order of the file. A document's number in its split follows by counting, the
//! inverse by bisection.

use super::shuffle::{Purpose, below, hash};

/// A part of the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// Training documents.
    Train,
    /// Held-out documents.
    Validation,
}

/// The held-out documents of a file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeldOut {
    documents: u64,
    /// Number of held-out documents.
    pub(crate) held: u64,
    seed: u64,
}

impl HeldOut {
    /// Holds out a fraction of the documents: none for 0, else at least one, and never all.
    pub(crate) fn new(documents: u64, part: f64, seed: u64) -> HeldOut {
        let wanted = if part > 0.0 { (documents as f64 * part).round().max(1.0) as u64 } else { 0 };
        HeldOut { documents, held: wanted.min(documents.saturating_sub(1)), seed }
    }

    /// Number of documents in a split.
    pub(crate) fn len(&self, split: Split) -> u64 {
        match split {
            Split::Train => self.documents - self.held,
            Split::Validation => self.held,
        }
    }

    /// The document with this number in its split.
    pub(crate) fn document(&self, split: Split, number: u64) -> u64 {
        match split {
            Split::Validation => self.chosen(number),
            Split::Train => {
                // Number of held-out documents before the wanted one.
                let precedes = |count: u64| self.chosen(count - 1) - (count - 1) <= number;
                let (mut low, mut high) = (0, self.held);
                while low < high {
                    let middle = low + (high - low).div_ceil(2);
                    if precedes(middle) { low = middle } else { high = middle - 1 }
                }
                number + low
            }
        }
    }

    /// The held-out document of a stretch.
    fn chosen(&self, stretch: u64) -> u64 {
        let begin = |stretch: u64| (stretch as u128 * self.documents as u128 / self.held as u128) as u64;
        let (begin, end) = (begin(stretch), begin(stretch + 1));
        begin + below(hash(self.seed, Purpose::Split, [stretch, 0]), end - begin)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_parts_are_disjoint_complete_and_in_order(documents in 1u64..500, part in 0.0..0.99f64, seed: u64) {
            let split = HeldOut::new(documents, part, seed);
            let all = |part| (0..split.len(part)).map(|k| split.document(part, k)).collect::<Vec<_>>();
            let (train, validation) = (all(Split::Train), all(Split::Validation));
            prop_assert!(!train.is_empty() && train.is_sorted() && validation.is_sorted());
            let mut together = [train, validation].concat();
            together.sort_unstable();
            prop_assert_eq!(together, (0..documents).collect::<Vec<_>>());
        }
    }

    #[test]
    fn another_seed_holds_out_others_but_as_many() {
        let all = |seed| {
            let split = HeldOut::new(1000, 0.05, seed);
            (0..split.held).map(|k| split.document(Split::Validation, k)).collect::<Vec<_>>()
        };
        assert_eq!((all(1).len(), all(2).len()), (50, 50));
        assert_ne!(all(1), all(2));
    }

    #[test]
    fn a_small_file_gives_one_and_a_single_document_none() {
        assert_eq!(HeldOut::new(3, 0.05, 0).held, 1);
        assert_eq!(HeldOut::new(1, 0.05, 0).held, 0);
        assert_eq!(HeldOut::new(100, 0.0, 0).held, 0);
    }
}
