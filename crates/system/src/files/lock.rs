//! One process at a time changes a folder.
//!
//! The lock is `flock` on a file in the folder, which the system gives up when the last descriptor of it is
//! closed, however the process ends. The file stays and says who held it last, for messages only. Whoever may open it may
//! lock it, so only its user may. Child processes that inherit the descriptor ([`FolderLock::share_with_children`]) hold the
//! lock, too.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, OFlags, fchmod, flock, open};

/// Name of the file that is locked.
pub const LOCK_FILE: &str = ".lock";

/// The first line of the file; behind it is what the holder says of itself.
const HEAD: &str = "lock of a Phalanx run\n";

/// Largest number of bytes of the file.
const BYTES: u64 = 1024;

/// Only the user may open it.
const MODE: Mode = Mode::from_raw_mode(0o600);

/// Attempts to lock a folder that another process removes and makes at the same time.
const ATTEMPTS: usize = 10;

/// A locked folder; unlocked when it is dropped (and when every process that inherited it has ended).
#[derive(Debug)]
pub struct FolderLock {
    file: File,
    path: PathBuf,
}

/// Why a folder could not be locked.
#[derive(Debug)]
pub enum LockError {
    /// Another process holds the lock.
    Held {
        /// The holder's description of itself; empty if the lock file has none.
        holder: String,
    },
    /// The file system has no locks, or refuses them; or the file is not a lock.
    Failed(io::Error),
}

impl FolderLock {
    /// Locks `folder`, which must exist, for `holder`: lines that tell others who holds it, at most 900 bytes. Does not wait.
    ///
    /// # Errors
    /// [`LockError::Held`] when another process holds the lock; [`LockError::Failed`] for what the system
    /// refuses, and for a file of this name that is not a lock.
    pub fn acquire(folder: &Path, holder: &str) -> Result<FolderLock, LockError> {
        let path = folder.join(LOCK_FILE);
        for _ in 0..ATTEMPTS {
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
            let mut file = File::from(open(&path, flags, MODE).map_err(failed)?);
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(rustix::io::Errno::WOULDBLOCK) => {
                    let holder = content(&mut file).unwrap_or_default();
                    return Err(LockError::Held { holder });
                }
                Err(cause) => return Err(failed(cause)),
            }
            // A holder that removed the folder before it let go leaves us with a file that has no name.
            if is_at(&file, &path).map_err(LockError::Failed)? {
                content(&mut file).and_then(|_| note_holder(&mut file, holder)).map_err(LockError::Failed)?;
                return Ok(FolderLock { file, path });
            }
        }
        Err(LockError::Failed(io::Error::other("the folder is being removed and made again all the time")))
    }
}

impl FolderLock {
    /// From here on every program that this process starts inherits the lock and holds it as long as it
    /// lives, whatever becomes of this process.
    ///
    /// # Errors
    /// Those of the system.
    pub fn share_with_children(&self) -> io::Result<()> {
        Ok(rustix::io::fcntl_setfd(&self.file, rustix::io::FdFlags::empty())?)
    }

    /// Removes the file, and unlocks.
    ///
    /// # Errors
    /// Those of the system.
    pub fn remove(self) -> io::Result<()> {
        std::fs::remove_file(&self.path)
    }
}

fn failed(cause: rustix::io::Errno) -> LockError {
    LockError::Failed(cause.into())
}

fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let own = file.metadata()?;
    match std::fs::symlink_metadata(path) {
        Ok(found) => Ok((found.dev(), found.ino()) == (own.dev(), own.ino())),
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(cause) => Err(cause),
    }
}

fn note_holder(file: &mut File, holder: &str) -> io::Result<()> {
    let found = file.metadata()?;
    if found.mode() & 0o077 != 0 && found.uid() == rustix::process::geteuid().as_raw() {
        fchmod(&*file, MODE)?;
    }
    file.set_len(0)?;
    file.rewind()?;
    write!(file, "{HEAD}{holder}")
}

/// Reads the holder's description of itself from a lock file; empty in a new one, and in one of an earlier version, which has a
/// process number.
fn content(file: &mut File) -> io::Result<String> {
    let mut text = String::new();
    file.rewind()?;
    let read = Read::by_ref(file).take(BYTES).read_to_string(&mut text);
    let other =
        || io::Error::new(ErrorKind::InvalidData, "it holds something else than a lock: move it away");
    read.map_err(|cause| if cause.kind() == ErrorKind::InvalidData { other() } else { cause })?;
    // A crash may leave a part of it, or zero bytes.
    let rest = text.trim_end_matches(['\n', '\0']);
    match text.strip_prefix(HEAD) {
        Some(holder) => Ok(holder.to_string()),
        None if HEAD.starts_with(rest) || rest.parse::<u32>().is_ok() => Ok(String::new()),
        None => Err(other()),
    }
}
