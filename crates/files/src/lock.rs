//! One process at a time changes a folder.
//!
//! The lock is `flock` on a file in the folder, which the system gives up when the last descriptor of it is
//! closed, however the process ends. The file stays and holds the process id of its last holder, for
//! messages only. Child processes that inherit the descriptor ([`FolderLock::share_with_children`]) hold the
//! lock, too.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};

/// Name of the file that is locked.
pub const LOCK_FILE: &str = ".lock";

/// Attempts to lock a folder that another process removes and makes at the same time.
const ATTEMPTS: usize = 10;

/// A locked folder; unlocked when it is dropped (and when every process that inherited it has ended).
#[derive(Debug)]
pub struct FolderLock {
    file: File,
}

/// Why a folder could not be locked.
#[derive(Debug)]
pub enum LockError {
    /// Another process holds the lock.
    Held {
        /// Its process id, where the lock file tells it.
        process: Option<u32>,
    },
    /// The file system has no locks, or refuses them.
    Failed(io::Error),
}

impl FolderLock {
    /// Locks `folder`, which must exist. Does not wait.
    ///
    /// # Errors
    /// [`LockError::Held`] when another process holds the lock; [`LockError::Failed`] for what the system
    /// refuses.
    pub fn acquire(folder: &Path) -> Result<FolderLock, LockError> {
        let path = folder.join(LOCK_FILE);
        for _ in 0..ATTEMPTS {
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
            let file = open(&path, flags, Mode::from_raw_mode(0o644)).map_err(failed)?;
            let mut file = File::from(file);
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(rustix::io::Errno::WOULDBLOCK) => {
                    return Err(LockError::Held { process: holder(&mut file) });
                }
                Err(cause) => return Err(failed(cause)),
            }
            // A holder that removed the folder before it let go leaves us with a file that has no name.
            if is_at(&file, &path).map_err(LockError::Failed)? {
                note_holder(&mut file).map_err(LockError::Failed)?;
                return Ok(FolderLock { file });
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

fn note_holder(file: &mut File) -> io::Result<()> {
    file.set_len(0)?;
    file.rewind()?;
    writeln!(file, "{}", std::process::id())
}

fn holder(file: &mut File) -> Option<u32> {
    let mut text = String::new();
    file.take(32).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}
