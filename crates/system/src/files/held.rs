//! Detects whether a folder that a process works in for hours has been removed or replaced.
//!
//! Open files can still be written after their folder was removed, and a path that was created again may be another
//! folder. Only the identity of the folder (device and inode) tells; the system does not reuse it while the folder is
//! held open.

use std::fs::{self, File, Metadata};
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::read::is_named;

/// A folder held open, and the files in it that must stay.
#[derive(Debug)]
pub struct HeldFolder {
    path: PathBuf,
    folder: File,
    names: Vec<String>,
}

impl HeldFolder {
    /// Holds `path`; those of `names` that exist now must stay.
    ///
    /// # Errors
    /// Those of the system.
    pub fn hold(path: &Path, names: &[&str]) -> io::Result<HeldFolder> {
        let folder = File::open(path)?;
        let there = names.iter().filter(|name| is_named(&path.join(name))).map(ToString::to_string);
        Ok(HeldFolder { path: path.to_path_buf(), folder, names: there.collect() })
    }

    /// Checks that the path still leads to this folder, with its files in it.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] with what is missing, and those of the system.
    pub fn check(&self) -> io::Result<()> {
        let gone = |what: String| Err(io::Error::new(ErrorKind::NotFound, what));
        let own = self.folder.metadata()?;
        match fs::metadata(&self.path) {
            Ok(found) if identity(&found) == identity(&own) => {}
            Ok(_) => return gone("another folder took its place".to_string()),
            Err(cause) if cause.kind() == ErrorKind::NotFound => {
                return gone("the folder was removed".to_string());
            }
            Err(cause) => return Err(cause),
        }
        match self.names.iter().find(|name| !is_named(&self.path.join(name))) {
            Some(name) => gone(format!("{name} was removed from it")),
            None => Ok(()),
        }
    }
}

fn identity(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}
