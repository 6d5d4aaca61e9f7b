//! Walks a folder, in the order of names, and follows links: into no folder twice, so loops end.

use std::collections::HashSet;
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::found::Found;
use crate::content::extension;
use crate::limits::{CORPUS_DEPTH, CORPUS_ENTRIES};
use crate::{DataError, Result};

/// By this file, programs mark a folder that they can make again: <https://bford.info/cachedir/>.
const CACHE_TAG: &str = "CACHEDIR.TAG";

/// Beginning of the content of that file.
const CACHE_SIGNATURE: &[u8] = b"Signature: 8a477f597d28d172789f06886806bc55";

/// By this file, Cargo knows its build folder.
const BUILD_INFO: &str = ".rustc_info.json";

/// Adds the files below `folder`, which the user has named.
///
/// # Errors
/// Files and folders that cannot be read, and too many or too deeply nested folders.
pub(super) fn walk(folder: &Path, found: &mut Found) -> Result<()> {
    Walk { seen: HashSet::new(), found }.folder(folder, 0)
}

struct Walk<'a, 'b> {
    /// Device and number of every folder that was read.
    seen: HashSet<(u64, u64)>,
    found: &'a mut Found<'b>,
}

impl Walk<'_, '_> {
    fn folder(&mut self, folder: &Path, depth: usize) -> Result<()> {
        let refuse =
            |what: String| Err(DataError::Read { path: folder.to_path_buf(), cause: io::Error::other(what) });
        let metadata = fs::metadata(folder).map_err(DataError::reading(folder))?;
        if !self.seen.insert((metadata.dev(), metadata.ino())) {
            self.leave_out("folder that was read already by another name", folder);
            return Ok(());
        }
        if depth > CORPUS_DEPTH {
            return refuse(format!(
                "folders are nested more than {CORPUS_DEPTH} deep: give a folder further down"
            ));
        }
        if depth > 0 && is_made_again(folder) {
            self.leave_out("build or cache folder (it has .rustc_info.json or CACHEDIR.TAG)", folder);
            return Ok(());
        }
        let entries = sorted_entries(folder)?;
        self.found.entries += entries.len();
        if self.found.entries > CORPUS_ENTRIES {
            return refuse(format!(
                "with it there are more than {CORPUS_ENTRIES} files and folders: join small files into larger ones"
            ));
        }
        entries.into_iter().try_for_each(|path| self.entry(path, depth))
    }

    fn entry(&mut self, path: PathBuf, depth: usize) -> Result<()> {
        let is_hidden = path.file_name().unwrap_or_default().as_encoded_bytes().starts_with(b".");
        if is_hidden {
            self.leave_out("hidden file or folder", &path);
            return Ok(());
        }
        let Ok(metadata) = fs::metadata(&path) else {
            let reason = "link to nothing (fetch or restore what it points to)";
            self.found.findings.skipped_files.add(reason, 0, || path.display().to_string());
            return Ok(());
        };
        if metadata.is_dir() {
            return self.folder(&path, depth + 1);
        }
        let extensions = &self.found.extensions;
        if !extensions.is_empty() && !extensions.contains(&extension(&path)) {
            self.leave_out("file with another extension than those that were asked for", &path);
            return Ok(());
        }
        if !metadata.is_file() {
            self.leave_out("neither file nor folder", &path);
            return Ok(());
        }
        self.found.add_found(path)
    }

    fn leave_out(&mut self, what: &str, path: &Path) {
        self.found.findings.left_out.add(what, 0, || path.display().to_string());
    }
}

/// Returns whether a program has marked a folder as one that it can make again.
fn is_made_again(folder: &Path) -> bool {
    let mut tag = Vec::new();
    let read = |tag: &mut Vec<u8>| {
        let file = phalanx_system::files::open_regular(&folder.join(CACHE_TAG))?;
        file.take(CACHE_SIGNATURE.len() as u64).read_to_end(tag)
    };
    folder.join(BUILD_INFO).is_file() || (read(&mut tag).is_ok() && tag == CACHE_SIGNATURE)
}

/// The entries of `folder` by name, so that every machine walks in the same order.
fn sorted_entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).map_err(DataError::reading(folder))?;
    let mut paths = Vec::new();
    // One more entry than is allowed is enough to refuse.
    for entry in entries.take(CORPUS_ENTRIES + 1) {
        paths.push(entry.map_err(DataError::reading(folder))?.path());
    }
    paths.sort();
    Ok(paths)
}
