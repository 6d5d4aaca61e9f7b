//! Folders and names that survive a power cut: a new name counts once the folder that holds it is synced.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// The folder that holds `path`; the current one for a bare name.
pub fn parent_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// Creates `folder` and the folders above it that are missing, and makes their names durable. Does nothing
/// to a folder that exists. Returns those that it has made, the outermost first.
///
/// # Errors
/// Those of the system; the name may be taken by something that is not a folder.
pub fn create_folders(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let (mut missing, mut made): (Vec<PathBuf>, _) = (Vec::new(), Vec::new());
    let mut at = folder;
    while !at.is_dir() {
        missing.push(at.to_path_buf());
        at = parent_of(at);
        if at == Path::new(".") {
            break;
        }
    }
    for path in missing.into_iter().rev() {
        let parent = parent_of(&path).to_path_buf();
        match fs::create_dir(&path) {
            // Another process may have created it meanwhile.
            Err(cause) if cause.kind() == ErrorKind::AlreadyExists && path.is_dir() => {}
            other => {
                other?;
                made.push(path);
            }
        }
        sync_folder(&parent)?;
    }
    Ok(made)
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

/// The first name in `folder` that `is_own` does not pick; `None` if there is none, or no such folder.
///
/// # Errors
/// Those of the system; [`ErrorKind::NotADirectory`] for a file or a link.
pub fn added_name(folder: &Path, is_own: impl Fn(&str) -> bool) -> io::Result<Option<OsString>> {
    let names = names(folder)?;
    Ok(names.into_iter().find(|name| !name.to_str().is_some_and(&is_own)))
}

/// Removes the files of `folder` whose names `is_own` picks, and then the folder if it is empty: what others have put there
/// stays. A folder that does not exist counts as removed. Returns whether it is gone.
///
/// # Errors
/// Those of the system; [`ErrorKind::NotADirectory`] for a file or a link, which stays as it is.
pub fn remove_own(folder: &Path, is_own: impl Fn(&str) -> bool) -> io::Result<bool> {
    let names = names(folder)?;
    for path in names.iter().filter(|name| name.to_str().is_some_and(&is_own)).map(|name| folder.join(name)) {
        let removed = match path.symlink_metadata() {
            // A folder in the place of a file goes if nothing is in it.
            Ok(found) if found.is_dir() => fs::remove_dir(&path),
            _ => fs::remove_file(&path),
        };
        match removed {
            Err(cause) if !matches!(cause.kind(), ErrorKind::NotFound | ErrorKind::DirectoryNotEmpty) => {
                return Err(cause);
            }
            _ => {}
        }
    }
    match fs::remove_dir(folder) {
        Err(cause) if cause.kind() == ErrorKind::DirectoryNotEmpty => Ok(false),
        Err(cause) if cause.kind() != ErrorKind::NotFound => Err(cause),
        _ => Ok(true),
    }
}

/// The names in a folder, sorted; none if it does not exist.
fn names(folder: &Path) -> io::Result<Vec<OsString>> {
    match folder.symlink_metadata() {
        Err(cause) if cause.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(cause) => return Err(cause),
        Ok(found) if !found.is_dir() => return Err(ErrorKind::NotADirectory.into()),
        Ok(_) => {}
    }
    let mut names = Vec::new();
    for entry in fs::read_dir(folder)? {
        names.push(entry?.file_name());
    }
    names.sort();
    Ok(names)
}
