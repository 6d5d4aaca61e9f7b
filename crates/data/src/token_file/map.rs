//! The only unsafe code of this crate: a file's bytes as a slice, by `mmap`.
#![allow(unsafe_code)]

use std::fs::File;
use std::ops::Deref;
use std::path::Path;

use memmap2::Mmap;

use crate::{DataError, Result};

/// A read-only mapping of a whole file. Pages are read when touched and shared by all processes of
/// the host; the kernel may drop them again, so they are no demand on memory.
pub(super) struct FileMap(Mmap);

impl FileMap {
    /// Maps `path`, which must be a regular file.
    pub(super) fn open(path: &Path) -> Result<FileMap> {
        let file = File::open(path).map_err(DataError::reading(path))?;
        let metadata = file.metadata().map_err(DataError::reading(path))?;
        if !metadata.is_file() {
            return Err(DataError::NotTokenFile {
                path: path.to_path_buf(),
                reason: "it is a folder or a device".to_string(),
            });
        }
        // SAFETY: the slice is valid and constant as long as nobody shortens or rewrites the file. Our
        // own files are never written in place (`AtomicFile` renames a new one over them, which leaves
        // this mapping on the old); that a foreign one stays as it is during a run is asked of the user
        // in `TokenFile`'s documentation. No type but plain bytes is ever made of the slice.
        let map = unsafe { Mmap::map(&file) };
        map.map(FileMap).map_err(DataError::reading(path))
    }
}

impl Deref for FileMap {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}
