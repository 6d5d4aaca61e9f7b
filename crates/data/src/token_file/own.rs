//! Phalanx's own token file: a header of 64 bytes, the ids, and the JSON of the tokenizer by which they
//! were made, so that a model trained on the file alone can still print text.
//!
//! All numbers are little-endian:
//!
//! | bytes | what |
//! |---|---|
//! | 0..8 | magic `PHXTOK\0\0` |
//! | 8..12 | u32 version: 1 |
//! | 12..16 | u32 bytes of an id: 2 or 4 |
//! | 16..24 | u64 ids of the vocabulary |
//! | 24..32 | u64 tokens |
//! | 32..40 | u64 documents |
//! | 40..48 | u64 bytes of the tokenizer's JSON, 0 for none |
//! | 48..64 | zero |
//! | 64.. | the ids, then the JSON |
//!
//! The file gets its name when it is whole ([`AtomicFile`]), so a file of that name is whole.

use std::io::Write;
use std::path::{Path, PathBuf};

use phalanx_system::files::AtomicFile;

use super::source::OpenTokenFile;
use super::{IdType, Layout, TokenFormat};
use crate::limits::KEPT_TOKENIZER_BYTES;
use crate::{DataError, Result, Spelled, Tokenizer};

pub(super) const MAGIC: &[u8; 8] = b"PHXTOK\0\0";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 64;

/// The largest vocabulary whose ids fit 16 bits.
pub(crate) const NARROW_VOCAB: usize = 1 << 16;

/// The layout of Phalanx's file, or `None` when the magic is another.
/// `head` are the first bytes of the file, which has `found` bytes.
pub(super) fn read_header(path: &Path, head: &[u8], found: u64) -> Result<Option<Layout>> {
    if !head.starts_with(MAGIC) {
        return Ok(None);
    }
    let wrong_size =
        |what: String, expected| DataError::WrongSize { path: path.to_path_buf(), what, expected, found };
    let bad = |reason: String| DataError::BadHeader { path: path.to_path_buf(), reason };
    let Some(header) = head.first_chunk::<HEADER_BYTES>() else {
        return Err(wrong_size("it begins as a Phalanx token file".to_string(), HEADER_BYTES as u64));
    };
    let (words, _) = header.as_chunks::<8>();
    let long = |word: usize| u64::from_le_bytes(words[word]);
    let (version, id_bytes) = (long(1) as u32, (long(1) >> 32) as u32);
    let (vocab, tokens, json) = (long(2), long(3), long(5));
    if version != VERSION {
        return Err(bad(format!("version {version}; this program reads version {VERSION}")));
    }
    let (ids, max_vocab) = match id_bytes {
        2 => (IdType::U16, 1 << 16),
        4 => (IdType::U32, 1 << 32),
        other => return Err(bad(format!("ids of {other} bytes; 2 or 4 were expected"))),
    };
    if !(1..=max_vocab).contains(&vocab) {
        return Err(bad(format!("a vocabulary of {vocab} ids; 1 to {max_vocab} fit {id_bytes} bytes")));
    }
    if json > KEPT_TOKENIZER_BYTES {
        return Err(bad(format!("a tokenizer of {json} bytes; at most {KEPT_TOKENIZER_BYTES} are read")));
    }
    if long(6) != 0 || long(7) != 0 {
        return Err(bad("bytes 48 to 64 are not zero".to_string()));
    }
    let data_end = tokens.checked_mul(u64::from(id_bytes)).and_then(|n| n.checked_add(HEADER_BYTES as u64));
    let expected = data_end.and_then(|end| end.checked_add(json)).unwrap_or(u64::MAX);
    let (Some(data_end), true) = (data_end, expected == found) else {
        return Err(wrong_size(format!("its header counts {tokens} tokens of {id_bytes} bytes"), expected));
    };
    Ok(Some(Layout {
        format: TokenFormat::Phalanx,
        ids,
        data: HEADER_BYTES as u64..data_end,
        vocab: Some(vocab as usize),
        tokenizer: data_end..found,
    }))
}

/// The documents that the header of Phalanx's file counts.
pub(super) fn documents(source: &OpenTokenFile) -> Result<u64> {
    let mut count = [0; 8];
    source.read(32, &mut count)?;
    Ok(u64::from_le_bytes(count))
}

/// The file that [`TokenWriter::finish`] wrote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// The file.
    pub path: PathBuf,
    /// Tokens, separators among them.
    pub tokens: u64,
    /// Documents.
    pub documents: u64,
    /// Size of the file.
    pub bytes: u64,
    /// The special tokens that the text spelled, where text was tokenised.
    pub spelled: Spelled,
}

/// Writes a token file of Phalanx's own format, token by token, in constant memory. If it is dropped before
/// [`TokenWriter::finish`], no file remains.
pub struct TokenWriter {
    file: AtomicFile,
    path: PathBuf,
    id_bytes: usize,
    vocab: usize,
    tokens: u64,
    documents: u64,
    /// The ids of one `push` as bytes, kept to reuse its memory.
    buffer: Vec<u8>,
}

impl TokenWriter {
    /// Starts a file for ids below `vocab`: 2 bytes each up to 65536 of them, else 4.
    ///
    /// # Errors
    /// [`DataError::Write`].
    pub fn create(path: &Path, vocab: usize) -> Result<TokenWriter> {
        let id_bytes = if vocab <= NARROW_VOCAB { 2 } else { 4 };
        let mut file = AtomicFile::create(path).map_err(DataError::writing(path))?;
        file.write_all(&[0; HEADER_BYTES]).map_err(DataError::writing(path))?; // the counts are known at the end
        let path = path.to_path_buf();
        Ok(TokenWriter { file, path, id_bytes, vocab, tokens: 0, documents: 0, buffer: Vec::new() })
    }

    /// Appends tokens.
    ///
    /// # Errors
    /// [`DataError::TokenOutOfRange`] for an id that the vocabulary does not have, [`DataError::Write`].
    pub fn push(&mut self, ids: &[u32]) -> Result<()> {
        if let Some(place) = ids.iter().position(|&id| id as usize >= self.vocab) {
            return Err(DataError::TokenOutOfRange {
                origin: format!("the tokens for {}", self.path.display()),
                position: self.tokens as usize + place,
                id: i64::from(ids[place]),
                vocab: self.vocab,
            });
        }
        self.buffer.clear();
        for id in ids {
            self.buffer.extend_from_slice(&id.to_le_bytes()[..self.id_bytes]);
        }
        self.tokens += ids.len() as u64;
        self.file.write_all(&self.buffer).map_err(DataError::writing(&self.path))
    }

    /// Counts a document as ended. Only the header's count shows it: separators are tokens.
    pub fn end_document(&mut self) {
        self.documents += 1;
    }

    /// Appends the tokenizer, completes the header, makes the file durable and gives it its name.
    ///
    /// # Errors
    /// [`DataError::Write`]; then no file remains.
    pub fn finish(self, tokenizer: Option<&Tokenizer>) -> Result<Written> {
        let json = tokenizer.map_or_else(String::new, Tokenizer::to_json);
        let header = self.header(json.len());
        let mut file = self.file;
        file.write_all(json.as_bytes())
            .and_then(|()| file.rewrite_head(&header))
            .and_then(|()| file.commit())
            .map_err(DataError::writing(&self.path))?;
        let bytes = HEADER_BYTES as u64 + self.tokens * self.id_bytes as u64 + json.len() as u64;
        let spelled = Spelled::default();
        Ok(Written { path: self.path, tokens: self.tokens, documents: self.documents, bytes, spelled })
    }

    fn header(&self, json_bytes: usize) -> [u8; HEADER_BYTES] {
        let mut header = [0; HEADER_BYTES];
        header[0..8].copy_from_slice(MAGIC);
        header[8..12].copy_from_slice(&VERSION.to_le_bytes());
        header[12..16].copy_from_slice(&(self.id_bytes as u32).to_le_bytes());
        let longs = [self.vocab as u64, self.tokens, self.documents, json_bytes as u64];
        for (place, long) in header[16..48].as_chunks_mut::<8>().0.iter_mut().zip(longs) {
            *place = long.to_le_bytes();
        }
        header
    }
}
