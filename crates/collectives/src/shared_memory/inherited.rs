//! File descriptors that a launcher leaves open for the processes it starts.

use std::fs::File;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

/// Takes over the descriptor `fd`, which is closed to programs that this one starts. The launcher left it open for this
/// process, which calls this once for it.
///
/// # Errors
/// A number that is not open, or is standard input, output or error.
pub(crate) fn take_over(fd: RawFd) -> std::io::Result<OwnedFd> {
    if fd <= 2 {
        let text = format!("descriptor {fd} is not one of a job");
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, text));
    }
    // SAFETY: the launcher left this descriptor open for this process to take, and the caller passes it
    // once; what it refers to is checked before use.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    if let Err(error) = rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC) {
        // Not open: nothing to close.
        std::mem::forget(fd);
        return Err(error.into());
    }
    Ok(fd)
}

/// The memory file that a launcher left open under number `fd` for this process ([`crate::HostJob::shared_file`]): once
/// per descriptor.
///
/// # Errors
/// A number that is not open.
pub fn take_file(fd: RawFd) -> std::io::Result<File> {
    take_over(fd).map(File::from)
}
