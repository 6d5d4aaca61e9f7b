//! Largest sizes of what this crate reads whole, and how much a corpus may have of what is kept in memory. A
//! path may name anything; nothing beyond these bounds is read.

use std::path::Path;

use crate::{DataError, Result};

/// A `tokenizer.json`. The largest that are published have 33 MB.
pub(crate) const TOKENIZER_BYTES: u64 = 40 << 20;

/// Any other file of a tokenizer: a `vocab.json`, a `tokenizer_config.json`, a chat template. The largest that are published
/// have a few MB.
pub(crate) const TOKENIZER_FILE_BYTES: u64 = 16 << 20;

/// A run's own tokenizer file, which holds the files of a folder as strings of JSON.
pub(crate) const KEPT_TOKENIZER_BYTES: u64 = 160 << 20;

/// Commas, colons and opening brackets of a `tokenizer.json`: parsed JSON takes up to 100 bytes for each. The
/// largest that are published have three million.
pub(crate) const TOKENIZER_PARTS: usize = 6_000_000;

/// Longest stretch of text without a cut that a tokenizer sees at once.
pub(crate) const UNCUT_BYTES: usize = 1 << 26;

/// Files and folders in a corpus: their names are held in memory.
pub(crate) const CORPUS_ENTRIES: usize = 1 << 20;

/// Token files that are read as one: each stays open.
pub(crate) const TOKEN_FILES: usize = 4096;

/// Maximum nesting of folders in a corpus.
pub(crate) const CORPUS_DEPTH: usize = 128;

/// Reads a whole regular file of at most `max_bytes`.
pub(crate) fn read(path: &Path, max_bytes: u64) -> Result<Vec<u8>> {
    phalanx_system::files::read_bounded(path, max_bytes).map_err(DataError::reading(path))
}
