//! Values that are passed over.

use std::io::Read;

use super::{Fault, Scanner};

/// Arrays and objects within each other. Python reads about a tenth of this.
pub(super) const DEPTH: usize = 10_000;

impl<R: Read> Scanner<R> {
    /// Passes over a value of any kind.
    pub(crate) fn value(&mut self) -> Result<(), Fault> {
        let mut open: Vec<u8> = Vec::new();
        loop {
            self.spaces()?;
            if let Some(kind) = self.begin()? {
                open.push(kind);
                if open.len() > DEPTH {
                    return self.expected("fewer values within each other");
                }
                continue;
            }
            loop {
                let Some(kind) = open.last() else { return Ok(()) };
                self.spaces()?;
                match (kind, self.take()?) {
                    (b'{', b',') => {
                        self.key()?;
                        break;
                    }
                    (b'[', b',') => break,
                    (b'{', b'}') | (b'[', b']') => drop(open.pop()),
                    _ => {
                        self.next -= 1;
                        return self.expected("a comma or the end of an array or object");
                    }
                }
            }
        }
    }

    /// Reads a value without others in it, or the beginning of one that has: then returns its bracket.
    fn begin(&mut self) -> Result<Option<u8>, Fault> {
        let first = self.take()?;
        match first {
            b'{' | b'[' => {
                self.spaces()?;
                let last = if first == b'{' { b'}' } else { b']' };
                if self.peek()? == Some(last) {
                    self.next += 1;
                    return Ok(None);
                }
                if first == b'{' {
                    self.key()?;
                }
                return Ok(Some(first));
            }
            b'"' => while !self.string_part(None)? {},
            b't' => self.word("rue")?,
            b'f' => self.word("alse")?,
            b'n' => self.word("ull")?,
            b'N' => self.word("aN")?,
            b'I' => self.word("nfinity")?,
            b'-' if self.peek()? == Some(b'I') => self.word("Infinity")?,
            b'-' | b'0'..=b'9' => self.number(first)?,
            _ => {
                self.next -= 1;
                return self.expected("a value");
            }
        }
        Ok(None)
    }

    fn key(&mut self) -> Result<(), Fault> {
        self.spaces()?;
        self.byte(b'"', "a key in quotes")?;
        while !self.string_part(None)? {}
        self.spaces()?;
        self.byte(b':', "a colon behind a key")
    }

    fn word(&mut self, rest: &'static str) -> Result<(), Fault> {
        rest.bytes().try_for_each(|byte| self.byte(byte, "true, false, null, NaN or Infinity"))
    }

    /// The rest of a number that begins with `first`.
    fn number(&mut self, first: u8) -> Result<(), Fault> {
        let leading = if first == b'-' { self.take()? } else { first };
        match leading {
            b'0' => {}
            b'1'..=b'9' => drop(self.digits()?),
            _ => {
                self.next -= 1;
                return self.expected("a digit");
            }
        }
        if self.peek()? == Some(b'.') {
            self.next += 1;
            self.some_digits()?;
        }
        if matches!(self.peek()?, Some(b'e' | b'E')) {
            self.next += 1;
            if matches!(self.peek()?, Some(b'+' | b'-')) {
                self.next += 1;
            }
            self.some_digits()?;
        }
        Ok(())
    }

    fn some_digits(&mut self) -> Result<(), Fault> {
        if self.digits()? {
            Ok(())
        } else {
            self.peek()?.map_or(Err(Fault::Ended), |_| self.expected("a digit"))
        }
    }

    /// Passes over digits; whether there was one.
    fn digits(&mut self) -> Result<bool, Fault> {
        let mut any = false;
        while matches!(self.peek()?, Some(b'0'..=b'9')) {
            (self.next, any) = (self.next + 1, true);
        }
        Ok(any)
    }
}
