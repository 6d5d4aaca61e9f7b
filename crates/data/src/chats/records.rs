//! Records of files: an object in each line, or the objects of an array.

use std::path::{Path, PathBuf};

use minijinja::Value;

use super::Chat;
use super::formats::ChatFormat;
use super::pairs::{PairKind, Preferred};
use crate::{DataError, Result};

/// Largest file, which is read whole.
const MAX_FILE_BYTES: u64 = 2 << 30;

/// Files of chats, read whole.
#[derive(Clone, Debug)]
pub struct ChatFiles {
    files: Vec<(PathBuf, String)>,
    format: Option<ChatFormat>,
}

/// A record of a file: where it begins, and its text.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place<'a> {
    pub path: &'a Path,
    /// Line on which it begins, from 1.
    pub line: u64,
    pub text: &'a str,
}

impl ChatFiles {
    /// Reads files of records, in `format` if that is given.
    ///
    /// # Errors
    /// [`DataError::Read`], [`DataError::Row`] for a file that is not UTF-8 or has no record.
    pub fn read(paths: &[PathBuf], format: Option<ChatFormat>) -> Result<ChatFiles> {
        let mut files = Vec::new();
        for path in paths {
            let bytes = crate::limits::read(path, MAX_FILE_BYTES)?;
            let text = String::from_utf8(bytes).map_err(|error| {
                let (valid, bytes) = (error.utf8_error().valid_up_to(), error.as_bytes());
                let line = 1 + bytes[..valid].iter().filter(|byte| **byte == b'\n').count() as u64;
                refused(
                    path,
                    line,
                    "the line is not UTF-8: convert the file (`iconv -f WINDOWS-1252 -t UTF-8`)",
                )
            })?;
            files.push((path.clone(), text));
        }
        let files = ChatFiles { files, format };
        if files.records()?.is_empty() {
            let path = files.files.first().map_or_else(PathBuf::new, |(path, _)| path.clone());
            return Err(refused(&path, 1, "there is no record in the files"));
        }
        Ok(files)
    }

    /// Number of files, and their bytes.
    pub fn size(&self) -> (u64, u64) {
        (self.files.len() as u64, self.files.iter().map(|(_, text)| text.len() as u64).sum())
    }

    /// Records of all files, in order.
    pub(super) fn records(&self) -> Result<Vec<Place<'_>>> {
        let mut places = Vec::new();
        for (path, text) in &self.files {
            let text = text.strip_prefix('\u{feff}').unwrap_or(text);
            if text.trim_start().starts_with('[') {
                items(path, text, &mut places)?;
                continue;
            }
            let lines = text.lines().zip(1..).filter(|(line, _)| !line.trim().is_empty());
            places.extend(lines.map(|(text, line)| Place { path, line, text }));
        }
        Ok(places)
    }

    /// The record of preferences.
    pub(super) fn preferred(
        &self,
        place: &Place,
        kind: PairKind,
        unread: &mut Vec<String>,
    ) -> Result<Preferred> {
        let parsed = parse(place).and_then(|record| super::pairs::read(&record, kind, unread));
        parsed.map_err(|reason| place.refused(&reason))
    }

    /// The chat of a record, and the format that it has.
    pub(super) fn chat(&self, place: &Place, unread: &mut Vec<String>) -> Result<(Chat, ChatFormat)> {
        let parsed = parse(place).and_then(|record| super::formats::read(&record, self.format, unread));
        parsed.map_err(|reason| place.refused(&reason))
    }
}

fn parse(place: &Place) -> std::result::Result<Value, String> {
    serde_json::from_str(place.text).map_err(|error| {
        let more = if place.text.contains('\n') { "" } else { " in one line" };
        format!("it is not a JSON object{more}: {error}")
    })
}

impl Place<'_> {
    /// The error for this record.
    pub(super) fn refused(&self, reason: &str) -> DataError {
        refused(self.path, self.line, reason)
    }
}

pub(super) fn refused(path: &Path, line: u64, reason: &str) -> DataError {
    DataError::Row { path: path.to_path_buf(), line, reason: reason.to_string() }
}

/// The items of an array.
fn items<'a>(path: &'a Path, text: &'a str, places: &mut Vec<Place<'a>>) -> Result<()> {
    let (mut depth, mut line, mut in_string, mut escaped) = (0, 1, false, false);
    let (mut start, mut start_line) = (None, 1);
    for (at, byte) in text.bytes().enumerate() {
        line += u64::from(byte == b'\n');
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            _ if in_string => {}
            b'[' | b'{' => depth += 1,
            b']' | b'}' => depth -= 1,
            _ => {}
        }
        let is_between = depth < 1 || depth == 1 && !in_string && matches!(byte, b',' | b'[');
        match start {
            None if depth > 0 && !is_between && !byte.is_ascii_whitespace() => {
                (start, start_line) = (Some(at), line)
            }
            Some(begun) if is_between => {
                places.push(Place { path, line: start_line, text: text[begun..at].trim_end() });
                start = None;
            }
            _ => {}
        }
        if depth == 0 && byte == b']' {
            return match text[at + 1..].trim().is_empty() {
                true => Ok(()),
                false => Err(refused(path, line, "there is more behind the end of the array")),
            };
        }
    }
    Err(refused(path, line, "the array does not end: the file may have been cut"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_of_arrays_begin_on_their_lines() {
        let cut = |text: &str| {
            let mut places = Vec::new();
            items(Path::new("a.json"), text, &mut places).map_err(|error| error.to_string())?;
            Ok::<_, String>(
                places.iter().map(|place| (place.line, place.text.to_string())).collect::<Vec<_>>(),
            )
        };
        let found = cut("[\n {\"a\": [1, {}]},\n\n {\"b\": \"],[\\\"\"} , 7,[]]\n").unwrap();
        let expected = [(2, "{\"a\": [1, {}]}"), (4, "{\"b\": \"],[\\\"\"}"), (4, "7"), (4, "[]")];
        assert_eq!(found, expected.map(|(line, text)| (line, text.to_string())));
        assert_eq!(cut("[]").unwrap(), []);
        assert!(cut("[{}\n, {").unwrap_err().contains("line 2: the array does not end"));
        assert!(cut("[{}] {}").unwrap_err().contains("more behind"));
    }
}
