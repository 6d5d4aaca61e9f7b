//! Documents in a JSON file: each record holds the text of one, under a key, or is the text itself.
//!
//! Records lie one in a line, in an array, one after another, or in an array that is a member of an object, as
//! `{"data": [...]}`. A line that is broken is skipped; JSON that is not in lines is read whole or refused.

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::path::Path;

use super::text::Parts;
use crate::content::JsonLayout;
use crate::json::{Fault, Record, Scanner};
use crate::{DataError, Result};

/// Key of the text in each record, when the user names no other.
pub(crate) const TEXT_KEY: &str = "text";

/// The member of an object that holds the records, whatever is in them.
const RECORDS: &str = "data";

/// Location of the records of a JSON file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Records {
    /// One a line.
    Lines,
    /// Elements of an array, or one after another.
    Values,
    /// Elements of an array under this key of the only object.
    Member(String),
}

/// Outcome of reading a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// A text of so many bytes.
    Text { start: u64, bytes: u64, is_held: bool },
    /// A string without a byte, which makes no document.
    Empty,
    /// No text, and why.
    Skipped(&'static str),
}

pub(crate) const INVALID: &str = "not valid JSON";
pub(crate) const NOT_OBJECT: &str = "not an object";
pub(crate) const WITHOUT_KEY: &str = "without the key";
pub(crate) const NOT_STRING: &str = "with another value than a string under the key";

/// Findings of reading all records, beside the records.
#[derive(Debug, Default)]
pub(crate) struct Strange {
    /// Keys of the first record without the key of the text.
    pub(crate) keys: Vec<String>,
    pub(crate) lone_surrogates: u64,
    pub(crate) repeated_keys: u64,
}

/// Gives each record to `take`, with its number from 1: that of its line, if records are lines.
///
/// # Errors
/// [`DataError::NotJson`] for JSON that is not in lines, [`DataError::NotUtf8`], the errors of reading, those of `take`.
pub(crate) fn for_each_record(
    path: &Path,
    records: &Records,
    key: &str,
    take: &mut dyn FnMut(u64, Outcome, &str) -> Result<()>,
) -> Result<Strange> {
    let file = phalanx_system::files::open_regular(path).map_err(DataError::reading(path))?;
    let mut scanner = Scanner::new(file, 0, *records == Records::Lines);
    match records {
        Records::Lines => lines(path, &mut scanner, key, take)?,
        Records::Values => values(path, &mut scanner, key, take)?,
        Records::Member(member) => {
            let (mut taken, mut number, mut name) = (Ok(()), 0, String::new());
            let read = scanner.between_values().and_then(|()| {
                scanner.members(
                    |scanner, name| match name == member {
                        true => elements(scanner, key, &mut number, take, &mut taken),
                        false => scanner.value(),
                    },
                    &mut name,
                )
            });
            taken?;
            read.map_err(|fault| broken(path, fault))?;
        }
    }
    let Scanner { keys, lone_surrogates, repeated_keys, .. } = scanner;
    Ok(Strange { keys, lone_surrogates, repeated_keys })
}

/// Gives the text of each record to `take`, in parts.
///
/// # Errors
/// Those of [`for_each_record`], and of [`Parts`].
pub(crate) fn for_each_text(path: &Path, records: &Records, key: &str, parts: &mut Parts) -> Result<()> {
    let mut take = |_, outcome, held: &str| {
        let Outcome::Text { start, is_held, .. } = outcome else { return Ok(()) };
        if is_held {
            parts.text.push_str(held);
            parts.grown()?;
        } else {
            let mut file = phalanx_system::files::open_regular(path).map_err(DataError::reading(path))?;
            file.seek(SeekFrom::Start(start)).map_err(DataError::reading(path))?;
            let mut scanner = Scanner::new(file, start, false);
            while !scanner.string_part(Some(&mut parts.text)).map_err(|fault| broken(path, fault))? {
                parts.grown()?;
            }
        }
        parts.end_document()
    };
    for_each_record(path, records, key, &mut take).map(drop)
}

/// Finds the location of the records of a JSON file, or the reason why it has none, in words.
///
/// # Errors
/// Those of [`for_each_record`].
pub(crate) fn find(path: &Path, layout: JsonLayout, key: &str) -> Result<Result<Records, String>> {
    if layout == JsonLayout::Lines {
        return Ok(Ok(Records::Lines));
    }
    let file = phalanx_system::files::open_regular(path).map_err(DataError::reading(path))?;
    let mut scanner = Scanner::new(file, 0, false);
    let mut survey = Survey::default();
    let read = scanner.between_values().and_then(|()| match scanner.peek()? {
        Some(b'{') => survey.object(&mut scanner, key),
        _ => Ok(()),
    });
    read.and_then(|()| scanner.between_values()).map_err(|fault| broken(path, fault))?;
    // An array, several objects, or an object that is a record.
    if survey.names.is_empty()
        || survey.has_text
        || scanner.peek().map_err(|fault| broken(path, fault))?.is_some()
    {
        return Ok(Ok(Records::Values));
    }
    Ok(match &survey.arrays[..] {
        [only] => Ok(Records::Member(only.clone())),
        [] => Err(format!(
            "it is one object with the keys {}, none of which holds texts",
            quoted(&survey.names)
        )),
        several => Err(format!(
            "several of its members hold texts ({}), and which is meant is not known: write each to a file of its own",
            quoted(several)
        )),
    })
}

/// The members of an object.
#[derive(Default)]
struct Survey {
    names: Vec<String>,
    /// True if the object is a record.
    has_text: bool,
    /// Members that are arrays of records.
    arrays: Vec<String>,
}

impl Survey {
    fn object(&mut self, scanner: &mut Scanner<File>, key: &str) -> Result<(), Fault> {
        const SHOWN: usize = 8;
        let mut name = String::new();
        scanner.members(
            |scanner, name| {
                if self.names.len() < SHOWN {
                    self.names.push(name.to_string());
                }
                match scanner.peek()? {
                    Some(b'"') => {
                        self.has_text |= name == key;
                        scanner.value()
                    }
                    Some(b'[') => {
                        if has_records(scanner, name, key)? && !self.arrays.iter().any(|known| known == name)
                        {
                            self.arrays.push(name.to_string());
                        }
                        Ok(())
                    }
                    _ => scanner.value(),
                }
            },
            &mut name,
        )
    }
}

/// Reads an array; whether it holds a text that is looked for. Strings alone are texts under the key of the text, or under
/// the name that means records.
fn has_records(scanner: &mut Scanner<File>, name: &str, key: &str) -> Result<bool, Fault> {
    let mut found = name == RECORDS;
    scanner.elements(|scanner| {
        let is_object = scanner.peek()? == Some(b'{');
        found |= matches!(scanner.record(key)?, Record::Text { .. }) && (is_object || name == key);
        Ok(())
    })?;
    Ok(found)
}

/// Names in quotes.
pub(crate) fn quoted(names: &[String]) -> String {
    let names: Vec<String> = names.iter().map(|name| format!("{name:?}")).collect();
    names.join(", ")
}

fn lines(
    path: &Path,
    scanner: &mut Scanner<File>,
    key: &str,
    take: &mut dyn FnMut(u64, Outcome, &str) -> Result<()>,
) -> Result<()> {
    let mut number = 0;
    loop {
        number += 1;
        match line(scanner, key) {
            Ok(None) => {}
            Ok(Some(outcome)) => take(number, outcome, &scanner.held)?,
            Err(Fault::Syntax { .. } | Fault::Ended) => take(number, Outcome::Skipped(INVALID), "")?,
            Err(fault) => return Err(broken(path, fault)),
        }
        scanner.rest_of_line().map_err(|fault| broken(path, fault))?;
        if scanner.peek().map_err(|fault| broken(path, fault))?.is_none() {
            return Ok(());
        }
    }
}

/// Reads a record to the end of its line; None for a blank line.
fn line(scanner: &mut Scanner<File>, key: &str) -> Result<Option<Outcome>, Fault> {
    scanner.line_start()?;
    if matches!(scanner.peek()?, None | Some(b'\n')) {
        return Ok(None);
    }
    let outcome = scanner.record(key)?;
    scanner.spaces()?;
    match scanner.peek()? {
        None | Some(b'\n') => Ok(Some(outcome.into())),
        Some(_) => Ok(Some(Outcome::Skipped(INVALID))),
    }
}

fn values(
    path: &Path,
    scanner: &mut Scanner<File>,
    key: &str,
    take: &mut dyn FnMut(u64, Outcome, &str) -> Result<()>,
) -> Result<()> {
    let (mut taken, mut number) = (Ok(()), 0);
    loop {
        let read = scanner.between_values().and_then(|()| match scanner.peek()? {
            None => Ok(false),
            Some(b'[') => elements(scanner, key, &mut number, take, &mut taken).map(|()| true),
            Some(_) => element(scanner, key, &mut number, take, &mut taken).map(|()| true),
        });
        std::mem::replace(&mut taken, Ok(()))?;
        if !read.map_err(|fault| broken(path, fault))? {
            return Ok(());
        }
    }
}

fn elements(
    scanner: &mut Scanner<File>,
    key: &str,
    number: &mut u64,
    take: &mut dyn FnMut(u64, Outcome, &str) -> Result<()>,
    taken: &mut Result<()>,
) -> Result<(), Fault> {
    if scanner.peek()? != Some(b'[') {
        // The key occurs twice, with a value of another kind.
        return scanner.value();
    }
    scanner.elements(|scanner| element(scanner, key, number, take, taken))
}

/// Reads a record. An error of `take` is kept in `taken`, and nothing more is given to it.
fn element(
    scanner: &mut Scanner<File>,
    key: &str,
    number: &mut u64,
    take: &mut dyn FnMut(u64, Outcome, &str) -> Result<()>,
    taken: &mut Result<()>,
) -> Result<(), Fault> {
    *number += 1;
    let outcome = scanner.record(key)?;
    if taken.is_ok() {
        *taken = take(*number, outcome.into(), &scanner.held);
    }
    match taken {
        Ok(()) => Ok(()),
        // Any fault ends the reading; the error is in `taken`.
        Err(_) => Err(Fault::Ended),
    }
}

impl From<Record> for Outcome {
    fn from(record: Record) -> Outcome {
        match record {
            Record::Text { start, bytes, is_held } => Outcome::Text { start, bytes, is_held },
            Record::Empty => Outcome::Empty,
            Record::NotString => Outcome::Skipped(NOT_STRING),
            Record::WithoutKey => Outcome::Skipped(WITHOUT_KEY),
            Record::NotObject => Outcome::Skipped(NOT_OBJECT),
        }
    }
}

/// The error of a file that cannot be read on.
fn broken(path: &Path, fault: Fault) -> DataError {
    let path = path.to_path_buf();
    match fault {
        Fault::Syntax { at, expected } => {
            DataError::NotJson { path, reason: format!("at byte {at}, {expected} was expected") }
        }
        Fault::Ended => DataError::NotJson { path, reason: "it ends within a value".to_string() },
        Fault::NotUtf8 { at } => DataError::not_utf8(&path, at),
        Fault::Read(cause) => DataError::Read { path, cause },
    }
}
