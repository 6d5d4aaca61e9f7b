//! Reads a range of a file from front to back, and hashes it on request.
//!
//! Reads are positional, so that one open checkpoint can serve many threads. They go through a window that is allocated
//! when it is first needed, or directly to the destination.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Bytes of the window that a read needs at most, besides the caller's buffer.
pub const READ_WINDOW_BYTES: usize = 1 << 20;

/// A file and how far it was read.
pub(crate) struct Stream<'a> {
    file: &'a File,
    /// The next byte.
    at: u64,
    /// Hashes every byte, including skipped ones; without it, skipped bytes are not read.
    hasher: Option<blake3::Hasher>,
    window: Vec<u8>,
}

impl<'a> Stream<'a> {
    pub(crate) fn new(file: &'a File, at: u64, hashes: bool) -> Stream<'a> {
        Stream { file, at, hasher: hashes.then(blake3::Hasher::new), window: Vec::new() }
    }

    /// Skips the bytes before `end`.
    pub(crate) fn skip_to(&mut self, end: u64) -> io::Result<()> {
        if self.hasher.is_none() {
            self.at = end;
        }
        while self.window_before(end)?.is_some() {}
        Ok(())
    }

    /// Reads the next bytes into `out`.
    pub(crate) fn fill(&mut self, out: &mut [u8]) -> io::Result<()> {
        // Read in steps, so that the bytes are still in the cache when they are hashed.
        let step = if self.hasher.is_some() { READ_WINDOW_BYTES } else { out.len().max(1) };
        for part in out.chunks_mut(step) {
            self.file.read_exact_at(part, self.at)?;
            self.at += part.len() as u64;
            if let Some(hasher) = &mut self.hasher {
                hasher.update(part);
            }
        }
        Ok(())
    }

    /// The next bytes before `end`, at most one window; `None` at `end`.
    pub(crate) fn window_before(&mut self, end: u64) -> io::Result<Option<&[u8]>> {
        let bytes = (end - self.at).min(READ_WINDOW_BYTES as u64) as usize;
        if bytes == 0 {
            return Ok(None);
        }
        if self.window.len() < bytes {
            self.window.resize(bytes, 0);
        }
        let window = &mut self.window[..bytes];
        self.file.read_exact_at(window, self.at)?;
        self.at += bytes as u64;
        if let Some(hasher) = &mut self.hasher {
            hasher.update(window);
        }
        Ok(Some(window))
    }

    /// The hasher; `None` if hashing was not requested.
    pub(crate) fn into_hasher(self) -> Option<blake3::Hasher> {
        self.hasher
    }
}
