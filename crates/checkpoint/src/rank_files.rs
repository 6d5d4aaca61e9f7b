//! The files of a checkpoint, opened together.
//!
//! A training run removes old checkpoints while others read them. An open file stays readable after it
//! was removed, so opening a checkpoint opens all of its files. A reader that is too late for that gets an error at once
//! ([`HeldFolder::check`]), before it has read anything.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use phalanx_system::files::HeldFolder;

use crate::manifest::{HeaderRecord, Manifest, digest};
use crate::{CheckpointError, Result};

/// Headers are small: a name and three numbers for each piece.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// The open data files of a checkpoint.
#[derive(Debug)]
pub(crate) struct RankFiles {
    dir: PathBuf,
    /// Does not contain files that are missing or could not be opened.
    open: BTreeMap<String, Arc<File>>,
}

impl RankFiles {
    /// Opens those files of `manifest` in `dir` that exist.
    pub(crate) fn open(dir: &Path, manifest: &Manifest) -> RankFiles {
        let file = |name: &String| Some((name.clone(), Arc::new(open(&dir.join(name)).ok()?)));
        RankFiles { dir: dir.to_path_buf(), open: manifest.files.keys().filter_map(file).collect() }
    }

    /// One file; opened now if it could not be opened before.
    pub(crate) fn get(&self, name: &str) -> io::Result<Arc<File>> {
        match self.open.get(name) {
            Some(file) => Ok(Arc::clone(file)),
            None => open(&self.dir.join(name)).map(Arc::new),
        }
    }

    /// Compares length and header of every file with the manifest.
    pub(crate) fn check(&self, manifest: &Manifest) -> Result<()> {
        for (name, &expected) in &manifest.files {
            let path = self.dir.join(name);
            let wrong_size =
                |found| Err(CheckpointError::WrongSize { path: path.clone(), expected, found, tensor: None });
            let file = match self.get(name) {
                Err(cause) if cause.kind() == io::ErrorKind::NotFound => return wrong_size(0),
                other => other.map_err(CheckpointError::reading(&path))?,
            };
            let found = file.metadata().map_err(CheckpointError::reading(&path))?.len();
            if found != expected {
                return wrong_size(found);
            }
            if let Some(header) = manifest.headers.get(name) {
                check_header(&path, &file, header)?;
            }
        }
        Ok(())
    }
}

fn open(path: &Path) -> io::Result<File> {
    phalanx_system::files::open_regular(path)
}

fn check_header(path: &Path, file: &File, header: &HeaderRecord) -> Result<()> {
    let bad = |reason: String| CheckpointError::TensorFile { path: path.to_path_buf(), reason };
    if header.bytes > MAX_HEADER_BYTES {
        return Err(bad(format!("the manifest gives its header {} bytes", header.bytes)));
    }
    let mut bytes = vec![0; header.bytes as usize];
    file.read_exact_at(&mut bytes, 0).map_err(CheckpointError::reading(path))?;
    if digest(&bytes) == header.blake3 {
        return Ok(());
    }
    let reason = "the checksum of its header does not match: load another checkpoint or copy this one again";
    Err(bad(reason.to_string()))
}

/// Runs `open` on the folder `dir`. `None` when the folder was renamed, removed or replaced meanwhile, so that the
/// result of `open` is meaningless.
pub(crate) fn undisturbed<T>(dir: &Path, open: impl FnOnce() -> Result<T>) -> Option<Result<T>> {
    match HeldFolder::hold(dir, &[]) {
        Ok(folder) => {
            let opened = open();
            folder.check().is_ok().then_some(opened)
        }
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => None,
        Err(cause) => Some(Err(CheckpointError::reading(dir)(cause))),
    }
}
