//! Files that grow line by line.

use std::fs::File;
use std::io;
use std::path::Path;

use rustix::fs::{Mode, OFlags, open};

use super::folder::{parent_of, sync_folder};

/// Opens `path` for appending; makes an empty file, whose name is durable, where there is none. Its content
/// is durable after [`File::sync_data`]. Does not follow a link at the end of `path`.
///
/// # Errors
/// Those of the system.
pub fn append(path: &Path) -> io::Result<File> {
    let is_new = path.symlink_metadata().is_err();
    let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let file = File::from(open(path, flags | OFlags::NONBLOCK, Mode::from_raw_mode(0o666))?);
    if is_new {
        sync_folder(parent_of(path))?;
    }
    Ok(file)
}
