//! What a file holds, told by its first bytes and not by its name: text, JSON of one of two layouts, or one of the
//! formats that are not text, each with the way to make text of it.
//!
//! Only three things go by the name: a table of comma- or tab-separated values, which no first byte tells from prose;
//! JSON that is broken from its first byte on; and bare token ids, which have no header.

use std::ffi::OsStr;
use std::path::Path;

use crate::json::{Start, start_of};

/// Bytes at the beginning of a file by which it is recognised.
pub(crate) const HEAD_BYTES: usize = 1 << 16;

/// A format that is not read, and what to do instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Foreign {
    /// The format, as a noun phrase.
    pub(crate) is: &'static str,
    /// What the user can do.
    pub(crate) way_out: &'static str,
}

/// How the texts of a JSON file lie in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum JsonLayout {
    /// One value a line.
    Lines,
    /// Values that may take several lines: an array of records, or records one after another.
    Values,
}

/// What a file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    Text,
    Json(JsonLayout),
    Foreign(Foreign),
}

const UNPACK: &str = "unpack it first; packed files are not read yet";
const TO_JSON_LINES: &str = "write its texts as JSON lines first, for example with Python's `datasets` or `pandas`: `to_json(\"FILE.jsonl\", orient=\"records\", lines=True)`";
const TO_TEXT: &str = "extract its text first";
const NO_TEXT: &str = "it has no text: leave it out";
const AS_TOKENS: &str = "name it in data.tokens instead of data.text";
const WEIGHTS: &str = "it holds weights and no text: leave it out";

/// Formats by their first bytes: at which byte they begin, and what they are.
#[rustfmt::skip]
const MAGIC: [(usize, &[u8], &str, &str); 47] = [
    (0, b"\x1f\x8b", "a gzip file", "decompress it first (`gunzip FILE`); reading .gz itself comes later"),
    (0, b"PK\x03\x04", "a zip archive (as .docx, .xlsx, .epub, .npz and .pt files are)", UNPACK),
    (0, b"PK\x05\x06", "an empty zip archive", NO_TEXT),
    (0, b"\x28\xb5\x2f\xfd", "a zstd file", "decompress it first (`unzstd FILE`)"),
    (0, b"\xfd7zXZ\0", "an xz file", "decompress it first (`unxz FILE`)"),
    (0, b"BZh", "a bzip2 file", "decompress it first (`bunzip2 FILE`)"),
    (0, b"\x04\x22\x4d\x18", "an lz4 file", "decompress it first (`unlz4 FILE`)"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive", UNPACK),
    (0, b"Rar!\x1a\x07", "a rar archive", UNPACK),
    (0, b"\xff\x06\0\0sNaPpY", "a snappy file", UNPACK),
    (257, b"ustar", "a tar archive", UNPACK),
    (0, b"PAR1", "a Parquet file", TO_JSON_LINES),
    (0, b"ARROW1", "an Arrow file", TO_JSON_LINES),
    (0, b"\xff\xff\xff\xff", "an Arrow stream", TO_JSON_LINES),
    (0, b"FEA1", "a Feather file", TO_JSON_LINES),
    (0, b"ORC", "an ORC file", TO_JSON_LINES),
    (0, b"Obj\x01", "an Avro file", TO_JSON_LINES),
    (0, b"SQLite format 3\0", "an SQLite database", TO_JSON_LINES),
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file", TO_JSON_LINES),
    (0, b"%PDF-", "a PDF", TO_TEXT),
    (0, b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an old Office document", TO_TEXT),
    (0, b"{\\rtf", "a rich text document", TO_TEXT),
    (0, b"AT&TFORM", "a DjVu document", TO_TEXT),
    (0, b"\x89PNG\r\n\x1a\n", "a PNG image", NO_TEXT),
    (0, b"\xff\xd8\xff", "a JPEG image", NO_TEXT),
    (0, b"GIF87a", "a GIF image", NO_TEXT),
    (0, b"GIF89a", "a GIF image", NO_TEXT),
    (0, b"RIFF", "a RIFF file (an image, sound or film)", NO_TEXT),
    (0, b"II*\0", "a TIFF image", NO_TEXT),
    (0, b"MM\0*", "a TIFF image", NO_TEXT),
    (4, b"ftyp", "a film or image", NO_TEXT),
    (0, b"OggS", "an Ogg file", NO_TEXT),
    (0, b"fLaC", "a FLAC file", NO_TEXT),
    (0, b"ID3", "an MP3 file", NO_TEXT),
    (0, b"\x7fELF", "a program", NO_TEXT),
    (0, b"\0asm", "a WebAssembly module", NO_TEXT),
    (0, b"\xca\xfe\xba\xbe", "a Java class or a program", NO_TEXT),
    (0, b"GGUF", "a GGUF file", WEIGHTS),
    (0, b"\x93NUMPY", "a NumPy array", "if it holds token ids, write them with `tofile` and name that file in data.tokens"),
    (0, b"PHXTOK\0\0", "a token file of Phalanx", AS_TOKENS),
    (0, &20_240_520u32.to_le_bytes(), "a token file of llm.c", AS_TOKENS),
    (0, &20_240_801u32.to_le_bytes(), "a token file of llm.c", AS_TOKENS),
    (0, b"MMIDIDX\0\0", "the index of a token file of Megatron", AS_TOKENS),
    (0, b"ccopy_reg\n", "a pickle", TO_JSON_LINES),
    (0, b"(dp", "a pickle", TO_JSON_LINES),
    (0, b"(lp", "a pickle", TO_JSON_LINES),
    (0, b"/annex/objects/", "a pointer of git-annex", "fetch its content first (`git annex get`)"),
];

/// Text in encodings other than UTF-8, by their byte order marks; the longer ones first.
const MARKS: [(&[u8], Foreign); 4] = [
    (b"\xff\xfe\0\0", utf("text in UTF-32", "convert it: `iconv -f UTF-32 -t UTF-8 FILE > NEW`")),
    (b"\0\0\xfe\xff", utf("text in UTF-32", "convert it: `iconv -f UTF-32 -t UTF-8 FILE > NEW`")),
    (b"\xff\xfe", utf("text in UTF-16", "convert it: `iconv -f UTF-16 -t UTF-8 FILE > NEW`")),
    (b"\xfe\xff", utf("text in UTF-16", "convert it: `iconv -f UTF-16 -t UTF-8 FILE > NEW`")),
];

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
    let marked = MARKS.iter().find(|(mark, _)| head.starts_with(mark)).map(|(_, foreign)| *foreign);
    let known = || {
        let found =
            MAGIC.iter().find(|(at, magic, ..)| head.get(*at..).is_some_and(|head| head.starts_with(magic)));
        found.map(|(_, _, is, way_out)| Foreign { is, way_out })
    };
    marked.or_else(known).or_else(|| safetensors(head)).or_else(|| pickle(head)).or_else(|| wide(head))
}

/// The length of a JSON header, then the header.
fn safetensors(head: &[u8]) -> Option<Foreign> {
    let length = u64::from_le_bytes(*head.first_chunk()?);
    ((2..1 << 30).contains(&length) && head.get(8) == Some(&b'{'))
        .then_some(Foreign { is: "a safetensors file", way_out: WEIGHTS })
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

/// Whether a number is a character of a written text.
fn printable(unit: u32) -> bool {
    match char::from_u32(unit) {
        Some(c) => !c.is_control() || "\t\n\r\u{c}".contains(c),
        None => (0xd800..0xe000).contains(&unit),
    }
}

/// What a file is that is not UTF-8 around `head`, where [`foreign`] does not know it.
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

/// What a file with zero bytes is, where [`foreign`] does not know it.
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
