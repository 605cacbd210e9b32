//! Event files for TensorBoard.
//!
//! A file is a sequence of records: length (u64, little endian), masked crc32c of these eight bytes, payload,
//! masked crc32c of the payload. Masked is `rotate_right(crc, 15) + 0xa282ead8`. The payload is an `Event` in
//! protobuf, of which this module writes five fields: wall time, step, file version, summary, session log.

use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::error::{Error, Result};

/// Placeholder for the host name in file names.
const HOST: &str = "ballast";

/// Writes one event file.
pub struct EventWriter {
    path: PathBuf,
    file: BufWriter<File>,
}

impl EventWriter {
    /// Creates a file in `folder`, and the folder if needed. Files of earlier runs stay; TensorBoard shows
    /// all of them as one run.
    pub fn create(folder: &Path) -> Result<EventWriter> {
        std::fs::create_dir_all(folder).map_err(Error::io(folder, "create"))?;
        let seconds = wall_time() as u64;
        for number in 0.. {
            let path = folder.join(format!("events.out.tfevents.{seconds:010}.{HOST}.{number:03}"));
            match OpenOptions::new().create_new(true).write(true).open(&path) {
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => continue,
                opened => {
                    let file = BufWriter::new(opened.map_err(Error::io(&path, "create"))?);
                    let mut writer = EventWriter { path, file };
                    writer.write(&version_event(wall_time()))?;
                    writer.flush()?;
                    return Ok(writer);
                }
            }
        }
        unreachable!("some number is free")
    }

    #[cfg(test)]
    fn path(&self) -> &Path {
        &self.path
    }

    /// Marks a resume after `step` steps: TensorBoard discards later steps of earlier files.
    pub fn resume(&mut self, step: u64) -> Result {
        self.write(&resume_event(wall_time(), step))
    }

    /// Writes a point of a curve. TensorBoard stores f32.
    pub fn scalar(&mut self, step: u64, tag: &str, value: f64) -> Result {
        self.write(&scalar_event(wall_time(), step, tag, value as f32))
    }

    /// Writes a text, which TensorBoard shows as Markdown.
    pub fn text(&mut self, step: u64, tag: &str, text: &str) -> Result {
        self.write(&text_event(wall_time(), step, tag, text))
    }

    /// Flushes the buffer. Dropping the writer flushes too, but ignores errors.
    pub fn flush(&mut self) -> Result {
        self.file.flush().map_err(Error::io(&self.path, "write"))
    }

    fn write(&mut self, event: &Message) -> Result {
        self.file.write_all(&framed(&event.0)).map_err(Error::io(&self.path, "write"))
    }
}

fn wall_time() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

fn framed(bytes: &[u8]) -> Vec<u8> {
    let length = (bytes.len() as u64).to_le_bytes();
    let mut record = Vec::with_capacity(bytes.len() + 16);
    record.extend_from_slice(&length);
    record.extend_from_slice(&masked_crc32c(&length).to_le_bytes());
    record.extend_from_slice(bytes);
    record.extend_from_slice(&masked_crc32c(bytes).to_le_bytes());
    record
}

// Event: 1 wall_time, 2 step, 3 file_version, 5 summary, 7 session_log.

fn version_event(wall_time: f64) -> Message {
    Message::default().double(1, wall_time).bytes(3, b"brain.Event:2")
}

fn resume_event(wall_time: f64, step: u64) -> Message {
    const START: u64 = 1;
    let session_log = Message::default().varint(1, START);
    // TensorBoard discards steps from this one on.
    Message::default().double(1, wall_time).varint(2, step.saturating_add(1)).message(7, &session_log)
}

fn scalar_event(wall_time: f64, step: u64, tag: &str, value: f32) -> Message {
    value_event(wall_time, step, Message::default().bytes(1, tag.as_bytes()).float(2, value))
}

fn text_event(wall_time: f64, step: u64, tag: &str, text: &str) -> Message {
    const DT_STRING: u64 = 7;
    let plugin = Message::default().bytes(1, b"text");
    let metadata = Message::default().message(1, &plugin);
    let shape = Message::default().message(2, &Message::default().varint(1, 1));
    let tensor = Message::default().varint(1, DT_STRING).message(2, &shape).bytes(8, text.as_bytes());
    let value = Message::default().bytes(1, tag.as_bytes()).message(8, &tensor).message(9, &metadata);
    value_event(wall_time, step, value)
}

fn value_event(wall_time: f64, step: u64, value: Message) -> Message {
    let summary = Message::default().message(1, &value);
    Message::default().double(1, wall_time).varint(2, step).message(5, &summary)
}

/// Encoder of a protobuf message.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    const VARINT: u64 = 0;
    const EIGHT_BYTES: u64 = 1;
    const COUNTED: u64 = 2;
    const FOUR_BYTES: u64 = 5;

    fn varint(self, field: u64, value: u64) -> Message {
        self.key(field, Message::VARINT).raw(value)
    }

    fn double(self, field: u64, value: f64) -> Message {
        self.key(field, Message::EIGHT_BYTES).append(&value.to_le_bytes())
    }

    fn float(self, field: u64, value: f32) -> Message {
        self.key(field, Message::FOUR_BYTES).append(&value.to_le_bytes())
    }

    fn bytes(self, field: u64, bytes: &[u8]) -> Message {
        self.key(field, Message::COUNTED).raw(bytes.len() as u64).append(bytes)
    }

    fn message(self, field: u64, message: &Message) -> Message {
        self.bytes(field, &message.0)
    }

    fn key(self, field: u64, kind: u64) -> Message {
        self.raw((field << 3) | kind)
    }

    fn raw(mut self, mut value: u64) -> Message {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
        self
    }

    fn append(mut self, bytes: &[u8]) -> Message {
        self.0.extend_from_slice(bytes);
        self
    }
}

fn masked_crc32c(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// The cyclic redundancy check of Castagnoli's polynomial, bits reversed.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, byte| CRC_TABLE[usize::from(crc as u8 ^ byte)] ^ (crc >> 8))
}

const CRC_TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut index = 0;
    while index < 256 {
        let mut crc = index as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 == 1 { (crc >> 1) ^ 0x82f6_3b78 } else { crc >> 1 };
            bit += 1;
        }
        table[index] = crc;
        index += 1;
    }
    table
};

#[cfg(test)]
mod tests {
    use super::*;

    const WALL_TIME: f64 = 1_700_000_000.25;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn crc32c_gives_the_published_values() {
        // RFC 3720, B.4.
        let ascending: Vec<u8> = (0..32).collect();
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(&ascending), 0x46dd_794e);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(b""), 0);
    }

    /// The bytes come from the `RecordWriter` and the `event_pb2` of the Python package tensorboard 2.21.0.
    #[test]
    fn records_are_byte_for_byte_those_of_tensorboards_own_writer() {
        let cases = [
            (
                version_event(WALL_TIME),
                "1800000000000000a37f4b220900001040fc54d9411a0d627261696e2e4576656e743a32338d2fe9",
            ),
            (
                scalar_event(WALL_TIME, 300, "loss/train", 0.125),
                "2100000000000000017becf60900001040fc54d94110ac022a130a110a0a6c6f73732f747261696e150000003e526e065a",
            ),
            (
                text_event(WALL_TIME, 300, "samples", "2 + 2 = 4"),
                "3800000000000000a3797d570900001040fc54d94110ac022a2a0a280a0773616d706c6573421308071204120208\
                 01420932202b2032203d20344a080a060a047465787497519353",
            ),
            (
                resume_event(WALL_TIME, 200),
                "100000000000000095fbfe180900001040fc54d94110c9013a02080176577faf",
            ),
        ];
        for (event, expected) in cases {
            assert_eq!(hex(&framed(&event.0)), expected);
        }
    }

    #[test]
    fn a_file_is_its_records_end_to_end_and_two_of_one_second_stay_apart() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("run");
        let mut first = EventWriter::create(&folder).unwrap();
        let second = EventWriter::create(&folder).unwrap();
        assert_ne!(first.path(), second.path());
        first.scalar(1, "loss", f64::NAN).unwrap();
        first.text(1, "sample", "").unwrap();
        first.resume(1).unwrap();
        first.flush().unwrap();

        let name = first.path().file_name().unwrap().to_string_lossy().into_owned();
        assert!(name.starts_with("events.out.tfevents.") && name.contains(".ballast."), "{name}");
        let bytes = std::fs::read(first.path()).unwrap();
        let mut rest = &bytes[..];
        let mut records = 0;
        while !rest.is_empty() {
            let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
            let record = framed(&rest[12..12 + length]);
            assert_eq!(record, rest[..length + 16]);
            rest = &rest[length + 16..];
            records += 1;
        }
        assert_eq!(records, 4);
    }
}
