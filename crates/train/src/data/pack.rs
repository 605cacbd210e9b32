//! Packing of documents into micro-batches.
//!
//! A packed micro-batch has room for `sequence_length` x `sequences` tokens, filled with concatenated
//! documents. Each is a sequence of its own in `cu_seqlens`. A document is cut where a sequence would exceed
//! `sequence_length`, and where the micro-batch is full; the rest begins the next one. A sequence of one
//! token would train nothing, so a cut that would leave one is made a token earlier, and a micro-batch may
//! end one or two tokens before it is full.

use ballast_model::Batch;
use ballast_model::batch::IGNORED;

use super::{Cursor, Document, Documents, Origin, Packing};
use crate::error::Result;

/// Sequences for one forward and backward.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MicroBatch {
    /// Token ids, targets, sequence boundaries.
    pub batch: Batch,
    /// Origin of each sequence.
    pub origins: Vec<Origin>,
}

/// Packs documents into micro-batches.
pub struct Packer {
    documents: Box<dyn Documents>,
    packing: Packing,
    sequence_length: usize,
    sequences: usize,
    /// The document that was cut at the end of the last micro-batch.
    rest: Option<Rest>,
}

struct Rest {
    document: Document,
    /// Number of tokens in earlier sequences.
    used: usize,
    /// Position in the stream before the document.
    before: Cursor,
}

/// A micro-batch under construction.
struct Sequences {
    ids: Vec<u32>,
    labels: Vec<i64>,
    ends: Vec<usize>,
    origins: Vec<Origin>,
}

impl Sequences {
    fn new() -> Sequences {
        Sequences { ids: Vec::new(), labels: Vec::new(), ends: vec![0], origins: Vec::new() }
    }

    fn push(&mut self, document: &Document, tokens: std::ops::Range<usize>) {
        let label = |(id, trained): (&u32, &bool)| if *trained { *id as i64 } else { IGNORED };
        self.labels
            .extend(document.ids[tokens.clone()].iter().zip(&document.trained[tokens.clone()]).map(label));
        self.ids.extend(&document.ids[tokens]);
        self.ends.push(self.ids.len());
        self.origins.push(document.origin.clone());
    }

    fn finish(self) -> Result<MicroBatch> {
        let batch = Batch::with_labels(self.ids, &self.labels, self.ends)?;
        Ok(MicroBatch { batch, origins: self.origins })
    }
}

impl Packer {
    /// Makes micro-batches of `sequences` (at least 1) sequences of `sequence_length` (at least 2) tokens.
    pub fn new(
        documents: Box<dyn Documents>,
        packing: Packing,
        sequence_length: usize,
        sequences: usize,
    ) -> Packer {
        let (sequence_length, sequences) = (sequence_length.max(2), sequences.max(1));
        Packer { documents, packing, sequence_length, sequences, rest: None }
    }

    /// The next micro-batch.
    // Not an iterator: it never ends, and it can fail.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> Result<MicroBatch> {
        match self.packing {
            Packing::Packed => self.next_packed(),
            Packing::Padded => self.next_padded(),
        }
    }

    fn next_packed(&mut self) -> Result<MicroBatch> {
        let mut sequences = Sequences::new();
        loop {
            let room = self.sequence_length * self.sequences - sequences.ids.len();
            if room == 0 {
                return sequences.finish();
            }
            let Rest { document, used, before } = match self.rest.take() {
                Some(rest) => rest,
                None => {
                    let before = self.documents.cursor();
                    Rest { document: self.documents.next()?, used: 0, before }
                }
            };
            let remaining = document.ids.len() - used;
            let piece = piece(remaining, room, self.sequence_length);
            if piece > 0 {
                sequences.push(&document, used..used + piece);
            }
            if piece < remaining {
                self.rest = Some(Rest { document, used: used + piece, before });
                if piece == 0 {
                    return sequences.finish();
                }
            }
        }
    }

    fn next_padded(&mut self) -> Result<MicroBatch> {
        let mut sequences = Sequences::new();
        for _ in 0..self.sequences {
            let document = self.documents.next()?;
            sequences.push(&document, 0..document.ids.len().min(self.sequence_length));
        }
        sequences.finish()
    }

    /// Position in the stream.
    pub fn cursor(&self) -> Cursor {
        match &self.rest {
            None => self.documents.cursor(),
            Some(rest) => Cursor { offset: rest.used, ..rest.before.clone() },
        }
    }

    /// Number of times that every document has come since `cursor`; 0 for a stream without repetition.
    pub(crate) fn epochs_since(&self, cursor: &Cursor) -> u64 {
        self.documents.epochs_since(cursor)
    }

    /// Restores a position, for the same packing and lengths.
    pub fn seek(&mut self, cursor: &Cursor) -> Result {
        let before = Cursor { offset: 0, ..cursor.clone() };
        self.documents.seek(&before)?;
        self.rest = None;
        if cursor.offset > 0 {
            let document = self.documents.next()?;
            if cursor.offset >= document.ids.len() {
                return Err(document.origin.error(format!(
                    "it has {} tokens, but {} of it were used when the run was saved; resume with the same data and tokenizer",
                    document.ids.len(),
                    cursor.offset
                )));
            }
            self.rest = Some(Rest { document, used: cursor.offset, before });
        }
        Ok(())
    }
}

/// Number of tokens that the next sequence takes of a document's `remaining` ones; 0 to start it in the next
/// micro-batch.
fn piece(remaining: usize, room: usize, sequence_length: usize) -> usize {
    let most = room.min(sequence_length);
    if remaining <= most {
        return remaining;
    }
    match if remaining - most == 1 { most - 1 } else { most } {
        // Sequences of two tokens leave no other choice.
        0 | 1 if room >= sequence_length => most,
        0 | 1 => 0,
        piece => piece,
    }
}
