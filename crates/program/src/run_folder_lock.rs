//! The lock of a run folder, in which one run works at a time.
//!
//! Every process that writes there holds the lock: the launcher and, because the descriptor is inherited, each rank. So
//! the folder is free only when the last rank is gone, even if the launcher was killed. Whoever acquires the lock also
//! cleans up after killed runs.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use phalanx_files::{FolderLock, LOCK_FILE, LockError};
use phalanx_train::run_files::is_memory_part;

use crate::run_folder::RunFolder;
use crate::staged;

/// Time within which the ranks of a launcher that was killed end.
const ENDING: Duration = Duration::from_secs(3);

/// The lock of a run folder, which allows this process to write there.
pub struct RunFolderLock {
    folder: RunFolder,
    lock: FolderLock,
    is_new: bool,
}

impl RunFolderLock {
    /// Creates the folder if needed, locks it, and cleans up after a killed run.
    ///
    /// # Errors
    /// A folder that cannot be created or written, or that another process uses; the error names the process.
    pub fn acquire(folder: &RunFolder) -> Result<RunFolderLock> {
        let path = folder.path();
        let deadline = Instant::now() + ENDING;
        let (lock, is_new) = loop {
            let is_new = folder.create()?;
            match FolderLock::acquire(path) {
                Ok(lock) => break (lock, is_new),
                Err(LockError::Held { process }) => {
                    let ends = process.is_none_or(|process| !is_alive(process));
                    if !ends || Instant::now() > deadline {
                        return Err(held(path, process));
                    }
                }
                // Another start has just removed the folder that it had created.
                Err(LockError::Failed(_)) if !path.exists() && Instant::now() < deadline => {}
                Err(LockError::Failed(cause)) => {
                    let advice = "give this user the right to write there; the file system must have locks";
                    let file = path.join(LOCK_FILE);
                    return Err(cause).with_context(|| {
                        format!(
                            "cannot lock the run folder {}: {} ({advice})",
                            path.display(),
                            file.display()
                        )
                    });
                }
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        let held = RunFolderLock { folder: folder.clone(), lock, is_new };
        held.clean_up()?;
        Ok(held)
    }

    /// Lets ranks that are started later inherit the lock.
    ///
    /// # Errors
    /// The system's.
    pub fn share_with_ranks(&self) -> Result<()> {
        self.lock.share_with_children().context("the lock of the run folder")
    }

    /// Removes the folder if [`RunFolderLock::acquire`] made it: a start that fails leaves nothing.
    pub fn remove_if_new(self) {
        if self.is_new {
            // The error that led here is reported instead; a folder that remains does no harm.
            let _ = phalanx_files::remove_folder(self.folder.path());
        }
    }

    /// Removes files of writers that were killed and finishes a change that was interrupted.
    fn clean_up(&self) -> Result<()> {
        let path = self.folder.path();
        staged::finish(path)?;
        let leftovers = || {
            phalanx_files::remove_temporary(path)?;
            for entry in std::fs::read_dir(path)? {
                let entry = entry?;
                if entry.file_name().to_str().is_some_and(is_memory_part) && entry.file_type()?.is_file() {
                    std::fs::remove_file(entry.path())?;
                }
            }
            Ok::<_, std::io::Error>(())
        };
        leftovers().with_context(|| format!("cannot remove what a killed run left in {}", path.display()))?;
        Ok(phalanx_checkpoint::settle(&self.folder.checkpoints())?)
    }
}

fn held(path: &Path, process: Option<u32>) -> anyhow::Error {
    let path = path.display();
    match process {
        Some(process) if is_alive(process) => anyhow!(
            "the run folder {path} is in use by process {process}: wait for it or stop it (kill {process}), or \
             choose another folder with --run; nothing was changed"
        ),
        Some(process) => anyhow!(
            "the run folder {path} is in use by ranks of process {process}, which itself has ended: stop them \
             (`ps` shows them), or choose another folder with --run; nothing was changed"
        ),
        None => anyhow!(
            "the run folder {path} is in use by another process: wait for it or stop it, or choose another folder \
             with --run; nothing was changed"
        ),
    }
}

fn is_alive(process: u32) -> bool {
    phalanx_host::process::is_running(process)
}

/// Refuses to write into a run folder without its lock.
///
/// # Errors
/// An error that names the folder.
pub fn refuse_run_folder(path: &Path, option: &str) -> Result<()> {
    if path.join(phalanx_train::run_files::CONFIG_FILE).exists() || path.join("checkpoints").exists() {
        bail!(
            "{option} {} is the folder of a run, whose files would be replaced: choose another folder",
            path.display()
        );
    }
    Ok(())
}
