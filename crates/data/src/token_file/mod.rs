//! Token files: ids on disk, read where they are, in the formats of four projects.
//!
//! The format is told by content, not by name: Phalanx's own and llm.c's by their magic numbers,
//! Megatron's by the `.idx` beside the `.bin`, and nanoGPT's, which is bare ids, by being none of
//! these and named `.bin`. Each format reduces to the same three facts: where the ids start, how wide
//! they are, how many there are. What is probably no ids is noticed by a sample ([`TokenFile::look`]).

mod foreign;
mod header;
mod look;
mod megatron;
mod own;
mod paths;
mod scan;
mod several;
mod source;

use std::fmt;
use std::ops::Range;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::{DataError, Result, TokenFilesError, Tokenizer};
use source::OpenTokenFile;

pub use foreign::Look;
pub(crate) use own::NARROW_VOCAB;
pub use own::{TokenWriter, Written};
pub use paths::{is_match, token_paths};
pub use scan::Scan;
pub use several::TokenFiles;

/// Bytes that identify the format: the length of the longest header, llm.c's.
const HEAD_BYTES: usize = 1024;

/// The project whose layout a token file has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenFormat {
    /// Written by [`TokenWriter`]: header, ids, tokenizer.
    Phalanx,
    /// Ids and nothing else: 16-bit ones, or what [`TokenType`] says.
    NanoGpt,
    /// A header of 256 numbers, then 16-bit ids (GPT-2) or 32-bit ids (Llama 3).
    LlmC,
    /// Ids, with their width and number in an `.idx` file beside them.
    Megatron,
}

impl fmt::Display for TokenFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TokenFormat::Phalanx => "Phalanx's own",
            TokenFormat::NanoGpt => "bare ids, as nanoGPT's",
            TokenFormat::LlmC => "llm.c's",
            TokenFormat::Megatron => "Megatron's",
        })
    }
}

/// Type of the ids in a file without a header; a header states the type itself. Signed types are read under the same names: a negative id
/// is outside of every vocabulary.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TokenType {
    /// As the header says; 16 bits without one.
    #[default]
    Auto,
    /// 8 bits.
    U8,
    /// 16 bits.
    U16,
    /// 32 bits.
    U32,
    /// 64 bits.
    I64,
}

impl TokenType {
    /// The type of bare ids.
    fn ids(self) -> IdType {
        match self {
            TokenType::U8 => IdType::U8,
            TokenType::Auto | TokenType::U16 => IdType::U16,
            TokenType::U32 => IdType::U32,
            TokenType::I64 => IdType::I64,
        }
    }
}

/// Type of an id in the file; all are little-endian.
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

    fn name(self) -> &'static str {
        match self {
            IdType::U8 => "u8",
            IdType::I8 => "i8",
            IdType::U16 => "u16",
            IdType::I16 => "i16",
            IdType::U32 => "u32",
            IdType::I32 => "i32",
            IdType::I64 => "i64",
        }
    }
}

/// Layout of a file, as the reader of its format finds it.
struct Layout {
    format: TokenFormat,
    ids: IdType,
    /// The bytes of the ids within the file.
    data: Range<u64>,
    vocab: Option<usize>,
    /// The bytes of the tokenizer's JSON within the file; empty for none.
    tokenizer: Range<u64>,
}

/// An open token file. It keeps the opened file, even if the path is later replaced by another file (by a rename, as
/// Phalanx does).
pub struct TokenFile {
    source: OpenTokenFile,
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
        TokenFile::open_as(path, TokenType::Auto)
    }

    /// Like [`TokenFile::open`], for ids of the type `given` if the file has no header.
    ///
    /// # Errors
    /// Those of [`TokenFile::open`], [`TokenFilesError::OtherType`] for a header that says another type.
    pub fn open_as(path: &Path, given: TokenType) -> Result<TokenFile> {
        let path = megatron::data_path(path);
        let source = OpenTokenFile::open(&path)?;
        let (head, bytes) = (source.head(HEAD_BYTES)?, source.bytes());
        let layout = if let Some(layout) = own::read_header(&path, &head, bytes)? {
            layout
        } else if let Some(layout) = header::read_llm_c(&path, &head, bytes)? {
            layout
        } else if let Some(layout) = megatron::read_index(&path, bytes)? {
            layout
        } else {
            header::read_bare(&path, &head, bytes, given)?
        };
        if given != TokenType::Auto && layout.ids.bytes() != given.ids().bytes() {
            let (format, found) = (layout.format, layout.ids.name());
            return Err(TokenFilesError::OtherType { path, format, found, given: given.ids().name() }.into());
        }
        let Range { start, end } = layout.data;
        let width = layout.ids.bytes() as u64;
        // Ids never straddle the windows of a scan.
        assert!(start <= end && end <= bytes && (end - start) % width == 0 && start % 8 == 0);
        Ok(TokenFile { source, layout })
    }

    /// The number of tokens.
    pub fn len(&self) -> usize {
        let Range { start, end } = self.layout.data;
        ((end - start) / self.layout.ids.bytes() as u64) as usize
    }

    /// Returns whether there is no token.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number of documents, which only Phalanx's own format tells.
    ///
    /// # Errors
    /// [`DataError::Shortened`], [`DataError::Read`].
    pub fn documents(&self) -> Result<Option<u64>> {
        match self.layout.format {
            TokenFormat::Phalanx => own::documents(&self.source).map(Some),
            TokenFormat::NanoGpt | TokenFormat::LlmC | TokenFormat::Megatron => Ok(None),
        }
    }

    /// The file that holds the ids.
    pub fn path(&self) -> &Path {
        self.source.path()
    }

    /// The format of the file.
    pub fn format(&self) -> TokenFormat {
        self.layout.format
    }

    /// The type of an id in the file, as `u16`.
    pub fn id_type(&self) -> &'static str {
        self.layout.ids.name()
    }

    /// The size of the file.
    pub fn bytes(&self) -> u64 {
        self.source.bytes()
    }

    /// Describes the file, if it is probably something else than ids. Reads a sample.
    ///
    /// # Errors
    /// [`DataError::Shortened`] when the file was cut while it was open, [`DataError::Read`].
    pub fn look(&self) -> Result<Option<Look>> {
        if let (TokenFormat::NanoGpt, Some(look)) = (self.format(), megatron::lacks_index(self.path())) {
            return Ok(Some(look));
        }
        look::look(&self.source, &self.layout)
    }

    /// Refuses a file that is probably something else than ids.
    ///
    /// # Errors
    /// [`TokenFilesError::LooksLike`], and those of [`TokenFile::look`].
    pub fn check_look(&self) -> Result<()> {
        let Some(Look { is, advice }) = self.look()? else { return Ok(()) };
        let (path, ids) = (self.path().to_path_buf(), self.id_type());
        Err(TokenFilesError::LooksLike { path, ids, is, advice }.into())
    }

    /// The number of ids of the vocabulary, where the format tells it: Phalanx's own, and llm.c's,
    /// whose magic number names the tokenizer.
    pub fn vocab_size(&self) -> Option<usize> {
        self.layout.vocab
    }

    /// The tokenizer by which the tokens were made, which only Phalanx's own format holds.
    ///
    /// # Errors
    /// [`DataError::TokenizerFile`] when that part of the file is damaged, [`DataError::Read`].
    pub fn tokenizer(&self) -> Result<Option<Tokenizer>> {
        let json = self.tokenizer_json()?;
        if json.is_empty() { Ok(None) } else { Tokenizer::from_json(&json, self.path()).map(Some) }
    }

    fn tokenizer_json(&self) -> Result<Vec<u8>> {
        let Range { start, end } = self.layout.tokenizer;
        let mut json = vec![0; (end - start) as usize];
        self.source.read(start, &mut json)?;
        Ok(json)
    }

    /// Fills `out` with tokens, starting at number `at`. An id that no vocabulary has (negative or beyond 32 bits)
    /// reads as `u32::MAX`; [`TokenFile::scan`] finds it.
    ///
    /// # Errors
    /// [`DataError::Shortened`] when the file was cut while it was open, [`DataError::Read`].
    ///
    /// # Panics
    /// When `at + out.len()` is beyond [`TokenFile::len`].
    pub fn read(&self, at: usize, out: &mut [u32]) -> Result<()> {
        assert!(at <= self.len() && out.len() <= self.len() - at, "{} tokens from {at} on", out.len());
        let width = self.layout.ids.bytes();
        let start = self.layout.data.start + at as u64 * width as u64;
        let mut window = [0u8; 1 << 13];
        let mut at = start;
        for out in out.chunks_mut(window.len() / width) {
            let bytes = &mut window[..out.len() * width];
            self.source.read(at, bytes)?;
            widen(self.layout.ids, bytes, out);
            at += bytes.len() as u64;
        }
        Ok(())
    }

    /// Refuses a file with an id that a vocabulary of `vocab` ids does not have. Reads the whole file.
    ///
    /// # Errors
    /// [`DataError::TokenOutOfRange`] with the first such token, and those of [`TokenFile::scan`].
    pub fn check_vocab(&self, vocab: usize) -> Result<()> {
        self.scan(vocab)?.out_of_range.map_or(Ok(()), Err)
    }

    /// Refuses a file whose checksum is no longer `expected`. Reads the file only if it was modified since it was
    /// opened or last checked.
    ///
    /// # Errors
    /// [`DataError::NotTheTokens`], and those of [`TokenFile::scan`].
    pub fn check_unchanged(&self, expected: &str) -> Result<()> {
        if !self.source.was_touched()? {
            return Ok(());
        }
        self.is_expected(&self.scan(usize::MAX)?, expected)
    }

    fn is_expected(&self, scan: &Scan, expected: &str) -> Result<()> {
        let (path, found) = (self.path().to_path_buf(), scan.blake3.clone());
        match found == expected {
            true => Ok(()),
            false => Err(DataError::NotTheTokens { path, expected: expected.to_string(), found }),
        }
    }

    /// Reads the whole file once, with all cores: its checksum, and whether a vocabulary of `vocab` ids has all
    /// its tokens.
    ///
    /// # Errors
    /// [`DataError::Shortened`] when the file was cut while it was open, [`DataError::Read`].
    pub fn scan(&self, vocab: usize) -> Result<Scan> {
        let threads = std::thread::available_parallelism().map_or(1, |threads| threads.get());
        scan::scan(&self.source, &self.layout, vocab, threads)
    }
}

/// The ids of `bytes` as 32-bit numbers.
fn widen(ids: IdType, bytes: &[u8], out: &mut [u32]) {
    match ids {
        IdType::U8 => convert(bytes, out, |[byte]: [u8; 1]| u32::from(byte)),
        IdType::I8 => convert(bytes, out, |id| clamp(i64::from(i8::from_le_bytes(id)))),
        IdType::U16 => convert(bytes, out, |id| u32::from(u16::from_le_bytes(id))),
        IdType::I16 => convert(bytes, out, |id| clamp(i64::from(i16::from_le_bytes(id)))),
        IdType::U32 => convert(bytes, out, u32::from_le_bytes),
        IdType::I32 => convert(bytes, out, |id| clamp(i64::from(i32::from_le_bytes(id)))),
        IdType::I64 => convert(bytes, out, |id| clamp(i64::from_le_bytes(id))),
    }
}

/// One id exactly as it is stored.
fn exact(ids: IdType, bytes: &[u8]) -> i64 {
    let mut eight = [0u8; 8];
    eight[..bytes.len()].copy_from_slice(bytes);
    let unsigned = i64::from_le_bytes(eight);
    let unused_bits = 64 - 8 * bytes.len() as u32;
    match ids {
        IdType::U8 | IdType::U16 | IdType::U32 => unsigned,
        IdType::I8 | IdType::I16 | IdType::I32 | IdType::I64 => unsigned << unused_bits >> unused_bits,
    }
}

impl fmt::Debug for TokenFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TokenFile({}, {:?}, {} tokens)", self.path().display(), self.layout.format, self.len())
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
