//! Micro-batches, and where a stream goes on.

use ballast_model::batch::IGNORED;
use ballast_train::Result;
use ballast_train::data::{Cursor, Document, Documents, Origin, Packer, Packing};
use proptest::prelude::*;

use super::{Data, chat, train};

/// Documents of given lengths, over and over, whose ids are all different; every third is not trained on.
struct Counted {
    lengths: Vec<usize>,
    drawn: u64,
}

impl Counted {
    fn document(&self, number: u64) -> Document {
        let length = |number: u64| self.lengths[number as usize % self.lengths.len()];
        let begin: usize = (0..number).map(length).sum();
        let ids = || (begin..begin + length(number)).map(|id| id as u32);
        Document {
            ids: ids().collect(),
            trained: ids().map(|id| id % 3 != 0).collect(),
            origin: Origin { source: "counted".into(), number },
        }
    }
}

impl Documents for Counted {
    fn next(&mut self) -> Result<Document> {
        self.drawn += 1;
        Ok(self.document(self.drawn - 1))
    }

    fn cursor(&self) -> Cursor {
        Cursor { drawn: self.drawn, ..Cursor::default() }
    }

    fn seek(&mut self, cursor: &Cursor) -> Result {
        self.drawn = cursor.drawn;
        Ok(())
    }

    fn share(&self, _: u64, _: u64) -> Box<dyn Documents> {
        unreachable!("these tests read all documents");
    }
}

fn counted(lengths: &[usize], packing: Packing, length: usize, sequences: usize) -> Packer {
    let documents = Counted { lengths: lengths.to_vec(), drawn: 0 };
    Packer::new(Box::new(documents), packing, length, sequences)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn packing_loses_no_token_and_doubles_none(
        lengths in prop::collection::vec(2usize..40, 1..8),
        length in 3usize..16,
        sequences in 1usize..4,
    ) {
        let mut packer = counted(&lengths, Packing::Packed, length, sequences);
        let documents = Counted { lengths, drawn: 0 };
        let mut seen = Vec::new();
        for _ in 0..12 {
            let micro = packer.next().unwrap();
            let batch = &micro.batch;
            prop_assert!((length * sequences - 2..=length * sequences).contains(&batch.tokens()));
            prop_assert_eq!(micro.origins.len() + 1, batch.cu_seqlens.len());
            for (ends, origin) in batch.cu_seqlens.windows(2).zip(&micro.origins) {
                let ids = &batch.ids[ends[0]..ends[1]];
                prop_assert!((2..=length).contains(&ids.len()), "a sequence of {} tokens", ids.len());
                prop_assert!(ids.iter().all(|id| documents.document(origin.number).ids.contains(id)));
                let target = |next: u32| if next.is_multiple_of(3) { IGNORED } else { next as i64 };
                let targets: Vec<i64> = ids[1..].iter().map(|id| target(*id)).chain([IGNORED]).collect();
                prop_assert_eq!(&batch.targets[ends[0]..ends[1]], &targets);
            }
            seen.extend_from_slice(&batch.ids);
        }
        prop_assert_eq!(&seen, &(0..seen.len() as u32).collect::<Vec<_>>());
    }

    #[test]
    fn sequences_of_two_tokens_lose_nothing_either(lengths in prop::collection::vec(1usize..9, 1..5)) {
        let mut packer = counted(&lengths, Packing::Packed, 2, 2);
        let seen: Vec<u32> = (0..20).flat_map(|_| packer.next().unwrap().batch.ids).collect();
        prop_assert!(seen.len() >= 20);
        prop_assert_eq!(&seen, &(0..seen.len() as u32).collect::<Vec<_>>());
    }

    #[test]
    fn a_cursor_gives_what_would_have_followed(
        lengths in prop::collection::vec(2usize..40, 1..8),
        length in 2usize..16,
        before in 0usize..12,
        padded: bool,
    ) {
        let packing = if padded { Packing::Padded } else { Packing::Packed };
        let mut packer = counted(&lengths, packing, length, 2);
        (0..before).for_each(|_| drop(packer.next().unwrap()));
        let saved = serde_json::to_string(&packer.cursor()).unwrap();
        let expected: Vec<_> = (0..6).map(|_| packer.next().unwrap()).collect();
        let mut other = counted(&lengths, packing, length, 2);
        other.seek(&serde_json::from_str(&saved).unwrap()).unwrap();
        prop_assert_eq!(&(0..6).map(|_| other.next().unwrap()).collect::<Vec<_>>(), &expected);
        packer.seek(&serde_json::from_str(&saved).unwrap()).unwrap();
        prop_assert_eq!(&packer.next().unwrap(), &expected[0], "also in the packer that went on");
    }
}

#[test]
fn a_cursor_of_shuffled_files_gives_what_would_have_followed() {
    let none = chat(&[("user", "a")]);
    let answer = |n: usize| chat(&[("user", "a"), ("assistant", &"b".repeat(n))]);
    let chats: String = (0..20).map(|n| format!("{none}\n{}\n", answer(n))).collect();
    let data = Data::numbered("a.jsonl", 30);
    std::fs::write(data.path("b.jsonl"), chats).unwrap();
    let mut config = data.config(&["a.jsonl", "b.jsonl"]);
    config.validation_fraction = 0.1;
    let open = |packing| Packer::new(Box::new(train(&config, 9).unwrap()), packing, 16, 2);
    for packing in [Packing::Packed, Packing::Padded] {
        let mut packer = open(packing);
        let (mut cursors, mut expected) = (Vec::new(), Vec::new());
        for _ in 0..40 {
            cursors.push(packer.cursor());
            expected.push(packer.next().unwrap());
        }
        let cut = cursors.iter().filter(|cursor| cursor.offset > 0).count();
        assert!(if packing == Packing::Packed { cut > 10 } else { cut == 0 }, "{cut}");
        let mut other = open(packing);
        for (at, cursor) in cursors.iter().enumerate().rev() {
            other.seek(cursor).unwrap();
            for expected in expected[at..].iter().take(3) {
                assert_eq!(&other.next().unwrap(), expected, "from micro-batch {at}");
            }
        }
    }
}

#[test]
fn padded_documents_are_a_sequence_each_and_end_where_it_is_full() {
    let micro = counted(&[3, 9, 2], Packing::Padded, 5, 3).next().unwrap();
    assert_eq!(micro.batch.ids, [0, 1, 2, 3, 4, 5, 6, 7, 12, 13]);
    assert_eq!(micro.batch.cu_seqlens, [0, 3, 8, 10]);
    assert_eq!(micro.origins.iter().map(|origin| origin.number).collect::<Vec<_>>(), [0, 1, 2]);
}

#[test]
fn a_document_that_does_not_fit_goes_on_in_the_next_micro_batch() {
    let mut packer = counted(&[3, 9], Packing::Packed, 4, 2);
    let (first, second) = (packer.next().unwrap().batch, packer.next().unwrap().batch);
    assert_eq!((first.cu_seqlens, first.ids.len()), (vec![0, 3, 7], 7), "the last token would be alone");
    assert_eq!(second.cu_seqlens, [0, 3, 5, 8]);
    assert_eq!(second.ids, (7..15).collect::<Vec<_>>());
}
