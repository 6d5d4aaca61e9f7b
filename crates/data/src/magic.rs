//! Formats that are neither text nor token ids, by their first bytes. What can be done with such a file depends on whether text or ids
//! are expected.

use self::Kind::{Array, Document, Ids, Nothing, Other, Table, Weights};

/// A format that begins with known bytes.
pub(crate) struct Format {
    /// Offset of the known bytes, and the bytes: enough that neither words nor ids of a usual file begin so.
    at: usize,
    magic: &'static [u8],
    /// The format, as a noun phrase.
    pub(crate) is: &'static str,
    kind: Kind,
}

/// Kind of a file's content, as far as it decides what can be done.
#[derive(Clone, Copy)]
enum Kind {
    /// Columns or records, of texts or ids.
    Table,
    /// Numbers behind a header.
    Array,
    /// Text in a form of its own.
    Document,
    Weights,
    /// Token ids in a layout that is read.
    Ids,
    /// Neither text nor ids.
    Nothing,
    /// Advice that holds whatever is expected.
    Other(&'static str),
}

const UNPACK: Kind = Other("unpack it first; packed files are not read yet");
pub(crate) const TO_JSON_LINES: &str = "write its texts as JSON lines first, for example with Python's `datasets` or `pandas`: `to_json(\"FILE.jsonl\", orient=\"records\", lines=True)`";
pub(crate) const AS_TOKENS: &str = "name it in data.tokens instead of data.text";
pub(crate) const WITHOUT_TEXT: &str = "it holds weights and no text: leave it out";
pub(crate) const TO_IDS: &str =
    "write its ids with numpy's `tofile`, and say their type with data.token_type";
pub(crate) const WITHOUT_IDS: &str = "name the file that holds the tokens";
pub(crate) const TEXT_TO_IDS: &str =
    "train on text with data.text, or make a token file of it with `phalanx tokenize`";

#[rustfmt::skip]
const FORMATS: [Format; 59] = [
    format(0, b"\x1f\x8b\x08", "a gzip file", Other("decompress it first (`gunzip FILE`); reading .gz itself comes later")),
    format(0, b"\x28\xb5\x2f\xfd", "a zstd file", Other("decompress it first (`unzstd FILE`)")),
    format(0, b"\xfd7zXZ\0", "an xz file", Other("decompress it first (`unxz FILE`)")),
    format(4, b"1AY&SY", "a bzip2 file", Other("decompress it first (`bunzip2 FILE`)")),
    format(0, b"\x04\x22\x4d\x18", "an lz4 file", Other("decompress it first (`unlz4 FILE`)")),
    format(0, b"PK\x03\x04", "a zip archive (as .docx, .xlsx, .epub, .npz and .pt files are)", UNPACK),
    format(0, b"PK\x05\x06", "an empty zip archive", Nothing),
    format(0, b"7z\xbc\xaf\x27\x1c", "a 7z archive", UNPACK),
    format(0, b"Rar!\x1a\x07", "a rar archive", UNPACK),
    format(0, b"\xff\x06\0\0sNaPpY", "a snappy file", UNPACK),
    format(257, b"ustar", "a tar archive", UNPACK),
    format(0, b"PAR1", "a Parquet file", Table),
    format(0, b"ARROW1", "an Arrow file", Table),
    format(0, b"\xff\xff\xff\xff", "an Arrow stream, or ids of -1", Table),
    format(0, b"FEA1", "a Feather file", Table),
    format(0, b"ORC\x0a", "an ORC file", Table),
    format(0, b"Obj\x01", "an Avro file", Table),
    format(0, b"SQLite format 3\0", "an SQLite database", Table),
    format(0, b"\x89HDF\r\n\x1a\n", "an HDF5 file", Table),
    format(0, b"ccopy_reg\n", "a pickle", Table),
    format(0, b"(dp", "a pickle", Table),
    format(0, b"(lp", "a pickle", Table),
    format(0, b"\x93NUMPY", "a NumPy array (.npy)", Array),
    format(0, b"LITPKDS\0", "a packed dataset of LitGPT, which has a header", Array),
    format(0, b"%PDF-", "a PDF document", Document),
    format(0, b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an old Office document", Document),
    format(0, b"{\\rtf", "a rich text document", Document),
    format(0, b"AT&TFORM", "a DjVu document", Document),
    format(0, b"GGUF", "a GGUF model", Weights),
    // Its magic number is "ggml", the lowest byte first.
    format(0, b"lmgg", "a GGML model", Weights),
    // 20240326, 20240327, 20240328, 20240522, 20240520, 20240801.
    format(0, b"\xc6\xd7\x34\x01", "a model of llm.c", Weights),
    format(0, b"\xc7\xd7\x34\x01", "a debugging state of llm.c", Nothing),
    format(0, b"\xc8\xd7\x34\x01", "a tokenizer of llm.c", Nothing),
    format(0, b"\x8a\xd8\x34\x01", "an evaluation set of llm.c", Nothing),
    format(0, b"\x88\xd8\x34\x01", "a token file of llm.c", Ids),
    format(0, b"\xa1\xd9\x34\x01", "a token file of llm.c", Ids),
    format(0, b"PHXTOK\0\0", "a token file of Phalanx", Ids),
    format(0, b"MMIDIDX\0\0", "the index of a Megatron pair", Other("name its .bin, whose .idx it is, in data.tokens")),
    format(0, b"TNTIDX\0\0", "an index of fairseq or an early Megatron", Other("make the pair again with a newer Megatron")),
    format(0, b"\x89PNG\r\n\x1a\n", "a PNG image", Nothing),
    format(0, b"\xff\xd8\xff", "a JPEG image", Nothing),
    format(0, b"GIF87a", "a GIF image", Nothing),
    format(0, b"GIF89a", "a GIF image", Nothing),
    format(0, b"II*\0", "a TIFF image", Nothing),
    format(0, b"MM\0*", "a TIFF image", Nothing),
    format(0, b"RIFF", "a RIFF file (an image, sound or film)", Nothing),
    format(4, b"ftyp", "a film or image", Nothing),
    format(0, b"OggS", "an Ogg file", Nothing),
    format(0, b"fLaC", "a FLAC file", Nothing),
    format(0, b"ID3", "an MP3 file", Nothing),
    format(0, b"\x7fELF", "a program or library (ELF)", Nothing),
    format(0, b"\0asm", "a WebAssembly module", Nothing),
    format(0, b"\xca\xfe\xba\xbe", "a Java class or a program", Nothing),
    format(0, b"version https://git-lfs", "a git-lfs pointer, not the file itself", Other("fetch the file with `git lfs pull`")),
    format(0, b"/annex/objects/", "a pointer of git-annex", Other("fetch its content first (`git annex get`)")),
    // By byte order marks, the longer ones first.
    format(0, b"\xff\xfe\0\0", "text in UTF-32", Other("convert it: `iconv -f UTF-32 -t UTF-8 FILE > NEW`")),
    format(0, b"\0\0\xfe\xff", "text in UTF-32", Other("convert it: `iconv -f UTF-32 -t UTF-8 FILE > NEW`")),
    format(0, b"\xff\xfe", "text in UTF-16", Other("convert it: `iconv -f UTF-16 -t UTF-8 FILE > NEW`")),
    format(0, b"\xfe\xff", "text in UTF-16", Other("convert it: `iconv -f UTF-16 -t UTF-8 FILE > NEW`")),
];

const fn format(at: usize, magic: &'static [u8], is: &'static str, kind: Kind) -> Format {
    Format { at, magic, is, kind }
}

/// The format of a file with these first bytes, where it is known.
pub(crate) fn format_of(head: &[u8]) -> Option<&'static Format> {
    FORMATS.iter().find(|format| head.get(format.at..).is_some_and(|from| from.starts_with(format.magic)))
}

impl Format {
    /// Advice if text was expected.
    pub(crate) fn for_text(&self) -> &'static str {
        match self.kind {
            Table => TO_JSON_LINES,
            Array => "if it holds token ids, write them with `tofile` and name that file in data.tokens",
            Document => "extract its text first",
            Weights => WITHOUT_TEXT,
            Ids => AS_TOKENS,
            Nothing => "it has no text: leave it out",
            Other(advice) => advice,
        }
    }

    /// Advice if token ids were expected.
    pub(crate) fn for_ids(&self) -> &'static str {
        match self.kind {
            Table => "write its text to .jsonl files for data.text, or its ids with numpy's `tofile`",
            Array => TO_IDS,
            Document => TEXT_TO_IDS,
            Weights | Ids | Nothing => WITHOUT_IDS,
            Other(advice) => advice,
        }
    }
}
