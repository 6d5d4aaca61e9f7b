//! An open token file: its length when it was opened, and reads at any position.
//!
//! Files are read, not mapped: a map of a file that somebody shortens kills the process with SIGBUS when a lost
//! page is touched, and a read fails with an error that names the file. A sample costs one call into the
//! system's page cache, about a microsecond beside milliseconds of a training step.

use std::fs::File;
use std::io::{self, BufReader, ErrorKind, Read};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use crate::{DataError, Result};

/// A token file that is open for reading.
pub(super) struct OpenTokenFile {
    file: File,
    path: PathBuf,
    bytes: u64,
    /// Device and number of the file, which all of its names share.
    identity: (u64, u64),
    /// Seconds and nanoseconds of the last change that is known, by the clock of the file system.
    changed: Mutex<(i64, i64)>,
}

impl OpenTokenFile {
    /// Opens a regular file.
    pub(super) fn open(path: &Path) -> Result<OpenTokenFile> {
        let file = phalanx_system::files::open_regular(path).map_err(|cause| match cause.kind() {
            ErrorKind::InvalidInput => {
                DataError::NotTokenFile { path: path.to_path_buf(), reason: cause.to_string() }
            }
            _ => DataError::reading(path)(cause),
        })?;
        let metadata = file.metadata().map_err(DataError::reading(path))?;
        let (bytes, changed) = (metadata.len(), Mutex::new((metadata.ctime(), metadata.ctime_nsec())));
        let identity = (metadata.dev(), metadata.ino());
        Ok(OpenTokenFile { file, path: path.to_path_buf(), bytes, identity, changed })
    }

    /// The name that it was opened by.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes when it was opened.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Device and number of the file.
    pub(super) fn identity(&self) -> (u64, u64) {
        self.identity
    }

    /// Returns whether the file was modified since it was opened or last checked.
    pub(super) fn was_touched(&self) -> Result<bool> {
        let metadata = self.file.metadata().map_err(DataError::reading(&self.path))?;
        let now = (metadata.ctime(), metadata.ctime_nsec());
        let mut known = self.changed.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        Ok(std::mem::replace(&mut *known, now) != now)
    }

    /// Fills `out` with bytes, starting at `at`.
    ///
    /// # Errors
    /// [`DataError::Shortened`] when the file has lost bytes that it had when it was opened.
    pub(super) fn read(&self, at: u64, out: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(out, at).map_err(|cause| self.reading(cause))
    }

    /// The first bytes, at most `limit`.
    pub(super) fn head(&self, limit: usize) -> Result<Vec<u8>> {
        let mut head = vec![0; self.bytes.min(limit as u64) as usize];
        self.read(0, &mut head)?;
        Ok(head)
    }

    /// Reads the file in order from `at` on.
    pub(super) fn reader_from(&self, at: u64) -> BufReader<impl Read + '_> {
        BufReader::with_capacity(1 << 16, ReadFrom { file: &self.file, at })
    }

    /// An error of reading this file.
    pub(super) fn reading(&self, cause: io::Error) -> DataError {
        if cause.kind() == ErrorKind::UnexpectedEof {
            let found = self.file.metadata().map_or(0, |now| now.len());
            return DataError::Shortened { path: self.path.clone(), expected: self.bytes, found };
        }
        DataError::reading(&self.path)(cause)
    }
}

struct ReadFrom<'a> {
    file: &'a File,
    at: u64,
}

impl Read for ReadFrom<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read_at(out, self.at)?;
        self.at += count as u64;
        Ok(count)
    }
}
