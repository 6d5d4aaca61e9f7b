//! Changes the files that set a run up together, or not at all.
//!
//! They are prepared in `.next` inside the run folder, while everything is checked. A refusal removes `.next`;
//! nothing else has changed. When all is well, one rename makes `.next` to `.ready`: from then on the change
//! counts. Its files then move to their places one by one, and a crash in between is finished by the next
//! start ([`finish`]), which moves the rest. So `config.toml`, `given.toml`, `plan.json`, `checksums.json`,
//! `tokens.bin` and `tokenizer.json` always belong together for whoever holds the folder's lock.
//!
//! Only the run's own files make room for the new ones (`ownership.rs`). `checksums.json`, which tells them from others, is the
//! last to change. A folder of this name in which no start has left its mark is somebody's own.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use phalanx_system::files::{added_name, create_folders, is_named, is_temporary, remove_own, sync_folder};

use crate::folders::checksums::digest_of_file;
use crate::folders::ownership::{ADVICE, check_folders, check_own};
use crate::folders::run_names::{NEXT, READY, SETUP_FILES};

/// Mark of both folders: the first file to come and the last to go.
const MARK: &str = "phalanx-start";

/// Marker in `.ready` for a new run: files of an earlier start must be removed.
const STARTS: &str = "starts";

/// Files that are prepared for a run folder. They are removed if this is dropped before [`Staged::commit`].
pub struct Staged {
    run: PathBuf,
    next: PathBuf,
}

impl Staged {
    /// An empty staging folder for the run folder `run`, whose lock must be held.
    ///
    /// # Errors
    /// A folder that cannot be written, and what others have put in its place.
    pub fn new(run: &Path) -> Result<Staged> {
        check_folders(run)?;
        let next = run.join(NEXT);
        check_prepared(&next)?;
        remove(&next).with_context(|| writing(&next))?;
        let staged = Staged { run: run.to_path_buf(), next };
        create_folders(&staged.next)
            .and_then(|_| phalanx_system::files::write(&staged.next.join(MARK), ""))
            .with_context(|| writing(&staged.next))?;
        Ok(staged)
    }

    /// Folder to write to.
    pub fn path(&self) -> &Path {
        &self.next
    }

    /// Prepares a file.
    ///
    /// # Errors
    /// A disk that is full or cannot be written.
    pub fn write(&self, name: &str, text: &str) -> Result<()> {
        assert!(SETUP_FILES.contains(&name), "{name} is not one of the files that change together");
        let path = self.next.join(name);
        phalanx_system::files::write(&path, text).with_context(|| writing(&self.run.join(name)))
    }

    /// Moves the files to their final names. With `starts`, files of [`SETUP_FILES`] that were not prepared are removed.
    ///
    /// # Errors
    /// A disk that cannot be written, something in the place of a file that the run has not written. The change is applied
    /// completely or not at all.
    pub fn commit(self, starts: bool) -> Result<()> {
        for name in SETUP_FILES.into_iter().filter(|_| !starts) {
            let (new, old) = (self.next.join(name), self.run.join(name));
            if is_named(&new) && old.is_file() && digest_of_file(&new)? == digest_of_file(&old)? {
                std::fs::remove_file(&new).with_context(|| writing(&new))?;
            }
        }
        check_own(
            &self.run,
            SETUP_FILES.into_iter().filter(|name| starts || is_named(&self.next.join(name))),
        )?;
        if starts {
            let marker = self.next.join(STARTS);
            phalanx_system::files::write(&marker, "").with_context(|| writing(&marker))?;
        }
        let ready = self.run.join(READY);
        phalanx_system::files::rename(&self.next, &ready).with_context(|| writing(&ready))?;
        move_files(&self.run, &ready).with_context(|| writing(&self.run))
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        // After a commit, the folder no longer exists; otherwise the next start removes what remains.
        let _ = remove(&self.next);
    }
}

/// Completes a committed change that was interrupted, and removes an uncommitted one. The caller must hold the folder's
/// lock. Returns what it has done, if there was something to do.
///
/// # Errors
/// Files of others in the place of the run's, a disk that cannot be written; the next call continues.
pub fn finish(run: &Path) -> Result<Option<String>> {
    let (next, ready) = (run.join(NEXT), run.join(READY));
    [&next, &ready].into_iter().try_for_each(|folder| check_prepared(folder))?;
    let done = if is_named(&ready) {
        let starts = is_named(&ready.join(STARTS));
        check_own(run, SETUP_FILES.into_iter().filter(|name| starts || is_named(&ready.join(name))))?;
        move_files(run, &ready).with_context(|| writing(run))?;
        "completes what a start that was interrupted had begun to write"
    } else if is_named(&next) {
        "removes what a start that was interrupted had prepared"
    } else {
        return Ok(None);
    };
    remove(&next).with_context(|| writing(run))?;
    Ok(Some(format!("{}: {done}", run.display())))
}

/// Refuses a folder of prepared files in which no start has left its mark, or others have put something.
fn check_prepared(folder: &Path) -> Result<()> {
    let is_folder = folder.symlink_metadata().is_ok_and(|found| found.is_dir());
    let is_marked = is_named(&folder.join(MARK));
    let is_own = |name: &str| is_temporary(name) || (is_marked && (name == MARK || is_setup(name)));
    let added = match is_named(folder) && !is_folder {
        true => Some(folder.to_path_buf()),
        false => added_name(folder, is_own)
            .with_context(|| format!("cannot read {}", folder.display()))?
            .map(|name| folder.join(name)),
    };
    let Some(added) = added else { return Ok(()) };
    bail!(
        "no run has written {}, and a run prepares its files in the folder {}: {ADVICE}",
        added.display(),
        folder.display()
    )
}

/// Returns whether a start prepares a file of this name.
fn is_setup(name: &str) -> bool {
    SETUP_FILES.contains(&name) || name == STARTS || is_temporary(name)
}

/// Removes a folder of prepared files.
fn remove(folder: &Path) -> io::Result<()> {
    remove_own(folder, is_setup)?;
    remove_own(folder, |name| name == MARK).map(drop)
}

fn move_files(run: &Path, ready: &Path) -> io::Result<()> {
    let marker = ready.join(STARTS);
    if is_named(&marker) {
        // Done before the first file is moved, so that no moved file is removed.
        for name in SETUP_FILES {
            match fs::remove_file(run.join(name)) {
                Err(cause) if cause.kind() == ErrorKind::NotFound => {}
                other => other?,
            }
        }
        sync_folder(run)?;
        fs::remove_file(&marker)?;
        sync_folder(ready)?;
    }
    for name in SETUP_FILES.into_iter().filter(|name| is_named(&ready.join(name))) {
        phalanx_system::files::rename(&ready.join(name), &run.join(name))?;
    }
    remove(ready)?;
    sync_folder(run)
}

fn writing(path: &Path) -> String {
    let advice = "free space, give this user the right to write there, or choose another folder with --run";
    format!("cannot write {} ({advice})", path.display())
}
