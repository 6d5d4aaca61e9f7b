//! A file that appears whole or not at all.
//!
//! Bytes go to a hidden file beside the target; `commit` syncs it, renames it over the target and
//! syncs the folder, so a reader sees the old file or the new one, also after a crash. Dropped without
//! commit, the hidden file is removed.

use std::fs::{self, File};
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process;

use crate::{DataError, Result};

/// A file being written; see the head of this module.
pub(crate) struct AtomicFile {
    /// `None` only after `commit`.
    file: Option<BufWriter<File>>,
    hidden: PathBuf,
    target: PathBuf,
}

impl AtomicFile {
    /// Starts writing `target`, creating its folder.
    ///
    /// # Errors
    /// [`DataError::Write`] when the name is no file name or the folder cannot be written.
    pub(crate) fn create(target: &Path) -> Result<AtomicFile> {
        let write = |cause| DataError::writing(target)(cause);
        let Some(name) = target.file_name() else {
            return Err(write(io::Error::other("the path names no file")));
        };
        let mut hidden_name = std::ffi::OsString::from(".");
        hidden_name.push(name);
        hidden_name.push(format!(".{}.tmp", process::id()));
        let hidden = target.with_file_name(hidden_name);
        fs::create_dir_all(folder_of(target)).map_err(write)?;
        let file = File::create(&hidden).map_err(write)?;
        Ok(AtomicFile {
            file: Some(BufWriter::with_capacity(1 << 18, file)),
            hidden,
            target: target.to_path_buf(),
        })
    }

    /// Appends `bytes`.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let target = &self.target;
        open(&mut self.file).write_all(bytes).map_err(DataError::writing(target))
    }

    /// Replaces the first bytes of the file by `bytes` and returns to its end.
    pub(crate) fn rewrite_head(&mut self, bytes: &[u8]) -> Result<()> {
        let target = &self.target;
        let file = open(&mut self.file);
        file.seek(SeekFrom::Start(0))
            .and_then(|_| file.write_all(bytes))
            .and_then(|()| file.seek(SeekFrom::End(0)))
            .map(|_| ())
            .map_err(DataError::writing(target))
    }

    /// Makes the file durable and visible under its name.
    pub(crate) fn commit(mut self) -> Result<()> {
        let target = self.target.clone();
        self.finish().map_err(DataError::writing(&target))
    }

    fn finish(&mut self) -> io::Result<()> {
        let file = open(&mut self.file);
        file.flush()?;
        file.get_ref().sync_all()?;
        fs::rename(&self.hidden, &self.target)?;
        self.file = None;
        File::open(folder_of(&self.target))?.sync_all()
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if self.file.take().is_some() {
            // Best effort: there is nobody to tell, and a hidden leftover harms nothing.
            let _ = fs::remove_file(&self.hidden);
        }
    }
}

/// The folder that holds `path`; the current one for a bare name.
fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

fn open(file: &mut Option<BufWriter<File>>) -> &mut BufWriter<File> {
    file.as_mut().expect("the file is open until commit, which consumes it")
}
