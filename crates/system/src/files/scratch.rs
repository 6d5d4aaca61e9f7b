//! A file without a name, for bytes that only this process needs: it is gone when it is closed, also after a crash.
//!
//! All its blocks are allocated when it is created, so that no later write finds the disk full. Where the file system can,
//! its transfers go past the page cache (`O_DIRECT`).

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::Path;

use rustix::fs::{FallocateFlags, Mode, OFlags, fallocate, fcntl_getfl, fcntl_setfl, open, statfs, statvfs};
use rustix::io::Errno;

use super::write::temporary_path;

/// Bytes that are written at a time where the file system cannot allocate blocks otherwise.
const ZEROS_BYTES: usize = 1 << 20;

/// The types of file systems whose files are memory: tmpfs and ramfs.
const IN_MEMORY: [u64; 2] = [0x0102_1994, 0x8584_58f6];

/// Creates a file of `bytes` bytes, all zero, in an existing folder.
///
/// # Errors
/// `StorageFull` when the file system has fewer bytes left; the system's: a folder that is missing or cannot be
/// written, a file that is larger than the file system allows.
pub fn scratch_file(folder: &Path, bytes: u64) -> io::Result<File> {
    let file = without_name(folder)?;
    let free = free_bytes(folder)?;
    let full = |free| {
        let text = format!("{bytes} bytes are needed, {free} are free");
        io::Error::new(ErrorKind::StorageFull, text)
    };
    if bytes > free {
        return Err(full(free));
    }
    match allocate(&file, bytes) {
        // Others have taken them meanwhile.
        Err(error) if error.kind() == ErrorKind::StorageFull => Err(full(free_bytes(folder).unwrap_or(0))),
        done => done.map(|()| file),
    }
}

/// From now on, transfers of a file go past the page cache: their offset, length and address must be multiples of the
/// device's block size. False where the file system has no such transfers; nothing changes then.
///
/// # Errors
/// The system's.
pub fn set_direct(file: &File) -> io::Result<bool> {
    match fcntl_setfl(file, fcntl_getfl(file)? | OFlags::DIRECT) {
        Ok(()) => Ok(true),
        Err(Errno::INVAL | Errno::OPNOTSUPP) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Makes transfers of a file go through the page cache again.
///
/// # Errors
/// The system's.
pub fn set_buffered(file: &File) -> io::Result<()> {
    Ok(fcntl_setfl(file, fcntl_getfl(file)? & !OFlags::DIRECT)?)
}

/// Returns whether the files of a folder are memory (tmpfs, ramfs).
///
/// # Errors
/// The system's: a folder that is missing.
pub fn is_in_memory(folder: &Path) -> io::Result<bool> {
    let kind = statfs(folder)?.f_type;
    Ok(IN_MEMORY.contains(&(kind as u64 & 0xffff_ffff)))
}

/// A number that is the same for folders on the same file system.
///
/// # Errors
/// The system's: a folder that is missing.
pub fn file_system_of(folder: &Path) -> io::Result<u64> {
    use std::os::unix::fs::MetadataExt;
    Ok(fs::metadata(folder)?.dev())
}

/// Bytes that the file system of a folder has left for this user.
///
/// # Errors
/// The system's: a folder that is missing.
pub fn free_bytes(folder: &Path) -> io::Result<u64> {
    let system = statvfs(folder)?;
    Ok(system.f_bavail.saturating_mul(system.f_frsize))
}

/// An open file without a name. File systems without `O_TMPFILE` give it a name that is removed at once.
fn without_name(folder: &Path) -> io::Result<File> {
    let mode = Mode::RUSR | Mode::WUSR;
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::EXCL;
    match open(folder, flags | OFlags::TMPFILE, mode) {
        Ok(file) => Ok(File::from(file)),
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => {
            let path = temporary_path(folder);
            let file = open(&path, flags | OFlags::CREATE, mode)?;
            fs::remove_file(&path)?;
            Ok(File::from(file))
        }
        Err(error) => Err(error.into()),
    }
}

fn allocate(file: &File, bytes: u64) -> io::Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    loop {
        match fallocate(file, FallocateFlags::empty(), 0, bytes) {
            Ok(()) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => return write_zeros(file, bytes),
            Err(error) => return Err(error.into()),
        }
    }
}

fn write_zeros(mut file: &File, bytes: u64) -> io::Result<()> {
    let zeros = vec![0u8; ZEROS_BYTES];
    let mut left = bytes;
    while left > 0 {
        let piece = left.min(ZEROS_BYTES as u64) as usize;
        file.write_all(&zeros[..piece])?;
        left -= piece as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_are_written_where_blocks_cannot_be_allocated() {
        let file = tempfile::tempfile().unwrap();
        write_zeros(&file, ZEROS_BYTES as u64 + 3).unwrap();
        assert_eq!(file.metadata().unwrap().len(), ZEROS_BYTES as u64 + 3);
    }
}
