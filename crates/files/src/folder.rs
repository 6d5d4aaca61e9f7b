//! Folders and names that survive a power cut: a new name counts once the folder that holds it is synced.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// The folder that holds `path`; the current one for a bare name.
pub fn parent_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// Creates `folder` and the folders above it that are missing, and makes their names durable. Does nothing
/// to a folder that exists.
///
/// # Errors
/// Those of the system; the name may be taken by something that is not a folder.
pub fn create_folders(folder: &Path) -> io::Result<()> {
    let mut missing: Vec<PathBuf> = Vec::new();
    let mut at = folder;
    while !at.is_dir() {
        missing.push(at.to_path_buf());
        at = parent_of(at);
        if at == Path::new(".") {
            break;
        }
    }
    for path in missing.iter().rev() {
        match fs::create_dir(path) {
            // Another process may have created it meanwhile.
            Err(cause) if cause.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => {}
            other => other?,
        }
        sync_folder(parent_of(path))?;
    }
    Ok(())
}

/// Makes the names in `folder` durable.
///
/// # Errors
/// Those of the system.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// Gives a file or folder another name and makes the change durable.
///
/// # Errors
/// Those of the system.
pub fn rename(from: &Path, to: &Path) -> io::Result<()> {
    fs::rename(from, to)?;
    let (old, new) = (parent_of(from), parent_of(to));
    sync_folder(new)?;
    if old == new { Ok(()) } else { sync_folder(old) }
}

/// Removes a folder and everything in it. A folder that does not exist counts as removed.
///
/// # Errors
/// Those of the system.
pub fn remove_folder(folder: &Path) -> io::Result<()> {
    match fs::remove_dir_all(folder) {
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
