//! Reads `metrics.jsonl` line by line: the file of a long run is large, and other programs may have changed it.

use std::fs::File;
use std::io::{self, BufRead, BufReader, ErrorKind, Read};
use std::path::Path;

use serde_json::Value;

/// Largest number of bytes of a line; a line has about 300.
pub const MAX_LINE_BYTES: u64 = 64 << 10;

/// Iterates over the lines of a file; it ends after an error.
pub struct MetricsLines {
    from: BufReader<File>,
    number: usize,
}

/// One line.
pub struct MetricsLine {
    /// Number of the line, from 1.
    pub number: usize,
    /// The line with its line feed. The last line of a run that was killed may have none.
    pub bytes: Vec<u8>,
}

impl MetricsLines {
    /// Opens a file; None when it does not exist.
    ///
    /// # Errors
    /// A path that is not a regular file, and I/O errors.
    pub fn open(path: &Path) -> io::Result<Option<MetricsLines>> {
        match phalanx_system::files::open_regular(path) {
            Ok(file) => Ok(Some(MetricsLines { from: BufReader::new(file), number: 0 })),
            Err(cause) if cause.kind() == ErrorKind::NotFound => Ok(None),
            Err(cause) => Err(cause),
        }
    }
}

impl Iterator for MetricsLines {
    type Item = io::Result<MetricsLine>;

    fn next(&mut self) -> Option<io::Result<MetricsLine>> {
        let mut bytes = Vec::new();
        let read = self.from.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', &mut bytes);
        self.number += 1;
        match read {
            Err(cause) => Some(Err(cause)),
            Ok(0) => None,
            Ok(_) if bytes.len() as u64 == MAX_LINE_BYTES && !bytes.ends_with(b"\n") => {
                let number = self.number;
                let message = format!(
                    "line {number} has more than {MAX_LINE_BYTES} bytes: the file is damaged; move it away"
                );
                Some(Err(io::Error::new(ErrorKind::InvalidData, message)))
            }
            Ok(_) => Some(Ok(MetricsLine { number: self.number, bytes })),
        }
    }
}

impl MetricsLine {
    /// The JSON of the line; None when it is not valid JSON.
    pub fn record(&self) -> Option<Value> {
        serde_json::from_slice(&self.bytes).ok()
    }

    /// Returns whether the line ends with a line feed.
    pub fn is_whole(&self) -> bool {
        self.bytes.ends_with(b"\n")
    }

    /// The step of a complete record.
    pub fn step(&self) -> Option<u64> {
        self.record().filter(|_| self.is_whole())?.get("step")?.as_u64()
    }
}
