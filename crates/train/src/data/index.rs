//! Index of the documents in a file.
//!
//! A file is read once in blocks when it is opened; its documents are then read by position. In a `.jsonl`
//! file every line is a document, at 8 bytes in the index (16 more after skipped blank lines). Any other file
//! is plain text: one document, or several between separator lines. A document of more than [`PIECE`] bytes
//! is cut, after a line or before a space, into pieces that are documents of their own.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use ballast_files::encoding::BYTE_ORDER_MARK;

use super::Origin;
use crate::checksum::Content;
use crate::error::{Error, Result};

/// Most bytes of plain text in a piece.
const PIECE: usize = 64 << 10;

/// Size of a block when lines are searched, in bytes.
const BLOCK: usize = 1 << 20;

/// Longest line in bytes: it must fit in memory several times.
const LINE_LIMIT: u64 = 256 << 20;

/// A file and the positions of its documents.
pub(crate) struct Index {
    file: File,
    path: PathBuf,
    pub(crate) bytes: u64,
    /// Start of the text in the file.
    start: u64,
    /// Checksum of the text.
    pub(crate) content: u64,
    places: Places,
}

enum Places {
    Lines(Lines),
    Pieces(Vec<Piece>),
}

#[derive(Default)]
struct Lines {
    /// Start of each line that is not blank.
    starts: Vec<u64>,
    /// Documents that do not follow on the next line, and their line numbers.
    jumps: Vec<(u64, u64)>,
}

#[derive(Clone, Copy)]
struct Piece {
    start: u64,
    length: usize,
    line: u64,
    /// True for the first piece of a document.
    begins: bool,
    /// True for the last piece of a document.
    ends: bool,
}

/// A line, or a piece of plain text.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Passage {
    pub(crate) text: String,
    pub(crate) origin: Origin,
    pub(crate) form: Form,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// JSON.
    Line,
    /// Plain text; true if it is the first and the last piece of its document.
    Piece { begins: bool, ends: bool },
}

impl Index {
    /// Indexes a file.
    pub(crate) fn open(path: &Path, separator: Option<&str>) -> Result<Index> {
        let metadata = std::fs::metadata(path).map_err(Error::io(path, "open"))?;
        if !metadata.is_file() {
            return Err(problem(path, None, "not a file; list the files of a folder one by one"));
        }
        let file = File::open(path).map_err(Error::io(path, "open"))?;
        let mut index = Index {
            file,
            path: path.into(),
            bytes: metadata.len(),
            start: 0,
            content: 0,
            places: Places::Pieces(vec![]),
        };
        index.start = index.find_start()?;
        let mut content = Content::default();
        index.places = match path.extension().is_some_and(|e| e == "jsonl") {
            true => Places::Lines(index.lines(&mut content)?),
            false => Places::Pieces(index.pieces(separator, &mut content)?),
        };
        index.content = content.checksum();
        match index.len() {
            0 => Err(problem(path, None, "there is no document in it")),
            _ => Ok(index),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Number of documents.
    pub(crate) fn len(&self) -> u64 {
        match &self.places {
            Places::Lines(lines) => lines.starts.len() as u64,
            Places::Pieces(pieces) => pieces.len() as u64,
        }
    }

    /// Reads a document by its number, which must be below [`Index::len`].
    pub(crate) fn read(&self, number: u64) -> Result<Passage> {
        let now = self.file.metadata().map_err(Error::io(&self.path, "read the size"))?.len();
        if now != self.bytes {
            let change = format!("it had {} bytes when it was opened and has {now} now", self.bytes);
            return Err(problem(&self.path, None, change + "; data must not change while it is read"));
        }
        let at = number as usize;
        let (start, length, line, form) = match &self.places {
            Places::Lines(lines) => {
                let end = lines.starts.get(at + 1).copied().unwrap_or(self.bytes);
                let start = lines.starts[at];
                (start, (end - start) as usize, lines.line(number), Form::Line)
            }
            Places::Pieces(pieces) => {
                let Piece { start, length, line, begins, ends } = pieces[at];
                (start, length, line, Form::Piece { begins, ends })
            }
        };
        let mut bytes = vec![0; length];
        self.read_at(&mut bytes, start)?;
        if form == Form::Line
            && let Some(end) = bytes.iter().position(|byte| *byte == b'\n')
        {
            bytes.truncate(end);
        }
        let origin = Origin { source: self.path.display().to_string(), number: line };
        match String::from_utf8(bytes) {
            Ok(text) => Ok(Passage { text, origin, form }),
            Err(_) => Err(origin.error("it changed since it was opened: no longer UTF-8")),
        }
    }

    fn read_at(&self, bytes: &mut [u8], at: u64) -> Result {
        self.file.read_exact_at(bytes, at).map_err(Error::io(&self.path, "read"))
    }

    /// Reads text from `at` on into `buffer`; `line` is the line number there. Reads overlap without gaps;
    /// `content` gets the bytes that it does not have yet.
    fn text_at<'b>(
        &self,
        buffer: &'b mut [u8],
        at: u64,
        line: u64,
        content: &mut Content,
    ) -> Result<&'b str> {
        let size = (self.bytes - at).min(buffer.len() as u64) as usize;
        let bytes = &mut buffer[..size];
        self.read_at(bytes, at)?;
        let had = content.length.saturating_sub(at - self.start) as usize;
        content.add(&bytes[had.min(size)..]);
        let error = std::str::from_utf8(bytes).err();
        let valid = error.map_or(size, |error| error.valid_up_to());
        let text = std::str::from_utf8(&bytes[..valid]).unwrap_or_default();
        // A block may end inside a character, the file may not.
        if error.is_some_and(|error| error.error_len().is_some() || at + size as u64 == self.bytes) {
            let what = format!("not UTF-8 at byte {} of the file; save it as UTF-8", at + valid as u64);
            return Err(problem(&self.path, Some(line + newlines(text)), what));
        }
        Ok(text)
    }

    /// Start of the text, after a byte-order mark.
    fn find_start(&self) -> Result<u64> {
        let mut first = [0; BYTE_ORDER_MARK.len()];
        if self.bytes < first.len() as u64 {
            return Ok(0);
        }
        self.read_at(&mut first, 0)?;
        Ok(if first == BYTE_ORDER_MARK { first.len() as u64 } else { 0 })
    }

    fn lines(&self, content: &mut Content) -> Result<Lines> {
        let mut lines = Lines::default();
        let mut buffer = vec![0; BLOCK];
        let (mut at, mut line, mut blank) = (self.start, 1, true);
        let mut line_start = at;
        while at < self.bytes {
            let text = self.text_at(&mut buffer, at, line, content)?;
            for part in text.split_inclusive('\n') {
                if blank && !part.trim_ascii().is_empty() {
                    lines.push(line_start, line);
                    blank = false;
                }
                at += part.len() as u64;
                if part.ends_with('\n') {
                    (line_start, line, blank) = (at, line + 1, true);
                }
            }
        }
        let ends = lines.starts.iter().skip(1).chain([&self.bytes]);
        if let Some(long) = lines.starts.iter().zip(ends).position(|(start, end)| end - start > LINE_LIMIT) {
            let what = format!("longer than {} MiB; split the document", LINE_LIMIT >> 20);
            return Err(problem(&self.path, Some(lines.line(long as u64)), what));
        }
        Ok(lines)
    }

    fn pieces(&self, separator: Option<&str>, content: &mut Content) -> Result<Vec<Piece>> {
        let mut buffer = vec![0; PIECE];
        let mut cutter = Cutter { pieces: Vec::new(), at: self.start, line: 1, begins: true, fresh: true };
        while cutter.at < self.bytes {
            let begin = cutter.at;
            let mut text = self.text_at(&mut buffer, begin, cutter.line, content)?;
            let last = begin + text.len() as u64 == self.bytes;
            while let Some((length, gap)) =
                separator.and_then(|separator| find_line(text, separator, cutter.fresh, last))
            {
                cutter.take(&text[..length + gap], length, true);
                text = &text[length + gap..];
            }
            // Text after a separator may continue beyond the buffer: it is read again from its start.
            if last {
                cutter.take(text, text.len(), true);
            } else if cutter.at == begin {
                let length = cut(text);
                cutter.take(&text[..length], length, false);
            }
        }
        Ok(cutter.pieces)
    }
}

/// Collects the pieces of a file in order.
struct Cutter {
    pieces: Vec<Piece>,
    at: u64,
    line: u64,
    /// True at the start of a document.
    begins: bool,
    /// True at the start of a line.
    fresh: bool,
}

impl Cutter {
    /// Advances past `text`, whose first `length` bytes are a piece; blank pieces are dropped.
    fn take(&mut self, text: &str, length: usize, ends: bool) {
        if !text[..length].trim().is_empty() {
            let Cutter { at, line, begins, .. } = *self;
            self.pieces.push(Piece { start: at, length, line, begins, ends });
            self.begins = ends;
        } else {
            if let (false, true, Some(piece)) = (self.begins, ends, self.pieces.last_mut()) {
                piece.ends = true;
            }
            self.begins |= ends;
        }
        self.at += text.len() as u64;
        self.line += newlines(text);
        self.fresh = text.is_empty() && self.fresh || text.ends_with('\n');
    }
}

impl Lines {
    fn push(&mut self, start: u64, line: u64) {
        let number = self.starts.len() as u64;
        let expected = number.checked_sub(1).map_or(1, |before| self.line(before) + 1);
        if line != expected {
            self.jumps.push((number, line));
        }
        self.starts.push(start);
    }

    /// Line number of a document, from 1.
    fn line(&self, number: u64) -> u64 {
        match self.jumps.partition_point(|(document, _)| *document <= number) {
            0 => number + 1,
            after => self.jumps[after - 1].1 + number - self.jumps[after - 1].0,
        }
    }
}

/// Start and length of the first complete line of `text` that equals `separator`. `fresh` is true if a line
/// starts where `text` does, `last` if one ends where it does.
fn find_line(text: &str, separator: &str, fresh: bool, last: bool) -> Option<(usize, usize)> {
    let mut at = 0;
    for line in text.split_inclusive('\n') {
        let whole = (at > 0 || fresh) && (last || line.ends_with('\n'));
        if whole && line.trim_end_matches(['\r', '\n']) == separator {
            return Some((at, line.len()));
        }
        at += line.len();
    }
    None
}

/// Position of a cut: after the last line, else before the last space, else at the end.
fn cut(text: &str) -> usize {
    let space = || text.rfind(char::is_whitespace).filter(|at| *at > 0);
    text.rfind('\n').map(|at| at + 1).or_else(space).unwrap_or(text.len())
}

fn newlines(text: &str) -> u64 {
    text.bytes().filter(|byte| *byte == b'\n').count() as u64
}

fn problem(file: &Path, line: Option<u64>, problem: impl Into<String>) -> Error {
    Error::Data { file: file.into(), line, problem: problem.into() }
}
