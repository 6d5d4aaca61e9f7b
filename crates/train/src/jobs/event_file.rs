//! TensorBoard's event files: scalars, and the configuration as text.
//!
//! A file is a sequence of TFRecords, each a serialised `Event` of protocol buffers (TensorFlow's `lib/io/record_writer.cc`,
//! `util/event.proto`, `framework/summary.proto`). Both formats are small enough to be written here.
//!
//! ```text
//! record   u64 length | u32 masked crc32c of the length | bytes | u32 masked crc32c of the bytes      little-endian
//! Event    1: double wall_time   2: int64 step   3: string file_version   5: Summary
//! Summary  1: Value { 1: string tag   2: float simple_value   8: TensorProto   9: SummaryMetadata } for each
//! ```

use crate::jobs::metric_record::{Measured, Sink};

/// Event files of a run, with `config` (TOML) as text.
pub struct EventFile {
    /// Text of the configuration.
    pub config: String,
    /// When the file begins: Unix time in seconds.
    pub began_s: f64,
}

/// Type `DT_STRING` of a `TensorProto`.
const DT_STRING: u64 = 7;

/// Class of data `DATA_CLASS_TENSOR` of a `SummaryMetadata`.
const CLASS_TENSOR: u64 = 2;

impl Sink for EventFile {
    /// The version of the format, by which TensorBoard knows the file, and the configuration: text is Markdown, in which four spaces
    /// before a line keep it as it is.
    fn head(&self) -> Vec<u8> {
        let version = event(self.began_s, 0, bytes(3, b"brain.Event:2"));
        let shown: String = self.config.lines().map(|line| format!("    {line}\n")).collect();
        let text = [whole(1, DT_STRING), bytes(2, b""), bytes(8, shown.as_bytes())].concat();
        let metadata = [bytes(1, &bytes(1, b"text")), whole(4, CLASS_TENSOR)].concat();
        let value = [bytes(1, b"config"), bytes(9, &metadata), bytes(8, &text)].concat();
        [version, event(self.began_s, 0, bytes(5, &bytes(1, &value)))].concat()
    }

    fn record(&self, measured: &Measured) -> Vec<u8> {
        let value = |(name, value): &(&'static str, f64)| {
            bytes(1, &[bytes(1, name.as_bytes()), float(2, *value as f32)].concat())
        };
        let summary: Vec<u8> = measured.values.iter().flat_map(value).collect();
        event(measured.time_s, measured.step, bytes(5, &summary))
    }
}

/// The record of one event.
fn event(time_s: f64, step: u64, rest: Vec<u8>) -> Vec<u8> {
    let event = [vec![1 << 3 | 1], time_s.to_le_bytes().to_vec(), whole(2, step), rest].concat();
    let length = (event.len() as u64).to_le_bytes();
    [&length[..], &masked(&length), &event, &masked(&event)].concat()
}

/// Field `number` of a message: a whole number.
fn whole(number: u64, value: u64) -> Vec<u8> {
    [varint(number << 3), varint(value)].concat()
}

/// Field `number` of a message: text, or another message.
fn bytes(number: u64, value: &[u8]) -> Vec<u8> {
    [&varint(number << 3 | 2)[..], &varint(value.len() as u64), value].concat()
}

/// Field `number` of a message: an f32.
fn float(number: u64, value: f32) -> Vec<u8> {
    [&varint(number << 3 | 5)[..], &value.to_le_bytes()].concat()
}

/// Seven bits a byte, the lowest first; the eighth says that more follow.
fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(2);
    while value >= 128 {
        bytes.push(value as u8 | 128);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

/// The checksum of a record: one that is rotated and moved, since records may hold checksums themselves.
fn masked(bytes: &[u8]) -> [u8; 4] {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
}

/// CRC-32C (Castagnoli), reflected.
fn crc32c(bytes: &[u8]) -> u32 {
    const TABLE: [u32; 256] = table();
    !bytes.iter().fold(!0, |crc: u32, byte| TABLE[usize::from(crc as u8 ^ byte)] ^ crc >> 8)
}

const fn table() -> [u32; 256] {
    let mut table = [0; 256];
    let mut at = 0;
    while at < 256 {
        let (mut crc, mut bit) = (at as u32, 0);
        while bit < 8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
            bit += 1;
        }
        table[at] = crc;
        at += 1;
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 3720, B.4.
    #[test]
    fn checksums_are_those_of_the_standard() {
        let ascending: Vec<u8> = (0..32).collect();
        for (bytes, crc) in [
            (&[0; 32][..], 0x8a91_36aa),
            (&[0xff; 32], 0x62a8_ab43),
            (&ascending, 0x46dd_794e),
            (b"123456789", 0xe306_9283),
        ] {
            assert_eq!(crc32c(bytes), crc, "{bytes:?}");
        }
    }

    /// `tools/check_events.py` reads whole files with TensorBoard.
    #[test]
    fn a_file_begins_with_its_version_and_the_configuration() {
        let file = EventFile { config: "[train]\nsteps = 2".into(), began_s: 1.5 };
        let head = file.head();
        assert_eq!(head[..8], 26u64.to_le_bytes());
        assert_eq!(head[12..22], [9, 0, 0, 0, 0, 0, 0, 0xf8, 0x3f, 16]);
        assert_eq!(&head[23..38], b"\x1a\x0dbrain.Event:2");
        assert!(String::from_utf8_lossy(&head).contains("    [train]\n    steps = 2\n"));
    }
}
