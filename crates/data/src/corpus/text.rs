//! Reads a text file in blocks, and hands the text of a document out in parts.

use std::io::{self, Read};
use std::path::Path;

use crate::limits::UNCUT_BYTES;
use crate::{DataError, Result};

/// Bytes of a text that are read, and searched for a cut, at a time.
pub(crate) const BLOCK_BYTES: usize = 1 << 20;

/// The byte order mark of UTF-8, which is no text.
pub(crate) const MARK: &str = "\u{feff}";

/// Receiver of the text of a document: `take(text, last)`, where `last` ends a document.
pub(crate) type Take<'a> = &'a mut dyn FnMut(&str, bool) -> Result<()>;

/// The text of a document that is being read. A part ends where `last_cut` says (0: nowhere yet), or with the document.
pub(crate) struct Parts<'a> {
    path: &'a Path,
    last_cut: &'a dyn Fn(&str) -> usize,
    take: Take<'a>,
    /// Text that was read and not handed out.
    pub(crate) text: String,
    /// Bytes of it in which no cut was found.
    uncut: usize,
}

impl<'a> Parts<'a> {
    pub(crate) fn new(path: &'a Path, last_cut: &'a dyn Fn(&str) -> usize, take: Take<'a>) -> Parts<'a> {
        Parts { path, last_cut, take, text: String::new(), uncut: 0 }
    }

    /// Hands out what can be, after the text has grown.
    ///
    /// # Errors
    /// A text that cannot be cut, the errors of `take`.
    pub(crate) fn grown(&mut self) -> Result<()> {
        if self.text.len() - self.uncut < BLOCK_BYTES {
            return Ok(());
        }
        let end = (self.last_cut)(&self.text);
        if end == 0 && self.text.len() > UNCUT_BYTES {
            let reason = format!(
                "{} bytes of its text cannot be cut for the tokenizer, and at most {UNCUT_BYTES} are held at a time: \
                 they have no white space; split the text",
                self.text.len()
            );
            return Err(DataError::Read { path: self.path.to_path_buf(), cause: io::Error::other(reason) });
        }
        if end > 0 {
            (self.take)(&self.text[..end], false)?;
            self.text.drain(..end);
        }
        self.uncut = self.text.len();
        Ok(())
    }

    /// Hands out the rest of the document.
    ///
    /// # Errors
    /// Those of `take`.
    pub(crate) fn end_document(&mut self) -> Result<()> {
        (self.take)(&self.text, true)?;
        self.text.clear();
        self.uncut = 0;
        Ok(())
    }
}

/// Reads a text file in blocks, without its byte order mark.
///
/// # Errors
/// [`DataError::NotUtf8`] with the offset of the first bad byte, the errors of reading, those of `take`.
pub(crate) fn for_each_block(path: &Path, take: &mut dyn FnMut(&str) -> Result<()>) -> Result<()> {
    let mut file = phalanx_system::files::open_regular(path).map_err(DataError::reading(path))?;
    // Bytes that are read but not decoded. At the start of an iteration these are at most three: the beginning of a
    // character.
    let mut bytes: Vec<u8> = Vec::new();
    let mut decoded = 0u64;
    loop {
        let read = file.by_ref().take(BLOCK_BYTES as u64).read_to_end(&mut bytes);
        let at_end = read.map_err(DataError::reading(path))? < BLOCK_BYTES;
        let valid = match str::from_utf8(&bytes) {
            Ok(all) => all,
            Err(e) if e.error_len().is_none() && !at_end => {
                str::from_utf8(&bytes[..e.valid_up_to()]).expect("the bytes before valid_up_to are UTF-8")
            }
            Err(e) => {
                let position = decoded + e.valid_up_to() as u64;
                return Err(DataError::not_utf8(path, position));
            }
        };
        take(if decoded == 0 { valid.strip_prefix(MARK).unwrap_or(valid) } else { valid })?;
        let length = valid.len();
        decoded += length as u64;
        bytes.drain(..length);
        if at_end {
            return Ok(());
        }
    }
}
