//! Reading files that somebody else may have made.
//!
//! A path in a configuration may name a FIFO (opening it waits for a writer), a device (`/dev/zero` never
//! ends) or a file of any size. Only regular files are opened, and whoever reads a whole file says how large
//! it may be.

use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags, fstat, open};

/// First bytes of the text that git-lfs leaves in the place of a large file.
const POINTER: &[u8] = b"version https://git-lfs.github.com/spec/v";

/// More bytes than such a text has.
const POINTER_BYTES: u64 = 1024;

/// Opens a regular file for reading. Never waits, whatever the path names.
///
/// # Errors
/// [`ErrorKind::InvalidInput`] for anything that is not a regular file (the message says what it is), for a link to
/// nothing and for a git-lfs pointer; and those of the system.
pub fn open_regular(path: &Path) -> io::Result<File> {
    // Without NONBLOCK, opening a FIFO would wait for its writer. It changes nothing for regular files.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = File::from(open(path, flags, Mode::empty()).map_err(|cause| dangling(path, cause.into()))?);
    let stat = fstat(&file)?;
    let found = match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile if (1..POINTER_BYTES as i64).contains(&stat.st_size) => {
            return refuse_pointer(file);
        }
        FileType::RegularFile => return Ok(file),
        FileType::Directory => "a folder",
        FileType::Fifo => "a FIFO (named pipe)",
        FileType::CharacterDevice | FileType::BlockDevice => "a device",
        FileType::Socket => "a socket",
        _ => "of an unknown kind",
    };
    Err(io::Error::new(ErrorKind::InvalidInput, format!("it is {found}; a regular file is expected")))
}

/// Returns whether something has this name: also a link to nothing, which [`open_regular`] then refuses, and a name that the disk
/// cannot look up, so that such a name never counts as free.
pub fn is_named(path: &Path) -> bool {
    let is_absent = |kind| matches!(kind, ErrorKind::NotFound | ErrorKind::NotADirectory);
    path.symlink_metadata().map_or_else(|cause| !is_absent(cause.kind()), |_| true)
}

/// The error for a path that cannot be opened; a link whose target is missing is not the same as no file.
fn dangling(path: &Path, cause: io::Error) -> io::Error {
    match std::fs::read_link(path) {
        Ok(target) if cause.kind() == ErrorKind::NotFound => {
            let message = format!(
                "it is a link to {}, which does not exist: download the file again, or copy the folder with the targets \
                 of its links (cp -rL)",
                target.display()
            );
            io::Error::new(ErrorKind::InvalidInput, message)
        }
        _ => cause,
    }
}

fn refuse_pointer(file: File) -> io::Result<File> {
    let mut head = [0; POINTER_BYTES as usize];
    let length = file.read_at(&mut head, 0)?;
    if !head[..length].starts_with(POINTER) {
        return Ok(file);
    }
    let text = String::from_utf8_lossy(&head[..length]);
    let size = text.lines().find_map(|line| line.strip_prefix("size "));
    let of = size.map_or(String::new(), |size| format!(" to a file of {size} bytes"));
    let message = format!("it is a git-lfs pointer{of}, not the file itself: fetch that with `git lfs pull`");
    Err(io::Error::new(ErrorKind::InvalidInput, message))
}

/// Reads a whole regular file of at most `max_bytes` bytes.
///
/// # Errors
/// [`ErrorKind::FileTooLarge`] for a larger file (nothing beyond the bound is read), and those of
/// [`open_regular`].
pub fn read_bounded(path: &Path, max_bytes: u64) -> io::Result<Vec<u8>> {
    let file = open_regular(path)?;
    let claimed = file.metadata()?.len();
    let too_large = |found: String| {
        let message = format!("it has {found} bytes; at most {max_bytes} are expected here");
        Err(io::Error::new(ErrorKind::FileTooLarge, message))
    };
    if claimed > max_bytes {
        return too_large(claimed.to_string());
    }
    let mut bytes = Vec::with_capacity(claimed as usize);
    // Files of /proc claim no bytes and have some; a file may grow while it is read.
    file.take(max_bytes.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max_bytes { too_large(format!("more than {max_bytes}")) } else { Ok(bytes) }
}

/// Reads a whole regular file of UTF-8 text of at most `max_bytes` bytes.
///
/// # Errors
/// [`ErrorKind::InvalidData`] with the position of the first byte that is not UTF-8, and those of
/// [`read_bounded`].
pub fn read_text(path: &Path, max_bytes: u64) -> io::Result<String> {
    String::from_utf8(read_bounded(path, max_bytes)?).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        io::Error::new(ErrorKind::InvalidData, format!("byte {at} is not UTF-8; a text file is expected"))
    })
}
