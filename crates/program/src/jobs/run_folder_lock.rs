//! The lock of a run folder, in which one run works at a time.
//!
//! Every process that writes there holds the lock: the launcher and, because the descriptor is inherited, each rank. So
//! the folder is free only when the last rank is gone, even if the launcher was killed. Whoever acquires the lock also
//! cleans up after killed runs.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use phalanx_system::files::{FolderLock, LOCK_FILE, LockError};
use phalanx_system::host::process::{Identity, Whereabouts};
use phalanx_train::run_files::is_memory_part;

use crate::folders::ownership::{check_own, is_run};
use crate::folders::run_folder::RunFolder;
use crate::folders::run_names::SETUP_FILES;
use crate::folders::staged;
use crate::host::output::note;
use crate::jobs::hosts::is_token;

/// Time within which the ranks of a launcher that was killed end.
const ENDING: Duration = Duration::from_secs(3);

/// The lock of a run folder, which allows this process to write there.
pub struct RunFolderLock {
    folder: RunFolder,
    lock: FolderLock,
    /// The folders that were made for it.
    made: Vec<PathBuf>,
}

impl RunFolderLock {
    /// Creates the folder if needed, locks it, and cleans up after a killed run.
    ///
    /// # Errors
    /// A folder that cannot be created or written, or that another process uses; the error names the process.
    pub fn acquire(folder: &RunFolder) -> Result<RunFolderLock> {
        let path = folder.path();
        let deadline = Instant::now() + ENDING;
        let mut made = Vec::new();
        let lock = loop {
            made.append(&mut folder.create()?);
            match FolderLock::acquire(path, &Identity::own().to_text()) {
                Ok(lock) => break lock,
                Err(LockError::Held { holder }) => {
                    let holder = Identity::parse(&holder);
                    let ends =
                        holder.as_ref().is_none_or(|holder| holder.whereabouts() == Whereabouts::Ended);
                    if !ends || Instant::now() > deadline {
                        return Err(held(path, holder.as_ref()));
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
        let held = RunFolderLock { folder: folder.clone(), lock, made };
        match held.clean_up() {
            Ok(()) => Ok(held),
            Err(error) => {
                held.leave();
                Err(error)
            }
        }
    }

    /// Lets ranks that are started later inherit the lock.
    ///
    /// # Errors
    /// The system's.
    pub fn share_with_ranks(&self) -> Result<()> {
        self.lock.share_with_children().context("the lock of the run folder")
    }

    /// For a start that was refused: removes what it has made, and nothing else. A run's folder stays as it is, unless
    /// [`RunFolderLock::acquire`] made it and the run has no results.
    pub fn leave(self) {
        // The error that led here is reported instead; what remains does no harm.
        let _ = self.remove_made();
    }

    fn remove_made(self) -> Result<()> {
        let path = self.folder.path();
        if is_run(path).unwrap_or(false) {
            if self.made.is_empty() || self.folder.has_results()? {
                return Ok(());
            }
            for name in SETUP_FILES {
                check_own(path, [name])?;
                let _ = std::fs::remove_file(path.join(name));
            }
            let _ = std::fs::remove_dir(self.folder.checkpoints());
        }
        self.lock.remove()?;
        self.made.iter().rev().try_for_each(std::fs::remove_dir)?;
        Ok(())
    }

    /// Removes files of writers that were killed and finishes a change that was interrupted.
    fn clean_up(&self) -> Result<()> {
        let path = self.folder.path();
        if let Some(done) = staged::finish(path)? {
            note(&done);
        }
        // In somebody else's folder, only what has a name that nobody else gives.
        let is_run = is_run(path).unwrap_or(false);
        let leftovers = || {
            phalanx_system::files::remove_temporary(path)?;
            for entry in std::fs::read_dir(path)? {
                let entry = entry?;
                let name = entry.file_name();
                let is_left = |name| (is_run && is_memory_part(name)) || is_token(&entry.path(), name);
                if entry.file_type()?.is_file() && name.to_str().is_some_and(is_left) {
                    std::fs::remove_file(entry.path())?;
                }
            }
            Ok::<_, std::io::Error>(())
        };
        leftovers().with_context(|| format!("cannot remove what a killed run left in {}", path.display()))?;
        if is_run {
            phalanx_checkpoint::settle(&self.folder.checkpoints())?;
        }
        Ok(())
    }
}

fn held(path: &Path, holder: Option<&Identity>) -> anyhow::Error {
    let path = path.display();
    let Some(holder) = holder else {
        return anyhow!(
            "the run folder {path} is in use by another process: wait for it or stop it, or choose another folder \
             with --run; nothing was changed"
        );
    };
    let Identity { pid, host, .. } = holder;
    match holder.whereabouts() {
        Whereabouts::Here => anyhow!(
            "the run folder {path} is in use by process {pid}: wait for it or stop it (kill {pid}), or \
             choose another folder with --run; nothing was changed"
        ),
        Whereabouts::Ended => anyhow!(
            "the run folder {path} is in use by ranks of process {pid}, which itself has ended: stop them \
             (`ps` shows them), or choose another folder with --run; nothing was changed"
        ),
        Whereabouts::OtherNamespace => anyhow!(
            "the run folder {path} is in use by a process of this machine that has the number {pid} in another container, or outside \
             of this one: wait for it or stop it there, or choose another folder with --run; nothing was changed"
        ),
        Whereabouts::OtherMachine => anyhow!(
            "the run folder {path} is in use by process {pid} on {host}: wait for it or stop it there, or choose another folder with \
             --run; nothing was changed"
        ),
    }
}
