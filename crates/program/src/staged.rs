//! Changes the files that set a run up together, or not at all.
//!
//! They are prepared in `.next` inside the run folder, while everything is checked. A refusal removes `.next`;
//! nothing else has changed. When all is well, one rename makes `.next` to `.ready`: from then on the change
//! counts. Its files then move to their places one by one, and a crash in between is finished by the next
//! start ([`finish`]), which moves the rest. So `config.toml`, `given.toml`, `plan.json`, `checksums.json`,
//! `tokens.bin` and `tokenizer.json` always belong together for whoever holds the folder's lock.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use phalanx_data::TOKENIZER_FILE;
use phalanx_files::{create_folders, remove_folder, sync_folder};
use phalanx_train::dataset::TOKENS_FILE;
use phalanx_train::run_files::CONFIG_FILE;

use crate::checksums::CHECKSUMS_FILE;
use crate::run_folder::{GIVEN_FILE, PLAN_FILE};

/// Folder in which files are prepared.
const NEXT: &str = ".next";

/// The same folder once the change is committed.
const READY: &str = ".ready";

/// Marker in `.ready` for a new run: files of an earlier start must be removed.
const STARTS: &str = "starts";

/// Files that are prepared here and must be replaced together.
const FILES: [&str; 6] = [CONFIG_FILE, GIVEN_FILE, PLAN_FILE, CHECKSUMS_FILE, TOKENS_FILE, TOKENIZER_FILE];

/// Files that are prepared for a run folder. They are removed if this is dropped before [`Staged::commit`].
pub struct Staged {
    run: PathBuf,
    next: PathBuf,
}

impl Staged {
    /// An empty staging folder for the run folder `run`, whose lock must be held.
    ///
    /// # Errors
    /// A folder that cannot be written.
    pub fn new(run: &Path) -> Result<Staged> {
        let next = run.join(NEXT);
        remove_folder(&next).and_then(|()| create_folders(&next)).with_context(|| writing(&next))?;
        Ok(Staged { run: run.to_path_buf(), next })
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
        assert!(FILES.contains(&name), "{name} is not one of the files that change together");
        let path = self.next.join(name);
        phalanx_files::write(&path, text).with_context(|| writing(&self.run.join(name)))
    }

    /// Moves the files to their final names. With `starts`, files of [`FILES`] that were not prepared are removed.
    ///
    /// # Errors
    /// A disk that cannot be written, a folder in the place of a file. The change is applied completely or not at all.
    pub fn commit(self, starts: bool) -> Result<()> {
        if let Some(folder) = FILES.map(|name| self.run.join(name)).into_iter().find(|path| path.is_dir()) {
            bail!("{} is a folder, and a run writes a file there: move it away", folder.display());
        }
        if starts {
            let marker = self.next.join(STARTS);
            phalanx_files::write(&marker, "").with_context(|| writing(&marker))?;
        }
        let ready = self.run.join(READY);
        phalanx_files::rename(&self.next, &ready).with_context(|| writing(&ready))?;
        finish(&self.run)
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        // After a commit, the folder no longer exists; otherwise the next start removes what remains.
        let _ = remove_folder(&self.next);
    }
}

/// Completes a committed change that was interrupted, and removes an uncommitted one. The caller must hold the folder's
/// lock.
///
/// # Errors
/// A disk that cannot be written; the next call continues.
pub fn finish(run: &Path) -> Result<()> {
    let (next, ready) = (run.join(NEXT), run.join(READY));
    move_files(run, &ready).and_then(|()| remove_folder(&next)).with_context(|| writing(run))
}

fn move_files(run: &Path, ready: &Path) -> io::Result<()> {
    let is_there = |path: &Path| path.symlink_metadata().is_ok();
    if !is_there(ready) {
        return Ok(());
    }
    let marker = ready.join(STARTS);
    if is_there(&marker) {
        // Done before the first file is moved, so that no moved file is removed.
        for name in FILES {
            match fs::remove_file(run.join(name)) {
                Err(cause) if cause.kind() == ErrorKind::NotFound => {}
                other => other?,
            }
        }
        sync_folder(run)?;
        fs::remove_file(&marker)?;
        sync_folder(ready)?;
    }
    for name in FILES.into_iter().filter(|name| is_there(&ready.join(name))) {
        phalanx_files::rename(&ready.join(name), &run.join(name))?;
    }
    remove_folder(ready)?;
    sync_folder(run)
}

fn writing(path: &Path) -> String {
    let advice = "free space, give this user the right to write there, or choose another folder with --run";
    format!("cannot write {} ({advice})", path.display())
}
