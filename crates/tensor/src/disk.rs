//! The disk memory of a rank: one file, of which tensors have ranges.
//!
//! A tensor on disk has an offset instead of an address: nobody can read or write it but by a
//! [`DiskTransfer`](crate::backend::DiskTransfer), which runs on the disk stream beside everything else.

use std::fs::File;
use std::io::{Error, ErrorKind, Result};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

/// What the bytes of a disk memory are read from and written to. Each call may transfer fewer bytes than were asked for.
pub trait DiskStorage: Send + Sync {
    /// Reads bytes that begin at `offset`; returns how many. Zero at the end.
    ///
    /// # Errors
    /// The system's.
    fn read_at(&self, to: &mut [u8], offset: u64) -> Result<usize>;

    /// Writes bytes that begin at `offset`; returns how many.
    ///
    /// # Errors
    /// The system's.
    fn write_at(&self, from: &[u8], offset: u64) -> Result<usize>;
}

impl DiskStorage for File {
    fn read_at(&self, to: &mut [u8], offset: u64) -> Result<usize> {
        FileExt::read_at(self, to, offset)
    }

    fn write_at(&self, from: &[u8], offset: u64) -> Result<usize> {
        FileExt::write_at(self, from, offset)
    }
}

/// The storage of one disk memory, and its size.
pub struct DiskMemory {
    storage: Box<dyn DiskStorage>,
    bytes: u64,
    /// Where it lies, for errors.
    place: String,
}

impl DiskMemory {
    /// A file without a name in an existing folder, whose blocks are all allocated.
    ///
    /// # Errors
    /// A folder that is missing or cannot be written, or a file system with too few bytes left: the error says which
    /// folder, how many bytes, and what to do.
    pub fn create(folder: &Path, bytes: u64) -> Result<Arc<DiskMemory>> {
        let place = folder.display().to_string();
        let file = phalanx_files::scratch_file(folder, bytes).map_err(|error| {
            let advice = match error.kind() {
                ErrorKind::StorageFull => {
                    "free space there, give a folder on a larger disk, or keep less on disk"
                }
                _ => "give a folder that exists, on a local disk, that this user may write",
            };
            Error::new(error.kind(), format!("disk memory of {bytes} bytes in {place}: {error}; {advice}"))
        })?;
        Ok(DiskMemory::over(Box::new(file), bytes, place))
    }

    /// The first `bytes` bytes of a storage; errors name its `place`.
    pub fn over(storage: Box<dyn DiskStorage>, bytes: u64, place: String) -> Arc<DiskMemory> {
        Arc::new(DiskMemory { storage, bytes, place })
    }

    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn read(&self, mut to: &mut [u8], mut offset: u64) -> std::result::Result<(), String> {
        while !to.is_empty() {
            let read = self.retried(|| self.storage.read_at(to, offset));
            match read.map_err(|error| self.failed("read", to.len(), offset, &error.to_string()))? {
                0 => return Err(self.failed("read", to.len(), offset, "the file ends before them")),
                read => (to, offset) = (&mut to[read..], offset + read as u64),
            }
        }
        Ok(())
    }

    pub(crate) fn write(&self, mut from: &[u8], mut offset: u64) -> std::result::Result<(), String> {
        while !from.is_empty() {
            let written = self.retried(|| self.storage.write_at(from, offset));
            match written.map_err(|error| self.failed("write", from.len(), offset, &error.to_string()))? {
                0 => return Err(self.failed("write", from.len(), offset, "the system writes none of them")),
                written => (from, offset) = (&from[written..], offset + written as u64),
            }
        }
        Ok(())
    }

    /// Again as long as a signal interrupts it.
    fn retried(&self, mut transfer: impl FnMut() -> Result<usize>) -> Result<usize> {
        loop {
            match transfer() {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                result => return result,
            }
        }
    }

    fn failed(&self, verb: &str, bytes: usize, offset: u64, reason: &str) -> String {
        let DiskMemory { place, bytes: size, .. } = self;
        format!(
            "cannot {verb} {bytes} bytes at offset {offset} of the disk memory of {size} bytes in {place}: {reason}"
        )
    }
}
