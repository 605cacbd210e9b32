//! Reading whole files of a person or of an untrusted model: configurations, tokenizers, templates.
//!
//! A pipe waits for a writer who may never come, and a device like /dev/zero has no end. Both are refused before
//! they are opened, and so is a file too large to be what it is read as.

use std::fs::{self, File};
use std::io::{self, Error, ErrorKind, Read};
use std::path::Path;

/// Largest file that is read whole. The largest tokenizers have 35 MB.
pub const MOST_BYTES: u64 = 256 << 20;

/// Opens a file, which must be a regular one.
pub fn open_regular(path: &Path) -> io::Result<File> {
    let found = fs::metadata(path)?;
    // A folder can be opened, and the error of reading it says what it is.
    if !found.is_file() && !found.is_dir() {
        return Err(Error::new(ErrorKind::InvalidInput, "not a regular file"));
    }
    File::open(path)
}

/// Reads a regular file of at most [`MOST_BYTES`].
pub fn read_regular(path: &Path) -> io::Result<Vec<u8>> {
    let file = open_regular(path)?;
    read_bounded(file, MOST_BYTES)
}

/// Reads a regular file of at most [`MOST_BYTES`], which must be UTF-8.
pub fn read_regular_text(path: &Path) -> io::Result<String> {
    utf8(read_regular(path)?)
}

/// Reads standard input, or a file that grows while it is read, up to `most` bytes.
pub fn read_bounded(source: impl Read, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    source.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        let problem = format!("larger than {} MiB, the most that is read whole", most >> 20);
        return Err(Error::new(ErrorKind::InvalidData, problem));
    }
    Ok(bytes)
}

/// Returns the bytes as text, or an error that names the first byte that is not UTF-8.
pub fn utf8(bytes: Vec<u8>) -> io::Result<String> {
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        Error::new(ErrorKind::InvalidData, format!("byte {at}: not UTF-8"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_are_opened() {
        for device in ["/dev/zero", "/dev/null"] {
            let error = read_regular(Path::new(device)).unwrap_err();
            assert_eq!(error.to_string(), "not a regular file", "{device}");
        }
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(read_regular(folder.path()).unwrap_err().kind(), ErrorKind::IsADirectory);
        assert_eq!(read_regular(&folder.path().join("x")).unwrap_err().kind(), ErrorKind::NotFound);
        let file = folder.path().join("text");
        fs::write(&file, b"ab\xff").unwrap();
        assert_eq!(read_regular(&file).unwrap(), b"ab\xff");
        assert_eq!(read_regular_text(&file).unwrap_err().to_string(), "byte 2: not UTF-8");
    }

    #[test]
    fn reading_ends_at_the_limit() {
        assert_eq!(read_bounded(&[1u8; 4][..], 4).unwrap(), [1; 4]);
        let error = read_bounded(io::repeat(0), 1 << 20).unwrap_err().to_string();
        assert_eq!(error, "larger than 1 MiB, the most that is read whole");
        let large = tempfile::NamedTempFile::new().unwrap();
        large.as_file().set_len(MOST_BYTES + 1).unwrap();
        assert!(read_regular(large.path()).unwrap_err().to_string().contains("larger than 256 MiB"));
    }
}
