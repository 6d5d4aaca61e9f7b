//! Records: objects with a text under a key.

use std::io::Read;

use super::{Fault, Scanner};
use crate::windows::boundary;

/// A decoded text up to this size is held; a longer one is read again from its place.
pub(super) const HELD_BYTES: usize = 1 << 20;

/// Keys of a record that are shown in messages.
const SHOWN_KEYS: usize = 8;

/// Value of a record under the key of the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Record {
    /// A string of so many bytes that begins at this byte of the file, behind its quote. It is in [`Scanner::held`] if it
    /// `is_held`.
    Text {
        start: u64,
        bytes: u64,
        is_held: bool,
    },
    Empty,
    NotString,
    WithoutKey,
    NotObject,
}

impl<R: Read> Scanner<R> {
    /// Reads one record: an object with the text under `key`, or the text itself.
    pub(crate) fn record(&mut self, key: &str) -> Result<Record, Fault> {
        match self.peek()?.ok_or(Fault::Ended)? {
            b'"' => self.text(),
            b'{' => self.object(key),
            _ => self.value().map(|()| Record::NotObject),
        }
    }

    fn object(&mut self, key: &str) -> Result<Record, Fault> {
        let (mut found, mut times) = (Record::WithoutKey, 0);
        let shows_keys = self.keys.is_empty();
        let mut name = String::new();
        self.members(
            |scanner, name| {
                if name != key {
                    if shows_keys && scanner.keys.len() < SHOWN_KEYS {
                        scanner.keys.push(name.to_string());
                    }
                    return scanner.value();
                }
                times += 1;
                found = match scanner.peek()? {
                    Some(b'"') => scanner.text()?,
                    _ => scanner.value().map(|()| Record::NotString)?,
                };
                Ok(())
            },
            &mut name,
        )?;
        if found != Record::WithoutKey && shows_keys {
            self.keys.clear();
        }
        self.repeated_keys += u64::from(times > 1);
        Ok(found)
    }

    /// Reads an object and gives each name to `take`, which reads the value.
    pub(crate) fn members(
        &mut self,
        mut take: impl FnMut(&mut Scanner<R>, &str) -> Result<(), Fault>,
        name: &mut String,
    ) -> Result<(), Fault> {
        self.byte(b'{', "an object")?;
        self.spaces()?;
        if self.peek()? == Some(b'}') {
            self.next += 1;
            return Ok(());
        }
        loop {
            name.clear();
            self.spaces()?;
            self.byte(b'"', "a key in quotes")?;
            while !self.string_part(Some(name))? {
                // No key that is asked for has this length.
                name.truncate(boundary(name, HELD_BYTES));
            }
            self.spaces()?;
            self.byte(b':', "a colon behind a key")?;
            self.spaces()?;
            take(self, name)?;
            self.spaces()?;
            match self.peek()?.ok_or(Fault::Ended)? {
                b',' => self.next += 1,
                b'}' => {
                    self.next += 1;
                    return Ok(());
                }
                _ => return self.expected("a comma or the end of an object"),
            }
        }
    }

    /// Reads an array and lets `take` read each element.
    pub(crate) fn elements(
        &mut self,
        mut take: impl FnMut(&mut Scanner<R>) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        self.byte(b'[', "an array")?;
        self.spaces()?;
        if self.peek()? == Some(b']') {
            self.next += 1;
            return Ok(());
        }
        loop {
            self.spaces()?;
            take(self)?;
            self.spaces()?;
            match self.peek()?.ok_or(Fault::Ended)? {
                b',' => self.next += 1,
                b']' => {
                    self.next += 1;
                    return Ok(());
                }
                _ => return self.expected("a comma or the end of an array"),
            }
        }
    }

    /// Reads a string that is a text.
    fn text(&mut self) -> Result<Record, Fault> {
        self.byte(b'"', "a string")?;
        let start = self.position();
        let mut held = std::mem::take(&mut self.held);
        held.clear();
        let mut dropped = 0;
        while !self.string_part(Some(&mut held))? {
            if held.len() > HELD_BYTES {
                dropped += held.len() as u64;
                held.clear();
            }
        }
        let bytes = dropped + held.len() as u64;
        self.held = held;
        Ok(if bytes == 0 { Record::Empty } else { Record::Text { start, bytes, is_held: dropped == 0 } })
    }
}
