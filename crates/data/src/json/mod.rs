//! Reads JSON as Python writes it, in constant memory: `NaN`, `Infinity` and `-Infinity` are numbers, integers have any
//! length, of a key that occurs twice the last value counts, and half of a surrogate pair alone becomes U+FFFD.
//!
//! Nothing but the text that is asked for is held, and a long text is only remembered by its place: a line of a gigabyte
//! takes no more memory than a line of a kilobyte.

mod record;
mod strings;
mod values;

use std::io::{self, Read};

pub(crate) use record::Record;

/// Bytes that are read at once.
const BUFFER_BYTES: usize = 1 << 16;

/// Why a value cannot be read.
#[derive(Debug)]
pub(crate) enum Fault {
    /// The text is no JSON from this byte on.
    Syntax {
        at: u64,
        expected: &'static str,
    },
    /// The text ends within a value.
    Ended,
    /// This byte begins no character.
    NotUtf8 {
        at: u64,
    },
    Read(io::Error),
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Fault {
        Fault::Read(error)
    }
}

/// Reads values from a file, one after another.
pub(crate) struct Scanner<R> {
    from: R,
    buffer: Vec<u8>,
    /// Offset of the next byte in the buffer, and the ends of its UTF-8 and of the bytes that were read.
    next: usize,
    valid: usize,
    end: usize,
    /// Bytes of the file before the buffer.
    before: u64,
    at_end: bool,
    /// True if a line end ends a value that is not complete.
    one_line: bool,
    /// The text of the last record, if it is held.
    pub(crate) held: String,
    /// Keys of the first record without the key of the text.
    pub(crate) keys: Vec<String>,
    /// Lone halves of surrogate pairs in texts so far.
    pub(crate) lone_surrogates: u64,
    /// Records that have the key of the text more than once.
    pub(crate) repeated_keys: u64,
}

impl<R: Read> Scanner<R> {
    /// Reads `from`, which begins at byte `start` of a file.
    pub(crate) fn new(from: R, start: u64, one_line: bool) -> Scanner<R> {
        Scanner {
            from,
            buffer: vec![0; BUFFER_BYTES],
            next: 0,
            valid: 0,
            end: 0,
            before: start,
            at_end: false,
            one_line,
            held: String::new(),
            keys: Vec::new(),
            lone_surrogates: 0,
            repeated_keys: 0,
        }
    }

    /// The byte of the file that is read next.
    pub(crate) fn position(&self) -> u64 {
        self.before + self.next as u64
    }

    /// The next byte, or None at the end.
    pub(crate) fn peek(&mut self) -> Result<Option<u8>, Fault> {
        if self.next == self.valid {
            self.have(1)?;
        }
        match self.buffer[..self.valid].get(self.next) {
            Some(byte) => Ok(Some(*byte)),
            None if self.valid < self.end => Err(Fault::NotUtf8 { at: self.position() }),
            None => Ok(None),
        }
    }

    fn take(&mut self) -> Result<u8, Fault> {
        let byte = self.peek()?.ok_or(Fault::Ended)?;
        self.next += 1;
        Ok(byte)
    }

    /// Reads until `count` bytes are at hand, or no more come.
    fn have(&mut self, count: usize) -> Result<(), Fault> {
        while self.valid - self.next < count && !self.at_end {
            self.buffer.copy_within(self.next..self.end, 0);
            self.before += self.next as u64;
            (self.valid, self.end, self.next) = (self.valid - self.next, self.end - self.next, 0);
            let read = match self.from.read(&mut self.buffer[self.end..]) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                read => read?,
            };
            self.end += read;
            let bytes = &self.buffer[self.valid..self.end];
            let is_cut = match str::from_utf8(bytes) {
                Ok(all) => {
                    self.valid += all.len();
                    false
                }
                Err(error) => {
                    self.valid += error.valid_up_to();
                    error.error_len().is_none()
                }
            };
            self.at_end = read == 0 || (self.valid < self.end && !is_cut);
        }
        Ok(())
    }

    /// Passes over white space within a value.
    pub(crate) fn spaces(&mut self) -> Result<(), Fault> {
        self.pass(!self.one_line, false)
    }

    /// Passes over what may lie between values: white space and byte order marks, which some programs put before a file, and
    /// others join files with.
    pub(crate) fn between_values(&mut self) -> Result<(), Fault> {
        self.pass(true, true)
    }

    /// The same, within a line.
    pub(crate) fn line_start(&mut self) -> Result<(), Fault> {
        self.pass(false, true)
    }

    fn pass(&mut self, lines: bool, marks: bool) -> Result<(), Fault> {
        loop {
            match self.peek()? {
                Some(b' ' | b'\t' | b'\r') => self.next += 1,
                Some(b'\n') if lines => self.next += 1,
                Some(0xef) if marks => {
                    self.have(3)?;
                    if !self.buffer[self.next..self.valid].starts_with(b"\xef\xbb\xbf") {
                        return Ok(());
                    }
                    self.next += 3;
                }
                _ => return Ok(()),
            }
        }
    }

    /// Passes over the rest of the line.
    pub(crate) fn rest_of_line(&mut self) -> Result<(), Fault> {
        while self.peek()?.is_some() {
            let bytes = &self.buffer[self.next..self.valid];
            match bytes.iter().position(|byte| *byte == b'\n') {
                Some(place) => {
                    self.next += place + 1;
                    return Ok(());
                }
                None => self.next = self.valid,
            }
        }
        Ok(())
    }

    fn expected<T>(&self, expected: &'static str) -> Result<T, Fault> {
        Err(Fault::Syntax { at: self.position(), expected })
    }

    /// Passes over `byte`.
    fn byte(&mut self, byte: u8, name: &'static str) -> Result<(), Fault> {
        match self.peek()?.ok_or(Fault::Ended)? == byte {
            true => self.next += 1,
            false => return self.expected(name),
        }
        Ok(())
    }
}

/// Kind of the beginning of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    /// With a value of so many bytes.
    Complete {
        bytes: usize,
    },
    /// With a value that goes on behind the end of what is known.
    Incomplete,
    Invalid,
}

/// Classifies the beginning of `text`: a JSON value or not, within one line if `one_line`. Unless `is_whole`, the text goes on
/// behind its end.
pub(crate) fn start_of(text: &[u8], one_line: bool, is_whole: bool) -> Start {
    let mut scanner = Scanner::new(text, 0, one_line);
    match scanner.value() {
        Ok(()) => Start::Complete { bytes: scanner.position() as usize },
        Err(Fault::Ended) if !is_whole => Start::Incomplete,
        Err(Fault::NotUtf8 { at }) if !is_whole && at as usize + 4 > text.len() => Start::Incomplete,
        Err(_) => Start::Invalid,
    }
}

#[cfg(test)]
mod tests {
    use super::record::HELD_BYTES;
    use super::values::DEPTH;
    use super::*;

    fn record(line: &str) -> Result<(Record, String), Fault> {
        let mut scanner = Scanner::new(line.as_bytes(), 0, true);
        let found = scanner.record("text")?;
        scanner.between_values()?;
        if scanner.peek()?.is_some() {
            return scanner.expected("the end");
        }
        Ok((found, scanner.held))
    }

    #[test]
    fn the_text_of_a_record() {
        for (line, expected) in [
            (r#"{"text": "a\nb \u00e9 \ud83d\ude42"}"#, "a\nb é 🙂"),
            (r#"{"id": 7, "meta": {"text": "no"}, "text": "yes", "more": [1, {}]}"#, "yes"),
            (r#"{"text": "first", "text": "last"}"#, "last"),
            (r#"{"loss": NaN, "a": [Infinity, -Infinity, -0, 1e+5, 0.5E-3], "text": "a"}"#, "a"),
            (r#"{"id": 123456789012345678901234567890, "text": "a"}"#, "a"),
            (
                r#"{"text": "\ud83d alone, \ude42, \ud83d\u0041 \ud83d\ud83d\ude42"}"#,
                "\u{fffd} alone, \u{fffd}, \u{fffd}A \u{fffd}🙂",
            ),
            (r#"{"\u0074ext": "a\/\"\\\b\f\r\t\u0000"}"#, "a/\"\\\u{8}\u{c}\r\t\0"),
            (r#""the text itself""#, "the text itself"),
            ("{ \"text\" : \"a\" \t}\r", "a"),
        ] {
            let (found, held) = record(line).unwrap_or_else(|fault| panic!("{line}: {fault:?}"));
            assert!(matches!(found, Record::Text { is_held: true, .. }), "{line}: {found:?}");
            assert_eq!(held, expected, "{line}");
        }
        for (line, expected) in [
            (r#"["text"]"#, Record::NotObject),
            ("3", Record::NotObject),
            ("{}", Record::WithoutKey),
            (r#"{"Text": "a"}"#, Record::WithoutKey),
            (r#"{"text": null}"#, Record::NotString),
            (r#"{"text": 1.5}"#, Record::NotString),
            (r#"{"text": ["a", {"b": 1}]}"#, Record::NotString),
            (r#"{"text": ""}"#, Record::Empty),
        ] {
            assert_eq!(record(line).unwrap().0, expected, "{line}");
        }
        for line in [
            r#"{"text": "a"} {"text": "b"}"#,
            r#"{"text": "a"#,
            r#"{"text": "a\"#,
            r#"{"text": "\ud8"}"#,
            r#"{"text": "\x"}"#,
            "{\"text\": \"a\tb\"}",
            "{\"text\":\n\"a\"}",
            r#"{"text": 01}"#,
            r#"{"text": 1.}"#,
            r#"{"text": -}"#,
            r#"{"text": "a",}"#,
            r#"{text: "a"}"#,
            r#"{'text': 'a'}"#,
            r#"{"a": [1, 2}"#,
            r#"{"a": nul}"#,
            "plain words",
        ] {
            assert!(record(line).is_err(), "{line}");
        }
    }

    #[test]
    fn values_across_the_ends_of_buffers() {
        // Every escape and character lies across the end of a buffer at some length of the filling.
        for filling in (BUFFER_BYTES - 40)..(BUFFER_BYTES + 4) {
            let line = format!(r#"{{"a": "{}", "text": "é\ud83d\ude42\u00e9🙂x"}}"#, "y".repeat(filling));
            assert_eq!(record(&line).unwrap().1, "é🙂é🙂x", "{filling}");
        }
        let long = format!(r#"{{"text": "{}"}}"#, "a".repeat(HELD_BYTES + BUFFER_BYTES));
        let (found, _) = record(&long).unwrap();
        let bytes = (HELD_BYTES + BUFFER_BYTES) as u64;
        assert_eq!(found, Record::Text { start: 10, bytes, is_held: false });
        let deep = "[".repeat(DEPTH + 2) + &"]".repeat(DEPTH + 2);
        assert!(matches!(record(&deep), Err(Fault::Syntax { .. })));
    }

    #[test]
    fn how_a_text_begins() {
        for (text, one_line, is_whole, expected) in [
            ("{\"a\": 1} x", true, true, Start::Complete { bytes: 8 }),
            ("{\"a\": ", true, false, Start::Incomplete),
            ("{\"a\": ", true, true, Start::Invalid),
            ("{\n\"a\": 1}", true, true, Start::Invalid),
            ("{\n\"a\": 1}", false, true, Start::Complete { bytes: 9 }),
            ("[link](there)", false, true, Start::Invalid),
        ] {
            assert_eq!(start_of(text.as_bytes(), one_line, is_whole), expected, "{text}");
        }
        let cut = &"{\"a\": \"é".as_bytes()[..8];
        assert_eq!(start_of(cut, true, false), Start::Incomplete);
    }
}
