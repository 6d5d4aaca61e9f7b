//! Strings and their escapes, read in parts.

use std::io::Read;

use super::{Fault, Scanner};

/// Longest escape that must be seen at once: two halves of a surrogate pair.
const ESCAPE_BYTES: usize = 12;

impl<R: Read> Scanner<R> {
    /// Reads on within a string, to its end or by one buffer, and appends what it says to `out`. True at the end of the
    /// string.
    pub(crate) fn string_part(&mut self, mut out: Option<&mut String>) -> Result<bool, Fault> {
        self.peek()?.ok_or(Fault::Ended)?;
        let bytes = &self.buffer[self.next..self.valid];
        let plain = bytes.iter().position(|byte| matches!(byte, b'"' | b'\\' | 0..32)).unwrap_or(bytes.len());
        if let Some(out) = &mut out {
            out.push_str(
                str::from_utf8(&bytes[..plain]).expect("checked when it was read, and cut before ASCII"),
            );
        }
        self.next += plain;
        match self.peek()?.ok_or(Fault::Ended)? {
            b'"' => {
                self.next += 1;
                Ok(true)
            }
            b'\\' => {
                let escaped = self.escape()?;
                if let Some(out) = out {
                    out.push(escaped);
                }
                Ok(false)
            }
            0..32 => self.expected("no control character within a string"),
            _ => Ok(false),
        }
    }

    fn escape(&mut self) -> Result<char, Fault> {
        self.have(ESCAPE_BYTES)?;
        let bytes = &self.buffer[self.next..self.valid];
        let kind = *bytes.get(1).ok_or(Fault::Ended)?;
        let simple = match kind {
            b'"' | b'\\' | b'/' => Some(char::from(kind)),
            b'b' => Some('\u{8}'),
            b'f' => Some('\u{c}'),
            b'n' => Some('\n'),
            b'r' => Some('\r'),
            b't' => Some('\t'),
            b'u' => None,
            _ => return self.expected("a known escape"),
        };
        if let Some(simple) = simple {
            self.next += 2;
            return Ok(simple);
        }
        let Some(unit) = unit(bytes) else {
            return if bytes.len() < 6 {
                Err(Fault::Ended)
            } else {
                self.expected("four hexadecimal digits")
            };
        };
        let low = (0xd800..0xdc00).contains(&unit).then(|| self::unit(&bytes[6..])).flatten();
        if let Some(low) = low.filter(|low| (0xdc00..0xe000).contains(low)) {
            self.next += 12;
            let code = 0x10000 + ((unit - 0xd800) << 10) + (low - 0xdc00);
            return Ok(char::from_u32(code).expect("a pair of surrogates is a character"));
        }
        self.next += 6;
        Ok(char::from_u32(unit).unwrap_or_else(|| {
            self.lone_surrogates += 1;
            char::REPLACEMENT_CHARACTER
        }))
    }
}

/// The number of `\uXXXX` at the beginning of `bytes`.
fn unit(bytes: &[u8]) -> Option<u32> {
    let digits = bytes.get(..6)?.strip_prefix(b"\\u")?;
    digits.iter().try_fold(0, |code, digit| Some(code << 4 | char::from(*digit).to_digit(16)?))
}
