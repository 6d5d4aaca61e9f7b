//! Content of a file, told by its first bytes and not by its name: text, JSON of one of two layouts, or one of the formats that are not
//! text, each with the way to make text of it.
//!
//! Only three things go by the name: a table of comma- or tab-separated values, which no first byte tells from prose;
//! JSON that is broken from its first byte on; and bare token ids, which have no header.

use std::ffi::OsStr;
use std::path::Path;

use crate::json::{Start, start_of};
use crate::magic::{AS_TOKENS, TO_JSON_LINES, WITHOUT_TEXT, format_of};

/// Bytes at the beginning of a file by which it is recognised.
pub(crate) const HEAD_BYTES: usize = 1 << 16;

/// A format that is not read, and what to do instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Foreign {
    /// The format, as a noun phrase.
    pub(crate) is: &'static str,
    /// Advice to the user.
    pub(crate) way_out: &'static str,
}

/// Layout of the texts in a JSON file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum JsonLayout {
    /// One value a line.
    Lines,
    /// Values that may take several lines: an array of records, or records one after another.
    Values,
}

/// Content of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    Text,
    Json(JsonLayout),
    Foreign(Foreign),
}

const fn utf(is: &'static str, way_out: &'static str) -> Foreign {
    Foreign { is, way_out }
}

/// Recognises a file by its path and its first bytes (all of them, if it `is_whole`).
pub(crate) fn recognise(path: &Path, head: &[u8], is_whole: bool) -> Content {
    if let Some(foreign) = foreign(head) {
        return Content::Foreign(foreign);
    }
    let name = extension(path);
    if ["csv", "tsv"].contains(&name.as_str()) {
        let is = "a table of separated values";
        let way_out = "write the column of its texts as JSON lines, for example with `pandas.read_csv(FILE).to_json(\"FILE.jsonl\", orient=\"records\", lines=True)`; or list its extension in data.plain to train on the table as it is written";
        return Content::Foreign(Foreign { is, way_out });
    }
    match json_layout(&name, head, is_whole) {
        Some(layout) => Content::Json(layout),
        None => Content::Text,
    }
}

/// The format of a file that is neither UTF-8 text nor JSON, where its first bytes tell it.
pub(crate) fn foreign(head: &[u8]) -> Option<Foreign> {
    let known = format_of(head).map(|format| Foreign { is: format.is, way_out: format.for_text() });
    known.or_else(|| safetensors(head)).or_else(|| pickle(head)).or_else(|| wide(head))
}

/// The length of a JSON header, then the header.
fn safetensors(head: &[u8]) -> Option<Foreign> {
    let length = u64::from_le_bytes(*head.first_chunk()?);
    ((2..1 << 30).contains(&length) && head.get(8) == Some(&b'{'))
        .then_some(Foreign { is: "a safetensors file", way_out: WITHOUT_TEXT })
}

fn pickle(head: &[u8]) -> Option<Foreign> {
    matches!(head, [0x80, 2..=5, ..]).then_some(Foreign { is: "a pickle", way_out: TO_JSON_LINES })
}

/// Units of two or four bytes without a mark: text whose every second byte is zero, or numbers.
fn wide(head: &[u8]) -> Option<Foreign> {
    let pairs = head.as_chunks::<2>().0;
    let zeros = |place: usize| pairs.iter().filter(|pair| pair[place] == 0).count();
    let (even, odd) = (zeros(0), zeros(1));
    // Most of any Western text is ASCII, and no text has a zero in both places of a unit of two bytes.
    if pairs.len() < 4 || even.max(odd) * 10 < pairs.len() * 3 {
        return None;
    }
    let quads = head.as_chunks::<4>().0;
    // Ids of a large vocabulary are characters, too, but few of them end words or clauses.
    let is_utf32 = |read: fn([u8; 4]) -> u32| {
        let chars =
            quads.iter().map_while(|quad| char::from_u32(read(*quad)).filter(|c| printable(*c as u32)));
        let (all, ends) = chars.fold((0, 0), |(all, ends), c| {
            (all + 1, ends + usize::from(c.is_whitespace() || "\u{3001}\u{3002}\u{ff0c}".contains(c)))
        });
        all == quads.len() && ends * 50 >= all && ends > 0
    };
    if is_utf32(u32::from_le_bytes) || is_utf32(u32::from_be_bytes) {
        return Some(utf(
            "text in UTF-32",
            "convert it: `iconv -f UTF-32LE -t UTF-8 FILE > NEW` (or UTF-32BE)",
        ));
    }
    let units = |read: fn([u8; 2]) -> u16| pairs.iter().filter(|pair| printable(read(**pair).into())).count();
    let (unit, is, way_out): (fn([u8; 2]) -> u16, _, _) = match odd >= even {
        true => (
            u16::from_le_bytes,
            "text in UTF-16 without a byte order mark",
            "convert it: `iconv -f UTF-16LE -t UTF-8 FILE > NEW`",
        ),
        false => (
            u16::from_be_bytes,
            "text in UTF-16 without a byte order mark",
            "convert it: `iconv -f UTF-16BE -t UTF-8 FILE > NEW`",
        ),
    };
    // Ids of a small vocabulary look alike, but for the control characters among them.
    if units(unit) * 100 >= pairs.len() * 98 {
        return Some(Foreign { is, way_out });
    }
    Some(Foreign {
        is: "binary data, as token ids of two or more bytes are",
        way_out: "if it holds token ids, name it in data.tokens instead of data.text",
    })
}

/// Returns whether a number is a character of a written text.
fn printable(unit: u32) -> bool {
    match char::from_u32(unit) {
        Some(c) => !c.is_control() || "\t\n\r\u{c}".contains(c),
        None => (0xd800..0xe000).contains(&unit),
    }
}

/// Describes a file that is not UTF-8 around `head`, if [`foreign`] does not know it.
pub(crate) fn other_encoding(path: &Path, head: &[u8]) -> Foreign {
    let controls = head.iter().filter(|byte| **byte < 32 && !b"\t\n\r\x0c\x1b".contains(byte)).count();
    if controls * 50 > head.len() {
        return with_zeros(path);
    }
    Foreign {
        is: "text in another encoding than UTF-8, as Latin-1 or Windows-1252",
        way_out: "convert it: `iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW`",
    }
}

/// Describes a file with zero bytes, if [`foreign`] does not know it.
pub(crate) fn with_zeros(path: &Path) -> Foreign {
    let way_out = match extension(path).as_str() {
        "bin" => AS_TOKENS,
        _ => {
            "text has no zero bytes: leave it out, or list its extension in data.plain to read it nevertheless"
        }
    };
    Foreign { is: "binary data", way_out }
}

/// A format that is text, and may not be meant to be read as it is written; by its first bytes.
pub(crate) fn looks_like(path: &Path, head: &[u8]) -> Option<&'static str> {
    let name = extension(path);
    let start = head.trim_ascii_start();
    let begins = |word: &[u8]| start.get(..word.len()).is_some_and(|start| start.eq_ignore_ascii_case(word));
    if !["html", "htm", "xhtml"].contains(&name.as_str()) && (begins(b"<!doctype html") || begins(b"<html")) {
        return Some("looks like an HTML page, read as it is written");
    }
    let lines: Vec<&[u8]> =
        head.split(|byte| *byte == b'\n').take(16).filter(|line| !line.is_empty()).collect();
    let is_table = |separator: u8, fields: usize| {
        let separators = |line: &&[u8]| line.iter().filter(|byte| **byte == separator).count();
        let first = lines.first().map_or(0, separators);
        lines.len() >= 4
            && first + 1 >= fields
            && lines[..lines.len() - 1].iter().all(|line| separators(line) == first)
    };
    (is_table(b'\t', 2) || is_table(b',', 4) || is_table(b';', 4))
        .then_some("looks like a table of separated values, read as it is written")
}

/// Lower case, without the dot.
pub(crate) fn extension(path: &Path) -> String {
    path.extension().and_then(OsStr::to_str).map(str::to_lowercase).unwrap_or_default()
}

/// The layout of a JSON file, or None for another text.
fn json_layout(name: &str, head: &[u8], is_whole: bool) -> Option<JsonLayout> {
    let head = head.strip_prefix(b"\xef\xbb\xbf").unwrap_or(head);
    let says_lines = ["jsonl", "ndjson"].contains(&name);
    let says_json = says_lines || name == "json";
    let text = head.trim_ascii_start();
    let is_array = match text.first() {
        Some(b'[') => true,
        Some(b'{') => false,
        _ if says_lines => return Some(JsonLayout::Lines),
        // A file of white space alone is empty.
        Some(_) if says_json => return Some(JsonLayout::Values),
        _ => return lines_by_content(head, is_whole),
    };
    let first_line = start_of(text, true, is_whole);
    let (first, rest) = match &first_line {
        Start::Complete { bytes } => (true, text[*bytes..].trim_ascii_start()),
        _ => (false, &text[..0]),
    };
    // A value that ends in its line with others below it; or one whose end is not in sight.
    let may_be_lines = match first {
        true => !rest.is_empty() || !is_whole && !is_array,
        false => first_line == Start::Incomplete && !is_array && says_lines,
    };
    if may_be_lines && (says_json || lines_by_content(head, is_whole).is_some()) {
        return Some(JsonLayout::Lines);
    }
    let holds_records = !is_array || matches!(text[1..].trim_ascii_start().first(), Some(b'{' | b'"'));
    match start_of(text, false, is_whole) {
        Start::Complete { .. } | Start::Incomplete if says_json || holds_records => Some(JsonLayout::Values),
        Start::Invalid if says_lines => Some(JsonLayout::Lines),
        Start::Invalid if says_json && lines_by_content(head, is_whole).is_none() => Some(JsonLayout::Values),
        _ => lines_by_content(head, is_whole),
    }
}

/// JSON lines, if half of the first lines or more are JSON objects.
fn lines_by_content(head: &[u8], is_whole: bool) -> Option<JsonLayout> {
    const LOOKED_AT: usize = 64;
    let mut lines: Vec<&[u8]> = head.split(|byte| *byte == b'\n').collect();
    if !is_whole {
        lines.pop();
    }
    let lines = lines.iter().map(|line| line.trim_ascii()).filter(|line| !line.is_empty()).take(LOOKED_AT);
    let is_object = |line: &[u8]| {
        line.starts_with(b"{") && start_of(line, true, true) == Start::Complete { bytes: line.len() }
    };
    let (mut objects, mut all) = (0, 0);
    for line in lines {
        (objects, all) = (objects + usize::from(is_object(line)), all + 1);
    }
    (objects > 0 && objects * 2 >= all).then_some(JsonLayout::Lines)
}
