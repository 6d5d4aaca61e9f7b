//! Bytes that a launcher hands to its ranks: a memory file that nobody can change once it is written.
//!
//! An argument would be bounded (128 KiB for one) and readable by every user in `/proc/PID/cmdline`. A memory file has no
//! name, no limit but memory, and is closed with its last descriptor.

use std::fs::File;
use std::io::{Error, ErrorKind, Result, Write};
use std::ops::Range;
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, SealFlags};

use crate::shared_memory::inherited::take_over;

/// The file can no longer be written, extended or shortened, and no seal can be added.
const SEALS: SealFlags =
    SealFlags::WRITE.union(SealFlags::GROW).union(SealFlags::SHRINK).union(SealFlags::SEAL);

/// A memory file with `bytes`, closed on exec.
pub(crate) fn seal(bytes: &[u8]) -> Result<OwnedFd> {
    let fd = rustix::fs::memfd_create("phalanx-task", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    let mut file = File::from(fd);
    file.write_all(bytes)?;
    rustix::fs::fcntl_add_seals(&file, SEALS)?;
    Ok(file.into())
}

/// A memory file that a launcher has sealed: its content never changes.
#[derive(Debug)]
pub struct SealedFile {
    file: File,
    bytes: u64,
}

/// The memory file that a launcher left open under number `fd` for this process, which closes it: once per descriptor.
///
/// # Errors
/// A number that is not open, or a file that is not sealed.
pub fn take_sealed(fd: RawFd) -> Result<SealedFile> {
    let file = File::from(take_over(fd)?);
    let sealed = rustix::fs::fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SEALS));
    if !sealed {
        let text = format!("descriptor {fd} is not a sealed memory file");
        return Err(Error::new(ErrorKind::InvalidInput, text));
    }
    let bytes = file.metadata()?.len();
    Ok(SealedFile { file, bytes })
}

impl SealedFile {
    /// Length of the file.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Reads a part of the file. Nothing is allocated for a range outside the file.
    ///
    /// # Errors
    /// When the range ends beyond the file, and errors of the system.
    pub fn read(&self, range: Range<u64>) -> Result<Vec<u8>> {
        if range.start > range.end || range.end > self.bytes {
            let text = format!("bytes {range:?} of a memory file of {} bytes", self.bytes);
            return Err(Error::new(ErrorKind::InvalidData, text));
        }
        let mut bytes = vec![0; (range.end - range.start) as usize];
        // All ranks share one file position, so reads give their offset.
        self.file.read_exact_at(&mut bytes, range.start)?;
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::IntoRawFd;

    #[test]
    fn what_was_sealed_is_read_by_every_holder_and_changed_by_none() {
        let bytes: Vec<u8> = (0..200_000u32).map(|i| i as u8).collect();
        let sealed = seal(&bytes).unwrap();
        for _ in 0..2 {
            let copy = sealed.try_clone().unwrap();
            assert!(rustix::io::pwrite(&copy, b"x", 0).is_err() && rustix::fs::ftruncate(&copy, 1).is_err());
            let taken = take_sealed(copy.into_raw_fd()).unwrap();
            assert_eq!(taken.read(0..taken.bytes()).unwrap(), bytes);
            assert_eq!(taken.read(7..70_000).unwrap(), bytes[7..70_000]);
            assert!(taken.read(0..200_001).is_err() && taken.read(u64::MAX - 1..u64::MAX).is_err());
        }
    }

    #[test]
    fn what_is_not_sealed_is_refused() {
        let open = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        let error = take_sealed(open.into_raw_fd()).unwrap_err();
        assert!(error.to_string().contains("sealed"), "{error}");
        assert!(take_sealed(0).is_err() && take_sealed(i32::MAX).is_err());
    }
}
