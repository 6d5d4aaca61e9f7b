//! Megatron-LM's pair of files (`megatron/core/datasets/indexed_dataset.py`): `.bin` holds the ids of
//! all documents in order, `.idx` their width and bounds.
//!
//! `.idx`: `MMIDIDX\0\0`, u64 version 1, u8 id type, u64 sequences, u64 documents (34 bytes); then i32
//! lengths, i64 byte offsets of the sequences, i64 numbers of the documents' first sequences, and for
//! multimodal data i8 modes. Megatron's writers put the sequences one after the other, and only such
//! files are read: then all tokens in order are the `.bin` as it is.

use std::io::Read;
use std::path::{Path, PathBuf};

use super::foreign::Look;
use super::source::OpenTokenFile;
use super::{IdType, Layout, TokenFormat};
use crate::{DataError, Result};

const MAGIC: &[u8; 9] = b"MMIDIDX\0\0";
const HEADER_BYTES: u64 = 34;

/// The `.bin` that `path` means: itself, the one beside an `.idx`, or `path` as a prefix.
pub(super) fn data_path(path: &Path) -> PathBuf {
    let is_index = path.extension().is_some_and(|extension| extension == "idx");
    if is_index && read_magic(path) {
        return path.with_extension("bin");
    }
    let mut with_bin = path.as_os_str().to_owned();
    with_bin.push(".bin");
    let with_bin = PathBuf::from(with_bin);
    if !path.exists() && with_bin.is_file() { with_bin } else { path.to_path_buf() }
}

/// The layout of the `.bin` at `path`, of `data_bytes`, or `None` when there is no Megatron index beside it.
pub(super) fn read_index(path: &Path, data_bytes: u64) -> Result<Option<Layout>> {
    let index_path = path.with_extension("idx");
    if index_path == path || !read_magic(&index_path) {
        return Ok(None);
    }
    let index = OpenTokenFile::open(&index_path)?;
    let header = read_header(&index)?;
    let width = header.ids.bytes() as u64;
    let mut lengths = index.reader_from(HEADER_BYTES);
    let mut offsets = index.reader_from(HEADER_BYTES + 4 * header.sequences);

    let mut end = 0u64;
    for number in 0..header.sequences {
        let (mut length, mut offset) = ([0; 4], [0; 8]);
        let read = lengths.read_exact(&mut length).and_then(|()| offsets.read_exact(&mut offset));
        read.map_err(|cause| index.reading(cause))?;
        let (length, offset) = (i32::from_le_bytes(length), i64::from_le_bytes(offset));
        let follows = u64::try_from(offset) == Ok(end);
        let (true, Ok(length)) = (follows, u64::try_from(length)) else {
            return Err(DataError::BadHeader {
                path: index_path,
                reason: format!(
                    "sequence {number} is {length} tokens at byte {offset}, and byte {end} was \
                     expected; only sequences one after the other can be read"
                ),
            });
        };
        end = end.saturating_add(length * width);
    }
    if end != data_bytes {
        return Err(DataError::WrongSize {
            path: path.to_path_buf(),
            what: format!("its index {} counts {} tokens", index_path.display(), end / width),
            expected: end,
            found: data_bytes,
        });
    }
    Ok(Some(Layout {
        format: TokenFormat::Megatron,
        ids: header.ids,
        data: 0..end,
        vocab: None,
        tokenizer: 0..0,
    }))
}

/// Describes the fault of a `.bin` of bare ids that should have an index beside it.
pub(super) fn lacks_index(path: &Path) -> Option<Look> {
    let index = path.with_extension("idx");
    let shown = index.display();
    if index.exists() {
        let what = format!("beside it lies {shown}, which is not a Megatron index of version 1 (MMIDIDX)");
        return Some(Look::new(
            what,
            "copy the .idx again, or make the pair again; without a pair, move the .idx away",
        ));
    }
    // Megatron's `preprocess_data.py` names what it writes so.
    let stem = path.file_stem()?.to_str()?;
    let what = format!("by its name it is one half of a Megatron pair, and {shown} is missing");
    ["_document", "_sentence"]
        .iter()
        .any(|level| stem.ends_with(level))
        .then(|| Look::new(what, "put the .idx beside it; for bare ids, give the file another name"))
}

struct IndexHeader {
    ids: IdType,
    sequences: u64,
}

/// Reads and checks the first 34 bytes, and checks that the index is long enough for the counts in them.
fn read_header(source: &OpenTokenFile) -> Result<IndexHeader> {
    let (path, found) = (source.path(), source.bytes());
    let wrong_size =
        |what: String, expected| DataError::WrongSize { path: path.to_path_buf(), what, expected, found };
    let bad = |reason: String| DataError::BadHeader { path: path.to_path_buf(), reason };
    if found < HEADER_BYTES {
        return Err(wrong_size("it is a Megatron index".to_string(), HEADER_BYTES));
    }
    let index = source.head(HEADER_BYTES as usize)?;
    let number = |at: usize| {
        let bytes: [u8; 8] = index[at..at + 8].try_into().expect("eight bytes of the header");
        u64::from_le_bytes(bytes)
    };
    let (version, sequences, documents) = (number(9), number(18), number(26));
    if version != 1 {
        return Err(bad(format!("version {version} of a Megatron index; version 1 is known")));
    }
    let ids = match index[17] {
        1 => IdType::U8,
        2 => IdType::I8,
        3 => IdType::I16,
        4 => IdType::I32,
        5 => IdType::I64,
        8 => IdType::U16,
        6 | 7 => return Err(bad("its ids are floating-point numbers".to_string())),
        other => return Err(bad(format!("id type {other} of a Megatron index; 1 to 8 are known"))),
    };
    let body = sequences.checked_mul(12).zip(documents.checked_mul(8)).and_then(|(s, d)| s.checked_add(d));
    let plain = body.and_then(|body| body.checked_add(HEADER_BYTES)).unwrap_or(u64::MAX);
    // Multimodal data adds a byte for each sequence, which changes nothing here.
    if found != plain && Some(found) != plain.checked_add(sequences) {
        return Err(wrong_size(format!("it counts {sequences} sequences, {documents} documents"), plain));
    }
    Ok(IndexHeader { ids, sequences })
}

fn read_magic(path: &Path) -> bool {
    let head = phalanx_system::files::open_regular(path).and_then(|mut file| {
        let mut head = [0u8; MAGIC.len()];
        file.read_exact(&mut head).map(|()| head)
    });
    head.is_ok_and(|head| head == *MAGIC)
}
