//! The documents of several files, in an order given by the seed.
//!
//! Training: the file of document d is drawn by weight with a hash of (seed, d); draw k from a file of n
//! documents is its document p(k mod n), where p is the permutation of epoch k / n. Validation: all files in
//! sequence, in one fixed order, so that the first documents are the same sample every time.

use std::path::Path;
use std::sync::Arc;

use ballast_format::plural;

use super::index::{Form, Index, Passage};
use super::record::Record;
use super::shuffle::{Permutation, Purpose, hash, unit};
use super::split::{HeldOut, Split};
use super::{Cursor, DataConfig, Document, Documents, FileCursor, Packing, TextEncoder};
use crate::error::{Error, Result};

/// Files drawn by weight, shuffled in every epoch.
#[derive(Clone)]
pub struct Files {
    sources: Vec<Source>,
    role: Split,
    config: DataConfig,
    encoder: Arc<TextEncoder>,
    seed: u64,
    drawn: u64,
    skipped: u64,
    /// Group and number of groups: the documents whose number in the order belongs to the group.
    share: (u64, u64),
}

#[derive(Clone)]
struct Source {
    index: Arc<Index>,
    weight: f64,
    held_out: HeldOut,
    /// The used part of its documents.
    part: Split,
    /// Number of documents drawn, over all epochs.
    taken: u64,
    /// Number of consecutive documents without trained tokens.
    barren: u64,
}

impl Source {
    fn len(&self) -> u64 {
        self.held_out.len(self.part)
    }

    fn cursor(&self) -> FileCursor {
        let Index { bytes, content, .. } = *self.index;
        FileCursor { taken: self.taken, bytes, content: Some(content) }
    }
}

impl Files {
    /// Indexes the files of a split; files of weight 0 are ignored.
    pub fn open(config: &DataConfig, role: Split, encoder: Arc<TextEncoder>, seed: u64) -> Result<Files> {
        config.check()?;
        encoder.check(config)?;
        let separator = config.document_separator.as_deref();
        let source = |path: &Path, weight, held_out, part| -> Result<Source> {
            let index = Arc::new(Index::open(path, separator)?);
            let held_out = HeldOut::new(index.len(), held_out, seed);
            Ok(Source { index, weight, held_out, part, taken: 0, barren: 0 })
        };
        let sources = match (role, &config.validation) {
            (Split::Validation, Some(path)) => vec![source(path, 1.0, 0.0, Split::Train)?],
            _ => {
                let files = config.files.iter().filter(|file| file.weight > 0.0);
                let open = |file: &super::DataFile| source(&file.path, file.weight, config.held_out(), role);
                files.map(open).collect::<Result<_>>()?
            }
        };
        let files = Files {
            sources,
            role,
            config: config.clone(),
            encoder,
            seed,
            drawn: 0,
            skipped: 0,
            share: (0, 1),
        };
        if files.is_empty() {
            return Err(Error::config(
                "data.validation_fraction",
                "data.validation_fraction: too few documents to hold any out; set data.validation to a file, or \
                 data.validation_fraction = 0",
            ));
        }
        Ok(files)
    }

    /// Number of documents in this split.
    pub fn len(&self) -> usize {
        self.sources.iter().map(Source::len).sum::<u64>() as usize
    }

    /// Returns true if there are no documents.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of documents that were skipped because none of their tokens is trained on.
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    /// A document by its number in this split, below [`Files::len`], counted file by file.
    pub fn document(&self, number: usize) -> Result<Document> {
        let (source, number) = self.locate(number as u64);
        self.read(source, number)
    }

    fn locate(&self, mut number: u64) -> (usize, u64) {
        let mut source = 0;
        while source + 1 < self.sources.len() && number >= self.sources[source].len() {
            number -= self.sources[source].len();
            source += 1;
        }
        (source, number)
    }

    fn read(&self, source: usize, number: u64) -> Result<Document> {
        let Source { index, held_out, part, .. } = &self.sources[source];
        let Passage { text, origin, form } = index.read(held_out.document(*part, number))?;
        let (ids, trained) = match form {
            Form::Line => Record::parse(&text).and_then(|record| self.encoder.record(&record, &self.config)),
            Form::Piece { begins, ends } => self
                .encoder
                .plain(&text, begins, ends && self.config.add_eos)
                .map_err(|error| error.to_string()),
        }
        .map_err(|problem| origin.error(problem))?;
        Ok(Document { ids, trained, origin })
    }

    /// File of the next document, and the document's number in it.
    fn draw(&self) -> (usize, u64) {
        let order = |n: u64, k: u64, counters: [u64; 2]| match self.config.shuffle {
            true => Permutation::new(n, hash(self.seed, Purpose::Epoch, counters)).at(k),
            false => k,
        };
        if self.role == Split::Validation {
            let n = self.len() as u64;
            return self.locate(order(n, self.drawn % n, [0, 0]));
        }
        let source = self.draw_file();
        let Source { taken, .. } = self.sources[source];
        let n = self.sources[source].len();
        (source, order(n, taken % n, [taken / n, source as u64]))
    }

    fn draw_file(&self) -> usize {
        let total: f64 = self.sources.iter().map(|source| source.weight).sum();
        let mut point = unit(hash(self.seed, Purpose::File, [self.drawn, 0])) * total;
        let below = |source: &Source| {
            point -= source.weight;
            point < 0.0
        };
        // Rounding may leave the weights just below their sum.
        self.sources.iter().position(below).unwrap_or(self.sources.len() - 1)
    }

    /// Number of tokens of a document that can be used.
    fn reach(&self) -> usize {
        match self.config.packing {
            Packing::Packed => usize::MAX,
            Packing::Padded => self.config.sequence_length,
        }
    }

    /// The error for a file without trained tokens in a whole epoch.
    fn nothing_trained(&self, source: usize) -> Error {
        let Source { index, .. } = &self.sources[source];
        Error::Data {
            file: index.path().into(),
            line: None,
            problem: format!(
                "nothing in it is trained on: no document has two tokens, or a message of the roles in \
                 data.train_roles ({}){}",
                self.config.train_roles.join(", "),
                match self.config.packing {
                    Packing::Packed => String::new(),
                    Packing::Padded => {
                        format!(
                            ", within the first {} tokens (data.sequence_length)",
                            self.config.sequence_length
                        )
                    }
                }
            ),
        }
    }
}

impl Documents for Files {
    fn next(&mut self) -> Result<Document> {
        let (group, groups) = self.share;
        loop {
            // Documents of other groups are drawn, but not read.
            while self.drawn % groups != group {
                let source = self.draw().0;
                self.drawn += 1;
                self.sources[source].taken += 1;
            }
            let (source, number) = self.draw();
            let document = self.read(source, number)?;
            self.drawn += 1;
            let reach = self.reach();
            let from = &mut self.sources[source];
            from.taken += 1;
            if document.trains_within(reach) {
                from.barren = 0;
                return Ok(document);
            }
            from.barren += 1;
            // Consecutive documents without trained tokens, in epochs.
            let epochs = from.barren / from.len();
            // Held-out documents without trained tokens give an evaluation without a score, which is no
            // error.
            if epochs >= 2 && self.role == Split::Validation && document.ids.len() > 1 {
                return Ok(document);
            }
            if epochs >= if self.role == Split::Validation { 4 } else { 2 } {
                return Err(self.nothing_trained(source));
            }
            self.skipped += 1;
        }
    }

    fn cursor(&self) -> Cursor {
        Cursor { drawn: self.drawn, files: self.sources.iter().map(Source::cursor).collect(), offset: 0 }
    }

    fn seek(&mut self, cursor: &Cursor) -> Result {
        let start = vec![FileCursor::default(); self.sources.len()];
        let is_start = *cursor == Cursor::default();
        let files = if is_start { &start } else { &cursor.files };
        if files.len() != self.sources.len() {
            return Err(Error::config(
                "data.files",
                format!(
                    "`data.files` has {}; the saved run had {}",
                    plural(self.sources.len(), "file"),
                    files.len()
                ),
            ));
        }
        for (source, file) in self.sources.iter().zip(files) {
            if !is_start {
                source.cursor().check_same(source.index.path(), file)?;
            }
        }
        self.drawn = cursor.drawn;
        for (source, file) in self.sources.iter_mut().zip(files) {
            (source.taken, source.barren) = (file.taken, 0);
        }
        Ok(())
    }

    fn share(&self, group: u64, groups: u64) -> Box<dyn Documents> {
        let mut files = Files { drawn: 0, skipped: 0, share: (group, groups), ..self.clone() };
        for source in &mut files.sources {
            (source.taken, source.barren) = (0, 0);
        }
        Box::new(files)
    }

    fn epochs_since(&self, cursor: &Cursor) -> u64 {
        let epochs = |(at, source): (usize, &Source)| {
            let before = cursor.files.get(at).map_or(0, |file| file.taken);
            source.taken.saturating_sub(before) / source.len().max(1)
        };
        self.sources.iter().enumerate().map(epochs).min().unwrap_or(0)
    }
}
