//! Files that are no token files, by their first bytes: archives, arrays, text, the files of other programs.

/// What a file looks like, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Look {
    /// In words: "it is compressed by gzip".
    pub is: String,
    /// What to do.
    pub advice: String,
}

impl Look {
    pub(super) fn new(is: impl Into<String>, advice: impl Into<String>) -> Look {
        Look { is: is.into(), advice: advice.into() }
    }

    pub(super) fn of_type(is: &str, name: &str) -> Look {
        Look::new(is, format!("set data.token_type = {name:?}"))
    }
}

/// Offset, bytes, what such a file is, and what to do.
type Magic = (usize, &'static [u8], &'static str, &'static str);

const UNPACK: &str = "unpack it first";
const ARRAY: &str = "write its ids with numpy's `tofile`, and say their type with data.token_type";
const TABLE: &str = "write its text to .jsonl files for data.text, or its ids with numpy's `tofile`";
const NO_DATA: &str = "name the file that holds the tokens";
const FETCH: &str = "fetch it again, and look at the address and the answer of the server";
const AS_TEXT: &str = "train on text with data.text, or make a token file of it with `phalanx tokenize`";

const MAGICS: [Magic; 34] = [
    (0, b"PK\x03\x04", "a zip archive, as .npz files and PyTorch's checkpoints are", UNPACK),
    (0, b"\x1f\x8b\x08", "compressed by gzip", UNPACK),
    (0, b"\x28\xb5\x2f\xfd", "compressed by zstd", UNPACK),
    (0, b"\xfd7zXZ\0", "compressed by xz", UNPACK),
    (0, b"\x04\x22\x4d\x18", "compressed by lz4", UNPACK),
    (4, b"1AY&SY", "compressed by bzip2", UNPACK),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive", UNPACK),
    (257, b"ustar", "a tar archive", UNPACK),
    (0, b"\x93NUMPY", "a NumPy array (.npy)", ARRAY),
    (0, b"\x89HDF\r\n", "an HDF5 file", ARRAY),
    (0, b"PAR1", "a Parquet file", TABLE),
    (0, b"ARROW1", "an Arrow file", TABLE),
    (0, b"\xff\xff\xff\xff", "an Arrow stream, or ids of -1", TABLE),
    (0, b"Obj\x01", "an Avro file", TABLE),
    (0, b"ORC\x0a", "an ORC file", TABLE),
    (0, b"SQLite format 3\0", "an SQLite database", TABLE),
    (0, b"GGUF", "a GGUF model", NO_DATA),
    (0, b"ggml", "a GGML model", NO_DATA),
    (0, b"\x7fELF", "a program or library (ELF)", NO_DATA),
    (0, b"%PDF-", "a PDF document", AS_TEXT),
    (0, b"\x89PNG\r\n", "a PNG image", NO_DATA),
    (0, b"\xff\xd8\xff", "a JPEG image", NO_DATA),
    (0, b"RIFF", "a sound or picture (RIFF)", NO_DATA),
    (0, b"LITPKDS\0", "a packed dataset of LitGPT, which has a header", ARRAY),
    (0, b"MMIDIDX\0\0", "the index of a Megatron pair", "name its .bin, whose .idx it is"),
    (
        0,
        b"TNTIDX\0\0",
        "an index of fairseq or an early Megatron",
        "make the pair again with a newer Megatron",
    ),
    // 20240326, 20240327, 20240328, 20240522.
    (0, b"\xc6\xd7\x34\x01", "a model of llm.c", NO_DATA),
    (0, b"\xc7\xd7\x34\x01", "a debugging state of llm.c", NO_DATA),
    (0, b"\xc8\xd7\x34\x01", "a tokenizer of llm.c", NO_DATA),
    (0, b"\x8a\xd8\x34\x01", "an evaluation set of llm.c", NO_DATA),
    (0, b"version https://git-lfs", "the pointer of git-lfs to a file", "fetch the file with `git lfs pull`"),
    (
        0,
        b"\xff\xfe",
        "UTF-16 text",
        "convert it to UTF-8 (iconv -f UTF-16 -t UTF-8), and name it in data.text",
    ),
    (
        0,
        b"\xfe\xff",
        "UTF-16 text",
        "convert it to UTF-8 (iconv -f UTF-16 -t UTF-8), and name it in data.text",
    ),
    (0, b"\xef\xbb\xbf", "UTF-8 text", AS_TEXT),
];

/// What a file with these first bytes is, if it is known; `bytes` is the size of the file.
pub(super) fn by_magic(head: &[u8], bytes: u64) -> Option<Look> {
    let starts = |at: usize, magic: &[u8]| head.get(at..).is_some_and(|from| from.starts_with(magic));
    if let Some((_, _, is, advice)) = MAGICS.iter().find(|(at, magic, ..)| starts(*at, magic)) {
        return Some(Look::new(format!("it is {is}"), *advice));
    }
    if let Some((length, json)) = head.split_first_chunk()
        && json.starts_with(b"{")
        && (2..bytes.saturating_sub(7)).contains(&u64::from_le_bytes(*length))
    {
        return Some(Look::new("it is a safetensors file", NO_DATA));
    }
    if let [0x80, protocol @ 2..=5, next, ..] = head
        && (*next == 0x95 || (*protocol < 4 && b"}](cXq\x8aJKMN".contains(next)))
    {
        return Some(Look::new("it is a Python pickle, as older checkpoints of PyTorch are", ARRAY));
    }
    near_miss(head, bytes)
}

/// A header of a known token file of which the first bytes are wrong.
fn near_miss(head: &[u8], bytes: u64) -> Option<Look> {
    let again = "copy the file or make it again";
    let own = head.iter().zip(super::own::MAGIC).filter(|(found, magic)| found == magic).count();
    if own >= 6 {
        return Some(Look::new("it is a Phalanx token file whose first bytes are damaged", again));
    }
    let (header, _) = head.first_chunk::<1024>()?.as_chunks::<4>();
    let field = |at: usize| u32::from_le_bytes(header[at]);
    let count = u64::from(field(2));
    let has_size =
        [2, 4].contains(&(bytes - 1024).checked_div(count)?) && (bytes - 1024).is_multiple_of(count);
    let is_header = has_size && field(0) > 0 && header[3..].iter().all(|word| *word == [0; 4]);
    let what =
        format!("it has a header like llm.c's of {count} tokens, with the unknown magic number {}", field(0));
    is_header.then(|| Look::new(what, again))
}

/// What text the bytes are, if they are. `head` is the beginning of the file, `sample` has bytes of all its parts.
pub(super) fn text(head: &[u8], sample: &[u8]) -> Option<Look> {
    let is_printable = |byte: &&u8| matches!(byte, 9..=13 | 27 | 32..=126);
    let control = head.iter().filter(|byte| **byte < 32 && !is_printable(byte)).count();
    let utf8 = str::from_utf8(head).map_or_else(|error| error.error_len().is_none(), |_| true);
    let printable = sample.iter().filter(is_printable).count();
    let beginning = String::from_utf8_lossy(&head[..head.len().min(200)]).trim_start().to_lowercase();
    let kind = match () {
        () if sample.contains(&0) => return None,
        () if beginning.starts_with("<!doctype html") || beginning.starts_with("<html") => {
            return Some(Look::new(
                "it is an HTML page, perhaps the answer of a server in place of the file",
                FETCH,
            ));
        }
        () if utf8 && 50 * control <= head.len() => "UTF-8 text",
        () if 10 * printable >= 8 * sample.len() => "text in an 8-bit encoding, as Latin-1",
        () => return None,
    };
    let shown: String = String::from_utf8_lossy(head).chars().take(24).collect();
    Some(Look::new(format!("it is {kind} ({shown:?} ...)"), AS_TEXT))
}
