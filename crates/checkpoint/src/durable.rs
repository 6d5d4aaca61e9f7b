//! Bytes that survive a power cut: a file is synced before its name counts, and a name counts once
//! its folder is synced.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use crate::{CheckpointError, Result};

/// Writes a whole file and syncs it; its name needs [`sync_folder`] afterwards.
pub(crate) fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    File::create(path)
        .and_then(|mut file| {
            file.write_all(bytes)?;
            file.sync_all()
        })
        .map_err(CheckpointError::writing(path))
}

/// Makes the names in `folder` durable.
pub(crate) fn sync_folder(folder: &Path) -> Result<()> {
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(CheckpointError::writing(folder))
}

/// Gives a file or folder another name in the same folder. The folder still needs a sync.
pub(crate) fn rename(from: &Path, to: &Path) -> Result<()> {
    fs::rename(from, to).map_err(CheckpointError::writing(to))
}

/// Removes a folder and what is in it; one that is not there is as good as removed.
pub(crate) fn remove_folder(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(cause) if cause.kind() != io::ErrorKind::NotFound => {
            Err(CheckpointError::Write { path: folder.to_path_buf(), cause })
        }
        _ => Ok(()),
    }
}
