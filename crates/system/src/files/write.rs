//! A file that appears whole or not at all.
//!
//! Bytes go to a file without a name (`O_TMPFILE`), so an interruption leaves nothing behind. [`commit`]
//! syncs it, gives it the target's name, and syncs the folder. Where the target exists, the file gets a
//! temporary name first, for as long as one `rename` takes. File systems without `O_TMPFILE` get the
//! temporary name at the start. It is unpredictable and created exclusively: nobody can plant a link there.
//!
//! [`commit`]: AtomicFile::commit

use std::fs::{self, File};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, BufWriter, ErrorKind, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, linkat, open};

use super::folder::{create_folders, parent_of, sync_folder};

/// Bytes that are gathered before they are written.
const BUFFER_BYTES: usize = 1 << 18;

/// Permissions of new files, less the user's umask.
const MODE: Mode = Mode::from_raw_mode(0o666);

/// A file being written. Dropped without [`AtomicFile::commit`], it leaves nothing behind.
pub struct AtomicFile {
    file: BufWriter<File>,
    target: PathBuf,
    /// The name that must be removed if the file is not committed; `None` while it has no name.
    temporary: Option<PathBuf>,
}

impl AtomicFile {
    /// Starts to write `target`; creates its folder if it is missing.
    ///
    /// # Errors
    /// A path without a file name, the name of a folder or a device, a folder that cannot be created or
    /// written.
    pub fn create(target: &Path) -> io::Result<AtomicFile> {
        if target.file_name().is_none() {
            return Err(io::Error::new(ErrorKind::InvalidInput, "the path names no file"));
        }
        match fs::metadata(target) {
            Ok(found) if found.is_dir() => {
                return Err(io::Error::new(ErrorKind::IsADirectory, "a folder has this name"));
            }
            // A file that takes the name of `/dev/null` would break every other program.
            Ok(found) if !found.is_file() => {
                let reason = "it is a device, a FIFO or a socket; a regular file is expected";
                return Err(io::Error::new(ErrorKind::InvalidInput, reason));
            }
            Ok(_) | Err(_) => {}
        }
        let folder = parent_of(target);
        create_folders(folder)?;
        let (file, temporary) = match unnamed(folder) {
            Some(file) => (file, None),
            None => {
                let temporary = temporary_path(folder);
                let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
                (File::from(open(&temporary, flags, MODE)?), Some(temporary))
            }
        };
        let file = BufWriter::with_capacity(BUFFER_BYTES, file);
        Ok(AtomicFile { file, target: target.to_path_buf(), temporary })
    }

    /// The name that the file will have.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// Replaces the first bytes of the file by `bytes` and returns to its end.
    ///
    /// # Errors
    /// Those of the system.
    pub fn rewrite_head(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.seek(SeekFrom::Start(0))?;
        self.file.write_all(bytes)?;
        self.file.seek(SeekFrom::End(0)).map(drop)
    }

    /// Makes the file durable and visible under its name; replaces what had that name.
    ///
    /// # Errors
    /// Those of the system; then what had the name is untouched.
    pub fn commit(mut self) -> io::Result<()> {
        self.file.flush()?;
        self.file.get_ref().sync_all()?;
        if self.temporary.is_none() {
            match self.link(&self.target) {
                Ok(()) => return sync_folder(parent_of(&self.target)),
                Err(cause) if cause.kind() == ErrorKind::AlreadyExists => {}
                Err(cause) => return Err(cause),
            }
            let temporary = temporary_path(parent_of(&self.target));
            self.link(&temporary)?;
            self.temporary = Some(temporary);
        }
        let temporary = self.temporary.as_ref().expect("it has been given a name");
        fs::rename(temporary, &self.target)?;
        self.temporary = None;
        sync_folder(parent_of(&self.target))
    }

    /// Gives a name to the file that has none.
    fn link(&self, name: &Path) -> io::Result<()> {
        let own = descriptor_path(self.file.get_ref());
        Ok(linkat(CWD, &own, CWD, name, AtFlags::SYMLINK_FOLLOW)?)
    }
}

impl Write for AtomicFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary {
            // There is nobody to tell, and a leftover harms nothing; `remove_temporary` finds it later.
            let _ = fs::remove_file(temporary);
        }
    }
}

/// Writes a whole file as [`AtomicFile`] does.
///
/// # Errors
/// Those of [`AtomicFile::create`] and of the system; then what had the name is untouched.
pub fn write(target: &Path, bytes: impl AsRef<[u8]>) -> io::Result<()> {
    let mut file = AtomicFile::create(target)?;
    file.write_all(bytes.as_ref())?;
    file.commit()
}

/// Writes a file that the user named for output, as [`write()`] does; but its folder must exist, a link is
/// followed, and a device or FIFO (`/dev/stdout`) takes the bytes as they come.
///
/// # Errors
/// Those of the system.
pub fn write_output(target: &Path, bytes: impl AsRef<[u8]>) -> io::Result<()> {
    match fs::metadata(target) {
        Ok(found) if !found.is_file() && !found.is_dir() => {
            File::options().write(true).open(target)?.write_all(bytes.as_ref())
        }
        Ok(_) => write(&fs::canonicalize(target)?, bytes),
        Err(cause) if cause.kind() == ErrorKind::NotFound => {
            fs::metadata(parent_of(target))?;
            write(target, bytes)
        }
        Err(cause) => Err(cause),
    }
}

/// Returns whether a file name is a temporary name of this module.
pub fn is_temporary(name: &str) -> bool {
    let middle = name.strip_prefix(".phalanx-").and_then(|rest| rest.strip_suffix(".tmp"));
    middle.is_some_and(|middle| middle.len() == 16 && middle.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

/// Removes the temporary files of writers that were killed. Only for who knows that nobody writes in
/// `folder` now (see [`FolderLock`](super::FolderLock)).
///
/// # Errors
/// Those of the system.
pub fn remove_temporary(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_name().to_str().is_some_and(is_temporary) && entry.file_type()?.is_file() {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// A new file without a name; `None` where the file system has no such files.
fn unnamed(folder: &Path) -> Option<File> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = File::from(open(folder, flags, MODE).ok()?);
    // The only way to give it a name without privileges leads over /proc, which a container may lack.
    descriptor_path(&file).exists().then_some(file)
}

fn descriptor_path(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// A name that nobody can foresee: the standard library's hash keys come from the system's random numbers.
pub(crate) fn temporary_path(folder: &Path) -> PathBuf {
    folder.join(format!(".phalanx-{:016x}.tmp", RandomState::new().hash_one(folder)))
}
