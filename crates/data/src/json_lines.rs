//! Documents in a JSON Lines file: each line is an object that holds the text of one document. Lines without a text are
//! counted by reason.

use std::fmt;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::limits::UNCUT_BYTES;
use crate::{DataError, Result};

/// Key of the text in each line, when the user names no other.
pub(crate) const TEXT_KEY: &str = "text";

/// Extensions of files that are read this way.
const EXTENSIONS: [&str; 2] = ["jsonl", "ndjson"];

/// Whether the name of a file says that it holds JSON Lines.
pub(crate) fn is_json_lines(path: &Path) -> bool {
    let extension = path.extension().and_then(|extension| extension.to_str());
    extension.is_some_and(|given| EXTENSIONS.iter().any(|known| given.eq_ignore_ascii_case(known)))
}

/// Lines of one file, and how many of them give no document, by reason. Blank lines do not count.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LineCounts {
    /// The key whose value is the text.
    pub key: String,
    /// Lines that are not blank.
    pub lines: u64,
    /// Lines that are not JSON.
    pub invalid: u64,
    /// Lines that hold another value than an object.
    pub not_object: u64,
    /// Objects without the key.
    pub without_key: u64,
    /// Objects whose text is not a string.
    pub not_string: u64,
    /// Objects whose text is empty.
    pub empty: u64,
    /// Number of the first skipped line, from 1.
    pub first_skipped: Option<u64>,
}

impl LineCounts {
    /// Lines that give no document.
    pub fn skipped(&self) -> u64 {
        self.invalid + self.not_object + self.without_key + self.not_string + self.empty
    }

    fn count(&mut self, reason: Reason) {
        *match reason {
            Reason::Invalid => &mut self.invalid,
            Reason::NotObject => &mut self.not_object,
            Reason::WithoutKey => &mut self.without_key,
            Reason::NotString => &mut self.not_string,
            Reason::Empty => &mut self.empty,
        } += 1;
    }
}

/// What was skipped and why, in words.
impl fmt::Display for LineCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let key = &self.key;
        let reasons = [
            (self.invalid, "not valid JSON".to_string()),
            (self.not_object, "not an object".to_string()),
            (self.without_key, format!("without the key {key:?}")),
            (self.not_string, format!("with a {key:?} that is not a string")),
            (self.empty, format!("with an empty {key:?}")),
        ];
        let reasons: Vec<String> = reasons
            .into_iter()
            .filter(|(count, _)| *count > 0)
            .map(|(count, reason)| format!("{count} {reason}"))
            .collect();
        write!(f, "skipped {} of {} lines: {}", self.skipped(), self.lines, reasons.join(", "))?;
        match self.first_skipped {
            Some(line) => write!(f, " (the first is line {line})"),
            None => Ok(()),
        }
    }
}

/// Why a line gives no document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reason {
    Invalid,
    NotObject,
    WithoutKey,
    NotString,
    Empty,
}

/// Gives the text of each line to `take`, in order, and counts the lines.
///
/// # Errors
/// [`DataError::NotUtf8`] with the offset of the first bad byte, a line that is too long, the errors of reading, those
/// of `take`.
pub(crate) fn for_each_text(
    path: &Path,
    key: &str,
    take: &mut dyn FnMut(&str) -> Result<()>,
) -> Result<LineCounts> {
    let mut file = BufReader::new(phalanx_files::open_regular(path).map_err(DataError::reading(path))?);
    let mut counts = LineCounts { key: key.to_string(), ..LineCounts::default() };
    let mut bytes = Vec::new();
    let (mut position, mut number) = (0u64, 0u64);
    loop {
        bytes.clear();
        let limit = UNCUT_BYTES as u64 + 1;
        file.by_ref().take(limit).read_until(b'\n', &mut bytes).map_err(DataError::reading(path))?;
        if bytes.is_empty() {
            return Ok(counts);
        }
        number += 1;
        if bytes.len() > UNCUT_BYTES {
            let reason = format!("its line {number} has more than {UNCUT_BYTES} bytes: split the text");
            return Err(DataError::Read { path: path.to_path_buf(), cause: io::Error::other(reason) });
        }
        let line = str::from_utf8(&bytes).map_err(|e| DataError::NotUtf8 {
            path: path.to_path_buf(),
            position: position + e.valid_up_to() as u64,
        })?;
        position += bytes.len() as u64;
        // Some programs begin a file with a byte order mark.
        let line = line.strip_prefix('\u{feff}').unwrap_or(line).trim();
        if line.is_empty() {
            continue;
        }
        counts.lines += 1;
        match text_of(line, key) {
            Ok(text) => take(&text)?,
            Err(reason) => {
                counts.count(reason);
                counts.first_skipped.get_or_insert(number);
            }
        }
    }
}

/// The text in a line.
fn text_of(line: &str, key: &str) -> Result<String, Reason> {
    if !line.starts_with('{') {
        return Err(match serde_json::from_str::<IgnoredAny>(line) {
            Ok(_) => Reason::NotObject,
            Err(_) => Reason::Invalid,
        });
    }
    let mut json = serde_json::Deserializer::from_str(line);
    let value = json.deserialize_map(TextOf(key)).and_then(|value| json.end().map(|()| value));
    match value.map_err(|_| Reason::Invalid)? {
        None => Err(Reason::WithoutKey),
        Some(Value::Other) => Err(Reason::NotString),
        Some(Value::Text(text)) if text.is_empty() => Err(Reason::Empty),
        Some(Value::Text(text)) => Ok(text),
    }
}

/// Finds the value of a key in an object. Other values are read over and not held.
struct TextOf<'a>(&'a str);

impl<'de> Visitor<'de> for TextOf<'_> {
    type Value = Option<Value>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Option<Value>, A::Error> {
        let mut found = None;
        while let Some(key) = map.next_key::<String>()? {
            if key == self.0 {
                found = Some(map.next_value()?);
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(found)
    }
}

/// A string, or anything else.
enum Value {
    Text(String),
    Other,
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Value, D::Error> {
        from.deserialize_any(AnyValue)
    }
}

struct AnyValue;

impl<'de> Visitor<'de> for AnyValue {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_str<E>(self, text: &str) -> Result<Value, E> {
        Ok(Value::Text(text.to_string()))
    }

    fn visit_string<E>(self, text: String) -> Result<Value, E> {
        Ok(Value::Text(text))
    }

    fn visit_bool<E>(self, _: bool) -> Result<Value, E> {
        Ok(Value::Other)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Value, E> {
        Ok(Value::Other)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Value, E> {
        Ok(Value::Other)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Value, E> {
        Ok(Value::Other)
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Other)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Value::Other)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Value::Other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_of_a_line() {
        for (line, expected) in [
            (r#"{"text": "a\nb \u00e9 \ud83d\ude42"}"#, Ok("a\nb é 🙂")),
            (r#"{"id": 7, "meta": {"text": "no"}, "text": "yes", "more": [1, {}]}"#, Ok("yes")),
            (r#"{"text": "first", "text": "last"}"#, Ok("last")),
            (r#"{"text": "a"} {"text": "b"}"#, Err(Reason::Invalid)),
            (r#"{"text": "a"#, Err(Reason::Invalid)),
            (r#"{"text": "\ud800"}"#, Err(Reason::Invalid)),
            ("plain words", Err(Reason::Invalid)),
            (r#"["text"]"#, Err(Reason::NotObject)),
            ("3", Err(Reason::NotObject)),
            ("{}", Err(Reason::WithoutKey)),
            (r#"{"Text": "a"}"#, Err(Reason::WithoutKey)),
            (r#"{"text": null}"#, Err(Reason::NotString)),
            (r#"{"text": 1.5}"#, Err(Reason::NotString)),
            (r#"{"text": ["a", {"b": 1}]}"#, Err(Reason::NotString)),
            (r#"{"text": {"a": "b"}}"#, Err(Reason::NotString)),
            (r#"{"text": ""}"#, Err(Reason::Empty)),
        ] {
            assert_eq!(text_of(line, TEXT_KEY), expected.map(str::to_string), "{line}");
        }
    }
}
