//! Token files: ids on disk, mapped into memory, in the formats of four projects.
//!
//! The format is told by content, not by name: Phalanx's own and llm.c's by their magic numbers,
//! Megatron's by the `.idx` beside the `.bin`, and nanoGPT's, which is bare ids, by being none of
//! these and named `.bin`. Each format reduces to the same three facts: where the ids start, how wide
//! they are, how many there are.

mod header;
mod map;
mod megatron;
mod own;

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::{DataError, Result, Tokenizer};
use map::FileMap;

pub(crate) use own::NARROW_VOCAB;
pub use own::{TokenWriter, Written};

/// Ids are checked against a vocabulary this many at a time.
const SCAN: usize = 1 << 14;

/// Which project's layout a token file has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenFormat {
    /// Written by [`TokenWriter`]: header, ids, tokenizer.
    Phalanx,
    /// 16-bit ids and nothing else.
    NanoGpt,
    /// A header of 256 numbers, then 16-bit ids (GPT-2) or 32-bit ids (Llama 3).
    LlmC,
    /// Ids, with their width and number in an `.idx` file beside them.
    Megatron,
}

/// How an id lies in the file; all are little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum IdType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    I64,
}

impl IdType {
    fn bytes(self) -> usize {
        match self {
            IdType::U8 | IdType::I8 => 1,
            IdType::U16 | IdType::I16 => 2,
            IdType::U32 | IdType::I32 => 4,
            IdType::I64 => 8,
        }
    }
}

/// What a format's reader finds out about a file.
struct Layout {
    format: TokenFormat,
    ids: IdType,
    /// The bytes of the ids within the file.
    data: Range<usize>,
    vocab: Option<usize>,
    /// The bytes of the tokenizer's JSON within the file; empty for none.
    tokenizer: Range<usize>,
}

/// A mapped token file. While it is open the file must be neither shortened nor rewritten in place;
/// replacing it by renaming, as Phalanx does, is fine.
pub struct TokenFile {
    path: PathBuf,
    map: FileMap,
    layout: Layout,
}

impl TokenFile {
    /// Opens a token file of any known format. For Megatron's pair, `path` may be the `.bin`, the
    /// `.idx` or their common prefix.
    ///
    /// # Errors
    /// [`DataError::MissingPath`], [`DataError::NotTokenFile`], [`DataError::BadHeader`],
    /// [`DataError::WrongSize`] with the bytes expected and found, [`DataError::Read`].
    pub fn open(path: &Path) -> Result<TokenFile> {
        let path = megatron::data_path(path);
        let map = FileMap::open(&path)?;
        let layout = if let Some(layout) = own::read_header(&path, &map)? {
            layout
        } else if let Some(layout) = header::read_llm_c(&path, &map)? {
            layout
        } else if let Some(layout) = megatron::read_index(&path, map.len() as u64)? {
            layout
        } else {
            header::read_nano_gpt(&path, &map)?
        };
        assert!(layout.data.end <= map.len() && layout.data.len() % layout.ids.bytes() == 0);
        Ok(TokenFile { path, map, layout })
    }

    /// The number of tokens.
    pub fn len(&self) -> usize {
        self.layout.data.len() / self.layout.ids.bytes()
    }

    /// Whether there is no token.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The file that holds the ids.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whose layout it has.
    pub fn format(&self) -> TokenFormat {
        self.layout.format
    }

    /// The number of ids of the vocabulary, where the format tells it: Phalanx's own, and llm.c's,
    /// whose magic number names the tokenizer.
    pub fn vocab_size(&self) -> Option<usize> {
        self.layout.vocab
    }

    /// The tokenizer by which the tokens were made, which only Phalanx's own format holds.
    ///
    /// # Errors
    /// [`DataError::TokenizerFile`] when that part of the file is damaged.
    pub fn tokenizer(&self) -> Result<Option<Tokenizer>> {
        match &self.map[self.layout.tokenizer.clone()] {
            [] => Ok(None),
            json => Tokenizer::from_json(json, &self.path).map(Some),
        }
    }

    /// Copies the tokens from number `at` on into the whole of `out`. An id that no vocabulary has
    /// (negative or beyond 32 bits) reads as `u32::MAX`; [`TokenFile::check_vocab`] finds it.
    ///
    /// Panics when `at + out.len()` is beyond [`TokenFile::len`].
    pub fn read(&self, at: usize, out: &mut [u32]) {
        let width = self.layout.ids.bytes();
        let ids = &self.map[self.layout.data.clone()];
        let ids = &ids[at * width..(at + out.len()) * width];
        match self.layout.ids {
            IdType::U8 => convert(ids, out, |[byte]: [u8; 1]| u32::from(byte)),
            IdType::I8 => convert(ids, out, |id| clamp(i64::from(i8::from_le_bytes(id)))),
            IdType::U16 => convert(ids, out, |id| u32::from(u16::from_le_bytes(id))),
            IdType::I16 => convert(ids, out, |id| clamp(i64::from(i16::from_le_bytes(id)))),
            IdType::U32 => convert(ids, out, u32::from_le_bytes),
            IdType::I32 => convert(ids, out, |id| clamp(i64::from(i32::from_le_bytes(id)))),
            IdType::I64 => convert(ids, out, |id| clamp(i64::from_le_bytes(id))),
        }
    }

    /// Reads the whole file once, at the speed of memory or disk, for an id that a vocabulary of
    /// `vocab` ids does not have.
    ///
    /// # Errors
    /// [`DataError::TokenOutOfRange`] with the first such token.
    pub fn check_vocab(&self, vocab: usize) -> Result<()> {
        let limit = u32::try_from(vocab).unwrap_or(u32::MAX);
        let mut buffer = vec![0u32; SCAN];
        for at in (0..self.len()).step_by(SCAN) {
            let count = SCAN.min(self.len() - at);
            let ids = &mut buffer[..count];
            self.read(at, ids);
            let largest = ids.iter().fold(0, |largest, &id| largest.max(id));
            if largest < limit {
                continue;
            }
            if let Some(place) = ids.iter().position(|&id| id >= limit) {
                return Err(DataError::TokenOutOfRange {
                    origin: self.path.display().to_string(),
                    position: at + place,
                    id: self.id(at + place),
                    vocab,
                });
            }
        }
        Ok(())
    }

    /// Token number `at` exactly as it is written.
    fn id(&self, at: usize) -> i64 {
        let width = self.layout.ids.bytes();
        let start = self.layout.data.start + at * width;
        let mut bytes = [0u8; 8];
        bytes[..width].copy_from_slice(&self.map[start..start + width]);
        let unsigned = i64::from_le_bytes(bytes);
        let unused_bits = 64 - 8 * width as u32;
        match self.layout.ids {
            IdType::U8 | IdType::U16 | IdType::U32 => unsigned,
            IdType::I8 | IdType::I16 | IdType::I32 | IdType::I64 => unsigned << unused_bits >> unused_bits,
        }
    }
}

impl fmt::Debug for TokenFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TokenFile({}, {:?}, {} tokens)", self.path.display(), self.layout.format, self.len())
    }
}

/// Widens the ids of `bytes`, each `WIDTH` bytes long, into `out`.
fn convert<const WIDTH: usize>(bytes: &[u8], out: &mut [u32], id: impl Fn([u8; WIDTH]) -> u32) {
    let (ids, rest) = bytes.as_chunks::<WIDTH>();
    assert!(rest.is_empty() && ids.len() == out.len());
    for (out, bytes) in out.iter_mut().zip(ids) {
        *out = id(*bytes);
    }
}

fn clamp(id: i64) -> u32 {
    u32::try_from(id).unwrap_or(u32::MAX)
}
